"""Exact log-likelihoods of answers (`Sampler.score`), against every answer of enumerable models."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from math import comb, exp, inf, lcm, pi, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler import Sampler, UserError, config
from dllm_sampler.check.settings import SETTINGS, Settings, settings
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Canvas, Readout
from dllm_sampler.eval.lm_eval import likelihood
from dllm_sampler.generation import score
from dllm_sampler.generation.score import Scoring
from dllm_sampler.result import Scores
from tests import duel, toys
from tests.duel import beds
from tests.refusals import refused
from tests.sampling import each, few

NUMBERS = json.loads((Path(__file__).parent / "data" / "duel.json").read_text())
RULES = [(bed, rule) for bed, about in NUMBERS.items() for rule in about["rules"]]
MARGIN = {"name": "fixed", "score": "margin", "steps": 2}
WAVES = "A (L=4, V=3)"


@each(("bed", "rule"), RULES)
def test_a_score_is_the_published_number_and_all_answers_sum_to_one(bed: str, rule: str) -> None:
    toy, expected = beds()[bed], NUMBERS[bed]["rules"][rule]
    scores = toy.score(**duel.settings(rule, toy.length))
    shown = [toy.answers.index(tuple(row)) for row in NUMBERS[bed]["strings"]]
    assert abs(float(scores.log_p.exp().sum()) - 1) < 1e-12
    assert scores.log_p[shown].tolist() == pytest.approx(expected["scores"], abs=1e-9)
    assert scores.nfe[shown].tolist() == expected["nfe"]
    assert float((scores.log_p.exp() * scores.nfe).sum()) == pytest.approx(expected["mean nfe"], abs=1e-9)


class Scrambled(Scoring):
    """Shows other candidates and confidences than those of the step. What is written stays."""

    def read(self, hidden: Tensor, canvas: Canvas, head_rows: HeadRows, spec: ModelSpec) -> Readout:
        seen = super().read(hidden, canvas, head_rows, spec)
        generator = torch.Generator().manual_seed(int(canvas.step.max()))
        token = torch.randint(spec.vocab_size, seen.token.shape, generator=generator)
        sure = torch.rand(seen.token.shape, generator=generator, dtype=torch.float64)
        return replace(seen, token=token, confidence=sure)


def scrambled(sampler: Sampler, prompts: Any, answers: Any) -> Scores:
    """Return the scores if candidates are replaced by random ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "Scoring", Scrambled)
        return sampler.score(prompts, answers, batch_size=len(answers))


def same(one: Scores, other: Scores) -> bool:
    return torch.equal(one.step_map, other.step_map) and torch.equal(one.log_q, other.log_q)


def outcome(sampler: Callable[[], Sampler], prompts: Any, answers: Any) -> tuple[str, Scores | None]:
    """Return how a score ends. `ignores` and `judges` say if the candidates of a step count, else it is an error."""
    try:
        made = sampler()
        scores = made.score(prompts, answers, batch_size=len(answers))
    except UserError as error:
        return f"{error.code}: {error}", None
    return "ignores" if same(scores, scrambled(made, prompts, answers)) else "judges", scores


# Without those whose second model takes seconds to import. `test_apd_is_refused` has these.
SCHEDULERS: list[Settings] = [
    {"name": name, **one}
    for name in config.names("scheduler")
    for one in SETTINGS.get(f"scheduler.{name}", [{}])
    if not any(map(callable, one.values()))
]
EXACT = {"ccd_marginal", "dus", "dynamic", "entropy", "entropy_bound", "fixed", "leftright"}
BY_BEST = {"ascending", "block_refine", "budgeted", "ccd", "certainty", "credit", "d2f", "dinfer", "dus", "dynamic"}
BY_BEST |= {"eoser", "factor", "fixed", "hierarchical", "klass", "learn2pd", "localleap", "pc", "slowfast"}
BY_BEST |= {"streaming", "threshold"}
NEVER = {
    "daedal",
    "dawn",  # the bed shows no attention
    "discrete_ddim",
    "dmax",
    "editing",
    "entropy_renoise",
    "fixed",
    "freedave",
    "hierarchical",
    "linear_spec",
    "lopa",
}
NEVER |= {
    "origin",
    "random_order",
    "rcr",
    "remdm",
    "remix",
    "rho_eos",
    "s2d2",
    "s2d2_editing",
    "ssd",
    "svdd",
    "wino",
    "threshold",
}
CAUTIOUS = "ccd"  # its second setting never finds two candidates that differ on four positions


