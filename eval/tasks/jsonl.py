"""Prompts and answers of a user's own file, graded by a metric of the user's choice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from typing_extensions import override

from dllm_sampler.cli.inputs import Prompt, file_records, prompt
from dllm_sampler.errors import UserError
from dllm_sampler.eval.tasks.base import Answer, Sample, Task
from dllm_sampler.inputs.metrics import Metric

FORM = '{"prompt": ..., "answer": ...}'


def read_texts(option: str, file: str, *fields: str) -> list[dict[str, str]]:
    """Return the JSON objects in the lines of a file, each with a text that is not blank under every one of `fields`.

    Raises:
        UserError: the file cannot be read or is empty, or a line lacks a text. The message has its number.
    """
    form = ", ".join(f'"{field}": "..."' for field in fields)
    found = file_records(option, file)
    for where, line in found:
        for field in fields:
            text = line.get(field) if isinstance(line, dict) else None
            if not isinstance(text, str) or not text.strip():
                raise UserError("example-invalid", f'{where} has no text under "{field}". Write {{{form}}} there.')
    if not found:
        raise UserError("file-invalid", f"{option}={file} has no JSON lines. Write {{{form}}} in each line.")
    return [line for _, line in found]


@dataclass(frozen=True)
class Line:
    """A line of the file: its file and number (`where`), its prompt, its answer or None, and all its fields."""

    where: str
    prompt: Prompt
    answer: Any
    fields: Mapping[str, Any]


@dataclass
class Jsonl(Task):
    """The lines of a JSON Lines file, each with a prompt and an answer.

    Args:
        file: its path. A line is an object with `prompt` (a text or token ids) or `messages`, as in a `prompts_file`,
            and `answer`: a text, or a list of right texts.
        metric: `exact_match`, `contains` or `regex`; or `package.module:function`, called as
            `function(text=..., answer=..., prompt=..., ids=..., line=...)`, which returns the score, a number from 0
            to 1, or a mapping of names to numbers with `score` among them.
        count: number of lines, from the first. By default all.
        seed: the samples do not depend on it.

    Raises:
        UserError: the file or a line of it cannot be used, or the metric is missing.
    """

    name: ClassVar[str] = "jsonl"

    file: str | None = None
    metric: str = "exact_match"
    count: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        if self.file is None:
            raise UserError("option-missing", "task=jsonl needs a file. Add task.file=FILE.jsonl.")
        for line in self.lines:
            self.judge.check(line.answer, line.where)

    @cached_property
    def judge(self) -> Metric:
        """The metric that `metric` names."""
        return Metric("task.metric", self.metric)

    @cached_property
    def lines(self) -> Sequence[Line]:
        """The lines of the file, at most `count`."""
        assert self.file is not None
        found = file_records("task.file", self.file)
        if not found:
            raise UserError("file-invalid", f"task.file={self.file} has no JSON lines. Write {FORM} in each line.")
        lines = []
        for where, record in found[: self.count]:
            if not isinstance(record, dict):
                raise UserError("example-invalid", f"{where} is not a JSON object. Write {FORM}.")
            lines.append(Line(where, prompt(record, where), record.get("answer"), record))
        return lines

    @override
    def samples(self) -> Sequence[Sample]:
        return [Sample(index, line.prompt) for index, line in enumerate(self.lines)]

    @override
    def source(self, sample: Sample) -> str:
        return self.lines[sample.index].where

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """Return `score`, and the other values that the user's metric returns."""
        line = self.lines[sample.index]
        return self.judge.scores(
            answer.text, line.answer, prompt=line.prompt, ids=answer.ids, line=line.fields, where=line.where
        )
