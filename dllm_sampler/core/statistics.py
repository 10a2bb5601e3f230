"""Statistics of distributions over the vocabulary, and the choice of the most likely token, on any device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dllm_sampler.core.select import arange
from dllm_sampler.core.values import Readout

TILE = 64  # the least width of the tiles that `argmax` looks at
MANY = 2**15  # logits: from here on a CPU finds the best one faster in tiles than by torch's argmax
CACHE = 2**19  # numbers that are worked on at once: a CPU still has them in a cache, and there are few calls
LEAST = 2.0**-23  # of a probability in `jensen_shannon`
TINY = 1e-12  # a probability that is added where a logarithm or a quotient must stay finite
# Temperatures outside are brought to the nearer end: the quotients stay finite, and the law is the limit's already.
COLDEST, HOTTEST = 1e-20, 1e20


class Predictions(NamedTuple):
    """Whole distributions in the form that the readout has (`predictions` in `needs`), to compare with later ones."""

    table: Tensor  # [B, Q, V] probabilities, or logits
    norm: Tensor | None  # [B, Q] the logits' logsumexp. None for probabilities

    @staticmethod
    def of(readout: Readout) -> Predictions:
        """Return the predictions of candidate 0."""
        if readout.probabilities is not None:
            return Predictions(readout.probabilities[:, 0], None)
        assert readout.logits is not None and readout.logsumexp is not None
        return Predictions(readout.logits[:, 0], readout.logsumexp[:, 0])

    def drift(self, then: Predictions, index: Tensor, precise: bool) -> Tensor:
        """Return `[B, Q]` the KL in nats from earlier predictions `then`, at `index [B, Q]` in their flat `[B*Q]`.

        `precise` is as in `divergence`. It has no effect on logits.
        """
        now, old, at = self.table.flatten(0, 1), then.table.flatten(0, 1), index.flatten()
        if self.norm is None or then.norm is None:
            return divergence(now, old, at, precise).view_as(index)
        old = old.to(now.dtype)  # before the first step it is in the model's dtype, and autocast has another
        precision = torch.promote_types(now.dtype, torch.float32)
        old = (old.to(precision) - then.norm.flatten()[:, None].to(precision)).exp_()
        return divergence(torch.softmax(now, -1, dtype=precision), old, at).double().view_as(index)


def measure(
    logits: Tensor, token: Tensor, current: Tensor, needs: frozenset[str], written: Tensor | None = None
) -> Readout:
    """Return statistics of `logits [..., V]` (overwritten unless needed) at `token [...]`.

    `current [...]` are the tokens of the query, whose log-probability is `Readout.current`. `written [...]` is as in
    `Readout`.

    A confidence close to 1 is kept apart from 1 by summing the *other* tokens' mass: p = own / (own + rest).
    """
    precise = torch.promote_types(logits.dtype, torch.float32)
    kept = logits if needs & {"logits", "draw"} else None
    held = bool(needs & {"probabilities", "predictions"})
    present = logits.gather(-1, current[..., None]) if "current" in needs else None
    best = logits.topk(2, -1).values.double() if "gap" in needs else None
    peak = logits.amax(-1) if needs & {"current", "logsumexp"} else None
    # In place where that is possible: a CPU spends most of a second [..., V] buffer's time on page faults.
    into = logits if kept is None and logits.dtype == precise and logits.device.type == "cpu" else None
    weight = torch.softmax(logits, -1, dtype=precise, out=into)  # [..., V]
    # The peak's own weight is 1 / sum of exp(logit - peak).
    normaliser = None if peak is None else peak.double() - weight.amax(-1).double().log()
    runner = weight.topk(2, -1).values.double() if "margin" in needs else None
    uncertain = _entropy(weight) if "entropy" in needs else None
    standing = None if present is None or normaliser is None else _standing(weight, current, present, normaliser)
    return Readout(
        token=token,
        confidence=probability(weight, token, held or written is not None),
        margin=None if runner is None else runner[..., 0] - runner[..., 1],
        gap=None if best is None else best[..., 0] - best[..., 1],
        entropy=uncertain,
        logsumexp=normaliser if "logsumexp" in needs else None,
        current=standing,
        probabilities=weight if held else None,
        logits=kept if "logits" in needs else None,
        written=written,
        written_confidence=None if written is None else probability(weight, written, held),
    )


def probability(weight: Tensor, token: Tensor, kept: bool = True) -> Tensor:
    """Return `[...] float64` probabilities of `token [...]` in `weight [..., V]`. Overwrites `weight` unless `kept`."""
    at = token[..., None]
    mass = weight.gather(-1, at)
    own = mass[..., 0].double()
    rest = weight.scatter_(-1, at, 0).sum(-1).double()
    if kept:
        weight.scatter_(-1, at, mass)
    # Up to a half the own mass is precise as it is, and positions with one law tie to the last bit, whatever they drew.
    return torch.where(own > 0.5, own / (own + rest), own)


def _standing(weight: Tensor, current: Tensor, logit: Tensor, normaliser: Tensor) -> Tensor:
    """Return `[...]` log-probability of `current [...]`, whose `logit` is `[..., 1]`, by `weight [..., V]`.

    Above a probability of 0.5 it is computed from the other tokens' mass. Near 1 the difference of two logarithms would
    have no correct digit, and tokens to remask are ranked by this number.
    """
    at = current[..., None]
    own = weight.gather(-1, at)
    rest = weight.scatter_(-1, at, 0).sum(-1).double()
    weight.scatter_(-1, at, own)
    mass = own[..., 0].double()
    return torch.where(mass > 0.5, -torch.log1p(rest / mass), logit[..., 0].double() - normaliser)


def _entropy(weight: Tensor) -> Tensor:
    """Return `[...]` entropy in nats of `weight [..., V]`, precise where one token has nearly all of it.

    The sum is split at the most likely token, not at the drawn one. So positions with equal distributions tie to the
    last bit, and rounding does not rank them by what they drew.
    """
    at = argmax(weight)[..., None]
    most = weight.gather(-1, at)
    rest = weight.scatter_(-1, at, 0).sum(-1).double()
    own = most[..., 0].double()
    found = torch.special.entr(own / (own + rest)) + entropy(weight)
    weight.scatter_(-1, at, most)
    return found


def entropy(weight: Tensor) -> Tensor:
    """Return `[...]` sum of -w log w over `weight [..., V]`, in nats."""
    least = torch.finfo(weight.dtype).tiny
    rows = weight.flatten(0, -2)
    parts = [part.clamp(min=least).log_().mul_(part).sum(-1) for part in rows.split(rows_at_once(rows))]
    return -torch.cat(parts).view(weight.shape[:-1])


def divergence(now: Tensor, then: Tensor, index: Tensor, precise: bool = False) -> Tensor:
    """Return `[N]` the KL in nats of `now [N, V]` from the rows `index [N]` of `then [M, V]`, with `TINY` added.

    Float32 rows sum to 1 within 1e-7 only, so their KL is precise enough for a threshold, but not to find the smallest
    one. With `precise`, rows are normalised in float64, which leaves errors of second order.
    """
    parts, size = [], rows_at_once(now, 4 if precise else 1)
    for part, at in zip(now.split(size), index.split(size), strict=True):
        old = then.index_select(0, at)
        if precise:
            part, old = part.double(), old.double()
            part, old = part / part.sum(-1, keepdim=True), old / old.sum(-1, keepdim=True).clamp(min=TINY)
        old = old.add_(TINY)
        parts.append((part + TINY).div_(old).log_().mul_(part).sum(-1))
    return torch.cat(parts)


def jensen_shannon(now: Tensor, then: Tensor, index: Tensor) -> Tensor:
    """Return `[N]` Jensen-Shannon divergence in nats of `now [N, V]` from the rows `index [N]` of `then [M, V]`.

    Probabilities count as at least `LEAST`.
    """
    parts, size = [], rows_at_once(now, 4)
    for part, at in zip(now.split(size), index.split(size), strict=True):
        part, old = part.clamp(min=LEAST), then.index_select(0, at).to(now.dtype).clamp(min=LEAST)
        middle = (part + old) / 2
        parts.append((part * (part / middle).log() + old * (old / middle).log()).sum(-1) / 2)
    return torch.cat(parts)


def rows_at_once(table: Tensor, room: int = 1) -> int:
    """Return the number of rows of `table [N, V]` to work on at once. On a CPU, their buffers should fit its cache.

    Args:
        room: buffers of the size of a row that the work needs, for example for float64 copies.
    """
    rows, width = table.shape
    return max(1, min(rows, CACHE // (room * width)) if table.device.type == "cpu" else rows)


def argmax(logits: Tensor) -> Tensor:
    """Return `[...]` index of the highest of `logits [..., V]`, the lowest one among equals."""
    if logits.device.type != "cpu" or logits.numel() < MANY:
        return logits.argmax(-1)
    # On a CPU torch's argmax is a scalar loop, its amax is not: find the first best tile, then the place inside it.
    # A tile has a power of two near the square root of V, so that both steps are short.
    vocab = logits.shape[-1]
    width = min(max(TILE, 1 << vocab.bit_length() // 2), vocab)
    tops = logits.unfold(-1, width, width).amax(-1)
    if vocab % width:  # the last tile overlaps the one before
        tops = torch.cat([tops, logits[..., -width:].amax(-1, keepdim=True)], -1)
    begin = (tops.argmax(-1, keepdim=True) * width).clamp(max=vocab - width)
    inside = logits.gather(-1, begin + arange(width, logits.device))  # [..., width]
    return begin[..., 0] + inside.argmax(-1)


def digits(dtype: torch.dtype) -> int:
    """Return the number of decimal digits to which sums of numbers of `dtype` agree in any order of summation."""
    return 9 if dtype == torch.float64 else 5


def significant(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `values`, sums in `dtype`, rounded to their reliable `digits`, so that equal ones tie.

    Further digits differ between a batch and a row alone, so they must not decide a ranking.
    """
    mantissa, exponent = values.frexp()  # not by a number of decimals: the smallest must not become 0
    return torch.ldexp(mantissa.round(decimals=digits(dtype)), exponent)


def tempered(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Return `logits / temperature` in float32, or in float64 for float64 logits.

    In half precision a small temperature would overflow. Results agree between devices: the divisor is a tensor on a
    GPU, where torch replaces division by a Python number with multiplication by its inverse.

    Args:
        temperature: above 0, a number or a tensor that broadcasts. It is clamped to `COLDEST` ... `HOTTEST`.
    """
    precise = torch.promote_types(logits.dtype, torch.float32)
    if isinstance(temperature, Tensor):
        return logits.to(precise) / temperature.to(precise).clamp(COLDEST, HOTTEST)
    divisor = bounded(temperature)
    if logits.device.type == "cpu":
        return logits.to(precise) / divisor
    return logits.to(precise) / torch.full((), divisor, dtype=precise, device=logits.device)


def bounded(temperature: float) -> float:
    """Return a temperature above 0 as `tempered` takes it: from `COLDEST` to `HOTTEST`."""
    return min(max(float(temperature), COLDEST), HOTTEST)
