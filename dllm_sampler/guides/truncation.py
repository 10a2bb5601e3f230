"""Temperature, top-k and top-p. They apply in the order in which `guide=[temperature, top_p]` names them."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_count, check_number, check_positive
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Guide
from dllm_sampler.core.statistics import bounded, tempered
from dllm_sampler.core.values import Canvas


@dataclass(frozen=True)
class _Rewrite(Guide):
    keeps_excluded: ClassVar[bool] = True

    measured: bool = field(default=False, kw_only=True)  # so that Temperature(0.7) means its value

    @property
    @override
    def measures(self) -> bool:
        return self.measured


@dataclass(frozen=True)
class Temperature(_Rewrite):
    """A guide that samples tokens from softmax(logits / value) instead of taking the best one.

    Args:
        value: the temperature. 0 is greedy.
        measured: read confidence from the tempered distribution (Dream) instead of the model's own (LLaDA).
    """

    value: float = 1.0

    def __post_init__(self) -> None:
        check_number("guide.temperature.value", self.value, finite=True)

    @property
    @override
    def draws(self) -> bool:
        return self.value > 0

    @property
    @override
    def temperature(self) -> float:
        return bounded(self.value) if self.value > 0 else 0.0

    @override
    def __call__(self, logits: Tensor, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        return tempered(logits, self.value) if self.value > 0 else logits


@dataclass(frozen=True)
class TopK(_Rewrite):
    """A guide that keeps only the k best tokens, and those equal to the k-th one.

    Args:
        k: number of tokens.
        measured: read confidence from the truncated distribution (Dream) instead of the model's own (LLaDA).
    """

    truncates: ClassVar[bool] = True

    k: int = 50

    def __post_init__(self) -> None:
        check_count("guide.top_k.k", self.k)

    @override
    def __call__(self, logits: Tensor, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        worst = logits.topk(min(self.k, logits.shape[-1]), -1).values[..., -1:]
        return logits.masked_fill(logits < worst, -torch.inf)


@dataclass(frozen=True)
class TopP(_Rewrite):
    """A guide that keeps only the fewest best tokens whose probabilities sum to more than p (the nucleus).

    Args:
        p: probability mass that stays. The token that crosses it stays, too.
        measured: read confidence from the truncated distribution (Dream) instead of the model's own (LLaDA).
    """

    truncates: ClassVar[bool] = True

    p: float = 0.95

    def __post_init__(self) -> None:
        check_positive("guide.top_p.p", self.p, "a probability", most=1)

    @override
    def __call__(self, logits: Tensor, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        if self.p == 1:  # rounding lets the sum pass 1 before the last token
            return logits
        ranked, order = logits.sort(dim=-1, descending=True, stable=True)
        # Close to 1 the steps of half precision are 0.004.
        mass = ranked.softmax(-1, dtype=torch.promote_types(ranked.dtype, torch.float32)).cumsum(-1)
        crossed = torch.cat([torch.zeros_like(mass[..., :1], dtype=torch.bool), (mass > self.p)[..., :-1]], -1)
        return logits.masked_fill(torch.empty_like(crossed).scatter_(-1, order, crossed), -torch.inf)
