"""What every cache shares: the default layer, the two shapes of a plan."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dllm_sampler import select
from dllm_sampler.cache.slots import Slots
from dllm_sampler.canvas import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.models.transformer import block_causal
from dllm_sampler.promises import keep_promises
from dllm_sampler.protocols import Denoiser, LayerParts, ModelSpec, Plan, Scheduler, Visible


@dataclass
class Cache:
    """Decides which rows a forward computes. The configured object is a template; `init` returns a live copy.

    A cache says in `computes` which columns the next forward computes. The loop counts them between two steps, so
    that plans have static sizes; queries lose the positions whose predicting row is not among them.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        forwards = ("due", "computes", "plan", "part", "run")
        promises = {"settles": forwards, "covers": ("narrow", "computes", "plan"), "count": ("computes",)}
        keep_promises(cls, Cache, promises)

    stores: ClassVar[bool] = True  # keeps keys and values between forwards
    syncs: ClassVar[bool] = False  # reads the device inside a step, and says why
    chooses: ClassVar[bool] = False  # chooses which masks to predict: no scheduler that is `exact`
    foresees: ClassVar[bool] = False  # wants to know what the next forward commits: a scheduler that `plans`
    keeps_noise: ClassVar[bool] = True  # serves noise that a step did not compute: no scheduler that hides some of it

    slots: Slots | None = field(init=False, default=None, repr=False, compare=False)
    spec: ModelSpec = field(init=False, repr=False, compare=False)
    memory: Any = field(init=False, default=None, repr=False, compare=False)  # what an encoder keeps of the text so far
    difference: Tensor | None = field(init=False, default=None, repr=False, compare=False)  # see `reuses_guidance`
    twin: Self | None = field(init=False, default=None, repr=False, compare=False)
    live: bool = field(init=False, default=False, repr=False, compare=False)

    def suit(self, spec: ModelSpec, scheduler: Scheduler) -> Cache:
        """The cache to use with this model and scheduler; default: this one."""
        return self

    @property
    def steady(self) -> bool:
        """Whether a forward's answers depend on the canvas and the block's opening alone, not on forwards between."""
        return False

    @property
    def settles(self) -> bool:
        """Whether every forward that a row makes in a block, but the first, computes the columns of `span`."""
        return False

    @property
    def covers(self) -> bool:
        """Whether every forward predicts all of the block, so that `narrow` drops nothing of it."""
        return False

    def span(self, canvas: Canvas) -> tuple[Tensor, Tensor]:
        """`[B]` first column and `[B]` end of what a forward computes inside a block, where the cache `settles`."""
        return canvas.begin, canvas.end

    def init(self, canvas: Canvas, spec: ModelSpec) -> Self:
        """A live copy for one generation with its own slots, and under classifier-free guidance its twin.

        Raises:
            UserError: this is a live copy already.
        """
        self.refuse_live()
        live = replace(self)
        live.spec, live.live = spec, True
        live.slots = live.buffers(canvas) if self.stores else None
        if spec.branches == 2:
            live.twin = self.init(canvas, replace(spec, branches=1))
        return live

    def buffers(self, canvas: Canvas) -> Slots:
        """The buffers that `spec` and the canvas ask for; default: a slot for every column."""
        return Slots(self.spec, *canvas.ids.shape)

    def refuse_live(self) -> None:
        """Refuse to serve a second generation.

        Raises:
            UserError: this is a live copy.
        """
        if self.live:
            raise UserError(
                f"this {type(self).__name__} belongs to one generation and holds its keys and values: hand over the"
                " cache it was made from, or its name"
            )

    def due(self, canvas: Canvas) -> Tensor:
        """`[B] bool` rows whose next forward refreshes every slot; default: those that open a block."""
        return canvas.age == 0

    def expect(self, ahead: Tensor) -> None:
        """Take note of `Scheduler.ahead [B, L+1]`, what the next forward will commit (see `foresees`)."""

    def computes(self, canvas: Canvas) -> Tensor | None:
        """`[B, L+1] bool` columns that the next forward computes, as far as they are seen; None: all of them."""
        return None

    def count(self, canvas: Canvas, limit: Tensor | None = None) -> Tensor | None:
        """`[B]` how many columns that is before `limit [B]`, for the host to size the next step by; None: all."""
        computed = self.computes(canvas)
        if computed is None:
            return None
        seen = canvas.seen() if limit is None else canvas.seen() & (canvas.columns() < limit[:, None])
        return (computed & seen).sum(1)

    def narrow(self, canvas: Canvas, query: Query) -> Query:
        """Drop the positions that nothing will predict, unless the query is exact."""
        return query if query.exact or canvas.sizes.whole else query.drop(canvas, self.answered(canvas))

    def answered(self, canvas: Canvas) -> Tensor:
        """`[B, L+1] bool` columns that the next forward predicts."""
        computed = canvas.in_block() if self.spec.encoder else self.computes(canvas)
        if computed is None or not self.spec.shift:
            return canvas.seen() if computed is None else computed
        # The row's very first position has no row before it and is predicted by its own.
        return torch.where(canvas.columns() > canvas.begin[:, None], computed.roll(1, 1), computed)

    def predictors(self, columns: Tensor) -> Tensor:
        """`[B, L+1] bool` the rows that predict `columns [B, L+1]` of the generation."""
        return columns.roll(-1, 1) if self.spec.shift else columns

    def plan(self, canvas: Canvas, query: Query) -> Plan:
        """Which rows to compute for `query`, and what they see; default: by `computes`."""
        sizes = canvas.sizes
        if self.settles and self.stores and not (sizes.opens or sizes.whole):
            return self.run(canvas, query)
        computed = None if sizes.whole else self.computes(canvas)
        return self.whole(canvas, query) if computed is None else self.part(canvas, query, computed)

    def layer(self, index: int, parts: LayerParts, hidden: Tensor, rope: Any, plan: Plan) -> Tensor:
        """Drive one layer on `hidden [B*K, M, D]`; default: store the fresh keys and values, attend, feed forward."""
        q, k, v = parts.qkv(hidden, rope)
        if plan.candidates > 1:
            hidden = hidden + self._attend_forked(index, parts, q, k, v, plan)
            return hidden + parts.mlp(hidden)
        k, v, mask = self.store(index, k, v, plan)
        hidden = hidden + parts.attend(q, k, v, mask)
        return hidden + parts.mlp(hidden)

    def store(self, index: int, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keep the fresh `k, v [B*K, Hkv, M, Dh]`; return the `k, v [B*K, Hkv, S, Dh]` to attend to and their mask."""
        if self.slots is not None:
            self.slots.write(index, k, v, plan)
            k, v = self.slots.read(index, self.slots.columns - 1 if plan.keys is None else plan.keys.shape[-1])
        return k, v, _mask(plan.keys)

    def rows(self, plan: Plan) -> Tensor:
        """`[B]` positions that the forward just made has computed, the mean over the layers where these differ."""
        return plan.computed

    def prefill(self, template: Cache, canvas: Canvas, samples: int, denoiser: Denoiser) -> Tensor | None:
        """Compute once, before the first step, what each `samples` consecutive rows have in common: their prompt.

        Where attention goes both ways a prompt's keys depend on what is written behind it; nothing can be shared then,
        which is the default.

        Args:
            template: the cache this live copy was made from.

        Returns:
            `[B]` positions computed, each group's on account of its first row; None: nothing was shared.
        """
        return None

    def reuses_guidance(self) -> bool | None:
        """Whether guidance may use an earlier forward's difference between the branches; None: never does."""
        return None

    def fork(self, plan: Plan, canvas: Canvas, candidates: int, tree: bool) -> Plan:
        """The plan for `candidates` hypotheses at once, each of which sees its own rows and what is stored.

        tree: side by side on the sequence axis; else on the batch axis, where each has a copy of what is stored.
        """
        if candidates == 1:
            return plan
        if not tree:
            keys = None if plan.keys is None else plan.keys.repeat_interleave(candidates, 0)
            return replace(plan, candidates=candidates, keys=keys)
        batch, width = plan.positions.shape
        seen = canvas.seen() if plan.keys is None else plan.keys
        seen = (seen if seen.dim() == 3 else seen[:, None]).expand(batch, width, -1)  # [B, M, S]
        at = plan.positions[:, None].expand(-1, width, -1)
        branch = torch.arange(candidates * width, device=at.device) // width  # [K*M]
        keys = seen.gather(2, at).repeat(1, candidates, candidates) & (branch[:, None] == branch)  # [B, K*M, K*M]
        if self.slots is not None and not plan.contiguous:
            keys = torch.cat([seen.scatter(2, at, False).repeat(1, candidates, 1), keys], 2)
        return replace(plan, candidates=candidates, tree=keys)

    def _attend_forked(self, index: int, parts: LayerParts, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        """Attention `[B*K, M, D]` of K candidates; the keys and values of candidate 0 are stored."""
        many = plan.candidates
        stored: list[Tensor] = []
        if self.slots is not None:
            self.slots.write(index, k[::many], v[::many], plan)
            if not plan.contiguous:
                stored = list(self.slots.read(index, self.slots.columns))  # [B, Hkv, L+1, Dh]
        if plan.tree is None:
            if stored:
                k, v = (_overlaid(old, new, plan) for old, new in zip(stored, (k, v), strict=True))
            # A forward that computes every column needs no stored one, the empty slot is not among its keys.
            return parts.attend(q, k, v, _mask(None if plan.keys is None else plan.keys[..., : k.shape[2]]))
        q, k, v = (_beside(heads, many) for heads in (q, k, v))  # [B, H, K*M, Dh]
        if stored:
            k, v = (torch.cat([old.to(new.dtype), new], 2) for old, new in zip(stored, (k, v), strict=True))
        return parts.attend(q, k, v, _mask(plan.tree)).unflatten(1, (many, -1)).flatten(0, 1)

    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        """Learn what a step wrote; `canvas` as the forward saw it. Default: nothing to learn."""

    def whole(self, canvas: Canvas, query: Query) -> Plan:
        """A plan that computes every column."""
        seen = visible(canvas, query)
        length = canvas.sizes.reach or canvas.length
        positions = select.numbers(length, seen.device).expand(seen.shape[0], length)
        keys = keys_of(canvas, query, seen, positions)
        if keys is not None and not self.stores:
            keys = keys[..., :length]
        return Plan(self, positions, keys, seen.sum(1), contiguous=True, visible=extent(canvas, query))

    def part(self, canvas: Canvas, query: Query, chosen: Tensor) -> Plan:
        """A plan that computes the set `chosen [B, L+1] bool`, `sizes.computed` columns, against every stored one."""
        seen = visible(canvas, query)
        chosen = chosen & seen & ~canvas.done[:, None]
        positions = select.columns(chosen, max(1, canvas.sizes.computed))  # [B, M]
        keys = keys_of(canvas, query, seen, positions)
        computed = chosen.sum(1)
        return Plan(self, positions, keys, computed, slots=places(canvas, positions), visible=extent(canvas, query))

    def run(self, canvas: Canvas, query: Query) -> Plan:
        """`part` where no row opens a block: the run of columns `span`."""
        first, end = self.span(canvas)
        if query.limit is not None:
            end = torch.minimum(end, query.limit)
        column = first[:, None] + select.numbers(max(1, canvas.sizes.computed), first.device)  # [B, M]
        positions = column.masked_fill(column >= end[:, None], canvas.length)
        keyed = canvas.padded or canvas.grid is not None or query.limit is not None
        keys = keys_of(canvas, query, visible(canvas, query), positions) if keyed else None
        return Plan(self, positions, keys, end - first, slots=places(canvas, positions), visible=extent(canvas, query))


def places(canvas: Canvas, positions: Tensor) -> Tensor:
    """`[B*M]` where `positions [B, M]` lie in a buffer of B*(L+1) columns."""
    batch, columns = canvas.ids.shape
    return (positions + select.numbers(batch * columns, positions.device)[::columns, None]).flatten()


def _mask(keys: Tensor | None) -> Tensor | None:
    """Keys seen, `[N, S]` or `[N, M, S]`, as attention wants them."""
    if keys is None:
        return None
    return keys[:, None] if keys.dim() == 3 else keys[:, None, None]


def _overlaid(stored: Tensor, fresh: Tensor, plan: Plan) -> Tensor:
    """`stored [B, Hkv, L+1, Dh]` once per candidate, with the candidate's own `fresh [B*K, Hkv, M, Dh]` laid over."""
    columns = stored.shape[2] if plan.keys is not None else stored.shape[2] - 1
    at = plan.positions.repeat_interleave(plan.candidates, 0)[:, None, :, None]  # [B*K, 1, M, 1]
    copies = stored.repeat_interleave(plan.candidates, 0).to(fresh.dtype)
    return copies.scatter(2, at.expand(-1, *fresh.shape[1:2], -1, fresh.shape[3]), fresh)[:, :, :columns]


def _beside(heads: Tensor, candidates: int) -> Tensor:
    """`[B*K, H, M, Dh]` to `[B, H, K*M, Dh]`."""
    return heads.unflatten(0, (-1, candidates)).transpose(1, 2).flatten(2, 3)


def visible(canvas: Canvas, query: Query) -> Tensor:
    """`[B, L+1] bool` columns that exist for the row and that the query does not hide."""
    seen = canvas.seen()  # [B, L+1]
    return seen if query.limit is None else seen & (canvas.columns() < query.limit[:, None])


def extent(canvas: Canvas, query: Query) -> Visible:
    """What `visible` and `keys_of` say, in numbers."""
    end = canvas.end if query.limit is None else torch.minimum(canvas.end, query.limit)
    return Visible(canvas.begin, end, canvas.grid)


def keys_of(canvas: Canvas, query: Query, seen: Tensor, positions: Tensor) -> Tensor | None:
    """What the rows at `positions [B, M]` see of the columns `seen [B, L+1]`, as `Plan.keys` has it."""
    if canvas.grid is not None:
        begin = canvas.begin[:, None]
        return seen[:, None] & block_causal(positions - begin, canvas.columns() - begin, canvas.grid)
    return seen if canvas.padded or query.limit is not None else None


def changed(canvas: Canvas, query: Query, edit: Edit) -> Tensor:
    """`[B, L+1] bool` committed columns that `edit` writes again or takes back: what is stored of them is void."""
    return written(canvas, query, edit) & ~canvas.masked


def written(canvas: Canvas, query: Query, edit: Edit) -> Tensor:
    """`[B, L+1] bool` columns whose token `edit` writes or takes back: they must be computed again."""
    touched = edit.commit if edit.remask is None else edit.commit | edit.remask
    # Filler positions share a slot, the empty one, and no other position occurs twice.
    return torch.zeros_like(canvas.masked).scatter(1, query.positions, touched)


def put(stored: Tensor, columns: Tensor, fresh: Tensor) -> None:
    """Write `fresh [B, M, ...]` over `columns [B, M]` of `stored [B, L+1, ...]`, in place."""
    at = columns.view(*columns.shape, *[1] * (fresh.dim() - 2)).expand_as(fresh)
    stored.scatter_(1, at, fresh.to(stored.dtype))
