"""The schedulers of uniform diffusion, on a toy without mask token and on models that follow a script."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler import Canvas, ModelSpec, Query, Sampler
from dllm_sampler.check.promises import check_row
from dllm_sampler.check.reads import no_host_reads
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Denoiser, Plan
from dllm_sampler.core.values import Spent
from dllm_sampler.engine import readout
from dllm_sampler.guides.annealing import LinearTemperature
from dllm_sampler.schedulers.block_refine import BlockRefine
from dllm_sampler.schedulers.entropy_renoise import EntropyRenoise
from tests import scripted, toys
from tests.refusals import refused
from tests.sampling import each, few

TOKENS, BLOCK = 15, 6
RENOISE: dict[str, Any] = {
    "max_denoising_steps": 7,
    "entropy_bound": 1.0,
    "stability_threshold": 0,
    "confidence_threshold": 1.0,
}
SCHEDULERS: list[Any] = [EntropyRenoise(**RENOISE), BlockRefine(5, 0.5)]


@dataclass(frozen=True)
class Uniform:
    """A model without a mask token, which remembers the canvases it saw."""

    inner: Denoiser
    seen: list[Canvas]

    @property
    def spec(self) -> ModelSpec:
        return replace(self.inner.spec, mask_id=None)

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        self.seen.append(canvas)
        return self.inner(canvas, query, plan)

    def head(self, hidden: Tensor) -> Tensor:
        return self.inner.head(hidden)


def uniform(scheduler: Any, model: Denoiser | None = None, **plugins: Any) -> tuple[Sampler, list[Canvas]]:
    seen: list[Canvas] = []
    plugins = {"blocks": {"name": "fixed", "length": BLOCK}, "stop": "none", **plugins}
    return Sampler(Uniform(model or toys.denoiser(), seen), scheduler=scheduler, **plugins), seen


@pytest.mark.slow
@few("cache", ["none", "dual"])
@few("scheduler", SCHEDULERS)
def test_a_row_in_a_batch_is_the_row_alone(scheduler: Any, cache: str) -> None:
    sampler, _ = uniform(scheduler, cache=cache)
    batch = sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS)
    assert batch.complete.all()
    assert len(set(batch.nfe.tolist())) > 1
    for row, prompt in enumerate(toys.PROMPTS):
        check_row(batch, row, sampler.generate([prompt], max_new_tokens=TOKENS, seed=toys.SEEDS[row]))


LONG = [replace(SCHEDULERS[0], stability_threshold=None), BlockRefine(5, 1.0)]


@pytest.mark.slow
@each("scheduler", LONG)
def test_noise_is_drawn_again_and_nothing_else_is(scheduler: Any) -> None:
    sampler, seen = uniform(scheduler)
    sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS)
    stayed = changed = 0
    for before, after in pairwise(seen):
        assert torch.equal(before.ids[before.layout.frozen], after.ids[before.layout.frozen])
        kept = ~before.masked & ~after.masked & ~before.in_block()
        assert torch.equal(before.ids[kept], after.ids[kept])
        noise = before.masked & after.masked & before.in_block() & after.in_block() & ~after.done[:, None]
        stayed += int((before.ids == after.ids)[noise].sum())
        changed += int((before.ids != after.ids)[noise].sum())
    assert 0 < stayed < 0.1 * changed  # one in 40 by chance


def accepted(bound: float, entropies: list[float], **settings: Any) -> list[list[int]]:
    """What each of five forwards leaves accepted where positions have these probabilities of their best token."""
    model = scripted.constant(entropies)
    scheduler = EntropyRenoise(bound, 5, 1.0, 1.0, None, None, **settings)
    steps = list(Sampler(model, scheduler=scheduler, blocks="full", stop="none").stream([[0]], max_new_tokens=4))
    return [(~step.masked[0]).nonzero()[:, 0].tolist() for step in steps]


def test_the_bound() -> None:
    sure = [0.9, 0.6, 0.95, 0.7]
    assert accepted(0.0, sure) == [[2]] * 4 + [[0, 1, 2, 3]]
    assert accepted(float("inf"), sure) == [[0, 1, 2, 3]] * 5
    # Position 2 has 0.27 nats: its neighbour in the order may come along, the next one has 0.27 + 0.48 before it.
    assert accepted(0.3, sure) == [[0, 2]] * 4 + [[0, 1, 2, 3]]


def says(tokens: list[list[int]], sure: list[list[float]]) -> scripted.Script:
    """A model that says in forward n what the n-th lists say, the last ones from there on; one prompt token."""

    def logits(canvas: Canvas) -> Tensor:
        step = min(int(canvas.step[0]), len(tokens) - 1)
        table = torch.full((len(tokens[0]) + 2, 8), 0.0, dtype=torch.float64)
        for place, (token, p) in enumerate(zip(tokens[step], sure[step], strict=True), 1):
            table[place] = (1 - p) / 6
            table[place, token], table[place, 7] = p, 0
        return table.log()[None]

    return scripted.Script(logits)


def test_acceptance_is_decided_each_step_and_the_answer_is_the_last_best_canvas() -> None:
    tokens = [[1, 2], [3, 2], [4, 5]]
    sure = [[0.99, 0.6], [0.6, 0.99], [0.9, 0.8]]
    scheduler = EntropyRenoise(0.0, 3, 0.0, 0.0, None, None)
    *steps, last = Sampler(says(tokens, sure), scheduler=scheduler, blocks="full", stop="none").stream(
        [[0]], max_new_tokens=2
    )
    assert [step.masked[0].tolist() for step in steps] == [[False, True], [True, False]]
    assert last.tokens[0].tolist() == [4, 5]
    assert last.result is not None
    assert last.result.trace.steps(0) == [[], [], [0, 1]]
    torch.testing.assert_close(last.result.trace.logprob[0, 1:].exp(), torch.tensor([0.9, 0.8], dtype=torch.float64))


@each(("stability", "forwards"), [(0, 2), (1, 4), (2, 5), (9, 12)])
def test_the_rule_of_stability(stability: int, forwards: int) -> None:
    """Unsure in the first forward; another best canvas in the second than from the third on."""
    tokens = [[1, 1], [1, 2], [1, 3]]
    sure = [[0.6, 0.6], [0.999, 0.999], [0.999, 0.999]]
    scheduler = EntropyRenoise(0.0, 12, 0.0, 0.0, stability, 0.1)
    result = Sampler(says(tokens, sure), scheduler=scheduler, blocks="full", stop="none").generate(
        [[0]], max_new_tokens=2
    )
    assert int(result.nfe) == forwards
    assert result.tokens[0].tolist() == ([1, 2] if stability == 0 else [1, 3])


def test_the_temperature_falls_linearly() -> None:
    guide = LinearTemperature(0.4, 0.8, 4)
    canvas = toys.canvas(torch.ones(3, 2, dtype=torch.bool))
    canvas = replace(canvas, age=torch.tensor([0, 3, 9]))
    found = 1 / guide(torch.ones(6, 5), canvas, HeadRows.every(Query.window(canvas)))[::2, 0]
    torch.testing.assert_close(found, torch.tensor([0.8, 0.5, 0.4]))


def test_a_users_temperature_comes_before() -> None:
    sampler, _ = uniform(EntropyRenoise(**RENOISE), temperature=2.0, top_k=3)
    assert [type(guide).__name__ for guide in sampler.plugins.guides] == ["Temperature", "TopK", "LinearTemperature"]


@each(("steps", "counts"), [(2, [4, 4]), (3, [3, 3, 2]), (8, [1] * 8), (16, [1, 0] * 7 + [1])])
def test_the_rising_quota(steps: int, counts: list[int]) -> None:
    model = scripted.constant([0.5 + 0.01 * i for i in range(8)])
    found = [len(step) for step in scripted.play(model, BlockRefine(steps, 1.0), 8)]
    assert found == counts


def test_the_threshold_of_block_refinement() -> None:
    model = scripted.constant([0.99, 0.5, 0.6, 0.97, 0.95])
    assert scripted.play(model, BlockRefine(5, 0.95), 5) == [[0, 3], [], [4], [2], [1]]


def test_a_step_reads_nothing() -> None:
    for scheduler in SCHEDULERS:
        sampler, _ = uniform(scheduler)
        plugins, seen = sampler.plugins, toys.canvas(torch.ones(2, 9, dtype=torch.bool))
        carry = plugins.scheduler.init(seen)
        query = Query.window(seen)
        logits = torch.randn(18, toys.VOCAB, dtype=torch.float64)
        read = readout.read(
            logits,
            seen,
            HeadRows.every(query),
            readout.Rule(sampler.denoiser.spec, plugins.guides, plugins.scheduler.needs),
        )
        with no_host_reads():
            plugins.scheduler.tell(seen.renoised(toys.VOCAB), query, read, carry)


@each(
    ("settings", "said"),
    [
        ({"entropy_bound": -1}, "option-range: entropy_bound"),
        ({"max_denoising_steps": 0}, "option-range: max_denoising_steps"),
        ({"t_min": 0.9}, "option-range: t_max, t_min=0.9"),
        ({"t_max": float("inf")}, "option-range: t_max"),
        ({"stability_threshold": -1}, "option-range: stability_threshold"),
        ({"confidence_threshold": -0.1}, "option-range: confidence_threshold"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], said: str) -> None:
    with refused(said):
        EntropyRenoise(**settings)


def test_schedulers_for_masks_are_refused() -> None:
    with refused("plugins-incompatible: scheduler=threshold"):
        uniform("threshold")
