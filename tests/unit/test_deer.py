"""DEER: the target's own text, whatever drafts it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from dllm_sampler import NotFiniteError, Sampler
from dllm_sampler.core.protocols import Plan
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Canvas, Query, Spent
from dllm_sampler.generation.speculative import SpeculativeSampler
from dllm_sampler.models.denoiser import TransformerDenoiser, spent
from dllm_sampler.models.transformer import Transformer
from dllm_sampler.result import Speculation
from tests import toys
from tests.refusals import refused
from tests.sampling import few, sampled

PROMPTS = [
    torch.randint(0, toys.VOCAB - 1, (length,), generator=torch.Generator().manual_seed(i)).tolist()
    for i, length in enumerate(torch.randint(1, 12, (40,), generator=torch.Generator().manual_seed(0)).tolist())
]


def deer(kind: str = "llada", k: int = 5, target: Any = None, **settings: Any) -> SpeculativeSampler:
    own = {name: settings.pop(name) for name in ("scheduled", "separator") if name in settings}
    drafter = Sampler(toys.denoiser(kind), **settings)
    return SpeculativeSampler(drafter, toys.verifier() if target is None else target, draft_length=k, **own)


def greedy(prompt: list[int], new: int, target: Any = None, ends: tuple[int, ...] = (toys.EOS,)) -> list[int]:
    """Plain autoregressive decoding, one full forward per token."""
    return _greedy(tuple(prompt), new, target, ends)


@cache  # the same for every drafter
@torch.no_grad()
def _greedy(prompt: tuple[int, ...], new: int, target: Any, ends: tuple[int, ...]) -> list[int]:
    ids, model = list(prompt), toys.verifier() if target is None else target
    while len(ids) < len(prompt) + new and not (len(ids) > len(prompt) and ids[-1] in ends):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def answers(result: Any) -> list[list[int]]:
    return [row[:length] for row, length in zip(result.tokens.tolist(), result.lengths.tolist(), strict=True)]


@pytest.mark.parametrize("k", sampled([0, 5, 1, 2, 32], lambda k: [k == 0]))
def test_greedy_text_is_the_targets(k: int) -> None:
    """For ragged prompts in one batch; emitted per round in 1..k+1, one pass of the target per round."""
    target = toys.verifier()
    calls: list[int] = []
    hook = target.register_forward_hook(lambda *_: calls.append(1))
    result = deer(k=k).generate(PROMPTS[:6], max_new_tokens=12)
    hook.remove()
    assert answers(result) == [greedy(prompt, 12) for prompt in PROMPTS[:6]]
    assert len(calls) == result.accepted.shape[1] == int(result.nfe.max())
    assert result.complete.all()
    emitted = torch.stack([(result.step_map == one).sum(1) for one in range(len(calls))], 1)
    live = result.accepted >= 0
    assert (emitted[live] >= 1).all()
    assert (emitted[live] <= k + 1).all()
    assert (emitted[~live] == 0).all()
    assert (result.accepted[live] <= emitted[live]).all()
    if k == 0:
        assert torch.equal(result.nfe, result.lengths)
        assert int(result.drafter_nfe.sum()) == 0


@few("kind", ["cfg", "causal", "dream", "gqa"], 2)
def test_any_drafter(kind: str) -> None:
    result = deer(kind, blocks={"name": "fixed", "length": 4}).generate(PROMPTS[:5], max_new_tokens=10)
    assert answers(result) == [greedy(prompt, 10) for prompt in PROMPTS[:5]]


@pytest.mark.parametrize("vocab", [38, 44])
def test_vocabularies_may_differ_by_padding(vocab: int) -> None:
    """A drafter that does not know a token of the text reads padding there; proposals unknown to the target fall."""
    target = toys.verifier(vocab=vocab)
    prompts = [[min(token, 36) for token in prompt] for prompt in PROMPTS[:5]]
    result = deer(target=target).generate(prompts, max_new_tokens=10)
    assert answers(result) == [greedy(prompt, 10, target) for prompt in prompts]


def test_a_random_drafter_is_hardly_ever_right() -> None:
    result = deer(k=8).generate(PROMPTS[:10], max_new_tokens=12)
    assert result.mean_accepted < 0.2


@dataclass(frozen=True)
class Autoregressive:
    """The target as a drafter: what it predicts at each column from the columns before, masks among them."""

    model: Any
    sure: bool = False  # whether it proposes what the target would say to the *text*, not to the masks

    @property
    def spec(self) -> ModelSpec:
        return toys.denoiser().spec

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        out = torch.zeros(*query.ids.shape, toys.VOCAB, dtype=torch.float64)
        rows = zip(canvas.ids.tolist(), canvas.layout.first.tolist(), canvas.end.tolist(), strict=True)
        for row, (ids, first, end) in enumerate(rows):
            text = ids[:first]
            if self.sure:
                text += greedy(text, end - first, self.model, ends=())
            else:
                text = ids[:end]
            logits = self.model(input_ids=torch.tensor([text])).logits[0]
            for place, column in enumerate(query.positions[row].tolist()):
                if column < end:
                    out[row, 0, place] = logits[column - 1]
        return plan.head_rows.pick(out), spent(canvas, plan)

    def head(self, hidden: Tensor) -> Tensor:
        return hidden


NO_MASK = {"name": "end_tokens", "mode": "ban", "ids": [toys.MASK]}  # which no drafter ever proposes


def test_a_drafter_that_is_right_saves_passes() -> None:
    """Every round takes all k and adds one; an end token inside the draft ends the row there."""
    drafter = Sampler(Autoregressive(toys.verifier(), sure=True), guide=NO_MASK)
    deer = SpeculativeSampler(drafter, toys.verifier(), draft_length=4)
    deer.ends = tuple(range(0, toys.VOCAB, 10))
    result = deer.generate(PROMPTS[:16], max_new_tokens=13)
    assert torch.equal(result.nfe, -(-result.lengths // 5))
    inside = (result.lengths % 5 != 0) & (result.lengths < 13)
    assert int(inside.sum()) > 3  # ended by a token of the draft
    assert answers(result) == [greedy(prompt, 13, ends=deer.ends) for prompt in PROMPTS[:16]]


@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}])
def test_a_row_of_a_batch_is_the_row_alone(settings: dict[str, Any]) -> None:
    sampler = deer(k=4, **settings)
    result = sampler.generate(toys.PROMPTS, max_new_tokens=11, seed=toys.SEEDS)
    assert int((result.accepted > 0).sum()) > 0
    for row, (prompt, seed) in enumerate(zip(toys.PROMPTS, toys.SEEDS, strict=True)):
        alone = sampler.generate(prompt, max_new_tokens=11, seed=seed)
        assert torch.equal(alone.tokens[0], result.tokens[row])
        assert torch.equal(alone.accepted[0], result.accepted[row, : alone.accepted.shape[1]])
        assert (result.accepted[row, alone.accepted.shape[1] :] == -1).all()
        assert alone.drafter_nfe[0] == result.drafter_nfe[row]


SMALL = 6  # tokens; the last is the mask, the one before ends a text


def small(**plugins: Any) -> tuple[Sampler, Any]:
    """A drafter and a target of six tokens, whose laws have something in common."""
    config = replace(toys.transformer().config, vocab_size=SMALL)
    model = Transformer(config).double()
    model.init_weights(std=0.15, embedding_std=1.0, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(4)
    target = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=SMALL, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.25, pad_token_id=None,
        )
    ).double().eval()  # fmt: skip
    return Sampler(TransformerDenoiser(model, SMALL - 1, SMALL - 2), **plugins), target


@torch.no_grad()
def joint(target: Any, prompt: list[int], new: int, temperature: float, top_k: int) -> dict[tuple[int, ...], float]:
    """The law of the target's first tokens, by enumeration."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(new):
        following: dict[tuple[int, ...], float] = {}
        for text, mass in law.items():
            if text and text[-1] == SMALL - 2:
                following[text] = mass
                continue
            logits = target(input_ids=torch.tensor([[*prompt, *text]])).logits[0, -1] / temperature
            kept = logits.topk(top_k).indices.tolist()
            weights = torch.full_like(logits, -torch.inf).index_copy(0, torch.tensor(kept), logits[kept]).softmax(0)
            following |= {(*text, token): mass * float(weights[token]) for token in kept}
        law = following
    return law


