"""How a step chooses tokens from logits: by its guides and its noise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dllm_sampler.core.packing import Answers
from dllm_sampler.core.statistics import argmax
from dllm_sampler.core.values import Canvas

if TYPE_CHECKING:
    from dllm_sampler.core.protocols import Guide


@dataclass(frozen=True)
class Draw:
    """The choice of a step, to be made again from other logits or by other noise.

    Calls choose from logits `[B, K, Q, V]` and return tokens `[B, K, Q]`, 0 where nothing is answered.
    """

    guides: tuple[Guide, ...]  # in the order of application
    canvas: Canvas
    answers: Answers
    vocab: int
    noise: Tensor | None = None  # [R, V] of the step; None: drawn with the canvas's row seeds when it is wanted
    draws: bool = True  # False: the best token is taken

    @staticmethod
    def of(guides: tuple[Guide, ...], canvas: Canvas, answers: Answers, vocab: int) -> Draw:
        """The step's own: its noise is drawn once, so that further choices are coupled to the first."""
        draws = any(guide.draws for guide in guides)
        noise = canvas.noise.tokens(canvas, answers, vocab) if draws else None
        return Draw(guides, canvas, answers, vocab, noise, draws)

    def __call__(self, logits: Tensor) -> Tensor:
        """`[B, K, Q]` tokens chosen from `[B, K, Q, V]`."""
        return self.answers.spread(self.chosen(self.answers.pick(logits)))

    def chosen(self, choice: Tensor) -> Tensor:
        """`[R]` tokens chosen from `[R, V]`."""
        choice, noisy = self._guided(choice)
        joint = next((guide for guide in reversed(self.guides) if guide.joint), None)
        return argmax(noisy) if joint is None else joint.choose(choice, noisy, self.canvas, self.answers)

    def scores(self, logits: Tensor) -> Tensor:
        """`[B, K, Q, V]` of which a choice from `[B, K, Q, V]` is the best, without what a joint guide demands."""
        return self.answers.spread(self._guided(self.answers.pick(logits))[1])

    def _guided(self, choice: Tensor) -> tuple[Tensor, Tensor]:
        """`[R, V]` behind all guides but the joint one, and the same with noise in a draw."""
        for guide in self.guides:
            if guide.chooses and not guide.joint:
                choice = guide(choice, self.canvas, self.answers)
        if not self.draws:
            return choice, choice
        noise = self.noise
        if noise is None:
            noise = self.canvas.noise.tokens(self.canvas, self.answers, self.vocab)
        # In half precision the sums would tie, and ties go to the lower id.
        choice = choice.to(torch.promote_types(choice.dtype, torch.float32))
        return choice, choice + noise.to(choice.dtype)

    def seeded(self, seeds: Tensor) -> Draw:
        """The same with the noise of other row seeds, `[B] int64`."""
        return replace(self, canvas=replace(self.canvas, row_seed=seeds), noise=None)

    def greedy(self) -> Draw:
        """The same without noise: the best tokens."""
        return replace(self, noise=None, draws=False)

    def under(self, candidate: Tensor) -> Draw:
        """The same under one hypothesis per row, `candidate [B]`, for logits and tokens with K = 1."""
        return replace(self, answers=self.answers.under(candidate), noise=None)
