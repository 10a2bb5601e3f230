"""Packed steps: a forward computes the positions that the rows of a batch need, side by side, and no others.

A pack has T *entries*, sorted by row, candidate and column. A network sees them as one row `[1, T, D]`. Only attention,
the writing of keys and values, and routing by block (`Pack.together`) know the row of an entry. R of the T hidden
states are *head rows*, which the LM head turns into logits.

The host reads T and R once between two steps (`host_counts`). If fewer entries are left than the host expects,
*fillers* take their place. A filler is at the empty slot of the last row.

Letters: B rows, K candidates, Q queried positions, L columns, T entries, R head rows, S segments of a row (its
candidates, or the canvas and its shadows).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dllm_sampler.core import select
from dllm_sampler.core.values import Canvas, Query, Sizes
from dllm_sampler.core.visibility import Visible, predictors, visible

if TYPE_CHECKING:
    from dllm_sampler.core.spec import ModelSpec


UNMEASURED = Sizes(queries=1, block=1, computed=1, head_rows=1, longest=1, whole=True)


@dataclass(frozen=True)
class ForwardRequest:
    """A request for the next forward: sets of positions, and their sizes once the host has read them."""

    query: Query
    computed: Tensor  # [B, L+1] bool: columns that each row computes. A finished row computes none
    answered: Tensor  # [B, K, Q] bool: queried positions that this forward predicts
    previous: Tensor | None = None  # [B, W, V] the block's logits in the row's last step, void at age 0
    most_candidates: int | None = None  # limit on candidates that a `Paced` scheduler was given. None: no limit
    sizes: Sizes = UNMEASURED

    @staticmethod
    def of(query: Query, computed: Tensor, predicted: Tensor) -> ForwardRequest:
        """Return the request for `query`.

        Args:
            computed: `[B, L+1] bool` columns that the forward computes.
            predicted: `[B, L+1] bool` columns that it predicts.
        """
        answered = predicted.gather(1, query.positions)[:, None]  # [B, 1, Q]; the empty slot is never computed
        live, stops = query.candidates.live, query.candidates.stops
        answered = answered.expand(query.ids.shape) if live is None else answered & live[..., None]
        if stops is not None:
            answered = answered & (query.positions[:, None] < stops[..., None])
        return ForwardRequest(query, computed, answered)

    def segments(self, canvas: Canvas) -> Tensor:
        """Return `[B, K, L+1] bool` columns that each candidate computes."""
        query, chosen = self.query, self.computed[:, None].expand(-1, self.query.ids.shape[1], -1)
        live, stops = query.candidates.live, query.candidates.stops
        chosen = chosen if live is None else chosen & live[..., None]
        if stops is None or query.limit is None:
            return chosen
        hidden = canvas.columns() >= stops[..., None]
        return chosen & ~(hidden if canvas.layout.given is None else hidden & ~canvas.layout.frozen[:, None])

    def shadows(self, canvas: Canvas) -> Tensor:
        """Return `[B, Q] bool` answered positions of the block that get a shadow in a `leave_one_out` query."""
        shadows, causal = self.answered[:, 0] & canvas.inside(self.query.positions), self.query.causal
        return shadows if causal is None else shadows & causal[:, None]

    def entries(self, canvas: Canvas) -> Tensor:
        """Return `[B]` the number of entries of each row."""
        live = self.query.candidates.live
        if self.query.candidates.stops is not None:
            return self.segments(canvas).sum((1, 2))
        count = self.computed.sum(1)
        if live is not None:
            count = count * live.sum(1)
        elif self.query.ids.shape[1] > 1:
            count = count * self.query.ids.shape[1]
        return count + self.shadows(canvas).sum(1) if self.query.leave_one_out else count


def computable(canvas: Canvas, query: Query, chosen: Tensor | None) -> Tensor:
    """Return `[B, L+1] bool` columns of live rows that a forward computes.

    Args:
        chosen: `[B, L+1] bool` columns that the cache chose. None means all.
    """
    seen = visible(canvas, query) & ~canvas.done[:, None]
    return seen if chosen is None else chosen & seen


def forward_request(canvas: Canvas, query: Query, chosen: Tensor | None, spec: ModelSpec) -> ForwardRequest:
    """Return the request for `query` outside the loop.

    Args:
        chosen: `[B, L+1] bool` columns that the forward computes. None means all.
    """
    computed = computable(canvas, query, chosen)
    return ForwardRequest.of(query, computed, answerable(canvas, query, computed, spec))


def answerable(canvas: Canvas, query: Query, computed: Tensor, spec: ModelSpec) -> Tensor:
    """Return `[B, L+1] bool` columns that are predicted if the columns `computed [B, L+1]` are."""
    if spec.encoder:
        return computed & canvas.in_block()
    if not spec.shift and not spec.seeds:
        return computed
    return computed.gather(
        1, predictors(canvas, canvas.columns().expand_as(computed), spec.shift, spec.seeds, query.shifted)
    )


def host_counts(canvas: Canvas, wanted: ForwardRequest, failed_at: Tensor, joint: bool = False) -> Tensor:
    """Return `[8 B] int64`, the numbers that the host reads between two steps: eight for each row.

    A ninth, the number of hidden columns, follows if the query can hide some or a guide is joint. A joint guide adds a
    tenth, the length of the `stretch`. `read_counts` has the order.

    Args:
        failed_at: `[B]` see `Canvas.reject_nonfinite`.
        joint: a guide chooses tokens together (`Guide.joint`).
    """
    limit, entries = wanted.query.limit, wanted.entries(canvas)
    end = canvas.end if limit is None else torch.minimum(canvas.end, limit)
    queries, head_rows = (wanted.query.positions < canvas.length).sum(1), wanted.answered.sum((1, 2))
    block = canvas.stop - canvas.start
    whole = limit is None and wanted.query.hidden is None
    more = [] if whole and not joint else [canvas.end - visible(canvas, wanted.query).sum(1)]
    if joint:
        begin, over = stretch(canvas, wanted.query.positions)
        more.append(over - begin)
    return torch.cat([entries, head_rows, queries, block, end, canvas.age, canvas.done.long(), failed_at, *more])


def stretch(canvas: Canvas, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return `[B]` where the stretch of each answer begins and `[B]` where it ends, counted from the answer's start.

    A joint guide (`Guide.joint`) chooses the tokens of the stretch one after the other. Before the stretch every token
    is committed. After it every position is a mask that the step does not ask about.

    Args:
        positions: `[B, Q]` columns that are asked about.
    """
    answer = canvas.answer()  # [B, N]
    asked = torch.zeros_like(canvas.masked).scatter(1, positions, torch.ones_like(positions, dtype=torch.bool))
    asked, free = asked.gather(1, answer), canvas.masked.gather(1, answer)
    there, place = answer < canvas.end[:, None], select.arange(answer.shape[1], answer.device)
    end = torch.where(there & (asked | ~free), place + 1, 0).amax(1)
    begin = torch.where(there & (asked | free), place, answer.shape[1]).amin(1)
    return torch.minimum(begin, end), end


