"""Shared parts of readout and head: the statistics of a part of the vocabulary, and of all parts together.

Nine numbers describe a part. They keep the probability of all tokens but the best, however small it is:

    best       highest logit and its id, the lowest id among equals
    rest       sum of exp(x - best) over all others, so that a probability is 1 / (1 + rest)
    spread     sum of exp(x - best) (best - x) over all others, for the entropy: no difference of large numbers
    second     highest logit but one
    chosen     highest logit + noise, its id, its logit
    current    logit of the token that the caller named

Every function works on `[R, n]` tiles. `LOW` stands for -inf, since the difference of two infinities is NaN.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportOptionalCall=false, reportPossiblyUnboundVariable=false
# A kernel is not Python: pyright takes its tiles for tuples and knows nothing of launches.

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dllm_sampler.core import noise
from dllm_sampler.core.values import Readout
from dllm_sampler.kernels.sampling import Sampling
from dllm_sampler.kernels.sizes import next_power_of_2

LOW = tl.constexpr(-1e30)
BEYOND = tl.constexpr(2**31 - 1)  # no id
SCALE = tl.constexpr(noise.SCALE)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as it was when `triton.jit` read it
map_elementwise = getattr(tl, "map_elementwise", None)  # None: Triton 3.4
MAPS = tl.constexpr(map_elementwise is not None and not triton.knobs.runtime.interpret)  # the interpreter cannot
LOG2E = tl.constexpr(math.log2(math.e))
REALS = tl.constexpr(7)  # floats of a part: best, rest, spread, second, chosen, its logit, current
NAMES = tl.constexpr(2)  # and ids: best, chosen


@triton.jit
def gumbel(low, high, ids):
    """Return `noise.token_noise` at `ids`, from the two words of a key. Only the logarithm's rounding differs."""
    bits = ids.to(tl.uint32) * 0x9E3779B9 + low
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = (bits ^ (bits >> 16)) ^ high
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = (bits ^ (bits >> 16)) & 0x7FFFFFFF
    u = (bits.to(tl.int32).to(tl.float32) + 0.5) * SCALE
    # log1p: the rounding of 1 - u is undone by the factor (W. Kahan).
    y = 1.0 - u
    log = tl.where(y == 1.0, -u, tl.log(y) * (u / tl.where(y == 1.0, 1.0, 1.0 - y)))
    return -tl.log(-log)


@triton.jit
def noises(low, high, ids):
    """Return `gumbel` of words `[R, 1]` and ids `[R, n]`, token by token if possible, since a tile fills registers."""
    if MAPS:
        return map_elementwise(gumbel, low, high, ids)
    return gumbel(low, high, ids)


