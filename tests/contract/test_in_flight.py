"""In flight: a row joins a generation that runs, and its answer is the one that it has alone."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sampler import Answer, Sampler
from dllm_sampler.cache.none import NoCache
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.kernels.backend import FallbackWarning
from dllm_sampler.schedulers.threshold import Threshold
from tests import toys
from tests.contract.cases import CASES, TOKENS, Case, thinned
from tests.sampling import crossed, sampled
from tests.taped import pair

JOINS = [case for case in CASES if case.facts["joins"]]
PROMPTS = [toys.PROMPTS[row] for row in (0, 1, 2, 3, 1, 4, 0)]


def assert_same(sampler: Sampler, answers: list[Answer], tokens: int | list[int], seed: int, samples: int = 1) -> None:
    """Each answer against its prompt alone."""
    for answer in answers:
        own = seed + answer.index * samples + answer.sample
        wanted = tokens if isinstance(tokens, int) else tokens[answer.index]
        alone = sampler.generate([PROMPTS[answer.index]], max_new_tokens=wanted, seed=own)
        assert answer.trace is not None
        assert torch.equal(answer.tokens, alone.tokens[0]), answer.index
        assert torch.equal(answer.trace.generated, alone.trace.generated), answer.index
        assert (answer.nfe, answer.length) == (int(alone.nfe[0]), int(alone.lengths[0])), answer.index
        assert answer.complete == bool(alone.complete[0])
        if samples == 1:  # else the prompt may have been computed once for several
            assert torch.equal(answer.trace.rows, alone.trace.rows), answer.index


def check_recorded(case: Case, **options: Any) -> None:
    """Check that answers of `TOKENS` tokens among shorter ones are those that were recorded."""
    random = Random(case.id)
    rows, lengths = random.sample(range(len(toys.PROMPTS)), 4), [8, 9, TOKENS, TOKENS]
    answers = toys.sampler(case.toy, **case.plugins).generate_many(
        [toys.PROMPTS[row] for row in rows],
        max_new_tokens=lengths,
        seed=[toys.SEEDS[row] for row in rows],
        order="given",
        **options,
    )
    for index, answer in enumerate(answers):
        if lengths[index] == TOKENS:
            record, row, trace = case.record, rows[index], answer.trace
            assert trace is not None
            assert (answer.nfe, answer.length) == (record["forwards"][row], record["lengths"][row])
            assert answer.tokens[: answer.length].tolist() == record["tokens"][row][: answer.length]
            assert trace.generated[0].tolist() == record["steps"][row]
            assert (int(trace.rows), answer.complete) == (record["computed"][row], record["complete"][row])


@pytest.mark.parametrize("case", thinned(JOINS, "cache", "traits"))
def test_an_answer_is_that_of_its_batch(case: Case) -> None:
    """It takes the place of another, and other lengths are beside it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)  # they join
        check_recorded(case, batch_size=Random(case.id).choice([2, 3]))


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    case=st.sampled_from(JOINS),
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, toys.EOT), min_size=1, max_size=9), st.integers(8, 15)),
        min_size=1,
        max_size=9,
    ),
    places=st.integers(1, 16),
    samples=st.integers(1, 3),
    order=st.sampled_from(["finished", "given"]),
    taken=st.integers(1, 30),
    options=st.fixed_dictionaries({"max_steps": st.sampled_from([None, 3])}),
)
def test_whatever_comes_together(
    case: Case,
    prompts: list[tuple[list[int], int]],
    places: int,
    samples: int,
    order: Any,
    taken: int,
    options: dict[str, Any],
) -> None:
    """Any prompts and lengths, places, orders, and a consumer that leaves early."""
    texts, lengths = [list(row) for row in zip(*prompts, strict=True)]
    sampler = toys.sampler(case.toy, **case.plugins, **options)
    stream = sampler.generate_many(
        texts,
        max_new_tokens=lengths,
        batch_size=max(places, samples),
        samples=samples,
        order=order,
        seed=5,
        on_error="yield",
    )
    found = list(islice(stream, taken))
    assert len(found) == min(taken, len(texts) * samples)
    for answer in [one for one in found if one.error is None][-3:]:
        own = 5 + answer.index * samples + answer.sample
        alone = sampler.generate([texts[answer.index]], max_new_tokens=lengths[answer.index], seed=own)
        assert torch.equal(answer.tokens, alone.tokens[0]) and answer.nfe == int(alone.nfe[0])
        assert answer.trace is not None and torch.equal(answer.trace.generated, alone.trace.generated)


