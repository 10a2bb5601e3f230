"""PC-Sampler: position-aware, frequency-calibrated confidence."""

import math
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_number
from dllm_sampler.core.protocols import Context
from dllm_sampler.core.spec import JudgedTokens, Traits, with_bound_fields
from dllm_sampler.core.values import Canvas, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.host.paths import expanded
from dllm_sampler.host.reading import load_json
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.score import check_factors


@dataclass(frozen=True)
class PositionCalibrated(FixedSteps):
    """PC-Sampler: fixed steps by a confidence that is weighted by position, and lowered for common tokens.

        while masks remain in the block:
            token, score = model(canvas)
            f = background frequency of token, from the file frequency
            rating = exp(-decay * offset) * min(-score * log(f), alpha)
            n = number of masks due in this step, by steps and schedule
            commit the n masks with the highest rating

    Source: PC-Sampler, arXiv 2508.13021. The offset counts from the block's start, as in the published code. Scores
    that are negative numbers (entropy, position) are refused.

    Args:
        score: see `FixedSteps`.
        frequency: JSON file with `num_token` and `p_baseline_dict` (token id to count). Tokens outside it count as
            seen once. With None every token is equally frequent.
        decay: lambda per position. 0 ignores positions, large values decode left to right.
        alpha: bound on the calibrated confidence.
    """

    frequency: str | None = None
    decay: float = 0.25
    alpha: float = 10.0
    surprise: Tensor | None = field(init=False, default=None, repr=False, compare=False)  # [V] -log f

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("scheduler.decay", self.decay, finite=True)
        check_number("scheduler.alpha", self.alpha)
        check_factors(self.score)

    @property
    def traits(self) -> Traits:
        """Traits of a rank that depends on the predicted token, if there is a table."""
        return super().traits if self.frequency is None else super().traits.adding(JudgedTokens())

    def bind(self, context: Context) -> Self:
        """Return a copy with the table for the model's vocabulary, which is loaded once for a model.

        Raises:
            UserError: the file cannot be read, or does not have such a table.
        """
        spec = context.spec
        if self.surprise is not None and (len(self.surprise), self.surprise.device) == (spec.vocab_size, spec.device):
            return self
        share = torch.full((spec.vocab_size,), 1 / spec.vocab_size)
        if self.frequency is not None:
            path, name = expanded("scheduler.frequency", self.frequency), f"scheduler.frequency={self.frequency}"
            way = 'Name a JSON file such as {"num_token": 100, "p_baseline_dict": {"5": 12}}, with a count by token id.'
            try:
                table = load_json(path.read_text(encoding="utf-8"))
                total = float(table["num_token"])
                counts = {int(token): float(count) for token, count in table["p_baseline_dict"].items()}
            except OSError as error:
                raise UserError("file-unreadable", f"{name} cannot be read ({error.strerror}). {way}") from error
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError("file-invalid", f"{name} is not a table of token counts. {way}") from error
            if not 0 < total < math.inf or not all(0 <= count < math.inf for count in counts.values()):
                said = f"{name} has a num_token that is not above 0, or a count that is negative or infinite"
                raise UserError("file-invalid", f"{said}. {way}")
            share.fill_(1 / total)
            known = [token for token in counts if 0 <= token < spec.vocab_size]
            share[known] = torch.tensor([counts[token] / total for token in known])
        return with_bound_fields(self, surprise=-(share + 1e-9).log().to(spec.device))

    @override
    def rate(self, canvas: Canvas, query: Query, readout: Readout) -> Tensor:
        assert self.surprise is not None
        offset = query.positions - canvas.start[:, None]  # [B, Q]
        calibrated = (super().rate(canvas, query, readout) * self.surprise[readout.token[:, 0]]).clamp(max=self.alpha)
        return torch.exp(-self.decay * offset) * calibrated