def with_exact_sizes(canvas: Canvas, wanted: ForwardRequest) -> ForwardRequest:
    """Return the request with its exact sizes, for one forward outside the loop.

    The host waits for the device here, because nothing else knows how large that forward is.
    """
    counts = host_counts(canvas, wanted, torch.zeros_like(canvas.start))
    return replace(wanted, sizes=read_counts(counts, len(canvas.ids)).sizes)


class HostCounts(NamedTuple):
    """The state of a generation as the host knows it between two steps."""

    sizes: Sizes
    done: list[bool]  # of each row
    failed: dict[int, int]  # rows without finite statistics, and the step (from 1) that failed


def read_counts(counts: Tensor, batch: int) -> HostCounts:
    """Return the numbers of `host_counts` for a `batch` of rows. The host waits for the device."""
    numbers = _to_host(counts)
    entries, head_rows, queries, block, end, age, done, failed_at, *more = (
        numbers[at : at + batch] for at in range(0, len(numbers), batch)
    )
    live = [row for row, over in enumerate(done) if not over]
    rows = tuple(zip(entries, end, strict=True))
    sizes = Sizes(
        queries=max([1, *(queries[row] for row in live)]),
        block=max([1, *(block[row] for row in live)]),
        computed=max(1, sum(entries)),
        head_rows=max(1, sum(head_rows)),
        longest=max(1, *entries),
        whole=all(entries[row] == end[row] and not any(hidden[row] for hidden in more[:1]) for row in live),
        opens=any(age[row] == 0 for row in live),
        rows=rows,
        stretch=max([1, *(more[1][row] for row in live)]) if len(more) > 1 else None,
    )
    failed = {row: step for row, step in enumerate(failed_at) if step}
    return HostCounts(sizes, [bool(over) for over in done], failed)


