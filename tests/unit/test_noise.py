"""Counter-based noise: its distribution, and that nothing but (seed, step, position) matters."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dllm_sampler import Canvas, CounterNoise, Query, ReplayNoise
from dllm_sampler.core import statistics
from dllm_sampler.core.noise import SCALE, _mix32, gumbel, token_noise
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.values import Noise
from tests import toys
from tests.sampling import each

NOISE = CounterNoise()


def rows(seeds: list[int], length: int, step: int = 0) -> Canvas:
    canvas = toys.canvas(torch.ones(len(seeds), length, dtype=torch.bool))
    return toys.changed(canvas, seeds=torch.tensor(seeds), step=canvas.step + step)


def columns(canvas: Canvas) -> Tensor:
    return canvas.columns()[:, :-1].expand(canvas.ids.shape[0], -1)


def tokens(canvas: Canvas, at: Tensor, vocab: int, noise: Noise = NOISE) -> Tensor:
    """`[B, Q, V]` noise of the tokens at `at [B, Q]`."""
    return noise.tokens(canvas, HeadRows.every(Query.at(canvas, at)), vocab).view(*at.shape, vocab)


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Standard deviations by which the chi-square statistic exceeds its mean."""
    freedom = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@each("vary", ["seed", "step", "position"])
def test_uniform(vary):
    many = 20_000
    if vary == "position":
        canvas = rows([1], many)
    elif vary == "seed":
        canvas = rows(list(range(many)), 1)
    else:
        canvas = replace(rows([1] * many, 1), step=torch.arange(many))
    u = NOISE.uniform(canvas, columns(canvas)).flatten()
    assert u.min() > 0 and u.max() < 1
    counts = torch.histc(u, 50, 0, 1)
    assert abs(chi_square(counts, torch.full_like(counts, many / 50))) < 4
    # neighbours are independent: pairs fill the unit square evenly
    pairs = torch.bincount((u[:-1:2] * 7).long() * 7 + (u[1::2] * 7).long(), minlength=49).double()
    assert abs(chi_square(pairs, torch.full_like(pairs, many / 2 / 49))) < 4


@each("stream", ["tokens", "order"])
def test_gumbel_moments(stream):
    canvas = rows(list(range(40)), 50)
    if stream == "tokens":
        draws = tokens(canvas, columns(canvas), 50).double()
    else:
        steps = [replace(canvas, step=canvas.step + i) for i in range(50)]
        draws = torch.stack([NOISE.order(one, columns(one), one.step) for one in steps])
    many = draws.numel()
    variance = math.pi**2 / 6
    assert float(draws.mean()) == pytest.approx(0.5772156649, abs=4 * math.sqrt(variance / many))
    assert float(draws.var()) == pytest.approx(variance, abs=4 * math.sqrt(4.4 * variance**2 / many))


@each("at_once", [1, 3, 8])
@each("dtype", [torch.float32, torch.float16, torch.float64])
def test_the_same_bits_however_it_is_made(monkeypatch, at_once, dtype):
    """In parts of any number of rows, and whatever torch's default dtype is."""
    keys = torch.randint(-(2**62), 2**62, (2, 4), generator=torch.Generator().manual_seed(3))
    k, word = keys[..., None], torch.arange(90, dtype=torch.int32) * -0x61C88647
    mixed = _mix32(_mix32(word + (k & 0x7FFFFFFF).int()) ^ ((k >> 32) & 0x7FFFFFFF).int()) & 0x7FFFFFFF
    wanted = gumbel((mixed.float() + 0.5) * SCALE)
    monkeypatch.setattr(statistics, "CACHE", at_once * 90)
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(token_noise(keys, 90), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


def test_argmax_is_a_sample():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0, -math.inf])
    canvas = rows(list(range(300)), 100)
    sample = (logits + tokens(canvas, columns(canvas), 6)).argmax(-1)
    counts = torch.bincount(sample.flatten(), minlength=6).double()
    assert counts[5] == 0
    assert abs(chi_square(counts[:5], logits.double().softmax(-1)[:5] * sample.numel())) < 4


