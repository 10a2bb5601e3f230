"""The product of two models' distributions, and a guide that keeps to the tokens of both."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Guide
from dllm_sampler.core.values import Canvas


@dataclass(frozen=True)
class KnownTokens(Guide):
    """A guide that excludes tokens that a second model does not know.

    Args:
        size: number of tokens in that model's vocabulary.
    """

    excludes: ClassVar[bool] = True
    keeps_excluded: ClassVar[bool] = True

    size: int

    @override
    def __call__(self, logits: Tensor, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        unknown = torch.arange(logits.shape[-1], device=logits.device) >= self.size
        return logits.masked_fill(unknown, -torch.inf)


def mixture(own: Tensor, other: Tensor, weight: float) -> Tensor:
    """Return logits `[..., V]` of the product of `own` to the power `weight` and `other` to the power `1 - weight`.

    Args:
        own: `[..., V]` logits. A token that either model excludes, or that the other does not know, stays excluded.
        other: `[..., V']` logits, of more or of fewer tokens.
        weight: between 0 and 1.
    """
    precise = torch.promote_types(own.dtype, torch.float32)
    other = pad(other.to(precise), (0, own.shape[-1] - other.shape[-1]), value=-torch.inf)
    mixed = weight * own.to(precise) + (1 - weight) * other
    impossible = (own == -torch.inf) | (other == -torch.inf)  # 0 times infinity is NaN
    return mixed.masked_fill(impossible, -torch.inf).to(own.dtype)