def _to_host(numbers: Tensor) -> list[int]:
    """Return numbers on the host, through pinned memory if there is a GPU."""
    if numbers.device.type != "cuda":
        return numbers.tolist()
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)  # from torch's cache of such memory
    host.copy_(numbers, non_blocking=True)
    torch.cuda.current_stream(numbers.device).synchronize()
    return host.tolist()


@dataclass(frozen=True)
class HeadRows:
    """The queried positions that a forward predicts, one for each row of logits.

    It converts values from the queried positions `[B, K, Q, ...]` to head rows `[R, ...]` and back.
    """

    place: Tensor  # [R] in the flat [B*K*Q]. B*K*Q for a filler
    query: Query
    whole: bool  # every place is answered, in order
    stretch: int | None = None  # see `Sizes.stretch`

    @staticmethod
    def of(wanted: ForwardRequest) -> HeadRows:
        """Return the head rows of a request."""
        flat, sizes = wanted.answered.flatten(), wanted.sizes
        # As many answers as places: then each place has one, unless the size was rounded up, or raised from 0 to 1.
        if 1 < len(flat) == sizes.head_rows and sizes.rows is not None:
            return replace(HeadRows.every(wanted.query), stretch=sizes.stretch)
        place = torch.nonzero_static(flat, size=sizes.head_rows, fill_value=len(flat))[:, 0]
        return HeadRows(place, wanted.query, False, sizes.stretch)

    @staticmethod
    def every(query: Query) -> HeadRows:
        """Return one head row for each queried position."""
        return HeadRows(select.arange(query.ids.numel(), query.ids.device), query, True)

    @cached_property
    def _there(self) -> Tensor:
        return self.place.clamp(max=self.query.ids.numel() - 1)  # [R]

    @cached_property
    def row(self) -> Tensor:
        """`[R]` row of the batch."""
        return self._there // (self.query.ids.shape[1] * self.query.ids.shape[2])

    @cached_property
    def candidate(self) -> Tensor:
        """`[R]` number of the candidate in its row."""
        return self._there // self.query.ids.shape[2] % self.query.ids.shape[1]

    @cached_property
    def position(self) -> Tensor:
        """`[R]` column that is predicted."""
        flat = self.row * self.query.ids.shape[2] + self._there % self.query.ids.shape[2]
        return self.query.positions.flatten()[flat]

    def step(self, canvas: Canvas) -> Tensor:
        """Return `[R]` the number of the forward that keys each head row's noise."""
        steps = self.query.candidates.step
        if steps is None:
            return canvas.step[self.row]
        steps = steps.expand(self.query.ids.shape[:2])
        return steps.flatten()[self.row * self.query.ids.shape[1] + self.candidate]

    def pick(self, values: Tensor) -> Tensor:
        """Return the head rows' values `[R, ...]` out of `values [B, K, Q, ...]`."""
        flat = values.flatten(0, 2)
        return flat if self.whole else flat.index_select(0, self._there)

    def spread(self, values: Tensor) -> Tensor:
        """Return `[B, K, Q, ...]` with `values [R, ...]` at their positions, and 0 where nothing is predicted."""
        shape = self.query.ids.shape
        if self.whole:
            return values.unflatten(0, shape)
        size = shape.numel()
        room = values.new_zeros(size + 1, *values.shape[1:])  # fillers go after the last place
        return room.index_copy_(0, self.place, values)[:size].unflatten(0, shape)

    def under(self, candidate: Tensor) -> HeadRows:
        """Return the head rows of one candidate per row, `candidate [B]`, for a query with K = 1."""
        there = self.spread(torch.ones_like(self.place))  # [B, K, Q]
        there = there.gather(1, candidate[:, None, None].expand(-1, 1, there.shape[2])).flatten() > 0  # [B*Q]
        place = torch.nonzero_static(there, size=len(there), fill_value=len(there))[:, 0]
        return HeadRows(place, self.query.under(candidate), False, self.stretch)


