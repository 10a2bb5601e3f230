"""Every plug-in contract on one page: what the loop asks, in the order in which it asks.

    ask -> narrow -> plan -> denoiser -> guides, readout -> open -> tell -> stop -> apply -> observe -> close -> advance

Plug-ins answer questions; none writes tokens, owns a loop or reads the host inside a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from dllm_sampler.core.packing import Answers, Pack, Request
from dllm_sampler.core.values import Canvas, Edit, Query, Readout, Spent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dllm_sampler.cache.base import Cache

Carry = Any  # a scheduler's own state: a (possibly empty) tree of tensors with leading dimension B


@dataclass(frozen=True)
class ModelSpec:
    """What the sampler must know of a model family."""

    vocab_size: int
    mask_id: int | None  # None: uniform diffusion, no mask token
    eos_id: int
    pad_id: int
    max_positions: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    eot_id: int | None = None  # end of turn, where it differs from eos
    attention: Literal["bidirectional", "block_causal"] = "bidirectional"
    block_length: int | None = None  # blocks it was trained on, where that is one length
    shift: bool = False  # raw row i predicts token i + 1 (Dream)
    cacheable: bool = True  # False: only whole rows can be run, no cache but `none` is legal
    encoder: bool = False  # one reads the text before the block; the block, whole, is all that is predicted
    self_conditioning: bool = False  # wants the logits of the last step back (`Query.previous`)
    branches: int = 1  # 2 under classifier-free guidance: a cache keeps a twin
    folder: Path | None = None  # of the checkpoint, which may ship what was learnt for the model (Learn2PD's filter)


@dataclass(frozen=True)
class Visible:
    """Which keys a forward may see, in a few numbers instead of a mask."""

    begin: Tensor  # [B] first column of the row
    end: Tensor  # [B] columns from here on are hidden
    grid: int | None  # block-causal: blocks of so many columns, counted from `begin`; None: every row sees all


@dataclass(frozen=True)
class Plan:
    """How one forward computes a request, and what each position sees. Made by a cache."""

    cache: Cache
    wanted: Request
    answers: Answers  # which queried places the forward answers
    visible: Visible
    computed: Tensor  # [B] positions computed, candidates and shadows included; 0 for finished rows
    pack: Pack | None = None  # None: the padded form (`cache.base.PaddedPlan`)
    attention: Callable[..., Tensor] | None = None  # of the pack (`models.packed.PackedAttention`)


class Denoiser(Protocol):
    """A model family.

    Two more methods are optional (see `TransformerDenoiser`): `using(backend)`, the same model on other kernels, and
    `head_weight()`, a tensor if the head is nothing but a product with it.
    """

    @property
    def spec(self) -> ModelSpec:
        """What the loop must know of the model."""
        ...

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        """Hidden states `[R, D]` after the final norm, one for each of `plan.answers`."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., V]` of hidden states `[..., D]`."""
        ...


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


@dataclass(frozen=True)
class Traits:
    """Facts about a scheduler that others rely on."""

    asks: Literal["masks", "window"] = "masks"  # what the default `ask` wants of the block: its noise, or all of it
    asks_block: bool = True  # it asks for the active block in every step, so that others can ask for it
    whole: bool = False  # every forward computes every column (choices or edits outside the block, shadow rows)
    leave_one_out: bool = False  # it asks `leave_one_out` queries, for which the forward computes shadow rows
    exact: bool = False  # it must hear about every mask it asks: no cache may choose among them
    revises: bool = False  # it may take back or replace tokens that are committed
    uniform: bool = False  # its rule is also good for uniform diffusion, whose noise are random tokens
    plans: bool = False  # it knows before a forward which positions the forward will commit (`Planner`)
    drafts: bool = False  # it asks about states that may not come true: what it foresees must not be disturbed
    opens_ahead: bool = False  # it may open a block without a forward of its own, which a cache may want for a refresh
    static: bool = True  # its steps are launches on tensors and nothing else: a CUDA graph can repeat them
    ranks_by_confidence: bool = True  # what it commits depends on `readout.confidence`: a factor on that is felt
    block_length: int | None = None  # the one block length it was made for (a learned rule); None: any
    horizon: int | None = None  # columns from the first noise on that the model sees (`Canvas.visible_end`); None: all


@dataclass(frozen=True)
class Context:
    """What a plug-in may learn, before the first generation, of the model and of the other plug-ins."""

    spec: ModelSpec
    blocks: Blocks  # bound; for blocks themselves, which are bound first: not yet
    draws: bool = False  # the user's guides draw tokens
    tokenizer: PreTrainedTokenizerBase | None = None
    scheduler: Scheduler | None = None  # bound; for what is bound after it: stop, guides, cache


