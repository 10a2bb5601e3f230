"""Every plug-in contract on one page, in the order in which a step asks them.

    ask, computes, recalled, narrow, positions, plan, denoiser, restore, guides, readout,
    open, tell, progress, settle, adopt, apply, stop, observe, move, resize

Plug-ins answer questions. None writes tokens or owns a loop. Only these may read the device in a step: a cache that
`syncs`, a guide that `vetoes`, a scheduler whose traits are not `graph_safe`.

Letters: B rows, K candidates of a row, Q queried positions, L columns, V tokens of the vocabulary, D width, T entries
of a pack, R head rows, H heads of width Dh, Hkv heads of keys and values. Slot L of a `[B, L+1]` tensor is empty.

`Attributes` of a class are facts that other plug-ins and the engine rely on. Each sentence is true if the attribute is.
"If VALUE:" begins the sentence for another value. The help prints the sentence of a value other than the default.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

from torch import Tensor

from dllm_sampler.core.packing import ForwardRequest, HeadRows, Pack
from dllm_sampler.core.spec import ModelSpec, Traits
from dllm_sampler.core.values import AttentionMeans, Canvas, Edit, Query, Readout, Refusals, Spent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Carry = Any  # a scheduler's own state: a tree of tensors with leading dimension B, possibly empty
Whole = tuple[Tensor, Tensor]  # logits and noisy logits, both `[R, V]`, before a guide has excluded tokens


@dataclass(frozen=True)
class Plan:
    """The way in which one forward computes a request. A cache makes it."""

    cache: Cache
    wanted: ForwardRequest
    head_rows: HeadRows  # the queried positions that the forward answers
    entries: Tensor  # [B] positions computed, candidates and shadows included. 0 for finished rows
    pack: Pack | None = None  # None in the padded form (`cache.base.PaddedPlan`)
    attention: Any = None  # of the pack. None means the denoiser's (`models.packed.PackedAttention`)
    pairs: list[tuple[Tensor, Tensor]] | None = None  # keys and values [T, Hkv, Dh] of each layer. None if not kept
    last: bool = False  # in the last layer of a pack, only `pack.head_entries` continue after attention
    means: AttentionMeans | None = None  # filled in by the denoiser. None if no plug-in needs attention


class LayerParts(Protocol):
    """One transformer layer, taken apart so that a cache can drive it.

    N counts the rows of a forward and M their positions. A pack has N = 1 and M = T.
    """

    def qkv(self, hidden: Tensor, rope: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return normed and rotated heads: q `[N, H, M, Dh]`, k and v `[N, Hkv, M, Dh]`.

        Args:
            hidden: `[N, M, D]` the layer's input.
            rope: rotary angles of the M positions, as the denoiser passed them to `Cache.layer`.
        """
        ...

    def values(self, hidden: Tensor) -> Tensor:
        """Return the values `[N, Hkv, M, Dh]` of `hidden [N, M, D]` alone, as `qkv` has them."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return attention after its output projection, `[N, M, D]`. The residual is not added.

        Args:
            q: `[N, H, M, Dh]`.
            k: `[N, Hkv, S, Dh]`, and `v` of the same shape.
            mask: bool, broadcast to `[N, 1, M, S]`: keys that a position sees. None means all.
        """
        ...

    def output(self, heads: Tensor) -> Tensor:
        """Return the output projection `[N, M, D]` of attention `[N, H, M, Dh]`."""
        ...

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Return attention probabilities `[N, H, M, S]`, for caches that use them. Arguments as in `attend`."""
        ...

    def mlp(self, hidden: Tensor) -> Tensor:
        """Return norm and feed-forward `[N, M, D]`. The residual is not added."""
        ...


class Denoiser(Protocol):
    """A model family, from tokens to hidden states and logits.

    Some members are optional, see `TransformerDenoiser`: `using(backend)`, `head_weight()` and the property
    `inference_mode`.

    Examples:
        A model around another one, with logits half as large:

        >>> class Half:
        ...     def __init__(self, inner):
        ...         self.inner, self.spec = inner, inner.spec
        ...     def __call__(self, canvas, query, plan):
        ...         return self.inner(canvas, query, plan)
        ...     def head(self, hidden):
        ...         return self.inner.head(hidden) / 2
        >>> mini = Sampler.from_pretrained("mini")
        >>> Sampler(Half(mini.denoiser), tokenizer=mini.tokenizer).generate("copy: Ada, Ben").texts
        ['Ada, Ben']
    """

    @property
    def spec(self) -> ModelSpec:
        """Facts about the model that the loop and the plug-ins rely on."""
        ...

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        """Run one forward. Each layer calls `plan.cache.layer`, which stores keys and values and attends.

        Args:
            canvas: the state before the step, B rows.
            query: the tokens `[B, K, Q]` that candidates have at the queried positions.
            plan: the T entries to compute and the R head rows to answer.

        Returns:
            hidden states `[R, D]` after the final norm, one for each of `plan.head_rows`, and the cost of each row, in
            passes `[B]` and positions `[B]`.
        """
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Compute logits.

        Args:
            hidden: `[..., D]` hidden states after the final norm.

        Returns:
            `[..., V]` logits in any floating-point type, as the network computes them, not divided by a temperature.
        """
        ...