def test_all_but_a_few_can_join() -> None:
    """What cannot join says so, and its prompts are answered batch by batch."""
    others = {one for case in CASES if case not in JOINS for one in (case.scheduler["name"], case.cache["name"])}
    assert {"apd", "dllm"} <= others
    assert {case.scheduler["name"] for case in CASES} - {case.scheduler["name"] for case in JOINS} == {"apd"}
    apart = {case.cache["name"] for case in CASES if case.cache["name"] != "sliding"}
    assert apart - {case.cache["name"] for case in JOINS} == {"dllm"}
    sampler = toys.sampler(cache="dllm")
    with pytest.warns(FallbackWarning, match="batch by batch: cache=dllm has numbers for the batch"):
        answers = list(sampler.generate_many(PROMPTS[:4], batch_size=3, max_new_tokens=8))
    assert_same(sampler, answers[1:3], 8, 0)


@pytest.mark.parametrize("case", thinned([case for case in CASES if not case.facts["joins"]], "cache", "traits"))
def test_batches_of_answers_of_several_lengths(case: Case) -> None:
    check_recorded(case, batch_size=2, batching="static")


@dataclass
class Noting(NoCache):
    """Keeps what holds for the batch as a whole, and forgets to say so."""

    kept: Any = field(init=False, default=None)

    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        self.kept = {int: 1, bool: True, str: "warm"}[type(self.kept)]


@dataclass(frozen=True)
class Warm(Threshold):
    """The same in a carry."""

    def init(self, canvas: Canvas) -> Any:
        return {"first": True}

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Any) -> tuple[Edit, Any]:
        return super().tell(canvas, query, readout, None)[0], {"first": False}


@dataclass(frozen=True)
class Total(Threshold):
    """A number of all rows, as a tensor."""

    def init(self, canvas: Canvas) -> Any:
        return torch.zeros((), dtype=torch.long)

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Any) -> tuple[Edit, Any]:
        return super().tell(canvas, query, readout, None)[0], carry + 1


@pytest.mark.parametrize("kept", [0, False, "cold", "carry", "total"])
def test_what_holds_for_the_whole_batch_is_noticed(kept: Any) -> None:
    plugins: dict[str, Any] = {"carry": {"scheduler": Warm()}, "total": {"scheduler": Total()}}.get(kept, {})
    if not plugins:
        made = type("Of", (Noting,), {"kept": kept})
        plugins = {"cache": made()}
    sampler = toys.sampler(**plugins)
    with pytest.warns(
        FallbackWarning, match=r"batch by batch: (cache\.kept is|carry\.first is False|carry is a tensor)"
    ):
        answers = list(sampler.generate_many(PROMPTS[:4], batch_size=2, max_new_tokens=8))
    assert sorted(answer.index for answer in answers) == list(range(4)), "rows in flight ended"
    assert_same(sampler, answers[:2], 8, 0)


@pytest.mark.parametrize(("max_steps", "seed"), crossed([2, 5], range(8), together=0))
def test_rows_that_are_given_up_disturb_no_other(max_steps: int, seed: int) -> None:
    """What they leave in their places is no part of anything."""
    sampler = toys.sampler(
        "causal", scheduler="hierarchical", max_steps=max_steps, blocks={"name": "fixed", "length": 16}, temperature=2.0
    )
    lengths = [24, 4, 3, 17, 9, 30, 12]
    answers = list(sampler.generate_many(PROMPTS, max_new_tokens=lengths, batch_size=3, seed=seed))
    assert_same(sampler, answers, lengths, seed)


