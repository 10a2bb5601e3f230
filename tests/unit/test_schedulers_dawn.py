"""DAWN's rule, and the attention that it looks at."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler import Canvas, Denoiser, Query, Sampler
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Edit, Readout
from dllm_sampler.integrations.block import unsupported_trait
from dllm_sampler.kernels import linear, norm, reference, rope, swiglu
from dllm_sampler.kernels.backend import LayerKernels
from dllm_sampler.models import attention_means
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.fused import Fused
from dllm_sampler.models.loading import load
from dllm_sampler.schedulers.dawn import Dawn
from dllm_sampler.schedulers.threshold import Threshold
from tests import toys
from tests.refusals import refused
from tests.sampling import each

DATA = Path(__file__).parents[1] / "conformance" / "data"
TOKENS = 11


@dataclass(frozen=True)
class Looks(Threshold):
    """A threshold that has attention measured, which it does not use, but keeps."""

    readouts: list[Any] = field(default_factory=list, kw_only=True, repr=False)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"attention"})

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        self.readouts.append((canvas, query, readout))
        return super().tell(canvas, query, readout, carry)


def plain(model: TransformerDenoiser, ids: Tensor, layers: int) -> Tensor:
    """`[L, L]` attention of a row, as a mean over heads and the last `layers`, from the network's own parts."""
    net, found = model.transformer, []
    with torch.no_grad():
        hidden = net.embed(ids[None])
        angles = net.rope(torch.arange(len(ids))[None], hidden.dtype)
        for layer in net.layers:
            q, k, v = layer.qkv(hidden, angles)  # pyright: ignore
            groups = q.shape[1] // k.shape[1]
            scores = q @ k.repeat_interleave(groups, 1).mT / q.shape[-1] ** 0.5
            found.append(scores.softmax(-1)[0].mean(0))
            hidden = hidden + layer.attend(q, k, v)  # pyright: ignore
            hidden = hidden + layer.mlp(hidden)  # pyright: ignore
    return torch.stack(found[-layers:]).mean(0)


def seen(model: Denoiser, **plugins: Any) -> list[tuple[Canvas, Query, Readout]]:
    rule = Looks(0.7)
    plugins = {"scheduler": rule, "blocks": {"name": "fixed", "length": 6}, "stop": "none", **plugins}
    Sampler(model, **plugins).generate(toys.PROMPTS, max_new_tokens=TOKENS)
    return rule.readouts


