"""A task of a published protocol, for `dllm-eval`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from dllm_sampler.errors import UserError, unknown
from dllm_sampler.eval.protocols import data, grading, prompts, spec
from dllm_sampler.eval.protocols.spec import Cell
from dllm_sampler.eval.tasks.base import Answer, Sample, Task
from dllm_sampler.inputs.prompts import chat_text, text_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CODE = ("humaneval", "mbpp")
TOKENS, FORWARDS = "protocol_tokens", "protocol_forwards"  # grades that count as the protocol does


@dataclass
class ProtocolTask(Task):
    """A task of a published protocol. `suite=protocol/NAME task=TASK` sets its fields.

    Args:
        protocol: a file of `conf/suite/protocol`.
        task: a task of the protocol.
        variant: the part of the protocol that is for some models. None means the protocol's first one.
        data: a file or folder in the data set's schema, in place of the hub's.
        forwards: `all`, or `two-per-block`, which counts the forwards with a commit in each block, but at least two.
        run_code: allow programs that the model wrote to run, in a child process with limits.
        count: the number of questions, from the first. None means all.
        seed: the questions do not depend on it.

    Raises:
        UserError: a name is unknown, a package is missing, a rule of the protocol is wrong, or programs may not run.
    """

    name: ClassVar[str] = "protocol"

    protocol: str | None = None
    task: str | None = None
    variant: str | None = None
    data: str | None = None
    run_code: bool = False
    forwards: Literal["all", "two-per-block"] = "all"
    count: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        if self.protocol is None or self.task is None:
            raise UserError(
                "option-missing",
                "task=protocol lacks task.protocol or task.task. Write suite=protocol/NAME task=TASK instead, for"
                " example suite=protocol/fast-dllm task=gsm8k.",
            )
        cell = self.cell
        grading.needed(cell)
        if cell.kind in CODE and not self.run_code:
            raise UserError(
                "option-missing",
                f"task={self.task} is graded by running programs that the model wrote. Set task.run_code=true to run"
                " each in a child process, with limits of time and memory.",
            )

    @cached_property
    def cell(self) -> Cell:
        """The definition of the task in the protocol."""
        protocol = spec.load(str(self.protocol))
        variant = protocol.variant(None, self.variant)
        if (variant, self.task) not in protocol.cells:
            raise unknown(f"task of suite=protocol/{self.protocol}", str(self.task), protocol.tasks(variant))
        return protocol.cells[variant, str(self.task)]

    @property
    def score(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The name of the metric of the published figure."""
        return self.cell.published

    @property
    def max_new_tokens(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The length of the canvas in tokens."""
        return self.cell.length

    @property
    def _where(self) -> str:
        return self.cell.data.path if self.data is None else f"task.data={self.data}"

    @cached_property
    def _samples(self) -> Sequence[Sample]:
        cell, drawn = self.cell, prompts.draws_examples(self.cell)
        documents = data.load(cell.kind, cell.data, cell.data.split, self.data)[: self.count]
        train = data.load(cell.kind, cell.data, "train", self.data) if drawn else []
        built = prompts.build(cell, documents, train, self._where)
        return [
            Sample(index, prompt.text if prompt.messages is None else prompt.messages, {"document": document})
            for index, (prompt, document) in enumerate(zip(built, documents, strict=True))
        ]

    @override
    def samples(self) -> Sequence[Sample]:
        return self._samples

    @override
    def source(self, sample: Sample) -> str:
        return f"{self._where}, document {sample.index + 1}"

    @cached_property
    def content(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A hash of the task's definition, the documents and the prompts."""
        whole = [repr(self.cell), *([sample.prompt, sample.facts] for sample in self._samples)]
        return sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def prompt(self, sample: Sample, tokenizer: PreTrainedTokenizerBase | None) -> Sequence[int]:
        """Return the token ids of the prompt. The protocol sets the template, the BOS token and the truncation."""
        assert tokenizer is not None
        given: Any = sample.prompt
        name = "the prompt"  # the run puts the document before a message
        plain = isinstance(given, str)
        text = given if plain else chat_text(given, tokenizer, name, given[-1]["role"] != "assistant")
        if self.cell.bos:
            text = f"{tokenizer.bos_token or ''}{text}"
        ids = text_ids(text, tokenizer, name, special=plain)
        return ids[-self.cell.keep :] if self.cell.keep else ids

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """Return the metrics by the harness's names, and the tokens and forwards that the protocol counts."""
        tokenizer, cell = answer.tokenizer, self.cell
        assert tokenizer is not None
        text, counted = prompts.cut_answer(cell, list(answer.canvas), tokenizer)
        grades = dict(grading.grade(cell, sample.facts["document"], text).metrics)
        if self.score not in grades:
            raise unknown(f"metric of {cell.variant}, {cell.task}", self.score, grades)
        if sample.index >= cell.skip:
            row = list(answer.canvas)
            if cell.tokens == "whole-row":
                row = [*self.prompt(sample, tokenizer), *row]
            elif cell.tokens == "cut-text-again":
                row = list(tokenizer(counted)["input_ids"])  # type: ignore[arg-type]
            grades[FORWARDS] = float(self._count_forwards(answer))
            grades[TOKENS] = float(sum(cell.tokens == "canvas" or token != tokenizer.eos_token_id for token in row))
        return grades

    def _count_forwards(self, answer: Answer) -> int:
        said = dict(word.split("=", 1) for word in self.cell.settings)
        if self.forwards == "all" or "blocks.length" not in said:
            return answer.nfe
        length = int(said["blocks.length"])
        blocks = [answer.step_map[first : first + length] for first in range(0, len(answer.step_map), length)]
        return sum(max(2, len({step for step in block if step >= 0})) for block in blocks)