@pytest.mark.parametrize(
    "plugins",
    sampled(
        [
            {"scheduler": "random_order", "cache": "dkv_greedy", "blocks": {"name": "ascending", "count": 3}},
            {"scheduler": "fixed", "cache": {"name": "sparse", "delay": 1}, "blocks": {"name": "fixed", "length": 16}},
            {"scheduler": {"name": "apd", "verifier": toys.verifier(), "mixture_weight": 0.2}, "blocks": "full"},
            {"scheduler": "threshold", "cache": {"name": "dllm", "response_every": 2}},
        ],
        lambda plugins: ["blocks" in plugins],
    ),
)
def test_a_short_answer_among_long_ones(plugins: dict[str, Any]) -> None:
    """With the longest prompt, too: sizes of the batch are not the row's own."""
    sampler = toys.sampler(**plugins)
    lengths = [24, 8, 11, 16, 8]  # prompt 1 is the longest
    answers = list(sampler.generate_many(PROMPTS[:5], max_new_tokens=lengths, batch_size=4, seed=2))
    assert_same(sampler, [answer for answer in answers if lengths[answer.index] < 16], lengths, 2)


def test_a_length_that_a_plug_in_refuses_costs_no_other_prompt() -> None:
    sampler = toys.sampler(blocks={"name": "ascending", "count": 3})
    for batching in ("in_flight", "static"):
        stream = sampler.generate_many(
            PROMPTS[:3], max_new_tokens=[14, 4, 14], batch_size=2, on_error="yield", order="given", batching=batching
        )
        assert [answer.finish_reason == "refused" for answer in stream] == [False, True, False]


@pytest.mark.parametrize(("toy", "cache"), [("causal", "block_causal"), ("llada", "dual")])
def test_several_answers_to_a_prompt(toy: str, cache: str) -> None:
    """Where a prompt is computed once for all of its answers, these begin together."""
    sampler = toys.sampler(toy, cache=cache, temperature=1.0)
    answers = list(sampler.generate_many(PROMPTS[:4], batch_size=5, samples=2, max_new_tokens=8, seed=3))
    assert len(answers) == 8
    assert_same(sampler, answers[-4:], 8, 3, samples=2)


def test_recorded_steps_stay_good_when_places_change() -> None:
    plain, it, engine = pair(cache="dual", scheduler={"name": "threshold", "threshold": 0.3})
    options: dict[str, Any] = {"batch_size": 2, "max_new_tokens": 8, "max_length": 31}
    list(it.generate_many(PROMPTS[:5], **options))
    assert_same(plain, list(it.generate_many(PROMPTS[:5], **options))[-2:], 8, 0)
    recorded = {key for buffers in engine.free for key in buffers.steps}
    before = engine.replays
    list(it.generate_many(PROMPTS[:5], **options))
    assert {key for buffers in engine.free for key in buffers.steps} == recorded, "nothing was recorded again"
    assert len(engine.free) == 1 and engine.replays - before > 4


@pytest.mark.parametrize(("batching", "cache"), crossed(["in_flight", "static"], ["dual", "elastic"]))
def test_a_row_that_is_not_finite_ends_alone(batching: Any, cache: str) -> None:
    """A token whose embedding is NaN: what the row leaves behind in its place spoils no later one."""
    model = toys.transformer()
    model.embed.weight.data[22] = torch.nan  # the model's answers do not have it
    sampler = Sampler(toys.wrapped(model), cache=cache, stop="none", scheduler="fixed")
    answers = list(sampler.generate_many(PROMPTS, batch_size=3, max_new_tokens=8, batching=batching))
    bad = [answer for answer in answers if answer.finish_reason == "not_finite"]
    assert sorted(answer.index for answer in bad) == [1, 4]  # the prompts with token 22
    assert all((answer.nfe, answer.length) == (1, 0) and not answer.complete for answer in bad)
    assert_same(sampler, [answer for answer in answers if answer not in bad][1:4], 8, 0)


