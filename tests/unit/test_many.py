"""`Sampler.generate_many`: order, reasons, refusals."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_sampler import Infill, Result, Sampler
from dllm_sampler.core.values import FREE
from dllm_sampler.engine.in_flight import Request
from dllm_sampler.generation.many import Many, in_order
from dllm_sampler.result import FIELDS, Answer
from dllm_sampler.training.trajectory import Trajectories
from tests import toys
from tests.refusals import refused
from tests.sampling import each, few

WORDS = ["copy: Ada, Ben", "reverse: Cal", "Dan", "copy: Eve"]


@pytest.fixture(scope="module")
def words(checkpoint: Path) -> Sampler:
    return Sampler.from_pretrained(str(checkpoint), device="cpu", stop="none", scheduler="threshold")


def test_texts_and_order(words: Sampler) -> None:
    full = words.generate(WORDS, max_new_tokens=16)
    finished = list(words.generate_many(WORDS, batch_size=3, max_new_tokens=16))
    given = list(words.generate_many(WORDS, batch_size=3, max_new_tokens=16, order="given"))
    assert [answer.index for answer in given] == [0, 1, 2, 3]
    assert [answer.text for answer in given] == full.texts
    assert sorted(answer.text or "" for answer in finished) == sorted(full.texts or [])


def test_no_request_begins_twice(words: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, begun = Many.schedule, list[Request]()

    def again(self: Many) -> list[Request]:
        begun.extend(schedule(self))
        return begun[-1:]

    monkeypatch.setattr(Many, "schedule", again)
    with pytest.raises(AssertionError):
        list(words.generate_many(WORDS, batch_size=3, max_new_tokens=16))
    answer = Answer(1, 0, "end", torch.zeros(0))
    with pytest.raises(AssertionError):
        list(in_order([answer, answer], samples=1))


def test_reasons(words: Sampler) -> None:
    full = words.generate(WORDS, max_new_tokens=16)
    assert full.texts is not None
    stop = full.texts[0].split()[2]
    for batching in ("in_flight", "static"):
        options: dict[str, Any] = {"batch_size": 2, "max_new_tokens": 16, "order": "given", "batching": batching}
        stopped = list(words.generate_many(WORDS, stop_strings=stop, **options))
        assert stopped[0].finish_reason == "stop_string" and stop not in (stopped[0].text or stop)
        plain = list(words.generate_many(WORDS, **options))
        for row, answer in enumerate(plain):
            ended = 1 in full.tokens[row, : int(full.lengths[row])].tolist()
            assert answer.finish_reason == ("end" if ended else "length") and answer.complete
        words.max_steps = 1
        try:
            cut = list(words.generate_many(WORDS, **options))
        finally:
            words.max_steps = None
        assert {answer.finish_reason for answer in cut if answer.nfe < full.nfe[answer.index]} == {"max_steps"}


@few("batching", ["in_flight", "static"])
def test_a_length_for_each_prompt(words: Sampler, batching: Any) -> None:
    lengths = [16, 3, 9, 5]
    found = list(words.generate_many(WORDS, max_new_tokens=lengths, batch_size=3, order="given", batching=batching))
    assert [len(answer.tokens) for answer in found] == lengths
    assert [answer.text for answer in found] == [
        (words.generate(prompt, max_new_tokens=length).texts or [""])[0]
        for prompt, length in zip(WORDS, lengths, strict=True)
    ]
    for numbers, said in (
        ([16, 3], "length-mismatch: max_new_tokens, prompt 3"),
        ([16, 3, 9, 5, 8], "length-mismatch: max_new_tokens"),
    ):
        with refused("length-mismatch: max_new_tokens"):
            words.generate_many(WORDS, max_new_tokens=numbers)
        stream = words.generate_many(iter(WORDS), max_new_tokens=numbers, batching=batching)
        got = list(islice(stream, min(len(numbers), len(WORDS))))
        assert len(got) == min(len(numbers), len(WORDS)), "what was in flight is not lost"
        with refused(said):
            next(stream)
    with refused("length-mismatch"):
        words.generate_many(WORDS, max_new_tokens=8, seed=[1, 2])
    with refused("option-range: max_new_tokens[1]=0"):
        words.generate_many(WORDS, max_new_tokens=[4, 0, 4, 4])


@each("batching", ["in_flight", "static"])
def test_progress(words: Sampler, batching: Any) -> None:
    told: list[tuple[int, int, int]] = []
    list(
        words.generate_many(
            WORDS, max_new_tokens=8, batch_size=2, batching=batching, progress=lambda *now: told.append(now)
        )
    )
    forwards, committed, wanted = zip(*told, strict=True)
    assert list(forwards) == list(range(1, len(told) + 1))
    assert all(done <= of for done, of in zip(committed, wanted, strict=True))
    assert 0 < committed[0] < committed[-1] == wanted[-1] == 4 * 8 and wanted[0] == 2 * 8


def test_a_prompt_that_is_refused_has_its_number(words: Sampler) -> None:
    prompts = ["Ada", "", "Ben", [999], "Cal " * 60]
    found = list(words.generate_many(prompts, batch_size=2, max_new_tokens=8, on_error="yield", order="given"))
    assert [answer.finish_reason == "refused" for answer in found] == [False, True, False, True, True]
    for answer, said in (
        (found[1], "prompt 2 is empty"),
        (found[3], "prompt 4 has token id 999"),
        (found[4], "prompt 5 has 60 tokens, too many with max_new_tokens=8"),
    ):
        assert said in (answer.error or "") and answer.length == 0 and not answer.complete
    short = list(words.generate_many(["Ada", "Ben Cal Dan Eve"], max_new_tokens=8, max_length=10, on_error="yield"))
    assert [answer.error for answer in short if answer.error] == [
        "prompt 2 has 4 tokens, too many for max_length=10 with max_new_tokens=8. Raise max_length."
    ]

    got: list[int] = []
    for places in (1, 3):
        stream = words.generate_many(prompts, batch_size=places, max_new_tokens=8)
        got.append(next(stream).index)
        with refused("prompt-empty: prompt 2"):
            next(stream)
    assert got == [0, 0], "what was in flight is not lost"


@each("batching", ["in_flight", "static"])
def test_refusals_without_end_are_handed_out_one_by_one(words: Sampler, batching: Any) -> None:
    read: list[int] = []

    def prompts() -> Iterator[str]:
        for number in range(10**6):
            read.append(number)
            yield "" if number else "Ada"

    stream = words.generate_many(prompts(), max_new_tokens=8, on_error="yield", batching=batching)
    for answer in islice(stream, 20):
        assert answer.finish_reason == "refused" or answer.index == 0
    assert len(read) <= 21


def test_a_source_that_fails_loses_no_answer(words: Sampler) -> None:
    def prompts() -> Iterator[str]:
        yield "Ada"
        raise OSError("the disk is gone")

    stream = words.generate_many(prompts(), max_new_tokens=8)
    assert next(stream).index == 0
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)


def test_one_prompt_is_not_several() -> None:
    with refused("prompt-type: prompt 1, generate_many"):
        list(toys.sampler().generate_many([5, 11], max_new_tokens=8))  # pyright: ignore[reportArgumentType]


def test_a_place_is_no_larger_than_the_context() -> None:
    spy = toys.Spy(toys.denoiser())  # with room for 64
    sampler = Sampler(spy, stop="none")
    prompts = [[5] * length for length in (3, 47, 50)]
    assert len(list(sampler.generate_many(prompts, max_new_tokens=14, batch_size=1))) == 3
    assert max(canvas.length for canvas, _, _ in spy.calls) == 64


@each("context", [{}, {"max_length": 10}])
def test_answers_that_say_themselves_how_long_they_are(context: dict[str, Any]) -> None:
    """The default of `max_new_tokens` is longer than this model's context, and so is every answer that asks for it."""
    sampler, own = toys.sampler(), Infill([5, FREE, FREE, 3], [7])
    (found,) = sampler.generate_many([own], **context)
    assert found.tokens.shape == (4,) and found.tokens[-1] == 3
    with refused("context-exceeded: max_new_tokens=128"):
        sampler.generate_many([own, [5, 11]], **context)


