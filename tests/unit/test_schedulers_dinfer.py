"""dInfer: rules, runner and caches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dllm_sampler import Canvas, Sampler
from dllm_sampler.blocks.fixed import FixedBlocks, FullBlock
from dllm_sampler.cache.periodic import PeriodicDual, PeriodicPrefix
from dllm_sampler.core.values import Query, Readout
from dllm_sampler.schedulers.credit import Credit
from dllm_sampler.schedulers.dinfer import DInferThreshold
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.hierarchical import Hierarchical
from dllm_sampler.schedulers.threshold import Threshold
from tests import toys
from tests.refusals import refused
from tests.sampling import few
from tests.scripted import TOKENS, Script, constant, play, run, same

# dInfer


def test_dinfer_near_ties_by_hand() -> None:
    model = constant([0.5, 0.499995, 0.49, 0.91, 0.95, 0.3])
    assert play(model, DInferThreshold(0.9), 6) == [[3, 4], [0, 1], [2], [5]]
    assert play(model, Threshold(0.9), 6) == [[3, 4], [0], [1], [2], [5]]
    assert play(model, DInferThreshold(2.0, slack=0.25), 6) == [[3, 4], [0, 1, 2, 5]]


def test_dinfer_without_slack_is_the_threshold() -> None:
    assert same(run(DInferThreshold(0.6, slack=0.0)), run(Threshold(0.6)))


def test_hierarchy_by_hand() -> None:
    model = constant([0.5, 0.6, 0.3, 0.35, 0.7, 0.2, 0.45, 0.1])
    # 0-7: 4. Then 0-3: 1 and 5-7: 6. Then 0: 0, 2-3: 0.35 is too low, 5 and 7 too. Then one by one.
    assert play(model, Hierarchical(0.4), 8) == [[4], [1, 6], [0], [3], [2], [5], [7]]
    assert play(model, Hierarchical(0.0), 8) == [[4], [1, 6], [0, 3, 5, 7], [2]]
    assert play(model, Hierarchical(0.4, 0.55), 8) == [[1, 4], [0, 6], [3], [2], [5], [7]]
    assert play(constant([0.5] * 4, [1] * 4), Hierarchical(0.4), 4) == [[0], [1], [2], [3]]  # first on a tie


@pytest.mark.slow
def test_hierarchy_at_its_ends() -> None:
    assert same(run(Hierarchical(1.0)), run(FixedSteps()))
    assert (run(Hierarchical(0.0)).nfe < TOKENS).all()


def test_hierarchy_remasks_by_hand() -> None:
    """Position 0 loses its certainty once position 2 stands; it is chosen again when all else is there."""
    table = constant([0.9, 0.3, 0.8, 0.35])

    def says(canvas: Canvas) -> Tensor:
        doubt = (~canvas.masked[:, 3] & canvas.masked[:, 4])[:, None] & (canvas.columns() == 1)
        return torch.where(doubt[..., None], table.says(canvas) * 0.05, table.says(canvas))

    model = Script(says)
    sampler = Sampler(model, scheduler=Hierarchical(0.6, 0.75, remask=0.5), blocks=FullBlock(), stop="none")
    masks = [commits.masked[0].tolist() for commits in sampler.stream([[0]], max_new_tokens=4)]
    assert masks[0] == [False, True, False, True]
    # One is doubtful, so that two must be chosen: the surest are 3 and 1, and 0 returns to noise.
    assert masks[1] == [True, False, False, False]
    assert masks[2] == [False] * 4


def test_hierarchy_with_more_runs_than_asked_masks() -> None:
    """A cache may ask about few masks while tokens that stand alone cut the block into many runs."""
    canvas = toys.canvas(torch.tensor([[False, True] * 8]))  # 8 runs
    query = Query.at(canvas, torch.tensor([[3, 13]]))
    readout = Readout(torch.tensor([[[1, 2]]]), torch.tensor([[[0.1, 0.3]]], dtype=torch.float64))
    edit, _ = Hierarchical(0.0).tell(canvas, query, readout, ())
    assert edit.commit.tolist() == [[True, True]], "each is the only asked mask of its run"


@pytest.mark.slow
def test_hierarchy_takes_tokens_back_under_a_cache_that_chooses() -> None:
    few = {"name": "d2", "masks": 1, "rollout": 0.0, "gap": 0}
    rule = {"name": "hierarchical", "low": 0.0, "remask": 0.9}
    sampler = toys.sampler("llada", scheduler=rule, cache=few, temperature=3.0, blocks={"name": "fixed", "length": 32})
    assert sampler.generate([[1, 2, 3], [4]], max_new_tokens=32, seed=12).complete.all()


def test_credit_without_weight_is_the_threshold() -> None:
    assert same(run(Credit(0.6, alpha=0.0)), run(DInferThreshold(0.6)))
    assert not same(run(Credit(0.6)), run(DInferThreshold(0.6)))


def test_credit_ends_with_the_block() -> None:
    """The second block is decoded as if it were the first."""
    model = constant([0.4, 0.5, 0.6, 0.4, 0.5, 0.6], [1, 2, 3, 1, 2, 3])
    steps = play(model, Credit(0.75), 6, FixedBlocks(3))
    half = len(steps) // 2
    assert steps[half:] == [[at + 3 for at in step] for step in steps[:half]]


@pytest.mark.slow
@few(("periodic", "plain"), [(PeriodicPrefix, "prefix"), (PeriodicDual, "dual")])
def test_periodic_cache_at_its_ends(periodic: type, plain: str) -> None:
    scheduler = Threshold(2.0)
    assert same(run(scheduler, cache=periodic(every=None)), run(scheduler, cache=plain))
    assert same(run(scheduler, cache=periodic(every=1000)), run(scheduler, cache=plain))
    assert not same(run(scheduler, cache=periodic(every=2)), run(scheduler, cache=plain))
    with refused("option-range: cache.every"):
        periodic(every=0)
