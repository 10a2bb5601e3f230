"""Choosing positions and tokens: ties, fillers, scores that are no numbers, and ways that were made fast."""

import math
from concurrent.futures import ThreadPoolExecutor
from time import sleep
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sampler.core import density, select, statistics
from tests import toys
from tests.sampling import each

# Numbers that are made once


def test_numbers_are_there_for_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share them, and a stream does not wait for the one on which they were made."""
    made, waits, arange = [], [], torch.arange
    event = SimpleNamespace(synchronize=lambda: waits.append(len(made)))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(record_event=lambda: event))
    monkeypatch.setattr(torch, "arange", lambda size, device: made.append(size) or sleep(0.02) or arange(size))
    device = torch.device("cuda", 77)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda size: select.arange(size, device), (33, 48, 64, 50)))
    assert made == [64] and waits == [1]
    assert len({one.untyped_storage().data_ptr() for one in found}) == 1


def test_what_samplers_of_one_process_share_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequencies belong to a model, which several samplers may have, and a bell to nobody."""
    waits, cpu = [], torch.device("cpu")
    monkeypatch.setattr(select, "wait_for", waits.append)
    network = toys.transformer()
    for _ in range(2):
        network.rope(torch.arange(4)[None], torch.float32)
        density.bell(1.2345, 7, cpu)
    assert waits == [cpu, cpu]


# Choosing positions: ties, fillers and scores that are no numbers


quick = settings(max_examples=50, deadline=None, derandomize=True)
scores = st.sampled_from([-math.inf, -1.0, 0.0, 0.25, 0.5, 1.0, math.inf])  # few values: ties everywhere


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[float]], list[list[bool]], list[int]]:
    rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 7))

    def table(kind):
        return draw(st.lists(st.lists(kind, min_size=width, max_size=width), min_size=rows, max_size=rows))

    counts = draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))
    return table(scores), table(st.booleans()), counts


def by_hand(score: list[float], eligible: list[bool]) -> list[int]:
    """Eligible positions, best first, the lower position first among equals."""
    return sorted((i for i, ok in enumerate(eligible) if ok), key=lambda i: (-score[i], i))


@quick
@given(problems())
def test_top_and_rank(problem):
    score, eligible, count = problem
    s, e, n = torch.tensor(score), torch.tensor(eligible), torch.tensor(count)
    chosen, place = select.top(s, e, n), select.rank(s, e)
    for row in range(len(score)):
        order = by_hand(score[row], eligible[row])
        assert chosen[row].nonzero()[:, 0].tolist() == sorted(order[: count[row]])
        assert [int(place[row, i]) for i in order] == list(range(len(order)))
        assert sorted(place[row].tolist()) == list(range(len(score[row])))


@quick
@given(problems(), scores)
def test_at_least_one(problem, bar):
    score, eligible, _ = problem
    s, e = torch.tensor(score), torch.tensor(eligible)
    commit = select.at_least_one(s >= bar, s, e)
    for row in range(len(score)):
        order = by_hand(score[row], eligible[row])
        expected = {i for i in order if score[row][i] >= bar} | set(order[:1])
        assert set(commit[row].nonzero()[:, 0].tolist()) == expected


@quick
@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=4), st.integers(1, 7))
def test_columns(rows, width):
    chosen = torch.tensor([[*row, False] for row in rows])
    found = select.columns(chosen, width)
    for row, columns in zip(rows, found.tolist(), strict=True):
        members = [i for i, inside in enumerate(row) if inside][:width]
        assert columns == members + [6] * (width - len(members))


@each("bad", [math.nan, -math.inf])
def test_a_row_without_a_score_spoils_no_other(bad):
    score = torch.tensor([[bad, bad, bad], [0.1, 0.9, 0.9]], dtype=torch.float64)
    eligible = torch.tensor([[False, True, True], [True, True, True]])
    one = torch.tensor([1, 1])
    assert select.top(score, eligible, one).tolist() == [[False, True, False], [False, True, False]]
    assert select.at_least_one(score > 2, score, eligible)[1].tolist() == [False, True, False]


def test_an_impossible_candidate_is_still_better_than_none():
    score, eligible = torch.tensor([[0.5, -math.inf, 0.7]]), torch.tensor([[False, True, False]])
    assert select.at_least_one(score > 0, score, eligible).tolist() == [[False, True, False]]
    assert select.top(score, eligible, torch.tensor([3])).tolist() == [[False, True, False]]


def test_nothing_eligible_chooses_nothing():
    score, none = torch.tensor([[0.5, 0.7]]), torch.tensor([[False, False]])
    assert not select.at_least_one(score > 0, score, none).any()
    assert not select.top(score, none, torch.tensor([2])).any()


# What was made fast gives what the plain way gives


@each("dtype", [torch.float32, torch.bfloat16, torch.float64])
@each("words", [7, 96, 101, 254, 256, 33000])  # with and without a rest; wide tiles
def test_the_best_token_is_torchs_argmax(dtype, words, monkeypatch):
    monkeypatch.setattr(statistics, "MANY", 0)
    for seed in range(16):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randint(0, 4, (2, 3, words), generator=generator).to(dtype)  # ties everywhere
        if seed % 3 == 0:
            logits[0, 1, seed % words] = math.nan
        if seed % 5 == 0:
            logits[1] = -math.inf
        assert torch.equal(statistics.argmax(logits), logits.argmax(-1))


def test_bfloat16_logits_are_measured_in_float32():
    logits = torch.randn(1, 1, 4, 1280, generator=torch.Generator().manual_seed(0)).bfloat16()
    token, needs = logits.argmax(-1), frozenset({"entropy", "logsumexp", "margin"})
    found = statistics.measure(logits.clone(), token, token, needs)
    exact = statistics.measure(logits.double(), token, token, needs)
    for name in ("confidence", *needs):
        torch.testing.assert_close(getattr(found, name), getattr(exact, name), rtol=1e-6, atol=1e-9)
