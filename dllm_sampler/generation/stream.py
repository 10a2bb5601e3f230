"""Many prompts and few places: reads prompts, runs their rows in flight or in batches, and makes answers of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from dllm_sampler.core.protocols import Prefills
from dllm_sampler.core.values import Canvas
from dllm_sampler.engine import layout
from dllm_sampler.engine.in_flight import Ended, Flight, Row, Unfit
from dllm_sampler.engine.lockstep import Ranks
from dllm_sampler.engine.plugins import Plugins
from dllm_sampler.errors import NotFiniteError, RowError, UserError
from dllm_sampler.generation import batch as batches
from dllm_sampler.generation.batch import Reader
from dllm_sampler.inputs import infill
from dllm_sampler.inputs import prompts as texts
from dllm_sampler.inputs.given import Fixed
from dllm_sampler.inputs.infill import Task
from dllm_sampler.inputs.prompts import Infill
from dllm_sampler.kernels.backend import warn
from dllm_sampler.options import Progress
from dllm_sampler.result import Answer, Commits, Result

if TYPE_CHECKING:
    from dllm_sampler.sampler import Sampler

FAILED = 2  # of a rank whose rows cannot join
STEP = 64  # columns by which the capacity of a place grows


@dataclass
class Stream:
    """Reads prompts when places are free, and turns rows that end into answers: the arguments of `generate_many`."""

    sampler: Sampler
    plugins: Plugins
    prompts: Iterator[Any]
    places: int
    new_tokens: int | Sequence[int]
    forms: int | Sequence[int] | None
    seed: int | Sequence[int]
    stops: tuple[str, ...]
    samples: int
    max_length: int | None
    on_error: Literal["raise", "yield"]
    progress: Progress | None
    fixed: Fixed = field(default_factory=Fixed)  # tokens of answers that are given
    capacity: int = 0  # columns of a place
    sizes: set[int] = field(default_factory=set)  # of answers that say themselves how long they are (`Infill`)
    known: list[int] = field(default_factory=list)  # lengths for which the places have room
    given: bool = False  # tokens of some answer are given, which places must be made for
    read: int = 0  # prompts
    waiting: deque[Row] = field(default_factory=deque)  # answers that the last prompt still wants
    ranks: Ranks = field(default_factory=Ranks)
    forwards: int = 0
    begun: int = 0  # tokens of all answers that were begun
    left: int = 0  # masks of answers that ended with some
    exceeded: bool = False  # a warning has said so
    planned: int = 0  # forwards that a warning has named, of an answer that takes more than `scheduler.steps`
    refused: deque[Answer] = field(default_factory=deque)
    failure: Exception | None = None  # of a prompt, or of what prompts come from; raised behind the answers in flight
    flight: Flight | None = None

    @property
    def reader(self) -> Reader:
        """What reads answers out of a flight."""
        return Reader(self.sampler.spec, self.sampler.tokenizer, self.stops, self.plugins.guides)

    @property
    def group(self) -> int:
        """How many answers begin together: all of a prompt's, where it is computed once for them.

        Not on several ranks: that is a forward, and the others would not make it.
        """
        return self.samples if isinstance(self.plugins.cache, Prefills) and self.ranks.mesh is None else 1

    def fit(self, prompts: Sequence[Any]) -> None:
        """Make places that fit the longest prompt, where all are there: none has to wait for larger ones."""
        known: list[Any] = []
        for index, prompt in enumerate(prompts):
            with suppress(UserError):  # refused when its turn comes
                task, _ = self._task(prompt, index)
                self.capacity = max(self.capacity, len(task.prompt) + task.new_tokens)
                self._note(task.given, task.new_tokens)
                # One that `fixed` adds to stays as it is: it is added to again.
                prompt = prompt if self.fixed else task.again
            known.append(prompt)
        self.prompts = iter(known)

    def in_flight(self) -> Iterator[Answer]:
        """Answers as they finish: a row that ends gives its place to the next."""
        late: list[Row] = []
        try:
            while True:
                late = late or self._fill()
                while self.refused:
                    yield self.refused.popleft()
                flying = self.flight is not None and len(self.flight.free) < self.places
                busy = flying or (not late and (self._next() is not None or bool(self.refused)))
                status = self.ranks.most(FAILED if late and self.ranks.mesh is not None else int(busy))
                if status == FAILED:
                    raise alone("a plug-in keeps a state of which no row can be given to the next prompt")
                if not status:
                    break
                if not flying and self.ranks.mesh is None:
                    continue
                self.flight = self.flight or self._flight()
                try:
                    ended = self.flight.step()  # an empty one, where only other ranks have rows
                except RowError as error:
                    raise self._named(error, self.flight.rows) from error.__cause__
                if self.progress is not None:
                    self.left += 0 if ended is None else int(ended.canvas.masked.sum())
                    self._tell(self.flight.masks())
                if ended is not None:
                    yield from self._answers(ended)
        finally:
            if self.flight is not None:
                self.flight.close()
        if late:  # they cannot join, nor can others
            yield from self._batch(late)
            yield from self.in_batches()
        elif self.failure is not None:
            raise self.failure

    def in_batches(self) -> Iterator[Answer]:
        """Answers batch by batch."""
        while True:
            batch: list[Row] = []
            while len(batch) < self.places:
                while self.refused:
                    yield self.refused.popleft()
                if self._next() is not None:
                    batch.append(self.waiting.popleft())
                elif not self.refused:
                    break
            if not batch:
                break
            yield from self._batch(batch)
        if self.failure is not None:
            raise self.failure

    def _fill(self) -> list[Row]:
        """Give free places to the next prompts; to those of a new flight where a prompt is too long for this one's.

        Returns:
            Rows that cannot join, because something in the state of a generation has no row per place.
        """
        free = self.places if self.flight is None else len(self.flight.free)
        rows: list[Row] = []
        # Refusals are handed out before more is read: there may be any number of them.
        while len(rows) + self.group <= free and (row := self._next()) is not None and not self.refused:
            size = len(row.prompt) + row.new_tokens
            if size > self.capacity or not self._has_room(row):
                if self.flight is not None:
                    if rows or free < self.places:
                        break  # until the rows in flight have ended
                    self.flight.close()
                    self.flight = None
                if size > self.capacity:
                    size = max(size, self.capacity * 5 // 4)
                    room = self.sampler.denoiser.spec.max_positions
                    self.capacity = self.max_length or min(-(-size // STEP) * STEP, room)
                self._note(row.given, row.new_tokens)
            rows += [self.waiting.popleft() for _ in range(self.group)]
        if rows:
            self.flight = self.flight or self._flight()
            try:
                self.flight.admit(rows, self.group)
            except Unfit as error:
                warn(f"prompts are answered batch by batch: {error}")
                return rows
            self.begun += sum(row.free for row in rows)
        return []

    def _note(self, given: Sequence[int] | None, new_tokens: int) -> None:
        """Take down what the places of the next flight must have room for."""
        if given is not None:
            self.given = True
            self.sizes.add(new_tokens)

    def _has_room(self, row: Row) -> bool:
        """Whether places were made for an answer that is as long as this one, and for given tokens if it has some."""
        if row.given is None or self.flight is None:
            return row.given is None
        within = self.given and min(self.known) <= row.new_tokens <= max(self.known)
        widest = max(map(self.plugins.blocks.widest, self.known))
        return within and self.plugins.blocks.widest(row.new_tokens) <= widest

    def _next(self) -> Row | None:
        """The answer that is wanted next; None: there is none left."""
        while not self.waiting:
            if self.failure is not None or self.refused:
                return None
            try:
                prompt = next(self.prompts)
            except StopIteration:
                wrong = texts.uneven(self.new_tokens, self.forms, self.seed, self.read, self.samples)
                self.failure = wrong or self.fixed.uneven(self.read)
                return None
            except Exception as error:  # the caller's own: raised again, when the answers in flight are out
                self.failure = error
                return None
            index = self.read
            self.read += 1
            self.failure = texts.uneven(self.new_tokens, self.forms, self.seed, self.read, self.samples, more=True)
            if self.failure is not None:
                return None
            try:
                task, form = self._task(prompt, index)
            except UserError as error:
                if self.on_error == "raise":
                    self.failure = error
                nothing = torch.full((_of(self.new_tokens, index),), self.sampler.denoiser.spec.pad_id)
                for sample in range(self.samples if self.on_error == "yield" else 0):
                    self.refused.append(Answer(index, sample, "refused", nothing, error=str(error)))
                continue
            self.planned = self.planned or batches.warn_of_steps(self.plugins, [task])
            bound = self.sampler.max_steps or self.plugins.bound(task.new_tokens)
            for sample in range(self.samples):
                at = index * self.samples + sample
                seed = self.seed + at if isinstance(self.seed, int) else self.seed[at]
                self.waiting.append(Row(task.prompt, task.new_tokens, seed, bound, (index, sample), form, task.given))
        return self.waiting[0]

    def _wanted(self, index: int) -> tuple[int, int]:
        """The length of the answer to a prompt, and its form."""
        return _of(self.new_tokens, index), _of(0 if self.forms is None else self.forms, index)

    def _check(self, task: Task, form: int) -> None:
        """Refuse an answer of a length, or with given tokens, that the plug-ins cannot make of that form."""
        self.plugins.blocks.lookahead(task.new_tokens)
        infill.check_forms([task], [form], self.plugins)

    def _task(self, prompt: Any, index: int) -> tuple[Task, int]:
        """A prompt as token ids, and the form of its answer."""
        new_tokens, form = self._wanted(index)
        if not isinstance(prompt, Infill):
            self._check(Task([], new_tokens), form)
        if isinstance(prompt, int | Mapping):
            raise UserError(
                f"prompt {index + 1} is {prompt!r}, and not a prompt: generate_many takes a list of prompts, generate"
                " one as well"
            )
        (task,) = infill.encode([prompt], self.sampler.tokenizer, self.plugins, new_tokens, self.fixed, index + 1)
        if self.max_length is not None and len(task.prompt) + task.new_tokens > self.max_length:
            raise UserError(
                f"prompt {index + 1} has {len(task.prompt)} tokens and max_new_tokens is {task.new_tokens}, together"
                f" more than max_length={self.max_length}"
            )
        if task.given is not None:
            self._check(task, form)
        return task, form

    def _flight(self) -> Flight:
        sampler, plugins = self.sampler, self.plugins
        engine, spec, length = sampler.engine(plugins), sampler.spec, self.capacity
        self.known = lengths = self._lengths()
        pins = self.given

        def lay_out(rows: Sequence[Row]) -> Canvas:
            ids, seeds, own = [row.prompt for row in rows], [row.seed for row in rows], [row.new_tokens for row in rows]
            noise, blocks, forms = sampler.noise, plugins.blocks, self._forms(rows)
            given, multiple = [row.given for row in rows] if pins else None, engine.multiple
            return layout.canvas(
                ids, own, seeds, spec, blocks, noise, True, multiple, length, lengths, forms, given,
                plugins.scheduler.traits.initial,
            )  # fmt: skip

        watch = partial(self.reader.stop, engine) if self.stops else None
        return Flight(engine, lay_out, self.places, watch)

    def _forms(self, rows: Sequence[Row]) -> list[int] | None:
        return [row.form for row in rows] if self.plugins.forms else None

    def _lengths(self) -> list[int]:
        """The lengths of answers that may come; those that are refused do not."""
        found = [*self.sizes]
        prompts = max([1, *(len(one) for one in (self.new_tokens, self.forms) if isinstance(one, Sequence))])
        for number, form in sorted({self._wanted(index) for index in range(prompts)}):
            with suppress(UserError):
                self._check(Task([], number), form)
                found.append(number)
        return found

    def _answers(self, ended: Ended) -> Iterator[Answer]:
        failed = [at for at, (_, end) in enumerate(ended.rows) if end == "not_finite"]
        result = self.reader.result(ended.canvas, ended.recorder, failed)
        self._warn(result)
        for at, (row, _) in enumerate(ended.rows):
            yield self.reader.answer(result, at, *row.tag, new_tokens=row.new_tokens)

    def _warn(self, result: Result) -> None:
        """Warn of the first answer that takes more forwards than planned."""
        if not self.exceeded:
            self.exceeded = batches.warn_of_forwards(self.plugins, result, self.planned) > self.planned

    def _batch(self, batch: list[Row]) -> Iterator[Answer]:
        """The answers of one batch. One that is not finite leaves it, and the others are made again."""
        self.begun += sum(row.free for row in batch)
        while batch:
            tasks = [Task([*row.prompt], row.new_tokens, row.given) for row in batch]
            every, forms, seeds = int(self.progress is not None), self._forms(batch), [row.seed for row in batch]
            commits = batches.commits(self.sampler, self.plugins, tasks, seeds, self.stops, every, forms=forms)
            last: Commits | None = None
            try:
                for last in commits:
                    self._tell(int(last.masked.sum()))
                assert last is not None and last.result is not None
                self.left += int(last.masked.sum())
            except RowError as error:
                raise self._named(error, batch) from error.__cause__
            except NotFiniteError as error:
                bad = {at - 1 for at in error.rows}
                for at in sorted(bad):
                    row = batch[at]
                    yield self.reader.answer(error.result, at, *row.tag, new_tokens=row.new_tokens)
                batch = [row for at, row in enumerate(batch) if at not in bad]
                continue
            self._warn(last.result)
            for at, row in enumerate(batch):
                yield self.reader.answer(last.result, at, *row.tag, new_tokens=row.new_tokens)
            return

    @staticmethod
    def _named(error: RowError, rows: Sequence[Row | None]) -> RowError:
        """The error with the numbers of these rows' prompts."""
        return error.numbered([0 if row is None else row.tag[0] + 1 for row in rows])

    def _tell(self, masks: int) -> None:
        """Report progress after a forward; `masks` are left."""
        self.forwards += 1
        if self.progress is not None:
            self.progress(self.forwards, self.begun - self.left - masks, self.begun)


def alone(why: str) -> UserError:
    """The error where prompts of a model that is sharded over several ranks cannot be answered in flight."""
    return UserError(
        f"{why}, so prompts are answered batch by batch, and then ranks that share this model's weights (FSDP2) make"
        " different numbers of forwards: choose plug-ins that can join a batch that runs"
    )


def _of(given: int | Sequence[int], index: int) -> int:
    return given if isinstance(given, int) else given[index]
