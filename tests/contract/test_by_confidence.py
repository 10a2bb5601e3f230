"""Every scheduler says truly whether confidences decide what it commits: EOSER, which scales them, goes by that."""

from dataclasses import dataclass, replace

import pytest
import torch

from dllm_sampler import Canvas, Query, UserError, config
from dllm_sampler.core.around import Around
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Edit, Readout
from tests import toys
from tests.contract.cases import Settings, label, one_of_each_kind

SCORES: list[Settings] = [
    *({"name": "fixed", "score": score} for score in ("confidence", "random")),
    {"name": "certainty", "score": "margin"},
]


@dataclass(frozen=True)
class Scrambled(Around):
    """Hands on confidences times a random number each."""

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        factor = canvas.noise.uniform(replace(canvas, step=canvas.step + 99), query.positions)[:, None]
        return self.inner.tell(canvas, query, replace(readout, confidence=readout.confidence * factor), carry)


@pytest.mark.parametrize("scheduler", [*one_of_each_kind(), *SCORES], ids=label)
def test_a_factor_on_confidences_is_felt_where_it_is_said_to_be(scheduler: Settings) -> None:
    try:
        alone = toys.sampler(scheduler=scheduler, temperature=1.0)
        inner = config.build("scheduler", scheduler)
        if inner.traits.drafts:
            pytest.skip("goes by what the scheduler inside says")
        other = toys.sampler(scheduler=Scrambled(inner), temperature=1.0)
    except UserError as error:
        pytest.skip(str(error))
    first, second = (one.generate(toys.PROMPTS, max_new_tokens=18, seed=3) for one in (alone, other))
    same = torch.equal(first.trace.generated, second.trace.generated) and torch.equal(first.tokens, second.tokens)
    assert same != alone.plugins.scheduler.traits.ranks_by_confidence


@pytest.mark.parametrize("inner", ["entropy", "random_order", "leftright", {"name": "fixed", "score": "margin"}])
def test_eoser_around_a_rule_that_does_not_look_at_confidences_is_refused(inner: str | Settings) -> None:
    with pytest.raises(UserError, match="does not look at them"):
        toys.sampler(scheduler={"name": "eoser", "inner": inner})
