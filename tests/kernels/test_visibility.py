"""The kernel of a pack's attention against the brute force of who sees whom."""

import pytest

from dllm_sampler.kernels.attention import packed_attention
from tests.visibility import KINDS, situation


@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_a_pack(kind: str) -> None:
    for seed in range(14):
        case = situation(seed, kind)
        if case.canvas.done.all() or case.query.leave_one_out:
            continue
        q, k, v, slots = case.inputs()
        pack = case.pack
        fresh = (k, v) if slots is None or pack.segment is not None else (None, None)
        heads = packed_attention(
            q, *fresh, slots, pack.bounds, pack.column, end=pack.end, until=pack.until, segment=pack.segment,
            unread=pack.unread, splits=1 + seed % 2,
        )  # fmt: skip
        assert case.read(heads) == case.wanted(), seed
