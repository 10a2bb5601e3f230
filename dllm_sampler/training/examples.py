"""What a model learns from and is measured on: examples of a user's data, or of mini's tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Protocol

from dllm_sampler import config
from dllm_sampler.cli import inputs
from dllm_sampler.core.checks import is_whole
from dllm_sampler.errors import UserError
from dllm_sampler.host import files
from dllm_sampler.host.paths import expanded
from dllm_sampler.inputs.metrics import Metric
from dllm_sampler.models.mini_tasks import LESSONS, draw_example
from dllm_sampler.training.rewards import solved

JSON = (".jsonl", ".json")
TABLES = {".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
WHOLE = "train"  # the split of what has no splits
MOST = 10_000  # files of a data set


@dataclass(frozen=True)
class Example:
    """A prompt and its right answer.

    where: the line it is from, or the task
    prompt: as a sampler takes it
    answer: what is right; None: nobody says. Of mini's tasks one right answer of several
    task: of mini's tasks, the name; else empty
    fields: all that the line says
    """

    where: str
    prompt: inputs.Prompt
    answer: Any
    task: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


def columns_of(examples: Sequence[Example]) -> dict[str, list[Any]]:
    """What rewards get of examples besides prompts, in columns: `task`, `answer`, and those of the data."""
    names = dict.fromkeys(name for one in examples for name in one.fields if name not in ("prompt", "prompts"))
    found = {name: [one.fields.get(name) for one in examples] for name in names}
    return found | {"task": [one.task for one in examples], "answer": [one.answer for one in examples]}


class Source(Protocol):
    """Where examples come from, the same for the same arguments."""

    @property
    def size(self) -> int | None:
        """Examples to learn from; None: there is no end of them."""
        ...

    def draw(self, seed: str, count: int, *, number: int = 0, held: bool = False) -> list[Example]:
        """Examples of a step: that of this `number`, from 0, which `seed` names too; or held-out ones."""
        ...

    def right(self, example: Example, text: str, ids: Sequence[int]) -> float:
        """How right an answer is, from 0 to 1."""
        ...

    @property
    def content(self) -> str:
        """A hash of the examples; empty where there is no end of them."""
        ...

    def all(self) -> Sequence[Example]:
        """All examples to learn from, where there is an end of them; else none."""
        ...

    def keep(self, wanted: Callable[[Example], bool]) -> int:
        """Drop the examples that are not wanted, and return how many these were."""
        ...


@dataclass(frozen=True)
class Tasks:
    """Draws mini's tasks, new ones in every step.

    shares: of each task or lesson

    Raises:
        UserError: an unknown task.
    """

    shares: Mapping[str, float]
    size: None = None
    content: str = ""

    def draw(self, seed: str, count: int, *, number: int = 0, held: bool = False) -> list[Example]:
        """See `Source.draw`."""
        rng = Random(seed)
        names = rng.choices(list(self.shares), list(self.shares.values()), k=count)
        drawn = [(name, *draw_example(LESSONS[name], rng, held=held)) for name in names]
        return [Example(f"the task {name}", prompt, answer, name) for name, prompt, answer in drawn]

    def right(self, example: Example, text: str, ids: Sequence[int]) -> float:
        """See `Source.right`: 1 or 0."""
        assert isinstance(example.prompt, str)
        return float(solved(example.task, example.prompt, example.answer, text))

    def all(self) -> Sequence[Example]:
        """See `Source.all`."""
        return []

    def keep(self, wanted: Callable[[Example], bool]) -> int:
        """See `Source.keep`: none is dropped."""
        return 0


def _is_file(path: str) -> bool:
    """Whether a path names a file of lines or a table, and no data set."""
    return Path(path).suffix in (*JSON, *TABLES)


@dataclass(frozen=True)
class Data:
    """The settings `train.data`.

    path: a JSON Lines file; a table (.csv, .parquet); a folder or a hub id that the package datasets loads
    subset, split: of a data set, as `datasets.load_dataset` takes them; a file has neither
    test: another file, or another split, to measure on; None: what measures is drawn from the examples
    prompt, answer, messages: what its columns are called. A line has a prompt (text or token ids) and an answer, or
        messages, of which the last is the assistant's
    chat: prompts are texts of a user that the tokenizer's chat template gets
    metric: what answers are judged by, `exact_match`, `contains`, `regex` or `package.module:function`
    """

    path: str | None
    subset: str | None = None
    split: str = WHOLE
    test: str | None = None
    prompt: str = "prompt"
    answer: str = "answer"
    messages: str = "messages"
    chat: bool = False
    metric: str = "exact_match"

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Data:
        """The settings, checked.

        Raises:
            UserError: an unknown field, or a value of the wrong type.
        """
        return cls(**config.check("train.data", cls, {"path": None, **settings}, whole=True))

    def source(
        self,
        tasks: Mapping[str, float],
        seed: int,
        held_out: int | None,
        *,
        most: int,
        answers: bool,
        processes: int = 1,
    ) -> Source:
        """Where examples come from: `load` of what these settings say, or `tasks` of mini's where they say nothing.

        Raises:
            UserError: neither, or fewer held-out examples than processes.
        """
        if self.path is None:
            if not tasks:
                raise UserError("option-missing", "no examples. Set train.data=FILE.jsonl, or train.tasks={NAME: 1}.")
            return Tasks(tasks)
        found = self.load(seed, held_out, answers, most=most, processes=processes)
        if len(found.held) < processes:
            raise UserError(
                "option-range", f"{len(found.held)} held-out examples for {processes} processes. Raise train.held_out."
            )
        return found

    def load(self, seed: int, held_out: int | None, answers: bool, *, most: int = 64, processes: int = 1) -> Stored:
        """Read all examples.

        Args:
            seed: of their order, and of what is held out.
            held_out: examples to measure on. None chooses a tenth of the examples, or all of `test`.
            answers: each must have one.
            most: the largest number that None chooses.
            processes: None chooses at least one example for each.

        Raises:
            UserError: the data cannot be had, lacks columns, or leaves nothing to learn from.
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
            prompts = {repr(one.prompt) for one in kept}
            train = [one for one in train if repr(one.prompt) not in prompts]
            if not train:
                raise UserError(
                    "nothing-to-learn",
                    f"train.data={self.path} has {len(shuffled)} examples, and train.held_out={held_out} leaves none to"
                    " learn from. Add examples, or name a file to measure on as train.data.test.",
                )
        for example in kept:
            metric.check(example.answer, example.where)
        return Stored(seed, train, kept, metric)

    def _examples(self, path: str, split: str, answers: bool) -> list[Example]:
        file = expanded("train.data", path)
        if split != WHOLE and _is_file(path):
            raise UserError(
                "option-not-applicable",
                f"train.data={path} is a file without splits. Use train.data.test, not train.data.split.",
            )
        if file.suffix in JSON:
            try:
                with file.open(encoding="utf-8") as opened:
                    lines = inputs.records(opened, path)
            except OSError as error:
                raise UserError("file-unreadable", f"cannot read train.data {path}: {error.strerror}") from None
        elif file.is_file() and file.suffix not in TABLES:
            endings = ", ".join((*JSON, *TABLES))
            raise UserError("file-name", f"train.data={path}: the name must end in one of {endings}")
        else:
            lines = [(f"{path} {split} example {i}", line) for i, line in enumerate(self._table(file, path, split), 1)]
        if not lines:
            raise UserError(
                "nothing-to-learn",
                f"train.data={path} has no examples{'' if file.suffix in JSON else f' in its split {split}'}",
            )
        return [self._example(where, line, answers) for where, line in lines]

    def _table(self, file: Path, path: str, split: str) -> Any:
        """The rows of a table or a data set: data, of which no code is run."""
        import datasets  # takes a second to import

        try:
            if file.suffix in TABLES:
                return datasets.load_dataset(TABLES[file.suffix], data_files=str(file), split=WHOLE)
            if (file / "dataset_info.json").is_file() or (file / "dataset_dict.json").is_file():
                found: Any = datasets.load_from_disk(str(file))
                if isinstance(found, datasets.DatasetDict):
                    return found[split]
                if split != WHOLE:
                    raise ValueError("the folder holds a single data set, without splits")
                return found
            if file.is_dir() and next(islice(files.under(file, "*"), MOST, None), None):  # it would look at each
                raise ValueError(f"the folder has more than {MOST} files: name that of the data set")
            return datasets.load_dataset(str(file) if file.is_dir() else path, self.subset, split=split)
        except Exception as error:  # whatever datasets, the network or the disk raise
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError("file-unreadable", f"train.data={path}: cannot load split {split} ({reason})") from None

    def _example(self, where: str, line: Any, answers: bool) -> Example:
        if not isinstance(line, Mapping):
            raise UserError("example-invalid", f'{where} must be like {{"{self.prompt}": ..., "{self.answer}": ...}}')
        if line.get(self.messages) is None and line.get(self.prompt) is None:
            there = ", ".join(map(str, line)) or "none"
            raise UserError(
                "example-invalid",
                f"{where} has neither a column {self.prompt} nor {self.messages} (its columns: {there}): say"
                " train.data.prompt=COLUMN and train.data.answer=COLUMN, or train.data.messages=COLUMN",
            )
        answer = line.get(self.answer)
        if is_whole(answer):  # a column of numbers in a table
            answer = str(answer)
        if line.get(self.messages) is not None:
            messages = inputs.prompt({"messages": line[self.messages]}, where)
            assert isinstance(messages, list)
            prompt: inputs.Prompt = messages
            if isinstance(messages[-1], dict) and messages[-1]["role"] == "assistant":
                prompt, answer = messages[:-1], messages[-1]["content"]  # pyright: ignore[reportAssignmentType]
        else:
            prompt = inputs.prompt({"prompt": line[self.prompt]}, where)
            prompt = inputs.as_chat(prompt) if self.chat else prompt
        if not prompt:
            raise UserError("example-invalid", f"{where} has an empty prompt")
        if answers and not (isinstance(answer, str) and answer):
            raise UserError("example-invalid", f"{where} has no answer. Fill the column {self.answer}.")
        return Example(where, prompt, answer, fields=dict(line))


