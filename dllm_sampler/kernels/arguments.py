"""What the kernels `readout` and `head` accept."""

from __future__ import annotations

from torch import Tensor

from dllm_sampler.errors import UserError


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
