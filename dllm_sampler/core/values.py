"""The four values that travel through a step: `Canvas`, `Query`, `Readout`, `Edit`.

Letters: B rows, K candidates per row, Q queried positions, R head rows (`core.packing`), L canvas length, V
vocabulary, D width. Slot L of every `[B, L+1]` tensor is the *empty slot*: frozen, never noise, its key never seen. A
row with fewer than Q positions pads with L, so nothing needs a "valid" flag. Rows are left-aligned: a prompt begins at
column 0, and its answer follows.

Tokens of an answer may be given (`Layout.given`). They are on the canvas from the start, frozen like the prompt. No
step commits them: schedules count the *free* columns of an answer. If nothing is given, all are free.

Block-causal attention has a grid (`Layout.grid`): no block crosses one of its lines. Without a grid the active block
is used in its place. With `Grid.part` a block of the grid is decoded in parts. Each part is the active block in
turn.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from dllm_sampler.core import select
from dllm_sampler.core.spec import BlocksFrom

FREE = -1  # in place of a given token: the position is to be generated


class Sizes(NamedTuple):
    """Static sizes of the next step. The host reads them between two steps (`packing.host_counts`)."""

    queries: int  # no row asks about more positions
    block: int  # no live row's block is wider
    computed: int  # T: entries of the pack, over all rows
    head_rows: int  # R: rows of the head, over all rows
    longest: int  # no row has more entries
    whole: bool  # every live row computes all columns that it has, and the query hides none
    opens: bool = True  # some live row opens a block
    rows: tuple[tuple[int, int], ...] | None = None  # entries and end of each row. None if not fixed
    stretch: int | None = None  # no live row's is longer (`packing.stretch`). None if not measured


@dataclass(frozen=True)
class Spent:
    """Cost of a forward for each row, 0 for finished rows. The recorder adds it up."""

    nfe: Tensor  # [B] passes
    computed: Tensor  # [B] positions computed, candidates and guidance branches included


class Noise(Protocol):
    """A source of noise for one batch.

    `positions` is `[B, Q]`. Its padding may get any value.
    """

    def tokens(self, canvas: Canvas, head_rows: Any, vocab: int) -> Tensor:
        """Return standard Gumbel noise `[R, V]` for `head_rows` (`packing.HeadRows`).

        The largest of logits plus noise is a sample of their softmax.
        """
        ...

    def order(self, canvas: Canvas, positions: Tensor, count: Tensor) -> Tensor:
        """Return Gumbel noise `[B, Q]` for ranking positions.

        The k best of score plus noise are a sample without replacement.
        """
        ...

    def uniform(self, canvas: Canvas, positions: Tensor) -> Tensor:
        """Return uniform numbers `[B, Q]` in (0, 1)."""
        ...

    def ids(self, canvas: Canvas, positions: Tensor, vocab: int) -> Tensor:
        """Return `[B, Q] int64` token ids, all equally likely: the noise of uniform diffusion."""
        ...


@dataclass(frozen=True)
class Grid:
    """Lines that no block crosses, one every `length` columns. Block-causal attention uses the same lines."""

    length: int
    part: int | None = None  # blocks of attention are decoded in parts of this length, which divides `length`
    blocks_from: BlocksFrom = "text"  # where blocks are counted from


@dataclass(frozen=True)
class Layout:
    """The part of a canvas that no step of a generation changes."""

    frozen: Tensor  # [B, L+1] bool: prompt, given tokens of the answer, padding, the empty slot
    first: Tensor  # [B] first column of the answer
    new_tokens: Tensor  # [B] columns of each answer, before a stop cuts it
    seeds: Tensor  # [B] int64
    lookahead: Tensor  # [B] columns of a block that opens, as far as there is room
    noise: Noise
    shortest: int  # no answer has fewer `new_tokens`
    longest: int  # no answer has more
    width: int  # no block is ever wider
    padded: bool  # some row does not see every column: attention needs a key mask
    grid: Grid | None = None
    given: Tensor | None = None  # [B] end of the last given token, or `first` without one. None if no row has any
    form: Tensor | None = None  # [B] number of each answer's form (`Guide.forms`). None if no guide has a list
    surplus: Tensor | None = None  # [B] number of columns at the end of `new_tokens` that are decoded but not returned

    @property
    def answer_end(self) -> Tensor:
        """`[B]` end of the columns that are reserved for each answer."""
        return self.first + self.new_tokens

    @property
    def given_end(self) -> Tensor:
        """`[B]` end of the last given token of each answer. The prompt's end if no token is given."""
        return self.first if self.given is None else self.given

    @property
    def grid_origin(self) -> Tensor | None:
        """`[B]` the grid's first line. None for column 0."""
        if self.grid is None or self.grid.blocks_from == "text":
            return None
        return self.first if self.grid.blocks_from == "whole_prompt" else self.first % self.grid.length


