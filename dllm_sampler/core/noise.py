"""Random numbers keyed by (row seed, step, position): batching, order and device never change them.

`CounterNoise` is the default: a hash of the key, no state. `ReplayNoise` draws from a `torch.Generator` in the order
of published code, so that a recorded run can be repeated; its draws depend on the batch, and it reads the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.statistics import rows_at_once
from dllm_sampler.core.values import Canvas


def gumbel(uniform: Tensor) -> Tensor:
    """Standard Gumbel noise from uniform noise; written so that the large values come from the fine end of floats."""
    return gumbel_(uniform.clone())


def gumbel_(uniform: Tensor) -> Tensor:
    """Apply `gumbel` in place."""
    return uniform.neg_().log1p_().neg_().log_().neg_()


# Streams keep the draws of one step apart.
TOKENS, ORDER, UNIFORM, IDS, FORMS, CANDIDATES, PICKS, PARTICLES = 1, 2, 3, 4, 5, 6, 7, 8

# 2^-31, less one part in 2^24: float32 rounds the largest 31-bit numbers up to 2^31, and uniform noise of 1 would be
# Gumbel noise of -inf, which lets a token of probability 0 tie with the only possible one.
SCALE = 2.0**-31 * (1 - 2.0**-24)


def _mix64(x: Tensor) -> Tensor:
    """Apply the splitmix64 finaliser to wrapping int64."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _mix32(x: Tensor) -> Tensor:
    """Apply a bias-free 32-bit finaliser (constants of C. Wellons' `lowbias32`) to wrapping int32, in place."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= -0x7B935975
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def key(canvas: Canvas, positions: Tensor, stream: int) -> Tensor:
    """Return `[B, Q] int64` hash of (row seed, step, position, stream); positions are columns."""
    return hashed(canvas.layout.seeds, canvas.step, positions, stream)


def hashed(seeds: Tensor, steps: Tensor, positions: Tensor, stream: int) -> Tensor:
    """Return `[N, Q] int64` the `key` of positions `[N, Q]` for `seeds [N]` and `steps [N]`."""
    return _mix64(_row_key(seeds, steps, stream)[:, None] + positions * -0x61C8864680B583EB)


def unit(keys: Tensor) -> Tensor:
    """Return `[...] float64` uniform in (0, 1) of `keys [...] int64`."""
    return ((keys & 0xFFFFFFFFFFFF).double() + 0.5) * 2.0**-48


def candidate_seeds(canvas: Canvas, candidate: int) -> Tensor:
    """Return `[B] int64` row seeds for candidate number `candidate` of this step. Number 1 has the row's own seed."""
    return hashed(canvas.layout.seeds, canvas.step, torch.full_like(canvas.start, candidate)[:, None], CANDIDATES)[:, 0]


def row_seeds(seeds: Tensor, number: int, rows: int) -> Tensor:
    """Return `[N, rows] int64` seeds of the rows of each prompt, from `seeds [N]`. Another `number` gives others."""
    slots = torch.arange(rows, device=seeds.device).expand(len(seeds), -1)
    return hashed(seeds, torch.full_like(seeds, number), slots, PARTICLES)


def _row_key(seed: Tensor, step: Tensor, stream: int) -> Tensor:
    return _mix64(_mix64(seed * -0x61C8864680B583EB + stream) + step * -0x61C8864680B583EB)


def token_noise(keys: Tensor, vocab: int) -> Tensor:
    """Return `[..., V]` standard Gumbel noise of `keys [...] int64`, each the `key` of a position in `TOKENS`."""
    k = keys.flatten()[:, None]
    low, high = (k & 0x7FFFFFFF).int(), ((k >> 32) & 0x7FFFFFFF).int()
    word = torch.arange(vocab, device=keys.device, dtype=torch.int32) * -0x61C88647
    found = torch.empty(len(k), vocab, device=keys.device, dtype=torch.float32)
    size = rows_at_once(found)
    for first, second, into in zip(low.split(size), high.split(size), found.split(size), strict=True):
        bits = _mix32(_mix32(word + first).bitwise_xor_(second)).bitwise_and_(0x7FFFFFFF)
        gumbel_(into.copy_(bits).add_(0.5).mul_(SCALE))
    return found.view(*keys.shape, vocab)