def test_top_k_of_order_draws_without_replacement():
    """The first of two positions is chosen by softmax of the scores."""
    canvas = rows(list(range(20_000)), 2)
    score = torch.tensor([0.0, 1.0], dtype=torch.float64)
    first = (score + NOISE.order(canvas, columns(canvas), canvas.step)).argmax(-1)
    share = float((first == 1).double().mean())
    p = math.e / (1 + math.e)
    assert share == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 20_000))


def test_every_part_of_the_key_matters():
    base = rows([5], 3)
    at = columns(base)
    draws = [
        tokens(base, at, 8),
        tokens(toys.changed(base, seeds=base.layout.seeds + 1), at, 8),
        tokens(replace(base, step=base.step + 1), at, 8),
        tokens(toys.changed(base, seeds=base.layout.seeds + 2**40), at, 8),
    ]
    drawn = torch.stack(draws).flatten()
    assert len(drawn.unique()) == drawn.numel()
    singles = torch.stack([NOISE.uniform(base, at), gumbel(NOISE.uniform(base, at)), NOISE.order(base, at, base.step)])
    assert len(singles.unique()) == singles.numel(), "streams share draws"


def test_neighbours_order_and_padding_do_not_matter():
    batch = rows([3, 9, 4], 6)
    order = torch.tensor([[4, 0, 6], [6, 5, 1], [2, 2, 3]])
    full, some = tokens(batch, columns(batch), 5), tokens(batch, order, 5)
    for row in range(3):
        for place, column in enumerate(order[row].tolist()):
            if column < 6:
                assert torch.equal(some[row, place], full[row, column])
    alone = rows([9], 6)
    assert torch.equal(tokens(alone, columns(alone), 5)[0], full[1])
    # A larger vocabulary adds tokens and changes none.
    assert torch.equal(tokens(alone, columns(alone), 9)[..., :5], full[1:2])


def test_no_hidden_state():
    canvas = rows([1, 2], 4)
    state = torch.random.get_rng_state()
    one = tokens(canvas, columns(canvas), 7)
    torch.manual_seed(99)
    assert torch.equal(one, tokens(canvas, columns(canvas), 7, CounterNoise()))
    torch.random.set_rng_state(state)
    NOISE.uniform(canvas, columns(canvas))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_known_draws():
    """A seed gives the same answer in every version: these numbers never change."""
    canvas = rows([0, 123456789], 2)
    at = columns(canvas)
    uniform = [0.5287873989879852, 0.48995427225487553, 0.12088632742439209, 0.22740345313096277]
    assert NOISE.uniform(canvas, at).flatten().tolist() == uniform
    drawn = tokens(canvas, at[:, :1], 2).flatten()
    assert drawn.tolist() == pytest.approx([-0.15807918, 2.75881052, 1.37461495, -1.69220519], rel=1e-6)


@each("bits", [0, 1, 2**31 - 65, 2**31 - 1])
def test_gumbel_noise_is_finite_at_both_ends(bits):
    """Noise of -inf would make the only possible token as bad as the impossible ones."""
    uniform = (torch.tensor([bits], dtype=torch.int32).float() + 0.5) * SCALE
    assert 0 < float(uniform) < 1
    assert gumbel(uniform).isfinite()


@each("layout", ["llada", "dream"])
def test_replay_draws_from_torchs_generator(layout):
    canvas = rows([0, 0], 3)
    at = torch.tensor([[0, 2], [1, 3]])  # 3 is the empty slot
    found = tokens(canvas, at, 4, ReplayNoise(5, layout))
    generator = torch.Generator().manual_seed(5)
    if layout == "llada":
        drawn = -torch.log(-torch.log(torch.rand(2, 3, 4, dtype=torch.float64, generator=generator)))
        expected = [drawn[0, 0], drawn[0, 2], drawn[1, 1]]
    else:
        expected = list(-torch.log(torch.empty(3, 4).exponential_(generator=generator)))
    for row, draw in zip([found[0, 0], found[0, 1], found[1, 0]], expected, strict=True):
        assert torch.equal(row, draw)