@dataclass(frozen=True)
class Canvas:
    """The state of a batch between two steps. Only `apply` writes tokens, and only `move` begins a block.

    `Blocks.open` sets the end of a new block, and an edit may shorten the active block.
    """

    ids: Tensor  # [B, L+1] int64
    masked: Tensor  # [B, L+1] bool: still noise (never inferred from ids == mask_id)
    start: Tensor  # [B] first column of the active block
    stop: Tensor  # [B] end of the active block
    end: Tensor  # [B] nothing from here on is seen
    age: Tensor  # [B] forwards made on the active block. At 0 the next forward opens it
    step: Tensor  # [B] forwards made by this row
    done: Tensor  # [B] bool
    layout: Layout

    def with_layout(self, **changes: Any) -> Canvas:
        """Return the same canvas with other fields of the layout."""
        return replace(self, layout=replace(self.layout, **changes))

    @property
    def length(self) -> int:
        """L, the number of columns without the empty slot."""
        return self.ids.shape[1] - 1

    def answer(self) -> Tensor:
        """Return `[B, N]` the columns of each answer, padded with L."""
        layout = self.layout
        column = select.arange(layout.longest, self.ids.device)
        return (layout.first[:, None] + column).masked_fill(column >= layout.new_tokens[:, None], self.length)

    def requested(self) -> Tensor:
        """Return `[B, N]` the columns of each answer that the caller requested, padded with L.

        Reads the device if the layout has a `surplus`.
        """
        layout = self.layout
        if layout.surplus is None:
            return self.answer()
        wanted = layout.new_tokens - layout.surplus
        answer = self.answer()[:, : int(wanted.max())]
        return answer.masked_fill(answer >= (layout.first + wanted)[:, None], self.length)

    def columns(self) -> Tensor:
        """Return `[1, L+1]` the column numbers. Never write to them."""
        return select.line(self.ids.shape[1], self.ids.device)

    def seen(self) -> Tensor:
        """Return `[B, L+1] bool` columns that exist for the row: those before its end."""
        return self.columns() < self.end[:, None]

    def in_block(self) -> Tensor:
        """Return `[B, L+1] bool` columns of the active block."""
        column = self.columns()
        return (column >= self.start[:, None]) & (column < self.stop[:, None])

    def block_end(self, start: Tensor, width: int | Tensor) -> Tensor:
        """Return `[B]` the provisional end of blocks that begin at `start [B]`.

        It is `width` columns after the start, or at the grid's next line.
        """
        stop, grid = torch.minimum(start + width, self.end), self.layout.grid
        if grid is None:
            return stop
        length = grid.part or grid.length
        return torch.minimum(stop, self.grid_line(start, length) + length)

    def window(self, width: int, back: int = 0) -> Tensor:
        """Return `[B, width]` the active block's columns from `back` before its start, padded with the empty slot."""
        column = (self.start - back if back else self.start)[:, None] + select.arange(width, self.ids.device)
        return column.masked_fill(column >= self.stop[:, None], self.length)

    def frontier(self) -> Tensor:
        """Return `[B]` the first noise from the active block on, or `end` if there is none."""
        column = self.columns()
        noise = self.masked & (column >= self.start[:, None])
        return torch.where(noise, column, self.end[:, None]).amin(1)

    def free_before(self, until: Tensor) -> Tensor:
        """Return `[B]` the number of free columns of each answer before `until [B]`."""
        if self.layout.given is None:
            return until - self.layout.first
        return (~self.layout.frozen & (self.columns() < until[:, None])).sum(1)

    def free_total(self) -> Tensor:
        """Return `[B]` the number of free columns of each answer, before a stop cuts it."""
        return self.layout.new_tokens if self.layout.given is None else self.free_before(self.layout.answer_end)

    def free_in_block(self) -> Tensor:
        """Return `[B]` the number of free columns of the active block."""
        if self.layout.given is None:
            return self.stop - self.start
        return (~self.layout.frozen & self.in_block()).sum(1)

    def progress(self) -> Tensor:
        """Return `[B]` the committed share of each answer's free columns."""
        return 1 - self.masked.sum(1) / self.free_before(self.end)

    def next_free(self, column: Tensor) -> Tensor:
        """Return `[B]` the start of the next block if a block ends at `column [B]`.

        It is the first free column from `column` on, or `end`. It may not be noise, since a drafting scheduler may have
        written into the block already.
        """
        if self.layout.given is None:
            return column
        columns = self.columns()
        free = ~self.layout.frozen & (columns >= column[:, None])
        return torch.where(free, columns, self.end[:, None]).amin(1)

    def grid_line(self, column: Tensor, length: int) -> Tensor:
        """Return `[B]` the last line at or before each `column [B]` of an answer, of a grid with blocks of `length`."""
        origin = self.layout.grid_origin
        return column - (column if origin is None else column - origin) % length

    def grid_start(self) -> Tensor:
        """Return `[B]` the first column of the grid's block that contains the active block."""
        grid = self.layout.grid
        return self.start if grid is None else self.grid_line(self.start, grid.length)

    def grid_end(self) -> Tensor:
        """Return `[B]` the end of the grid's block that contains the active block."""
        grid = self.layout.grid
        return self.stop if grid is None else torch.minimum(self.grid_start() + grid.length, self.end)

    def in_grid_block(self) -> Tensor:
        """Return `[B, L+1] bool` columns of the grid's block that contains the active block."""
        column = self.columns()
        return (column >= self.grid_start()[:, None]) & (column < self.grid_end()[:, None])

    def noise_left(self) -> Tensor:
        """Return `[B] int64` the number of masked columns in the active block."""
        return (self.masked & self.in_block()).sum(1)

    def inside(self, positions: Tensor) -> Tensor:
        """Return `[B, Q] bool` positions in the active block. Given tokens are not part of it."""
        inside = (positions >= self.start[:, None]) & (positions < self.stop[:, None])
        return inside if self.layout.given is None else inside & ~self.layout.frozen.gather(1, positions)

    def eligible(self, positions: Tensor) -> Tensor:
        """Return `[B, Q] bool` positions of noise in the active block: a scheduler may commit these."""
        return self.masked.gather(1, positions) & self.inside(positions)

    def block_over(self, edit: Edit) -> Tensor:
        """Return `[B] bool` rows that leave their block after `edit`: no noise is left in it, or `edit` closes it.

        Call it on the canvas that has the edit already.
        """
        over = self.noise_left() == 0
        over = over if edit.close_block is None else over | edit.close_block
        return over if edit.keep_block is None else over & ~edit.keep_block

    def apply(self, positions: Tensor, edit: Edit) -> Canvas:
        """Return the canvas with an edit. Only this function writes tokens.

        It cannot change a prompt, a given token, padding or a finished row.

        Args:
            positions: `[B, Q]` columns that the edit is about.
            edit: tokens `[B, Q]`, and new ends of blocks and rows `[B]`.
        """
        touched = edit.commit if edit.remask is None else edit.commit | edit.remask
        kept = self.layout.frozen.gather(1, positions) | self.done[:, None] | ~touched  # [B, Q]
        # Positions that are not written are replaced by the empty slot and what it contains.
        at = positions.masked_fill(kept, self.length)
        after = replace(
            self,
            ids=self.ids.scatter(1, at, torch.where(kept, self.ids[:, -1:], edit.ids)),
            masked=self.masked.scatter(1, at, False if edit.remask is None else edit.remask & ~kept),
        )
        if edit.stop is not None:
            after = replace(after, stop=torch.where(self.done, self.stop, torch.minimum(self.stop, edit.stop)))
        if edit.end is None:
            return after
        end = torch.minimum(self.end, edit.end).clamp(min=self.layout.given_end)  # what is given stays
        end = torch.where(self.done, self.end, end)
        masked = after.masked & (self.columns() < end[:, None])
        return replace(after, end=end, stop=torch.minimum(after.stop, end), masked=masked)

    def reject_nonfinite(
        self, positions: Tensor, edit: Edit, failed_at: Tensor, confidence: Tensor, forbidden: int | None
    ) -> tuple[Tensor, Edit]:
        """Remove the commits of rows whose statistics are not finite, and all commits of a `forbidden` token.

        Args:
            failed_at: `[B]` the first forward (from 1) that failed. 0 if none did.
            confidence: `[B, K, Q]` with NaN where the model returned no finite number.
            forbidden: a token that is never committed.

        Returns:
            `[B]` `failed_at` after this forward, and the edit without these commits.
        """
        failing = confidence.isnan().any(dim=(1, 2)) & ~self.done
        failed_at = torch.where(failing & (failed_at == 0), self.step + 1, failed_at)
        commit = edit.commit & (failed_at == 0)[:, None]
        if forbidden is not None:
            commit = commit & (edit.ids != forbidden)
        return failed_at, replace(edit, commit=commit)

    def uniform(self, positions: Tensor) -> Tensor:
        """Return `[B, Q]` uniform numbers in (0, 1) that belong to this step and `positions [B, Q]`."""
        return self.layout.noise.uniform(self, positions)

    def renoised(self, vocab: int, in_new_blocks: bool = False) -> Canvas:
        """Return the canvas with fresh random tokens at noise, for the next forward of uniform diffusion.

        A row draws for its block only. Tokens at noise have no meaning, so this commits nothing.

        Args:
            vocab: number of tokens.
            in_new_blocks: draw in blocks that open, and leave the noise of others.
        """
        at = self.window(self.layout.width)  # [B, W]
        fresh = self.masked.gather(1, at) & ~self.done[:, None]
        fresh = fresh & (self.age == 0)[:, None] if in_new_blocks else fresh
        drawn = torch.where(fresh, self.layout.noise.ids(self, at, vocab), self.ids.gather(1, at))
        return replace(self, ids=self.ids.scatter(1, at, drawn))

    def advance(self, over: Tensor, width: int | Tensor, finish: Tensor | None) -> Canvas:
        """Move rows to their next block.

        Args:
            over: `[B] bool` rows that leave their block.
            width: columns of a new block. The end of the row and the grid may shorten it.
            finish: `[B] bool` rows that end here.
        """
        over = over > self.done  # finished rows rest
        start = torch.where(over, self.next_free(self.stop), self.start)
        return self.move(start, torch.where(over, self.block_end(start, width), self.stop), finish, over)

    def move(self, start: Tensor, stop: Tensor, finish: Tensor | None, opens: Tensor | None = None) -> Canvas:
        """Count the step, and make the columns from `start [B]` to `stop [B]` the active block.

        Args:
            finish: `[B] bool` rows that end here.
            opens: `[B] bool` rows that begin a block. None means those whose block begins at another column now.
        """
        live, done = ~self.done, self.done | (start >= self.end)
        return replace(
            self,
            start=start,
            stop=stop,
            age=(self.age + live).masked_fill(start != self.start if opens is None else opens, 0),
            step=self.step + live,
            done=done if finish is None else done | finish,
        )


