"""A law as a model: its prediction for a masked position is the exact conditional marginal."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dllm_sampler.core.protocols import Plan
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Canvas, Query, Spent
from dllm_sampler.eval.testbeds.laws import UNKNOWN, Law
from dllm_sampler.models.denoiser import spent


@dataclass(frozen=True)
class LawDenoiser:
    """A model that returns the log-probabilities of a law, given all tokens that are not masks.

    After the law's last position only end-of-text tokens follow. The prompt may be any ids, and the law is given the
    last one. Token ids are the law's symbols, then the end-of-text token, then the mask.

    Greedy decoding breaks ties by the lower id. A temperature of 0.001 breaks them evenly.
    """

    law: Law
    device: torch.device = field(default=torch.device("cpu"))

    @property
    def spec(self) -> ModelSpec:
        """The properties of the model for the sampler."""
        eos, mask = self.law.symbols, self.law.symbols + 1
        return ModelSpec(
            vocab_size=mask + 1,
            mask_id=mask,
            eos_id=eos,
            pad_id=eos,
            max_positions=2**20,
            num_layers=0,
            num_kv_heads=0,
            head_dim=0,
            dtype=torch.float64,
            device=self.device,
            cacheable=False,
        )

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        """Return log-probabilities `[R, V]`, a row for each of `plan.head_rows`, and the computation spent."""
        (batch, candidates, _), spec, law = query.ids.shape, self.spec, self.law
        assert spec.mask_id is not None
        rows = canvas.ids[:, None].expand(-1, candidates, -1)  # [B, K, L+1]
        rows = rows.scatter(2, query.positions[:, None].expand_as(query.ids), query.ids).flatten(0, 1)
        end = canvas.end if query.limit is None else torch.minimum(canvas.end, query.limit)
        hidden = (canvas.columns() >= end[:, None])[:, None].expand(-1, candidates, -1).flatten(0, 1)
        first = canvas.layout.first.repeat_interleave(candidates)[:, None]  # [B*K, 1]
        answer = canvas.answer().repeat_interleave(candidates, 0)  # [B*K, N]
        known = torch.where(hidden | (rows >= law.symbols), UNKNOWN, rows).gather(1, answer[:, : law.length])
        missing = law.length - known.shape[1]
        known = torch.cat([known, known.new_full((known.shape[0], max(0, missing)), UNKNOWN)], 1)
        said = law.marginals(known, rows.gather(1, first - 1)[:, 0])[:, : canvas.layout.longest]  # [B*K, N, S]
        table = said.new_zeros(*rows.shape, spec.vocab_size)  # [B*K, L+1, V]
        table[..., spec.eos_id] = (canvas.columns() >= first + said.shape[1]).to(table.dtype)
        table[..., : law.symbols].scatter_(1, answer[:, : said.shape[1], None].expand_as(said), said)
        # Logarithms of 0 would be infinite, and differences of two of them NaN.
        table = table.clamp_(min=torch.finfo(table.dtype).tiny).log_().view(batch, candidates, -1, spec.vocab_size)
        at = query.positions[:, None, :, None].expand(-1, candidates, -1, spec.vocab_size)
        return plan.head_rows.pick(table.gather(2, at)), spent(canvas, plan)

    def head(self, hidden: Tensor) -> Tensor:
        """Return a copy of the log-probabilities, which the readout overwrites."""
        return hidden.clone()
