"""What a user sees of samplers and results in Python: settings for one call, `repr`, `dir`, hints."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import dllm_sampler
from dllm_sampler import Sampler
from dllm_sampler.cli.options import Options
from dllm_sampler.kernels.backend import FallbackWarning
from dllm_sampler.schedulers.fixed import FixedSteps
from tests import toys
from tests.refusals import refused
from tests.sampling import few

PROMPTS = [[5, 11, 3], [7, 2]]


@few(
    "change",
    [
        {"temperature": 0.8}, {"temperature": 1.0, "top_k": 3}, {"temperature": 1.0, "top_p": 0.9}, {"stop": "none"},
        {"scheduler": {"name": "fixed", "steps": 3}}, {"cache": "dual", "blocks": {"name": "fixed", "length": 4}},
        {"max_steps": 2}, {"entropy": True},
    ],
)  # fmt: skip
def test_settings_for_one_call(change: dict[str, Any]) -> None:
    """As of a sampler that has them, in each way to generate; the sampler keeps its own."""
    sampler = toys.sampler(scheduler="klass")
    other = toys.sampler(**{"scheduler": "klass", **change})
    before = sampler.generate(PROMPTS, max_new_tokens=8)
    wanted = other.generate(PROMPTS, max_new_tokens=8)
    found = sampler.generate(PROMPTS, max_new_tokens=8, **change)
    *_, last = sampler.stream(PROMPTS, max_new_tokens=8, **change)
    many = list(sampler.generate_many(PROMPTS, max_new_tokens=8, order="given", **change))
    assert last.result is not None
    for one in (found, last.result):
        assert torch.equal(one.tokens, wanted.tokens) and torch.equal(one.nfe, wanted.nfe)
        assert (one.trace.entropy is None) == (wanted.trace.entropy is None)
    assert torch.equal(torch.stack([one.tokens for one in many]), wanted.tokens)
    assert torch.equal(sampler.generate(PROMPTS, max_new_tokens=8).tokens, before.tokens)


def test_a_wrong_setting_for_one_call() -> None:
    with pytest.raises(TypeError, match="temperatur"):
        toys.sampler().generate(PROMPTS, temperatur=1)  # pyright: ignore[reportCallIssue]
    with refused("choice-unknown: 'threshold'"):
        toys.sampler().generate(PROMPTS, scheduler="threshhold")


def test_what_is_shown() -> None:
    rule = {"name": "threshold", "threshold": 0.7}
    sampler = Sampler.from_pretrained("mini", device="cpu", scheduler=rule, temperature=0.1, top_k=3)
    scheduler, cache = "scheduler=threshold(threshold=0.7)", "stop=prefix, cache=none"
    assert repr(sampler).startswith(f"Sampler(mini, float32 on cpu, {scheduler}, blocks=fixed")
    assert cache in repr(sampler) and repr(sampler).endswith("guide=[temperature(value=0.1), top_k(k=3)])")
    result = sampler.generate(["copy: Ada"] * 9, max_new_tokens=8)
    head, first, *_, last = repr(result).splitlines()
    assert head == f"Result(9 answers, {result.tokens_per_forward.mean():.2f} tokens per forward)"
    assert first == "  0: 'Ada'  2 tokens, 1 forward, end" and last == "  ... 1 more"
    (answer,) = sampler.generate_many(["copy: Ada"], max_new_tokens=8)
    assert repr(answer) == "Answer(0, 'Ada', 2 tokens, 1 forward, end)"
    *_, step = sampler.stream(["copy: Ada"], max_new_tokens=8)
    assert repr(step) == f"Commits(step {step.step}, 0 masks left in 1 row)"
    assert "<p>" in result._repr_html_()


def test_a_module_is_not_a_name() -> None:
    with refused("model-invalid"):
        Sampler.from_pretrained(toys.transformer())  # pyright: ignore[reportArgumentType]


def test_names_that_can_be_imported() -> None:
    assert {*dllm_sampler.__all__} <= {*dir(dllm_sampler)}


def test_samples_that_are_the_same() -> None:
    """A warning where nothing is drawn, and none where the order is, or tokens are."""
    with pytest.warns(FallbackWarning, match=r"samples=3: the answers to each prompt are the same.*temperature=1"):
        toys.sampler().generate(PROMPTS, max_new_tokens=8, samples=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        toys.sampler(temperature=1.0).generate(PROMPTS, max_new_tokens=8, samples=3)
        toys.sampler(scheduler="random_order").generate(PROMPTS, max_new_tokens=8, samples=3)


def test_one_default_length() -> None:
    """On the command line as in Python."""
    for call in (Sampler.generate, Sampler.stream, Sampler.generate_many):
        assert (call.__kwdefaults__ or {})["max_new_tokens"] == Options().max_new_tokens == 128


def test_a_tell_without_a_carry() -> None:
    class Forgets(FixedSteps):
        def tell(self, canvas: Any, query: Any, readout: Any, carry: Any) -> Any:
            return super().tell(canvas, query, readout, carry)[0]

    with refused("plugin-result: scheduler=Forgets"):
        toys.sampler(scheduler=Forgets()).generate(PROMPTS, max_new_tokens=4)
