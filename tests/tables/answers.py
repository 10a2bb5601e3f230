"""How answers to `mini`'s tasks are counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dllm_sampler.models.mini_tasks import Task
from dllm_sampler.result import Result

# Tasks whose tokens have to agree with one another: many right answers, or one that a single look does not deduce.
HARD = ("shuffle", "insert randomly", "remove randomly", "replace randomly", "arithmetic", "latin")


@dataclass(frozen=True)
class Tally:
    """Sums over answers. The first end token of an answer counts as a token, later ones do not."""

    count: int
    right: int
    tokens: int
    nfe: int

    @staticmethod
    def of(task: Task, prompts: Sequence[str], result: Result) -> Tally:
        """Count the answers to one batch."""
        assert result.texts is not None
        right = sum(task.check(prompt, text) for prompt, text in zip(prompts, result.texts, strict=True))
        return Tally(len(prompts), right, int(result.lengths.sum()), int(result.nfe.sum()))

    @staticmethod
    def total(tallies: Iterable[Tally]) -> Tally:
        """All of them together."""
        each = list(tallies)
        return Tally(*(sum(getattr(one, name) for one in each) for name in Tally.__dataclass_fields__))

    @property
    def exact(self) -> float:
        """Share of right answers in %."""
        return 100 * self.right / self.count

    @property
    def tokens_per_forward(self) -> float:
        """Tokens over forwards."""
        return self.tokens / max(self.nfe, 1)
