"""From rows of a data set, in the forms that TRL reads, to examples and their tokens; each is checked on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerBase

from dllm_sampler import config
from dllm_sampler.cli import inputs
from dllm_sampler.core.checks import check_number, is_whole
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.errors import UserError, first_line, unknown
from dllm_sampler.host import files
from dllm_sampler.host.paths import expanded
from dllm_sampler.inputs import prompts
from dllm_sampler.inputs.metrics import Metric
from dllm_sampler.models.mini_rewards import solved
from dllm_sampler.models.mini_tasks import LESSONS, draw_example
from dllm_sampler.models.mini_tokenizer import vocabulary
from dllm_sampler.training.masked import Pair

JSON = (".jsonl", ".json")
TABLES = {".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
WHOLE = "train"  # the split of what has no splits
MOST = 10_000  # files of a data set
ANSWERS = ("completion", "answer")  # names of the column, the first as TRL calls it


@dataclass(frozen=True)
class Example:
    """A prompt and its right answer.

    where: the line it is from, or the task
    prompt: as a sampler takes it
    answer: the right text. None if nobody says. Of mini's tasks one right answer of several
    task: of mini's tasks, the name; else empty
    fields: all that the line says
    """

    where: str
    prompt: inputs.Prompt
    answer: Any
    task: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    def right(self, text: str, ids: Sequence[int], metric: Metric) -> float:
        """Return how right an answer is, from 0 to 1."""
        if self.task:
            return float(solved(self.task, str(self.prompt), self.answer, text))
        given: dict[str, Any] = {"prompt": self.prompt, "ids": ids, "line": self.fields, "where": self.where}
        return metric.scores(text, self.answer, **given)["score"]


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a data set.

    prompt: text, token ids or chat messages
    answer: text, or a list of the assistant's message. None stands for `completion` or `answer`
    messages: in place of both; the last one is the assistant's
    chat: prompts are texts of a user that the tokenizer's chat template gets
    """

    prompt: str = "prompt"
    answer: str | None = None
    messages: str = "messages"
    chat: bool = False

    def example(self, where: str, line: Any, answers: bool) -> Example:
        """Return the example of a line.

        Args:
            where: what errors call the line.
            line: a mapping.
            answers: it must have an answer.

        Raises:
            UserError: naming the line and what is wrong with it.
        """
        if not isinstance(line, Mapping):
            raise UserError("example-invalid", f'{where} must be like {{"{self.prompt}": ..., "completion": ...}}')
        if line.get(self.messages) is None and line.get(self.prompt) is None:
            there = ", ".join(map(str, line)) or "none"
            raise UserError(
                "example-invalid",
                f"{where} has neither a column {self.prompt} nor {self.messages} (its columns: {there}). Name yours:"
                " train.data.prompt=COLUMN and train.data.answer=COLUMN, or train.data.messages=COLUMN.",
            )
        names = ANSWERS if self.answer is None else (self.answer,)
        answer = next((line[name] for name in names if line.get(name) is not None), None)
        if line.get(self.messages) is not None:
            prompt = inputs.prompt({"messages": line[self.messages]}, where)
            assert isinstance(prompt, list)
            last: Any = prompt[-1]
            if last["role"] == "assistant":
                prompt, answer = prompt[:-1], last["content"]
        else:
            given = line[self.prompt]
            kind = "messages" if isinstance(given, list) and given and isinstance(given[0], Mapping) else "prompt"
            prompt = inputs.prompt({kind: given}, where)
            prompt = inputs.as_chat(prompt) if self.chat else prompt
        if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], Mapping):
            answer = answer[0].get("content")
        if is_whole(answer):  # a column of numbers in a table
            answer = str(answer)
        if not prompt:
            raise UserError("example-invalid", f"{where} has an empty prompt. Write one or remove the line.")
        tokens = isinstance(answer, list) and all(map(is_whole, answer))
        if answers and not (answer and (isinstance(answer, str) or tokens)):
            raise UserError("example-invalid", f"{where} has no answer. Fill its column {' or '.join(names)}.")
        return Example(where, prompt, answer, fields=dict(line))

    def examples(self, rows: Iterable[Any], answers: bool, named: str) -> list[Example]:
        """Return the examples of all rows of a data set; examples stay as they are."""
        found = [
            row if isinstance(row, Example) else self.example(f"row {number} of {named}", row, answers)
            for number, row in enumerate(rows)
        ]
        if not found:
            raise UserError("nothing-to-learn", f"{named} is empty. Give it at least one example.")
        return found


