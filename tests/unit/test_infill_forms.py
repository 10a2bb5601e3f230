"""Guides on the form of answers of which tokens are given: against every string there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.values import FREE, Canvas, Query
from dllm_sampler.engine.readout import read
from dllm_sampler.guides import TopK
from dllm_sampler.guides.forms.choice import posterior
from dllm_sampler.guides.forms.given import completable
from tests import toys
from tests.forms import END, LENGTH, MASK, PATTERNS, VOCAB, built, laid_out, ruled, strings
from tests.refusals import refused
from tests.sampling import each, few

# With `.*` what stands behind an end token is what stands before it: the end token is not the only one of its class.
FORMS = [*PATTERNS, "(?s).*", "(a|c).*", "a*"]


@pytest.fixture(autouse=True)
def cached(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLLM_SAMPLER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def fitting(pattern: str, given: Sequence[int]) -> list[tuple[int, ...]]:
    """Strings that have the given tokens, and no end token before them but a given one."""
    last = max((at for at, token in enumerate(given) if token != FREE), default=-1)
    return [
        one
        for one in strings(pattern)
        if all(
            token == known if known != FREE else token != END or at > last
            for at, (token, known) in enumerate(zip(one, given, strict=True))
        )
    ]


def canvas_of(given: Sequence[int], rows: int = 1) -> Canvas:
    free = [token == FREE for token in given]
    canvas = laid_out([free] * rows, [[max(0, token) for token in given]] * rows)
    last = max(at for at, token in enumerate(given, 1) if token != FREE)
    return toys.changed(canvas, frozen=~canvas.masked, given=torch.full((rows,), last))


def chosen(pattern: str, logits: Tensor, canvas: Canvas, query: Query, draws: bool = False) -> Tensor:
    rule = ruled(pattern, draws)
    vars(rule.guides[-1]).update(end_ids=(END,))
    return read(logits.clone(), canvas, HeadRows.every(query), rule).token


@few("pattern", FORMS)
def test_what_no_answer_can_meet(pattern: str) -> None:
    automaton = built(pattern)
    every = list(product([FREE, FREE, 0, 2, 3, 4, END], repeat=LENGTH))
    for given in Random(pattern).sample(every, 120):
        assert completable(automaton, given, (END,)) == bool(fitting(pattern, given)), given


@few("pattern", FORMS)
def test_the_best_string(pattern: str) -> None:
    """Also where a step does not ask about a gap: an answer does not end there."""
    random, generator, met = Random(pattern), torch.Generator().manual_seed(1), 0
    for _ in range(40):
        base = random.choice(strings(pattern))
        given = [random.choice([FREE, FREE if token == END else token]) for token in base]
        legal = fitting(pattern, given)
        free = [at for at in range(LENGTH) if given[at] == FREE]
        if not legal or len(free) in (0, LENGTH):
            continue
        met += 1
        asked = sorted(random.sample(free, random.randint(1, len(free))))
        canvas, logits = canvas_of(given), torch.randn(len(asked), VOCAB, generator=generator).double()
        logits[:, END] += 3
        found = chosen(pattern, logits, canvas, Query.at(canvas, torch.tensor([asked])))[0, 0].tolist()
        best = max(legal, key=lambda one: sum(float(logits[i, one[at]]) for i, at in enumerate(asked)))
        assert found == [best[at] for at in asked], (given, asked)
    assert met > 5


@few(
    ("pattern", "given", "asked"),
    [
        ("a*", [FREE, FREE, 0, FREE], [1, 3]),
        ("a*", [FREE, FREE, 0, FREE], [0]),
        ("(?s).*", [FREE, FREE, 3, FREE], [0, 1]),
    ],
)
def test_draws_have_the_law_of_the_model(pattern: str, given: list[int], asked: list[int]) -> None:
    """Given the form and the tokens; positions that are not asked about are uniform."""
    rows, logits = 4000, torch.randn(len(asked), VOCAB, generator=torch.Generator().manual_seed(3)).double()
    canvas = canvas_of(given, rows)
    query = Query.at(canvas, torch.tensor([asked]).expand(rows, -1))
    found = chosen(pattern, logits.repeat(rows, 1), canvas, query, draws=True)[:, 0]
    law: Counter[tuple[int, ...]] = Counter()
    for one in fitting(pattern, given):
        weight = torch.tensor(sum(float(logits[i, one[at]]) for i, at in enumerate(asked))).exp().item()
        law[tuple(one[at] for at in asked)] += weight  # type: ignore[assignment]
    total, counts = sum(law.values()), Counter(map(tuple, found.tolist()))
    assert set(counts) <= set(law)
    expected = {one: law[one] / total * rows for one in law if law[one] / total * rows >= 5}
    distance = sum((counts[one] - wanted) ** 2 / wanted for one, wanted in expected.items())
    freedom = torch.tensor(max(1, len(expected) - 1) / 2)
    assert torch.special.gammaincc(freedom, torch.tensor(distance / 2)) > 1e-3  # chi-square


def test_where_another_guide_leaves_nothing_that_fits() -> None:
    """Even then an answer does not end in its gap: it would be the shorter way."""
    canvas, rule = canvas_of([FREE, FREE, FREE, 0]), ruled("a*")
    vars(rule.guides[-1]).update(end_ids=(END,))
    logits = torch.zeros(3, VOCAB, dtype=torch.float64)
    logits[:, 1], logits[:, END] = 2, 5  # the best is no `a`
    query, rule = Query.at(canvas, torch.tensor([[0, 1, 2]])), rule._replace(guides=(TopK(k=1), *rule.guides))
    assert read(logits, canvas, HeadRows.every(query), rule).token.tolist() == [[[0, 0, 0]]]


@each("pattern", ["a*", "(ab|c)*", "(?s).*"])
def test_the_posterior(pattern: str) -> None:
    given, asked = [FREE, FREE, 3 if pattern != "a*" else 0, FREE], [0, 1]
    canvas = canvas_of(given)
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(5)).double()
    logits[:, MASK] = logits[:, END] = -torch.inf  # as the readout has it
    edges = ruled(pattern).guides[-1].edges  # type: ignore[attr-defined]
    query = Query.at(canvas, torch.tensor([asked]))
    law = posterior(edges, logits, canvas, HeadRows.every(query), MASK, (END,)).softmax(-1)
    wanted = torch.zeros(2, VOCAB, dtype=torch.float64)
    for one in fitting(pattern, given):
        weight = torch.tensor(sum(float(logits[i, one[at]]) for i, at in enumerate(asked))).exp()
        for i, at in enumerate(asked):
            wanted[i, one[at]] += weight
    torch.testing.assert_close(law, wanted / wanted.sum(1, keepdim=True))


@few(
    ("guide", "given", "fits"),
    [
        ({"name": "regex", "pattern": "(ab|cd)*x"}, [0, FREE, FREE, FREE, FREE], True),
        ({"name": "regex", "pattern": "[a-c]{2}x"}, [FREE, FREE, FREE, 5], False),
        ({"name": "choices", "choices": ["abc", "cd-xy"]}, [FREE, FREE, FREE, FREE, 0], False),
        ({"name": "grammar", "grammar": "json"}, [FREE, 24, FREE, FREE], True),
        ({"name": "grammar", "grammar": "json"}, [30, 30, FREE, 5], False),
    ],
)
def test_refused_at_the_start(guide: dict[str, Any], given: list[int], fits: bool, tmp_path: Path) -> None:
    """In a batch, and by the prompt's own error in flight."""
    sampler = toys.sampler(guide=guide)
    if fits:
        result = sampler.generate([[1]], max_new_tokens=len(given), pinned=given)
        assert result.valid is not None and (result.valid.all() or result.finish_reason == ["constraint"])
        return
    with refused("form-impossible: guide="):
        sampler.generate([[1]], max_new_tokens=len(given), pinned=given)
    (answer,) = sampler.generate_many([[1]], max_new_tokens=len(given), pinned=given, on_error="yield")
    assert answer.finish_reason == "refused" and answer.error is not None and "given tokens" in answer.error
