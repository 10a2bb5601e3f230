"""Random numbers keyed by (row seed, step, position): batching, order and device never change them.

`CounterNoise` is the default: a hash of the key, without a state. `ReplayNoise` repeats a recorded run: it draws from a
`torch.Generator` on the CPU in the order of published code, so its draws depend on the batch.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.statistics import rows_at_once
from dllm_sampler.core.values import Canvas


def gumbel(uniform: Tensor) -> Tensor:
    """Return Gumbel noise from uniform noise in (0, 1). Large values come from near 0, where floats are finest."""
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
    """Return int64 hashed by the splitmix64 finaliser. Products wrap around."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _mix32(x: Tensor) -> Tensor:
    """Hash int32 in place by C. Wellons' `lowbias32`. Products wrap around."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= -0x7B935975
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def key(canvas: Canvas, positions: Tensor, stream: int) -> Tensor:
    """Return `[B, Q] int64` hashes of row seed, step, position (a column) and stream."""
    return hashed(canvas.layout.seeds, canvas.step, positions, stream)


def hashed(seeds: Tensor, steps: Tensor, positions: Tensor, stream: int) -> Tensor:
    """Return `[N, Q] int64` the hashes that `key` returns, for `seeds [N]`, `steps [N]` and `positions [N, Q]`."""
    return _mix64(_row_key(seeds, steps, stream)[:, None] + positions * -0x61C8864680B583EB)


def unit(keys: Tensor) -> Tensor:
    """Return `[...] float64` uniform numbers in (0, 1) from `keys [...] int64`."""
    return ((keys & 0xFFFFFFFFFFFF).double() + 0.5) * 2.0**-48


def candidate_seeds(canvas: Canvas, candidate: int) -> Tensor:
    """Return `[B] int64` row seeds for a candidate from 1 on. Candidate 0 has the row's own seed (`Layout.seeds`)."""
    return hashed(canvas.layout.seeds, canvas.step, torch.full_like(canvas.start, candidate)[:, None], CANDIDATES)[:, 0]


def row_seeds(seeds: Tensor, number: int, rows: int) -> Tensor:
    """Return `[N, rows] int64` seeds for the rows of N prompts with `seeds [N]`. Each `number` gives another set."""
    slots = torch.arange(rows, device=seeds.device).expand(len(seeds), -1)
    return hashed(seeds, torch.full_like(seeds, number), slots, PARTICLES)


def _row_key(seed: Tensor, step: Tensor, stream: int) -> Tensor:
    return _mix64(_mix64(seed * -0x61C8864680B583EB + stream) + step * -0x61C8864680B583EB)


def token_noise(keys: Tensor, vocab: int) -> Tensor:
    """Return `[..., V] float32` standard Gumbel noise from `keys [...] int64`, hashes of the stream `TOKENS`."""
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
        begin: `[B]` column of the row at which the canvas begins, if the canvas holds one block of the row only. The
            default is column 0.
    """

    begin: Tensor | None = field(default=None, kw_only=True)

    def keys(self, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        """Return `[R] int64` the hash for each head row's token noise, with the step of its candidate."""
        row, position = head_rows.row, head_rows.position
        position = position if self.begin is None else position + self.begin[row]
        keys = _row_key(canvas.layout.seeds[row], head_rows.step(canvas), TOKENS)
        return _mix64(keys + position * -0x61C8864680B583EB)

    def tokens(self, canvas: Canvas, head_rows: HeadRows, vocab: int) -> Tensor:
        """Return token noise `[R, V]` in float32 (`Noise.tokens`)."""
        return token_noise(self.keys(canvas, head_rows), vocab)

    def order(self, canvas: Canvas, positions: Tensor, count: Tensor) -> Tensor:
        """Return ranking noise `[B, Q]` in float64, whatever `count` is (`Noise.order`)."""
        return gumbel(unit(self._key(canvas, positions, ORDER)))

    def uniform(self, canvas: Canvas, positions: Tensor) -> Tensor:
        """Return uniform numbers `[B, Q]` in float64 (`Noise.uniform`)."""
        return unit(self._key(canvas, positions, UNIFORM))

    def ids(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        """Return random token ids `[B, Q]` (`Noise.ids`)."""
        return ((self._key(canvas, positions, IDS) & 0x7FFFFFFF) * vocab) >> 31

    def _key(self, canvas: Canvas, positions: Tensor, stream: int) -> Tensor:
        return key(canvas, positions if self.begin is None else positions + self.begin[:, None], stream)


@dataclass(frozen=True)
class ReplayNoise:
    """Noise from torch's CPU generator in the order of published code. For the replay of recorded runs only.

    Args:
        seed: number that the published run passed to `torch.manual_seed`.
        layout: published code whose order is repeated. `"dream"` draws for each queried position, in row order, and
            ranking noise for the full row. `"llada"` draws for the full row. `"sdar"` draws for each position of the
            active block of a block-causal model, unless nothing is queried. It takes a single row.
        beyond: columns after the canvas that `"llada"` draws token noise for too.
        fine: `"llada"` draws uniform numbers in float64 in place of float32.
    """

    seed: int
    layout: Literal["dream", "llada", "sdar"]
    beyond: int = 0
    fine: bool = False
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "generator", torch.Generator().manual_seed(self.seed))

    def tokens(self, canvas: Canvas, head_rows: HeadRows, vocab: int) -> Tensor:
        """Return token noise `[R, V]` in the published order (`Noise.tokens`)."""
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
        """Return ranking noise `[B, Q]` (`Noise.order`). Draws nothing if every `count` is 0, as the published loop."""
        if not bool((count > 0).any()):
            return torch.zeros(positions.shape, device=positions.device)
        row = torch.empty(canvas.ids.shape[0], canvas.length).exponential_(generator=self.generator)
        return self._gather(-torch.log(row), canvas, positions)

    def uniform(self, canvas: Canvas, positions: Tensor) -> Tensor:
        """Return uniform numbers `[B, Q]` in the published order (`Noise.uniform`)."""
        if self.layout == "llada":
            shape, dtype = (canvas.ids.shape[0], canvas.length), torch.float64 if self.fine else torch.float32
            return self._gather(torch.rand(shape, dtype=dtype, generator=self.generator), canvas, positions)
        asked = (positions < canvas.length).cpu()
        out = torch.ones(positions.shape)
        out[asked] = torch.rand(int(asked.sum()), generator=self.generator)
        return out.to(positions.device)

    def pick(self, weight: Tensor) -> Tensor:
        """Return `[N]` one index for each row of `weight [N, V]`, drawn in proportion to it. Both are on the CPU."""
        return torch.multinomial(weight, 1, generator=self.generator)[:, 0]

    def ids(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        """Return random token ids `[B, Q]` (`Noise.ids`). A new block drops one draw, as published code."""
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
        """Return `[B, Q]` the columns of `positions` in left-padded rows, as in published code, on the CPU."""
        behind = canvas.layout.first.max() - canvas.layout.first
        return (positions + behind[:, None]).clamp(max=canvas.length).cpu()
