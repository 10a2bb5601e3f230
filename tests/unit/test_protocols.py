"""Examples in the docstrings of the contracts."""

from __future__ import annotations

import doctest
import inspect
from typing import Any

import pytest

import dllm_sampler
from dllm_sampler.core import protocols
from dllm_sampler.core.protocols import Blocks, Cache, Denoiser, Guide, Particles, Scheduler, Stop

CONTRACTS = (Scheduler, Blocks, Cache, Denoiser, Guide, Stop, Particles)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda one: one.__name__)
def test_the_example_of_a_contract(contract: type) -> None:
    names: dict[str, Any] = {}
    exec("from dllm_sampler import *", names)  # as the site tells its readers
    found = doctest.DocTestParser().get_doctest(inspect.getdoc(contract) or "", names, contract.__name__, None, None)
    assert found.examples[-1].want
    report: list[str] = []
    failed, tried = doctest.DocTestRunner().run(found, out=report.append)
    assert tried >= 2 and not failed, "".join(report)


def test_every_question_of_a_contract_names_its_arguments() -> None:
    """Each method of a contract says what each argument is. Those with a result have a section for it."""
    seen = 0
    for name, cls in inspect.getmembers(protocols, inspect.isclass):
        if cls not in (*CONTRACTS, protocols.PlugIn):
            continue
        assert cls is protocols.PlugIn or name in dllm_sampler.__all__
        for method, function in vars(cls).items():
            if not inspect.isfunction(function) or (method.startswith("_") and method != "__call__"):
                continue
            if function.__module__ != protocols.__name__:  # of `Protocol` and `dataclass`
                continue
            text = inspect.getdoc(function) or ""
            signature = inspect.signature(function)
            arguments = [one for one in signature.parameters if one != "self"]
            assert not [one for one in arguments if f"\n    {one}: " not in text], f"{name}.{method}"
            assert signature.return_annotation == "None" or "\nReturns:\n" in text, f"{name}.{method}"
            seen += 1
    assert seen >= 35
