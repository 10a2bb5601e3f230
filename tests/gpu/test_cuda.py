"""What needs a CUDA device: the same answers as on the CPU, and no synchronisation inside a step."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from dllm_sampler import Result
from tests import toys
from tests.contract.cases import CASES, SILENT, TOKENS, Case, thinned


def generate(case: Case, device: str) -> Result:
    """The case's answers; an autoregressive verifier comes along to the device."""

    def there(value: Any) -> Any:
        return deepcopy(value).to(device) if isinstance(value, torch.nn.Module) else value

    plugins = {group: {key: there(value) for key, value in chosen.items()} for group, chosen in case.plugins.items()}
    sampler = toys.sampler(case.toy, device, **plugins)
    return sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS)


@pytest.mark.parametrize("case", thinned(CASES))
def test_cuda_answers_as_the_cpu_does(case: Case) -> None:
    here, there = generate(case, "cpu"), generate(case, "cuda")
    assert torch.equal(here.tokens, there.tokens)
    assert torch.equal(here.nfe, there.nfe)
    assert torch.equal(here.trace.step_map, there.trace.step_map)


@pytest.mark.usefixtures("_strict")
@pytest.mark.parametrize("case", thinned(SILENT))
def test_a_step_never_synchronises(case: Case) -> None:
    generate(case, "cuda")
