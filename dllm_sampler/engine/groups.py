"""Rows of one prompt, between two steps: they wait for each other, and rows are replaced by copies of others.

A group is the `Particles.count` consecutive rows of a prompt. A row that has closed a block, or made `Particles.every`
forwards, waits for the others of its group. Then the group has a meeting: `Particles.meet` decides which rows continue.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from dllm_sampler.cache.slots import Slots
from dllm_sampler.core.naming import named
from dllm_sampler.core.noise import row_seeds
from dllm_sampler.core.protocols import Meeting, Particles
from dllm_sampler.core.recorder import Recorder
from dllm_sampler.core.rows import where_rows
from dllm_sampler.core.values import Canvas
from dllm_sampler.engine.capture import no_grad_on_device
from dllm_sampler.engine.decide import Generation, Group
from dllm_sampler.engine.in_flight import Request, leaves
from dllm_sampler.engine.loop import Engine
from dllm_sampler.engine.tree import UnsupportedLeaf, map_leaves
from dllm_sampler.errors import UserError
from dllm_sampler.result import MeetingRecord

AGAIN = 1  # number of the seeds after a meeting. The seeds before the first step have 0


def meeting(
    particles: Particles, canvas: Canvas, recorder: Recorder, here: Tensor, final: Tensor, carry: Any = None
) -> Meeting:
    """Return the rows of all groups in the form that `Particles.meet` and `Particles.rate` take."""
    log_p = recorder.logprob.double().masked_fill(recorder.step_map < 0, 0).sum(1)
    shape = (-1, particles.count)
    return Meeting(canvas, log_p.view(shape), recorder.stuck.view(shape), here, final, carry)


class Groups:
    """The groups of a running generation, whose rows wait and meet.

    Args:
        engine: the engine that runs the steps.
        lanes: the request of each row. None where a lane is free.
    """

    def __init__(self, engine: Engine, lanes: Sequence[Request | None]):
        self.engine, self.lanes = engine, lanes
        self.kept: tuple[Generation, dict[str, Tensor]] | None = None  # the state before a step in which rows wait

    def __call__(self, state: Generation) -> None:
        """Hold the meetings that are due after a step. Then set `state.done` for groups whose rows have all ended.

        Reads the device once if the particles meet, and again in a meeting.

        Raises:
            UserError: the state of a plug-in cannot be copied row by row.
        """
        particles = self.engine.plugins.particles
        with no_grad_on_device(state.canvas.ids.device, self.engine.inference_mode):
            try:
                if particles.meets:
                    self._gather(state)
            except UnsupportedLeaf as error:
                raise UserError(
                    "particles-incompatible",
                    f"particles={named(particles)} copies rows, and {error}, which cannot be copied row by row. Use"
                    " particles=best_of_n.",
                ) from None
        for rows in self._running():
            # The host takes out rows that are done, or that failed, with all others of their group.
            over = all(state.done[row] for row in rows)
            failed = min((state.failed[row] for row in rows if row in state.failed), default=None)
            for row in rows:
                state.done[row] = over
                if failed is not None:
                    state.failed[row] = failed

    def _running(self) -> list[range]:
        """Return the rows of each group that runs."""
        count = self.engine.plugins.particles.count
        groups = (range(first, first + count) for first in range(0, len(self.lanes) - count + 1, count))
        return [rows for rows in groups if (one := self.lanes[rows.start]) is not None and one.state == "running"]

    def _gather(self, state: Generation) -> None:
        """Make rows wait that have reached a meeting, and hold the meetings of complete groups."""
        self._restore(state)
        canvas, group, particles = state.canvas, state.group, self.engine.plugins.particles
        assert group is not None
        over = canvas.done & ~group.waiting
        there = canvas.start > group.mark if particles.every is None else canvas.step >= group.mark + particles.every
        waiting = there & ~over
        rests, ended, changed = torch.stack([waiting | over, over, waiting & ~group.waiting]).tolist()
        here = [rows for rows in self._running() if all(rests[row] for row in rows)]
        if here or any(changed):
            state.canvas, state.group = replace(canvas, done=waiting | over), replace(group, waiting=waiting)
            if here:
                self._meet(state, state.group, here, [all(ended[row] for row in rows) for rows in here])
            self.engine.ask_and_poll(state)
        met = {row for rows in here for row in rows}
        if any(rests[row] and not ended[row] and row not in met for row in range(len(rests))):
            self._keep(state)

    def _keep(self, state: Generation) -> None:
        """Store cache and carry of a state, since the next step may change them in waiting rows.

        The next forward computes no column of these rows, even if it computes all columns of the others.
        """
        assert state.wanted is not None
        state.wanted = replace(state.wanted, sizes=state.wanted.sizes._replace(whole=False))
        cache = {path: leaf for path, leaf in leaves(state.cache).items() if isinstance(leaf, Tensor)}
        self.kept = replace(state), cache

    def _restore(self, state: Generation) -> None:
        """Restore cache and carry of the rows that waited in the last step."""
        if self.kept is None:
            return
        (before, cache), self.kept, empty = self.kept, None, state.canvas.length
        assert before.group is not None and state.group is not None
        waited = before.group.waiting & state.group.waiting  # other rows may be in their lanes now

        def visit(path: str, leaf: Any) -> Any:
            return where_rows(waited, cache[path], leaf, empty) if path in cache else leaf

        state.cache = map_leaves(state.cache, visit, "")
        state.carry = where_rows(waited, before.carry, state.carry, empty)

    def _meet(self, state: Generation, group: Group, groups: Sequence[range], final: Sequence[bool]) -> None:
        """Hold the meeting of `groups`, ranges of rows. `final` is true for groups whose rows have all ended."""
        particles, device = self.engine.plugins.particles, state.canvas.ids.device
        count = particles.count
        numbers = torch.tensor([rows.start // count for rows in groups], device=device)
        here = torch.zeros(len(state.canvas.ids) // count, dtype=torch.bool, device=device)
        ends = here.index_copy(0, numbers, torch.tensor(final, device=device))
        here = here.index_fill(0, numbers, True)
        kept = here.repeat_interleave(count)
        state.canvas = replace(state.canvas, done=state.canvas.done & ~(group.waiting & kept))
        found = particles.meet(meeting(particles, state.canvas, state.recorder, here, ends, state.carry), group.carry)
        carry = where_rows(kept, found.carry, group.carry, state.canvas.length)
        state.group = replace(group, carry=carry, waiting=group.waiting & ~kept)
        self._follow(state, groups, final, found.log_weights.tolist(), found.ancestors.tolist())
        mark = state.canvas.start if particles.every is None else state.canvas.step
        state.group = replace(state.group, mark=torch.where(kept, mark, group.mark))

    def _follow(
        self,
        state: Generation,
        groups: Sequence[range],
        final: Sequence[bool],
        log_weights: Sequence[list[float]],
        ancestors: Sequence[list[int]],
    ) -> None:
        """Record the weights and ancestors of a meeting, and replace rows by copies of their ancestors."""
        sources, copied = [*range(len(state.canvas.ids))], []
        for rows, last in zip(groups, final, strict=True):
            number = rows.start // len(rows)
            own = None if min(ancestors[number]) < 0 else ancestors[number]
            requests = [one for one in self.lanes[rows.start : rows.stop] if one is not None]
            requests[0].meetings.append(MeetingRecord(log_weights[number], own))
            if last:
                for request in requests:
                    request.state = "done"
            if own is not None:
                sources[rows.start : rows.stop] = [rows.start + one for one in own]
                copied.append(rows.start)
        if copied:
            device = state.canvas.ids.device
            self._copy(state, torch.tensor(sources, device=device))
            self._rekey(state, torch.tensor(copied, device=device))

    def _copy(self, state: Generation, sources: Tensor) -> None:
        """Replace each row by a copy of the row `sources [B]` with its whole state."""
        canvas, recorder, group = state.canvas, state.recorder, state.group
        assert group is not None
        moved = (sources != torch.arange(len(sources), device=sources.device)).nonzero()[:, 0]

        def visit(path: str, leaf: Any) -> Any:
            if isinstance(leaf, Slots):
                leaf.copy_rows(sources[moved], moved)
            elif isinstance(leaf, Tensor) and leaf.numel():
                if not leaf.dim() or len(leaf) != len(sources):
                    raise UnsupportedLeaf(path, leaf)
                return leaf.index_select(0, sources)
            return leaf

        parts = (state.cache, state.carry, state.failed_at, recorder, group.carry)
        names = ("cache", "carry", "failed_at", "recorder", "particles")
        state.cache, state.carry, state.failed_at, state.recorder, carry = (
            map_leaves(part, visit, name) for name, part in zip(names, parts, strict=True)
        )
        # The rows of a group have one prompt. What no step changes of the canvas is the same for all of them.
        tensors = {one.name: getattr(canvas, one.name) for one in fields(canvas) if one.name != "layout"}
        state.canvas = replace(canvas, **{name: one.index_select(0, sources) for name, one in tensors.items()})
        state.group = replace(
            group,
            carry=carry,
            nfe=group.nfe + recorder.nfe - state.recorder.nfe,
            computed=group.computed + recorder.computed - state.recorder.computed,
        )

    def _rekey(self, state: Generation, firsts: Tensor) -> None:
        """Give the rows of groups other seeds, so that copies draw differently. `firsts [n]` are the first rows."""
        layout, count = state.canvas.layout, self.engine.plugins.particles.count
        rows = firsts[:, None] + torch.arange(count, device=firsts.device)
        seeds = row_seeds(layout.seeds[firsts], AGAIN, count)
        seeds = layout.seeds.index_copy(0, rows.flatten(), seeds.flatten())
        state.canvas = state.canvas.with_layout(seeds=seeds)
