"""Settings of the kernels `readout` and `head`: the choice of a token, and the measures."""

from dataclasses import dataclass

from torch import Tensor

from dllm_sampler.core.checks import check_number
from dllm_sampler.errors import UserError, as_typed, invalid


@dataclass(frozen=True)
class Sampling:
    """Settings to choose a token for each of N rows, and to measure its probability.

    Args:
        mask_id: a token that is never chosen and has no probability. By default every token may be chosen.
        temperature: divisor of the logits in a draw. 0 takes the best token, the lowest id among equals.
        measured: measure the distribution at the temperature (see `guides.Temperature`) instead of the model's own.
        keys: `[N] int64` `noise.key` of each row in the stream `TOKENS`. Needed at a temperature above 0.
        current: `[N] int64` tokens whose log-probability is measured, too.
    """

    mask_id: int | None = None
    temperature: float = 0.0
    measured: bool = False
    keys: Tensor | None = None
    current: Tensor | None = None

    @property
    def draws(self) -> bool:
        """True if tokens are drawn. Otherwise the best ones are chosen."""
        return self.temperature > 0

    def check(self, rows: Tensor, vocab: int) -> None:
        """Refuse settings and `rows [N, width]` that no kernel supports, for `vocab` tokens.

        Raises:
            UserError: the temperature is negative or not finite, or above 0 without keys, `mask_id` is outside the
                vocabulary, or a row is not contiguous.
        """
        check_number("temperature", self.temperature, finite=True)
        if self.draws and self.keys is None:
            said = f"temperature={as_typed(self.temperature)} draws tokens, and keys is None"
            raise UserError("option-missing", f"{said}. Pass the noise.key of each row as `keys`.")
        if self.mask_id is not None and not 0 <= self.mask_id < vocab:
            raise invalid("mask_id", self.mask_id, f"Set an id from 0 to {vocab - 1}", "token-outside-vocabulary")
        if rows.dim() != 2 or rows.stride(1) != 1:
            shape = f"shape {tuple(rows.shape)} and strides {rows.stride()}"
            raise UserError("shape-mismatch", f"The tensor has {shape}. Pass [N, width] with contiguous rows.")


GREEDY = Sampling()
