"""The parts of a step before and after the forward: ask for the next one, and decide what its predictions change.

They only launch tensor operations whose sizes the host knows. So `torch.compile` and CUDA graphs can take each whole.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from dllm_sampler.core import packing
from dllm_sampler.core.packing import ForwardRequest
from dllm_sampler.core.protocols import Cache, Carry, Corrects, Foresees, Paced, Planner, Stop
from dllm_sampler.core.recorder import Recorder
from dllm_sampler.core.resize import effect_on
from dllm_sampler.core.values import Canvas, Edit, Query, Readout, Refusals, Spent
from dllm_sampler.engine.faults import check_edit, check_stopped, checked_answer, checked_settlement
from dllm_sampler.engine.plugins import Plugins


@dataclass(frozen=True)
class Group:
    """The state for several rows of one prompt (`Particles`).

    At a meeting, after a block or every few forwards, rows may be replaced by copies of others (`engine/groups.py`).
    """

    mark: Tensor  # [B] `Canvas.start` at the last meeting, or `Canvas.step` under `Particles.every`
    waiting: Tensor  # [B] bool: rows that rest until the others of their prompt are there
    nfe: Tensor  # [B] forwards made in this place by rows that were replaced, less those that a copy brought along
    computed: Tensor  # [B] positions computed, counted in the same way
    carry: Carry  # of the particles


@dataclass
class Generation:
    """The state of one generation between two steps."""

    canvas: Canvas
    cache: Cache
    carry: Carry
    failed_at: Tensor  # [B] first step (from 1) at which the model returned no finite statistics. 0 for none
    recorder: Recorder
    group: Group | None = None  # None if each prompt has one row
    wanted: ForwardRequest | None = None  # of the next step
    counts: Tensor | None = None  # `packing.host_counts` of the next step
    previous: Tensor | None = None  # [B, W, V] see `ForwardRequest.previous`
    done: list[bool] = field(default_factory=list)  # of each row, when the host last looked
    failed: dict[int, int] = field(default_factory=dict)  # rows of `failed_at` then, and their step
    most_candidates: int | None = None  # limit on the candidates of the next request (`Paced`). None: there is none

    @property
    def finished(self) -> bool:
        """True if every row was done when the host last read."""
        return all(self.done)


def ask(plugins: Plugins, state: Generation) -> None:
    """Ask for the next forward.

    Sets `state.wanted`, and `state.counts`, from which the host reads how large the forward is.
    """
    spec, cache, scheduler = state.cache.spec, state.cache, plugins.scheduler
    if state.most_candidates is not None:
        scheduler = cast(Paced, scheduler).with_candidates(state.most_candidates)
    if spec.mask_id is None:
        state.canvas = state.canvas.renoised(spec.vocab_size, plugins.owns_noise)
    canvas = state.canvas
    query = scheduler.ask(canvas, state.carry)
    if plugins.blocks.hides:
        stops = query.candidates.stops
        query = query.before(canvas, canvas.stop if stops is None else stops.amax(1))
    if plugins.foresees:
        ahead = cast(Planner, scheduler).ahead(canvas, state.carry)  # the cache refuses other schedulers
        assert ahead is not None
        cast(Foresees, cache).expect(ahead, query.positions.shape[1])
    chosen = cache.computes(canvas)
    computed = packing.computable(canvas, query, chosen)
    predicted = packing.answerable(canvas, query, computed, spec)
    recalled = cache.recalled(canvas)
    if recalled is not None:
        predicted = predicted | recalled
    if chosen is not None or spec.encoder:
        query = cache.narrow(canvas, query, predicted)
    query, predicted = _with_watched(plugins.stop, canvas, query, predicted)
    wanted = ForwardRequest.of(query, computed, predicted)
    state.wanted = replace(wanted, previous=state.previous, most_candidates=state.most_candidates)
    joint = any(guide.joint for guide in plugins.guides)
    state.counts = packing.host_counts(canvas, state.wanted, state.failed_at, joint)


def _with_watched(stop: Stop, canvas: Canvas, query: Query, predicted: Tensor) -> tuple[Query, Tensor]:
    """Add the positions that the stop policy watches to the query.

    Args:
        predicted: `[B, L+1] bool` columns that the forward predicts.

    Returns:
        the query, and the columns that it predicts. Positions of a policy that writes without prediction are not among
        them.
    """
    watched = stop.positions(canvas)
    if watched is None:
        return query, predicted
    if stop.predicts:
        return query.join(canvas, watched & predicted, canvas.length), predicted
    predicted = predicted & torch.zeros_like(predicted).scatter(1, query.positions, True)
    # Not the block's masks that the scheduler did not ask about: it would take them for predicted ones.
    return query.join(canvas, watched & ~(canvas.masked & canvas.in_block()), canvas.length), predicted


class Judgement(NamedTuple):
    """A decision of scheduler, blocks and guides about predictions, before anything is written."""

    canvas: Canvas  # before the step, with the block that the step is about
    query: Query  # about the candidate from which the step continues
    seen: Readout  # of that candidate
    edit: Edit
    carry: Carry
    failed_at: Tensor  # [B] see `Canvas.reject_nonfinite`
    refusals: Refusals | None  # of the guide that vetoes. None without one


def judge(plugins: Plugins, canvas: Canvas, query: Query, seen: Readout, carry: Carry, failed_at: Tensor) -> Judgement:
    """Return the scheduler's edit, with commits that the blocks require and without commits that are not allowed.

    Commits are removed in rows whose numbers are not finite, and where guides do not allow them.

    Args:
        canvas: the state that the forward saw.
        query: the question to the model.
        seen: the predictions, statistics `[B, K, Q]`.
        carry: the scheduler's state.
        failed_at: `[B]` see `Canvas.reject_nonfinite`.
    """
    blocks = plugins.blocks
    opened = blocks.open(canvas, query, seen)
    if opened is not None:
        canvas = replace(canvas, stop=torch.where(canvas.age == 0, opened, canvas.stop))
    edit, carry = checked_answer(plugins.scheduler, plugins.scheduler.tell(canvas, query, seen, carry), canvas, query)
    if edit.candidate is not None:
        if query.candidates.stops is not None:
            canvas = replace(canvas, stop=query.candidates.stops.gather(1, edit.candidate[:, None])[:, 0])
        query, seen = query.under(edit.candidate), seen.under(edit.candidate)
    progressed = blocks.progress(canvas, query, seen, edit)
    if progressed is not edit:
        check_edit("blocks", blocks, progressed, canvas, query)
    edit = progressed
    if seen.written is not None and seen.written_confidence is not None:
        edit = replace(edit, ids=seen.written[:, 0], confidence=seen.written_confidence[:, 0])
    if edit.remask is not None and not plugins.owns_noise:
        edit = replace(edit, ids=edit.ids.masked_fill(edit.remask, plugins.context.spec.noise_id))
    failed_at, edit = canvas.reject_nonfinite(
        query.positions, edit, failed_at, seen.confidence, plugins.forbidden_token
    )
    refusals = None
    for guide in plugins.guides:
        if guide.vetoes:
            edit, refusals = checked_settlement(guide, guide.settle(canvas, query, seen, edit), canvas, query)
            edit = replace(edit, finish=refusals.stuck if edit.finish is None else edit.finish | refusals.stuck)
    return Judgement(canvas, query, seen, edit, carry, failed_at, refusals)


def tell(plugins: Plugins, state: Generation, query: Query, seen: Readout, spent: Spent) -> None:
    """Apply the changes that follow from the predictions, and move every row to its next step.

    Args:
        query: the question to the model.
        seen: the predictions, statistics `[B, K, Q]`.
        spent: the cost of the forward.
    """
    judged = judge(plugins, state.canvas, query, seen, state.carry, state.failed_at)
    canvas, query, seen, edit, state.carry, state.failed_at, refusals = judged
    if edit.candidate is not None:
        state.cache.adopt(edit.candidate)
    after = canvas.apply(query.positions, edit)
    stopped = plugins.stop(canvas, after, query, seen, edit)
    if stopped is not edit:
        check_stopped(plugins.stop, stopped, edit, canvas, query)
        if any(getattr(stopped, name) is not getattr(edit, name) for name in ("ids", "commit", "remask", "end")):
            after = canvas.apply(query.positions, stopped)
        edit = stopped
    state.cache.observe(canvas, query, edit, seen)
    state.recorder.note(canvas, after, query, edit, seen, spent)
    if refusals is not None:
        state.recorder.refuse(refusals)
    moved = plugins.blocks.move(after)
    if moved is None:
        state.canvas = after.advance(after.block_over(edit), canvas.layout.lookahead, edit.finish)
    else:
        opens = torch.zeros_like(after.done) if plugins.blocks.slides else None
        state.canvas = after.move(*moved, edit.finish, opens)
    if edit.resize is not None:
        live = ~canvas.done if edit.finish is None else ~(canvas.done | edit.finish)
        resized = effect_on(after, edit.resize, live)
        state.recorder.move(canvas, resized)
        state.canvas = resized.applied(state.canvas)
    if seen.logits is not None and state.cache.spec.self_conditioning:
        state.previous = conditioning(plugins, canvas, state.previous, seen.logits[:, 0].to(state.cache.spec.dtype))


def conditioning(plugins: Plugins, canvas: Canvas, before: Tensor | None, logits: Tensor) -> Tensor:
    """Return `[B, W, V]` the logits that condition the next forward: the step's `logits`, or those `before`."""
    if before is None or not isinstance(plugins.scheduler, Corrects):
        return logits
    before = pad(before, (0, 0, 0, logits.shape[1] - before.shape[1]))  # rows with a wider block may be done now
    return torch.where(plugins.scheduler.conditions(canvas)[:, None, None], logits, before)