def chi_square(seen: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """How many deviations a chi-square statistic lies above its mean (Wilson and Hilferty); rare cells are pooled."""
    count = dict.fromkeys(law, 0)
    for cell in seen:
        count[cell] += 1  # a cell outside the law has probability 0
    expected = {cell: mass * len(seen) for cell, mass in law.items()}
    rare = [cell for cell in law if expected[cell] < 5]
    cells = [(count[cell], expected[cell]) for cell in law if expected[cell] >= 5]
    if sum(expected[cell] for cell in rare) > 1:
        cells.append((sum(count[cell] for cell in rare), sum(expected[cell] for cell in rare)))
    free = len(cells) - 1
    statistic = sum((got - want) ** 2 / want for got, want in cells)
    return ((statistic / free) ** (1 / 3) - (1 - 2 / (9 * free))) / (2 / (9 * free)) ** 0.5


LAWS = [(0.6, SMALL, 2), (1.3, 3, 4), (1.0, SMALL, 4), (1.0, SMALL, 0)]  # temperature, top_k, draft length


@pytest.mark.slow
@pytest.mark.parametrize("case", sampled(LAWS))
def test_samples_have_the_targets_law(case: tuple[float, int, int]) -> None:
    """The joint of the first three tokens, 6,000 samples; another temperature's law is told apart."""
    temperature, top_k, k = case
    sampler, target = small(temperature=temperature, **({"top_k": top_k} if top_k < SMALL else {}))
    result = SpeculativeSampler(sampler, target, draft_length=k).generate([[0, 2, 1]] * 6_000, max_new_tokens=4)
    seen = [tuple(row[:3]) for row in answers(result)]
    assert chi_square(seen, joint(target, [0, 2, 1], 3, temperature, top_k)) < 3.1  # one in a thousand
    assert chi_square(seen, joint(target, [0, 2, 1], 3, 0.7 * temperature, top_k)) > 6
    taken = result.accepted[result.accepted >= 0]
    if k:  # all of it was at work: rejections in every place, and whole drafts
        assert all(int((taken == one).sum()) > 20 for one in range(min(k, 3) + 1))


@pytest.mark.slow
def test_the_drafters_context_shortens_drafts() -> None:
    """Beyond it the target goes on alone."""
    short = Transformer(replace(toys.transformer().config, max_positions=14)).double()
    spy = toys.Spy(toys.wrapped(short))
    deer = SpeculativeSampler(Sampler(spy), toys.verifier(), draft_length=6, separator=3)
    result = deer.generate(PROMPTS[:30], max_new_tokens=20)
    assert answers(result) == [greedy(prompt, 20) for prompt in PROMPTS[:30]]
    seen = [int(canvas.end.max()) for canvas, _, _ in spy.calls]
    assert max(seen) <= 14
    assert int((result.nfe > result.drafter_nfe).sum()) > 5


def test_the_separator_stands_behind_the_masks() -> None:
    spy = toys.Spy(toys.denoiser())
    SpeculativeSampler(Sampler(spy), toys.verifier(), draft_length=4, separator=3).generate(
        toys.PROMPTS, max_new_tokens=9
    )
    canvas, query, _ = spy.calls[0]
    for row in range(len(toys.PROMPTS)):
        first = int(canvas.layout.first[row])
        text = canvas.ids[row, first : canvas.end[row]].tolist()
        assert text == [toys.MASK] * 4 + [3]
        assert query.positions[row].tolist() == list(range(first, first + 4))


@pytest.mark.parametrize("separator", [None, 3])
def test_scheduled_drafts(separator: int | None) -> None:
    """Several forwards per draft: still the target's greedy text."""
    settings: dict[str, Any] = {"scheduler": {"name": "fixed", "steps": 2}, "blocks": "full", "cache": "dual"}
    result = deer(k=6, scheduled=True, separator=separator, **settings).generate(PROMPTS[:5], max_new_tokens=10)
    assert answers(result) == [greedy(prompt, 10) for prompt in PROMPTS[:5]]
    assert int(result.drafter_nfe.sum()) > int(result.nfe.sum())
    with refused("options-conflict"):
        deer(scheduled=True, temperature=1.0)


@pytest.mark.parametrize("cache", ["elastic", "trailing", "d2", "dkv"])
def test_a_scheduled_draft_is_a_generation_of_its_own(cache: str) -> None:
    """Caches refresh at step 0, in each round: a draft that began at another step would read empty slots."""
    spy = toys.Spy(toys.denoiser())
    drafter = Sampler(spy, cache=cache)
    sampler = SpeculativeSampler(drafter, toys.verifier(), draft_length=3, scheduled=True)
    result = sampler.generate(toys.PROMPTS, max_new_tokens=9)
    assert answers(result) == [greedy(prompt, 9) for prompt in toys.PROMPTS]
    begun = [(canvas, plan) for canvas, _, plan in spy.calls if not canvas.step.any()]
    assert len(begun) == result.accepted.shape[1] - 1 > 1  # the last token of a text has no draft
    for canvas, plan in begun:
        assert torch.equal(plan.entries, canvas.end.masked_fill(canvas.done, 0))


def test_several_end_tokens() -> None:
    """Those of the target's generation config end an answer."""
    target = toys.verifier(seed=5)
    target.generation_config.eos_token_id = [toys.EOS, 7, 8, 9, 10]
    result = deer(target=target).generate(PROMPTS[:5], max_new_tokens=12)
    assert answers(result) == [greedy(prompt, 12, target, (toys.EOS, 7, 8, 9, 10)) for prompt in PROMPTS[:5]]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"k": -1}, "option-range: draft_length, -1"),
        ({"k": 2.0}, "option-range: draft_length"),
        ({"separator": 40}, "token-outside-vocabulary: 40"),
        ({"separator": "[SEP]"}, "tokenizer-missing: '[SEP]'"),
        ({"target": 3}, "option-type: target"),
        ({"target": "/nowhere/at/all"}, "model-not-found: target='/nowhere/at/all'"),
    ],
)
def test_bad_settings(settings: dict[str, Any], sentence: str) -> None:
    with refused(sentence):
        deer(**settings)


def test_bad_models_and_prompts() -> None:
    with refused("vocabulary-differs: 700, 40"):
        deer(target=toys.verifier(vocab=700))
    with refused("context-exceeded: 64"):
        deer().generate([[1, 2, 3]], max_new_tokens=62)
    with refused("length-mismatch"):
        deer().generate([[1], [2]], max_new_tokens=4, seed=[3])


def test_a_model_that_returns_nan() -> None:
    target = toys.verifier(seed=6)
    broken = deer(k=2, target=target)

    def spoil(module: Any, given: Any, out: Any) -> None:
        if calls.append(0) or len(calls) == 3:
            out.logits[1] = torch.nan

    calls: list[int] = []
    handle = target.register_forward_hook(spoil)
    with pytest.raises(NotFiniteError, match="at step 3 for prompt 2") as error:
        broken.generate(PROMPTS[:3], max_new_tokens=12)
    handle.remove()
    assert isinstance(error.value.result, Speculation)
    assert error.value.result.accepted.shape == (3, 2)
    assert not error.value.result.complete[1]
