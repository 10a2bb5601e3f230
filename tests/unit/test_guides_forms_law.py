"""Choices from the law of each token given the form, by classes of tokens and by windows of an answer."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dllm_sampler import Sampler
from dllm_sampler.core.packing import HeadRows, stretch
from dllm_sampler.core.statistics import measure
from dllm_sampler.core.values import Canvas, Query
from dllm_sampler.engine.readout import read
from dllm_sampler.guides import EndTokens, Temperature, TopK
from dllm_sampler.guides.forms import automaton, edges, tops, window
from dllm_sampler.guides.forms.automaton import Automaton
from dllm_sampler.guides.forms.edges import joined
from tests import toys
from tests.forms import END, LENGTH, MASK, PATTERNS, VOCAB, built, laid_out, law, ruled, strings
from tests.sampling import crossed, each

# Confidence from the law of each token given the form: against every string there is


@pytest.mark.parametrize(
    ("pattern", "temperature"),
    crossed([*PATTERNS, "(?s).*"], [None, Temperature(0.6), Temperature(0.6, measured=True)], together=0),
)
def test_the_posterior_is_that_of_all_strings(pattern: str, temperature: Temperature | None) -> None:
    """All statistics: some masks are not asked about, some that stands is; rows end early; ids beyond the tokenizer."""
    generator, vocab, needs = torch.Generator().manual_seed(6), 9, {"margin", "gap", "entropy", "current", "logits"}
    rule = ruled(pattern, posterior=True, vocab=vocab)
    guides = rule.guides if temperature is None else (temperature, *rule.guides)
    rule = rule._replace(guides=guides, needs=frozenset(needs))
    legal = [one for one in strings(pattern) if one[3] == 4]
    for witness, size in itertools.product(legal[:: max(1, len(legal) // 5)], (3, 4)):
        free = torch.rand(2, LENGTH, generator=generator) < 0.7
        free[:, 1], free[:, size:] = True, False
        canvas = laid_out(free.tolist(), [witness, witness])
        canvas = replace(canvas, end=torch.tensor([size, size]))
        columns = torch.tensor([[1, 2, LENGTH], [0, 1, 2]])
        ids = canvas.ids.gather(1, columns)[:, None].repeat(1, 2, 1)
        ids[1, 1, 1] = witness[1]  # another hypothesis
        query = replace(Query.at(canvas, columns), ids=ids)
        logits = 2 * torch.randn(12, vocab, generator=generator).double()
        found = read(logits.clone(), canvas, HeadRows.every(query), rule)
        assert found.logits is not None
        cold = logits / 0.6 if temperature is not None and temperature.measured else logits
        cold[:, MASK] = -torch.inf
        for row, candidate in itertools.product(range(2), range(2)):
            there = [at for at in range(3) if int(columns[row, at]) < size]
            places = columns[row, there].tolist()
            stands = torch.where(canvas.masked[row, :LENGTH], MASK, torch.tensor(witness))
            stands[places] = ids[row, candidate, there]
            own = law(pattern, stands, cold.view(2, 2, 3, vocab)[row, candidate, there], places, size)
            torch.testing.assert_close(found.logits[row, candidate, there].softmax(-1), own)
            token, current = found.token[row, candidate, there], ids[row, candidate, there]
            wanted = measure(own.log(), token, current, frozenset(needs))
            for name in ("confidence", "margin", "gap", "entropy", "current"):
                torch.testing.assert_close(getattr(found, name)[row, candidate, there], getattr(wanted, name), msg=name)


@each("ban", [END, 0])
def test_a_posterior_where_all_that_fits_is_forbidden(ban: int) -> None:
    """Then nothing else is possible."""
    rule = ruled("a", posterior=True)
    rule = rule._replace(guides=(EndTokens("ban", (ban, 3, 4)), *rule.guides))
    canvas = laid_out([[True] * LENGTH], [[0] * LENGTH])
    found = read(torch.randn(4, VOCAB).double(), canvas, HeadRows.every(Query.window(canvas)), rule)
    assert built("a").accepted(found.token[0, 0].tolist()) and bool(found.confidence.isfinite().all())


def test_tokens_that_stand_or_fall_together_tie() -> None:
    """Exactly, so that no rounding ranks them; what the form decides has confidence 1."""
    guide = {"name": "regex", "pattern": "(abcdefgh|bcdefgha)ij", "posterior": True}
    sampler = toys.sampler("llada", scheduler={"name": "fixed", "steps": 1}, guide=guide)
    found = sampler.generate([[at, 3] for at in range(20)], max_new_tokens=10).trace.logprob[:, 2:]  # of the answer
    linked = found[:, 3:6]  # there is no token that joins any of these with another letter
    assert torch.equal(linked, linked[:, :1].expand(-1, 3)) and bool((linked < 0).any())
    assert bool((found[:, 6:8] == 0).all())


def test_a_posterior_commits_what_the_form_decides() -> None:
    """The model would not write these names, and is sure of nothing else."""
    prompts, nfe = ["shuffle: Eve, Tom, Zoe, Amy", "copy: Max"], []
    for posterior in (False, True):
        guide = {"name": "choices", "choices": ["Ada, Ben, Cal", "Ada, Ben, Dan"], "posterior": posterior}
        sampler = Sampler.from_pretrained("mini", device="cpu", scheduler="threshold", guide=guide)
        found = sampler.generate(prompts, max_new_tokens=12)
        assert found.texts is not None and {text[:8] for text in found.texts} == {"Ada, Ben"}
        nfe.append(int(found.nfe.sum()))
    assert nfe[1] * 2 <= nfe[0]


# What matters of each class of tokens, and where another guide took all that fit


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("pattern", "main"),
    [("[a-m]{5}n?", True), ("[a-j]{5}[k-n]?", False), ("(?s).*", True)],
    ids=["main", "none", "all"],
)
def test_the_best_of_each_class(pattern: str, main: bool, dtype: torch.dtype) -> None:
    """Classes of one token and of several tiles; among equal logits the first token, also where all are forbidden."""
    generator = torch.Generator().manual_seed(5)
    words = [bytes(word) for size in (1, 2) for word in itertools.product(b"abcdefghijklmn,", repeat=size)]
    listed = joined((automaton.build_all([pattern], [*words, b"", b""], len(words) + 2, (240,), 241)[0],))
    assert (listed.main >= 0) == main
    assert int(listed.sizes[: listed.stays].exp().max()) >= edges.TILE - 15 and int(listed.sizes.exp().min()) == 0
    logits = torch.randn(9, len(listed.classes), generator=generator).to(dtype)
    logits[3:6] = logits[3:6].round()
    logits[6:] = torch.where(listed.classes == max(0, listed.main), -torch.inf, logits[6:])
    logits[4, 7] = -0.0  # among zeros
    assert not len(tops.Tops.of(listed, logits[:0]).free) and not len(tops.masses(listed, logits[:0])[0])
    found, (classes, weight) = tops.Tops.of(listed, logits), tops.masses(listed, logits)
    assert torch.equal(found.free, logits.argmax(1))
    assert torch.equal(found.classes[:, : listed.stays], classes[:, : listed.stays])
    assert (weight[:, listed.stays :] == -torch.inf).all(), "no token is of these"
    for kind in range(listed.stays):
        own = logits.masked_fill(listed.classes != kind, -torch.inf)
        first = torch.where((own == own.amax(1, keepdim=True)) & (listed.classes == kind), 1, 0).argmax(1)
        assert torch.equal(found.tokens[:, kind], first)
        torch.testing.assert_close(weight[:, kind], own.double().logsumexp(1), rtol=0, atol=1e-6)
    factors, least = torch.randn(9, len(listed.sizes)).to(weight.dtype), torch.full((9, 1), -0.5, dtype=logits.dtype)
    factors = factors.to(torch.promote_types(dtype, torch.float32))
    expected = logits.clamp(min=-0.5) + factors[:, listed.classes]
    assert torch.equal(tops.weighted(listed, logits, least, factors), expected)


def test_sums_of_many_equal_numbers() -> None:
    """In float32 alone they are 2e-5 off."""
    vocab = 2**18
    classes = torch.arange(vocab) % 3
    moves = torch.tensor([[0, 1, 1], [1, 1, 1]])
    listed = joined((Automaton(moves, torch.tensor([True, False]), classes, 0, 1),))
    logits = torch.full((1, vocab), -0.3)
    logits[0, 0] = 0
    found = tops.masses(listed, logits)[1][0, 0]
    expected = logits[0, classes == 0].double().logsumexp(0)
    assert abs(float(found - expected)) < 1e-6


def test_draws_where_no_token_is_left_that_fits() -> None:
    """The model alone decides between the tokens that `top_k` took away; where one that fits is left, it is taken."""
    rows, chances = 3000, torch.tensor([8.0, 0, 0, 0, 0, 0, 0]).repeat(LENGTH, 1)
    chances[:2, [1, 3]] = torch.tensor([0.5, 1])
    chances[2, [1, 3]] = torch.tensor([9.0, 8])  # b is left
    canvas = laid_out([[True] * LENGTH] * rows, [[0] * LENGTH] * rows)
    rule = ruled("(b{2}|c{2})(b|c){2}", draws=True)
    rule = rule._replace(guides=(TopK(1), *rule.guides))
    query = Query.window(canvas)
    found = read(chances.repeat(rows, 1), canvas, HeadRows.every(query), rule).token[:, 0]
    assert bool((found[:, 2] == 1).all()) and set(found.unique().tolist()) == {1, 3}
    assert torch.equal(found[:, 0], found[:, 1])
    for at, likely in ((0, 1 / (1 + math.e)), (3, 0.5)):
        share = float((found[:, at] == 1).double().mean())
        assert abs(share - likely) < 4 * (likely * (1 - likely) / rows) ** 0.5


@each(("pattern", "best"), [("(b{2}|c{2})(b|c){2}", [3, 3, 3, 1]), ("(b|c){4}", [1, 3, 3, 1])])
def test_the_best_where_no_token_is_left_that_fits(pattern: str, best: list[int]) -> None:
    canvas, logits = laid_out([[True] * LENGTH], [[0] * LENGTH]), torch.zeros(LENGTH, VOCAB)
    logits[torch.arange(LENGTH), torch.tensor([1, 3, 3, 1])] = torch.tensor([1, 1.5, 1, 1])
    rule = ruled(pattern)
    rule = rule._replace(guides=(EndTokens("ban", (1, 3)), *rule.guides))
    found = read(logits, canvas, HeadRows.every(Query.window(canvas)), rule).token
    assert found[0, 0].tolist() == best


# The decided beginning of an answer, and its end that nothing is asked about, are not gone through place by place


LISTED = ("(ab|c)*", "a?b{2}c?", "(a|b|c){3,}")
COLUMNS = torch.arange(LENGTH + 1)


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the windows that are made."""
    found, of = [], window.Window.of

    def noted(*args: object) -> window.Window:
        made = of(*args)  # pyright: ignore[reportArgumentType]
        found.append(made.width)
        return made

    monkeypatch.setattr(window.Window, "of", noted)
    return found


