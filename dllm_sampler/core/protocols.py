"""Every plug-in contract on one page: what the loop asks, in the order in which it asks.

    ask, narrow, plan, denoiser, guides, readout, open, tell, progress, settle, stop, apply, observe, move

Plug-ins answer questions; none writes tokens or owns a loop. Only these may read the device in a step: a cache that
`syncs`, a guide that `vetoes`, a scheduler whose traits are not `graph_safe`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

from torch import Tensor

from dllm_sampler.core.packing import ForwardRequest, HeadRows, Pack
from dllm_sampler.core.spec import ModelSpec, Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout, Refusals, Spent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Carry = Any  # a scheduler's own state: a (possibly empty) tree of tensors with leading dimension B
Whole = tuple[Tensor, Tensor]  # logits and noisy ones, as they are before a guide takes tokens away; None: none does


@dataclass(frozen=True)
class Plan:
    """The way in which one forward computes a request. Made by a cache."""

    cache: Cache
    wanted: ForwardRequest
    head_rows: HeadRows  # which queried places the forward answers
    computed: Tensor  # [B] positions computed, candidates and shadows included; 0 for finished rows
    pack: Pack | None = None  # None: the padded form (`PaddedPlan`)
    attention: Any = None  # of the pack. None means the denoiser's (`models.packed.PackedAttention`)
    pairs: list[tuple[Tensor, Tensor]] | None = None  # [T, Hkv, Dh] of each layer. None if not stored
    last: bool = False  # in the last layer of a pack, only `pack.head_entries` continue after attention


class LayerParts(Protocol):
    """One transformer layer, taken apart so that a cache can drive it. A pack has N = 1 and M = T."""

    def qkv(self, hidden: Tensor, rope: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Normed and rotated heads of `[N, M, D]`: q `[N, H, M, Dh]`, k and v `[N, Hkv, M, Dh]`."""
        ...

    def values(self, hidden: Tensor) -> Tensor:
        """Values alone `[N, Hkv, M, Dh]` of `[N, M, D]`, as in `qkv`."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention and output projection `[N, M, D]`, residual not added; mask bool, broadcast to `[N, 1, M, S]`."""
        ...

    def output(self, heads: Tensor) -> Tensor:
        """The output projection `[N, M, D]` of attention `[N, H, M, Dh]`."""
        ...

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Attention probabilities `[N, H, M, S]`, for caches that look at them; arguments as `attend`."""
        ...

    def mlp(self, hidden: Tensor) -> Tensor:
        """Norm and feed-forward `[N, M, D]`, residual not added."""
        ...


class Denoiser(Protocol):
    """A model family. Some members are optional, see `TransformerDenoiser`: `using(backend)`, `head_weight()` and the
    property `inference_mode`."""

    @property
    def spec(self) -> ModelSpec:
        """What the loop must know of the model."""
        ...

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        """Return hidden states `[R, D]` after the final norm, one for each of `plan.head_rows`, and the cost.

        Each layer calls `plan.cache.layer`, which stores keys and values and attends.
        """
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., V]` of hidden states `[..., D]`."""
        ...


@dataclass(frozen=True)
class Context:
    """What a plug-in may learn, before the first generation, of the model and of the other plug-ins."""

    spec: ModelSpec
    blocks: Blocks  # bound; for blocks themselves, which are bound first: not yet
    guides: tuple[Guide, ...] = ()  # the user's, not bound
    tokenizer: PreTrainedTokenizerBase | None = None
    scheduler: Scheduler | None = None  # bound; for what is bound after it: stop, guides, cache

    @property
    def draws(self) -> bool:
        """True if the user's guides draw tokens. A scheduler may bring guides of its own (`Tempered.guides`)."""
        return is_random(self.guides)


class PlugIn:
    """What schedulers, blocks and stops have in common."""

    def bind(self, context: Context) -> Self:
        """Return a copy configured for this model, or raise `UserError`.

        Called again on that copy if the blocks change.
        """
        return self

    @property
    def needs(self) -> frozenset[str]:
        """Fields of `Readout` it wants beyond token and confidence; `predictions`: see `statistics.Predictions.of`."""
        return frozenset()


