"""`Sampler`: what it returns, leaves alone and refuses, settings for one call, and what a notebook shows."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dllm_sampler
from dllm_sampler import NotFiniteError, Sampler
from dllm_sampler import sampler as sampler_module
from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.dual import DualCache
from dllm_sampler.cli.main import main
from dllm_sampler.cli.options import Options
from dllm_sampler.engine.plugins import assemble
from dllm_sampler.errors import UntrainedWarning
from dllm_sampler.guides import Temperature
from dllm_sampler.kernels.backend import FallbackWarning
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.huggingface import MaskedLMDenoiser
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.threshold import Threshold
from dllm_sampler.stops.end_tokens import NoStop
from tests import tiny, toys
from tests.refusals import refused
from tests.sampling import each, few

# `Sampler`: what it returns, what it leaves alone, and what it refuses


TOKENS = 13
PARALLEL = {"name": "threshold", "threshold": 0.7}


@pytest.fixture(scope="module")
def words(checkpoint: Path) -> Sampler:
    return Sampler.from_pretrained(
        str(checkpoint), device="cpu", stop="none", scheduler={"name": "threshold", "threshold": 0.5}
    )


def test_plug_ins_by_name_dict_and_object_are_the_same() -> None:
    given: list[dict[str, Any]] = [
        {"scheduler": PARALLEL, "cache": "dual", "blocks": {"name": "fixed", "length": 6}, "stop": "none"},
        {"scheduler": Threshold(0.7), "cache": DualCache(), "blocks": FixedBlocks(6), "stop": NoStop()},
    ]
    given[0]["guide"] = [{"name": "temperature", "value": 0.8}]
    given[1]["guide"] = [Temperature(0.8)]
    given.append({**given[0], "guide": None, "temperature": 0.8})
    first, *rest = [Sampler(toys.denoiser(), **plugins).generate(toys.PROMPTS, max_new_tokens=9) for plugins in given]
    for other in rest:
        assert torch.equal(first.tokens, other.tokens)
        assert torch.equal(first.nfe, other.nfe)


def test_block_length_is_a_shortcut() -> None:
    long = toys.sampler(scheduler=PARALLEL, blocks="fixed").generate(
        toys.PROMPTS, max_new_tokens=TOKENS, block_length=4
    )
    short = toys.sampler(scheduler=PARALLEL, blocks=FixedBlocks(4)).generate(toys.PROMPTS, max_new_tokens=TOKENS)
    assert torch.equal(long.trace.step_map, short.trace.step_map)


def test_a_result_in_full() -> None:
    sampler = toys.sampler(scheduler=PARALLEL, stop="prefix", tokenizer=None)
    result = sampler.generate(toys.PROMPTS, max_new_tokens=17)
    assert result.tokens.shape == (5, 17) and result.tokens.dtype == torch.int64
    assert result.nfe.dtype == torch.int64
    assert result.texts is None
    torch.testing.assert_close(result.tokens_per_forward, result.lengths / result.nfe)
    ended = (result.tokens == toys.EOS).any(1)
    assert ended.any() and not ended.all()
    for tokens, length, end in zip(result.tokens.tolist(), result.lengths.tolist(), ended.tolist(), strict=True):
        assert length == (tokens.index(toys.EOS) + 1 if end else 17)
    assert result.complete.all()


def test_stream_is_generate() -> None:
    sampler = toys.sampler(scheduler=PARALLEL, stop="prefix", temperature=0.7)
    result = sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=4)
    *steps, last = sampler.stream(toys.PROMPTS, max_new_tokens=TOKENS, seed=4)
    assert [commits.step for commits in (*steps, last)] == list(range(1, int(result.nfe.max()) + 1))
    assert all(commits.result is None for commits in steps)
    assert last.result is not None
    assert torch.equal(last.result.tokens, result.tokens)
    assert torch.equal(last.result.trace.step_map, result.trace.step_map)
    first = steps[0].tokens.clone()
    assert (first == toys.MASK).any(), "a later step wrote into an earlier item"


def test_progress() -> None:
    seen: list[tuple[int, int, int]] = []
    sampler = toys.sampler(scheduler=PARALLEL)
    result = sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, progress=lambda *args: seen.append(args))
    assert [step for step, _, _ in seen] == list(range(1, int(result.nfe.max()) + 1))
    assert [done for _, done, _ in seen] == [int((result.trace.generated < step).sum()) for step, _, _ in seen]
    assert {wanted for _, _, wanted in seen} == {5 * TOKENS}
    plain = sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS)
    assert torch.equal(plain.tokens, result.tokens)


def test_seeds() -> None:
    sampler = toys.sampler(temperature=1.0)

    def tokens(seed: Any, prompts: Any = toys.PROMPTS) -> Tensor:
        return sampler.generate(prompts, max_new_tokens=12, seed=seed).tokens

    assert torch.equal(tokens(3), tokens([3, 4, 5, 6, 7]))
    assert torch.equal(tokens(3), tokens(torch.arange(3, 8))) and torch.equal(tokens(3), tokens(np.int64(3)))
    assert torch.equal(tokens(3), tokens(3))
    assert not torch.equal(tokens(3), tokens(4))
    twins = tokens([1, 1, 2], [toys.PROMPTS[0]] * 3)
    assert torch.equal(twins[0], twins[1]) and not torch.equal(twins[0], twins[2])


class TestTexts:
    def test_strings_in_and_out(self, words: Sampler) -> None:
        result = words.generate(["copy: Ada, Ben", "reverse: Cal"], max_new_tokens=8)
        assert result.texts is not None and words.tokenizer is not None
        for text, tokens, length in zip(result.texts, result.tokens.tolist(), result.lengths.tolist(), strict=True):
            ended = length if 1 not in tokens else tokens.index(1)
            assert text == words.tokenizer.decode(tokens[:ended], skip_special_tokens=True)

    def test_stop_strings(self, words: Sampler) -> None:
        prompts = ["copy: Ada, Ben", "reverse: Cal"]
        full = words.generate(prompts, max_new_tokens=24, block_length=4)
        assert full.texts is not None
        saved = False
        for row, text in enumerate(full.texts):
            pieces = text.split()
            place = next(i for i in range(1, len(pieces)) if pieces[i] not in pieces[:i])
            for given in ([pieces[place]], pieces[place]):
                cut = words.generate(prompts[row], max_new_tokens=24, block_length=4, stop_strings=given)
                assert cut.texts is not None
                assert cut.texts[0].split() == pieces[:place]
                assert cut.complete.all()
                assert int(cut.nfe[0]) <= int(full.nfe[row])
                saved |= int(cut.nfe[0]) < int(full.nfe[row])
        assert saved

    def test_a_stop_string_of_one_row_ends_no_other(self, words: Sampler) -> None:
        prompts = ["copy: Ada, Ben", "reverse: Cal", "Dan"]
        full = words.generate(prompts, max_new_tokens=24, block_length=4)
        assert full.texts is not None
        stop = full.texts[0].split()[4]
        batch = words.generate(prompts, max_new_tokens=24, block_length=4, stop_strings=[stop])
        for row, prompt in enumerate(prompts):
            alone = words.generate(prompt, max_new_tokens=24, block_length=4, stop_strings=[stop])
            assert torch.equal(batch.tokens[row], alone.tokens[0])
            assert batch.nfe[row] == alone.nfe[0]
            assert batch.texts is not None and alone.texts is not None and batch.texts[row] == alone.texts[0]


class TestLiveModule:
    def test_nothing_of_it_changes(self) -> None:
        model = toys.transformer()
        model.train()
        model.layers[0].eval()
        model.embed.weight.requires_grad_(False)
        for parameter in model.layers.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        modes = [module.training for module in model.modules()]
        sampler = Sampler(toys.wrapped(model), cache="prefix", temperature=1.0)
        torch.manual_seed(5)
        state = torch.random.get_rng_state()
        sampler.generate(toys.PROMPTS, max_new_tokens=9)
        assert torch.equal(torch.random.get_rng_state(), state)
        assert torch.is_grad_enabled()
        assert [module.training for module in model.modules()] == modes
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not model.embed.weight.requires_grad
        for parameter in model.layers.parameters():
            assert parameter.requires_grad and parameter.grad is not None and (parameter.grad == 1).all()

    def test_gradients_between_two_steps_of_a_stream(self) -> None:
        """Training may go on while a stream is being read: the loop switches no mode of its caller."""
        model = toys.transformer()
        stream = Sampler(toys.wrapped(model)).stream(toys.PROMPTS[0], max_new_tokens=5)
        tokens = next(stream).tokens
        assert torch.is_grad_enabled()
        model(tokens).sum().backward()
        assert model.embed.weight.grad is not None
        next(stream)
        assert torch.is_grad_enabled()

    def test_it_samples_from_the_weights_of_now(self) -> None:
        model = toys.transformer()
        sampler = Sampler(toys.wrapped(model))
        first = sampler.generate(toys.PROMPTS, max_new_tokens=9)
        with torch.no_grad():
            model.load_state_dict(toys.transformer(seed=1).state_dict())
        second = sampler.generate(toys.PROMPTS, max_new_tokens=9)
        fresh = Sampler(toys.wrapped(toys.transformer(seed=1))).generate(toys.PROMPTS, max_new_tokens=9)
        assert not torch.equal(first.tokens, second.tokens)
        assert torch.equal(second.tokens, fresh.tokens)


@dataclass
class Breaking(toys.Spy):
    """Says a bad number of one row from some forward on."""

    after: int = 3
    row: int = 1
    value: float = math.nan

    def head(self, hidden: Tensor) -> Tensor:
        logits = super().head(hidden)
        if len(self.calls) > self.after:
            logits[self.calls[-1][2].head_rows.row == self.row, 0] = self.value
        return logits


class TestNotFinite:
    @few("value", [math.nan, math.inf])
    @few("cache", ["none", "dual"])
    def test_it_says_when_and_keeps_what_was_done(self, value: float, cache: str) -> None:
        plugins: dict[str, Any] = {"scheduler": "fixed", "stop": "none", "cache": cache}
        full = Sampler(toys.denoiser(), **plugins).generate(toys.PROMPTS, max_new_tokens=9)
        sampler = Sampler(Breaking(toys.denoiser(), value=value), **plugins)
        with pytest.raises(NotFiniteError, match=r"NaN or infinite logits at step 4 for prompt 2") as error:
            sampler.generate(toys.PROMPTS, max_new_tokens=9)
        assert (error.value.step, error.value.rows) == (4, [2])
        done = error.value.result
        assert done is not None
        assert not done.complete[1]
        kept = done.trace.generated[1] >= 0
        assert torch.equal(kept, (full.trace.generated[1] >= 0) & (full.trace.generated[1] < 3))
        assert torch.equal(done.tokens[1][kept], full.tokens[1][kept])

    def test_all_logits_gone(self) -> None:
        model = toys.transformer()
        with torch.no_grad():
            model.norm.weight.fill_(math.nan)
        with pytest.raises(NotFiniteError, match="at step 1 for prompts 1, 2, 3, 4, 5:"):
            Sampler(toys.wrapped(model)).generate(toys.PROMPTS, max_new_tokens=4)


def make(**plugins: Any) -> Sampler:
    return Sampler(toys.denoiser(), **plugins)


@each(
    ("plugins", "message"),
    [
        ({"scheduler": "treshold"}, "choice-unknown: 'treshold', 'threshold'"),
        ({"cache": "duel"}, "choice-unknown: 'duel', 'dual'"),
        ({"blocks": "fix"}, "choice-unknown: 'fix', 'fixed'"),
        ({"stop": "trunkate"}, "choice-unknown: 'trunkate', 'truncate'"),
        ({"guide": "temprature"}, "choice-unknown: 'temprature', 'temperature'"),
        ({"guide": ["top_p", "topk"]}, "choice-unknown: 'topk', 'top_k'"),
        ({"scheduler": {"name": "threshold", "treshold": 0.5}}, "field-unknown: 'treshold', 'threshold'"),
        ({"scheduler": {"threshold": 0.5}}, "option-missing"),
        ({"cache": {"name": "dual", "size": 3}}, "field-unknown: cache=dual, 'size'"),
        ({"scheduler": {"name": "threshold", "threshold": -0.5}}, "option-range: -0.5"),
        ({"scheduler": {"name": "threshold", "threshold": math.nan}}, "option-range: scheduler.threshold"),
        ({"scheduler": {"name": "threshold", "threshold": "high"}}, "option-type: scheduler.threshold='high'"),
        ({"scheduler": {"name": "fixed", "steps": 0}}, "option-range: scheduler.steps"),
        ({"blocks": {"name": "fixed", "length": 0}}, "option-range: blocks.length"),
        ({"blocks": {"name": "fixed", "length": True}}, "option-type: blocks.length=true"),
        ({"scheduler": 3}, "option-type: scheduler"),
        ({"stop": Threshold()}, "option-type: stop"),
        ({"temperature": -1.0}, "option-range: temperature=-1"),
        ({"top_p": 0.9}, "plugins-incompatible: top_p"),
        ({"guide": ["temperature", "top_p", "end_tokens"]}, "plugins-incompatible: end_tokens"),
        ({"top_k": 5, "temperature": 0.0}, "plugins-incompatible: top_k"),
        ({"max_steps": 0}, "option-range: max_steps"),
        ({"max_steps": 2.5}, "option-range: max_steps"),
        ({"backend": "cuda"}, "choice-unknown: 'cuda'"),
        ({"backend": None}, "choice-unknown: backend"),
        ({"cuda_graph": True}, "graph-unsupported: cuda_graph=true"),
    ],
)
def test_bad_settings(plugins: dict[str, Any], message: str) -> None:
    with refused(message) as error:
        make(**plugins)
    assert "\n" not in str(error.value)


@each(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "option-range: max_new_tokens"),
        ({"max_new_tokens": True}, "option-range: max_new_tokens"),
        ({"max_new_tokens": 64}, "context-exceeded"),
        ({"block_length": 0}, "option-range: block_length"),
        ({"block_length": 2.0}, "option-range: block_length"),
        ({"seed": [1, 2]}, "length-mismatch"),
        ({"seed": 1.5}, "option-type: seed"),
        ({"seed": 2**64}, "option-type: seed=18446744073709551616"),
        ({"seed": 2**63 - 1}, "option-type: seed=9223372036854775808"),
        ({"seed": True}, "option-type: seed"),
        ({"seed": "7"}, "option-type: seed"),
        ({"stop_strings": ["x"]}, "tokenizer-missing: stop_strings"),
        ({"stop_strings": [""]}, "option-type: stop_strings"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"max_new_tokens": 4, **options}
    with refused(message):
        make().generate(toys.PROMPTS, **given)


def test_block_length_without_blocks() -> None:
    with refused("options-conflict: block_length, blocks=fixed, blocks=full"):
        make(blocks="full").generate([1], max_new_tokens=4, block_length=2)


def test_blocks_that_a_model_was_not_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such blocks change what tokens see: one warning for each such length, and none for the trained one."""
    sampler = Sampler.from_pretrained(tiny.write("sdar", tmp_path / "model"), device="cpu")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for length in (None, 4, 8, 8, 2):
            sampler.generate([1, 2], max_new_tokens=8, block_length=length, temperature=1.0)
        assert len(list(sampler.generate_many([[1, 2]], max_new_tokens=8, block_length=8))) == 1
        sampler.generate([1, 2], max_new_tokens=8, blocks={"name": "fixed", "length": 16})
    sentences = [str(one.message) for one in told if issubclass(one.category, UntrainedWarning)]
    starts = [f"block_length={length} (blocks.length) changes what each token sees" for length in (8, 2, 16)]
    assert [one.split(",")[0] for one in sentences] == starts
    words = [f"model={tmp_path / 'model'}", "device=cpu", "block_length=8", "max_new_tokens=8", "hi", "ho"]
    assert main(words) == 0
    assert capsys.readouterr().err.count("this model was trained on blocks of 4") == 1


