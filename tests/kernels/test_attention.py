"""Attention of a pack against float64, one query at a time."""

from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch

from dllm_sampler.core.visibility import block_causal, block_end
from dllm_sampler.kernels import attention as module
from dllm_sampler.kernels import reference
from dllm_sampler.kernels.attention import packed_attention
from tests.kernels import checks, oracles
from tests.sampling import crossed, sampled

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KEYS = ["stored", "fresh", "both"]


@pytest.mark.parametrize(("dtype", "size"), crossed(DTYPES, [16, 64, 80, 96, 128]))
def test_widths_and_dtypes(dtype, size):
    checks.attention(*oracles.pack(size, dtype, size=size, splits=1 + size % 3, keys=KEYS[size % 3]))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (8, 1), (6, 2), (7, 1)])
def test_heads_share_keys(heads, kv_heads):
    checks.attention(*oracles.pack(heads, heads=heads, kv_heads=kv_heads, counts=(5, 1, 9)))


@pytest.mark.parametrize("seed", sampled(range(20), lambda seed: [seed % 2]))
def test_every_combination(seed):
    random = Random(seed)

    def pick(*values):
        return random.choice(values)

    counts = pick((1,), (70,), (0, 1, 0), (17, 33, 5), (0, 3, 0, 0, 16, 1, 40))
    given, options = oracles.pack(
        seed, pick(*DTYPES[:2]), counts=counts, fillers=pick(0, 1, 20), length=pick(70, 90), heads=pick(2, 6),
        candidates=pick(1, 3) if max(counts) < 40 else 1, kv_heads=2, size=8, keys=pick(*KEYS),
        grid=pick(None, 1, 4, 7), splits=pick(1, 2, 5), longest=pick(None, max(counts) * 3),
    )  # fmt: skip
    if "segment" in options and pick(True, False):
        options["segment"] = options["segment"].int()
    checks.attention(given, options)


@pytest.mark.parametrize(
    "counts", sampled([(0, 0, 31, 1), (15, 1, 16, 0, 17, 0), (64, 5), (2, 0) * 16 + (3,), (0, 1) * 33])
)
def test_a_row_of_a_pack_answers_as_it_does_alone(counts):
    """Tiles do not cross rows, and what comes before a row moves nothing."""
    given, options = oracles.pack(1, counts=counts, length=70, keys="both", splits=2, longest=64)
    q, k, v, slots, bounds, columns = given
    together = checks.attention(given, options)
    for b, (first, after) in [*enumerate(pairwise(bounds.tolist()))][-7:]:
        own = slice(first, after)
        its = {name: options[name][b : b + 1] for name in ("end", "unread")}
        alone = packed_attention(
            q[own], k[own], v[own], (slots[0][b : b + 1], slots[1][b : b + 1]), torch.tensor([0, after - first]),
            columns[own], **options | its,
        )  # fmt: skip
        torch.testing.assert_close(alone, together[own], rtol=0, atol=1e-6)


@pytest.mark.parametrize("grid", [3, 4, 7])
def test_an_entry_sees_its_block_and_earlier_ones(grid):
    columns = torch.arange(7, 13)
    q, slots = torch.randn(6, 4, 16), tuple(torch.randn(1, 25, 2, 16) for _ in range(2))
    for s in slots:
        s[:, (12 // grid + 1) * grid :] = torch.nan  # after the last query's block
    options = {"end": torch.tensor([22]), "until": block_end(columns, grid)}
    out = checks.attention((q, None, None, slots, torch.tensor([0, 6]), columns), options)
    seen = block_causal(columns[None], torch.arange(25)[None], grid)[0]
    keys, values = (s[0].nan_to_num(0.0).repeat_interleave(2, 1).transpose(0, 1) for s in slots)
    want = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=seen)
    torch.testing.assert_close(out, want.transpose(0, 1))


@pytest.mark.parametrize("case", sampled([("both", 1, 4), ("both", 3, None), ("fresh", 2, None)]))
def test_a_draft_among_others_answers_as_it_does_alone(case):
    keys, splits, grid = case
    given, options = oracles.pack(1, counts=(4, 0, 3), candidates=3, keys=keys, grid=grid, splits=splits)
    q, k, v, slots, _, columns = given
    together = checks.attention(given, options)
    for candidate in range(3):
        own = (options["segment"] == candidate) & (columns < 20)
        assert own.sum() == 7
        its: Any = options | {"segment": None}
        its |= {"until": options["until"][own]} if grid else {}
        alone = packed_attention(q[own], k[own], v[own], slots, torch.tensor([0, 4, 4, 7]), columns[own], **its)
        torch.testing.assert_close(alone, together[own], rtol=0, atol=2e-6)


def test_who_sees_nothing_answers_zeros():
    given, options = oracles.pack(5, keys="both")
    q, k, v, slots, _, columns = given
    nan: Any = tuple(torch.full_like(s, torch.nan) for s in slots)
    for splits in (1, 4):
        options["splits"] = splits
        assert (
            checks.attention((*given[:3], nan, *given[4:]), options | {"end": torch.zeros(3, dtype=torch.long)}) == 0
        ).all()
        fillers = torch.zeros(4, dtype=torch.long)
        assert (checks.attention((q, k, v, nan, fillers, columns), options) == 0).all()  # fillers, and none else


def test_a_pack_may_be_empty():
    q = torch.randn(0, 4, 16)
    for answer in (packed_attention, reference.attention):
        assert answer(q, q, q, None, torch.zeros(3, dtype=torch.long), torch.arange(0)).shape == (0, 4, 16)


@pytest.mark.parametrize(("dtype", "factor"), crossed(DTYPES, [0.0, 1e-4, 30.0]))
def test_extreme_scores(dtype, factor):
    (q, k, v, *rest), options = oracles.pack(3, dtype, keys="both")
    checks.attention((q * factor, k, v * 100, *rest), options | {"splits": 2})


def test_views_and_wider_slots():
    (q, k, v, slots, bounds, columns), options = oracles.pack(4, torch.float16, keys="both", candidates=2)
    want = oracles.attention(q, k, v, slots, bounds, columns, **options)
    a, b, c = torch.cat([q, k, v], 1).split([4, 2, 2], 1)
    assert not b.is_contiguous()
    apart: dict[str, Any] = {
        name: torch.stack([x, x], -1)[..., 0] if isinstance(x, torch.Tensor) else x for name, x in options.items()
    }
    wide: Any = tuple(s.float() for s in slots)
    out = packed_attention(a, b, c, wide, bounds, torch.stack([columns, columns], -1)[:, 0], **apart)
    checks.close(out, want, torch.float16)


@pytest.mark.parametrize(
    ("programs", "tiles", "places", "want"),
    [(32, 17, 396, 9), (32, 5, 396, 3), (64, 17, 396, 6), (1, 100, 8, 8), (1, 100, 7, 7), (512, 17, 396, 1)],
)
def test_parts_fill_the_device_and_none_is_empty(programs: int, tiles: int, places: int, want: int) -> None:
    splits = module._splits(programs, tiles, places)
    each = -(-tiles // splits)
    assert splits == want
    assert (splits - 1) * each < tiles, "the last one has a tile"
    assert splits == 1 or programs * splits <= places
