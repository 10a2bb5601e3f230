"""What answers that change in length do not go with is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from dllm_sampler import Sampler, UserError
from dllm_sampler.core.values import FREE
from dllm_sampler.inputs.prompts import Infill
from dllm_sampler.training.trajectory import Trajectories, check
from tests import toys
from tests.contract.cases import settings
from tests.refusals import refused


@pytest.mark.parametrize(
    ("plugins", "reason"),
    [
        ({"stop": "truncate"}, "plugins-incompatible: scheduler=daedal, stop=truncate, stop=prefix"),
        ({"stop": "prophet"}, "plugins-incompatible: stop=prophet"),
        ({"blocks": "adablock"}, "plugins-incompatible: scheduler=daedal, blocks=adablock"),
        ({"cache": "dual"}, "cache-incompatible: scheduler=daedal, cache=dual, cache=prefix"),
        ({"cache": "dkv"}, "cache-incompatible: cache=dkv"),
        ({"guide": {"name": "regex", "pattern": "[a-j]+"}}, "plugins-incompatible: guide=regex"),
        ({"guide": {"name": "grammar", "grammar": "json"}}, "plugins-incompatible: guide=grammar"),
        ({"kind": "causal"}, "plugins-incompatible: scheduler=daedal"),
        ({"scheduler": {"name": "daedal", "inner": "rho_eos"}}, "scheduler-incompatible: rho_eos"),
        ({"scheduler": {"name": "eoser", "inner": "daedal"}}, "scheduler-incompatible: scheduler=eoser"),
        ({"scheduler": {"name": "freedave", "inner": "rho_eos"}}, "scheduler-incompatible: rho_eos"),
        ({"scheduler": {"name": "rho_eos", "low": 0.7, "high": 0.6}}, "option-range: low=0.7, scheduler.high=0.6"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(plugins: dict[str, Any], reason: str) -> None:
    with refused(reason):
        toys.sampler(**{"scheduler": "daedal", **plugins})


def test_every_cache_serves_them_or_says_why_not() -> None:
    served = set()
    for cache in settings("cache"):
        try:
            toys.sampler(scheduler="rho_eos", cache=cache)
        except UserError as error:
            if f"cache={cache['name']}" not in str(error):
                raise
        else:
            served.add(cache["name"])
    assert served == {"none", "exact", "prefix", "periodic_prefix"}


def test_tokens_behind_a_gap_are_refused_and_training_too() -> None:
    sampler: Sampler = toys.sampler(scheduler="daedal")
    with refused("given-unsupported: prompt 1, scheduler=daedal"):
        sampler.generate(toys.PROMPTS[0], max_new_tokens=8, suffix=[3])
    with refused("given-unsupported: prompt 1"):
        list(sampler.generate_many([Infill([FREE, 3, FREE], [5])], max_new_tokens=3))
    with refused("trajectories-unsupported: scheduler=daedal"):
        check(sampler)
    with refused("trace-not-scorable"):
        Trajectories(sampler.generate(toys.PROMPTS, max_new_tokens=8).trace, sampler.denoiser.spec)
