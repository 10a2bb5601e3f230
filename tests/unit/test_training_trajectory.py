"""The probability of a recorded trajectory, computed again: the same value, with a gradient."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from dllm_sampler import Sampler, Trace
from dllm_sampler.errors import RandomScoreWarning
from dllm_sampler.models.huggingface import MaskedLM, MaskedLMDenoiser
from dllm_sampler.training.trajectory import Trajectories, check
from tests import toys
from tests.refusals import refused
from tests.sampling import sampled

TOKENS = 13
KINDS = ("llada", "gqa", "dream", "causal", "fast")


def network(kind: str) -> nn.Module:
    denoiser: Any = toys.denoiser(kind)
    return denoiser.transformer


def parameter(model: nn.Module, name: str) -> nn.Parameter:
    return dict(model.named_parameters())[name]


def rollout(kind: str = "llada", **plugins: Any) -> Trace:
    plugins = {"scheduler": {"name": "threshold", "threshold": 0.6}, "temperature": 1.0, **plugins}
    return toys.sampler(kind, **plugins).generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS).trace


@pytest.mark.parametrize("stop", sampled(["prefix", "truncate"]))
@pytest.mark.parametrize("kind", sampled([*KINDS, "context"], lambda kind: [kind == "causal"]))
def test_the_same_weights_give_what_was_recorded(kind: str, stop: str) -> None:
    """For every token that counts, whatever is packed into a forward; and side by side, where attention allows it."""
    trace, spec = rollout(kind, stop=stop), toys.denoiser(kind).spec
    found = Trajectories(trace, spec, after_eos=True, blocks=6)
    assert torch.equal(found.valid, (trace.step_map >= 0) & (trace.gone < 0))
    for budget in (1, 100, 10**6):
        again = found.log_probabilities(network(kind), budget)
        torch.testing.assert_close(again, torch.where(found.valid, trace.logprob, 0), atol=1e-13, rtol=0)


def masked_lm(dropout: float = 0.0) -> Any:
    """A BERT in float64, whose context and answers vary."""
    config = BertConfig(
        vocab_size=toys.VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=64, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = BertForMaskedLM(config).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(10) if weight.dim() > 1 else None
    return model


def test_models_of_transformers_are_scored_as_they_are() -> None:
    """A module, what wraps it, and its denoiser have the recorded values, and gradients. The mask token is left out."""
    model = masked_lm()
    denoiser = MaskedLMDenoiser(model, toys.MASK, toys.EOS, toys.EOS)
    trace = Sampler(denoiser, temperature=1.0).generate(toys.PROMPTS, max_new_tokens=TOKENS).trace
    found = Trajectories(trace, denoiser.spec, after_eos=True)
    right = torch.where(found.valid, trace.logprob, 0)
    for one in (model, nn.DataParallel(model), MaskedLM(model), denoiser):
        torch.testing.assert_close(found.log_probabilities(one), right, atol=1e-12, rtol=0)
    chunk = next(found.chunks(10**6))
    chunk.score(model)[0].sum().backward()
    assert parameter(model, "bert.embeddings.word_embeddings.weight").grad is not None
    row, column = map(int, found.valid.nonzero()[0])
    state = trace.state(int(trace.step_map[row, column]))[row, trace.begin[row] : trace.end[row]]
    logits = model(state[None]).logits[0, column - trace.begin[row]]
    logits[toys.MASK] = -torch.inf
    expected = logits.log_softmax(-1)[trace.ids[row, column]]
    torch.testing.assert_close(trace.logprob[row, column], expected, atol=1e-12, rtol=0)


def test_functions_are_scored_as_they_are() -> None:
    model: Any = network("llada")
    sampler = Sampler.from_callable(
        lambda ids, mask: model(ids, keys=mask),
        vocab_size=toys.VOCAB, mask_id=toys.MASK, eos_id=toys.EOS, dtype="float64", temperature=1.0,
    )  # fmt: skip
    trace = sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS).trace
    found = Trajectories(trace, sampler.denoiser.spec, after_eos=True)
    for one in (sampler.denoiser, model, toys.denoiser("llada")):
        again = found.log_probabilities(one)
        torch.testing.assert_close(again, torch.where(found.valid, trace.logprob, 0), atol=1e-12, rtol=0)
    with refused("model-not-scorable"):
        found.log_probabilities(toys.denoiser("cfg"))


def test_scores_of_dropout_warn() -> None:
    """Once for each line of code that asks for them."""
    found = Trajectories(rollout(), toys.denoiser().spec)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for dropout in (0.0, 0.1):
            model = masked_lm(dropout)
            found.log_probabilities(model)
            model.train()
            for _ in range(2):
                found.log_probabilities(model)
    (one,) = told
    assert one.category is RandomScoreWarning and "in train mode with dropout (model.bert." in str(one.message)


@pytest.mark.parametrize("kind", sampled(["llada", "dream", "causal"]))
def test_what_sees_the_same_is_computed_once(kind: str) -> None:
    """Four samples of a prompt begin with one state: their values are those of each row alone."""
    sampler, prompts = toys.sampler(kind, scheduler="fixed", temperature=1.0), toys.PROMPTS[:2]
    trace = sampler.generate(prompts, samples=4, max_new_tokens=TOKENS).trace
    found = Trajectories(trace, toys.denoiser(kind).spec, after_eos=True)
    one = found.chunk(found.items())
    states = {(int(row) // 4, *trace.state(int(step))[row].tolist()) for row, step in found.items().tolist()}
    assert len(one.ids) == len(states) < len(found.items()) - 3 * len(prompts) + 1
    alone = [found.chunk(item[None]) for item in found.items()]
    assert all(len(each.ids) == 1 for each in alone)
    values = one.score(network(kind))[0]
    for number, each in enumerate(alone):
        width = each.there.shape[1]
        torch.testing.assert_close(values[number, :width], each.score(network(kind))[0][0], atol=1e-12, rtol=0)
    torch.testing.assert_close(
        found.log_probabilities(network(kind)), torch.where(found.valid, trace.logprob, 0), atol=1e-12, rtol=0
    )


def test_weights_by_hand() -> None:
    """Mean over the tokens of a transition, then over the transitions of a row; nothing behind the first end token."""
    end, spec = toys.EOS, toys.denoiser().spec
    trace = replace(
        rollout().row(0),
        ids=torch.tensor([[5, 1, 2, 3, end, 4, end]]),
        step_map=torch.tensor([[-1, 0, 2, 2, 2, 1, 0]]),
        gone=torch.full((1, 7), -1),
        begin=torch.tensor([0]),
        origin=1,
    )
    some = Trajectories(trace, spec)
    third = 1 / 6
    assert some.weight.tolist()[0] == pytest.approx([0, 1 / 2, third, third, third, 0, 0])
    assert some.items().tolist() == [[0, 0], [0, 2]], "step 1 has nothing that counts"
    whole = Trajectories(trace, spec, after_eos=True)
    ninth = 1 / 9
    assert whole.weight.tolist()[0] == pytest.approx([0, third, ninth, ninth, ninth, 1 / 3, third])
    assert Trajectories(trace, spec, single=True).weight.tolist()[0] == pytest.approx([0, *[1 / 4] * 4, 0, 0])


@pytest.mark.parametrize(
    ("plugins", "message"),
    [
        ({"scheduler": "remdm"}, "trajectories-unsupported"),
        ({"scheduler": "freedave"}, "trajectories-unsupported"),
        ({"scheduler": "wino"}, "trajectories-unsupported"),
        ({"scheduler": "remix"}, "trajectories-unsupported: inputs of its own"),
        ({"scheduler": "slowfast"}, "trajectories-unsupported"),
        ({"scheduler": {"name": "eoser", "inner": "slowfast"}}, "trajectories-unsupported"),
        ({"scheduler": {"name": "leftright", "max_lookahead": 4}}, "trajectories-unsupported"),
        ({"blocks": {"name": "pipeline"}}, "trajectories-unsupported: blocks=pipeline"),
        ({"stop": "fill"}, "trajectories-unsupported: stop=fill"),
        ({"guide": {"name": "end_tokens"}}, "trajectories-unsupported"),
        ({"compat": True}, "trajectories-unsupported"),
    ],
)
def test_samplers_that_are_refused(plugins: dict[str, Any], message: str) -> None:
    with refused(message):
        check(toys.sampler(**plugins))
    check(toys.sampler(scheduler="eoser", temperature=1.0))


def test_a_revised_trace_is_refused() -> None:
    with refused("trace-not-scorable"):
        Trajectories(rollout(scheduler={"name": "remdm"}), toys.denoiser().spec)
