"""A kernel and its torch reference are called in the same way: one can always take the other's place."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from typing import Any

import pytest

from dllm_sampler.kernels import backend
from tests.sampling import each


def pairs() -> dict[str, tuple[Any, Any]]:
    """Every kernel of the Triton backend with the function that `backend.guarded` falls back on."""
    found: dict[str, tuple[Any, Any]] = {}

    def note(fused: Any, plain: Any) -> Any:
        found[fused.__qualname__] = fused, plain
        return fused

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "guarded", note)
        backend._triton.__wrapped__()
    return found


PAIRS = pairs()


def test_every_kernel_is_among_them() -> None:
    named = [one.name for one in fields(backend.LayerKernels)]
    assert len(PAIRS) == len(named) + len(("readout", "head"))


@each("name", PAIRS)
def test_signatures_are_equal(name: str) -> None:
    fused, plain = PAIRS[name]
    taken, known = ([*signature(one).parameters.values()] for one in (fused, plain))
    assert known[: len(taken)] == taken
    assert [one.name for one in known[len(taken) :]] == ["unseen"] * (name == "packed_attention"), "kernels know none"
    assert signature(fused).return_annotation == signature(plain).return_annotation
