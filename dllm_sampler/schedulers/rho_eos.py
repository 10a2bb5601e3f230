"""rho-EOS: an answer grows and shrinks while it is decoded, by the end-of-text tokens that the model predicts in it."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_choice, check_count, check_share
from dllm_sampler.core.ends import is_end
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout, Resize
from dllm_sampler.errors import UserError, as_typed
from dllm_sampler.schedulers.lengthening import Lengthening

Scale = Literal["exp", "linear", "const"]
Signal = Literal["confidence", "density"]
SEGMENT, MOST, STEPS = 0.1, 8, 64  # signal per segment, expansions in a step, steps that may change the length


@dataclass(frozen=True)
class RhoEos(Lengthening):
    """rho-EOS around another scheduler: answers with few predicted end-of-text tokens grow, those with many shrink.

        canvas = initial masks
        while masks remain:
            prediction = model(canvas)
            commit inner(canvas, prediction)
            gap = distance of signal(prediction) from the range low to high
            n = expand * scale(ceil(gap / 0.1)), after 64 steps 0
            append n masks if the signal is below low
            cut off the last n columns if it is above high

    Source: rho-EOS, arXiv 2601.22527. The `scale` is 1, 2, 4, 8 (`exp`), 1, 2, 3 ... 8 (`linear`) or 1 (`const`). A cut
    takes any tokens, even the whole answer. An answer has at most `max_new_tokens`, and keeps this length once it has
    it. A block begins where the one before ended.

    Deviations: a finished row rests, where the published function cuts and lengthens it as long as others in its batch
    run. A row ends when nothing is left to decode, not after `max_new_tokens` steps. Guidance masks the prompt alone.
    The inner scheduler decides the commits, which never have the mask token.

    Args:
        inner, initial, expand, eos_tokens: see `Lengthening`.
        low, high: bounds of the signal, inclusive.
        scale: growth of n with the distance from the range, as above.
        signal_of: `confidence`, as in the published code and DAEDAL, is the mean probability of the last `eos_tokens`
            predicted end-of-text tokens. Missing ones count as 0. `density`, as in the paper, is the share of masks
            that are predicted to be such tokens. It is 0 without masks.
        min_length: a cut leaves at least this many columns, all columns before the block, and every committed token
            other than end-of-text tokens. By default cuts have no such limit, as published.
    """

    low: float = 0.4
    high: float = 0.6
    scale: Scale = "exp"
    signal_of: Signal = "confidence"
    min_length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("low", "high"):
            check_share(f"scheduler.{name}", getattr(self, name))
        if self.low > self.high:
            said = f"scheduler.low={as_typed(self.low)} exceeds scheduler.high={as_typed(self.high)}"
            raise UserError("option-range", f"{said}. Lower scheduler.low, or raise scheduler.high.")
        for name, choices in (("scale", Scale), ("signal_of", Signal)):
            check_choice(f"scheduler.{name}", getattr(self, name), choices)
        check_count("scheduler.min_length", self.min_length, 0, optional=True)

    def init(self, canvas: Canvas) -> Carry:
        """Return `[B] bool` rows whose length is final, and the inner scheduler's carry."""
        return torch.zeros_like(canvas.done), super().init(canvas)

    def bound(self, tokens: int) -> int:
        """Return an upper bound on the steps. After the last change, one step may find a cut block full."""
        return super().bound(tokens) + STEPS + 1

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, inner = self.inner.tell(canvas, query, readout, carry[1])
        final = carry[0] | self.full(canvas)
        count = self._columns(self._share(canvas, query, readout)).masked_fill(final | (canvas.step >= STEPS), 0)
        end = canvas.end + count
        if self.min_length is not None:
            after, column = canvas.apply(query.positions, edit), canvas.columns()
            text = (
                (column < canvas.end[:, None])
                & ~after.masked
                & (~is_end(after.ids, self.end_ids) | canvas.layout.frozen)
            )
            least = torch.maximum(canvas.start, canvas.layout.first + self.min_length)
            least = torch.where(text, column + 1, 0).amax(1).maximum(least)
            end = torch.where(count < 0, torch.maximum(end, torch.minimum(least, canvas.end)), end)
        resize = Resize(end, torch.full_like(end, self.mask), torch.ones_like(final))
        return replace(edit, resize=resize), (final, inner)

    def full(self, canvas: Canvas) -> Tensor:
        """Return `[B] bool` rows that have reached their largest length, which is final."""
        return canvas.end >= canvas.layout.answer_end

    def _share(self, canvas: Canvas, query: Query, readout: Readout) -> Tensor:
        """Return `[B] float32` the signal that `signal_of` names."""
        if self.signal_of == "confidence":
            return self.signal(canvas, query, readout).float()
        noise = canvas.masked.gather(1, query.positions)
        return (self.ends(canvas, query, readout)[0] & noise).sum(1).float() / noise.sum(1).clamp(min=1)

    def _columns(self, share: Tensor) -> Tensor:
        """Return `[B]` columns to append, or if negative to cut off. Float64 would count other segments."""
        few, many = self.low - share, share - self.high
        segments = torch.ceil(torch.maximum(few, many) / torch.full_like(few, SEGMENT)).long().clamp(min=1, max=MOST)
        times = {"exp": 2 ** (segments - 1).clamp(max=3), "linear": segments, "const": torch.ones_like(segments)}
        return self.expand * times[self.scale] * ((few > 0).long() - (many > 0).long())
