"""The readout: from logits to the statistics per position that plug-ins judge."""

from dataclasses import fields, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dllm_sampler.core.draw import Barred, Draw, rewritten
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Guide, is_random
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.statistics import digits, measure, significant
from dllm_sampler.core.values import MEASURABLE, Canvas, Readout
from dllm_sampler.kernels.backend import Backend
from dllm_sampler.kernels.sampling import Sampling

MEASURED = frozenset({"margin", "gap", "entropy", "logsumexp", "current"})  # the kernels measure these and confidence
STORED = frozenset({"logits", "predictions"})  # the kernels can serve these only if logits are stored
FIELDS = frozenset(MEASURABLE) | {"predictions"}  # what a plug-in may list in `needs`


class Head(Protocol):
    """The part of a denoiser that computes logits from hidden states."""

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., V]` of hidden states `[..., D]`."""
        ...


class Rule(NamedTuple):
    """The settings of the readout, which are the same in every step of a generation."""

    spec: ModelSpec
    guides: tuple[Guide, ...]  # in the order of application
    needs: frozenset[str]  # fields of `Readout` beyond token and confidence
    compat: bool = False  # as in published code no token is barred: neither the mask nor an end-of-text token in a gap
    judges_best: bool = False  # plug-ins see the best tokens, and drawn ones are written


def predict(
    denoiser: Head, hidden: Tensor, canvas: Canvas, head_rows: HeadRows, rule: Rule, kernels: Backend | None = None
) -> Readout:
    """Choose a token per answer from hidden states `[R, D]`, and measure the model's certainty.

    Args:
        hidden: `[R, D]` hidden states after the final norm.
        kernels: Triton's kernels replace `read` for a greedy choice, or for a draw at one temperature with
            `CounterNoise`. No token may be given, and `needs` may have only `MEASURED` and `STORED`. If the head is a
            plain product (`head_weight`) and `needs` has nothing of `STORED`, they store no logits.

    Returns:
        `[B, K, Q]` statistics. They are 0 where the forward answered nothing.
    """
    plain = kernels is not None and kernels.name == "triton"
    sampling = _sampling(canvas, head_rows, rule) if plain else None
    if kernels is None or sampling is None:
        return read(denoiser.head(hidden), canvas, head_rows, rule)
    needs = rule.needs
    stored = bool(needs & STORED)
    weight = None if stored else fusable_head_weight(denoiser, hidden)
    if weight is not None:
        seen = kernels.head(hidden, weight, sampling)
    else:
        logits = denoiser.head(hidden)
        seen = kernels.readout(logits, sampling)
        if stored:
            if sampling.mask_id is not None:
                logits[..., sampling.mask_id] = -torch.inf
            seen, needs = replace(seen, logits=logits), needs | {"logsumexp"}
    return spread(replace(seen, **dict.fromkeys(MEASURED - needs)), head_rows)


def spread(found: Readout, head_rows: HeadRows) -> Readout:
    """Return statistics `[R]` of the answers as `[B, K, Q]`, with 0 where nothing is answered."""
    values = {one.name: getattr(found, one.name) for one in fields(found)}
    tensors = {name: head_rows.spread(value) for name, value in values.items() if isinstance(value, Tensor)}
    return replace(found, **tensors)


def fusable_head_weight(denoiser: Head, rows: Tensor) -> Tensor | None:
    """Return the head's weight `[V, D]` if the kernel `head` can multiply `rows [N, D]` with it, or None."""
    weight = denoiser.head_weight() if hasattr(denoiser, "head_weight") else None  # pyright: ignore
    return weight if weight is not None and weight.dtype == rows.dtype else None


def _sampling(canvas: Canvas, head_rows: HeadRows, rule: Rule) -> Sampling | None:
    """Return settings with which a kernel returns the results of `read`, or None if no kernel can."""
    spec, guides, needs, compat, judges_best = rule
    if judges_best and is_random(guides):
        return None
    if not needs <= MEASURED | STORED or len(guides) > 1 or canvas.layout.given is not None:
        return None
    mask_id = None if compat else spec.mask_id
    current = head_rows.pick(head_rows.query.ids) if "current" in needs else None
    if not guides or guides[0].temperature == 0:
        return Sampling(mask_id, current=current)
    guide = guides[0]
    if guide.temperature is None or type(canvas.layout.noise) is not CounterNoise:
        return None
    if needs & STORED and guide.measures:  # tempered logits are stored nowhere
        return None
    return Sampling(mask_id, guide.temperature, guide.measures, canvas.layout.noise.keys(canvas, head_rows), current)


def read(logits: Tensor, canvas: Canvas, head_rows: HeadRows, rule: Rule) -> Readout:
    """Choose a token per answer, and measure the model's certainty.

    Args:
        logits: `[R, V]`, overwritten.

    Returns:
        `[B, K, Q]` statistics. They are 0 where the forward answered nothing. Confidence is NaN where the model or a
        guide left NaN, +inf or no finite logit.
    """
    spec, guides, needs, compat, judges_best = rule
    barred = Barred(None) if compat else Barred(spec.mask_id, spec.eos_ids)
    measured = logits = barred.exclude(logits, canvas, head_rows)
    for guide in guides:
        if guide.measures:
            measured = rewritten(guide, measured, canvas, head_rows, barred)
    draw = Draw.of(guides, canvas, head_rows, spec.vocab_size, barred)
    law = any(guide.joint and guide.measures for guide in guides)
    bound = (measured != logits).any(-1) if law else None  # [R] answers that a form restricts
    token, sound = draw.chosen(logits)
    written = None
    if judges_best and draw.draws:
        token, written = draw.greedy().chosen(logits)[0], token
    seen = measure(measured, token, head_rows.pick(head_rows.query.ids), needs, written)
    if sound is not None:  # without guides, what is measured is what is chosen from, and tells it already
        seen = replace(seen, confidence=seen.confidence.masked_fill(~sound, torch.nan))
    seen = seen if bound is None else round_for_ties(seen, bound, logits.dtype)
    seen = spread(seen, head_rows)
    return replace(seen, draw=replace(draw, raw=head_rows.spread(logits))) if "draw" in needs else seen


def round_for_ties(seen: Readout, bound: Tensor, dtype: torch.dtype) -> Readout:
    """Return statistics `[R]` under a form, rounded to the precision of `dtype` where `bound [R]` is true.

    Under a form, one token can make another one certain. Then their probabilities are equal except for rounding errors,
    which differ between a batch and a row alone. The errors must not decide a ranking.
    """
    parts = {name: getattr(seen, name) for name in ("margin", "gap", "entropy", "current")}
    parts = {name: (one, one.round(decimals=digits(dtype))) for name, one in parts.items() if one is not None}
    parts["confidence"] = seen.confidence, significant(seen.confidence, dtype)
    return replace(seen, **{name: torch.where(bound, rounded, one) for name, (one, rounded) in parts.items()})