@dataclass(frozen=True)
class Context:
    """The model and the other plug-ins, as a plug-in sees them in `bind`, before the first generation."""

    spec: ModelSpec
    blocks: Blocks  # bound, but not yet in the `bind` of blocks themselves
    guides: tuple[Guide, ...] = ()  # the user's, not bound
    tokenizer: PreTrainedTokenizerBase | None = None
    scheduler: Scheduler | None = None  # bound, in the `bind` of stop, guides and cache. None in the others

    @property
    def draws(self) -> bool:
        """True if the user's guides draw tokens. A scheduler may bring guides of its own (`Tempered.guides`)."""
        return is_random(self.guides)


class PlugIn:
    """The common part of schedulers, blocks, stops and particles."""

    def bind(self, context: Context) -> Self:
        """Configure the plug-in for a model and the other plug-ins. The default changes nothing.

        Called before the first generation, and again on the result if the blocks change.

        Args:
            context: the model and the other plug-ins.

        Returns:
            the plug-in to use, as a rule a copy with further fields.

        Raises:
            UserError: it does not work with this context. The message names both sides and the way out.
        """
        return self

    @property
    def needs(self) -> frozenset[str]:
        """Fields of `Readout` that it reads beyond `token` and `confidence`.

        `predictions` asks for whole distributions in the cheapest form (`statistics.Predictions.of`). `attention` asks
        for `attention` and `attended`, of the last four layers unless the scheduler has a trait `WatchedLayers`.
        """
        return frozenset()