class Candidates(NamedTuple):  # dynamo traces a tuple as a default, and no dataclass
    """The candidates of a query that has several for a row."""

    live: Tensor | None = None  # [B, K] bool: candidates that are computed. None means all K
    step: Tensor | None = None  # [B, K] step of each candidate, which keys its noise. None means canvas.step
    stops: Tensor | None = None  # [B, K] end of each candidate's active block, under a limit. None: the row's end
    forks: bool = False  # the step may continue from any candidate (`Edit.candidate`), whose keys are then stored


ONE_CANDIDATE = Candidates()


class Mixture(NamedTuple):
    """Soft inputs of a query: at some positions the model reads a mixture of embeddings in place of a token's.

    If the weights sum to less than 1, the rest is the weight of the mask token's embedding.
    """

    ids: Tensor  # [B, Q, k] tokens
    weights: Tensor  # [B, Q, k] float32, weights of their embeddings
    where: Tensor  # [B, Q] bool: the positions. The model reads tokens at the others
    keep_norm: bool = False  # scale a mixture to the weighted mean of the norms of its embeddings

    def moved(self, before: Tensor, positions: Tensor) -> Mixture:
        """Return the mixtures of `positions [B, Q']`. A position outside `before [B, Q]` has none."""
        at = torch.searchsorted(before.contiguous(), positions.contiguous()).clamp(max=before.shape[1] - 1)
        each = at[..., None].expand(-1, -1, self.ids.shape[2])
        where = self.where.gather(1, at) & (before.gather(1, at) == positions)
        return self._replace(ids=self.ids.gather(1, each), weights=self.weights.gather(1, each), where=where)