@dataclass(frozen=True)
class CounterNoise:
    """Counter-based noise: the same numbers for a row whatever else is in the batch.

    Args:
        begin: `[B]` column of the row at which the canvas begins, for a canvas that is one block of it. By default its
            first.
    """

    begin: Tensor | None = field(default=None, kw_only=True)

    def keys(self, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        """Return `[R] int64` the `key` of each answer's token, by the step that its candidate stands for."""
        row, position = head_rows.row, head_rows.position
        position = position if self.begin is None else position + self.begin[row]
        keys = _row_key(canvas.layout.seeds[row], head_rows.step(canvas), TOKENS)
        return _mix64(keys + position * -0x61C8864680B583EB)

    def tokens(self, canvas: Canvas, head_rows: HeadRows, vocab: int) -> Tensor:
        """See `Noise.tokens`."""
        return token_noise(self.keys(canvas, head_rows), vocab)

    def order(self, canvas: Canvas, positions: Tensor, count: Tensor) -> Tensor:
        """See `Noise.order`."""
        return gumbel(unit(self._key(canvas, positions, ORDER)))

    def uniform(self, canvas: Canvas, positions: Tensor) -> Tensor:
        """See `Noise.uniform`."""
        return unit(self._key(canvas, positions, UNIFORM))

    def ids(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        """See `Noise.ids`."""
        return ((self._key(canvas, positions, IDS) & 0x7FFFFFFF) * vocab) >> 31

    def _key(self, canvas: Canvas, positions: Tensor, stream: int) -> Tensor:
        return key(canvas, positions if self.begin is None else positions + self.begin[:, None], stream)


@dataclass(frozen=True)
class ReplayNoise:
    """Noise from torch's CPU generator in the order of published code. For the replay of recorded runs only.

    Args:
        seed: what the published run passed to `torch.manual_seed`.
        layout: whose order. `"dream"`: one draw per mask, in row order, ranking noise over the full row.
            `"llada"`: every draw covers the full row, masks or not. `"sdar"`: every position of the active block of
            a block-causal model, masks or not, and no draw where nothing is asked; one row.
        beyond: further columns after the canvas. `"llada"` draws tokens for them too.
        fine: `"llada"` draws uniform numbers in float64, as it does tokens, not in float32.
    """

    seed: int
    layout: Literal["dream", "llada", "sdar"]
    beyond: int = 0
    fine: bool = False
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "generator", torch.Generator().manual_seed(self.seed))

    def tokens(self, canvas: Canvas, head_rows: HeadRows, vocab: int) -> Tensor:
        """See `Noise.tokens`."""
        return head_rows.pick(self._tokens(canvas, head_rows.query.positions, vocab)[:, None])

    def _tokens(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        """Return `[B, Q, V]` noise of one candidate."""
        batch, width = positions.shape
        if self.layout == "llada":
            shape = (batch, canvas.length + self.beyond, vocab)
            noise = -torch.log(-torch.log(torch.rand(shape, dtype=torch.float64, generator=self.generator)))
            noise = torch.cat([noise[:, : canvas.length], noise.new_zeros(batch, 1, vocab)], 1)
            at = self._padded(canvas, positions)[..., None].expand(-1, -1, vocab)
            return noise.gather(1, at).to(positions.device)
        asked = (positions < canvas.length).cpu()
        if self.layout == "sdar":
            return self._blockwise(canvas, positions, asked, vocab)
        drawn = torch.empty(int(asked.sum()), vocab).exponential_(generator=self.generator)
        noise = torch.zeros(batch, width, vocab)
        noise[asked] = -torch.log(drawn)
        return noise.to(positions.device)

    def order(self, canvas: Canvas, positions: Tensor, count: Tensor) -> Tensor:
        """See `Noise.order`. No draw where nothing is to be chosen, as in the published loop."""
        if not bool((count > 0).any()):
            return torch.zeros(positions.shape, device=positions.device)
        row = torch.empty(canvas.ids.shape[0], canvas.length).exponential_(generator=self.generator)
        return self._gather(-torch.log(row), canvas, positions)

    def uniform(self, canvas: Canvas, positions: Tensor) -> Tensor:
        """See `Noise.uniform`."""
        if self.layout == "llada":
            shape, dtype = (canvas.ids.shape[0], canvas.length), torch.float64 if self.fine else torch.float32
            return self._gather(torch.rand(shape, dtype=dtype, generator=self.generator), canvas, positions)
        asked = (positions < canvas.length).cpu()
        out = torch.ones(positions.shape)
        out[asked] = torch.rand(int(asked.sum()), generator=self.generator)
        return out.to(positions.device)

    def pick(self, weight: Tensor) -> Tensor:
        """Return `[N]` one draw in proportion to each row of `weight [N, V]`, on the CPU."""
        return torch.multinomial(weight, 1, generator=self.generator)[:, 0]

    def ids(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        """See `Noise.ids`. DiffusionGemma's code draws after every step, once for nothing when a canvas is over."""
        opens = canvas.age == 0
        if bool((opens & (canvas.step > 0)).any()):
            torch.randint(vocab, positions.shape, generator=self.generator)
        return torch.randint(vocab, positions.shape, generator=self.generator).to(positions.device)

    def _blockwise(self, canvas: Canvas, positions: Tensor, asked: Tensor, vocab: int) -> Tensor:
        grid = canvas.layout.grid
        assert grid is not None and positions.shape[0] == 1
        if not bool(asked.any()):
            return torch.zeros(*positions.shape, vocab, device=positions.device)
        drawn = -torch.log(torch.empty(grid.length, vocab).exponential_(generator=self.generator))
        inside = (positions - canvas.grid_start()[:, None]).clamp(max=grid.length - 1)
        return drawn[inside.cpu()].to(positions.device)

    def _gather(self, row: Tensor, canvas: Canvas, positions: Tensor) -> Tensor:
        row = torch.cat([row, row.new_zeros(row.shape[0], 1)], 1)
        return row.gather(1, self._padded(canvas, positions)).to(positions.device)

    @staticmethod
    def _padded(canvas: Canvas, positions: Tensor) -> Tensor:
        """Return `[B, Q]` the columns in published code, whose rows are left-padded; on the CPU."""
        behind = canvas.layout.first.max() - canvas.layout.first
        return (positions + behind[:, None]).clamp(max=canvas.length).cpu()
