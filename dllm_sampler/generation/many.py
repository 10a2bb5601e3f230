"""Answers to any number of prompts: reads prompts, schedules their requests, and yields answers as they finish."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dllm_sampler.core.checks import check_count
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Blocks, Prefills
from dllm_sampler.core.values import Canvas
from dllm_sampler.engine.in_flight import CannotJoin, Request, RunningBatch, obstacle
from dllm_sampler.engine.lockstep import Ranks
from dllm_sampler.errors import NotFiniteError, RowError, UserError, invalid, short
from dllm_sampler.generation import batch
from dllm_sampler.generation.batch import Reader
from dllm_sampler.generation.requests import Arguments
from dllm_sampler.generation.runtime import Runtime
from dllm_sampler.inputs.prompts import BYTES
from dllm_sampler.kernels.backend import warn
from dllm_sampler.options import BATCHING, MOST_ROWS
from dllm_sampler.result import Answer, Commits, Result

FAILED = 2  # status of a rank whose rows cannot join
STEP = 64  # columns by which a lane grows
BATCHES = "Prompts are answered batch by batch: {}. Set batching=static to do so without this warning."


def answers(
    runtime: Runtime,
    prompts: Iterable[Any],
    *,
    batch_size: int,
    order: str,
    on_error: Literal["raise", "yield"],
    batching: str,
    **arguments: Any,
) -> Iterator[Answer]:
    """Check the arguments of `Sampler.generate_many`, and return an iterator over the answers.

    Args:
        arguments: arguments of `Arguments.checked`.
    """
    check_count("batch_size", batch_size, most=MOST_ROWS)
    for name, value, choices in (
        ("order", order, ("finished", "given")),
        ("on_error", on_error, ("raise", "yield")),
        ("batching", batching, BATCHING),
    ):
        if value not in choices:
            raise invalid(name, value, f"Set {' or '.join(choices)}", "choice-unknown")
    try:
        several = None if isinstance(prompts, str | BYTES | Mapping) else iter(prompts)
    except TypeError:  # a tensor of no dimension is an `Iterable`, too
        several = None
    if several is None:
        raise UserError(
            "prompt-type",
            f"generate_many got {short(repr(prompts), 60)}. Give it a list of prompts, or use generate for one prompt.",
        )
    asked = Arguments.checked(runtime, prompts, **arguments)
    reason = obstacle(runtime.plugins, runtime.noise, runtime.denoiser) if batching == "in_flight" else None
    ranks, rows = Ranks.of(runtime.denoiser), runtime.plugins.particles.count
    if ranks.mesh is not None and runtime.plugins.particles.needs_likelihood:
        raise ranks_need_in_flight_error(f"particles={named(runtime.plugins.particles)} makes forwards at the end")
    if ranks.mesh is not None and (reason is not None or batching == "static"):
        raise ranks_need_in_flight_error(reason or "batching=static answers prompts batch by batch")
    if reason is not None:
        warn(BATCHES.format(reason))
    if rows > batch_size:
        raise too_small_error(batch_size, f"particles.count={rows}", rows)
    # Rows of one answer are adjacent in a batch.
    many = Many(runtime, asked, requests_of(asked, several), batch_size - batch_size % rows, on_error, ranks)
    if batching == "static" or reason is not None:
        made = many.in_static_batches()
    else:
        if many.group > many.batch_size:
            counts = f"samples={asked.samples}" + f", particles.count={rows}" * (rows > 1)
            raise too_small_error(batch_size, counts, many.group)
        if isinstance(prompts, Sequence):
            many.fit()
        made = many.in_flight()
    return in_order(made, asked.samples) if order == "given" else made


def too_small_error(batch_size: int, counts: str, rows: int) -> UserError:
    """Return the error for a batch with fewer rows than must begin together."""
    return UserError(
        "option-range",
        f"batch_size={batch_size} is too small: {rows} rows of a prompt begin together ({counts}). Set at least"
        f" {rows}.",
    )


def requests_of(asked: Arguments, prompts: Iterable[Any]) -> Iterator[list[Request] | UserError]:
    """Yield the requests of each prompt, or the error for a refused prompt.

    Raises:
        UserError: a list argument, for example `seed`, has too few or too many entries for the prompts.
    """
    count = 0
    for count, prompt in enumerate(prompts, 1):
        mismatch = asked.length_mismatch(count, more=True)
        if mismatch is not None:
            raise mismatch
        try:
            if isinstance(prompt, int | Mapping):
                raise UserError(
                    "prompt-type",
                    f"prompt {count} is {prompt!r}, which is only a part of a prompt. Give generate_many a list of"
                    " prompts, where a prompt of token ids or messages is itself a list.",
                )
            found = asked.requests(prompt, count - 1)
        except UserError as error:
            found = error
        yield found
    mismatch = asked.length_mismatch(count)
    if mismatch is not None:
        raise mismatch


def in_order(answers: Iterable[Answer], samples: int) -> Iterator[Answer]:
    """Yield answers in the order of prompts and samples."""
    early: dict[int, Answer] = {}
    following = 0
    for answer in answers:
        place = answer.index * samples + answer.sample
        assert place >= following and place not in early
        early[place] = answer
        while following in early:
            yield early.pop(following)
            following += 1


@dataclass(frozen=True)
class LaneShape:
    """The sizes of a lane in a running batch, which limit the requests that fit it.

    Args:
        columns: number of columns of a lane.
        lengths: possible lengths of answers.
        has_given: answers may have given tokens.
    """

    columns: int
    lengths: tuple[int, ...]
    has_given: bool

    def fits(self, request: Request, blocks: Blocks) -> bool:
        """Return True if a request fits a lane."""
        length = request.max_new_tokens
        if len(request.prompt) + length > self.columns:
            return False
        if request.given is None:
            return True
        within = self.has_given and min(self.lengths) <= length <= max(self.lengths)
        return within and blocks.widest(length) <= max(map(blocks.widest, self.lengths))


@dataclass
class Many:
    """The state of `generate_many`, which reads prompts while lanes are free, and yields answers.

    Args:
        source: the requests of each prompt, or the error for a refused prompt.
        batch_size: most requests at a time.
        on_error: see `Sampler.generate_many`.
    """

    runtime: Runtime
    asked: Arguments
    source: Iterator[list[Request] | UserError]
    batch_size: int
    on_error: Literal["raise", "yield"]
    ranks: Ranks
    shape: LaneShape = field(init=False)  # of the running batch, or of the next one
    running: RunningBatch | None = None
    rest_of_prompt: deque[Request] = field(default_factory=deque)  # requests of the last prompt that have not begun
    refused: deque[Answer] = field(default_factory=deque)
    failure: Exception | None = None  # an error of the prompts. Raised after the answers in flight
    prompts_read: int = 0
    # Figures for warnings and `progress`.
    exceeded: bool = False  # a warning has reported an answer that took more forwards
    forwards: int = 0
    tokens_started: int = 0  # tokens of all answers that have begun
    masks_left: int = 0  # masks left in finished answers

    def __post_init__(self) -> None:
        self.shape = LaneShape(self.asked.max_length or 0, self._lengths(), False)

    @property
    def reader(self) -> Reader:
        """The reader of answers in the running batch."""
        return Reader(self.runtime, self.asked.stop_strings)

    @property
    def group(self) -> int:
        """Number of rows that begin together. It is all rows of a prompt if a cache computes the prompt once for them.

        On several ranks samples begin separately, since computing a prompt is a forward that the others do not make.
        """
        together = isinstance(self.runtime.plugins.cache, Prefills) and not self.ranks.mesh
        return self.asked.rows if together else self.runtime.plugins.particles.count

    def fit(self) -> None:
        """Read all prompts, and extend the shape of lanes to fit each of them."""
        found = [*self.source]
        for requests in found:
            if not isinstance(requests, UserError):
                self._extend_shape(requests[0], len(requests[0].prompt) + requests[0].max_new_tokens)
        self.source = iter(found)

    def schedule(self) -> list[Request]:
        """Return the requests that begin now in free lanes, in the order of the prompts.

        A request that does not fit a lane waits until all lanes are free, and later requests wait, too. Then the
        running batch is closed, and the next one has larger lanes.
        """
        free = self.batch_size if self.running is None else len(self.running.free)
        found: list[Request] = []
        while len(found) + self.group <= free and (request := self._peek()) is not None:
            if not self.shape.fits(request, self.runtime.plugins.blocks):
                if found or free < self.batch_size:
                    break
                if self.running is not None:
                    self.running.close()
                    self.running = None
                self._enlarge(request)
            found += [self.rest_of_prompt.popleft() for _ in range(self.group)]
        return found

    def _enlarge(self, request: Request) -> None:
        """Extend the shape of the next batch's lanes to fit a request, with spare columns."""
        columns = len(request.prompt) + request.max_new_tokens
        if columns > self.shape.columns:
            columns = max(columns, self.shape.columns * 5 // 4)
            columns = min(-(-columns // STEP) * STEP, self.runtime.spec.max_positions)
        self._extend_shape(request, columns)

    def _extend_shape(self, request: Request, columns: int) -> None:
        """Extend the shape to `columns`, and to given tokens if the request has some."""
        lengths, has_given = self.shape.lengths, request.given is not None
        if has_given and request.max_new_tokens not in lengths:
            lengths = (*lengths, request.max_new_tokens)
        columns = max(columns, self.shape.columns)
        self.shape = LaneShape(columns, lengths, self.shape.has_given or has_given)

    def in_flight(self) -> Iterator[Answer]:
        """Yield answers as they finish. The lane of a finished request is given to the next one."""
        cannot_join: list[Request] = []  # requests that cannot join
        try:
            while True:
                cannot_join = cannot_join or self._admit(self.schedule())
                if self.refused:  # lanes may still be free: read on before the next forward
                    while self.refused:
                        yield self.refused.popleft()
                    continue
                runs = self.running is not None and len(self.running.free) < self.batch_size
                busy = runs or (not cannot_join and (self._peek() is not None or bool(self.refused)))
                status = self.ranks.max_over_ranks(FAILED if cannot_join and self.ranks.mesh is not None else int(busy))
                if status == FAILED:
                    raise ranks_need_in_flight_error("a plug-in has a state that cannot be copied row by row")
                if not status:
                    break
                if runs or self.ranks.mesh is not None:  # even without a row, if other ranks have rows
                    yield from self._step()
        finally:
            if self.running is not None:
                self.running.close()
        if cannot_join:  # later requests cannot join either
            yield from self._static_batch(cannot_join)
            yield from self.in_static_batches()
        elif self.failure is not None:
            raise self.failure

    def in_static_batches(self) -> Iterator[Answer]:
        """Yield answers batch by batch."""
        while True:
            requests: list[Request] = []
            while len(requests) < self.batch_size:
                while self.refused:
                    yield self.refused.popleft()
                if self._peek() is not None:
                    requests.append(self.rest_of_prompt.popleft())
                elif not self.refused:
                    break
            if not requests:
                break
            yield from self._static_batch(requests)
        if self.failure is not None:
            raise self.failure

    def _peek(self) -> Request | None:
        """Return the next request, reading a prompt if necessary. Returns None if there is none now.

        No prompt is read while answers to refused prompts are not yielded yet, so these do not accumulate.
        """
        while not self.rest_of_prompt:
            if self.failure is not None or self.refused:
                return None
            try:
                found = next(self.source)
            except StopIteration:
                return None
            except Exception as error:  # from the caller's iterable, or `length_mismatch`
                self.failure = error
                return None
            index, self.prompts_read = self.prompts_read, self.prompts_read + 1
            if isinstance(found, UserError):
                self._refuse(index, found)
            else:
                self.rest_of_prompt.extend(found)
        return self.rest_of_prompt[0]

    def _refuse(self, index: int, error: UserError) -> None:
        """Create the answers to a refused prompt, or with `on_error="raise"` store the error."""
        if self.on_error == "raise":
            self.failure = error
            return
        nothing = torch.full((self.asked.length_and_form(index)[0],), self.runtime.spec.pad_id)
        for sample in range(self.asked.samples):
            self.refused.append(Answer(index, sample, "refused", nothing, error=str(error)))

    def _admit(self, requests: list[Request]) -> list[Request]:
        """Add requests to the running batch. Returns them if a plug-in's state cannot be split by rows."""
        if not requests:
            return []
        self.running = self.running or self._running_batch()
        try:
            self.running.admit(requests, self.group)
        except CannotJoin as error:
            warn(BATCHES.format(error))
            return requests
        self.tokens_started += sum(one.free_tokens for one in requests)
        return []

    def _running_batch(self) -> RunningBatch:
        runtime, engine, shape = self.runtime, self.runtime.engine(), self.shape

        def lay_out(requests: Sequence[Request]) -> Canvas:
            return runtime.canvas(
                requests,
                engine.multiple,
                cuts=True,
                length=shape.columns,
                lengths=shape.lengths,
                has_given=shape.has_given,
            )

        running = RunningBatch(engine, lay_out, self.batch_size)
        running.watch = batch.watcher(self.reader, engine, running.lanes)
        return running

    def _lengths(self) -> tuple[int, ...]:
        """Return the lengths of answers that the plug-ins accept, from `max_new_tokens` and `forms`."""
        found: list[int] = []
        lists = (self.asked.max_new_tokens, self.asked.forms)
        prompts = max([1, *(len(one) for one in lists if isinstance(one, list))])
        for length, form in sorted({self.asked.length_and_form(index) for index in range(prompts)}):
            with suppress(UserError):
                self.asked.check_answer(length, form)
                found.append(length)
        return tuple(found)

    def _step(self) -> Iterator[Answer]:
        """Run one forward of the running batch, and yield the finished answers."""
        self.running = self.running or self._running_batch()
        try:
            ended = self.running.step()
        except RowError as error:
            raise error.numbered(
                [0 if one is None else one.index + 1 for one in self.running.lanes]
            ) from error.__cause__
        if self.asked.progress is not None:
            self.masks_left += 0 if ended is None else int(ended.canvas.masked.sum())
            self._report(self.running.masks_left())
        if ended is not None:
            result = self.reader.result(ended.canvas, ended.recorder, ended.requests, ended.group)
            self._warn(result)
            yield from self._answers(ended.requests, result)

    def _static_batch(self, requests: list[Request]) -> Iterator[Answer]:
        """Yield the answers of one batch. If one is not finite, the others are generated again without it."""
        self.tokens_started += sum(one.free_tokens for one in requests)
        while requests:
            last: Commits | None = None
            every = int(self.asked.progress is not None)
            try:
                for last in batch.iterate_steps(self.runtime, requests, self.asked.stop_strings, every):
                    self._report(int(last.masked.sum()))
            except NotFiniteError as error:
                yield from self._answers(requests, error.result)
                requests = [one for one in requests if one.state != "done"]
                continue
            assert last is not None and last.result is not None
            self.masks_left += int(last.masked.sum())
            self._warn(last.result)
            yield from self._answers(requests, last.result)
            return

    def _answers(self, requests: Sequence[Request], result: Result) -> Iterator[Answer]:
        """Yield the answers to requests that are done."""
        for row, one in enumerate(requests[:: self.runtime.plugins.particles.count]):
            if one.state == "done":
                yield result.answer(row, one.index, one.sample, max_new_tokens=one.max_new_tokens)

    def _warn(self, result: Result) -> None:
        """Warn if an answer took more forwards than `scheduler.steps`, once per call."""
        self.exceeded = self.exceeded or batch.warn_of_forwards(self.runtime.plugins, result)

    def _report(self, masks: int) -> None:
        """Call `progress` after a forward that left `masks` masks."""
        self.forwards += 1
        if self.asked.progress is not None:
            self.asked.progress(self.forwards, self.tokens_started - self.masks_left - masks, self.tokens_started)


def ranks_need_in_flight_error(reason: str) -> UserError:
    """Return the error for a sharded model whose prompts cannot be answered in flight."""
    return UserError(
        "ranks-unsupported",
        f"{reason}, so ranks that share weights would make different numbers of forwards. Change that, or do not"
        " shard the model.",
    )
