"""Every scheduler says truly whether confidences decide what it commits: EOSER, which scales them, goes by that."""

import pytest

from dllm_sampler.check.promises import CannotTry, check_age, check_asks, check_confidence
from tests import toys
from tests.contract.cases import Settings, label, one_of_each_kind
from tests.refusals import refused

SCORES: list[Settings] = [
    *({"name": "fixed", "score": score} for score in ("confidence", "random")),
    {"name": "certainty", "score": "margin"},
]


@pytest.mark.parametrize("scheduler", [*one_of_each_kind(), *SCORES], ids=label)
def test_a_factor_on_confidences_is_felt_where_it_is_said_to_be(scheduler: Settings) -> None:
    try:
        check_confidence(scheduler)
    except CannotTry as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("scheduler", one_of_each_kind(), ids=label)
def test_whoever_depends_on_the_age_of_a_block_says_so(scheduler: Settings) -> None:
    try:
        check_age(scheduler)
    except CannotTry as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("scheduler", one_of_each_kind(), ids=label)
def test_a_scheduler_asks_about_what_its_traits_say(scheduler: Settings) -> None:
    try:
        check_asks(scheduler)
    except CannotTry as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("inner", ["entropy", "random_order", "leftright", {"name": "fixed", "score": "margin"}])
def test_eoser_around_a_rule_that_does_not_look_at_confidences_is_refused(inner: str | Settings) -> None:
    with refused("scheduler-incompatible: scheduler=eoser"):
        toys.sampler(scheduler={"name": "eoser", "inner": inner})