@dataclass(frozen=True)
class Query:
    """A question to the model: predictions at `positions`, under K candidates of the tokens there."""

    positions: Tensor  # [B, Q] sorted columns, padded with L
    ids: Tensor  # [B, K, Q] tokens that each candidate has there
    limit: Tensor | None = None  # [B] columns from here on are hidden. None means canvas.end
    hidden: Tensor | None = None  # [B, L+1] bool: further hidden columns, masks that blocks or a cache hide
    keeps_positions: bool = False  # a cache may not drop positions that it does not predict
    leave_one_out: bool = False  # re-predict committed positions without seeing their token
    # [B] bool: rows that predict each position from the columns before it. With leave_one_out shadows predict them, and
    # otherwise the column before each. In the other rows both have no effect
    causal: Tensor | None = None
    candidates: Candidates = ONE_CANDIDATE
    mixture: Mixture | None = None  # of a scheduler with `SoftInputs`, for one candidate and positions of the block

    @property
    def shifted(self) -> Tensor | None:
        """`[B] bool` rows whose positions are predicted by the column before each. None for no rows."""
        return None if self.leave_one_out else self.causal

    @staticmethod
    def at(canvas: Canvas, positions: Tensor, keeps_positions: bool = False) -> Query:
        """Return a query with one candidate: the tokens of the canvas at `positions [B, Q]`."""
        ids = canvas.ids.gather(1, positions)[:, None]
        return Query(positions, ids, keeps_positions=keeps_positions)

    @staticmethod
    def masks(canvas: Canvas) -> Query:
        """Return a query about the noise of the active block, the smallest that a scheduler can ask."""
        return Query.at(canvas, select.columns(canvas.masked & canvas.in_block(), canvas.layout.width))

    @staticmethod
    def window(canvas: Canvas) -> Query:
        """Return a query about the whole active block, committed columns included."""
        return Query.at(canvas, canvas.window(canvas.layout.width))

    def join(self, canvas: Canvas, chosen: Tensor, width: int) -> Query:
        """Return the query with more positions.

        Args:
            chosen: `[B, L+1] bool` columns to add. Columns from the query's `limit` on are left out.
            width: Q of the new query.
        """
        asked = torch.zeros_like(chosen).scatter(1, self.positions, self.positions < canvas.length)
        if self.limit is not None:
            chosen = chosen & (canvas.columns() < self.limit[:, None])  # what is hidden has no answer
        positions = select.columns(asked | chosen, width)
        at = positions[:, None].expand(-1, self.ids.shape[1], -1)
        return self._about(positions, self.rows(canvas).gather(2, at))

    def _about(self, positions: Tensor, ids: Tensor) -> Query:
        """Return the query about other positions `[B, Q']`, with tokens `[B, K, Q']`."""
        mixture = None if self.mixture is None else self.mixture.moved(self.positions, positions)
        return replace(self, positions=positions, ids=ids, mixture=mixture)

    def rows(self, canvas: Canvas) -> Tensor:
        """Return the tokens `[B, K, L+1]` of the canvas under each candidate."""
        rows = canvas.ids[:, None].expand(-1, self.ids.shape[1], -1)
        return rows.scatter(2, self.positions[:, None].expand_as(self.ids), self.ids)

    def before(self, canvas: Canvas, column: Tensor) -> Query:
        """Return the query with all columns from `column [B]` on hidden, except given tokens."""
        shown = column if canvas.layout.given is None else torch.maximum(column, canvas.layout.given)
        hidden = self.hidden
        if canvas.layout.given is not None:
            masks = canvas.masked & (canvas.columns() >= column[:, None])  # some are before the last given token
            hidden = masks if hidden is None else hidden | masks
        return replace(self, limit=shown if self.limit is None else torch.minimum(self.limit, shown), hidden=hidden)

    def drop(self, canvas: Canvas, kept: Tensor) -> Query:
        """Return the query without the columns outside `kept [B, L+1] bool`. Its width Q stays."""
        positions, order = torch.where(kept.gather(1, self.positions), self.positions, canvas.length).sort(1)
        return self._about(positions, self.ids.gather(2, order[:, None].expand_as(self.ids)))

    def under(self, candidate: Tensor) -> Query:
        """Return the query about one candidate per row, `candidate [B]`, with K = 1."""
        step = self.candidates.step
        step = None if step is None else at_candidate(step.expand(self.ids.shape[:2]), candidate)
        return replace(self, ids=at_candidate(self.ids, candidate), candidates=Candidates(step=step))

    def trim(self, width: int) -> Query:
        """Return the query with its first `width` positions. The others must be padding."""
        if width >= self.positions.shape[1]:
            return self
        return self._about(self.positions[:, :width], self.ids[:, :, :width])