def question(canvas: Canvas, generator: torch.Generator) -> Query:
    """Some of the masks up to a random column, under two hypotheses: what stands, and tokens without a text."""
    last = torch.randint(LENGTH, (4, 1), generator=generator)
    asked = canvas.masked & (last >= COLUMNS) & (torch.rand(4, LENGTH + 1, generator=generator) < 0.8)
    query = Query.at(canvas, torch.where(asked, COLUMNS, LENGTH).sort(1).values)
    other = torch.where(torch.rand(query.positions.shape, generator=generator) < 0.3, 4, query.ids[:, 0])
    return replace(query, ids=torch.stack([query.ids[:, 0], torch.where(query.positions < LENGTH, other, MASK)], 1))


def answered(
    rule: object, logits: Tensor, canvas: Canvas, query: Query, stretch: int | None = None
) -> tuple[Tensor, Tensor]:
    head_rows = replace(HeadRows.every(query), stretch=stretch)
    found = read(logits.clone(), canvas, head_rows, rule)  # pyright: ignore[reportArgumentType]
    there = (query.positions < LENGTH)[:, None].expand_as(query.ids)
    assert found.logits is not None
    return found.token[there], found.logits[there]


def situations(given: bool) -> Iterator[tuple[Canvas, Query, Tensor]]:
    """Several forms, rows that end early, masks that nothing is asked about; logits of which some are equal."""
    generator = torch.Generator().manual_seed(3)
    for number in range(20):
        forms, first = torch.randint(3, (4,), generator=generator), torch.randint(LENGTH, (4, 1), generator=generator)
        legal = [[one for one in strings(LISTED[form]) if one[3] == 4] for form in forms]
        free = (COLUMNS[:-1] >= first) | (torch.rand(4, LENGTH, generator=generator) < 0.2)
        canvas = laid_out(free.tolist(), [one[int(torch.randint(len(one), (), generator=generator))] for one in legal])
        end = torch.randint(3, LENGTH + 1, (4,), generator=generator)
        canvas = toys.changed(canvas, form=forms, end=end, masked=canvas.masked & (end[:, None] > COLUMNS))
        canvas = toys.changed(canvas, given=(~free[:, 0]).long() if given else None)
        query, logits = question(canvas, generator), torch.randn(8 * (LENGTH + 1), VOCAB, generator=generator).double()
        yield canvas, query, logits.round() if number % 2 else logits


def told(canvas: Canvas, query: Query) -> int:
    """How wide the window must be."""
    begin, over = stretch(canvas, query.positions)
    return max(1, int((over - begin).max()))


@pytest.mark.parametrize(("draws", "given"), crossed([False, True], [False, True], together=0))
def test_a_window_changes_no_bit(draws: bool, given: bool, widths: list[int]) -> None:
    rule = ruled(LISTED, draws, posterior=True)._replace(needs=frozenset({"logits"}))
    for canvas, query, logits in situations(given):
        found = answered(rule, logits, canvas, query, told(canvas, query))
        for one, other in zip(answered(rule, logits, canvas, query), found, strict=True):
            assert torch.equal(one, other)
    assert set(widths) == {1, 2, 3, LENGTH}


def test_a_generation_goes_through_one_block_at_a_time(widths: list[int]) -> None:
    it = toys.sampler(scheduler={"name": "fixed", "steps": 8}, guide="regex", stop="none")
    it.generate(toys.PROMPTS, max_new_tokens=32, block_length=8)
    assert len(widths) == 8 and max(widths) == 8
