"""Block attention against float64, one query at a time."""

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dllm_sampler.kernels import attention as module
from dllm_sampler.kernels.attention import block_attention, columns_of
from dllm_sampler.models.transformer import block_causal
from tests.kernels import checks, oracles
from tests.turns import by_turns

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(("dtype", "size"), by_turns(3, DTYPES, [16, 64, 80, 96, 128]))
def test_widths_and_dtypes(dtype, size):
    checks.attention(*oracles.case(size, dtype, size=size, splits=1 + size % 3))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (8, 1), (6, 2), (7, 1)])
def test_heads_share_keys(heads, kv_heads):
    checks.attention(*oracles.case(heads, heads=heads, kv_heads=kv_heads, width=5))


@given(seed=st.integers(0, 10**6), data=st.data())
@settings(max_examples=16, deadline=None, phases=[Phase.generate])  # shrinking takes minutes
def test_every_combination(seed, data):
    def pick(*values):
        return data.draw(st.sampled_from(values))

    width, batch, length = pick(1, 2, 5, 17), pick(1, 3), pick(4, 33, 90)
    given, options = oracles.case(
        seed, pick(*DTYPES[:2]), width=width, batch=batch, length=length, heads=pick(2, 6), kv_heads=2, size=8,
        grid=pick(None, 1, 4, 7), splits=pick(1, 2, 5), scale=pick(None, 0.3), fresh=(fresh := pick(True, False)),
    )  # fmt: skip
    if data.draw(st.booleans()):
        shape = (pick(1, batch), pick(1, width), length + 1)
        options["mask"] = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    if not fresh:
        given = (given[0], None, None, *given[3:])
    elif data.draw(st.booleans()):
        options["tree"] = torch.rand(1, width, width, generator=torch.Generator().manual_seed(seed)) < 0.5
    checks.attention(given, options)


