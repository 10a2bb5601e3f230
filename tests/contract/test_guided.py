"""A temperature, top-k and top-p do under every scheduler what they say, whatever guides it brings itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler import config
from dllm_sampler.check.settings import Settings, settings
from dllm_sampler.core.protocols import Tempered
from dllm_sampler.guides import Temperature
from tests import toys
from tests.contract.cases import kinds, label, toy_for
from tests.refusals import refused
from tests.sampling import sampled

# Traits that bear on the tokens that are chosen.
CHOOSING = {"asks", "drafts", "draws_order", "own_tokens", "ranks_by_confidence", "revises", "scheduled", "scope"}


def brings(scheduler: Settings) -> list[tuple[str, object]]:
    """Return what a scheduler declares of the tokens it chooses, and if it brings a guide that draws."""
    rule = config.build("scheduler", scheduler)
    own = [] if scheduler["name"] == "apd" or not isinstance(rule, Tempered) else rule.guides(())
    told = [kind for kind in kinds(scheduler) if kind[0].removeprefix("traits.") in CHOOSING]
    return [("draws", any(guide.draws for guide in own)), *told]


# `match=subset` accepts other drafts where tokens are drawn.
SCHEDULERS = [one for one in settings("scheduler") if one.get("match") != "subset"]


def answers(scheduler: Settings, **options: Any) -> Tensor:
    sampler = toys.sampler(toy_for(scheduler), scheduler=scheduler, **options)
    return sampler.generate(toys.PROMPTS, max_new_tokens=5, seed=toys.SEEDS).tokens


@pytest.mark.parametrize("scheduler", sampled(SCHEDULERS, brings, label))
def test_they_act_under_every_scheduler(scheduler: Settings) -> None:
    greedy, hot = answers(scheduler, temperature=0), answers(scheduler, temperature=3.0)
    assert torch.equal(answers(scheduler, temperature=1e-6), greedy), "a temperature of 0 is the limit of small ones"
    assert torch.equal(answers(scheduler, temperature=3.0, top_k=1), greedy)
    assert torch.equal(answers(scheduler, temperature=3.0, top_p=1e-9), greedy)
    assert not torch.equal(hot, greedy)
    assert not torch.equal(answers(scheduler, temperature=3.0, top_k=2), hot)


def test_a_temperature_of_zero_is_greedy_beside_any_other() -> None:
    zero, one = Temperature(0.0), Temperature(1.0)
    greedy = answers({"name": "threshold"})
    for guides in ([zero, one], [one, zero]):
        assert torch.equal(answers({"name": "threshold"}, guide=guides), greedy)
    with refused("plugins-incompatible: top_k"):
        toys.sampler(scheduler="entropy_renoise", temperature=0, top_k=2)