class TokenChoice(Protocol):
    """The choice of a step, which can be repeated from other logits `[B, K, Q, V]` (`core.draw.Draw`)."""

    @property
    def canvas(self) -> Canvas:
        """Canvas before the step."""
        ...

    @property
    def logits(self) -> Tensor:
        """`[B, K, Q, V]` the step's logits before any guide."""
        ...

    def __call__(self, logits: Tensor) -> Tensor:
        """Return `[B, K, Q]` tokens chosen from logits."""
        ...

    def scores(self, logits: Tensor) -> Tensor:
        """Return `[B, K, Q, V]` scores. The choice has the highest one, unless a joint guide demands another."""
        ...

    def law(self, logits: Tensor) -> Tensor:
        """Return `[B, K, Q, V]` the softmax of logits that all guides but a joint one have rewritten."""
        ...

    def log_law(self, logits: Tensor, token: Tensor) -> Tensor:
        """Return `[B, K, Q] float64` log-probabilities of drawing `token [B, K, Q]` without a joint guide."""
        ...

    def drawn(self, weight: Tensor) -> Tensor:
        """Return `[B, K, Q]` tokens drawn in proportion to `weight [B, K, Q, V]`, without guides."""
        ...

    def seeded(self, seeds: Tensor) -> Self:
        """Return the same choice with the noise of other row seeds, `[B] int64`."""
        ...

    def greedy(self) -> Self:
        """Return the same choice without noise: the best tokens."""
        ...

    def under(self, candidate: Tensor) -> Self:
        """Return the choice under one candidate per row, `candidate [B]`, for logits and tokens with K = 1."""
        ...