def test_every_scheduler_is_exact_or_refused() -> None:
    toy, found = beds()[WAVES], dict[str, set[str]](exact=set(), best=set(), never=set())
    for one in [*SCHEDULERS, {"name": "dynamic", "threshold": 1.0, "score": "position"}]:
        made = partial(toy.sampler, scheduler=one, blocks={"name": "fixed", "length": 6})
        how, scores = outcome(made, [[4]], toy.answers)
        if scores is None and "judge=best" in how:
            found["best"].add(one["name"])
            how, scores = outcome(partial(made, judge="best"), [[4]], toy.answers)
            assert how == "judges" or one["name"] == CAUTIOUS, one
        elif scores is None:
            found["never"].add(one["name"])
        else:
            found["exact"].add(one["name"])
            assert how == "ignores", one
        if scores is not None:
            assert abs(float(scores.log_p.exp().sum()) - 1) < 1e-12, one
    assert found == {"exact": EXACT, "best": BY_BEST, "never": NEVER}


@pytest.mark.slow
def test_apd_is_refused() -> None:
    with refused("score-inexact: scheduler=apd keeps numbers for the whole batch"):
        beds()[WAVES].score(scheduler={"name": "apd", "verifier": toys.verifier(), "mixture_weight": 0.5})


@each(("scheduler", "reason"), [
    ({"name": "fixed", "score": "random"}, "draws the positions that it commits"),
    ({"name": "fixed", "alg_temp": 0.5}, "draws the positions that it commits"),
    ({"name": "random_order"}, "draws the positions that it commits"),
    ({"name": "hierarchical", "remask": 0.4}, "remasks or replaces tokens"),
    ({"name": "ssd"}, "drafts tokens"),
    ({"name": "rho_eos"}, "changes the length"),
    ({"name": "threshold"}, "judges the tokens that a step drew"),
])  # fmt: skip
def test_a_refusal_names_the_scheduler_and_the_reason(scheduler: Settings, reason: str) -> None:
    with refused(f"score-inexact: scheduler={scheduler['name']} {reason}"):
        beds()[WAVES].score(scheduler=scheduler)


@each(("options", "message"), [
    ({"stop": "prefix"}, "score-inexact: stop=prefix"),
    ({"max_steps": 9}, "score-inexact: max_steps=9"),
    ({"compat": True}, "score-inexact: compat=true"),
    ({"cache": "d2"}, "score-inexact: cache=d2"),
    ({"cache": {"name": "dpad", "window": 4}, "blocks": {"name": "fixed", "length": 4}}, "score-inexact: cache=dpad"),
    ({"blocks": {"name": "adablock", "length": 4}}, "score-inexact: blocks=adablock"),
    ({"blocks": {"name": "multi_block"}, "scheduler": "leftright"}, "score-inexact: blocks=multi_block"),
    ({"guide": {"name": "choices", "choices": ["abc"]}}, "score-inexact: guide=choices"),
])  # fmt: skip
def test_a_refusal_names_other_plugins(options: dict[str, Any], message: str) -> None:
    chosen = {"scheduler": MARGIN, "stop": "none", "temperature": 1.0, **options}
    with refused(message):
        toys.sampler(**chosen).score([toys.PROMPTS[0]], [[1] * 8])


class RandomTokens(toys.Spy):
    """A model without a mask token."""

    @property
    def spec(self) -> ModelSpec:
        return replace(self.inner.spec, mask_id=None)


def test_models_of_random_tokens_are_refused() -> None:
    plugins = {"scheduler": {"name": "block_refine"}, "stop": "none", "judge": "best"}
    with refused("score-inexact: this model"):
        Sampler(RandomTokens(toys.denoiser()), **plugins).score([toys.PROMPTS[0]], [[1] * 8])


