"""Promises of every plug-in, in every combination. A broken promise is one sentence."""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler import config
from dllm_sampler.check import toys
from dllm_sampler.check.reads import watched_steps
from dllm_sampler.check.settings import Settings
from dllm_sampler.core.around import Around
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.spec import ChangingLength, Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import FAULTS, UserError, counted
from dllm_sampler.result import Commits, Result
from dllm_sampler.sampler import Sampler

TOKENS = 10
GROUPS = ("scheduler", "cache", "blocks", "stop", "guide")
EVERY = tuple(range(len(toys.PROMPTS)))


class Broken(AssertionError):
    """A promise that is not kept. The message is a sentence."""


class CannotTry(Exception):
    """A promise that cannot be tried with a plug-in. The message is the reason."""


@dataclass(frozen=True)
class Case:
    """One combination of plug-ins on one toy."""

    toy: str
    scheduler: Any
    cache: Any
    blocks: Any
    stop: Any
    guide: Any

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def plugins(self) -> dict[str, Any]:
        """The plug-in of each group."""
        return {group: getattr(self, group) for group in GROUPS}

    @functools.cached_property
    def sampler(self) -> Sampler:
        """The assembled plug-ins."""
        return toys.sampler(self.toy, **self.plugins)

    def generate(self, rows: Iterable[int] = EVERY, **options: Any) -> Result:
        """Return the answers to the toy prompts `rows`, generated as one batch."""
        sampler, chosen = toys.sampler(self.toy, **self.plugins, **options), list(rows)
        prompts, seeds = [toys.PROMPTS[row] for row in chosen], [toys.SEEDS[row] for row in chosen]
        return sampler.generate(prompts, max_new_tokens=TOKENS, seed=seeds)

    def stream(self) -> list[Commits]:
        """Return the commits of every step, with all toy prompts as one batch."""
        return self._steps

    @functools.cached_property
    def _steps(self) -> list[Commits]:
        return list(toys.sampler(self.toy, **self.plugins).stream(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS))

    @property
    def result(self) -> Result:
        """The answers to all toy prompts, generated as one batch."""
        result = self.stream()[-1].result
        assert result is not None
        return result

    @property
    def stuck(self) -> Tensor:
        """`[B] bool` rows that a vetoing guide has ended."""
        vetoes = any(guide.vetoes for guide in self.sampler.plugins.guides)
        return torch.tensor([vetoes and reason == "constraint" for reason in self.result.finish_reason])


def refusal(toy: str, **plugins: Any) -> str | None:
    """Return the reason why plug-ins cannot run together on a toy, or None if they can.

    Raises:
        UserError: one of them breaks its contract in any combination.
    """
    try:
        toys.sampler(toy, **plugins)
    except UserError as error:
        if error.code in FAULTS:
            raise
        return str(error)
    return None


@contextmanager
def known_tokens() -> Iterator[None]:
    """Raise `Broken` if an edit commits a token that the toys do not have, before a network embeds it."""
    apply = Canvas.apply

    def checked(self: Canvas, positions: Tensor, edit: Edit) -> Canvas:
        strange = edit.ids[edit.commit & ((edit.ids < 0) | (edit.ids >= toys.VOCAB))]
        if len(strange):
            raise Broken(f"An edit commits token {int(strange[0])}, and the toy's tokens are 0 to {toys.VOCAB - 1}.")
        return apply(self, positions, edit)

    Canvas.apply = checked
    try:
        yield
    finally:
        Canvas.apply = apply


def check_row(batch: Result, row: int, alone: Result) -> None:
    """Check that a row of a batch equals the row alone: tokens, forwards, step map and computed positions.

    Raises:
        Broken: something differs.
    """
    sides: dict[str, tuple[Tensor, Tensor]] = {
        "number of forwards": (batch.nfe[row], alone.nfe[0]),
        "step map": (batch.trace.generated[row], alone.trace.generated[0]),
        "tokens": (batch.tokens[row], alone.tokens[0]),
        "length": (batch.lengths[row], alone.lengths[0]),
        "completeness": (batch.complete[row], alone.complete[0]),
        "number of computed positions": (batch.trace.rows[row], alone.trace.rows[0]),
    }
    for name, (one, two) in sides.items():
        if not torch.equal(one, two):
            raise Broken(
                f"A row of a batch differs from the row alone: the {name} of row {row} is {one.tolist()} in the batch"
                f" and {two.tolist()} alone."
            )
    sure = batch.trace.logprob[row, batch.trace.origin :], alone.trace.logprob[0, alone.trace.origin :]
    if not torch.allclose(*sure, atol=1e-6, rtol=1e-6, equal_nan=True):  # stored in float32
        raise Broken(f"A row of a batch differs from the row alone: row {row} has other log-probabilities.")


