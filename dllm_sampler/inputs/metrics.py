"""Metrics for answers to a user's data: a few ways to compare texts, or the user's function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dllm_sampler.errors import UserError, unknown
from dllm_sampler.host import patterns
from dllm_sampler.host.functions import resolve_callable


def exact_match(text: str, answer: str) -> float:
    """Return 1 where the text is the answer, but for white space at the ends."""
    return float(text.strip() == answer.strip())


def contains(text: str, answer: str) -> float:
    """Return 1 if the answer is in the text."""
    return float(answer in text)


def regex(text: str, answer: str) -> float:
    """Return 1 where the regular expression `answer` matches somewhere in the text."""
    return float(patterns.matches(answer, text))


METRICS: dict[str, Callable[[str, str], float]] = {"exact_match": exact_match, "contains": contains, "regex": regex}


@dataclass(frozen=True)
class Metric:
    """Judges texts by the answers that are expected.

    Args:
        setting: the option with the metric's name, for errors, for example `task.metric`.
        name: `exact_match`, `contains` or `regex`; or `package.module:function`, called as
            `function(text=..., answer=..., prompt=..., ids=..., line=...)`, which returns the score, a number from 0
            to 1, or a mapping of names to numbers with `score` among them.

    Raises:
        UserError: the metric is unknown.
    """

    setting: str
    name: str

    def __post_init__(self) -> None:
        if not self.own:
            return
        if ":" not in self.name:
            raise unknown(self.setting, self.name, [*METRICS, "package.module:function"])
        _ = self.call

    @property
    def own(self) -> bool:
        """True for the user's function."""
        return self.name not in METRICS

    @cached_property
    def call(self) -> Callable[..., Any]:
        """The user's function."""
        return resolve_callable(self.setting, self.name)

    def check(self, answer: Any, where: str) -> None:
        """Refuse an answer that none of the metrics here can use.

        Raises:
            UserError: naming the line, `where`.
        """
        if self.own:
            return
        right = [answer] if isinstance(answer, str) else answer
        if not isinstance(right, list) or not right or not all(isinstance(one, str) for one in right):
            raise UserError(
                "example-invalid", f'{where}: "answer" is not a text. {self.setting}={self.name} needs one.'
            )
        if self.name == "regex":
            for one in right:
                try:
                    patterns.compiled(one)
                except ValueError as error:
                    raise UserError(
                        "example-invalid", f'{where}: "answer" is not a regular expression ({error}). Correct it.'
                    ) from None

    def scores(
        self, text: str, answer: Any, *, prompt: Any, ids: Sequence[int], line: Mapping[str, Any], where: str
    ) -> dict[str, float]:
        """Return `score`, from 0 to 1, and what else a function of the user's says.

        Args:
            text: what was generated.
            answer: the text that is right, or a list of such texts; of the user's own function anything.
            prompt: what was asked.
            ids: the tokens that were generated.
            line: all fields of the data's line.
            where: the line's place, for errors.

        Raises:
            UserError: the user's function raised an error, or returned no scores; a pattern took too long.
        """
        if not self.own:
            right = [answer] if isinstance(answer, str) else answer
            try:
                return {"score": max(METRICS[self.name](text, one) for one in right)}
            except TimeoutError as error:
                raise UserError("function-failed", f"{where}: {self.setting}={self.name}: {error}") from None
        try:
            given = self.call(text=text, answer=answer, prompt=prompt, ids=list(ids), line=dict(line))
        except (Exception, SystemExit) as error:  # whatever the user's function raises
            said = f"{type(error).__name__}: {error}"
            raise UserError(
                "function-failed", f"{where}: {self.setting}={self.name} raised {said}. Correct it."
            ) from error
        named = given if isinstance(given, Mapping) else {"score": given}
        try:
            found = {str(name): float(value) for name, value in named.items()}
        except (TypeError, ValueError):
            found = {}
        if not all(map(math.isfinite, found.values())) or not 0 <= found.get("score", -1) <= 1:
            raise UserError(
                "function-result",
                f"{where}: {self.setting}={self.name} returned {given!r}. Return a score from 0 to 1, or a mapping.",
            )
        return found
