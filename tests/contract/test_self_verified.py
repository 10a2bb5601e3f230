"""S2D2: drafts of a block-causal model, verified by the same model at block size 1."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler import Result, Sampler
from dllm_sampler.check.promises import check_row
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.packed import PackedAttention
from dllm_sampler.published import Level, PublishedSelfVerified
from tests import toys
from tests.contract.test_block_causal import PROMPTS, assert_same
from tests.refusals import refused
from tests.sampling import sampled
from tests.tables import verified
from tests.tables.markdown import tables

TOKENS, BLOCK = 10, 6
CAUSAL = {"name": "block_causal", "token_causal": True}


def sampler(**plugins: Any) -> Sampler:
    return toys.sampler("causal", **{"scheduler": "s2d2", **plugins})


def generate(prompts: list[list[int]] = PROMPTS, tokens: int = TOKENS, **plugins: Any) -> Result:
    return sampler(**plugins).generate(prompts, max_new_tokens=tokens, seed=list(range(len(prompts))))


def predicted(ids: list[int], sees: Tensor) -> Tensor:
    """`[L, V]` probabilities of the plain network under a mask `[L, L]`."""
    model = toys.denoiser("causal")
    assert isinstance(model, TransformerDenoiser)
    with torch.no_grad():
        logits = model.transformer(torch.tensor([ids]), keys=sees[None])[0]
    logits[:, toys.MASK] = -torch.inf
    return logits.softmax(-1)


def by_hand(prompt: list[int], causal: bool) -> tuple[list[int], list[int]]:
    """Greedy, all rounds verified: one forward for each position that is verified, with a mask there and none else."""
    ids, step_map, step = [*prompt, *[toys.MASK] * TOKENS], [-1] * TOKENS, 1
    column = torch.arange(len(ids))
    below = column[None] <= column[:, None]
    while -1 in step_map:
        first = len(prompt) + step_map.index(-1)
        start, stop = first // BLOCK * BLOCK, min((first // BLOCK + 1) * BLOCK, len(ids))
        own = column // BLOCK
        blocks = own[None] <= own[:, None]
        known = column < (first if causal else 0)
        draft = predicted(ids, torch.where(known[:, None], below, blocks)).argmax(-1)
        for at in range(first, stop):
            sees = torch.where((column >= (0 if causal else start))[:, None], below, blocks)[: at + 1, : at + 1]
            ids[at] = int(predicted([*ids[:at], toys.MASK], sees)[at].argmax())
            step_map[at - len(prompt)] = step
            if ids[at] != draft[at]:
                break
        step += 2
    return ids[len(prompt) :], step_map


@pytest.mark.parametrize("kept", sampled(["none", "block_causal", CAUSAL], lambda kept: [kept == "none"]))
def test_against_the_network_driven_by_hand(kept: Any) -> None:
    result = generate(cache=kept)
    for row, prompt in enumerate(PROMPTS):
        tokens, step_map = by_hand(prompt, kept == CAUSAL)
        assert result.trace.decoded[row].tolist() == tokens
        assert result.trace.generated[row].tolist() == step_map


@pytest.mark.parametrize("kept", sampled(["none", "block_causal", CAUSAL]))
def test_the_padded_form_of_attention(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device other than the CPU computes."""
    by_row = generate(cache=kept)
    monkeypatch.setattr(PackedAttention, "_by_row", PackedAttention._padded)  # pyright: ignore[reportPrivateUsage]
    assert_same(generate(cache=kept), by_row)


def many(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, 14, (count,), generator=generator).tolist()
    return [torch.randint(toys.EOT, (size,), generator=generator).tolist() for size in sizes]


@pytest.mark.parametrize("count", [12, pytest.param(500, marks=pytest.mark.slow)])
def test_greedy_it_is_the_model_at_block_size_1(count: int) -> None:
    """Whatever the drafts, and in fewer forwards than tokens if enough of them stand."""
    prompts = many(count)
    alone = generate(prompts, scheduler="fixed", blocks={"name": "fixed", "length": 1})
    for blocks, store in ((4, "ride"), (6, "separate"), (17, "ride")):
        found = generate(prompts, cache=CAUSAL | {"store_pass": store}, blocks={"name": "fixed", "length": blocks})
        assert torch.equal(found.tokens, alone.tokens)
    other = generate(prompts, scheduler="dynamic", blocks={"name": "fixed", "length": 4})
    assert not torch.equal(other.tokens, alone.tokens)


@cache
def law(prompt: tuple[int, ...], tokens: int) -> dict[tuple[int, ...], float]:
    """The likely answers of the model at block size 1, by enumeration."""
    found = {(): 1.0}
    for _ in range(tokens):
        grown = {}
        for answer, mass in found.items():
            ids = [*prompt, *answer, toys.MASK]
            following = predicted(ids, torch.ones(len(ids), len(ids)).tril().bool())[-1]
            grown |= {(*answer, token): mass * float(p) for token, p in enumerate(following) if mass * p > 1e-4}
        found = grown
    return found