def check_rows(case: Case, rows: Iterable[int]) -> None:
    """Check that the `rows` of a ragged batch equal the same rows alone.

    Raises:
        Broken: a row differs.
    """
    for row in rows:
        check_row(case.result, row, case.generate([row]))


def check_prompts(case: Case) -> None:
    """Check that prompts, padding and finished rows never change.

    Raises:
        Broken: a prompt, padding or a finished row changed.
    """
    trace = case.result.trace
    for row, (prompt, ids, steps) in enumerate(
        zip(toys.PROMPTS, trace.ids.tolist(), trace.step_map.tolist(), strict=True)
    ):
        if ids[: trace.origin] != [trace.pad_id] * (trace.origin - len(prompt)) + prompt:
            raise Broken(f"The prompt of row {row} is {prompt}, and {ids[: trace.origin]} was found in its place.")
        if set(steps[: trace.origin]) != {-1}:
            raise Broken(f"The step map has commits in the prompt of row {row}.")
    steps = case.stream()
    for before, after in pairwise(steps):
        rests = after.nfe == before.nfe
        for name in ("tokens", "masked", "step_map"):
            changed = (getattr(before, name) != getattr(after, name)).any(1) & rests
            if changed.any():
                raise Broken(
                    f"Row {int(changed.int().argmax())} was finished after {counted(before.step, 'forward')}, and its"
                    f" {name} changed later."
                )


def check_commits(case: Case) -> None:
    """Check that a committed token stays, if the scheduler's `traits` do not say `revises`.

    Nothing is checked for a scheduler with `ChangingLength`, whose columns move, and for a stop that `fills`, which
    writes over the rest of the answer.

    Raises:
        Broken: a token changes, or is a mask again.
    """
    plugins = case.sampler.plugins
    traits = plugins.scheduler.traits
    if traits.revises or traits.has(ChangingLength) or plugins.stop.fills:
        return
    for before, after in pairwise(case.stream()):
        changed = (before.step_map >= 0) & (after.masked | (after.tokens != before.tokens))
        if changed.any():
            row, position = changed.nonzero()[0].tolist()
            now = "a mask again" if after.masked[row, position] else f"token {int(after.tokens[row, position])}"
            raise Broken(
                f"A committed token changes, and `traits` says revises=False: position {position} of row {row} is token"
                f" {int(before.tokens[row, position])} after {counted(before.step, 'forward')}, and then {now}. Set"
                " Traits(revises=True)."
            )


def check_end(case: Case) -> None:
    """Check that every row ends, within the bound that the plug-ins give, with no mask left.

    Raises:
        Broken: a row does not end in time, or an answer has a mask.
    """
    steps, result, stuck = case.stream(), case.result, case.stuck
    bound = case.sampler.plugins.bound(TOKENS)
    unfinished = ~result.complete & ~stuck
    if unfinished.any():
        row = int(unfinished.int().argmax())
        raise Broken(
            f"Row {row} does not end: it has {counted(int(steps[-1].masked[row].sum()), 'mask')} after"
            f" {counted(len(steps), 'forward')}, and `bound` promises at most {bound} for {TOKENS} tokens. Commit an"
            " eligible position in each step, or raise `bound`."
        )
    if len(steps) > bound:
        raise Broken(
            f"It took {counted(len(steps), 'forward')}, and `bound` promises at most {bound} for {TOKENS} tokens. Raise"
            " `bound`."
        )
    if len(steps) != int(result.nfe.max()):
        raise Broken(f"{len(steps)} steps were made, and the largest NFE of a row is {int(result.nfe.max())}.")
    if result.complete[stuck].any():
        raise Broken("A row that a guide has ended is reported as complete.")
    answer = torch.arange(TOKENS) < result.lengths[:, None]
    written = result.trace.generated >= 0
    if ((~written | (result.tokens == toys.MASK)) & answer & ~stuck[:, None]).any():
        raise Broken("An answer has a mask in it.")


def check_reads(case: Case, rows: Iterable[int] = EVERY, max_steps: int = 5) -> None:
    """Check that no step reads the device.

    Raises:
        HostRead: a step reads the device.
    """
    with watched_steps() as taken:
        result = case.generate(rows, max_steps=max_steps)
    assert len(taken) == int(result.nfe.max())


