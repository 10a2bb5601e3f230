"""A check that an input is refused: by the error's code, and by the inputs that its message names."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dllm_sampler.errors import UserError


def check_refusal(error: BaseException, refusal: str) -> None:
    """Check an error against `refusal`, which is a code: `prompt-empty`, or `prompt-empty: prompt 2, NAME=VALUE`.

    The message must contain each of the inputs after the colon, which are separated by commas.
    """
    assert isinstance(error, UserError), repr(error)
    code, _, inputs = refusal.partition(": ")
    assert error.code == code, f"{error.code}, not {code}: {error}"
    for each in filter(None, inputs.split(", ")):
        assert each in str(error), f"{each!r} is not named: {error}"


@contextmanager
def refused(refusal: str) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect a `UserError` with this code, whose message names these inputs."""
    with pytest.raises(UserError) as caught:
        yield caught
    check_refusal(caught.value, refusal)
