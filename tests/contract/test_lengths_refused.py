"""What answers that change in length do not go with is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from dllm_sampler import Sampler, UserError
from dllm_sampler.core.values import FREE
from dllm_sampler.inputs.prompts import Infill
from dllm_sampler.training.trajectory import check, trajectories
from tests import toys
from tests.contract.cases import settings


@pytest.mark.parametrize(
    ("plugins", "reason"),
    [
        ({"stop": "truncate"}, r"scheduler=daedal says how long the answer is, and stop=truncate .* use stop=prefix"),
        ({"stop": "prophet"}, r"and stop=prophet changes the canvas under it"),
        ({"blocks": "adablock"}, r"scheduler=daedal moves the end of a block, and blocks=adablock says where it is"),
        ({"cache": "dual"}, r"scheduler=daedal moves columns and adds new ones, and cache=dual .* use cache=prefix"),
        ({"cache": "dkv"}, r"cache=dkv serves columns as an earlier forward left them"),
        ({"guide": {"name": "regex", "pattern": "[a-j]+"}}, r"changes the length .* which guide=regex must know"),
        ({"guide": {"name": "grammar", "grammar": "json"}}, r"changes the length .* which guide=grammar must know"),
        ({"kind": "causal"}, r"looks for the end of the answer behind the block, which this model does not see"),
        ({"scheduler": {"name": "daedal", "inner": "rho_eos"}}, r"and rho_eos changes it too: use another"),
        ({"scheduler": {"name": "eoser", "inner": "daedal"}}, r"scheduler=eoser lowers the confidence of end tokens"),
        ({"scheduler": {"name": "freedave", "inner": "rho_eos"}}, r"rho_eos"),
        ({"scheduler": {"name": "rho_eos", "low": 0.7, "high": 0.6}}, r"low=0.7 must not be above scheduler.high=0.6"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(plugins: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
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
    with pytest.raises(UserError, match=r"prompt 1 has given tokens behind a gap, .* scheduler=daedal would move"):
        sampler.generate(toys.PROMPTS[0], max_new_tokens=8, suffix=[3])
    with pytest.raises(UserError, match=r"prompt 1 has given tokens behind a gap"):
        list(sampler.generate_many([Infill([FREE, 3, FREE], [5])], max_new_tokens=3))
    with pytest.raises(UserError, match="scheduler=daedal changes the length of answers"):
        check(sampler)
    with pytest.raises(UserError, match="changed in length"):
        trajectories(sampler.generate(toys.PROMPTS, max_new_tokens=8).trace, sampler.denoiser.spec)