@each(
    ("options", "sentence"),
    [
        ({"batch_size": 0}, "option-range: batch_size"),
        ({"samples": 0}, "option-range: samples"),
        ({"max_length": "long"}, "option-range: max_length, 'long'"),
        ({"max_new_tokens": 64}, "context-exceeded: max_new_tokens=64"),
        ({"order": "best"}, "choice-unknown: 'best'"),
        ({"on_error": "skip"}, "choice-unknown: on_error, 'skip'"),
        ({"batching": "dynamic"}, "choice-unknown: in_flight, 'dynamic'"),
        ({"seed": ["x"]}, "option-type: seed"),
        ({"stop_strings": [""]}, "option-type: stop_strings"),
        ({"max_length": 8}, "context-exceeded: max_length=8, max_new_tokens"),
        ({"prompts": "Ada"}, "prompt-type: generate_many"),
        ({"prompts": torch.tensor(3)}, "prompt-type: generate_many"),
    ],
)
def test_bad_arguments(options: dict[str, Any], sentence: str) -> None:
    given: dict[str, Any] = {"prompts": [[5, 11]], "max_new_tokens": 8, **options}
    with refused(sentence):
        toys.sampler().generate_many(**given)


def test_answers_that_begin_together_need_as_many_places() -> None:
    with refused("option-range: batch_size=2, samples=3"):
        toys.sampler("causal", cache="block_causal").generate_many([[5]], batch_size=2, samples=3, max_new_tokens=8)


