"""Linear self-speculation as its loop makes it: the prompt is a forward by itself, and the last round is not cut."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.schedulers.linear_spec import Draft, LinearSpec


@dataclass(frozen=True)
class PublishedLinearSpec(LinearSpec):
    """The first forward computes the prompt and commits the token after it, and a row ends after a whole round.

    Source: Nemotron-Labs-Diffusion (`linear_spec_generate`). Tokens that the last round accepts beyond `tokens` stay,
    and those after an end token do not. One prompt at a time: it reads the device.

    Args:
        tokens: a round that leaves the row with this many ends it.
        eos: the end token.
        accepted: gets the number of tokens that each round accepts.
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
