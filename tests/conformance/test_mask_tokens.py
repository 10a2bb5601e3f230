"""Published loops where the mask token is the best candidate: their rules written down a second time, on lists."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dllm_sampler import Canvas, Guide, Sampler
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.published import PublishedWino
from tests import toys
from tests.toys import MASK


@dataclass(frozen=True)
class Raised(Guide):
    """Makes mask tokens likelier."""

    mask: float

    @property
    def measures(self) -> bool:
        return True

    def __call__(self, logits: Tensor, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        return logits.index_add(-1, torch.tensor([MASK]), torch.full_like(logits[:, :1], self.mask))


@dataclass
class WinoLoop:
    """WINO's loop for one row, with the record `open` of positions that it may write."""

    model: nn.Module
    prompt: list[int]
    mask: float
    above: float
    back: float
    forwards: int = 0
    written: int = 0  # mask tokens

    def laws(self, answer: list[int], start: int, width: int) -> tuple[Tensor, Tensor]:
        """Probabilities at the answer, and at the shadows of the block from `start` on."""
        self.forwards += 1
        first, size = len(self.prompt), len(self.prompt + answer)
        ids = torch.tensor([self.prompt + answer + [MASK] * width])
        block = torch.arange(first + start, first + start + width)
        seen = torch.ones(1, size + width, size + width, dtype=torch.bool)
        seen[:, :size, size:] = False
        seen[0, size + torch.arange(width), block] = False
        with torch.no_grad():
            logits = self.model(ids, positions=torch.cat([torch.arange(size), block])[None], keys=seen)[0]
        logits[:, MASK] += self.mask
        law = logits.softmax(-1)
        return law[first:size], law[size:]

    def run(self, answer: list[int], width: int) -> list[int]:
        for start in range(0, len(answer), width):
            block, last = range(start, start + width), 30
            open_ = {at for at in range(start + width) if answer[at] == MASK}  # of earlier blocks too
            while open_:
                law, shadow = self.laws(answer, start, width)
                sure, best = law.max(-1)
                cap = min(max(int(0.7 * len(open_)), 5), 20)
                ranked = sorted(open_, key=lambda at: (-float(sure[at]), at))
                chosen = [at for at in ranked if float(sure[at]) > self.above][:cap] or ranked[:1]
                support = {at: float(shadow[at - start, answer[at]]) for at in block if at not in open_}
                doubtful = sorted((at for at in support if support[at] < self.back), key=lambda at: (support[at], at))
                back = doubtful[: last - 1] if len(chosen) > 1 else []
                for at in chosen:
                    answer[at] = int(best[at])
                    self.written += answer[at] == MASK
                for at in back:
                    answer[at] = MASK
                open_, last = open_ - set(chosen) | set(back), len(chosen)
                if self.forwards > 4 * len(answer):
                    return answer
        return answer


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_what_wino_has_written_is_decided(seed: int) -> None:
    random, written = Random(seed), 0
    for _ in range(6):
        model: Any = toys.denoiser(random.choice(["llada", "gqa"]))
        raised, prompts = random.choice([2.0, 5.0, 8.0]), random.sample(toys.PROMPTS, 2)
        settings: Any = {"threshold": random.choice([0.1, 0.3, 0.6]), "back": random.choice([0.3, 0.7, 0.9])}
        width, blocks = random.choice([3, 6, 12]), random.choice([1, 2, 3])
        rule, guide = PublishedWino(**settings), Raised(raised)
        fixed = {"name": "fixed", "length": width}
        sampler = Sampler(model, scheduler=rule, blocks=fixed, stop="none", guide=[guide], compat=True)
        found = sampler.generate(prompts, max_new_tokens=width * blocks)
        for row, prompt in enumerate(prompts):
            loop = WinoLoop(model.transformer, prompt, raised, settings["threshold"], settings["back"])
            wanted = loop.run([MASK] * width * blocks, width)
            ended = loop.forwards <= 4 * width * blocks
            assert int(found.nfe[row]) == min(loop.forwards, 4 * width * blocks)
            assert not ended or found.trace.ids[row, found.trace.origin :].tolist() == wanted
            assert not ended or found.complete[row]
            written += loop.written
    assert written
