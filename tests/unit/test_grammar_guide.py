"""The guide on grammars inside the loop: no commit that cannot be completed, and what a row without one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_sampler import Sampler, config
from dllm_sampler.guides import Grammar
from dllm_sampler.guides.grammar import END, Language
from tests import toys
from tests.contract.cases import settings, toy_for
from tests.refusals import refused
from tests.sampling import crossed, sampled

# Nested lists of letters, in which the toys' tokens are pieces: "ab", "abc", "true" ...
LISTS = """
word = [a-j]+|[0-9]+|true|false
List -> [ ] | [ Items ]
Items -> Item | Item , Items
Item -> word | List
"""


@pytest.fixture
def grammar(tmp_path: Path) -> str:
    path = tmp_path / "lists.grammar"
    path.write_text(LISTS)
    return str(path)


def schedulers() -> list[str]:
    return [name for name in config.names("scheduler") if name not in ("apd", "discrete_ddim", "learn2pd", "svdd")]


FIRST = {one["name"]: one for one in reversed(settings("scheduler"))}
REFUSED = {"credit", "daedal", "entropy_renoise", "freedave", "linear_spec", "lopa"}
REFUSED |= {"rho_eos", "s2d2", "s2d2_editing", "ssd"}


@pytest.mark.parametrize("scheduler", sampled(schedulers(), lambda name: [name in REFUSED]))
def test_every_state_can_be_completed(scheduler: str, grammar: str) -> None:
    """Also a row that ends without a commit: what stands is the beginning of some answer."""
    options: dict[str, Any] = {"scheduler": scheduler, "guide": Grammar(grammar, tries=8), "stop": "prefix"}
    if scheduler in REFUSED:
        with refused("plugins-incompatible: guide=grammar"):
            toys.sampler(toy_for({"name": scheduler}), **options)
        return
    sampler = toys.sampler(**options)
    bound = next(one for one in sampler.plugins.guides if isinstance(one, Grammar))
    assert bound.language is not None
    if sampler.plugins.scheduler.traits.revises:  # an end token may be taken back, behind which anything stands
        plain = toys.sampler(**options | {"blocks": "full", "guide": Grammar("json")})
        other = next(one for one in plain.plugins.guides if isinstance(one, Grammar))
        assert other.language is not None
        for seed in (-5, 3, 11):
            for one in plain.stream([[12, 6], [3]], max_new_tokens=14, seed=seed):
                for tokens, masked in zip(one.tokens.tolist(), one.masked.tolist(), strict=True):
                    pairs = zip(tokens, masked, strict=True)
                    assert other.language.feasible([*(None if noise else other.word(t) for t, noise in pairs), END])
    last = None
    for last in sampler.stream([[1, 2, 3], [4], [9, 9], [17]], max_new_tokens=12):
        assert (last.tokens[last.masked] == toys.MASK).all()
        for tokens, masked in zip(last.tokens.tolist(), last.masked.tolist(), strict=True):
            words = [None if noise else bound.word(token) for token, noise in zip(tokens, masked, strict=True)]
            assert bound.language.feasible([*words, END]), (words, last.step)
    assert last is not None and last.result is not None
    found = last.result
    assert found.valid is not None and found.texts is not None
    for row, reason in enumerate(found.finish_reason):
        assert reason != "max_steps" and (reason == "constraint") == (not bool(found.complete[row]))
        assert bool(found.valid[row]) == bool(found.complete[row])
        if found.complete[row]:
            assert Language.parse(LISTS, "lists").accepts(found.texts[row].encode())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "temperature"), crossed(["none", "dual", "prefix", "elastic", "sparse"], [None, 1.0], together=0)
)
def test_rows_are_as_alone(cache: str, temperature: float | None, grammar: str) -> None:
    options: dict[str, Any] = {"guide": Grammar(grammar, tries=20), "cache": cache, "temperature": temperature}
    sampler = toys.sampler(scheduler={"name": "fixed", "steps": 5}, stop="prefix", **options)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [2, 2], [7]]
    together = sampler.generate(prompts, max_new_tokens=12)
    flying = list(sampler.generate_many(prompts, max_new_tokens=12, batch_size=2, order="given"))
    assert int(together.rejections.sum()) > 0
    for row, prompt in enumerate(prompts):
        alone = sampler.generate(prompt, max_new_tokens=12, seed=row)
        for tokens, count, reason, valid in (
            (together.tokens[row], together.rejections[row], together.finish_reason[row], together.valid),
            (flying[row].tokens, flying[row].rejections, flying[row].finish_reason, flying[row].valid),
        ):
            assert torch.equal(tokens, alone.tokens[0])
            assert int(count) == int(alone.rejections[0]) and reason == alone.finish_reason[0]
            assert valid is not None


def test_what_a_step_commits(grammar: str) -> None:
    """The surest of the scheduler's tokens that fit; where none does, the surest one of the block that does."""
    plain = toys.sampler(scheduler={"name": "fixed", "steps": 1}, stop="none", blocks="full")
    free = plain.generate([3], max_new_tokens=8)
    guided = toys.sampler(scheduler={"name": "fixed", "steps": 1}, stop="none", blocks="full", guide=Grammar(grammar))
    first = next(iter(guided.stream([3], max_new_tokens=8)))
    bound = next(one for one in guided.plugins.guides if isinstance(one, Grammar))
    assert bound.language is not None
    words: list[Any] = [None] * 8
    order = free.trace.logprob[0, free.trace.origin :].argsort(descending=True, stable=True).tolist()
    for at in order:
        token = int(free.tokens[0, at])
        trial = [*words[:at], bound.word(token), *words[at + 1 :], END]
        if bound.word(token) != b"" and bound.language.feasible(trial):
            words[at] = bound.word(token)
    kept = [at for at in range(8) if words[at] is not None]
    assert kept and kept == (~first.masked[0]).nonzero()[:, 0].tolist()
    assert [bound.word(int(first.tokens[0, at])) for at in kept] == [words[at] for at in kept]