@dataclass(frozen=True)
class Readout:
    """Statistics of the predictions: token and confidence, and the other fields if a plug-in `needs` them."""

    token: Tensor  # [B, K, Q] the chosen token
    confidence: Tensor  # [B, K, Q] float64 probability of the token
    margin: Tensor | None = None  # [B, K, Q] probability of the best token minus that of the second
    gap: Tensor | None = None  # [B, K, Q] best logit minus the second
    entropy: Tensor | None = None  # [B, K, Q] nats
    logsumexp: Tensor | None = None  # [B, K, Q] logarithm of the sum of exp(logit)
    current: Tensor | None = None  # [B, K, Q] log-probability of the token in query.ids
    probabilities: Tensor | None = None  # [B, K, Q, V] in float32 or float64. A scheduler may keep them
    logits: Tensor | None = None  # [B, K, Q, V]
    draw: TokenChoice | None = None  # the step's choice, which can be repeated from other logits
    attention: Tensor | None = None  # [B, 1, Q, L+1] probability with which each position attends to each column
    attended: Tensor | None = None  # [B, 1, L+1] mean of these probabilities over all columns of the row
    written: Tensor | None = None  # [B, K, Q] tokens to write in place of `token`, under judge="best"
    written_confidence: Tensor | None = None  # [B, K, Q] float64 probability of `written`

    def under(self, candidate: Tensor) -> Readout:
        """Return the statistics under one candidate per row, `candidate [B]`, with K = 1."""
        draw = None if self.draw is None else self.draw.under(candidate)
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        tensors = {name: at_candidate(one, candidate) for name, one in values.items() if isinstance(one, Tensor)}
        return replace(self, **tensors, draw=draw)