@dataclass(frozen=True)
class Row:
    """An example in tokens: one row of a batch.

    number: in the data set; together with the step it seeds all that is drawn for the row
    answer: its tokens, which end in an end token. Empty if there is none
    """

    number: int
    example: Example | None
    prompt: Sequence[int]
    answer: Sequence[int] = ()


def columns_of(examples: Sequence[Example]) -> dict[str, list[Any]]:
    """Return what rewards get of examples besides prompts, in columns: `task`, `answer`, and those of the data."""
    names = dict.fromkeys(name for one in examples for name in one.fields if name not in ("prompt", "prompts"))
    found = {name: [one.fields.get(name) for one in examples] for name in names}
    return found | {"task": [one.task for one in examples], "answer": [one.answer for one in examples]}


def drawn(tasks: Mapping[str, float], seed: object, count: int, *, held: bool = False) -> list[Example]:
    """Return examples of mini's tasks, each as often as its share says; `held` ones are used in no training.

    Raises:
        UserError: there is no task, or an unknown one.
    """
    for name, share in tasks.items():
        if name not in LESSONS:
            raise unknown("task", name, LESSONS)
        check_number(f"train.tasks.{name}", share, "a share", finite=True)
    if not any(tasks.values()):
        raise UserError("option-missing", "no examples. Set train.data=FILE.jsonl, or train.tasks={NAME: 1}.")
    rng = Random(f"{seed}/{held}")
    names = rng.choices(list(tasks), list(tasks.values()), k=count)
    found = [(name, *draw_example(LESSONS[name], rng, held=held)) for name in names]
    return [Example(f"the task {name}", prompt, answer, name) for name, prompt, answer in found]


def check_tokenizer(tokenizer: PreTrainedTokenizerBase | None, named: str) -> None:
    """Refuse a model that does not read mini's tasks.

    Raises:
        UserError: its tokenizer is another.
    """
    if tokenizer is None or tokenizer.get_vocab() != vocabulary():
        raise UserError("tokenizer-differs", f"train.model={named} lacks mini's tokenizer. Set train.data=FILE.jsonl.")


