"""What a readout kernel returns, one number per row of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_sampler.core.values import Readout
from dllm_sampler.errors import UserError


@dataclass(frozen=True)
class Statistics:
    """The fields of `Readout` that kernels know, float64 but the token.

    A row with NaN, with +inf or without a finite logit is NaN in every statistic; its token is in range and means
    nothing, and is 0 where no logit is finite.
    """

    token: Tensor  # [N] int64
    confidence: Tensor  # [N] probability of the token
    margin: Tensor  # [N] probability of the best token minus that of the second
    gap: Tensor  # [N] best logit minus the second
    entropy: Tensor  # [N] nats
    logsumexp: Tensor  # [N]
    current: Tensor | None = None  # [N] log-probability of the token that the caller named

    @staticmethod
    def empty(rows: int, device: torch.device, current: bool) -> Statistics:
        """Room for `rows` of them."""

        def real() -> Tensor:
            return torch.empty(rows, dtype=torch.float64, device=device)

        return Statistics(
            torch.empty(rows, dtype=torch.int64, device=device),
            *(real() for _ in range(5)),
            current=real() if current else None,
        )

    def readout(self, needs: frozenset[str]) -> Readout:
        """As `readout.measure` returns it, with what the plug-ins need."""
        names = needs & {"margin", "gap", "entropy", "logsumexp", "current"}
        return Readout(
            self.token,
            self.confidence,
            **{name: value for name in names if (value := getattr(self, name)) is not None},
        )


def check(rows: Tensor, vocab: int, mask_id: int | None, temperature: float, keys: Tensor | None) -> None:
    """Refuse what no kernel can do.

    Raises:
        UserError: a temperature without keys, a token out of range, rows that are not contiguous.
    """
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature must be a number of at least 0, not {temperature!r}")
    if temperature and keys is None:
        raise UserError("sampling at a temperature needs keys, the noise.key of every row")
    if mask_id is not None and not 0 <= mask_id < vocab:
        raise UserError(f"mask_id must be a token below {vocab}, not {mask_id}")
    if rows.dim() != 2 or rows.stride(1) != 1:
        raise UserError(f"rows must be [N, width] with neighbours in memory, not {tuple(rows.shape)} {rows.stride()}")
