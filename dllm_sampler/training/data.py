"""From rows of a data set, in the forms that TRL reads, to examples and their tokens; each is checked on the way."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerBase

from dllm_sampler.cli import inputs
from dllm_sampler.core.checks import check_number, is_whole
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.errors import UserError, counted, first_line, unknown
from dllm_sampler.host.paths import expanded
from dllm_sampler.inputs import prompts
from dllm_sampler.inputs.metrics import Metric
from dllm_sampler.models.mini_rewards import solved
from dllm_sampler.models.mini_tasks import LESSONS, draw_example
from dllm_sampler.models.mini_tokenizer import vocabulary
from dllm_sampler.result import Answer
from dllm_sampler.training.masked import Pair

JSON = (".jsonl", ".json")
TABLES = (".csv", ".parquet", ".arrow")
WHOLE = "train"  # the split of what has no splits
ANSWERS = ("completion", "answer")  # names of the column, the first as TRL calls it


@dataclass(frozen=True)
class Example:
    """A prompt and its right answer."""

    where: str  # the line it is from, or the task
    prompt: inputs.Prompt
    answer: Any  # the right text, or its tokens. None if there is none. For mini's tasks one right answer of several
    task: str = ""  # one of mini's tasks, if it is from there
    fields: Mapping[str, Any] = field(default_factory=dict)  # all columns of the line

    def right(self, answer: Answer, metric: Metric) -> float:
        """Return the score of an answer, from 0 to 1."""
        text, ids = answer.text or "", answer.tokens[: answer.length].tolist()
        if self.task:
            return float(solved(self.task, str(self.prompt), self.answer, text))
        given: dict[str, Any] = {"prompt": self.prompt, "ids": ids, "line": self.fields, "where": self.where}
        return metric.scores(text, self.answer, **given)["score"]


@dataclass(frozen=True)
class Row:
    """An example in tokens: one row of a batch."""

    number: int  # in the data set; with the run's seed and the step it decides what is drawn for the row
    example: Any  # an `Example`, or None
    prompt: Sequence[int]
    answer: Sequence[int] = ()  # empty where the prompt alone is read


def examples(rows: Iterable[Any], answers: bool, named: str) -> list[Example]:
    """Return the examples of all rows of a data set; examples stay as they are. `answers`: each must have one."""
    data, found = Data(), [*enumerate(rows or ())]
    if not found:
        raise UserError("nothing-to-learn", f"{named} is empty. Give it at least one example.")
    return [row if isinstance(row, Example) else data.example(f"row {i} of {named}", row, answers) for i, row in found]


def columns_of(examples: Sequence[Example]) -> dict[str, list[Any]]:
    """Return the columns that rewards get besides prompts: `task`, `answer`, and those of the data."""
    names = dict.fromkeys(name for one in examples for name in one.fields if name not in ("prompt", "prompts"))
    found = {name: [one.fields.get(name) for one in examples] for name in names}
    return found | {"task": [one.task for one in examples], "answer": [one.answer for one in examples]}


def drawn(tasks: Mapping[str, float], seed: object, count: int, *, held: bool = False) -> list[Example]:
    """Draw examples of mini's tasks in these shares. No training uses prompts that are `held`."""
    for name, share in tasks.items():
        if name not in LESSONS:
            raise unknown("task", name, LESSONS)
        check_number(f"train.tasks.{name}", share, "a share", finite=True)
    if not any(tasks.values()):
        raise UserError("option-missing", "Examples are missing. Set train.data=FILE.jsonl or train.tasks={copy: 1}.")
    rng = Random(f"{seed}/{held}")
    names = rng.choices(list(tasks), list(tasks.values()), k=count)
    found = [(name, *draw_example(LESSONS[name], rng, held=held)) for name in names]
    return [Example(f"the task {name}", prompt, answer, name) for name, prompt, answer in found]


