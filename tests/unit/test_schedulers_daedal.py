"""DAEDAL (arXiv 2508.00819): what the scheduler inside says of block and row counts once the answer has room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dllm_sampler import Canvas, Query, Readout
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.spec import ChangingLength
from dllm_sampler.engine import layout
from dllm_sampler.schedulers.daedal import Daedal
from dllm_sampler.schedulers.fixed import FixedSteps
from tests import toys


class Hasty(FixedSteps):
    """Leaves the block and the row in each step."""

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Any) -> Any:
        edit, carry = super().tell(canvas, query, readout, carry)
        every = torch.ones_like(canvas.done)
        return replace(edit, close_block=every, finish=every), carry


def test_no_block_or_row_is_over_before_the_answer_has_room() -> None:
    sampler = toys.sampler(scheduler=Daedal(Hasty(), initial=4, expand=3, eos_tokens=2, grow=0.2))
    rule, blocks, spec = sampler.plugins.scheduler, sampler.plugins.blocks, sampler.denoiser.spec
    canvas = layout.canvas(
        toys.PROMPTS, 18, toys.SEEDS, spec, blocks, CounterNoise(), False, changing=ChangingLength(4)
    )
    carry: Any = rule.init(canvas)
    query = rule.ask(canvas, carry)
    readout = Readout(torch.ones_like(query.ids), torch.full(query.ids.shape, 0.5).double())
    for early in (True, False):
        edit, _ = rule.tell(canvas, query, readout, (torch.full_like(canvas.done, early), carry[1]))
        assert edit.close_block is not None and edit.finish is not None
        for said in (edit.commit.any(1), edit.close_block, edit.finish):
            assert (said != early).all()