def test_a_row_that_may_commit_nothing_ends(tmp_path: Path) -> None:
    path = tmp_path / "one.grammar"
    path.write_text("Text -> 'zz' | ( Text )\n")  # no token of the toys has a z or a bracket
    sampler = toys.sampler(scheduler="fixed", guide=Grammar(str(path), tries=5))
    found = sampler.generate([1, 2], max_new_tokens=6)
    assert found.finish_reason == ["constraint"] and found.complete.tolist() == [False]
    assert found.rejections.tolist() == [6] and found.nfe.tolist() == [1]  # the scheduler's own, then five
    assert found.valid is not None and not bool(found.valid.any())


def test_refusals(grammar: str, tmp_path: Path) -> None:
    for options, said in (
        ({"stop": "prophet"}, "plugins-incompatible: stop=prophet, guide=grammar"),
        ({"cache": "dkv_greedy", "scheduler": "random_order"}, "plugins-incompatible: guide=grammar"),
        ({"tokenizer": None}, "tokenizer-missing: guide=grammar"),
        ({"guide": [Grammar(grammar), {"name": "regex", "pattern": "a"}]}, "plugins-incompatible: guide=grammar"),
        ({"guide": {"name": "grammar"}}, "option-missing: guide=grammar"),
        ({"guide": {"name": "grammar", "grammar": "jsn"}}, "file-unreadable"),
        ({"guide": {"name": "grammar", "grammar": grammar, "tries": 0}}, "option-range: guide.grammar.tries"),
    ):
        with refused(said):
            toys.sampler(**{"guide": Grammar(grammar), "scheduler": {"name": "fixed", "steps": 4}, **options})


def test_the_shipped_model_writes_json() -> None:
    sampler = Sampler.from_pretrained("mini", device="cpu", guide={"name": "grammar", "grammar": "json"})
    found = sampler.generate(["json: age 95, name Julia, city Dublin", "copy: Max"], max_new_tokens=24)
    assert found.texts is not None and found.valid is not None
    assert found.texts[0] == '{"age": 95, "name": "Julia", "city": "Dublin"}' and int(found.rejections[0]) == 0
    assert bool(found.valid[0])


def test_a_bounded_grammar_chooses_tokens_together(grammar: str) -> None:
    """No text of that depth fails, where the same without a depth gets stuck."""
    options: dict[str, Any] = {"scheduler": {"name": "fixed", "steps": 2}, "stop": "prefix", "blocks": "full"}
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [2, 2], [7]]
    free = toys.sampler(guide=Grammar(grammar), **options).generate(prompts, max_new_tokens=12)
    assert "constraint" in free.finish_reason and int(free.rejections.sum()) > 0
    bounded = toys.sampler(guide=Grammar(grammar, depth=2), **options).generate(prompts, max_new_tokens=12)
    assert bounded.complete.all() and int(bounded.rejections.sum()) == 0
    assert bounded.valid is not None and bounded.valid.all() and bounded.texts is not None
    language = Language.parse(LISTS, "lists")
    for text in bounded.texts:
        assert language.accepts(text.encode())
        depth = [text[: at + 1].count("[") - text[: at + 1].count("]") for at in range(len(text))]
        assert max(depth) <= 3, "the outer list, and two inside"


def test_a_regular_grammar_needs_no_depth(tmp_path: Path) -> None:
    path = tmp_path / "letters.grammar"
    path.write_text("word = [a-j]+\nText -> word | word , Text\n")
    found = toys.sampler(guide=Grammar(str(path)), scheduler={"name": "fixed", "steps": 1}, blocks="full")
    assert any(guide.joint for guide in found.plugins.guides)
    answers = found.generate([[1, 2], [3]], max_new_tokens=8)
    assert answers.valid is not None and answers.valid.all() and answers.nfe.tolist() == [1, 1]