def reads(case: Case) -> bool:
    """Return True if a step of the plug-ins may read the device, as they declare."""
    plugins, scheduler = case.sampler.plugins, case.scheduler
    name = scheduler.get("name") if isinstance(scheduler, dict) else scheduler
    return plugins.cache.syncs or any(guide.vetoes for guide in plugins.guides) or name == "svdd"


@dataclass(frozen=True)
class Scrambled(Around):
    """A scheduler around another one, which sees confidences that are multiplied by random numbers."""

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        factor = replace(canvas, step=canvas.step + 99).uniform(query.positions)[:, None]
        return self.inner.tell(canvas, query, replace(readout, confidence=readout.confidence * factor), carry)


@dataclass(frozen=True)
class Aged(Around):
    """A scheduler around another one, which sees a greater `age`, except in the forward that opens a block."""

    @override
    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        return super().ask(self._aged(canvas), carry)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        return self.inner.tell(self._aged(canvas), query, readout, carry)

    def _aged(self, canvas: Canvas) -> Canvas:
        return replace(canvas, age=canvas.age + 99 * (canvas.age > 0))


@dataclass(frozen=True)
class Asked(Around):
    """A scheduler around another one that refuses queries of positions that the traits exclude."""

    @override
    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        query, block = super().ask(canvas, carry), canvas.in_block()
        asked = torch.zeros_like(block).scatter(1, query.positions, query.positions < canvas.length)
        asked = asked & ~canvas.done[:, None]
        if (asked & ~block).any():
            raise Broken(
                "`traits` says asks_block=True, and `ask` names positions outside the active block. Set"
                " Traits(asks_block=False)."
            )
        if self.inner.traits.asks == "masks" and (asked & ~canvas.masked).any():
            raise Broken(
                "`traits` says asks='masks', and `ask` names committed positions. Set Traits(asks=\"window\")."
            )
        return query

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        return self.inner.tell(canvas, query, readout, carry)


def check_asks(scheduler: Settings, toy: str = "llada") -> None:
    """Check that a scheduler queries the positions that `traits.asks` and `traits.asks_block` say.

    Raises:
        Broken: it queries other positions.
        CannotTry: its traits promise nothing, or it cannot be wrapped.
    """
    inner: Scheduler = config.build("scheduler", scheduler)
    if not inner.traits.asks_block:
        raise CannotTry("asks_block=False promises nothing")
    try:
        asked = toys.sampler(toy, scheduler=Asked(inner))
    except UserError as error:
        raise CannotTry(str(error)) from error
    asked.generate(toys.PROMPTS, max_new_tokens=TOKENS)


def check_confidence(scheduler: Settings, toy: str = "llada") -> None:
    """Check that `traits.ranks_by_confidence` is true. EOSER, which scales confidences, relies on it.

    Raises:
        Broken: the trait is not true.
        CannotTry: the scheduler drafts, or it cannot be wrapped.
    """
    traits, same = _unchanged(scheduler, toy, Scrambled)
    if same == traits.ranks_by_confidence:
        raise Broken(
            f"`traits` says ranks_by_confidence={same}, and random factors on `readout.confidence`"
            f" {'change nothing' if same else 'change what it commits'}. Set Traits(ranks_by_confidence={not same})."
        )


def check_age(scheduler: Settings, toy: str = "llada") -> None:
    """Check that `traits` says `scheduled` if a rule depends on `canvas.age`.

    Blocks that open several at once, or slide, rely on it. They refuse `revises` anyway, so it is exempt.

    Raises:
        Broken: the rule depends on `canvas.age`, and `traits` does not say so.
        CannotTry: the scheduler drafts, or it cannot be wrapped.
    """
    traits, same = _unchanged(scheduler, toy, Aged)
    if not (same or traits.scheduled or traits.revises):
        raise Broken(
            "`traits` says scheduled=False, and a greater `canvas.age` changes what it commits. Set"
            " Traits(scheduled=True)."
        )


def _unchanged(scheduler: Settings, toy: str, around: type[Around]) -> tuple[Traits, bool]:
    """Return the traits of a scheduler, and True if the wrapper `around` changes no answer."""
    inner: Scheduler = config.build("scheduler", scheduler)
    if inner.traits.drafts:
        raise CannotTry("a scheduler that drafts follows its inner scheduler")
    try:
        alone = toys.sampler(toy, scheduler=scheduler, temperature=1.0)
        other = toys.sampler(toy, scheduler=around(inner), temperature=1.0)
    except UserError as error:
        raise CannotTry(str(error)) from error
    first, second = (one.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=3) for one in (alone, other))
    same = torch.equal(first.trace.generated, second.trace.generated) and torch.equal(first.tokens, second.tokens)
    return alone.plugins.scheduler.traits, same
