"""Against decoders written again from the papers: one unpadded row, plain Python, the network's plain forward."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dllm_sampler import Result
from dllm_sampler.models.cfg import GuidedDenoiser
from dllm_sampler.models.denoiser import TransformerDenoiser
from tests import toys
from tests.sampling import crossed

TOKENS = 16
# (confidences in falling order, masks when the block was opened, steps made in it, its length) -> how many to commit
Rule = Callable[[list[float], int, int, int], int]


@functools.cache  # several rules come through the same states
def probabilities(toy: str, ids: tuple[int, ...], prompt: int) -> torch.Tensor:
    """`[L, V]` what the toy thinks of every position of one row, the mask token excluded."""
    denoiser, rows, weight = toys.denoiser(toy), torch.tensor([ids]), 1.0
    if isinstance(denoiser, GuidedDenoiser):  # u + (s + 1)(c - u), with the prompt hidden from u
        rows, weight = torch.tensor([ids, (toys.MASK,) * prompt + ids[prompt:]]), denoiser.scale + 1
        denoiser = denoiser.denoiser
    assert isinstance(denoiser, TransformerDenoiser)
    with torch.no_grad():
        logits = denoiser.transformer(rows)
    logits = logits[0] if len(rows) == 1 else logits[1] + weight * (logits[0] - logits[1])
    if denoiser.shift:  # raw row i predicts token i + 1
        logits = torch.cat([logits[:1], logits[:-1]])
    logits[:, toys.MASK] = -torch.inf
    return logits.softmax(-1)


def decode(toy: str, prompt: list[int], block: int, rule: Rule) -> tuple[list[int], list[int]]:
    """Tokens of a generation and the forward that committed each."""
    ids, step_map, step = [*prompt, *[toys.MASK] * TOKENS], [-1] * TOKENS, 0
    for start in range(0, TOKENS, block):
        stop, age = min(start + block, TOKENS), 0
        while masks := [i for i in range(start, stop) if step_map[i] < 0]:
            p = probabilities(toy, tuple(ids), len(prompt))
            sure = {i: float(p[len(prompt) + i].max()) for i in masks}
            order = sorted(masks, key=lambda i: (-sure[i], i))
            count = rule([sure[i] for i in order], stop - start, age, stop - start)
            for i in order[: max(count, 1)]:
                ids[len(prompt) + i], step_map[i] = int(p[len(prompt) + i].argmax()), step
            step, age = step + 1, age + 1
    return ids[len(prompt) :], step_map


def one(sure: list[float], masks: int, age: int, length: int) -> int:
    return 1


def threshold(bar: float) -> Rule:
    return lambda sure, masks, age, length: sum(c >= bar for c in sure)


def factor(bound: float) -> Rule:
    """The largest n with (n + 1)(1 - c_n) <= f, every n tried."""
    return lambda sure, masks, age, length: max(
        (n for n in range(1, len(sure) + 1) if (n + 1) * (1 - sure[n - 1]) <= bound), default=1
    )


def transfer(steps: int) -> Rule:
    """LLaDA's counts, with the block's share of all steps."""

    def count(sure: list[float], masks: int, age: int, length: int) -> int:
        share = steps * length // TOKENS
        return [masks // share + (i < masks % share) for i in range(share)][age]

    return count


def assert_same(result: Result, row: int, expected: tuple[list[int], list[int]]) -> None:
    tokens, step_map = expected
    assert result.trace.decoded[row].tolist() == tokens
    assert result.trace.generated[row].tolist() == step_map
    assert int(result.nfe[row]) == max(step_map) + 1


RULES: dict[str, tuple[dict[str, Any], Rule]] = {
    "fixed": ({"name": "fixed"}, one),
    "fixed-8": ({"name": "fixed", "steps": 8}, transfer(8)),
    "fixed-12": ({"name": "fixed", "steps": 12}, transfer(12)),
    "fixed-4": ({"name": "fixed", "steps": 4}, transfer(4)),
    "threshold-0.3": ({"name": "threshold", "threshold": 0.3}, threshold(0.3)),
    "threshold-0.7": ({"name": "threshold", "threshold": 0.7}, threshold(0.7)),
    "threshold-1": ({"name": "threshold", "threshold": 1.0}, threshold(1.0)),
    "threshold-0": ({"name": "threshold", "threshold": 0.0}, threshold(0.0)),
    "factor-1": ({"name": "factor"}, factor(1.0)),
    "factor-0.4": ({"name": "factor", "factor": 0.4}, factor(0.4)),
    "factor-2.5": ({"name": "factor", "factor": 2.5}, factor(2.5)),
}


@pytest.mark.parametrize(("toy", "name"), crossed(toys.TOYS, list(RULES)))
def test_each_rule_is_its_paper(toy: str, name: str) -> None:
    scheduler, rule = RULES[name]
    for block in (4, 8, 16):
        sampler = toys.sampler(toy, scheduler=scheduler, blocks={"name": "fixed", "length": block})
        result = sampler.generate(toys.PROMPTS[:2], max_new_tokens=TOKENS)
        for row, prompt in enumerate(toys.PROMPTS[:2]):
            assert_same(result, row, decode(toy, prompt, block, rule))


STEPWISE: dict[str, dict[str, Any]] = {
    "threshold above 1": {"name": "threshold", "threshold": 1.01},
    "factor 0": {"name": "factor", "factor": 0.0},
    "fixed, one step per token": {"name": "fixed", "steps": TOKENS},
    "fixed, more steps than tokens": {"name": "fixed", "steps": 3 * TOKENS},
    "budgeted, one step per token": {"name": "budgeted", "threshold": 0.0},
    "budgeted, threshold above 1": {"name": "budgeted", "threshold": 2.0, "steps": 3},
}


@pytest.mark.parametrize("name", STEPWISE)
def test_every_method_at_its_end_is_one_per_step(name: str) -> None:
    """Fast-dLLM's invariants 1 and 2, with a short last block and with one block."""
    for blocks, length in (({"name": "fixed", "length": 6}, 6), ("full", TOKENS)):
        result = toys.sampler(scheduler=STEPWISE[name], blocks=blocks).generate(toys.PROMPTS[:2], max_new_tokens=TOKENS)
        for row, prompt in enumerate(toys.PROMPTS[:2]):
            assert_same(result, row, decode("llada", prompt, length, one))
