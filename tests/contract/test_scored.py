"""What training scores again is what was recorded, for every scheduler that `check` accepts."""

import pytest
import torch

from dllm_sampler import UserError
from dllm_sampler.check.settings import Settings
from dllm_sampler.training.trajectory import Trajectories, check
from tests import toys
from tests.contract.cases import TOKENS, one_of_each_kind, toy_for


@pytest.mark.parametrize("scheduler", one_of_each_kind())
def test_recorded_log_probabilities_are_the_models(scheduler: Settings) -> None:
    kind = toy_for(scheduler)
    sampler = toys.sampler(kind, scheduler=scheduler, temperature=1.0, cache="exact")
    try:
        check(sampler)
    except UserError:  # test_training_trajectory says which ones
        return
    model = getattr(sampler.denoiser, "transformer")  # noqa: B009 - not every denoiser has one
    trace = sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=1).trace
    found = Trajectories(trace, sampler.denoiser.spec)
    again = found.log_probabilities(model)
    torch.testing.assert_close(again, torch.where(found.valid, trace.logprob, 0), atol=1e-9, rtol=0)
