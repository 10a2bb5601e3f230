"""What matters of each class of tokens, and where another guide took all that fit."""

import itertools
import math

import pytest
import torch

from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.values import Query
from dllm_sampler.engine.readout import read
from dllm_sampler.guides import EndTokens, TopK
from dllm_sampler.guides.forms import automaton, edges, tops
from dllm_sampler.guides.forms.automaton import Automaton
from dllm_sampler.guides.forms.edges import joined
from tests.forms import LENGTH, VOCAB, laid_out, ruled
from tests.sampling import each


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
    listed = joined((automaton.build(pattern, [*words, b"", b""], len(words) + 2, (240,), 241),))
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