@dataclass(frozen=True)
class Data(Columns):
    """The settings `train.data`.

    path: a JSON Lines file; a table (.csv, .parquet); a folder or a hub id that the package datasets loads
    subset, split: of a data set, as `datasets.load_dataset` takes them; a file has neither
    test: another file, or another split, to measure on. None draws what is measured from the examples
    prompt, answer, messages, chat: see `Columns`
    metric: how answers are judged: `exact_match`, `contains`, `regex` or `package.module:function`
    """

    path: str | None = None
    subset: str | None = None
    split: str = WHOLE
    test: str | None = None
    metric: str = "exact_match"

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Data:
        """Return the settings, checked.

        Raises:
            UserError: an unknown field, or a value of the wrong type.
        """
        return cls(**config.check("train.data", cls, settings))

    @property
    def columns(self) -> Columns:
        """The names of the columns."""
        return Columns(**{one.name: getattr(self, one.name) for one in fields(Columns)})

    def load(
        self, seed: int, held_out: int | None, answers: bool, *, most: int = 64, processes: int = 1
    ) -> tuple[list[Example], list[Example]]:
        """Read all examples, and return those to learn from and those to measure on.

        Args:
            seed: of what is held out.
            held_out: examples to measure on. None chooses a tenth of the examples, or all of `test`.
            answers: each must have one.
            most: the largest number that None chooses.
            processes: held-out examples must be as many.

        Raises:
            UserError: the data cannot be read, lacks columns, or leaves nothing to learn from.
        """
        assert self.path is not None
        metric = Metric("train.data.metric", self.metric)
        if self.subset is not None and _is_file(self.path):
            raise UserError("option-not-applicable", f"train.data={self.path} is a file. Remove train.data.subset.")
        train, held = self._examples(self.path, self.split, answers), list[Example]()
        if self.test is not None:
            held = self._examples(*((self.test, WHOLE) if _is_file(self.test) else (self.path, self.test)), answers)
        shuffled = Random(f"{seed}/held").sample(held or train, len(held or train))
        if held_out is None:
            held_out = min(most, len(shuffled) if held else max(processes, len(shuffled) // 10))
        kept = shuffled[:held_out]
        if self.test is None:
            # A prompt that is there twice is held out twice.
            known = {repr(one.prompt) for one in kept}
            train = [one for one in train if repr(one.prompt) not in known]
        if not train:
            raise UserError(
                "nothing-to-learn",
                f"train.data={self.path} has {len(shuffled)} examples, and train.held_out={held_out} leaves none to"
                " learn from. Add examples, or name a file to measure on as train.data.test.",
            )
        if len(kept) < processes:
            raise UserError(
                "option-range", f"{len(kept)} held-out examples for {processes} processes. Raise train.held_out."
            )
        for example in kept if answers else ():
            metric.check(example.answer, example.where)
        return train, kept

    def _examples(self, path: str, split: str, answers: bool) -> list[Example]:
        file = expanded("train.data", path)
        if split != WHOLE and _is_file(path):
            raise UserError(
                "option-not-applicable",
                f"train.data={path} is a file without splits. Use train.data.test, not train.data.split.",
            )
        if file.is_file() and not _is_file(path):
            endings = ", ".join((*JSON, *TABLES))
            raise UserError("file-name", f"train.data={path} has another ending than {endings}. Rename or convert it.")
        try:
            if file.suffix in JSON:
                with file.open(encoding="utf-8") as opened:
                    lines = inputs.records(opened, path)
            else:
                rows = self._table(file, path, split)
                lines = [(f"{path} {split} example {i}", line) for i, line in enumerate(rows, 1)]
        except UserError:
            raise
        except Exception as error:  # whatever datasets, the network or the disk raise
            reason = getattr(error, "strerror", None) or first_line(error)
            named = path if _is_file(path) else f"{path}, split {split}"
            raise UserError("file-unreadable", f"cannot read train.data {named}: {reason}") from None
        if not lines:
            raise UserError("nothing-to-learn", f"train.data={path} has no examples. Name another file or split.")
        return [self.columns.example(where, line, answers) for where, line in lines]

    def _table(self, file: Path, path: str, split: str) -> Any:
        """Return the rows of a table or a data set. No code of it is run."""
        import datasets  # takes a second to import

        if file.suffix in TABLES:
            return datasets.load_dataset(TABLES[file.suffix], data_files=str(file), split=WHOLE)
        if (file / "dataset_info.json").is_file() and split == WHOLE:
            return datasets.load_from_disk(str(file))
        if (file / "dataset_dict.json").is_file():
            return datasets.load_from_disk(str(file))[split]
        if file.is_dir() and next(islice(files.under(file, "*"), MOST, None), None):  # it would look at each
            raise ValueError(f"the folder has more than {MOST} files. Name that of the data set.")
        return datasets.load_dataset(str(file) if file.is_dir() else path, self.subset, split=split)


def _is_file(path: str) -> bool:
    """Return True if a path names a file of lines or a table, and no data set."""
    return Path(path).suffix in (*JSON, *TABLES)


@dataclass(frozen=True)
class Encoder:
    """Encodes examples: the prompt as the sampler reads it, and an answer that ends in an end token.

    tokenizer: of the model
    spec: the model
    most: tokens of a prompt with its answer
    """

    tokenizer: PreTrainedTokenizerBase
    spec: ModelSpec
    most: int

    def __call__(self, example: Example) -> Pair:
        """Return the tokens of prompt and answer.

        Raises:
            UserError: naming the line and what is wrong with it.
        """
        prompt, answer = self.pair(example)
        if len(prompt) + len(answer) > self.most:
            raise UserError(
                "example-too-long",
                f"{example.where} has {len(prompt) + len(answer)} tokens of prompt and answer, and there is room for"
                f" {self.most}. Raise max_length up to the model's context, or set longer=drop to leave such examples"
                " out.",
            )
        return prompt, answer

    def pair(self, example: Example) -> Pair:
        """Return the tokens of prompt and answer, however many these are."""
        if _is_chat(example):
            prompt, answer = self._chat(example)
        else:
            prompt = self._ids(example.prompt, example.where)
            answer = self._answer(example.answer, example.where)
        taken = isinstance(example.answer, list)  # token ids: a target's answer may have a mask token, too
        self._check_tokens(prompt if taken else [*prompt, *answer], example.where)
        ended = taken or answer[-1] in self.spec.eos_ids  # a chat template may have ended it
        return prompt, answer if ended else [*answer, self.spec.eos_id]

    def prompt(self, example: Example, new_tokens: int) -> list[int]:
        """Return the tokens of a prompt alone, whose answer is to be sampled.

        Raises:
            UserError: naming the line and what is wrong with it.
        """
        if _is_chat(example):
            messages: Any = example.prompt
            ids = self._chat_ids(prompts.chat_text(messages, self.tokenizer, example.where))
        else:
            ids = self._ids(example.prompt, example.where)
        self._check_tokens(ids, example.where)
        if len(ids) + new_tokens > self.spec.max_positions:
            raise UserError(
                "example-too-long",
                f"the prompt of {example.where} has {len(ids)} tokens, with new_tokens={new_tokens} more than the"
                f" model's context of {self.spec.max_positions}. Remove the line or lower new_tokens.",
            )
        return ids

    def _check_tokens(self, ids: Sequence[int], where: str) -> None:
        mask = self.spec.mask_id
        bad = [token for token in ids if not 0 <= token < self.spec.vocab_size or token == mask]
        if bad:
            what = "the mask token" if bad[0] == mask else f"a token outside the model's {self.spec.vocab_size}"
            raise UserError("example-invalid", f"{where} has {what} (id {bad[0]}) in its prompt or answer. Remove it.")

    def _ids(self, prompt: object, where: str) -> list[int]:
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UserError("example-invalid", f"{where} has an empty prompt. Write one or remove the line.")
            return prompts.text_ids(prompt, self.tokenizer, where)
        assert isinstance(prompt, list)
        return list(prompt)

    def _answer(self, text: str | list[int], where: str) -> list[int]:
        if isinstance(text, list):
            return text
        found = prompts.text_ids(text, self.tokenizer, f"the answer of {where}", special=False)
        if not found:
            raise UserError("example-invalid", f"the answer of {where} has no tokens. Write one or remove the line.")
        return found

    def _chat(self, example: Example) -> tuple[list[int], list[int]]:
        """Return messages by the chat template: the answer is what it writes after the beginning of the assistant's."""
        where, messages = example.where, list[Any](example.prompt)
        begun = prompts.chat_text(messages, self.tokenizer, where)
        turn = {"role": "assistant", "content": example.answer}
        whole = prompts.chat_text([*messages, turn], self.tokenizer, where, begin=None)
        if not whole.startswith(begun):
            raise UserError("chat-template-failed", f"{where}: this chat template cannot write an answer. Give texts.")
        return self._chat_ids(begun), self._answer(whole[len(begun) :], where)

    def _chat_ids(self, text: str) -> list[int]:
        encoded: Any = self.tokenizer(text, add_special_tokens=False)
        return list(encoded["input_ids"])


def _is_chat(example: Example) -> bool:
    return isinstance(example.prompt, list) and bool(example.prompt) and isinstance(example.prompt[0], Mapping)