@pytest.mark.parametrize("phase", [0, 1, 3])
def test_blocks_are_counted_from_the_first_token(phase):
    given, options = oracles.case(phase, width=6, length=24, grid=4, batch=1)
    options |= {"begin": torch.tensor([phase]), "limit": torch.tensor([22])}
    positions = torch.arange(7, 13)[None]
    slots = tuple(torch.randn(1, 25, 2, 16) for _ in range(2))
    last = phase + ((12 - phase) // 4 + 1) * 4  # the end of the last query's block
    for s in slots:
        s[:, last:] = s[:, :phase] = torch.nan
    out = checks.attention((*given[:3], slots, positions), options)
    # The same through the mask that caches make.
    mask = block_causal(positions - phase, torch.arange(25)[None] - phase, 4)
    other = checks.attention((*given[:3], slots, positions), options | {"grid": None, "mask": mask})
    torch.testing.assert_close(out, other)


@pytest.mark.parametrize(("splits", "grid"), [(1, 4), (3, None)])
def test_side_by_side_is_as_on_the_batch_axis(splits, grid):
    """Drafts under a tree mask, drafts as a larger batch, and each draft alone: one answer."""
    many, width, batch = 3, 4, 2
    (q, k, v, slots, positions), options = oracles.case(
        1, width=width, batch=batch, share=many, grid=grid, splits=splits
    )
    given = (q, k, v, slots, positions)
    expanded = checks.attention(given, options)

    def beside(x):
        return x.unflatten(0, (batch, many)).flatten(1, 2)  # [B, K*M, H, Dh]

    branch = torch.arange(many * width) // width
    tree = (branch[:, None] == branch)[None]
    out = checks.attention((beside(q), beside(k), beside(v), slots, positions), options | {"tree": tree})
    torch.testing.assert_close(out, beside(expanded), rtol=0, atol=2e-6)
    for c in range(many):
        alone = block_attention(
            q[c::many], k[c::many], v[c::many], tuple(s.clone() for s in slots), positions, **options
        )
        torch.testing.assert_close(alone, expanded[c::many], rtol=0, atol=2e-6)


def test_who_sees_nothing_answers_zeros():
    given, options = oracles.case(5, width=3)
    options["mask"] = torch.zeros(1, 1, 21, dtype=torch.bool)
    for splits in (1, 4):
        assert (checks.attention(given, options | {"splits": splits}) == 0).all()
    given, options = oracles.case(5, width=3)
    options["limit"] = options["begin"]
    q, k, v, slots, _ = given
    nan = tuple(torch.full_like(s, torch.nan) for s in slots)
    out = checks.attention((q, k, v, nan, torch.full((2, 3), 20)), options)  # fillers, and none else
    assert (out == 0).all()


def test_a_forward_that_computes_every_column_reads_no_slot():
    (q, k, v, slots, _), options = oracles.case(2, width=12, length=12, batch=2)
    nan = tuple(torch.full_like(s, torch.nan) for s in slots)
    positions = torch.arange(12).expand(2, -1)
    out = checks.attention((q, k, v, nan, positions), options | {"stored": False})
    plain = block_attention(q, k, v, None, positions, begin=options["begin"], limit=options["limit"])
    assert torch.equal(out, plain)


@pytest.mark.parametrize(("dtype", "factor"), by_turns(3, DTYPES, [0.0, 1e-4, 30.0]))
def test_extreme_scores(dtype, factor):
    (q, k, v, slots, positions), options = oracles.case(3, dtype, width=4)
    checks.attention((q * factor, k, v * 100, slots, positions), options | {"splits": 2})


def test_views_wider_slots_and_a_map_made_once():
    (q, k, v, slots, positions), options = oracles.case(4, torch.float16, width=3)
    wide = torch.cat([q, k, v], 2)
    views = wide.split([4, 2, 2], 2)
    assert not views[1].is_contiguous()
    want, after = oracles.attention(q, k, v, slots, positions, **options)
    own: Any = tuple(s.float() for s in slots)
    out = block_attention(
        views[0], views[1], views[2], own, positions, overwritten=columns_of(positions, 21), **options
    )
    checks.close(out, want, torch.float16)
    for slot, right in zip(own, after, strict=True):
        assert torch.equal(slot.nan_to_num(7.0), right.float().nan_to_num(7.0))


def test_transposed_heads_as_the_network_has_them():
    (q, k, v, slots, positions), options = oracles.case(6, width=3)
    a, b, c = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    first = block_attention(q, k, v, tuple(s.clone() for s in slots), positions, **options)
    assert torch.equal(first, block_attention(a, b, c, tuple(s.clone() for s in slots), positions, **options))


def test_answers_as_the_cache_layer_does():
    """The default layer of `Cache` stores, then attends over all slots: the kernel's answer in one launch."""
    (q, k, v, slots, positions), _ = oracles.case(7, width=3, batch=1)
    slots: Any = tuple(torch.randn_like(s) for s in slots)
    positions = torch.tensor([[3, 4, 9]])
    seen = torch.zeros(1, 21, dtype=torch.bool)
    seen[:, 2:17] = True
    stored = [s.clone() for s in slots]
    for s, fresh in zip(stored, (k, v), strict=True):
        s[:, positions[0]] = fresh
    grouped = torch.nn.functional.scaled_dot_product_attention
    want = grouped(*(x.transpose(1, 2) for x in (q, *stored)), attn_mask=seen[:, None, None], enable_gqa=True)
    out = block_attention(q, k, v, slots, positions, begin=torch.tensor([2]), limit=torch.tensor([17]))
    torch.testing.assert_close(out, want.transpose(1, 2), rtol=0, atol=2e-6)
    assert all(torch.equal(a, b) for a, b in zip(slots, stored, strict=True))


@pytest.mark.parametrize(("programs", "tiles", "want"), [(1, 100, 2), (1, 3, 1), (2, 100, 1), (50, 8, 1)])
def test_no_more_parts_than_fill_the_device(programs, tiles, want):
    assert module._splits(programs, tiles, torch.device("cpu")) == want


def test_configurations_are_launches():
    checks.configurations(module.CONFIGURATIONS)