def test_a_cache_needs_a_model_that_can_be_cached() -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    denoiser = MaskedLMDenoiser(BertForMaskedLM(config).eval(), mask_id=3, eos_id=1, pad_id=0)
    with refused("cache-incompatible: cache=dual, cache=none"):
        Sampler(denoiser, cache="dual")
    assert Sampler(denoiser).generate([5, 6], max_new_tokens=3).complete.all()


@each("token", [-1, toys.VOCAB])
def test_special_tokens_lie_inside_the_vocabulary(token: int) -> None:
    with refused(f"token-outside-vocabulary: mask_id, {token}, 39"):
        TransformerDenoiser(toys.transformer(), mask_id=token, eos_id=1)


def test_the_plug_ins_of_a_call_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar may take long to build. Objects are never compared, and the settings of many calls are not all kept."""
    built = list[object]()
    monkeypatch.setattr(sampler_module, "assemble", lambda *given: built.append(given) or assemble(*given))
    sampler = toys.sampler()
    built.clear()

    def tokens(**options: Any) -> Tensor:
        return sampler.generate(toys.PROMPTS[0], max_new_tokens=6, **options).tokens

    first = tokens(temperature=1.0)
    assert torch.equal(tokens(temperature=1.0), first) and len(built) == 1
    tokens(temperature=1)  # another number for JSON, and the same for the guide
    tokens(scheduler={"name": "fixed", "steps": 3})
    tokens(scheduler={"steps": 3, "name": "fixed"})
    assert len(built) == 3
    for _ in range(2):
        tokens(scheduler=Threshold(0.6))
    assert len(built) == 5
    for top_k in range(1, sampler_module.CALLS + 1):
        tokens(temperature=1.0, top_k=top_k)
    tokens(temperature=1.0)
    assert len(built) == 5 + sampler_module.CALLS + 1


# What a user sees of samplers and results in Python: settings for one call, `repr`, `dir`, hints


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
    assert all(getattr(dllm_sampler, name) is not None for name in dllm_sampler.__all__)


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