class PlugIn:
    """What schedulers, blocks and stops have in common."""

    def bind(self, context: Context) -> Self:
        """Take what the plug-in must know (the model's end token, say), or refuse; default: nothing.

        Called again on what it returned where blocks change (`Sampler.generate(block_length=...)`).
        """
        return self

    @property
    def needs(self) -> frozenset[str]:
        """Fields of `Readout` it wants beyond token and confidence; no more is computed.

        `law`: whole predictions in the form that is at hand, for `readout.Law.of`.
        """
        return frozenset()


class Scheduler(PlugIn):
    """Decides what to ask and what to commit. A frozen dataclass: its fields are its YAML.

    What few schedulers can do besides is a protocol of its own: `Planner`, `Paced`, `Tempered`.
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
        """Most steps a generation of `tokens` can take; default: one commit per step at least."""
        return tokens


@runtime_checkable
class Planner(Protocol):
    """A scheduler that needs no prediction to know what comes next (`Traits.plans`)."""

    def ahead(self, canvas: Canvas, carry: Carry) -> Tensor | None:
        """What the next `ask` names and `tell` commits: `[B, L+1] int64` places in the step's order, from 1; 0: not in
        this step. None, from a scheduler around another one: that one does not know."""
        ...


@runtime_checkable
class Paced(Protocol):
    """A scheduler that goes by the clock."""

    def pace(self, canvas: Canvas, seconds: float) -> int | None:
        """Called by the host between steps: how long the last one took, of which `canvas` has the sizes.

        Returns:
            `Canvas.branches` from then on, None: unbounded; it must not change what is committed in the end.
        """
        ...


@runtime_checkable
class Tempered(Protocol):
    """A scheduler that rewrites logits itself (a temperature that falls, say)."""

    def guides(self, given: tuple[Guide, ...]) -> tuple[Guide, ...]:
        """The user's guides and its own, in the order in which they apply."""
        ...


def block_over(after: Canvas, edit: Edit) -> Tensor:
    """`[B] bool` rows that are through with their block: no noise left or `edit.leave`, unless `edit.hold`."""
    over = after.noise_left() == 0
    if edit.leave is not None:
        over = over | edit.leave
    return over if edit.hold is None else over & ~edit.hold


class Blocks(PlugIn):
    """Where blocks end."""

    sizes_on_open: ClassVar[bool] = False  # `open` shortens blocks, by the forward that opens them

    @property
    def grid(self) -> int | None:
        """Length of blocks that are counted from the row's first token, prompt included; None: they are not."""
        return None

    def lookahead(self, tokens: int) -> int:
        """A new block provisionally ends this many columns after its start, in a generation of `tokens`."""
        raise NotImplementedError

    def open(self, canvas: Canvas, query: Query, readout: Readout) -> Tensor | None:
        """`[B]` final `stop` of the rows with age 0 (others ignored); may only shorten it. None: leave all."""
        return None

    def close(self, before: Canvas, after: Canvas, edit: Edit) -> Tensor:
        """`[B] bool` rows whose block is over; default: no noise left or `edit.leave`, unless `edit.hold`."""
        return block_over(after, edit)


class Guide:
    """Rewrites logits before a token is chosen."""

    truncates: ClassVar[bool] = False  # keeps the likeliest tokens only: a greedy choice does not feel it
    excludes: ClassVar[bool] = False  # takes given tokens away, which must not be all that another guide left

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
        """Whether tokens are sampled under this guide (else the best one is taken)."""
        return False

    def bind(self, context: Context) -> Guide:
        """Take what the guide must know of the model (end tokens); default: nothing. See `PlugIn.bind`."""
        return self

    def __call__(self, logits: Tensor, canvas: Canvas, answers: Answers) -> Tensor:
        """Logits `[R, V]` to logits, never in place; `answers` knows row, candidate and position of each."""
        raise NotImplementedError


class Stop(PlugIn):
    """Ends rows early. When a row leaves its block is for schedulers and blocks to say, not for a stop."""

    cuts: ClassVar[bool] = False  # whether it may shorten the canvas (`edit.end`)
    fills: ClassVar[bool] = False  # whether it may commit tokens itself

    def positions(self, canvas: Canvas) -> Tensor | None:
        """`[B, L+1] bool` columns to join to every query (a cache may still drop them); default: none."""
        return None

    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        """Another edit where the policy fires, the same where not; `after` is the canvas with `edit` applied."""
        return edit
