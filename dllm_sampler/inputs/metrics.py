"""Metrics for answers to a user's data: three comparisons of texts, or the user's function."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dllm_sampler.errors import UserError, short, unknown
from dllm_sampler.host import patterns
from dllm_sampler.host.functions import resolve_callable


def exact_match(text: str, answer: str) -> float:
    """Return 1 if the text equals the answer up to white space at both ends, else 0."""
    return float(text.strip() == answer.strip())


def contains(text: str, answer: str) -> float:
    """Return 1 if the text contains the answer, else 0."""
    return float(answer in text)


def regex(text: str, answer: str) -> float:
    """Return 1 if the regular expression `answer` matches somewhere in the text, else 0."""
    return float(patterns.matches(answer, text))


METRICS: dict[str, Callable[[str, str], float]] = {"exact_match": exact_match, "contains": contains, "regex": regex}


@dataclass(frozen=True)
class Metric:
    """A metric that compares generated texts with expected answers.

    Args:
        setting: the option with the metric's name, for errors, for example `task.metric`.
        name: `exact_match`, `contains`, `regex` or `package.module:function`. The function is called as
            `function(text=..., answer=..., prompt=..., ids=..., line=...)`. It returns a score from 0 to 1, or a
            mapping of names to finite numbers that contains such a `score`.

    Raises:
        UserError: the metric is unknown, or the function cannot be imported.
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
        """True if the metric is the user's function."""
        return self.name not in METRICS

    @cached_property
    def call(self) -> Callable[..., Any]:
        """The user's function."""
        return resolve_callable(f"{self.setting}=", self.name)

    def check(self, answer: Any, where: str) -> None:
        """Refuse an answer that the metric cannot use. A user's function may use any answer.

        Raises:
            UserError: the answer is not a text or a list of texts, or for `regex` not a regular expression.
        """
        if self.own:
            return
        right = [answer] if isinstance(answer, str) else answer
        if not isinstance(right, list) or not right or not all(isinstance(one, str) for one in right):
            raise UserError(
                "example-invalid",
                f"{where}: the answer is {short(repr(answer))}. Give a text, or a list of texts, for"
                f" {self.setting}={self.name}.",
            )
        if self.name == "regex":
            for one in right:
                try:
                    patterns.compiled(one)
                except ValueError as error:
                    raise UserError(
                        "example-invalid",
                        f"{where}: the answer {short(repr(one))} is not a regular expression ({error}). Correct it.",
                    ) from None

    def scores(
        self, text: str, answer: Any, *, prompt: Any, ids: Sequence[int], line: Mapping[str, Any], where: str
    ) -> dict[str, float]:
        """Return `score`, from 0 to 1, and further numbers that a user's function returns.

        Args:
            text: the generated text.
            answer: the right text, or a list of right texts. One of them must fit. For a user's function any value.
            prompt: the prompt in the data.
            ids: the generated tokens.
            line: all fields of the data's line.
            where: file and number of the line, for errors.

        Raises:
            UserError: the user's function failed or returned no scores, or the search for a pattern took too long.
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
            reason = " ".join(str(error).split()).rstrip(".")
            said = f"{self.setting}={self.name} raised {type(error).__name__}{f': {reason}' * bool(reason)}"
            raise UserError("function-failed", f"{where}: {said}. Correct the function.") from error
        named = given if isinstance(given, Mapping) else {"score": given}
        try:
            found = {str(name): float(value) for name, value in named.items()}
        except (TypeError, ValueError, OverflowError):
            found = {}
        if not all(map(math.isfinite, found.values())) or not 0 <= found.get("score", -1) <= 1:
            raise UserError(
                "function-result",
                f"{where}: {self.setting}={self.name} returned {short(repr(given))}. Return a score from 0 to"
                " 1, or a mapping of names to finite numbers that contains such a 'score'.",
            )
        return found