@each("blocks", [
    {"name": "adablock", "delimiters": [1], "threshold": 0.2, "length": 4, "window": 1.0},
    {"name": "multi_block", "length": 2, "add_threshold": 0.5, "full_threshold": 0.5},
])  # fmt: skip
def test_blocks_that_judge_candidates_are_exact_with_the_best_ones(blocks: Settings) -> None:
    toy, scheduler = (
        beds()[WAVES],
        "leftright" if blocks["name"] == "multi_block" else {"name": "fixed", "score": "margin"},
    )
    how, scores = outcome(partial(toy.sampler, scheduler=scheduler, blocks=blocks, judge="best"), [[4]], toy.answers)
    assert scores is not None and abs(float(scores.log_p.exp().sum()) - 1) < 1e-12
    assert how == "judges"


CACHES = [one for one in settings("cache") if one["name"] not in ("d2f", "dkv_greedy", "dpad", "streaming")]
COMMON = ("prefix", "dual", "dkv", "d2", "elastic")  # the others run with the slow tests
FIRST = [next(one for one in CACHES if one["name"] == name) for name in COMMON]
ROWS = [[20, 3, 11, 8, 30, 2, 17], [5, 9], [1, 34, 34, 7]]


@few("cache", [*FIRST, *(one for one in CACHES if one not in FIRST)], len(FIRST))
def test_a_row_of_a_batch_has_the_score_of_the_row_alone_under_any_cache(cache: Settings) -> None:
    kind = "causal" if config.build("cache", cache).causal else "llada"
    judge = {"judge": "best", "scheduler": {"name": "threshold", "threshold": 0.6}}
    plain = {} if cache["name"] == "d2" else {"judge": "draw", "scheduler": {"name": "entropy", "entropy": 2.0}}
    options = {"stop": "none", "temperature": 0.8, "top_k": 9, "cache": cache, **judge, **plain}
    sampler = toys.sampler(kind, **options, blocks={"name": "fixed", "length": 4})
    prompts, answers = toys.PROMPTS[: len(ROWS)], ROWS
    how, together = outcome(lambda: sampler, prompts, answers)
    assert together is not None, how
    assert how == ("judges" if options["judge"] == "best" else "ignores")
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        alone, size = sampler.score([prompt], [answer]), len(answer)
        # a matrix product of other rows may round another last bit, which no token of theirs shows
        assert torch.allclose(alone.log_q[0], together.log_q[row, :size], rtol=0, atol=1e-14)
        assert not together.log_q[row, size:].any()
        assert alone.steps() == together.steps(row)
        assert [alone.nfe[0], alone.computed[0]] == [together.nfe[row], together.computed[row]]


@each("options", [
    {"scheduler": {"name": "fixed", "score": "entropy"}, "temperature": 1.3, "top_p": 0.9},
    {"scheduler": {"name": "threshold", "threshold": 0.5}, "judge": "best", "temperature": 0.7, "cache": "dual"},
    {"scheduler": {"name": "credit", "threshold": 0.5}, "judge": "best", "temperature": 1.0},
    {"scheduler": {"name": "threshold", "threshold": 0.5}, "temperature": 0.0},
    {"scheduler": {"name": "factor"}},
])  # fmt: skip
def test_a_sampled_answer_has_the_path_that_it_was_sampled_on(options: dict[str, Any]) -> None:
    sampler = toys.sampler(**options, stop="none", blocks={"name": "fixed", "length": 4})
    made = sampler.generate(toys.PROMPTS, max_new_tokens=10)
    scores = sampler.score(toys.PROMPTS, made.trace.decoded.tolist())
    assert torch.equal(scores.step_map, made.step_map) and torch.equal(scores.nfe, made.nfe)
    assert torch.equal(scores.computed, made.trace.rows)
    assert scores.log_p.isfinite().all()
    if not options.get("temperature"):
        assert scores.log_p.tolist() == [0.0] * 5 and scores.perplexity == 1
        other = sampler.score(toys.PROMPTS[:1], [[3] * 10])
        assert other.log_p.tolist() == [-inf] and other.perplexity == inf