def test_stacked_answers_are_the_batch() -> None:
    sampler = toys.sampler(scheduler={"name": "threshold", "threshold": 0.5}, temperature=1.0, entropy=True)
    batch = sampler.generate(toys.PROMPTS, max_new_tokens=9, samples=2, seed=5)
    answers = list(sampler.generate_many(toys.PROMPTS, max_new_tokens=9, samples=2, seed=5, batch_size=3))
    stacked = Result.stack(reversed(answers))
    for name in ("tokens", "lengths", "nfe", "complete"):
        assert torch.equal(getattr(stacked, name), getattr(batch, name)), name
    for name in (*FIELDS, "entropy"):
        torch.testing.assert_close(getattr(stacked.trace, name), getattr(batch.trace, name), msg=name)
    assert stacked.trace.origin == batch.trace.origin
    with refused("answers-missing"):
        Result.stack([])


def test_stacked_answers_of_several_lengths_are_scored_as_they_were_sampled() -> None:
    sampler = toys.sampler(scheduler={"name": "threshold", "threshold": 0.5}, temperature=1.0, cache="none")
    lengths = [9, 4, 12, 7, 9]
    stacked = Result.stack(sampler.generate_many(toys.PROMPTS, max_new_tokens=lengths, seed=5))
    assert stacked.tokens.shape == (len(lengths), 12)
    trace, spec = stacked.trace, sampler.denoiser.spec
    assert trace.seen(0).sum(1).tolist() == [len(p) + n for p, n in zip(toys.PROMPTS, lengths, strict=True)]
    view = Trajectories(trace, spec)
    scored = view.log_probabilities(sampler.denoiser.transformer)  # pyright: ignore[reportAttributeAccessIssue]
    learnt = (trace.step_map >= 0) & (torch.arange(12 + trace.origin) < trace.origin + stacked.lengths[:, None])
    torch.testing.assert_close(scored[learnt], trace.logprob[learnt])


def forwards(sampler: Sampler, prompts: Any, **options: Any) -> int:
    """Count the forwards of a call."""
    made: list[int] = []
    list(sampler.generate_many(prompts, progress=lambda step, *_: made.append(step), **options))
    return len(made)


def test_refused_prompts_leave_no_lane_free() -> None:
    sampler = toys.sampler(scheduler="fixed", stop="none")
    prompts, bad = [[5, 6], [7], [8, 9]], [[99], []] * 3
    options: dict[str, Any] = {"max_new_tokens": [8, 2, 6], "batch_size": 2}
    wanted = forwards(sampler, iter(prompts), **options)
    options["max_new_tokens"] = [8, 2, *[4] * len(bad), 6]
    mixed = [*prompts[:2], *bad, prompts[2]]
    assert forwards(sampler, iter(mixed), on_error="yield", **options) == wanted == 8


@each("given", [list, tuple])
@each("max_length", [None, 20])
def test_an_infill_takes_the_first_lane_that_is_free(given: Any, max_length: int | None) -> None:
    sampler = toys.sampler(scheduler="fixed", stop="none")
    prompts = given([[5, 6], [7], Infill([FREE, 6, FREE, FREE, FREE], [8])])
    options: dict[str, Any] = {"max_new_tokens": [8, 2, 1], "batch_size": 2, "max_length": max_length}
    assert forwards(sampler, prompts, **options) == 8, "2 and 4 forwards beside the first answer's 8"