def distance(prompt: list[int], tokens: int, count: int, **plugins: Any) -> float:
    """Pearson's statistic of drawn answers against `law`, per degree of freedom; rare answers are one cell."""
    made = sampler(temperature=1.0, blocks={"name": "fixed", "length": 4}, stop="none", **plugins)
    result = made.generate([prompt] * count, max_new_tokens=tokens, seed=list(range(count)))
    seen = Counter(map(tuple, result.trace.decoded.tolist()))  # also what comes after an end-of-text token
    expected = {answer: count * mass for answer, mass in law(tuple(prompt), tokens).items() if count * mass >= 8}
    cells = [(seen[answer], mean) for answer, mean in expected.items()]
    cells.append((count - sum(found for found, _ in cells), count - sum(expected.values())))
    return sum((found - mean) ** 2 / mean for found, mean in cells) / (len(cells) - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "count"), [(2, 1000), pytest.param(3, 2000, marks=pytest.mark.slow)])
def test_drawn_answers_are_samples_of_the_model_at_block_size_1(tokens: int, count: int) -> None:
    """Always verified; keys that saw a whole block change the law."""
    prompt = [5, 11, 3, 8]
    assert distance(prompt, tokens, count, cache=CAUSAL) < 1.3
    assert distance(prompt, tokens, count, cache="block_causal") > 2


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [{"min_span": 3}, {"tempering": 0.2}], ids=str)
def test_drawn_answers_have_another_law_where_not_all_is_verified(scheduler: dict[str, Any]) -> None:
    assert distance([5, 11, 3, 8], 3, 1000, cache=CAUSAL, scheduler={"name": "s2d2", **scheduler}) > 2


@pytest.mark.parametrize("store", ["ride", "separate"])
def test_what_draft_and_verifier_predict_alike_stands_whole(store: str) -> None:
    """Two forwards for a block, and one to store it."""
    model = toys.causal_transformer()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name:
                weight.zero_()  # a token is predicted from itself alone
    denoiser = replace(toys.wrapped(model), attention="block_causal")
    cache = {"name": "block_causal", "store_pass": store}
    options: dict[str, Any] = {"blocks": {"name": "fixed", "length": 4}, "stop": "none", "temperature": 4.0}
    result = Sampler(denoiser, scheduler="s2d2", cache=cache, **options).generate([[3, 1, 2, 9, 4]], max_new_tokens=11)
    assert int(result.nfe) == (1 + 3 * 3 if store == "separate" else 2 * 3)
    assert len(set(result.tokens[0].tolist())) > 3


def test_answers_to_a_prompt_that_is_computed_once() -> None:
    """Its keys are causal by token too."""
    made = sampler(cache=CAUSAL, temperature=0.8)
    (prompt,) = PROMPTS[3:4]
    for answer in made.generate_many([prompt], samples=3, max_new_tokens=9, seed=4):
        alone = made.generate([prompt], max_new_tokens=9, seed=4 + answer.sample)
        assert torch.equal(answer.tokens, alone.tokens[0]) and answer.nfe == int(alone.nfe)


