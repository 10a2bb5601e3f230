"""LLaDA's options for end-of-text tokens."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_choice, checked_tokens
from dllm_sampler.core.ends import end_ids
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Context, Guide
from dllm_sampler.core.values import Canvas
from dllm_sampler.errors import invalid

Mode = Literal["ban", "defer"]


@dataclass(frozen=True)
class EndTokens(Guide):
    """A guide that keeps end-of-text tokens out of the answer, or gives them a confidence of 0 so that they come last.

    Source: LLaDA's published sampler (arXiv 2502.09992), where `ban` is `logits_eos_inf` and `defer` is
    `confidence_eos_eot_inf`.

    Args:
        mode: `ban` never chooses an end-of-text token. `defer` may choose end and end-of-turn tokens, at confidence 0.
        ids: token ids to act on. By default the model's end-of-text tokens, and with `defer` also its end-of-turn
            token.
    """

    excludes: ClassVar[bool] = True
    keeps_excluded: ClassVar[bool] = True

    mode: Mode = "ban"
    ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_choice("guide.end_tokens.mode", self.mode, Mode)
        if self.ids is not None:
            vars(self)["ids"] = checked_tokens("guide.end_tokens.ids", self.ids)
            if not self.ids:
                raise invalid("guide.end_tokens.ids", [], "Set token ids, or null for the model's own")

    @property
    @override
    def chooses(self) -> bool:
        return self.mode == "ban"

    @property
    @override
    def measures(self) -> bool:
        return True

    @override
    def bind(self, context: Context) -> Self:
        if self.ids is not None:
            return self
        spec = context.spec
        turn = () if self.mode == "ban" or spec.eot_id is None else (spec.eot_id,)
        return replace(self, ids=end_ids((*spec.eos_ids, *turn)))

    @override
    def __call__(self, logits: Tensor, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        assert self.ids is not None
        if max(self.ids, default=0) >= logits.shape[-1]:
            way = f"Give ids from 0 to {logits.shape[-1] - 1}"
            raise invalid("guide.end_tokens.ids", self.ids, way, "token-outside-vocabulary")
        logits = logits.clone()
        for token in self.ids:  # a list as index would become a tensor on the host and wait for a copy
            logits[..., token] = -torch.inf
        return logits
