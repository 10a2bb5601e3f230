"""The statistics of the logits, against a float64 softmax written out."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sampler import Query, Readout
from dllm_sampler.core import statistics
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.engine import readout
from dllm_sampler.guides import EndTokens, Temperature
from tests import toys
from tests.sampling import each

NEEDS = frozenset({"margin", "entropy", "logsumexp", "current", "probabilities", "logits"})
logits_or_nothing = st.one_of(st.floats(-30, 30), st.just(-math.inf))


def measured(logits: torch.Tensor, needs: frozenset[str] = NEEDS, current: int = 0) -> Readout:
    token = logits.argmax(-1)
    return statistics.measure(logits.clone(), token, torch.full_like(token, current), needs)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(logits_or_nothing, min_size=3, max_size=9), st.floats(-30, 30), st.integers(0, 3))
def test_against_a_plain_softmax(values, finite, current):
    logits = torch.tensor([[[finite, *values]]], dtype=torch.float64)
    found = measured(logits, current=current)
    assert found.margin is not None and found.entropy is not None and found.logits is not None
    assert found.logsumexp is not None and found.current is not None
    p = [math.exp(v - max(logits.flatten().tolist())) for v in logits.flatten().tolist()]
    total = math.fsum(p)
    p = [v / total for v in p]
    best, second = sorted(p, reverse=True)[:2]
    logsumexp = math.log(total) + max(logits.flatten().tolist())
    assert float(found.confidence) == pytest.approx(best, rel=1e-12)
    assert float(found.margin) == pytest.approx(best - second, rel=1e-9, abs=1e-12)
    assert float(found.entropy) == pytest.approx(-math.fsum(v * math.log(v) for v in p if v), rel=1e-9, abs=1e-10)
    assert float(found.logsumexp) == pytest.approx(logsumexp, rel=1e-12, abs=1e-12)
    assert float(found.current) == pytest.approx(float(logits[0, 0, current]) - logsumexp, rel=1e-12, abs=1e-12)
    assert torch.equal(found.logits, logits)
    torch.testing.assert_close(found.probabilities, logits.softmax(-1))


@each("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_confidences_close_to_one_stay_apart(dtype):
    """1e-9, 1e-12 and 1e-15 below one: float32 would call them all 1."""
    for gap in (20.0, 28.0, 34.0):
        logits = torch.tensor([[[gap, 0.0, -4.0]]]).to(dtype)
        exact = math.exp(-gap) + math.exp(-gap - 4)
        below = 1 - float(measured(logits, frozenset()).confidence)
        assert below == pytest.approx(exact, rel=0.01 if dtype != torch.float64 else 1e-3, abs=2.3e-16)
        assert below > 0


def test_near_certainty_what_stands_is_measured_by_the_rest():
    """Of a difference of logarithms in float32 nothing would be left."""
    for gap in (10.0, 14.0, 17.0):
        logits = torch.tensor([[[gap, 0.0, -4.0]]])
        stands = measured(logits, frozenset({"current"})).current
        assert stands is not None
        assert float(stands) == pytest.approx(-math.exp(-gap) - math.exp(-gap - 4), rel=1e-4)


def test_only_what_is_needed_is_there():
    logits = torch.randn(1, 1, 2, 5, generator=torch.Generator().manual_seed(0))
    for needs in (frozenset(), *({name} for name in NEEDS)):
        found = measured(logits, frozenset(needs))
        assert {name for name in NEEDS if getattr(found, name) is not None} == set(needs)
        assert torch.equal(found.confidence, measured(logits).confidence)


def test_a_certain_token():
    found = measured(torch.tensor([[[3.0, -math.inf, -math.inf]]]))
    assert found.margin is not None and found.entropy is not None
    assert (float(found.confidence), float(found.margin), float(found.entropy)) == (1.0, 1.0, 0.0)


@each("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_the_confidence(bad):
    assert math.isnan(float(measured(torch.tensor([[[1.0, bad, 0.0]]]), frozenset()).confidence))
    assert math.isnan(float(measured(torch.full((1, 1, 3), -math.inf), frozenset()).confidence))


def read(logits: torch.Tensor, *guides, compat: bool = False, needs: frozenset[str] = frozenset()) -> Readout:
    canvas = toys.canvas(torch.ones(logits.shape[0], logits.shape[2], dtype=torch.bool))
    head_rows = HeadRows.every(Query.masks(canvas))
    spec = toys.denoiser().spec
    bound = tuple(guide.bind(toys.context(spec)) for guide in guides)
    rows = logits.flatten(0, 2)
    return readout.read(rows.clone(), canvas, head_rows, readout.Rule(spec, bound, needs, compat))


def test_the_mask_token_is_left_out_of_choice_and_confidence():
    logits = torch.zeros(1, 1, 2, toys.VOCAB, dtype=torch.float64)
    logits[..., toys.MASK], logits[..., 5] = 9.0, 1.0
    assert read(logits).token.flatten().tolist() == [5, 5]
    assert float(read(logits).confidence[0, 0, 0]) == pytest.approx(math.e / (math.e + toys.VOCAB - 2))
    assert read(logits, compat=True).token.flatten().tolist() == [toys.MASK] * 2


def test_a_tempered_choice_is_measured_on_the_models_own_distribution_unless_told():
    logits = torch.randn(3, 1, 6, toys.VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
    logits[..., toys.MASK] = -math.inf
    own, tempered = read(logits, Temperature(2.0)), read(logits, Temperature(2.0, measured=True))
    assert torch.equal(own.token, tempered.token)
    assert (own.token != logits.argmax(-1)).any()
    for found, temperature in ((own, 1.0), (tempered, 2.0)):
        p = (logits / temperature).softmax(-1).gather(-1, found.token[..., None])[..., 0]
        torch.testing.assert_close(found.confidence, p)


def test_deferred_end_tokens_are_chosen_at_confidence_zero():
    logits = torch.zeros(1, 1, 1, toys.VOCAB, dtype=torch.float64)
    logits[..., toys.EOS] = 5.0
    found = read(logits, EndTokens("defer"), needs=frozenset({"entropy", "margin", "current"}))
    assert int(found.token) == toys.EOS
    assert float(found.confidence) == 0.0
    banned = read(logits, EndTokens("ban"))
    assert int(banned.token) != toys.EOS
    assert float(banned.confidence) == pytest.approx(1 / (toys.VOCAB - 2))


@each("cache", [1, 12, 2**17])  # a row at a time, some with a remainder, all at once
def test_tables_worked_on_in_pieces_are_the_same_table(monkeypatch, cache):
    monkeypatch.setattr(statistics, "CACHE", cache)
    now, then = torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    now[1] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    then[2, 0] = 0
    index = torch.tensor([4, 2, 2, 0, 1])
    expected = (now * ((now + 1e-12).log() - (then[index] + 1e-12).log())).sum(-1)
    torch.testing.assert_close(statistics.divergence(now, then, index), expected)
    torch.testing.assert_close(statistics.entropy(now), torch.special.entr(now).sum(-1))
    assert float(statistics.entropy(now.view(1, 5, 4))[0, 1]) == 0.0
    now[3] = math.nan
    assert statistics.entropy(now).isnan().tolist() == [False, False, False, True, False]


@each("dtype", [torch.float32, torch.float64])
@each("size", [3, 7, 10, 64, 130])
def test_one_law_ties_whatever_is_drawn(dtype, size):
    """Rounding must not rank positions by the token they drew: draws committed together would be correlated."""
    law = torch.full((size,), -4.0).to(dtype)
    law[:-1] = -math.log(size)  # one token is rarer
    logits = law.expand(1, 1, size, size).contiguous()
    token = torch.arange(size).expand(1, 1, size)  # each position draws another
    found = statistics.measure(logits, token, token, frozenset({"entropy"}))
    assert found.entropy is not None
    assert len(set(found.entropy.flatten().tolist())) == 1
    assert len(set(found.confidence.flatten()[:-1].tolist())) == 1
