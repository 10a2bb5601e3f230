"""Linear self-speculation as in its published loop."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.linear_spec import Draft, LinearSpec


@dataclass(frozen=True)
class PublishedLinearSpec(LinearSpec):
    """Linear self-speculation whose first forward computes the prompt and commits the token after it.

    Source: Nemotron-Labs-Diffusion (`linear_spec_generate`). A row ends after a complete round, so it may have more
    than `tokens` tokens. Those after an end-of-text token are cut. It decodes one prompt at a time.

    Args:
        tokens: number of new tokens after which the row ends.
        eos: id of the end-of-text token.
        accepted: list to which each round appends its number of accepted tokens.
    """

    tokens: int = 1
    eos: int = -1
    accepted: list[int] = field(default_factory=list, repr=False, compare=False)

    @override
    def missing(self, canvas: Canvas, carry: Draft) -> Tensor:
        return super().missing(canvas, carry) & (canvas.step > 0)[:, None]

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Draft) -> tuple[Edit, Carry]:
        edit, draft = super().tell(canvas, query, readout, carry)
        after = canvas.apply(query.positions, edit)
        column, reached = canvas.columns(), after.frontier()
        ends = (after.ids == self.eos) & (column >= canvas.layout.first[:, None]) & (column < reached[:, None])
        until = torch.where(ends, column + 1, reached[:, None]).amin(1)
        finish = edit.commit.any(1) & (ends.any(1) | (reached - canvas.layout.first >= self.tokens))
        if int(canvas.step) and bool(edit.commit.any()):
            self.accepted.append(int(edit.commit.sum()))
        return replace(edit, finish=finish, end=torch.where(finish, until, canvas.end)), draft