class Scheduler(PlugIn):
    """Decides what to ask and what to commit. A frozen dataclass: its fields are its YAML.

    What only a few schedulers can do is a protocol of its own: `Planner`, `Paced`, `Tempered`.
    Facts that are true of few are a `RareTrait`.
    """

    @property
    def traits(self) -> Traits:
        """What others must know of it. One that overrides `ask` says whether it still `asks_block`."""
        return Traits()

    def init(self, canvas: Canvas) -> Carry:
        """State before the first step; default: none."""
        return None

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """The query of the next step; default: the active block, its noise or all of it (`Traits.asks`)."""
        return Query.masks(canvas) if self.traits.asks == "masks" else Query.window(canvas)

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        """Judge the predictions. Commit only where `canvas.eligible(query.positions)`."""
        raise NotImplementedError

    def bound(self, tokens: int) -> int:
        """Return an upper bound on the steps of a generation of `tokens`. The default is one commit in each step."""
        return tokens

    @property
    def total_steps(self) -> int | None:
        """The number of forwards for a whole answer, which its blocks share. None if the user asked for no number."""
        return None

    @property
    def added_steps(self) -> int:
        """Forwards that each block takes on top of its share of `total_steps`."""
        return 0


@runtime_checkable
class Planner(Protocol):
    """A scheduler that needs no prediction to know what comes next (`PlannedCommits`)."""

    def ahead(self, canvas: Canvas, carry: Carry) -> Tensor | None:
        """What the next `ask` names and `tell` commits: `[B, L+1] int64` places in the step's order, from 1; 0: not in
        this step. None, from a scheduler around another: that one does not know."""


@runtime_checkable
class Paced(Protocol):
    """A scheduler that goes by the clock: it asks about as many candidates as a forward computes at no cost."""

    def with_candidates(self, most: int) -> Scheduler:
        """Return the same scheduler, which asks about at most `most` candidates. It commits the same in the end."""
        ...

    def pace(self, made: ForwardRequest, seconds: float) -> int | None:
        """Return the new limit on candidates, or None for no limit.

        Called between steps with the request for the last forward and the duration of the last step.
        """


@runtime_checkable
class Tempered(Protocol):
    """A scheduler that rewrites logits itself (a temperature that falls, say)."""

    def guides(self, given: tuple[Guide, ...]) -> tuple[Guide, ...]:
        """The user's guides and its own, in the order in which they apply."""
        ...