@dataclass
class AttentionMeans:
    """Attention in a forward, as a mean over heads and the last layers. The model fills in the two fields."""

    layers: int  # number of last layers in the mean. All layers if the model has fewer
    attention: Tensor | None = None  # see `Readout`
    attended: Tensor | None = None


MEASURABLE = tuple(one.name for one in fields(Readout) if not one.name.startswith("written"))


def at_candidate(values: Tensor, candidate: Tensor) -> Tensor:
    """Return the values `[B, 1, ...]` of one candidate per row, `candidate [B]`, out of `[B, K, ...]`."""
    index = candidate.view(-1, *[1] * (values.dim() - 1))
    return values.gather(1, index.expand(-1, 1, *values.shape[2:]))


@dataclass(frozen=True)
class Resize:
    """A change of the length of answers at the end of a step: it inserts columns, then moves the end (`core.resize`).

    A canvas reserves `Layout.new_tokens` columns for each answer. A row uses those before its `end`. The others are
    padding.

    An inserted column is a copy of the one before it, for example of a mask to get more masks. Columns beyond
    `Layout.new_tokens` are cut off at the right. Random numbers are keyed by step and column. From the next step on a
    token that moved gets the numbers of its new column. Each step has its own keys, so no number is drawn twice.
    """

    end: Tensor  # [B] the row's end after the insertion. It may cut columns off, also committed ones
    ids: Tensor  # [B] token of new columns at the end
    masked: Tensor  # [B] bool: new columns at the end are noise
    behind: Tensor | None = None  # [B] columns are inserted after this one
    count: Tensor | None = None  # [B] number of inserted columns. None inserts none in any row
    reopen: Tensor | None = None  # [B] bool: the next forward opens the block. It always does if columns move or go


@dataclass(frozen=True)
class Edit:
    """A change that a step makes: tokens at the queried positions, and ends of blocks and rows.

    None means no row, or no position.
    """

    ids: Tensor  # [B, Q] tokens. Where nothing is committed, the tokens that the scheduler would write
    commit: Tensor  # [B, Q] bool: write, also over a committed token
    remask: Tensor | None = None  # [B, Q] bool: make it noise again. The engine writes the mask token here
    keep_block: Tensor | None = None  # [B] bool: stay in the block although it is full
    close_block: Tensor | None = None  # [B] bool: continue with the next block although this one is not full
    finish: Tensor | None = None  # [B] bool: stop the row
    stop: Tensor | None = None  # [B] end the block here. The columns left are for the next block
    end: Tensor | None = None  # [B] cut the canvas here
    resize: Resize | None = None  # change of the answer's length, after the rest of the edit
    confidence: Tensor | None = None  # [B, Q] probability of `ids`, where these are not `Readout.token`
    candidate: Tensor | None = None  # [B] the candidate from which the step continues, of a query with `forks`
    score: Tensor | None = None  # [B, Q] scores that rank positions, the highest first. None means the confidence


@dataclass(frozen=True)
class Refusals:
    """The tokens of a step that a guide refused."""

    count: Tensor  # [B] refused tokens
    stuck: Tensor  # [B] bool: the guide allows no token. The row ends