class Scheduler(PlugIn):
    """A rule that decides which positions a step queries and which predictions it commits.

    A frozen dataclass: its fields are its YAML. Abilities of a few schedulers are protocols: `Planner`, `Paced`,
    `Tempered`, `Corrects`. Facts that are true of a few are a `RareTrait`.

    Examples:
        A scheduler that commits the first mask of the block in each step:

        >>> class First(Scheduler):
        ...     def tell(self, canvas, query, readout, carry):
        ...         eligible = canvas.eligible(query.positions)  # [B, Q]
        ...         return Edit(readout.token[:, 0], eligible & (eligible.cumsum(1) == 1)), carry
        >>> Sampler.from_pretrained("mini", scheduler=First()).generate("copy: Ada, Ben").texts
        ['Ada, Ben']
    """

    @property
    def traits(self) -> Traits:
        """Facts that others rely on. A scheduler whose `ask` leaves the active block sets asks_block=False."""
        return Traits()

    def init(self, canvas: Canvas) -> Carry:
        """Return the carry before the first step. The default is None.

        Args:
            canvas: B rows before their first step.

        Returns:
            a tree of tensors with leading dimension B, one entry for each row.
        """
        return None

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Return the query of the next step. The default queries the active block (`Traits.asks`).

        Args:
            canvas: the state after the last step.
            carry: as `init` or the last `tell` returned it.

        Returns:
            `positions [B, Q]`, sorted and padded with L, and the tokens `[B, K, Q]` of K candidates there.
        """
        return Query.masks(canvas) if self.traits.asks == "masks" else Query.window(canvas)

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        """Judge the predictions of a step. Commit only where `canvas.eligible(query.positions)` is true.

        A scheduler that `revises` may also commit over committed tokens.

        Args:
            canvas: the state that the forward saw. Rows of a first forward (`age` 0) have their final block.
            query: the question. A cache may have removed positions that it did not predict.
            readout: statistics `[B, K, Q]`, probabilities from 0 to 1, entropies in nats. They are 0 where the
                forward answered nothing.
            carry: as `init` or the last `tell` returned it.

        Returns:
            the edit `[B, Q]`, and the carry of the next step.
        """
        raise NotImplementedError

    def bound(self, tokens: int) -> int:
        """Return an upper bound on the steps of a row. The default is one for each token.

        Args:
            tokens: positions of the row to generate.

        Returns:
            a number of forwards.
        """
        return tokens

    @property
    def total_steps(self) -> int | None:
        """Number of forwards for a whole answer, which its blocks share. None if the user set no number."""
        return None


@runtime_checkable
class Planner(Protocol):
    """A scheduler that knows what the next step commits before any prediction (`PlannedCommits`)."""

    def ahead(self, canvas: Canvas, carry: Carry) -> Tensor | None:
        """Return the positions that the next `ask` names and the next `tell` commits.

        Returns:
            `[B, L+1] int64` place of each column in the step's order, from 1. 0 means that the step leaves it out. A
            scheduler around another returns None if that one does not know.
        """


@runtime_checkable
class Paced(Protocol):
    """A scheduler that measures time: it queries as many candidates as a forward computes at no cost."""

    def with_candidates(self, most: int) -> Scheduler:
        """Return the same scheduler with a limit of `most` candidates. It commits the same in the end."""
        ...

    def pace(self, made: ForwardRequest, seconds: float) -> int | None:
        """Return the new limit on candidates, or None for no limit. Called between two steps.

        Args:
            made: the request for the last forward.
            seconds: duration of the last step. 0 before the first step.
        """


@runtime_checkable
class Tempered(Protocol):
    """A scheduler that rewrites logits itself, for example by a falling temperature."""

    def guides(self, given: tuple[Guide, ...]) -> tuple[Guide, ...]:
        """Return the user's bound guides and the scheduler's own, in the order in which they apply."""
        ...


@runtime_checkable
class Corrects(Protocol):
    """A scheduler with forwards that correct tokens at an unchanged noise level.

    These forwards do not change the self-conditioning of the model.
    """

    def conditions(self, canvas: Canvas) -> Tensor:
        """Return `[B] bool` rows whose next forward is conditioned on this one. The others keep this one's condition.

        Args:
            canvas: the state that this forward saw.
        """
        ...


class Blocks(PlugIn):
    """A rule that decides which columns are decoded: the active block, and where it moves.

    Attributes:
        sizes_on_open: The forward that opens a block may shorten it.
        several: Several blocks are open at once: no scheduler that remasks tokens or follows a schedule.
        slides: The active block is a window that moves with its first mask and opens once: no scheduler that remasks
            tokens or follows a schedule, no cache that acts when a block opens, no stop=block.
        hides: The columns after the open blocks are not seen: no cache that serves old masks.
        judges_draws: Drawn tokens, or their confidence, decide where a block ends or what it commits.

    Examples:
        Two blocks, each half of the answer:

        >>> class Halves(Blocks):
        ...     def lookahead(self, tokens):
        ...         return -(-tokens // 2)
        >>> Sampler.from_pretrained("mini", blocks=Halves()).generate("copy: Ada, Ben", max_new_tokens=16).texts
        ['Ada, Ben']
    """

    sizes_on_open: ClassVar[bool] = False
    several: ClassVar[bool] = False
    slides: ClassVar[bool] = False
    hides: ClassVar[bool] = False
    judges_draws: ClassVar[bool] = False
    part: int | None = (
        None  # blocks of the grid are decoded in parts of this length, counted from the same column as the grid
    )

    @property
    def grid(self) -> int | None:
        """Length of blocks that are counted from the row's first token, prompt included. None for other blocks."""
        return None

    def lookahead(self, tokens: int) -> int:
        """Return the length of a new block until a forward has opened it.

        Args:
            tokens: columns of the answer.

        Returns:
            columns from the start of the block to its provisional end, at least 1.
        """
        raise NotImplementedError

    def widest(self, tokens: int) -> int:
        """Return an upper bound on the length of an active block. The default is `lookahead`.

        Args:
            tokens: columns of the answer.

        Returns:
            a number of columns. Tensors of the generation get this size.
        """
        return self.lookahead(tokens)

    def open(self, canvas: Canvas, query: Query, readout: Readout) -> Tensor | None:
        """Return the final end of blocks that this forward opened. It may only be before the provisional end.

        Args:
            canvas: the state that the forward saw.
            query: the question.
            readout: statistics `[B, K, Q]`.

        Returns:
            `[B]` columns, which count in rows of `age` 0. None leaves all blocks as they are.
        """
        return None

    def progress(self, canvas: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        """Add the commits that the blocks require to the scheduler's. The default adds nothing.

        Args:
            canvas: the state that the forward saw, with final blocks.
            query: the question, about one candidate.
            readout: statistics `[B, 1, Q]`.
            edit: the scheduler's edit `[B, Q]`.

        Returns:
            an edit `[B, Q]`. It may be `edit` itself.
        """
        return edit

    def move(self, after: Canvas) -> tuple[Tensor, Tensor] | None:
        """Return the active block of the next step.

        Args:
            after: the canvas with the step's edit. Before the first step its block is empty.

        Returns:
            first column `[B]` and end `[B]`. Rows that are done keep their own. None means the default, the next block
            if this one is over (`Canvas.block_over`).
        """
        return None


class Guide:
    """A function that rewrites logits before a token is chosen.

    Attributes:
        truncates: It keeps only the most likely tokens, which changes nothing without a temperature.
        excludes: It excludes given tokens: it must be before guides that keep only the most likely ones.
        keeps_excluded: It never raises the logit of a token that others excluded.
        joint: It chooses the tokens of a step together: no other guide on the form, no stop that writes tokens.
        vetoes: It may refuse what a step commits: no scheduler that drafts, no cache that relies on commits.

    Examples:
        A guide that never lets token 4 be chosen, the comma of `mini`:

        >>> class NoComma(Guide):
        ...     excludes = True
        ...     def __call__(self, logits, canvas, head_rows):
        ...         return logits.index_fill(1, logits.new_tensor([4], dtype=int), float("-inf"))
        >>> Sampler.from_pretrained("mini", guide=NoComma()).generate("copy: Ada, Ben", max_new_tokens=16).texts
        ['Ada + Ben']
    """

    truncates: ClassVar[bool] = False
    excludes: ClassVar[bool] = False
    keeps_excluded: ClassVar[bool] = False
    joint: ClassVar[bool] = False
    vetoes: ClassVar[bool] = False
    forms: int = 0  # number of forms of answers. A prompt names one (`Layout.form`). 0 without a list of forms

    @property
    def chooses(self) -> bool:
        """True if tokens are chosen from the rewritten logits."""
        return True

    @property
    def measures(self) -> bool:
        """True if confidence, margin and entropy are measured on the rewritten logits."""
        return False

    @property
    def draws(self) -> bool:
        """True if tokens are sampled under this guide, unless the `temperature` of another one is 0."""
        return False

    @property
    def temperature(self) -> float | None:
        """Divisor of the logits if the guide only divides, so that kernels can do it. None for any other guide."""
        return None

    def bind(self, context: Context) -> Guide:
        """Configure the guide for a model. The default changes nothing.

        Args:
            context: the model and the other plug-ins.

        Returns:
            the guide to use.

        Raises:
            UserError: it does not work with this context. The message names both sides and the way out.
        """
        return self

    def check_answer(self, given: Sequence[int], form: int = 0) -> None:
        """Refuse a request whose answer cannot have the form that the guide requires.

        Args:
            given: tokens of the answer, `FREE` at each position to generate.
            form: number of its form.

        Raises:
            UserError: no answer with these given tokens and this length has the form.
        """

    def __call__(self, logits: Tensor, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        """Return rewritten logits. Never write to `logits`.

        Args:
            logits: `[R, V]`, with minus infinity for tokens that no answer may have.
            canvas: the state before the step.
            head_rows: row, candidate and position of each of the R predictions, `[R]` each.

        Returns:
            `[R, V]` in a floating-point type. Minus infinity excludes a token.
        """
        raise NotImplementedError

    def choose(self, logits: Tensor, noisy: Tensor, whole: Whole | None, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        """Choose the tokens of a step together, if the guide is `joint`.

        Args:
            logits: `[R, V]` as the other guides leave them.
            noisy: `[R, V]` the same with the step's noise. The highest score is the choice of a single position.
            whole: both without the guides that exclude or truncate. None if no guide does.
            canvas: the state before the step.
            head_rows: row, candidate and position of each of the R predictions.

        Returns:
            `[R] int64` tokens.
        """
        raise NotImplementedError

    def settle(self, canvas: Canvas, query: Query, readout: Readout, edit: Edit) -> tuple[Edit, Refusals]:
        """Return the part of an edit that the guide allows, if it `vetoes`.

        If it allows nothing, it commits another token or marks the row as stuck, which ends it.

        Args:
            canvas: the state that the forward saw, with final blocks.
            query: the question, about one candidate.
            readout: statistics `[B, 1, Q]`.
            edit: edit of scheduler and blocks, `[B, Q]`.

        Returns:
            the edit, and what the guide refused in each row.
        """
        raise NotImplementedError

    def valid(self, tokens: Sequence[int], form: int = 0) -> bool | None:
        """Judge a finished answer. The default returns None.

        Args:
            tokens: the answer up to its end-of-text token.
            form: number of its form.

        Returns:
            True if the answer has the form that the guide requires, False if not, and None if the guide cannot decide.
        """
        return None


def is_random(guides: Iterable[Guide]) -> bool:
    """Return True if tokens are drawn under these guides. A temperature of 0 makes every choice greedy."""
    given = tuple(guides)
    return any(guide.draws for guide in given) and all(guide.temperature != 0 for guide in given)


class Stop(PlugIn):
    """A rule that ends rows early. Schedulers and blocks decide when a row leaves its block.

    Attributes:
        cuts: It may shorten the canvas: no scheduler that drafts.
        fills: It may commit tokens itself: no scheduler that drafts, no guide on the answer's form.
        judges_all: It waits for a prediction of every mask: no cache that hides some.
        predicts: It needs predictions at the `positions` that it names. If false: It writes without a prediction.

    Examples:
        A policy that gives each row two forwards:

        >>> from dataclasses import replace
        >>> class Two(Stop):
        ...     def __call__(self, canvas, after, query, readout, edit):
        ...         return replace(edit, finish=canvas.step == 1)
        >>> sampler = Sampler.from_pretrained("mini", stop=Two(), scheduler="leftright")
        >>> sampler.generate("copy: Ada, Ben").texts
        ['Ada, ']
    """

    cuts: ClassVar[bool] = False
    fills: ClassVar[bool] = False
    judges_all: ClassVar[bool] = False
    predicts: ClassVar[bool] = True

    def positions(self, canvas: Canvas) -> Tensor | None:
        """Name positions to predict in addition to the scheduler's query. The default names none.

        Args:
            canvas: the state before the step.

        Returns:
            `[B, L+1] bool` columns to add to the query, or None for no columns. A cache may still drop those that it
            does not predict.
        """
        return None

    def __call__(self, canvas: Canvas, after: Canvas, query: Query, readout: Readout, edit: Edit) -> Edit:
        """Return the edit with the rows ended (`finish`), cut (`end`) or filled where the policy fires.

        Args:
            canvas: the state that the forward saw, with final blocks.
            after: the canvas with `edit` applied.
            query: the question, about one candidate.
            readout: statistics `[B, 1, Q]`.
            edit: what the step writes, `[B, Q]`.

        Returns:
            an edit `[B, Q]`, with `finish [B] bool` and `end [B]` in columns. `edit` itself changes nothing. The
            result must have the `keep_block` and `close_block` of `edit`.
        """
        return edit


class Cache:
    """A store of keys and values that decides which columns a forward computes. Its fields are its YAML.

    The configured object is a template. `init` returns a live copy for one generation. `cache.base.BaseCache` lacks
    only `computes`. Abilities of a few caches are protocols: `Foresees`, `Prefills`, `ReusesGuidance`, `Wraps`.

    Attributes:
        stores: It stores keys and values for later forwards. If false: It stores no keys and values.
        syncs: It reads the device inside a step: no CUDA graphs.
        shared: It has numbers for the whole batch: prompts are answered batch by batch, without CUDA graphs.
        judges_draws: The confidence of drawn tokens decides what it computes.

    Examples:
        A cache that computes the active block and everything after it, and every column when a block opens:

        >>> from dllm_sampler.cache.base import BaseCache
        >>> class Tail(BaseCache):
        ...     def computes(self, canvas):
        ...         return (canvas.columns() >= canvas.start[:, None]) | self.due(canvas)[:, None]
        >>> Sampler.from_pretrained("mini", cache=Tail()).generate("copy: Ada, Ben").texts
        ['Ada, Ben']
    """

    stores: ClassVar[bool] = True
    syncs: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    judges_draws: ClassVar[bool] = False

    spec: ModelSpec  # of a live copy, as the fields below
    slots: Any = None  # keys and values of every column (`cache.slots.Slots`). None if nothing is stored
    twin: Cache | None = None  # of the branch without prompt, under classifier-free guidance
    memory: Any = None  # state of an encoder after the text so far

    def bind(self, context: Context) -> Cache:
        """Configure the cache for a model and the other plug-ins.

        Args:
            context: the model and the other plug-ins.

        Returns:
            the cache to use. It is another template, or this one.

        Raises:
            UserError: it does not work with this context. The message names both sides and the way out.
        """
        raise NotImplementedError

    def init(self, canvas: Canvas, spec: ModelSpec) -> Self:
        """Return a live copy for one generation.

        Args:
            canvas: B rows before their first step.
            spec: the model, with the end-of-text tokens of this generation.

        Returns:
            a copy with a state of its own. Stored keys and values are in the model's type and on its device, for most
            caches `[B, L+1, Hkv, Dh]` in each layer.

        Raises:
            UserError: this is a live copy already.
        """
        raise NotImplementedError

    def computes(self, canvas: Canvas) -> Tensor | None:
        """Choose the columns of the next forward. The default is all of them.

        Args:
            canvas: the state before the step. `age` is 0 in rows whose block opens.

        Returns:
            `[B, L+1] bool` columns to compute, or None for all. Columns that the row does not see are always left out.
        """
        return None

    def narrow(self, canvas: Canvas, query: Query, predicted: Tensor) -> Query:
        """Return a query without the positions that the next forward does not predict.

        The engine calls this if `computes` chose columns, or if the model has an encoder.

        Args:
            canvas: the state before the step.
            query: the scheduler's query, `positions [B, Q]`. If it `keeps_positions`, nothing is dropped.
            predicted: `[B, L+1] bool` columns that the forward predicts.

        Returns:
            the query to answer. Its width Q stays.
        """
        return query if query.keeps_positions else query.drop(canvas, predicted)

    def plan(self, canvas: Canvas, wanted: ForwardRequest) -> Plan:
        """Plan one forward.

        Args:
            canvas: the state before the step.
            wanted: the query, the columns to compute and the positions to answer. Its `sizes` fix the tensors' sizes.

        Returns:
            the plan, with T entries and R head rows.
        """
        raise NotImplementedError

    def layer(self, index: int, parts: LayerParts, hidden: Tensor, rope: Any, plan: Plan) -> Tensor:
        """Drive one layer: store keys and values, attend, feed forward.

        Args:
            index: number of the layer, from 0. Under classifier-free guidance the twin gets its own calls.
            parts: the layer, taken apart.
            hidden: `[1, T, D]` of a pack, or `[B, M, D]` of a padded plan.
            rope: rotary angles of these positions.
            plan: the plan of this forward.

        Returns:
            the same shape. The last layer of a pack (`plan.last`) returns the head rows alone, `[1, R, D]`.
        """
        raise NotImplementedError

    def cost(self, plan: Plan) -> Tensor:
        """Count the positions that the last forward computed.

        Args:
            plan: the plan of that forward.

        Returns:
            `[B]` positions, as a mean over layers if these differ.
        """
        return plan.entries

    def recalled(self, canvas: Canvas) -> Tensor | None:
        """Name positions that the next forward predicts from hidden states of an earlier forward; see `restore`.

        The default names none.

        Args:
            canvas: the state before the step.

        Returns:
            `[B, L+1] bool` columns, or None for no columns.
        """

    def restore(self, hidden: Tensor, plan: Plan) -> Tensor:
        """Insert hidden states of an earlier forward where `recalled` named positions. The default changes nothing.

        Args:
            hidden: `[R, D]` hidden states after the final norm.
            plan: the plan of this forward.

        Returns:
            `[R, D]` hidden states.
        """
        return hidden

    def adopt(self, candidate: Tensor) -> None:
        """Keep what the last forward stored for the candidate from which the step continues. The default does nothing.

        Args:
            candidate: `[B] int64` numbers of candidates, from 0 to K - 1.
        """

    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        """Learn what a step wrote. The default learns nothing.

        Args:
            canvas: the state that the forward saw, with final blocks.
            query: the question, about one candidate.
            edit: what was written, `[B, Q]`.
            readout: statistics `[B, 1, Q]`.
        """


@dataclass(frozen=True)
class Meeting:
    """A meeting of the N rows of each of G prompts: a point between two steps at which rows may be replaced."""

    canvas: Canvas  # of all G * N rows. The rows of a prompt follow each other
    log_p: Tensor  # [G, N] float64 sum of the log-probabilities of the tokens that a row has committed
    stuck: Tensor  # [G, N] bool: rows that a guide has ended
    here: Tensor  # [G] bool: prompts whose rows meet. The others run on
    final: Tensor  # [G] bool: True if every row of the prompt has ended
    carry: Carry  # of the scheduler


class Resampled(NamedTuple):
    """The outcome of `Particles.meet`."""

    log_weights: Tensor  # [G, N] float64 weights of the rows before the meeting, up to a constant
    ancestors: Tensor  # [G, N] int64 number of the row that is copied to each place. -1 in prompts whose rows stay
    carry: Carry  # of the particles, for the rows as they were. The engine copies it with the rows


class Particles(PlugIn):
    """A rule that decodes several rows of each prompt and returns one of them. Its fields are its YAML.

    Each row has draws of its own. Rows meet when all rows of the prompt have closed a block. A row that is early waits.
    A meeting may replace rows by copies of others, which draw differently from then on.

    Attributes:
        meets: Rows meet while they are decoded. If false: Rows are compared at the end only.

    Examples:
        Four rows for each prompt. The answer is the row with the lowest probability:

        >>> class Rarest(Particles):
        ...     count = 4
        ...     def rate(self, meeting, carry, likelihood):
        ...         return -meeting.log_p  # [G, N]
        >>> sampler = Sampler.from_pretrained("mini", particles=Rarest(), temperature=1)
        >>> sampler.generate("copy: Ada, Ben", seed=0).texts
        ['Ada, Ben']
    """

    meets: ClassVar[bool] = False
    count: int = 1  # rows of each prompt
    every: int | None = None  # forwards of a row from one meeting to the next. None: rows meet after each block

    @property
    def needs_likelihood(self) -> bool:
        """True if `rate` needs the exact log-likelihood of each answer, which takes forwards."""
        return False

    def around(self, scheduler: Scheduler) -> Scheduler:
        """Return a scheduler that also records what `meet` needs to know about a step. The default adds nothing.

        Args:
            scheduler: the bound scheduler.

        Returns:
            a scheduler that commits the same, or the scheduler itself.
        """
        return scheduler

    def init(self, canvas: Canvas) -> Carry:
        """Return the carry before the first step. The default is None.

        Args:
            canvas: B = G * N rows before their first step.

        Returns:
            a tree of tensors with leading dimension B, one entry for each row.
        """
        return None

    def meet(self, meeting: Meeting, carry: Carry) -> Resampled:
        """Decide which rows continue. Called if the particles `meets`. May read the device.

        Args:
            meeting: the rows. Rows of prompts that are not `here` stay, and the result for them is ignored.
            carry: as `init` or the last `meet` returned it, copied with the rows.

        Returns:
            weights `[G, N]` of the rows, the row that is copied to each place, and the carry.
        """
        raise NotImplementedError

    def rate(self, meeting: Meeting, carry: Carry, likelihood: Tensor | None) -> Tensor:
        """Rate rows at their end. The default is the sum of log-probabilities, `Meeting.log_p`.

        Args:
            meeting: the rows, all of them `here`.
            carry: as `init` or the last `meet` returned it.
            likelihood: `[G, N] float64` log-likelihoods of the answers in nats (`Sampler.score`). None without
                `needs_likelihood`.

        Returns:
            `[G, N] float64` ratings. The row with the highest one is the answer, and the first of them on a tie.
        """
        return meeting.log_p


@runtime_checkable
class Foresees(Protocol):
    """A cache that must know the commits of the next forward, from a scheduler with `PlannedCommits`."""

    def expect(self, ahead: Tensor, most: int) -> None:
        """Store the plan of what the next forward commits.

        Args:
            ahead: `[B, L+1]` see `Planner.ahead`.
            most: upper bound on the positions that a row commits.
        """


@runtime_checkable
class Prefills(Protocol):
    """A cache that computes a prompt once for several rows. Its keys must not depend on the tokens after it."""

    def prefill(self, template: Cache, canvas: Canvas, samples: int, denoiser: Denoiser) -> Tensor | None:
        """Compute the prompt that consecutive rows have in common, before the first step.

        Args:
            template: the cache from which this live copy was made.
            canvas: B rows before their first step.
            samples: each `samples` consecutive rows have the same prompt.
            denoiser: the model.

        Returns:
            `[B]` positions computed, counted in the first row of each prompt. None if nothing was computed.
        """


@runtime_checkable
class ReusesGuidance(Protocol):
    """A cache that saves passes of the branch without prompt, under classifier-free guidance."""

    difference: Tensor | None  # conditional minus unconditional hidden states of the last forward that ran both

    def reuses_guidance(self) -> bool | None:
        """Return True if the next forward may use the last `difference` between the branches.

        Returns None if no forward ever may.
        """


@runtime_checkable
class Wraps(Protocol):
    """A cache that needs forwards of its own, which the scheduler does not see."""

    def around(self, scheduler: Scheduler) -> Scheduler:
        """Return the bound scheduler with the cache's own forwards added."""
        ...
