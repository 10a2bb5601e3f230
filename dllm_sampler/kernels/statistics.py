"""What a readout kernel returns, one number per row of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_sampler.core.values import Readout
from dllm_sampler.errors import UserError

MOST = 64  # best tokens that a kernel lists


@dataclass(frozen=True)
class Statistics:
    """The fields of `canvas.Readout`, and two more. All float64 but the token and the list of the best.

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
    divergence: Tensor | None = None  # [N] KL in nats from the distribution one forward before
    values: Tensor | None = None  # [N, m] float32, the highest logits, descending, the lower id first among equals
    ids: Tensor | None = None  # [N, m] int64, whose they are

    @staticmethod
    def empty(rows: int, device: torch.device, current: bool, divergence: bool, top: int) -> Statistics:
        """Room for `rows` of them."""

        def real() -> Tensor:
            return torch.empty(rows, dtype=torch.float64, device=device)

        return Statistics(
            torch.empty(rows, dtype=torch.int64, device=device),
            *(real() for _ in range(5)),
            current=real() if current else None,
            divergence=real() if divergence else None,
            values=torch.empty(rows, top, dtype=torch.float32, device=device) if top else None,
            ids=torch.empty(rows, top, dtype=torch.int64, device=device) if top else None,
        )

    def readout(self, needs: frozenset[str]) -> Readout:
        """As `readout.measure` returns it, with what the plug-ins need."""
        names = needs & {"margin", "gap", "entropy", "logsumexp", "current"}
        return Readout(
            self.token,
            self.confidence,
            **{name: value for name in names if (value := getattr(self, name)) is not None},
        )


@dataclass(frozen=True)
class Then:
    """What the rows were one forward before, for the divergence: KLASS, arXiv 2511.05664."""

    rows: Tensor  # [M, V] logits (`readout`) or [M, D] hidden states (`head`), in the dtype of now
    logsumexp: Tensor  # [M] float64, as it was reported then
    index: Tensor  # [N] int64 which of them each row of now was


def check(
    rows: Tensor, vocab: int, mask_id: int | None, temperature: float, keys: Tensor | None, then: Then | None, top: int
) -> None:
    """Refuse what no kernel can do.

    Raises:
        UserError: a temperature without keys, a token or a length out of range, rows that are not contiguous.
    """
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature must be a number of at least 0, not {temperature!r}")
    if temperature and keys is None:
        raise UserError("sampling at a temperature needs keys, the noise.key of every row")
    if mask_id is not None and not 0 <= mask_id < vocab:
        raise UserError(f"mask_id must be a token below {vocab}, not {mask_id}")
    if not 0 <= top <= min(MOST, vocab):
        raise UserError(f"top must be from 0 to {min(MOST, vocab)}, not {top}")
    if rows.dim() != 2 or rows.stride(1) != 1:
        raise UserError(f"rows must be [N, width] with neighbours in memory, not {tuple(rows.shape)} {rows.stride()}")
    if then is not None and (then.rows.stride(1) != 1 or then.rows.dtype != rows.dtype):
        raise UserError(f"the rows of one forward before must be {rows.dtype} with neighbours in memory")