def test_places_are_seldom_free() -> None:
    """Forwards of the whole set, against what full batches would take."""
    counting = toys.Spy(toys.denoiser())
    sampler = Sampler(counting, scheduler={"name": "threshold", "threshold": 0.5}, stop="none")
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(60)]
    answers = list(sampler.generate_many(prompts, batch_size=6, max_new_tokens=12))
    forwards = [answer.nfe for answer in answers]
    assert len(counting.calls) <= 1.1 * sum(forwards) / 6 + max(forwards)
    assert len(set(forwards)) > 2


def test_reading_and_stopping_early() -> None:
    """No prompt is read before there is a place for it, and a consumer that leaves ends the work."""
    read: list[int] = []

    def prompts() -> Iterator[list[int]]:
        for number in range(10**6):
            read.append(number)
            yield PROMPTS[number % len(PROMPTS)]

    sampler = toys.sampler(scheduler={"name": "threshold", "threshold": 0.5})
    spy = toys.Spy(sampler.denoiser)
    sampler = Sampler(spy, scheduler={"name": "threshold", "threshold": 0.5}, stop="none")
    stream = sampler.generate_many(prompts(), batch_size=3, max_new_tokens=8)
    assert not read
    for count, _ in enumerate(stream, 1):
        assert len(read) <= count + 3
        if count == 9:
            break
    made = len(spy.calls)
    stream.close()  # pyright: ignore[reportAttributeAccessIssue] - a generator
    assert len(spy.calls) == made


def test_a_consumer_that_goes_away_leaves_nothing_running() -> None:
    """What a flight holds is free again, however its consumer left."""
    _, it, engine = pair(cache="dual", scheduler={"name": "threshold", "threshold": 0.3})

    def flown() -> Iterator[Answer]:
        return it.generate_many(PROMPTS, batch_size=2, max_new_tokens=8, max_length=31, order="given")

    def raises() -> None:
        for _ in flown():
            raise KeyboardInterrupt

    next(flown())  # and the stream is garbage
    assert len(engine.free) == 1
    with pytest.raises(KeyboardInterrupt):
        raises()
    assert len(engine.free) == 1


@pytest.mark.slow
def test_ten_thousand_prompts_take_the_memory_of_a_few() -> None:
    sampler = toys.sampler(cache="dual", scheduler={"name": "threshold", "threshold": 0.5})
    random = Random(0)
    lengths = [random.randint(1, 14) for _ in range(10_000)]
    prompts = ([random.randrange(20) for _ in range(random.randint(1, 9))] for _ in lengths)
    stream = sampler.generate_many(prompts, batch_size=16, max_new_tokens=lengths, max_length=23)
    pages = Path("/proc/self/statm")
    if not pages.exists():
        pytest.skip("memory of a process is read where Linux has it")
    seen: set[int] = set()
    early = 0
    for answer in stream:
        seen.add(answer.index)
        if len(seen) == 1_000:
            early = int(pages.read_text().split()[1])
    assert seen == set(range(10_000))
    assert int(pages.read_text().split()[1]) <= 1.02 * early


def test_places_grow() -> None:
    """A prompt that is too long for the places waits until those in flight have ended."""
    long = [[token % 30 for token in range(size)] for size in (3, 40, 5, 2)]
    model = replace(toys.transformer().config, max_positions=200)
    sampler = Sampler(toys.wrapped(type(toys.transformer())(model)), stop="none", cache="dual")
    answers = list(sampler.generate_many(iter(long), batch_size=2, max_new_tokens=12, order="given"))
    for answer, prompt in zip(answers, long, strict=True):
        alone = sampler.generate([prompt], max_new_tokens=12, seed=answer.index)
        assert torch.equal(answer.tokens, alone.tokens[0]) and answer.nfe == int(alone.nfe[0])