@triton.jit
def words(keys, rows, inside):
    """Return the low and the high word of the keys of `rows`, as `gumbel` takes them."""
    key = tl.load(keys + rows, mask=inside, other=0)
    return (key & 0x7FFFFFFF).to(tl.uint32), ((key >> 32) & 0x7FFFFFFF).to(tl.uint32)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Return `x` as float32, rounded to the nearest number of DTYPE, ties to even."""
    if INTERPRETED and tl.bfloat16 == DTYPE:  # by hand: the interpreter truncates
        bits = x.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return tl.where(x == x, near.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def refine(raw, ids, temperature, V: tl.constexpr, MASK: tl.constexpr, SCALED: tl.constexpr):
    """Return float32 logits, -inf at the mask token and beyond the vocabulary. If SCALED, divide by the temperature."""
    x = raw.to(tl.float32)
    if SCALED:
        x = tl.math.div_rn(x, temperature)  # as torch does: no product with the inverse
    return tl.where((ids >= V) | (ids == MASK), -float("inf"), x)


@triton.jit
def floor(x):
    """Return `x` with -inf replaced by `LOW`. NaN stays."""
    return tl.where(x < LOW, LOW, x)


@triton.jit
def weigh(away):
    """Return exp(-away), and `away` clamped, so that their product is 0 where `away` is infinite. NaN stays."""
    far = tl.minimum(away, 200.0, propagate_nan=tl.PropagateNan.ALL)  # exp(-200) is 0 in float32
    return tl.exp2(far * -LOG2E), far  # flushes subnormals, on which `exp` spends operations


@triton.jit
def drawn(score, ids, logits):
    """Return the highest score of each row of `[R, n]`, its id and its logit: `[R, 1]` each."""
    best = tl.max(score, 1, keep_dims=True)
    at = tl.min(tl.where(score == best, ids, BEYOND), 1, keep_dims=True)
    held = (score == best) & (ids == at)
    return best, at, tl.max(tl.where(held, logits, LOW), 1, keep_dims=True)


@triton.jit
def reduce(best, best_id, rest, spread, second, chosen, chosen_id, chosen_logit):
    """Return the numbers `[R, 1]` of one part in place of the n parts of each row, `[R, n]` each."""
    top = tl.max(best, 1, keep_dims=True)
    at = tl.min(tl.where(best == top, best_id, BEYOND), 1, keep_dims=True)
    leads = (best == top) & (best_id == at)
    weight, far = weigh(top - best)
    mass = weight * (rest + 1.0)
    moved = weight * (spread + far * (rest + 1.0))
    runner = tl.max(tl.where(leads, second, best), 1, keep_dims=True)
    score, draw_id, draw_logit = drawn(chosen, chosen_id, chosen_logit)
    return (
        top,
        at,
        tl.sum(tl.where(leads, rest, mass), 1, keep_dims=True),
        tl.sum(tl.where(leads, spread, moved), 1, keep_dims=True),
        runner,
        score,
        draw_id,
        draw_logit,
    )


@triton.jit
def put(reals, names, at, inside, size, part, current):
    """Write the parts `[R, 1]` to `at` of the buffers `[REALS, size]` and `[NAMES, size]`."""
    best, best_id, rest, spread, second, chosen, chosen_id, chosen_logit = part
    tl.store(reals + at, best, mask=inside)
    tl.store(reals + size + at, rest, mask=inside)
    tl.store(reals + 2 * size + at, spread, mask=inside)
    tl.store(reals + 3 * size + at, second, mask=inside)
    tl.store(reals + 4 * size + at, chosen, mask=inside)
    tl.store(reals + 5 * size + at, chosen_logit, mask=inside)
    tl.store(reals + 6 * size + at, current, mask=inside)
    tl.store(names + at, best_id, mask=inside)
    tl.store(names + size + at, chosen_id, mask=inside)


@triton.jit
def log1p(x):
    """Return log(1 + x) in float64, for x of at least 0."""
    return tl.where(x < 1e-5, x * (1.0 - x * (0.5 - x / 3.0)), tl.log(1.0 + x))


@triton.jit
def combine_kernel(
    rows, reals, names, token, confidence, margin, gap, entropy, logsumexp, current,
    PARTS: tl.constexpr, LANES: tl.constexpr, DRAW: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one row, with sums in float32 and statistics in float64."""
    row = tl.program_id(0).to(tl.int64)
    size = tl.cast(rows, tl.int64) * PARTS
    lane = tl.arange(0, LANES)[None]
    at = row * PARTS + lane
    inside = lane < PARTS
    best = tl.load(reals + at, mask=inside, other=LOW)
    rest = tl.load(reals + size + at, mask=inside, other=0.0)
    spread = tl.load(reals + 2 * size + at, mask=inside, other=0.0)
    second = tl.load(reals + 3 * size + at, mask=inside, other=LOW)
    chosen = tl.load(reals + 4 * size + at, mask=inside, other=-float("inf"))
    logit = tl.load(reals + 5 * size + at, mask=inside, other=LOW)
    named = tl.max(tl.load(reals + 6 * size + at, mask=inside, other=-float("inf")), 1, keep_dims=True)
    best_id = tl.load(names + at, mask=inside, other=BEYOND)
    chosen_id = tl.load(names + size + at, mask=inside, other=BEYOND)
    best, best_id, rest, spread, second, chosen, chosen_id, logit = reduce(
        best, best_id, rest, spread, second, chosen, chosen_id, logit
    )
    one = row + tl.zeros([1, 1], tl.int64)
    peak = best.to(tl.float64)
    rest = rest.to(tl.float64)
    total = 1.0 + rest
    void = tl.where((best > LOW) & (best < float("inf")) & (rest == rest), 0.0, float("nan")).to(tl.float64)
    own = tl.zeros([1, 1], tl.float64) + 1.0
    pick = best_id
    if DRAW:
        own = tl.exp(logit.to(tl.float64) - peak)
        pick = chosen_id
    tl.store(token + one, tl.where(best > LOW, pick, 0).to(tl.int64))
    tl.store(confidence + one, own / total + void)
    apart = tl.where(second > LOW, peak - second.to(tl.float64), float("inf"))
    tl.store(gap + one, apart + void)
    tl.store(margin + one, (1.0 - tl.exp(-apart)) / total + void)
    log_total = log1p(rest)
    uncertain = log_total + spread.to(tl.float64) / total
    tl.store(entropy + one, uncertain + void)
    tl.store(logsumexp + one, peak + log_total + void)
    if current is not None:
        tl.store(current + one, named.to(tl.float64) - (peak + log_total) + void)


def room(rows: int, parts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate the buffers for the parts of each row: `[REALS, rows, parts]`, `[NAMES, rows, parts]`."""
    return (
        torch.empty(REALS.value, rows, parts, dtype=torch.float32, device=device),
        torch.empty(NAMES.value, rows, parts, dtype=torch.int32, device=device),
    )


def constants(vocab: int, sampling: Sampling) -> dict[str, Any]:
    """Return the constants that `readout_kernel` and `head_kernel` share."""
    mask, draws = -1 if sampling.mask_id is None else sampling.mask_id, sampling.draws
    return {"V": vocab, "MASK": mask, "DRAW": draws, "MEASURED": sampling.measured and draws}


def finishing(parts: int, draw: bool) -> dict[str, Any]:
    """Return the constants of `combine_kernel`."""
    return {"PARTS": parts, "LANES": next_power_of_2(parts), "DRAW": draw}


def empty(rows: int, device: torch.device, sampling: Sampling) -> Readout:
    """Allocate a kernel's result for `rows`: float64, except the token."""

    def real() -> Tensor:
        return torch.empty(rows, dtype=torch.float64, device=device)

    return Readout(
        token=torch.empty(rows, dtype=torch.int64, device=device),
        confidence=real(),
        margin=real(),
        gap=real(),
        entropy=real(),
        logsumexp=real(),
        current=None if sampling.current is None else real(),
    )


def finish(sampling: Sampling, reals: Tensor, names: Tensor) -> Readout:
    """Return the statistics of each row, from its parts in the buffers that `room` allocated."""
    rows, parts = names.shape[1:]
    found = empty(rows, names.device, sampling)
    combine_kernel[(rows,)](
        rows, reals, names,
        found.token, found.confidence, found.margin, found.gap, found.entropy, found.logsumexp, found.current,
        **finishing(parts, sampling.draws), num_warps=4, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip
    return found
