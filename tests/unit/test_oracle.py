"""The oracle writes what one token per step wrote, in no more forwards; what it cannot reproduce is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler import Canvas, CounterNoise, Result, Sampler
from dllm_sampler.blocks.fixed import FixedBlocks, FullBlock
from dllm_sampler.check.reads import no_host_reads
from dllm_sampler.engine import layout
from dllm_sampler.engine.loop import Engine
from dllm_sampler.eval.oracle import Oracle
from tests import toys
from tests.refusals import refused
from tests.reproduced import decode
from tests.sampling import crossed
from tests.scripted import Script

TOKENS = 17


def answers(result: Result) -> list[list[int]]:
    return [row[:end] for row, end in zip(result.tokens.tolist(), result.lengths.tolist(), strict=True)]


BLOCKS: dict[str, Any] = {
    "fixed": FixedBlocks(6), "full": FullBlock(), "adablock": {"name": "adablock", "delimiters": [3, 15, 20, 34]}
}  # fmt: skip


CACHES = ("none", "dual", "periodic_prefix")
STOPS = ("none", "prefix", "block", "truncate", "end_of_text")


@pytest.mark.parametrize(("toy", "cache", "blocks", "stop"), crossed(toys.TOYS, CACHES, BLOCKS, STOPS, together=0))
def test_reproduces_one_per_step(toy: str, cache: str, blocks: Any, stop: str) -> None:
    plugins = {"blocks": blocks, "stop": stop, "cache": cache}
    reference, oracle = decode(toys.denoiser(toy), toys.PROMPTS, max_new_tokens=TOKENS, **plugins)
    assert bool(oracle.complete.all())
    assert answers(oracle) == answers(reference), plugins
    assert bool((oracle.nfe <= reference.nfe).all()), plugins
    assert int(oracle.nfe.sum()) < int(reference.nfe.sum()), f"it saved nothing: {plugins}"
    if stop == "none":
        assert torch.equal(oracle.tokens, reference.tokens)


@pytest.mark.slow
def test_a_row_comes_out_as_alone() -> None:
    plugins = {"blocks": FixedBlocks(6), "stop": "prefix"}
    together = decode(toys.denoiser(), toys.PROMPTS, max_new_tokens=TOKENS, **plugins)[1]
    for row, prompt in enumerate(toys.PROMPTS):
        alone = decode(toys.denoiser(), [prompt], max_new_tokens=TOKENS, **plugins)[1]
        assert alone.trace.steps() == together.trace.steps(row)


def test_its_steps_read_nothing() -> None:
    reference = toys.sampler(scheduler="fixed").generate(toys.PROMPTS, max_new_tokens=TOKENS)
    engine = Engine(toys.denoiser(), toys.sampler(scheduler=Oracle.of(reference.trace)).plugins)
    rows, seeds = toys.PROMPTS, range(len(toys.PROMPTS))
    state = engine.begin(
        layout.canvas(rows, TOKENS, seeds, toys.denoiser().spec, engine.plugins.blocks, CounterNoise(), cuts=False)
    )
    for _ in range(3):
        with torch.no_grad(), no_host_reads():
            engine.step(state)
        engine.poll(state)


def model(*rules: tuple[int, set[int], set[int], float]) -> Script:
    """A model of four positions: position p says token p, with a confidence, where a rule allows it.

    A rule is (position, these must be committed, these must be noise, confidence); where none holds it says token 5.
    """

    def says(canvas: Canvas) -> Tensor:
        table = torch.zeros(canvas.ids.shape[0], canvas.length + 1, 8, dtype=torch.float64)
        masked = canvas.masked[0, canvas.layout.first[0] :].tolist()
        for place in range(4):
            rates = [c for at, there, noise, c in rules if at == place and holds(masked, there, noise)]
            sure = rates[0] if rates else 0.4
            table[:, canvas.layout.first[0] + place] = (1 - sure) / 7
            table[:, canvas.layout.first[0] + place, place if rates else 5] = sure
        return table.log()

    def holds(masked: list[bool], there: set[int], noise: set[int]) -> bool:
        return not any(masked[one] for one in there) and all(masked[one] for one in noise)

    return Script(says)


def steps(script: Script, blocks: Any = None) -> tuple[list[list[int]], list[list[int]]]:
    reference, oracle = decode(script, [[0]], max_new_tokens=4, blocks=blocks or FullBlock(), stop="none")
    assert reference.tokens.tolist() == oracle.tokens.tolist() == [[0, 1, 2, 3]]
    return reference.trace.steps(), oracle.trace.steps()


def test_by_hand() -> None:
    """0 and 2 are right at once, 1 once 0 stands, 3 once 1 does: three forwards for four tokens."""
    chain = model((0, set(), set(), 0.9), (2, set(), set(), 0.5), (1, {0}, set(), 0.8), (3, {1}, set(), 0.7))
    assert steps(chain) == ([[0], [1], [3], [2]], [[0, 2], [1], [3]])
    assert steps(chain, FixedBlocks(2))[1] == [[0], [1], [2, 3]], "a block is finished before the next is looked at"


def test_where_no_prediction_is_right_the_next_of_the_reference_is_written() -> None:
    """2 is right at once, but as soon as it stands, 1 and then 3 are predicted wrongly."""
    fragile = model((0, set(), set(), 0.9), (1, {0}, {2}, 0.8), (3, {1}, {2}, 0.7), (2, set(), set(), 0.5))
    assert steps(fragile) == ([[0], [1], [3], [2]], [[0, 2], [1], [3]])


def test_greedy_is_not_always_the_fewest() -> None:
    """Committing 0 alone first gives all the others in the second forward, and a threshold happens to do that."""
    second = ((1, {0}, {2}, 0.85), (3, {0}, {2}, 0.84), (2, {0}, set(), 0.82))
    fragile = model((0, set(), set(), 0.9), *second, (2, set(), set(), 0.5))
    assert steps(fragile)[1] == [[0, 2], [1], [3]]
    rule = {"name": "threshold", "threshold": 0.8}
    found = Sampler(fragile, scheduler=rule, blocks="full", stop="none").generate([[0]], max_new_tokens=4)
    assert found.tokens.tolist() == [[0, 1, 2, 3]]
    assert found.trace.steps() == [[0], [1, 2, 3]]


def test_refuses_another_batch() -> None:
    reference = toys.sampler(scheduler="fixed").generate(toys.PROMPTS, max_new_tokens=TOKENS)
    oracle = toys.sampler(scheduler=Oracle.of(reference.trace))
    with refused("length-mismatch: 17"):
        oracle.generate(toys.PROMPTS[:2], max_new_tokens=TOKENS)
    with refused("length-mismatch"):
        oracle.generate(toys.PROMPTS, max_new_tokens=8)
