"""dInfer's threshold and credit for runs in which the mask token may be predicted (`Sampler(compat=True)`)."""

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Context
from dllm_sampler.core.spec import with_bound_fields
from dllm_sampler.core.values import Canvas, Edit, Query
from dllm_sampler.schedulers.credit import Credit
from dllm_sampler.schedulers.dinfer import DInferThreshold


@dataclass(frozen=True)
class PublishedDInferThreshold(DInferThreshold):
    """dInfer's threshold that ignores positions whose predicted token is the mask: none is the best or committed.

    Source: dInfer, arXiv 2510.08666.
    """

    mask_id: int | None = field(init=False, default=None, repr=False, compare=False)

    def bind(self, context: Context) -> Self:
        """Return a copy that knows the model's mask token."""
        return with_bound_fields(self, mask_id=context.spec.mask_id)

    @override
    def commit(self, canvas: Canvas, query: Query, token: Tensor, sure: Tensor) -> Edit:
        edit = super().commit(canvas, query, token, sure.masked_fill(token == self.mask_id, -torch.inf))
        return replace(edit, commit=edit.commit & (token != self.mask_id))


@dataclass(frozen=True)
class PublishedCredit(PublishedDInferThreshold, Credit):
    """`Credit` that ignores positions whose predicted token is the mask."""