@each("kind", ["llada", "gqa", "dream"])
@each("room", [attention_means.ROOM, 100])
def test_attention_is_that_of_the_rows(kind: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ragged rows, in one piece and in many. Positions are columns, under a logit shift too."""
    monkeypatch.setattr(attention_means, "ROOM", room)
    model = toys.denoiser(kind)
    assert isinstance(model, TransformerDenoiser)
    for canvas, query, readout in seen(model)[:3]:
        assert readout.attention is not None and readout.attended is not None
        for row in range(len(toys.PROMPTS)):
            length = int(canvas.end[row])
            wanted = plain(model, canvas.ids[row, :length], 4)
            at = query.positions[row][query.positions[row] < canvas.length]
            torch.testing.assert_close(readout.attention[row, 0, : len(at), :length], wanted[at])
            assert not readout.attention[row, 0, : len(at), length:].any(), "what does not exist is not looked at"
            torch.testing.assert_close(readout.attended[row, 0, :length], wanted.mean(0))
            assert float(readout.attended[row, 0].sum()) == pytest.approx(1)


def test_rows_look_at_what_the_model_lets_them_see() -> None:
    for canvas, query, readout in seen(toys.denoiser("causal"), cache="none")[:3]:
        assert readout.attention is not None
        end = (query.positions // 6 + 1) * 6
        beyond = canvas.columns()[:, None] >= torch.minimum(end, canvas.end[:, None])[..., None]
        there = (query.positions < canvas.length)[..., None]
        assert not (readout.attention[:, 0] * (beyond & there)).any()


@each("kind", ["llada", "gqa", "dream", "cfg", "causal", "fast", "context"])
def test_answers_are_the_same_with_and_without(kind: str) -> None:
    plugins = {"blocks": {"name": "fixed", "length": 6}, "cache": "none", "temperature": 0.8}
    with_, without = (
        toys.sampler(kind, scheduler=rule, **plugins).generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS)
        for rule in (Looks(0.7), Threshold(0.7))
    )
    for name in ("ids", "step_map", "logprob", "nfe", "rows"):
        assert torch.equal(getattr(with_.trace, name), getattr(without.trace, name)), name


KERNELS = LayerKernels(
    reference.attention, linear.linear_reference, norm.norm_reference, rope.qkv_rope_reference, swiglu.swiglu_reference
)


def test_it_is_made_beside_fused_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their stream lacks a part until the next norm adds it."""
    model = toys.wrapped(toys.transformer(kv_heads=2, dtype=torch.float32, layers=3))
    fused, ran = replace(model, kernels=KERNELS), []
    inner = Fused._attend
    monkeypatch.setattr(Fused, "_attend", lambda self, *given: ran.append(1) or inner(self, *given))
    for rule in (Looks(0.7), Threshold(0.7)):
        found = [
            Sampler(one, scheduler=rule, stop="none", blocks="full").generate(toys.PROMPTS, max_new_tokens=TOKENS)
            for one in (model, fused)
        ]
        assert torch.equal(found[0].tokens, found[1].tokens)
    assert ran
    for (_, _, one), (_, _, two) in zip(seen(model), seen(fused), strict=True):
        assert one.attention is not None and two.attention is not None
        assert one.attended is not None and two.attended is not None
        torch.testing.assert_close(one.attended, two.attended, atol=1e-5, rtol=1e-4)


def test_the_recorded_attention() -> None:
    for line in map(json.loads, (DATA / "traces" / "dawn.jsonl").read_text().splitlines()):
        model, rule = load(DATA / line["model"], device="cpu", dtype="float32").denoiser, Looks(0.7)
        length = line["params"].get("gen_length") or line["params"]["max_new_tokens"]
        model = replace(model, mask_id=line["params"]["mask_id"])  # pyright: ignore
        Sampler(model, scheduler=rule, blocks="full", stop="none", max_steps=1).generate(
            [line["prompt_ids"]], max_new_tokens=length
        )
        _, query, readout = rule.readouts[0]
        assert readout.attention is not None and readout.attended is not None
        means = torch.tensor(line["attention"]["first_forward_column_mean"])
        torch.testing.assert_close(readout.attended[0, 0, :-1].float(), means, atol=2e-5, rtol=0)
        place = {int(column): number for number, column in enumerate(query.positions[0])}
        for row, column, value in line["attention"]["rows"]:
            if row in place:
                assert float(readout.attention[0, 0, place[row], column]) == pytest.approx(value, abs=2e-5)


def same(*rules: dict[str, Any], **plugins: Any) -> bool:
    found = [toys.sampler(scheduler=rule, **plugins).generate(toys.PROMPTS, max_new_tokens=14) for rule in rules]
    one, two = (result.trace for result in found)
    return torch.equal(one.ids, two.ids) and torch.equal(one.step_map, two.step_map)


DAWN = {"name": "dawn", "threshold": 0.6, "low": 0.3, "induce": 0.2, "edge": 0.1, "sink": 0.3}


def test_without_edges_it_is_a_threshold() -> None:
    low = {"name": "threshold", "threshold": 0.3}
    assert same(DAWN | {"edge": 1.1}, low)
    assert same(DAWN | {"sink": 0.0}, low), "every column is a sink"
    assert not same(DAWN, low)


def test_without_help_it_is_a_threshold() -> None:
    assert same(DAWN | {"low": 1.1, "induce": 1.1}, {"name": "threshold", "threshold": 0.6})
    assert not same(DAWN | {"low": 1.1}, {"name": "threshold", "threshold": 0.6})


@each("setting", [{"exclude": "published"}, {"attention_layers": 1}, {"relative_sink": True}, {"sink": 0.1}])
def test_every_setting_counts(setting: dict[str, Any]) -> None:
    assert not same(DAWN, DAWN | setting, blocks="full")


def test_a_relative_sink_is_a_multiple_of_the_mean() -> None:
    prompts = [toys.PROMPTS[0]]
    found = [
        toys.sampler(scheduler=DAWN | setting, blocks="full").generate(prompts, max_new_tokens=17)
        for setting in ({"sink": 2.0, "relative_sink": True}, {"sink": 2 / 20})
    ]
    assert torch.equal(found[0].trace.step_map, found[1].trace.step_map)


def test_the_walk_takes_what_is_linked_to_none_before_it() -> None:
    """Against a walk in Python, on random graphs with ties."""
    generator = torch.Generator().manual_seed(0)
    rest = torch.rand(40, 12, generator=generator) < 0.7
    confidence = torch.randint(5, (40, 12), generator=generator) / 5
    links = torch.rand(40, 12, 12, generator=generator) < 0.15
    links = links | links.mT
    found = Dawn().walk(rest, confidence, links)
    for row in range(40):
        taken: list[int] = []
        for place in sorted(range(12), key=lambda place: (-float(confidence[row, place]), place)):
            if rest[row, place] and not any(links[row, place, other] for other in taken):
                taken.append(place)
        assert found[row].nonzero()[:, 0].tolist() == sorted(taken)


@pytest.mark.parametrize(
    ("kind", "plugins", "said"),
    [
        ("llada", {"cache": "dual"}, "cache-incompatible: scheduler=dawn, cache=dual"),
        ("llada", {"cache": "dpad"}, "cache-incompatible: scheduler=dawn, cache=dpad"),
        ("llada", {"scheduler": Looks(), "cache": "prefix"}, "plugins-incompatible: cache=prefix, cache=none"),
        ("llada", {"scheduler": {"name": "freedave", "inner": "dawn"}}, "scheduler-incompatible: freedave, dawn"),
        ("llada", {"scheduler": DAWN | {"exclude": "none"}}, "choice-unknown: scheduler.exclude='none'"),
        ("llada", {"scheduler": DAWN | {"attention_layers": 0}}, "option-range: scheduler.attention_layers"),
        ("llada", {"scheduler": DAWN | {"edge": -0.1}}, "option-range: scheduler.edge"),
    ],
)
def test_what_is_refused(kind: str, plugins: dict[str, Any], said: str) -> None:
    with refused(said):
        toys.sampler(kind, **{"scheduler": "dawn", **plugins})


def test_models_that_do_not_show_attention_are_refused() -> None:
    def logits(ids: Tensor, mask: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, 9)

    with refused("plugins-incompatible: scheduler=dawn, scheduler=threshold"):
        Sampler.from_callable(logits, vocab_size=9, mask_id=8, eos_id=7, scheduler="dawn")


def test_a_denoiser_that_does_not_measure_attention_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TransformerDenoiser.__call__
    deaf = lambda self, canvas, query, plan: forward(self, canvas, query, replace(plan, means=None))  # noqa: E731
    monkeypatch.setattr(TransformerDenoiser, "__call__", deaf)
    with refused("plugin-result: TransformerDenoiser, plan.means"):
        toys.sampler("llada", scheduler="dawn").generate(toys.PROMPTS, max_new_tokens=TOKENS)


def test_other_engines_refuse_a_rule_that_looks_at_attention() -> None:
    assert "attention" in (unsupported_trait(Looks()) or "")
    assert unsupported_trait(Threshold()) is None