@dataclass(frozen=True)
class Data:
    """The settings `train.data`.

    path: a JSON Lines file; a table (.csv, .parquet); a folder or a hub id that the package datasets loads
    subset, split: of a data set, as `datasets.load_dataset` takes them; a file has neither
    test: another file, or another split, to measure on. None draws what is measured from the examples
    prompt: column of the prompt: text, token ids or chat messages
    answer: column of the answer: text, or a list of the assistant's message. None: `completion` or `answer`
    messages: column in place of both; the last message is the assistant's
    chat: a text prompt is put into the tokenizer's chat template, as the user's message
    metric: how answers are judged: `exact_match`, `contains`, `regex` or `package.module:function`
    """

    path: str | None = None
    subset: str | None = None
    split: str = WHOLE
    test: str | None = None
    prompt: str = "prompt"
    answer: str | None = None
    messages: str = "messages"
    chat: bool = False
    metric: str = "exact_match"

    def load(self, seed: int, held_out: int | None, answers: bool, most: int) -> tuple[list[Example], list[Example]]:
        """Read all examples, which must have `answers`, and return those to learn from and those to measure on.

        held_out: examples to measure on. None chooses a tenth of the examples, or all of `test`, but at most `most`
        """
        assert self.path is not None
        metric, held = Metric("train.data.metric", self.metric), list[Example]()
        train = self._examples(self.path, self.split, answers)
        if self.test is not None:
            held = self._examples(*((self.test, WHOLE) if _is_file(self.test) else (self.path, self.test)), answers)
        shuffled = Random(f"{seed}/held").sample(held or train, len(held or train))
        if held_out is None:
            held_out = min(most, len(shuffled) if held else max(1, len(shuffled) // 10))
        kept = shuffled[:held_out]
        if self.test is None:  # a prompt that is there twice is held out twice
            known = {repr(one.prompt) for one in kept}
            train = [one for one in train if repr(one.prompt) not in known]
        if not train:
            said = f"train.held_out={held_out} leaves nothing of {counted(len(shuffled), 'example')} to learn from."
            raise UserError(
                "nothing-to-learn", f"{said} Add examples to train.data, or name a file as train.data.test."
            )
        for example in kept if answers else ():
            metric.check(example.answer, example.where)
        return train, kept

    def _examples(self, path: str, split: str, answers: bool) -> list[Example]:
        option = "train.data" if path == self.path else "train.data.test"
        file = expanded(option, path)
        if _is_file(path) and (split != WHOLE or self.subset is not None):
            said = f"{option}={path} is a file. Use train.data.test, not train.data.split or train.data.subset."
            raise UserError("option-not-applicable", said)
        if file.is_file() and not _is_file(path):
            endings = ", ".join((*JSON, *TABLES))
            raise UserError("file-name", f"{option}={path} has another ending than {endings}. Rename or convert it.")
        if file.suffix in JSON:
            lines = inputs.file_records(option, path)
        else:
            try:
                table = self._table(file, split, option)
                lines = [(f"{path} {split} example {i}", row) for i, row in enumerate(table, 1)]
            except UserError:
                raise
            except Exception as error:  # whatever datasets, the network or the disk raise
                reason = getattr(error, "strerror", None) or first_line(error.__cause__ or error)
                named, way_out = path, "Correct the path or the file"
                if not _is_file(path):
                    named, way_out = f"{path}, split {split}", "Check its name, subset and split, and the network"
                said = f"Cannot read {option}={named} ({reason}). {way_out}."
                raise UserError("file-unreadable", said) from None
        if not lines:
            raise UserError("nothing-to-learn", f"{option}={path} has no examples. Name another file or split.")
        return [self.example(where, line, answers) for where, line in lines]

    def _table(self, file: Path, split: str, option: str) -> Any:
        """Return the rows of a table or a data set. No code of it is run."""
        import datasets  # takes a second

        if file.suffix in TABLES:
            try:
                return datasets.load_dataset(file.suffix[1:], data_files=str(file), split=WHOLE)
            except ValueError as error:
                if "corresponds to no data" in str(error):  # a head without lines
                    return []
                raise
        names = [name for name in ("dataset_info.json", "dataset_dict.json") if (file / name).is_file()]
        if names:  # written by `save_to_disk`
            saved: Any = datasets.load_from_disk(str(file))
            splits = list(saved) if names == ["dataset_dict.json"] else [WHOLE]
            if self.subset is not None:
                said = f"train.data.subset={self.subset} has no effect on {option}={file}, which is a saved data set."
                raise UserError("option-not-applicable", f"{said} Remove it.")
            if split not in splits:
                said = f"{option}={file} has no split {split}, only {', '.join(splits)}."
                raise UserError("file-unreadable", f"{said} Correct train.data.split or train.data.test.")
            return saved[split] if names == ["dataset_dict.json"] else saved
        return datasets.load_dataset(str(file) if file.is_dir() else str(self.path), self.subset, split=split)

    def example(self, where: str, line: Any, answers: bool) -> Example:
        """Return the example of a line, which errors call `where`. `answers`: it must have one."""
        given = line if isinstance(line, Mapping) else {}
        chat, prompt = given.get(self.messages), given.get(self.prompt)
        if chat is None and prompt is None:
            there = ", ".join(f"'{name}'" for name, value in given.items() if value is not None) or "none"
            said = f"{where} has nothing in a column '{self.prompt}' or '{self.messages}' (filled columns: {there})."
            raise UserError("example-invalid", f"{said} Set train.data.prompt to the column of the prompt.")
        names = ANSWERS if self.answer is None else (self.answer,)
        answer: Any = next((given[name] for name in names if given.get(name) is not None), None)
        key = "prompt" if chat is None and not _is_chat(prompt) else "messages"
        prompt = inputs.prompt({key: prompt if chat is None else chat}, where)
        prompt = inputs.as_chat(prompt) if self.chat else prompt
        if chat is not None and prompt[-1]["role"] == "assistant":  # pyright: ignore
            prompt, answer = prompt[:-1], prompt[-1]["content"]  # pyright: ignore
        if _is_chat(answer) and len(answer) == 1:
            answer = answer[0].get("content")
        if is_whole(answer):  # a column of numbers in a table
            answer = str(answer)
        if not prompt:
            raise UserError("example-invalid", f"{where} has an empty prompt. Fill it in, or remove the example.")
        tokens = isinstance(answer, list) and all(map(is_whole, answer))
        if answers and not (answer and (isinstance(answer, str) or tokens)):
            said = f"{where} has no answer. Fill its column {' or '.join(names)}, or set train.data.answer."
            raise UserError("example-invalid", said)
        return Example(where, prompt, answer, fields=dict(given))


def _is_file(path: str) -> bool:
    return Path(path).suffix in (*JSON, *TABLES)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


@dataclass(frozen=True)
class Encoder:
    """An encoder of examples: the prompt as the sampler reads it, and an answer that ends in an end-of-text token."""

    tokenizer: PreTrainedTokenizerBase
    spec: ModelSpec

    def prompt(self, example: Example, new_tokens: int | None) -> list[int]:
        """Return the tokens of a prompt that leaves room for `new_tokens`. With None it may be of any length."""
        if example.task and self.tokenizer.get_vocab() != vocabulary():
            said = "train.tasks need mini's tokenizer, which this model does not have. Set train.data=FILE.jsonl."
            raise UserError("tokenizer-differs", said)
        spec = replace(self.spec, max_positions=sys.maxsize) if new_tokens is None else self.spec
        named = f"the prompt of {example.where}"
        return prompts.encode_one(example.prompt, self.tokenizer, spec, new_tokens or 1, named)

    def __call__(self, example: Example) -> Pair:
        """Return the tokens of prompt and answer, however many these are."""
        prompt, answer, where = self.prompt(example, None), example.answer, f"the answer of {example.where}"
        if isinstance(answer, list):  # token ids stay as they are: a target may write the mask token, too
            ids = answer
        else:
            text = self._turn(example) if _is_chat(example.prompt) else answer
            ids = prompts.text_ids(text, self.tokenizer, where, special=False)
        banned = None if ids is answer else self.spec.mask_id
        wrong = [token for token in ids if token == banned or not 0 <= token < self.spec.vocab_size]
        if wrong or not ids:
            said = (
                f"has token id {wrong[0]}, outside the vocabulary (0 to {self.spec.vocab_size - 1})"
                if wrong
                else "is empty"
            )
            said = f"has the mask token (id {banned})" if banned in wrong else said
            raise UserError("example-invalid", f"{where} {said}. Correct it or remove the example.")
        ended = ids is answer or ids[-1] in self.spec.eos_ids  # a chat template may have ended it
        return prompt, ids if ended else [*ids, self.spec.eos_id]

    def _turn(self, example: Example) -> str:
        """Return what the chat template writes after the beginning of the assistant's message."""
        where, messages = example.where, list[Any](example.prompt)
        begun = prompts.chat_text(messages, self.tokenizer, where)
        turn = {"role": "assistant", "content": example.answer}
        whole = prompts.chat_text([*messages, turn], self.tokenizer, where, begin=None)
        if not whole.startswith(begun):
            said = f"{where}: the model's chat template does not continue this prompt with an answer."
            raise UserError("chat-template-failed", f"{said} Give prompts as text, with train.data.chat=false.")
        return whole.removeprefix(begun)