class Blocks(PlugIn):
    """Which columns are decoded: the active block, and where it moves.

    Attributes, each with what a value other than the default means (the help prints these sentences):
        sizes_on_open: Blocks are shortened by the forward that opens them.
        several: Several are open at once: no scheduler that takes tokens back or goes by a schedule.
        hides: The columns after the open blocks are not seen: no cache that serves old masks.
    """

    sizes_on_open: ClassVar[bool] = False
    several: ClassVar[bool] = False
    hides: ClassVar[bool] = False
    part: int | None = None  # length of the parts in which blocks of the grid are decoded, counted as those are

    @property
    def grid(self) -> int | None:
        """Length of blocks that are counted from the row's first token, prompt included; None: they are not."""
        return None

    def ends(self, tokens: int) -> Sequence[int]:
        """Where the blocks of an answer of `tokens` end, from its first column, if `lookahead` does not say it."""
        return ()

    def lookahead(self, tokens: int) -> int:
        """A new block provisionally ends this many columns after its start, in a generation of `tokens`."""
        raise NotImplementedError

    def widest(self, tokens: int) -> int:
        """No active block of such a generation has more columns."""
        return self.lookahead(tokens)

    def open(self, canvas: Canvas, query: Query, readout: Readout) -> Tensor | None:
        """`[B]` final `stop` of the rows with age 0 (others ignored); may only shorten it. None: leave all."""
        return None

    def progress(self, canvas: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        """The scheduler's edit, and what must be committed besides. Default: nothing."""
        return edit

    def move(self, after: Canvas) -> tuple[Tensor, Tensor] | None:
        """`[B]` start and `[B]` end of the active block in the next step; before the first step it is empty.

        Rows that are done keep their own. None: the next block where this one is over (`Canvas.block_over`).
        """
        return None


class Guide:
    """Rewrites logits before a token is chosen.

    Attributes, each with what a value other than the default means (the help prints these sentences):
        truncates: It keeps the likeliest tokens only, which changes nothing without a temperature.
        excludes: It takes given tokens away: it goes before guides that keep the likeliest only.
        keeps_excluded: It never raises the logit of a token that others excluded.
        joint: The tokens of a step are chosen together: no other guide on the form, no stop that fills in tokens.
        vetoes: It may refuse what a step commits: no scheduler that drafts, no cache that counts on commits.
    """

    truncates: ClassVar[bool] = False
    excludes: ClassVar[bool] = False
    keeps_excluded: ClassVar[bool] = False
    joint: ClassVar[bool] = False
    vetoes: ClassVar[bool] = False
    forms: int = 0  # number of forms of answers. A prompt names one (`Layout.form`). 0: there is no list of forms

    @property
    def chooses(self) -> bool:
        """Whether the choice of the token sees the rewritten logits."""
        return True

    @property
    def measures(self) -> bool:
        """Whether confidence, margin and entropy see them."""
        return False

    @property
    def draws(self) -> bool:
        """True if tokens are sampled under this guide, unless the `temperature` of another one is 0."""
        return False

    @property
    def temperature(self) -> float | None:
        """What it divides logits by, where it does nothing else: a kernel does it instead; None: it does more."""
        return None

    def bind(self, context: Context) -> Guide:
        """Take what the guide must know of the model (end tokens); default: nothing. See `PlugIn.bind`."""
        return self

    def check_answer(self, given: Sequence[int], form: int = 0) -> None:
        """Refuse, by a `UserError`, an answer that cannot be what the guide wants; `FREE`: its token is not given."""

    def __call__(self, logits: Tensor, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        """Logits `[R, V]` to logits, never in place; `head_rows` knows row, candidate and position of each."""
        raise NotImplementedError

    def choose(self, logits: Tensor, noisy: Tensor, whole: Whole | None, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        """`[R]` tokens of a `joint` guide; `noisy [R, V]`: the logits, in a draw with noise (the best wins)."""
        raise NotImplementedError

    def settle(self, canvas: Canvas, query: Query, readout: Readout, edit: Edit) -> tuple[Edit, Refusals]:
        """Return the part of `edit` that the guide allows, if it `vetoes`, and what it refused.

        If nothing is allowed, substitute another token or mark the row `stuck`.
        """
        raise NotImplementedError

    def valid(self, tokens: Sequence[int], form: int = 0) -> bool | None:
        """Whether an answer of these tokens, up to its end token, is what the guide wants; None: it does not say."""
        return None


def is_random(guides: Iterable[Guide]) -> bool:
    """Return True if tokens are drawn under these guides. A temperature of 0 makes every choice greedy."""
    given = tuple(guides)
    return any(guide.draws for guide in given) and all(guide.temperature != 0 for guide in given)


class Stop(PlugIn):
    """Ends rows early. When a row leaves its block is for schedulers and blocks to say, not for a stop.

    Attributes, each with what a value other than the default means (the help prints these sentences):
        cuts: It may shorten the canvas: no scheduler that drafts.
        predicts: It writes without a prediction.
        fills: It may commit tokens itself: no scheduler that drafts, no guide on the answer's form.
        judges_all: It waits for a prediction of every mask: no cache that hides some.
    """

    cuts: ClassVar[bool] = False
    fills: ClassVar[bool] = False
    judges_all: ClassVar[bool] = False
    predicts: ClassVar[bool] = True

    def positions(self, canvas: Canvas) -> Tensor | None:
        """`[B, L+1] bool` columns to join to every query (a cache may still drop them); default: none."""
        return None

    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        """Another edit where the policy fires, the same where not; `after` is the canvas with `edit` applied."""
        return edit


class Cache:
    """Decides which columns a forward computes, and keeps keys and values. A dataclass: its fields are its YAML.

    The configured object is a template, `init` returns a live copy. `cache.base.BaseCache` lacks only `computes`. What
    few caches can do is a protocol of its own: `Foresees`, `Prefills`, `ReusesGuidance`, `Wraps`.

    Attributes, each with what a value other than the default means (the help prints these sentences):
        stores: It keeps no keys and values.
        uses_padded_plan: It runs the layers itself, on padded rows.
        syncs: It reads the device inside a step: no CUDA graphs.
        chooses: It chooses which masks are predicted: no scheduler that must hear about all of them.
        keeps_noise: It keeps nothing of masks that a step did not compute.
        refreshes: The first forward of a block computes every column.
        hides: A block does not see all masks after it: no stop=prophet.
        supports_resize: It serves answers whose length changes.
        causal: It is for block-causal models only.
        shared: It keeps numbers for the whole batch: prompts are answered batch by batch, without CUDA graphs.
    """

    stores: ClassVar[bool] = True
    uses_padded_plan: ClassVar[bool] = False
    syncs: ClassVar[bool] = False
    chooses: ClassVar[bool] = False
    keeps_noise: ClassVar[bool] = True
    refreshes: ClassVar[bool] = False
    hides: ClassVar[bool] = False
    supports_resize: ClassVar[bool] = False
    causal: ClassVar[bool] = False
    shared: ClassVar[bool] = False

    spec: ModelSpec  # of a live copy, as all that follows
    slots: Any = None  # keys and values of every column (`cache.slots.Slots`); None: nothing is stored
    twin: Cache | None = None  # of the branch without prompt, under classifier-free guidance
    memory: Any = None  # what an encoder keeps of the text so far

    @property
    def steady(self) -> bool:
        """Whether a forward's answers depend on the canvas and the block's opening alone, not on forwards between."""
        return False

    def bind(self, context: Context) -> Cache:
        """The cache to use with this model and scheduler. A `UserError` names both sides and the way out."""
        raise NotImplementedError

    def init(self, canvas: Canvas, spec: ModelSpec) -> Self:
        """A live copy for one generation."""
        raise NotImplementedError

    def computes(self, canvas: Canvas) -> Tensor | None:
        """`[B, L+1] bool` columns that the next forward computes, as far as they are seen; None: all of them."""
        return None

    def narrow(self, canvas: Canvas, query: Query, answered: Tensor) -> Query:
        """Drop the positions outside `answered [B, L+1] bool`, which nothing predicts, unless the query needs them all.

        The engine does not call this where every column is computed.
        """
        return query if query.needs_every_position else query.drop(canvas, answered)

    def plan(self, canvas: Canvas, wanted: ForwardRequest) -> Plan:
        """Return the plan of what is wanted, in sizes that `wanted.sizes` fixes."""
        raise NotImplementedError

    def layer(self, index: int, parts: LayerParts, hidden: Tensor, rope: Any, plan: Plan) -> Tensor:
        """Store keys and values, attend, feed forward: one layer of the pack `[1, T, D]`; `[B, M, D]` if it pads.

        With `plan.last` it returns the answers of the pack alone, `[1, R, D]`.
        """
        raise NotImplementedError

    def cost(self, plan: Plan) -> Tensor:
        """`[B]` positions that the forward just made has computed, the mean over the layers where these differ."""
        return plan.computed

    def recalled(self, canvas: Canvas) -> Tensor | None:
        """`[B, L+1] bool` positions that the next forward predicts by rows of an earlier one; default: None, none."""

    def restore(self, hidden: Tensor, plan: Plan) -> Tensor:
        """The hidden states `[R, D]` that a forward returned, with those of an earlier one in their places."""
        return hidden

    def adopt(self, candidate: Tensor) -> None:
        """Of the forward just made, keep what `candidate [B]` has: the step goes on from there. Default: nothing."""

    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        """Learn what a step wrote; `canvas` as the forward saw it. Default: nothing to learn."""


@runtime_checkable
class Foresees(Protocol):
    """A cache that wants to know what the next forward commits: of a scheduler with `PlannedCommits`."""

    def expect(self, ahead: Tensor, most: int) -> None:
        """Take note of `Planner.ahead [B, L+1]`, the at most `most` positions that the next forward will commit."""


@runtime_checkable
class Prefills(Protocol):
    """A cache that computes a prompt once for several rows. Its keys must not depend on what is written behind it."""

    def prefill(self, template: Cache, canvas: Canvas, samples: int, denoiser: Denoiser) -> Tensor | None:
        """`[B]` positions computed, at each first row, or None: compute once, before the first step, what each
        `samples` consecutive rows have in common, their prompt. `template`: what this live copy was made from."""


@runtime_checkable
class ReusesGuidance(Protocol):
    """A cache that spares passes of the branch without prompt, under classifier-free guidance."""

    difference: Tensor | None  # conditional minus unconditional hidden states of the last forward that ran both

    def reuses_guidance(self) -> bool | None:
        """Whether the next forward may use an earlier one's difference between the branches; None: none ever does."""


@runtime_checkable
class Wraps(Protocol):
    """A cache that wants forwards of its own, which the scheduler does not see."""

    def around(self, scheduler: Scheduler) -> Scheduler:
        """The bound scheduler, with those forwards."""
        ...
