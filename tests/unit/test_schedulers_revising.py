"""WINO, RCR, ReMDM, DUS: invariants of their specs, examples worked by hand, mechanisms that fire."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler import Query, Sampler
from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.none import once
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.engine import layout
from dllm_sampler.schedulers.dilated import Dilated
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.rcr import RunningConfidence
from dllm_sampler.schedulers.remdm import Remdm
from dllm_sampler.schedulers.threshold import Threshold
from dllm_sampler.schedulers.wino import Wino
from tests import toys
from tests.refusals import refused
from tests.sampling import each
from tests.scripted import BLOCK, PROMPTS, TOKENS, Steps, history, run, same_answers, written
from tests.toys import EOS, MASK


class TestWino:
    def test_by_hand(self) -> None:
        script = written(
            says=[[0.9, 0.8, 0.7, 0.2, 0.3, 0.1], [0.5, 0.5, 0.5, 0.6, 0.55, 0.1], [0.9, 0.9, 0.9, 0.9, 0.9, 0.6]],
            shadows=[[0.0] * 6, [0.95, 0.6, 0.7, 0.0, 0.0, 0.0], [0.95, 0.0, 0.7, 0.99, 0.99, 0.0]],
        )
        # Forward 2 commits two and doubts two: it takes back the worse. Forward 4 commits one, and takes back none.
        scheduler = Wino(0.5, 0.8)
        assert script.history(scheduler) == ([[0, 1, 2], [3, 4], [1, 5], [2]], [[], [1], [2], []])
        # At most two at a time.
        assert script.history(replace(scheduler, least=1, most=2))[0][0] == [0, 1]
        assert script.history(replace(scheduler, share=0.2, least=1))[0][0] == [0]

    @pytest.mark.slow
    def test_never_taking_back_it_is_a_capped_threshold(self) -> None:
        wide = run(Wino(0.3, 0.0, least=TOKENS, most=TOKENS))
        assert same_answers(wide, run(Threshold(0.3)))
        capped = [history(Wino(0.0, 0.0, least=1, most=2), prompt)[0] for prompt in PROMPTS]
        assert {len(step) for steps in capped for step in steps} <= {1, 2}
        assert any(len(step) == 2 for steps in capped for step in steps)

    def test_shadow_rows_are_paid_for(self) -> None:
        result = run(Wino(0.3))
        lengths = torch.tensor([len(prompt) + TOKENS + BLOCK for prompt in PROMPTS])
        assert torch.equal(result.trace.rows, result.nfe * lengths)

    @staticmethod
    def ask(ids: list[int], masked: list[bool], blind: bool, layers: int, shift: bool = False) -> Tensor:
        """`[Q, V]` logits at the second block of two, four wide."""
        scheduler = Wino(0.3) if blind else Threshold()
        denoiser = toys.wrapped(toys.transformer(layers=layers), shift)
        sampling = Sampler(denoiser, scheduler=scheduler, blocks=FixedBlocks(4), stop="none")
        start = layout.canvas([[3, 8]], 8, [0], denoiser.spec, sampling.plugins.blocks, CounterNoise(), False)
        canvas = replace(
            start,
            ids=torch.tensor([[3, 8, *ids, EOS]]),
            masked=torch.tensor([[False, False, *masked, False]]),
            start=start.start + 4,
            stop=start.stop + 4,
        )
        query = replace(Query.window(canvas), leave_one_out=blind)
        plan = once(canvas, query, denoiser.spec)
        hidden, _ = denoiser(canvas, query, plan)
        return plan.head_rows.spread(denoiser.head(hidden))[0, 0]

    @each("shift", [False, True])
    def test_a_shadow_does_not_see_its_token(self, shift: bool) -> None:
        masked = [False] * 6 + [True] * 2
        here = [1, 2, 3, 4, 5, 6, MASK, MASK]
        there = [1, 2, 3, 4, 5, 17, MASK, MASK]  # another token at the block's second position
        one, other = (self.ask(ids, masked, True, 1, shift) for ids in (here, there))
        assert torch.equal(one[1], other[1])  # in one layer nothing can leak through third rows
        assert not torch.allclose(one[0], other[0])  # its neighbour's shadow does see it
        plain, changed = (self.ask(ids, masked, False, 1, shift) for ids in (here, there))
        assert shift or not torch.allclose(plain[1], changed[1])

    @each("shift", [False, True])
    def test_the_canvas_does_not_see_its_shadow(self, shift: bool) -> None:
        ids, masked = [1, 2, 3, 4, 5, 6, MASK, MASK], [False] * 6 + [True] * 2
        with_, without = (self.ask(ids, masked, blind, 2, shift) for blind in (True, False))
        torch.testing.assert_close(with_[2:], without[2:], atol=1e-12, rtol=0)
        assert not torch.allclose(with_[:2], without[:2])

    def test_models_without_room_for_shadows_are_refused(self) -> None:
        with refused("plugins-incompatible: scheduler=wino"):
            Sampler(written([[0.5]], cacheable=False), scheduler=Wino())


class TestRunningConfidence:
    def test_by_hand(self) -> None:
        script = written([[0.6, 0.5, 0.4, 0.3], [0.0, 0.9, 0.8, 0.1], [0.95, 0.0, 0.0, 0.2]])
        # Position 0 goes back when two surer ones turn up, and returns when its new prediction is sure.
        assert script.history(RunningConfidence()) == ([[0], [1, 2], [0], [3]], [[], [0], [], []])

    @each("steps", [2, 4, 8])
    def test_where_nothing_gets_surer_it_is_the_fixed_schedule(self, steps: int) -> None:
        script = written([[0.3, 0.9, 0.5, 0.7, 0.2, 0.6, 0.4, 0.8]])
        assert script.history(RunningConfidence(steps)) == script.history(FixedSteps(steps))


class TestRemdm:
    def test_by_hand(self) -> None:
        script = written([[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]])
        # After 7 of 8 steps the two least sure go, one of them in the very step that would have committed it.
        opened, taken = script.history(Remdm(tokens=2))
        assert opened == [[0], [1], [2], [3], [4], [5], [], [5, 6], [7]]
        assert taken == [[], [], [], [], [], [], [5], [], []]

    @pytest.mark.slow
    @each("steps", [None, 9, 6, 3])
    def test_without_revisions_it_is_the_fixed_schedule(self, steps: int | None) -> None:
        assert same_answers(run(Remdm(steps, revisions=0)), run(FixedSteps(steps)))

    @pytest.mark.slow
    @each(("steps", "revisions", "tokens"), [(18, 1, 1), (9, 2, 2), (3, 1, 3), (18, 3, 99)])
    def test_every_block_adds_its_revisions(self, steps: int, revisions: int, tokens: int) -> None:
        result = run(Remdm(steps, revisions, tokens))
        assert result.complete.all()
        assert (result.trace.generated >= 0).all()
        assert (result.nfe == steps + revisions * TOKENS // BLOCK).all()

    def test_revised_tokens_change(self) -> None:
        assert not torch.equal(run(Remdm(revisions=3, tokens=2)).tokens, run(FixedSteps()).tokens)
        assert any(map(len, history(Remdm(), PROMPTS[0])[1]))


class TestDilated:
    @staticmethod
    def levels(length: int, **settings: Any) -> Steps:
        return written([[0.5] * length]).history(Dilated(**settings))[0]

    def test_by_hand(self) -> None:
        assert self.levels(8) == [[0, 4], [2, 6], [1, 3, 5, 7]]
        assert [len(level) for level in self.levels(32)] == [2, 2, 4, 8, 16]
        assert [len(level) for level in self.levels(64, base=4)] == [4, 12, 48]
        assert self.levels(9) == [[0, 4, 8], [2, 6], [1, 3, 5, 7]]
        assert self.levels(12, base=4) == [[0, 3, 6, 9], [1, 2, 4, 5, 7, 8, 10, 11]]
        assert self.levels(1) == [[0]]

    def test_doubtful_positions_wait(self) -> None:
        script = written([[0.9, 0.9, 0.1, 0.9, 0.2, 0.9, 0.9, 0.9], [0.9, 0.9, 0.1, 0.9, 0.9, 0.9, 0.9, 0.9]])
        assert script.history(Dilated())[0] == [[0], [4, 6], [1, 2, 3, 5, 7]]
        assert script.history(Dilated(skip=0.0))[0] == [[0, 4], [2, 6], [1, 3, 5, 7]]
        assert script.history(Dilated(skip=1.0))[0] == [[], [], list(range(8))]

    @each("length", range(4, 34))
    def test_neighbours_never_go_together_before_the_last_level(self, length: int) -> None:
        levels = self.levels(length)
        assert sorted(place for level in levels for place in level) == list(range(length))
        assert len(levels) <= length.bit_length()
        for level in levels[:-1]:
            assert all(b - a > 1 for a, b in pairwise(level))
