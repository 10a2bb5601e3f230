"""Settings of the kernels `readout` and `head`: the choice of a token, and the measures."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllm_sampler.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """Settings to choose a token for each of N rows, and what to measure.

    mask_id: a token that is never chosen and has no probability. By default every token may be chosen
    temperature: of the draw. 0 takes the best token, the lowest id among equals
    measured: measure the distribution at the temperature, see `guides.Temperature`; otherwise the one without it
    keys: `[N] int64`, `noise.key` of each row in the stream `TOKENS`; needed at a temperature
    current: `[N] int64` tokens whose log-probability is measured too
    """

    mask_id: int | None = None
    temperature: float = 0.0
    measured: bool = False
    keys: Tensor | None = None
    current: Tensor | None = None

    @property
    def draws(self) -> bool:
        """True if tokens are drawn."""
        return self.temperature > 0

    def check(self, rows: Tensor, vocab: int) -> None:
        """Refuse what no kernel can do with `rows [N, width]` and `vocab` tokens.

        Raises:
            UserError: a temperature without keys, a token out of range, rows that are not contiguous.
        """
        if not 0 <= self.temperature < float("inf"):
            raise UserError("option-range", f"temperature is {self.temperature!r}. Set a number of at least 0.")
        if self.draws and self.keys is None:
            raise UserError("option-missing", "A temperature above 0 needs keys. Give the noise.key of every row.")
        if self.mask_id is not None and not 0 <= self.mask_id < vocab:
            raise UserError("token-outside-vocabulary", f"mask_id is {self.mask_id}. Set a token below {vocab}.")
        if rows.dim() != 2 or rows.stride(1) != 1:
            shape = f"{tuple(rows.shape)} {rows.stride()}"
            raise UserError("shape-mismatch", f"The rows are {shape}. Give contiguous rows [N, width].")


GREEDY = Sampling()