@dataclass(frozen=True)
class Pack:
    """The entries of a forward.

    A segment is a candidate of a row. An entry of a candidate sees entries of the same segment only. A `leave_one_out`
    query has two segments: the canvas and its shadows. A shadow sees the other shadows. It also sees the canvas, but
    not the column that it predicts. If the query is `causal`, each shadow is a segment by itself with a negative
    number.
    """

    place: Tensor  # [T] in the flat [B*S*(L+1)]
    row: Tensor  # [T]
    column: Tensor  # [T] L for a filler
    segment: Tensor | None  # [T] 0 for the canvas or the first candidate. None if each row has one
    unseen: Tensor | None  # [T] column that a shadow does not see, -1 for other entries. None without shadows
    head_entries: Tensor  # [R] the entry that each head row continues
    slots: Tensor  # [T] where keys and values are stored, in the flat [B*(L+1)]. An empty slot means nowhere
    chosen: Tensor  # [B, S, L+1] bool: the entries as a set
    unread: Tensor | None  # [B, L+1] bool: stored columns that no entry sees. None for no columns
    end: Tensor  # [B] columns from here on are hidden
    until: Tensor | None  # [T] first column that each entry does not see. None if it is `end` for all
    sizes: Sizes

    @staticmethod
    def of(canvas: Canvas, wanted: ForwardRequest, head_rows: HeadRows, spec: ModelSpec, sees: Visible) -> Pack:
        """Pack a request.

        Args:
            head_rows: the head rows of the request.
            sees: the columns that each column sees.
        """
        query, sizes, columns = wanted.query, wanted.sizes, canvas.length + 1
        if query.leave_one_out or query.ids.shape[1] > 1:
            return Pack._segmented(canvas, wanted, head_rows, spec, sees)
        place = _places(wanted.computed, sizes.computed)
        row, column = place // columns, place % columns
        predict = predictors(canvas, query.positions, spec.shift, spec.seeds, query.shifted)  # [B, Q]
        origin = select.arange(len(canvas.ids), place.device)[:, None] * columns
        replies = _entries_at(place, head_rows.pick((predict + origin)[:, None]))
        until, chosen = sees.at(row, column), wanted.computed[:, None]
        return Pack(place, row, column, None, None, replies, place, chosen, query.hidden, sees.end, until, sizes)

    @staticmethod
    def _segmented(canvas: Canvas, wanted: ForwardRequest, head_rows: HeadRows, spec: ModelSpec, sees: Visible) -> Pack:
        """Pack a request with several candidates, or with shadows."""
        query, sizes, columns = wanted.query, wanted.sizes, canvas.length + 1
        batch, device = len(canvas.ids), canvas.ids.device
        predict = predictors(canvas, query.positions, spec.shift, spec.seeds, query.shifted)  # [B, Q]
        if query.leave_one_out:
            there = wanted.shadows(canvas)
            shadow = torch.zeros_like(wanted.computed).scatter(1, predict.masked_fill(~there, canvas.length), there)
            chosen = torch.stack([wanted.computed, shadow], 1)  # [B, S, L+1]
        else:
            there, chosen = None, wanted.segments(canvas)
        segments = chosen.shape[1]
        place = _places(chosen, sizes.computed)
        column, line = place % columns, place // columns
        row, segment = line // segments, line % segments
        slots = torch.where(segment == 0, row * columns + column, batch * columns - 1)
        # The entry that answers each place: candidate and predicting column, or a shadow where the token is known.
        at = predict[:, None].expand(query.ids.shape)  # [B, K, Q]
        origin = select.arange(batch * query.ids.shape[1], device).view(batch, -1, 1) * columns
        unseen = None
        if there is not None:
            known = there[:, None] & ~canvas.masked.gather(1, query.positions)[:, None]
            if query.causal is not None:
                known = there[:, None]
                segment = torch.where(line % 2 == 1, -1 - column, 0)
            origin = origin * 2 + known * columns
            hides = torch.full_like(canvas.ids, -1).scatter(1, predict, query.positions)  # [B, L+1]
            unseen = torch.where(line % 2 == 1, hides.flatten()[row * columns + column], -1)
        # Several segments compute these columns for themselves.
        unread = wanted.computed if query.hidden is None else query.hidden | wanted.computed
        replies, until = _entries_at(place, head_rows.pick(at + origin)), sees.at(row, column)
        return Pack(place, row, column, segment, unseen, replies, slots, chosen, unread, sees.end, until, sizes)

    @cached_property
    def bounds(self) -> Tensor:
        """`[B+1]` first entry of each row, and the end of the last row."""
        counts = self.chosen.sum((1, 2))
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    def together(self, length: int) -> Tensor:
        """Return `[T]` a number below T for each entry. Entries of one block, row and segment share it.

        Args:
            length: columns of a block.
        """
        columns = self.chosen.shape[-1]
        block = self.column // length + (self.column == columns - 1)  # fillers, which come last, have one of their own
        number = self.place // columns * (columns // length + 2) + block
        return torch.searchsorted(number, number)

    def mixed(self, canvas: Canvas, query: Query) -> Tensor:
        """Return `[T]` the place of each entry's mixture in the flat `[B*Q]`. Entries that read a token have B*Q."""
        assert query.mixture is not None and self.segment is None
        where = query.mixture.where & (query.positions < canvas.length)
        size = where.numel()
        places = select.arange(size, where.device).view_as(where).masked_fill(~where, size)
        return torch.full_like(canvas.ids, size).scatter(1, query.positions, places).flatten()[self.place]

    def ids(self, canvas: Canvas, query: Query, mask_id: int | None) -> Tensor:
        """Return `[T]` the token of each entry.

        It is the canvas's token, the candidate's, or a mask for a shadow.
        """
        candidates = query.ids.shape[1]
        if candidates == 1 and not query.leave_one_out:
            return canvas.ids.scatter(1, query.positions, query.ids[:, 0]).flatten().index_select(0, self.place)
        rows = query.rows(canvas)  # [B, K, L+1]
        if not query.leave_one_out:
            return rows.flatten().index_select(0, self.place)
        assert self.segment is not None and mask_id is not None
        shadowed = rows.flatten()[self.row * rows.shape[2] + self.column]
        return shadowed.masked_fill(self.segment != 0, mask_id)


def _places(chosen: Tensor, count: int) -> Tensor:
    """Return `[T]` the places of the columns `chosen [B, ..., L+1] bool` in the flat tensor, with T = `count`.

    A filler is at the last place of all, the empty slot of the last row.
    """
    return torch.nonzero_static(chosen.reshape(-1), size=count, fill_value=chosen.numel() - 1)[:, 0]


def _entries_at(place: Tensor, wanted: Tensor) -> Tensor:
    """Return `[R]` the indices in `place [T]` of the places `wanted [R]`."""
    return torch.searchsorted(place, wanted).clamp(max=len(place) - 1)