@pytest.mark.parametrize("drawn", [{}, {"temperature": 0.8}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("pace", [{"threshold": 0.6}, {"threshold": 1.0, "steps": 2, "score": "margin"}])
def test_what_is_never_verified_is_dynamic(pace: dict[str, Any], drawn: dict[str, Any]) -> None:
    never = generate(scheduler={"name": "s2d2", "min_span": BLOCK + 1, **pace}, **drawn)
    assert_same(never, generate(scheduler={"name": "dynamic", **pace}, **drawn))


POLICIES: list[dict[str, Any]] = [
    {"min_span": 4},
    {"policy": "score_threshold", "least": 0.5, "cost": 1.0},
    {"policy": "score_threshold", "least": 0.5, "cost": 0.5, "cost_above": 0.6},
    {"policy": "score_threshold", "least": 1.0, "cost": 0.0, "estimator": "hard_margin_threshold", "margin": 0.2},
    {"policy": "score_hysteresis", "enter": 1.5, "leave": 0.8},
    {"policy": "contextual_bandit_ucb"},
]


@pytest.mark.parametrize("drawn", [{"temperature": 0.8}, pytest.param({}, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", sampled(POLICIES, lambda policy: ["policy" in policy]))
def test_rows_of_a_batch_verify_by_themselves(policy: dict[str, Any], drawn: dict[str, Any]) -> None:
    """In one forward some rows draft and others verify, and each is the row alone."""
    plugins: dict[str, Any] = {"scheduler": {"name": "s2d2", "steps": 4, **policy}, **drawn}
    spy = toys.Spy(toys.denoiser("causal"))
    made = Sampler(spy, blocks={"name": "fixed", "length": BLOCK}, stop="none", **plugins)
    batch = made.generate(PROMPTS, max_new_tokens=TOKENS, seed=list(range(len(PROMPTS))))
    asked = [query.causal[~canvas.done] for canvas, query, _ in spy.calls if query.causal is not None]
    assert any(bool(rows.any()) and not bool(rows.all()) for rows in asked)
    for canvas, query, plan in spy.calls:  # the block, and a shadow of each mask
        assert query.causal is not None
        shadows = plan.entries - plan.wanted.computed.sum(1)
        assert torch.equal(shadows, canvas.noise_left() * (query.causal & ~canvas.done))
    unverified = sum(len(step) > 0 for row in range(len(PROMPTS)) for step in batch.trace.steps(row))
    assert sum(int(rows.sum()) for rows in asked) < unverified, "all rounds were verified"
    for row in (1, len(PROMPTS) - 1):
        check_row(batch, row, made.generate([PROMPTS[row]], max_new_tokens=TOKENS, seed=[row]))


def test_the_draft_is_edited_before_it_is_verified() -> None:
    """What replaces a token is written by the forward that drafts, while masks wait for the one that verifies."""
    rule = {"name": "s2d2_editing", "edit": 0.3, "extra": 2}
    steps = list(sampler(scheduler=rule).stream(PROMPTS, max_new_tokens=TOKENS, seed=0))
    edited = [
        ((after.tokens != before.tokens) & ~before.masked & ~after.masked).any(1)
        & after.masked.any(1)
        & ~(before.masked & ~after.masked).any(1)
        for before, after in pairwise(steps)
    ]
    assert any(bool(rows.any()) for rows in edited)


@pytest.mark.parametrize(("level", "accepts"), [(0.0, True), (0.999999, False)])
def test_the_published_rule_draws_without_a_temperature(level: float, accepts: bool) -> None:
    """Uniform numbers of 0 accept whatever the verifier can say at all: then all spans at once."""
    made = sampler(scheduler=PublishedSelfVerified(), noise=Level(0, "sdar", uniforms=level))
    result = made.generate([PROMPTS[3]], max_new_tokens=11)
    assert (int(result.nfe) == 4) == accepts  # 13 + 11 columns: two blocks, each drafted and verified once


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("llada", {}, "scheduler-incompatible: scheduler=s2d2, scheduler=freedave"),
    ("dream", {}, "scheduler-incompatible: scheduler=s2d2"),
    ("context", {}, "scheduler-incompatible: scheduler=s2d2, scheduler=linear_spec"),
    ("fast", {}, "scheduler-incompatible: scheduler=s2d2"),
    ("causal", {"cache": "sub_block"}, "cache-incompatible: scheduler=s2d2, cache=sub_block, cache=exact"),
    ("causal", {"cache": "dual"}, "cache-incompatible: cache=dual"),
    ("causal", {"stop": "truncate"}, "plugins-incompatible: scheduler=s2d2, stop=truncate"),
    ("causal", {"guide": {"name": "regex", "pattern": "[a-j]+"}}, "plugins-incompatible: scheduler=s2d2"),
    ("causal", {"scheduler": {"name": "freedave", "inner": "s2d2"}}, "scheduler-incompatible: s2d2"),
    ("causal", {"scheduler": {"name": "eoser", "inner": "s2d2"}}, "scheduler-incompatible: s2d2"),
    (
        "causal",
        {"scheduler": {"name": "s2d2", "policy": "mask_span"}},
        "choice-unknown: scheduler.policy=, mask_span_length",
    ),
    ("causal", {"scheduler": {"name": "s2d2", "tempering": 0.0}}, "option-range: scheduler.tempering"),
    (
        "causal",
        {"scheduler": {"name": "s2d2", "policy": "score_hysteresis", "leave": 2.0}},
        "option-range: scheduler.leave=2 exceeds scheduler.enter=1.",
    ),
    ("causal", {"scheduler": {"name": "s2d2", "cost": float("nan")}}, "option-range: scheduler.cost"),
    ("causal", {"scheduler": {"name": "s2d2", "cost": -float("inf")}}, "option-range: scheduler.cost"),
    ("context", {"scheduler": "fixed", "cache": CAUSAL}, "cache-incompatible: cache.token_causal=true"),
]


@pytest.mark.parametrize(("kind", "plugins", "said"), REFUSALS, ids=range(len(REFUSALS)))
def test_refusals(kind: str, plugins: dict[str, Any], said: str) -> None:
    with refused(said):
        toys.sampler(kind, **{"scheduler": "s2d2", **plugins})


@pytest.mark.slow
def test_the_table_of_the_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where all rounds are verified no row differs, and where some are not some do; none of linear_spec's does."""
    monkeypatch.setattr(verified, "CANVAS", 12)
    monkeypatch.setattr(verified, "LENGTHS", (8,))
    page = tmp_path / "page.md"
    page.write_text("<!-- verified -->\n<!-- /verified -->\n")
    threads = torch.get_num_threads()
    assert verified.main(["--prompts", "12", "--docs", str(page)]) == 0
    torch.set_num_threads(threads)
    ((_, *rows),) = tables(page.read_text())
    found = {name: cell.split(", ") for name, cell in rows}
    differ = {name: int(count) for name, (count, _) in found.items()}
    assert next(iter(differ)) == "`s2d2`, all rounds verified" and next(iter(differ.values())) == 0
    assert max(differ.values()) > 0
    linear = [name for name in differ if name.startswith("`linear_spec`")]
    assert [differ[name] for name in linear] == [0, 0]
    assert all(float(found[name][1]) < 12 for name in linear), "no draft stands"
    assert verified.main(["--docs", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err
