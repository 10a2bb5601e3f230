"""DAEDAL and rho-EOS against their rules written down a second time, on lists, for settings drawn by chance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dllm_sampler import Canvas, Guide, Sampler
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.published import AboveThreshold
from dllm_sampler.schedulers.daedal import Daedal
from dllm_sampler.schedulers.rho_eos import RhoEos
from tests import toys
from tests.conformance.lengths import Step, mismatch
from tests.conformance.lines import Line
from tests.sampling import crossed

MASK, EOS, SLOPE = toys.MASK, toys.EOS, 0.1


@dataclass(frozen=True)
class Bias(Guide):
    """Makes end tokens likelier towards the end, and mask tokens."""

    eos: float
    mask: float
    scale: float

    @property
    def measures(self) -> bool:
        return True

    def __call__(self, logits: Tensor, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        logits = logits * self.scale
        logits[:, EOS] += self.eos + SLOPE * (head_rows.position - canvas.layout.first[head_rows.row])
        logits[:, MASK] += self.mask
        return logits


@dataclass
class Reference:
    """One row."""

    model: nn.Module
    prompt: list[int]
    bias: Bias
    most: int
    width: int
    above: float
    expand: int
    tokens: int
    forwards: int = 0

    def law(self, answer: list[int]) -> Tensor:
        self.forwards += 1
        with torch.no_grad():
            logits = self.model(torch.tensor([self.prompt + answer]))[0, len(self.prompt) :] * self.bias.scale
        logits[:, EOS] += self.bias.eos + SLOPE * torch.arange(len(answer))
        logits[:, MASK] += self.bias.mask
        return logits.softmax(-1)

    def signal(self, law: Tensor) -> float:
        ends = [float(row[EOS]) for row in law.flip(0) if int(row.argmax()) == EOS]
        return sum(ends[: self.tokens]) / self.tokens

    def commit(self, law: Tensor, answer: list[int], at: int) -> list[int]:
        """Write the step's tokens; returns the window's masks that are left."""
        sure, best = law.max(-1)
        masks = [j for j in range(at, min(at + self.width, len(answer))) if answer[j] == MASK]
        usable = [j for j in masks if int(best[j]) != MASK]
        chosen = [j for j in usable if float(sure[j]) > self.above]
        if masks and not usable:
            other = law.clone()
            other[:, MASK] = 0
            sure, best = (other / other.sum(-1, keepdim=True)).max(-1)
            usable = masks
        chosen = chosen or [max(usable, key=lambda j: (float(sure[j]), -j))] if masks else []
        for j in chosen:
            answer[j] = int(best[j])
        return [j for j in masks if j not in chosen]

    def daedal(self, initial: int, grow: float, insert: float, unsure: float) -> list[int]:
        answer, at = [MASK] * initial, 0
        while self.signal(self.law(answer)) < grow and len(answer) < self.most:
            answer += [MASK] * min(self.expand, self.most - len(answer))
        answer += [EOS] * min(self.tokens // 2, max(0, self.most - len(answer)))
        while at < len(answer):
            law = self.law(answer)
            left = self.commit(law, answer, at)
            asking = [j for j in left if float(law[j].max()) < unsure]
            if asking and self.signal(law) < insert and len(answer) < self.most:
                least = min(asking, key=lambda j: (float(law[j].max()), j))
                answer = (answer[:least] + [MASK] * self.expand + answer[least + 1 :])[: self.most]
            while at < len(answer) and MASK not in answer[at : at + self.width]:
                at += self.width
        return answer

    def rho_eos(self, initial: int, low: float, high: float, scale: str) -> list[int]:
        answer, at, final = [MASK] * initial, 0, False
        for step in range(1, self.most + 1):
            if at >= len(answer):
                break
            final = final or len(answer) >= self.most
            law = self.law(answer)
            self.commit(law, answer, at)
            while at < len(answer) and MASK not in answer[at : at + self.width]:
                at = min(at + self.width, len(answer))
            share = torch.tensor(self.signal(law), dtype=torch.float32)
            few, many = bool(share < low), bool(share > high)
            if (few or many) and not final and step <= 64:
                parts = math.ceil(float((low - share if few else share - high) / torch.tensor(0.1)))
                times = {"const": 1, "linear": parts, "exp": 2 ** (parts - 1)}[scale]
                count = min(times, 8) * self.expand
                answer = (
                    answer + [MASK] * min(count, self.most - len(answer))
                    if few
                    else answer[: max(0, len(answer) - count)]
                )
            at = min(at, len(answer))
        return answer


def test_a_window_that_insertions_have_filled_takes_no_forward() -> None:
    """Inserted masks push tokens of the window into the next one, which may then hold no mask."""
    model: Any = toys.denoiser("llada")
    bias, prompts = Bias(1.5, -30, 0.7), [[23, 29, 6, 21, 6], [19, 8, 23, 11, 25], [8, 2]]
    rule = Daedal(AboveThreshold(0.3), initial=16, expand=3, eos_tokens=4, grow=0.0, insert=0.9, unsure=0.6)
    blocks = {"name": "fixed", "length": 4}
    sampler = Sampler(model, scheduler=rule, blocks=blocks, stop="none", guide=[bias], compat=True)
    found = sampler.generate(prompts, max_new_tokens=40)
    for row, prompt in enumerate(prompts):
        reference = Reference(model.transformer, prompt, bias, 40, 4, 0.3, 3, 4)
        wanted = reference.daedal(16, 0.0, 0.9, 0.6)
        assert found.trace.ids[row, found.trace.origin : found.trace.end[row]].tolist() == wanted
        assert int(found.nfe[row]) == reference.forwards


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_only_forwards_before_the_first_commit_belong_to_the_first_stage(empty: int) -> None:
    """A later forward without a commit is the difference that a replay names."""
    steps = [Step(2, [], []), Step(2, [0], []), Step(2, [1], [])]
    about: Any = {"id": "", "system": "daedal", "model": "", "params": {}, "where": "", "nfe": 3, "nfe_stage1": 1}
    about |= {"gen_lengths": [[2, 2]] * 3, "edits": [[[], []]] * 3, "steps": [[step.commits] * 2 for step in steps]}
    line = Line(prompt_ids=[[5], [6]], output_ids=[[7, 8]] * 2, **about)
    assert mismatch(line, [steps, steps], [[7, 8]] * 2) is None
    wasted = [*steps[: 1 + empty], Step(2, [], []), *steps[1 + empty :]]
    early = "2 forwards before the first commit, recorded 1"
    assert mismatch(line, [steps, wasted], [[7, 8]] * 2) == ("NFE 4, recorded 3" if empty else early)


@pytest.mark.parametrize(("method", "seed"), crossed(["daedal", "rho_eos"], range(20), together=0))
def test_the_rules_written_a_second_time(method: str, seed: int) -> None:
    random, moved = Random(f"{method}{seed}"), 0
    for _ in range(6):
        model: Any = toys.denoiser(random.choice(["llada", "gqa"]))
        bias = Bias(random.uniform(-1, 6), random.choice([-30, 0, 30]), random.choice([0.8, 1.4]))
        prompt = [random.randrange(30) for _ in range(random.randint(1, 9))]
        initial, most = random.randint(1, 20), random.choice([8, 16, 24, 40])
        above, width = random.choice([0.3, 0.5, 0.9]), random.choice([1, 3, 8, 32])
        expand, tokens = random.choice([1, 2, 3, 8]), random.choice([1, 2, 4, 8])
        reference = Reference(model.transformer, prompt, bias, most, width, above, expand, tokens)
        own = {"initial": initial, "expand": expand, "eos_tokens": tokens}
        if method == "daedal":
            bounds = [random.choice(some) for some in ((0.0, 0.2, 0.5), (0.0, 0.5, 0.9), (0.1, 0.3, 0.6))]
            wanted, steps = reference.daedal(initial, *bounds), None
            rule = Daedal(AboveThreshold(above), **own, **dict(zip(("grow", "insert", "unsure"), bounds, strict=True)))
        else:
            low, high = random.choice([(0.2, 0.5), (0.3, 0.7), (0.0, 0.2)])
            scale = random.choice(["exp", "linear", "const"])
            wanted, steps = reference.rho_eos(initial, low, high, scale), most
            rule = RhoEos(AboveThreshold(above), **own, low=low, high=high, scale=scale)  # pyright: ignore
        blocks = {"name": "fixed", "length": width}
        sampler = Sampler(model, scheduler=rule, blocks=blocks, stop="none", guide=[bias], compat=True, max_steps=steps)
        found = sampler.generate([prompt], max_new_tokens=max(initial, most))
        assert found.trace.ids[0, found.trace.origin : found.trace.end[0]].tolist() == wanted
        assert int(found.nfe) == reference.forwards
        moved += len(wanted) != initial
    assert moved
