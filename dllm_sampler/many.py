"""Answers for any number of prompts, as they finish: behind `Sampler.generate_many`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from dllm_sampler import prompts as texts
from dllm_sampler.batch import Reader
from dllm_sampler.core.checks import check_count
from dllm_sampler.core.protocols import Prefills
from dllm_sampler.core.trace import Trace
from dllm_sampler.core.values import Canvas
from dllm_sampler.engine import layout
from dllm_sampler.engine.admission import Ended, Flight, Row, obstacle
from dllm_sampler.engine.plugins import Plugins
from dllm_sampler.errors import NotFiniteError, UserError
from dllm_sampler.kernels.backend import warn
from dllm_sampler.result import Answer, FinishReason, Result

if TYPE_CHECKING:
    from dllm_sampler.sampler import Sampler

STEP = 64  # columns by which the capacity of a place grows


@dataclass
class Waiting:
    """A prompt that was read, and the answers that it still wants."""

    index: int
    ids: list[int]
    samples: deque[int]


@dataclass
class Stream:
    """Reads prompts when places are free, and turns rows that end into answers: the arguments of `generate_many`."""

    sampler: Sampler
    plugins: Plugins
    prompts: Iterator[Any]
    places: int
    new_tokens: int
    seed: int
    stops: tuple[str, ...]
    samples: int
    max_length: int | None
    on_error: Literal["raise", "yield"]
    capacity: int = 0  # columns of a place
    read: int = 0  # prompts
    waiting: Waiting | None = None
    refused: deque[Answer] = field(default_factory=deque)
    failure: Exception | None = None  # of a prompt, or of what prompts come from; raised behind the answers in flight
    flight: Flight | None = None

    @property
    def reader(self) -> Reader:
        """What reads answers out of a flight."""
        return Reader(self.sampler.denoiser.spec, self.sampler.tokenizer, self.stops)

    @property
    def group(self) -> int:
        """How many answers begin together: all of a prompt's, where it is computed once for them."""
        return self.samples if isinstance(self.plugins.cache, Prefills) else 1

    def in_flight(self) -> Iterator[Answer]:
        """Answers as they finish: a row that ends gives its place to the next."""
        try:
            while True:
                self._fill()
                if self.refused:
                    while self.refused:
                        yield self.refused.popleft()
                    continue
                if self.flight is None or len(self.flight.free) == self.places:
                    break
                ended = self.flight.step()
                if ended is not None:
                    yield from self._answers(ended)
        finally:
            if self.flight is not None:
                self.flight.close()
        if self.failure is not None:
            raise self.failure

    def in_batches(self) -> Iterator[Answer]:
        """Answers batch by batch."""
        while True:
            batch: list[tuple[Waiting, int]] = []
            while len(batch) < self.places:
                while self.refused:
                    yield self.refused.popleft()
                waiting = self._next()
                if waiting is not None:
                    batch.append((waiting, waiting.samples.popleft()))
                elif not self.refused:
                    break
            if not batch:
                break
            yield from self._batch(batch)
        if self.failure is not None:
            raise self.failure

    def _fill(self) -> None:
        """Give free places to the next prompts; to those of a new flight where a prompt is too long for this one's."""
        free = self.places if self.flight is None else len(self.flight.free)
        rows: list[Row] = []
        # Refusals are handed out before more is read: there may be any number of them.
        while len(rows) + self.group <= free and (waiting := self._next()) is not None and not self.refused:
            size = len(waiting.ids) + self.new_tokens
            if size > self.capacity:
                if self.flight is not None:
                    if rows or free < self.places:
                        break  # until the rows in flight have ended
                    self.flight.close()
                    self.flight = None
                size = max(size, self.capacity * 5 // 4)
                room = self.sampler.denoiser.spec.max_positions
                self.capacity = self.max_length or min(-(-size // STEP) * STEP, room)
            for _ in range(self.group):
                sample = waiting.samples.popleft()
                rows.append(Row(waiting.ids, self._seed(waiting.index, sample), (waiting.index, sample)))
        if rows:
            self.flight = self.flight or self._flight()
            self.flight.admit(rows, self.group)

    def _next(self) -> Waiting | None:
        """The prompt whose answers are wanted next; None: there is none left."""
        while self.waiting is None or not self.waiting.samples:
            if self.failure is not None or self.refused:
                return None
            try:
                prompt = next(self.prompts)
            except StopIteration:
                return None
            except Exception as error:  # the caller's own: raised again, when the answers in flight are out
                self.failure = error
                return None
            self.read += 1
            try:
                ids = self._ids(prompt)
            except UserError as error:
                if self.on_error == "raise":
                    self.failure = error
                nothing = torch.full((self.new_tokens,), self.sampler.denoiser.spec.pad_id)
                for sample in range(self.samples if self.on_error == "yield" else 0):
                    self.refused.append(Answer(self.read - 1, sample, "refused", nothing, error=str(error)))
                continue
            self.waiting = Waiting(self.read - 1, ids, deque(range(self.samples)))
        return self.waiting

    def _ids(self, prompt: Any) -> list[int]:
        spec = self.sampler.denoiser.spec
        if isinstance(prompt, int | Mapping):
            raise UserError(
                f"prompt {self.read} is {prompt!r}, and not a prompt: generate_many takes a list of prompts, generate"
                " one as well"
            )
        (ids,) = texts.encode([prompt], self.sampler.tokenizer, spec, self.new_tokens, self.read)
        if self.max_length is not None and len(ids) + self.new_tokens > self.max_length:
            raise UserError(
                f"prompt {self.read} has {len(ids)} tokens and max_new_tokens is {self.new_tokens}, together more than"
                f" max_length={self.max_length}"
            )
        return ids

    def _seed(self, index: int, sample: int) -> int:
        return self.seed + index * self.samples + sample

    def _flight(self) -> Flight:
        sampler, plugins = self.sampler, self.plugins
        engine, spec, length = sampler.engine(plugins), sampler.denoiser.spec, self.capacity

        def lay_out(rows: Sequence[Row]) -> Canvas:
            ids, seeds = [row.prompt for row in rows], [row.seed for row in rows]
            noise, blocks = sampler.noise, plugins.blocks
            return layout.canvas(ids, self.new_tokens, seeds, spec, blocks, noise, True, engine.multiple, length)

        bound = sampler.max_steps or plugins.scheduler.bound(self.new_tokens)
        watch = partial(self.reader.stop, engine) if self.stops else None
        return Flight(engine, lay_out, self.places, bound, watch)

    def _answers(self, ended: Ended) -> Iterator[Answer]:
        result = self.reader.result(ended.canvas, ended.recorder)
        for at, (row, end) in enumerate(ended.rows):
            yield self._of(result, at, row.tag, failed=end == "not_finite")

    def _batch(self, batch: list[tuple[Waiting, int]]) -> Iterator[Answer]:
        """The answers of one batch. One that is not finite leaves it, and the others are made again."""
        while batch:
            ids, seeds = zip(*((one.ids, self._seed(one.index, sample)) for one, sample in batch), strict=True)
            tags = [(one.index, sample) for one, sample in batch]
            commits = self.sampler.commits(self.plugins, ids, self.new_tokens, seeds, self.stops, 0)
            try:
                *_, last = commits
                assert last.result is not None
            except NotFiniteError as error:
                bad = {row - 1 for row in error.rows}
                for row in sorted(bad):
                    yield self._of(error.result, row, tags[row], failed=True)
                batch = [one for row, one in enumerate(batch) if row not in bad]
                continue
            for row, tag in enumerate(tags):
                yield self._of(last.result, row, tag)
            return

    def _of(self, result: Result, row: int, tag: tuple[int, int], failed: bool = False) -> Answer:
        """The answer in one row of a result."""
        tokens, length = result.tokens[row], int(result.lengths[row])
        text = None if result.texts is None else result.texts[row]
        reason: FinishReason = "length"
        if failed:
            reason = "not_finite"
        elif not result.complete[row]:
            reason = "max_steps"
        elif self.stops and any(one in self._uncut(tokens[:length]) for one in self.stops):
            reason = "stop_string"
        elif self.sampler.denoiser.spec.eos_id in tokens[:length].tolist():
            reason = "end"
        return Answer(*tag, reason, tokens, length, text, int(result.nfe[row]), unpadded(result.trace.row(row)))

    def _uncut(self, tokens: Tensor) -> str:
        end = self.sampler.denoiser.spec.eos_id
        ids = [token for token in tokens.tolist() if token != end]
        return texts.decode([ids], self.sampler.tokenizer, ())[0]


def answers(
    sampler: Sampler,
    plugins: Plugins,
    prompts: Iterable[Any],
    *,
    places: int,
    new_tokens: int,
    seed: int,
    stops: str | Sequence[str],
    samples: int,
    order: str,
    max_length: int | None,
    on_error: Literal["raise", "yield"],
    batching: str,
) -> Iterator[Answer]:
    """See `Sampler.generate_many`: its arguments, checked before the first prompt is read."""
    check_count("batch_size", places)
    check_count("samples", samples)
    check_count("max_length", max_length, optional=True)
    texts.check_new_tokens(new_tokens, sampler.denoiser.spec)
    if not isinstance(seed, int) or isinstance(seed, bool) or abs(seed) >= 2**62:
        raise UserError(f"seed must be a whole number of 62 bits, not {seed!r}")
    if max_length is not None and max_length <= new_tokens:
        raise UserError(f"max_length={max_length} leaves no room for a prompt: max_new_tokens is {new_tokens}")
    for name, value, choices in (
        ("order", order, ("finished", "given")), ("on_error", on_error, ("raise", "yield")),
        ("batching", batching, ("in_flight", "static")),
    ):  # fmt: skip
        if value not in choices:
            raise UserError(f"{name} must be {' or '.join(choices)}, not {value!r}")
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise UserError("generate_many takes several prompts, in a list or any iterable: for one use generate")
    why = obstacle(plugins, sampler.noise, sampler.denoiser) if batching == "in_flight" else None
    if why is not None:
        warn(f"prompts are answered batch by batch: {why}")
    found = texts.stop_strings(stops, sampler.tokenizer)
    stream = Stream(sampler, plugins, iter(prompts), places, new_tokens, seed, found, samples, max_length, on_error)
    if stream.group > places:
        raise UserError(
            f"batch_size={places} is less than samples={samples}, and this cache computes a prompt once for all of its"
            " answers, which so begin together: raise batch_size"
        )
    made = stream.in_batches() if batching == "static" or why is not None else stream.in_flight()
    return in_order(made, samples) if order == "given" else made


def unpadded(trace: Trace) -> Trace:
    """The trace of one row without padding on its left."""
    cut = int(trace.begin)
    names = ("ids", "step_map", "gone", "logprob", "entropy")
    kept = {name: value[:, cut:] for name in names if (value := getattr(trace, name)) is not None}
    return replace(trace, **kept, begin=trace.begin - cut, end=trace.end - cut, origin=trace.origin - cut)


def in_order(answers: Iterable[Answer], samples: int) -> Iterator[Answer]:
    """The answers by prompt and sample; those that are early wait."""
    early: dict[int, Answer] = {}
    following = 0
    for answer in answers:
        early[answer.index * samples + answer.sample] = answer
        while following in early:
            yield early.pop(following)
            following += 1
