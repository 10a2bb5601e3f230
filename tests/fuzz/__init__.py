"""Random configurations, bad inputs and killed runs. A few examples run by default, many with `pytest -m slow`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from dllm_sampler.errors import LONGEST, UserError

QUIET = settings(
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
FIXED = settings(QUIET, derandomize=True, database=None)  # the same examples in every run
SECONDS = 60  # limit of one example


def fuzz(few: int, times: int = 1, **strategies: SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """Make a test of a property.

    Args:
        few: number of examples that run by default. They are always the same.
        times: the slow test runs this many times the examples of hypothesis' profile (100).
        strategies: of the arguments of the property.
    """

    def decorate(check: Callable[..., None]) -> Any:
        @pytest.mark.parametrize("share", ["few", pytest.param("many", marks=pytest.mark.slow)])
        def test(share: str) -> None:
            many = settings(QUIET, max_examples=settings().max_examples * times, print_blob=True)
            size = settings(FIXED, max_examples=few) if share == "few" else many
            size(given(**strategies)(limited(check)))()

        test.__doc__ = check.__doc__
        return test

    return decorate


@contextmanager
def sentences() -> Iterator[None]:
    """Let a refusal pass that is one sentence."""
    try:
        yield
    except UserError as error:
        assert_is_sentence(str(error))


def assert_is_sentence(message: str) -> None:
    """Check the form of a refusal."""
    assert message.strip() and "\n" not in message and len(message) <= LONGEST, message


def limited(check: Callable[..., None]) -> Callable[..., None]:
    """Return the check with a limit on its time."""

    def run(**drawn: Any) -> None:
        with time_limit(SECONDS):
            check(**drawn)

    return run


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in the main thread after some seconds."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
