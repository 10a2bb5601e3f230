"""Logits as some records have them: scaled, and the end token raised or lowered, so that a tiny model ends answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Context, Guide
from dllm_sampler.core.spec import with_bound_fields
from dllm_sampler.core.values import Canvas
from tests.conformance.lines import Line, check


class Tilt(BaseModel):
    """The record's `logits`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    logit_scale: float = 1.0
    eos_bias: float = 0.0
    eos_slope: float = 0.0


@dataclass(frozen=True)
class Tilted(Guide):
    """Logits times `scale`, and on top of the end token's `bias`, and `slope` for each column since the prompt."""

    scale: float
    bias: float
    slope: float
    eos: int = field(init=False, default=-1)

    @property
    def measures(self) -> bool:
        """See `Guide.measures`. They are the model's."""
        return True

    @override
    def bind(self, context: Context) -> Guide:
        return with_bound_fields(self, eos=context.spec.eos_id)

    @override
    def __call__(self, logits: Tensor, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        logits = logits * self.scale
        ahead = (head_rows.position - canvas.layout.first[head_rows.row]).clamp(min=0).to(logits.dtype)
        logits[:, self.eos] += self.bias + self.slope * ahead
        return logits


def guides(line: Line) -> list[Guide]:
    """What a line's `logits` ask for; none without.

    Raises:
        UserError: they are not written as expected.
    """
    said = (line.model_extra or {}).get("logits")
    if said is None:
        return []
    tilt = check(Tilt, said, f"{line.where}: logits")
    return [Tilted(tilt.logit_scale, tilt.eos_bias, tilt.eos_slope)]