@dataclass
class Stored:
    """Examples of a user's data, in an order of their own in every epoch."""

    seed: int
    train: list[Example]
    held: list[Example]
    metric: Metric

    @property
    def size(self) -> int:
        """See `Source.size`."""
        return len(self.train)

    @property
    def content(self) -> str:
        """See `Source.content`."""
        found = sha256()
        for one in (*self.train, *self.held):
            found.update(repr((one.prompt, one.answer)).encode())
        return found.hexdigest()

    def draw(self, seed: str, count: int, *, number: int = 0, held: bool = False) -> list[Example]:
        """See `Source.draw`: step after step all examples of an epoch, then those of the next."""
        if held:
            return list(self.held[:count])
        return [
            self.train[_order(self.seed, at // self.size, self.size)[at % self.size]]
            for at in range(number * count, (number + 1) * count)
        ]

    def right(self, example: Example, text: str, ids: Sequence[int]) -> float:
        """See `Source.right`: the metric's score."""
        return self.metric.scores(
            text, example.answer, prompt=example.prompt, ids=ids, line=example.fields, where=example.where
        )["score"]

    def all(self) -> Sequence[Example]:
        """See `Source.all`."""
        return self.train

    def keep(self, wanted: Callable[[Example], bool]) -> int:
        """See `Source.keep`; held-out examples are dropped too.

        Raises:
            UserError: none is left.
        """
        before = len(self.train) + len(self.held)
        self.train, self.held = (list(filter(wanted, some)) for some in (self.train, self.held))
        if not self.train or not self.held:
            raise UserError("nothing-to-learn", "train.longer=drop leaves too few examples")
        return before - len(self.train) - len(self.held)


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, size: int) -> Sequence[int]:
    """The examples of an epoch, shuffled."""
    return Random(f"{seed}/epoch {epoch}").sample(range(size), size)