def test_the_example_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "likelihood.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.+?)```", page, re.DOTALL)
    exec(compile(block, "likelihood.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"print.+# (\[.+\])", block)


def test_the_law_is_that_of_the_draws() -> None:
    toy = beds()[WAVES]
    two = [toy.score([(0, 1, 2, 0)], scheduler=MARGIN, temperature=heat).log_q for heat in (1.0, 0.5)]
    assert not torch.equal(two[0], two[1])
    cold = toy.score([(0, 0, 0, 0)], scheduler=MARGIN, temperature=1e-3).log_p  # no float64 probability is as small
    assert -1e5 < float(cold) < -745


def test_answers_may_be_texts_of_one_prompt() -> None:
    sampler = Sampler.from_pretrained("mini", scheduler=MARGIN, stop="none", temperature=1.0, dtype="float64")
    assert sampler.tokenizer is not None
    texts = ["Ada, Ben, Eve", "Eve, Ben, Ada"]
    padded = sampler.score("sort: Eve, Ada, Ben", texts, max_new_tokens=6)
    assert padded.lengths.tolist() == [6, 6] and padded.log_p[0] > padded.log_p[1]
    ids = [sampler.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    ids = [[*row, *[sampler.spec.eos_id] * (6 - len(row))] for row in ids]
    assert torch.equal(sampler.score("sort: Eve, Ada, Ben", ids).log_q, padded.log_q)
    assert repr(padded).startswith("Scores(2 answers, perplexity ")


@each(("given", "message"), [
    (([[5]], [[]]), "answer-empty: answer 1"),
    (([[5]], []), "length-mismatch: 0 answers"),
    (([[5], [6]], [[1], [2], [3]]), "length-mismatch: 2 prompts"),
    (([[5]], [[1, toys.MASK]]), "mask-token-given: answer 1"),
    (([[5]], [[1, 99]]), "token-outside-vocabulary: answer 1"),
    (([[5]], [[1] * 64]), "context-exceeded: the 64 of answer 1"),
    (([[]], [[1]]), "prompt-empty: prompt 1"),
])  # fmt: skip
def test_bad_prompts_and_answers_are_refused(given: tuple[Any, Any], message: str) -> None:
    with refused(message):
        toys.sampler(scheduler=MARGIN, stop="none").score(*given)
    with refused("answer-too-long: answer 1"):
        toys.sampler(scheduler=MARGIN, stop="none").score([[5]], [[1, 2, 3]], max_new_tokens=2)


def test_drawn_tokens_are_written_where_the_best_ones_are_judged() -> None:
    shared = {"stop": "none", "temperature": 1.0, "blocks": {"name": "fixed", "length": 4}}
    plain = toys.sampler(scheduler=MARGIN, **shared).generate(toys.PROMPTS, max_new_tokens=8)
    best = toys.sampler(scheduler=MARGIN, judge="best", **shared).generate(toys.PROMPTS, max_new_tokens=8)
    assert torch.equal(plain.tokens, best.tokens) and torch.equal(plain.trace.logprob, best.trace.logprob)
    rule = {"name": "threshold", "threshold": 0.5}
    judged = toys.sampler(scheduler=rule, judge="best", **shared).generate(toys.PROMPTS, max_new_tokens=8)
    drawn = toys.sampler(scheduler=rule, **shared).generate(toys.PROMPTS, max_new_tokens=8)
    assert not torch.equal(judged.step_map, drawn.step_map) and (judged.trace.logprob.exp() < 0.4).any()
    greedy = {**shared, "temperature": None}
    one, other = (
        toys.sampler(scheduler=rule, judge=it, **greedy).generate(toys.PROMPTS, max_new_tokens=8)
        for it in ("draw", "best")
    )
    assert torch.equal(one.tokens, other.tokens) and torch.equal(one.step_map, other.step_map)


@each(("options", "message"), [
    ({"scheduler": "remdm"}, "plugins-incompatible: scheduler=remdm"),
    ({"scheduler": "freedave"}, "plugins-incompatible: scheduler=freedave"),
    ({"stop": "prophet"}, "plugins-incompatible: stop=prophet"),
])  # fmt: skip
def test_the_best_tokens_are_not_judged_where_written_ones_are_compared(options: Settings, message: str) -> None:
    with refused(message):
        toys.sampler(judge="best", temperature=1.0, **options)
    with refused("choice-unknown: judge"):
        toys.sampler(judge="worst")


@each("heat", [0.5, 1.0, 3.0])
def test_positions_are_drawn_in_proportion_to_a_power_of_confidence(heat: float) -> None:
    toy, count = beds()[WAVES], 2000
    rule = {"name": "threshold", "threshold": 2.0, "position_temperature": heat}
    made = toy.sampler(scheduler=rule, judge="best").generate([[4]], max_new_tokens=4, samples=count)
    weight = toy.table[-1].exp().amax(1) ** (1 / heat)  # of the state that is all masks
    expected, first = weight / weight.sum(), (made.step_map == 0).double().mean(0)
    assert ((first - expected).abs() < 4 * (expected * (1 - expected) / count).sqrt()).all()


@each(
    "rule",
    [{"name": "factor", "factor": 0.1}, *({"name": it} for it in ("threshold", "dynamic", "credit", "slowfast"))],
)
def test_drawn_positions_keep_what_is_sure_and_commit_as_many(rule: Settings) -> None:
    shared = {"stop": "none", "temperature": 1.0, "blocks": {"name": "fixed", "length": 8}}
    plain, drawn = (
        toys.sampler(scheduler={**rule, "position_temperature": heat}, **shared).generate(
            toys.PROMPTS, max_new_tokens=8, max_steps=1
        )
        for heat in (0.0, 3.0)
    )
    assert torch.equal((plain.step_map == 0).sum(1), (drawn.step_map == 0).sum(1))
    assert not torch.equal(plain.step_map, drawn.step_map)


def test_drawn_positions_of_a_row_do_not_depend_on_the_batch() -> None:
    rule = {"name": "threshold", "threshold": 0.7, "position_temperature": 0.7}
    sampler = toys.sampler(scheduler=rule, temperature=1.0, judge="best", stop="none")
    together = sampler.generate(toys.PROMPTS, max_new_tokens=9, seed=5)
    flying = {one.index: one for one in sampler.generate_many(toys.PROMPTS, batch_size=2, max_new_tokens=9, seed=5)}
    for row, prompt in enumerate(toys.PROMPTS):
        alone = sampler.generate([prompt], max_new_tokens=9, seed=5 + row)
        flown = flying[row].trace
        assert flown is not None
        for step_map, tokens in ((alone.step_map[0], alone.tokens[0]), (flown.generated[0], flying[row].tokens)):
            assert torch.equal(step_map, together.step_map[row]) and torch.equal(tokens, together.tokens[row])


def test_drawn_positions_give_more_right_answers_at_equal_forwards() -> None:
    names, found = ["Ada", "Ben", "Cal", "Dan", "Eve"], dict[float, tuple[int, float]]()
    sampler = Sampler.from_pretrained("mini", temperature=1.0)
    for heat in (0.0, 1.0):
        rule = {"name": "threshold", "position_temperature": heat}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = sampler.generate("shuffle: " + ", ".join(names), samples=64, max_new_tokens=16, scheduler=rule)
        assert made.texts is not None
        right = {text for text in made.texts if sorted(text.split(", ")) == names}
        found[heat] = len(right), float(made.nfe.double().mean())
    assert found[0.0][0] < 30 and found[1.0][0] >= 36
    assert found[1.0][1] <= found[0.0][1]


def test_drawn_positions_want_confidence() -> None:
    with refused("options-conflict: scheduler.score=margin"):
        toys.sampler(scheduler={"name": "dynamic", "score": "margin", "position_temperature": 1.0})
    with refused("score-inexact: scheduler=threshold draws the positions"):
        beds()[WAVES].score(scheduler={"name": "threshold", "position_temperature": 1.0}, judge="best")


RECORDS = [json.loads(line) for line in (Path(__file__).parent / "data" / "likelihood.jsonl").read_text().splitlines()]
CHECKPOINTS = Path(__file__).parents[1] / "conformance" / "data"


@cache
def recorded(model: str, cfg_scale: float = 0.0) -> Sampler:
    """Return a sampler of a recorded model, in float32."""
    settings = {"name": str(CHECKPOINTS / model), "cfg_scale": cfg_scale}
    return Sampler.from_pretrained(settings, dtype="float32", stop="none", temperature=1.0)


@few("record", RECORDS, 3)
def test_scores_of_networks_are_the_recorded_ones(record: dict[str, Any]) -> None:
    prompts, answers = [record["prompt_ids"]], [record["answer_ids"]]
    for wanted in record["duel"]:
        rule: Settings = {"name": "threshold", "threshold": wanted.get("threshold", 0)}
        if wanted["rule"] != "threshold":
            score = {"peak": "confidence"}.get(wanted["rule"], wanted["rule"])
            rule = {"name": "fixed", "score": score, "steps": -(-len(answers[0]) // wanted["k"])}
        blocks = "full" if wanted["block"] is None else {"name": "fixed", "length": wanted["block"]}
        scores = recorded(record["model"]).score(prompts, answers, scheduler=rule, blocks=blocks, judge="best")
        assert scores.log_q[0].tolist() == pytest.approx(wanted["token_log_p"], abs=1e-4)
        assert scores.steps() == wanted["steps"] and scores.nfe.tolist() == [wanted["nfe"]]


@few("record", RECORDS, 3)
def test_the_bound_by_masks_is_the_recorded_one(record: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, size = [row for batch in record["monte_carlo"]["masked"] for row in batch], len(record["answer_ids"])
    drawn = torch.tensor([[at in row for at in range(size)] for row in rows])
    monkeypatch.setattr(likelihood, "masks", lambda *_: drawn)
    model = recorded(record["model"], record["monte_carlo"]["cfg_scale"]).denoiser
    found = likelihood.log_likelihood(model, record["prompt_ids"], record["answer_ids"], len(rows))
    assert found == pytest.approx(record["monte_carlo"]["value"], abs=1e-3)


@each("bed", list(NUMBERS))
def test_the_bound_by_masks_is_that_of_random_orders(bed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    toy, expected = beds()[bed], NUMBERS[bed]["masked"]
    size, model = toy.length, toy.sampler().denoiser
    subsets = [subset for subset in product([False, True], repeat=size) if any(subset)]
    often = lcm(*(comb(size, count) for count in range(1, size + 1)))  # each number of masks counts equally often
    drawn = torch.tensor([row for row in subsets for _ in range(often // comb(size, sum(row)))])
    monkeypatch.setattr(likelihood, "masks", lambda *_: drawn)
    for answer, bound, law in zip(NUMBERS[bed]["strings"], expected["elbo"], expected["random order"], strict=True):
        found = likelihood.log_likelihood(model, [toy.symbols + 1], answer, len(drawn), len(drawn))
        assert found == pytest.approx(bound, abs=1e-9) and found <= law + 1e-9


COUNT = 60_000
EXACT_RULES = ["margin k=1", "margin k=2", "entropy k=1", "position k=1", "entropy bound 0.5", "threshold 0.6"]
EXACT_RULES += ["peak k=1", "localleap 0.7/0.5 r1", "margin k=2 {'T': 0.7}"]


def sampled(toy: duel.Bed, **options: Any) -> Tensor:
    """Return the shares of all answers among many samples."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = toy.sampler(**options).generate([[toy.symbols + 1]], max_new_tokens=toy.length, samples=COUNT)
    place = toy.symbols ** torch.arange(toy.length - 1, -1, -1)
    return torch.bincount((made.tokens * place).sum(1), minlength=len(toy.answers)) / COUNT


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().sum() / 2)


def by_chance(law: Tensor) -> float:
    """Return the expected total variation between a law and as many samples of it."""
    return float((law * (1 - law) * 2 / (pi * COUNT)).sqrt().sum() / 2)


@few("rule", EXACT_RULES, 0)
def test_samples_follow_the_scored_law(rule: str) -> None:
    toy = beds()[WAVES]
    options = duel.settings(rule, toy.length)
    law = toy.score(**options).log_p.exp()
    assert distance(sampled(toy, **options), law) < 1.5 * by_chance(law)


@few("rule", ["peak k=1", "threshold 0.6", "localleap 0.7/0.5 r1"], 0)
def test_rules_that_judge_draws_do_not_follow_that_law(rule: str) -> None:
    toy, expected = beds()[WAVES], NUMBERS[WAVES]["drawn"][rule]
    options = duel.settings(rule, toy.length)
    law, shares = toy.score(**options).log_p.exp(), sampled(toy, **options | {"judge": "draw"})
    assert distance(shares, law) == pytest.approx(expected["TV(law, peak score)"], abs=0.01)
    for answer, log_p in zip(NUMBERS[WAVES]["strings"], expected["log law"], strict=True):
        chance = exp(log_p)
        found = float(shares[toy.answers.index(tuple(answer))])
        assert found == pytest.approx(chance, abs=4 * sqrt(chance / COUNT) + 1e-5)
