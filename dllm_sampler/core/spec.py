"""Facts before the first step: of a model (`ModelSpec`) and of a scheduler (`Traits`)."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, TypeVar

import torch

from dllm_sampler.core.ends import end_ids

Made = TypeVar("Made")
Rare = TypeVar("Rare", bound="RareTrait")
# What a token sees. bidirectional: everything. block_causal: its own block, on a grid, and earlier ones.
# causal_context: in the active block, that block and all before it; before that block, itself and all before it.
Attention = Literal["bidirectional", "block_causal", "causal_context"]
# The token that blocks are counted from. text: the row's first one. answer: the answer's first one, in both directions.
# whole_prompt: the answer's first one, and the prompt is one block.
BlocksFrom = Literal["text", "answer", "whole_prompt"]


@dataclass(frozen=True)
class ModelSpec:
    """The facts about a model that the loop and the plug-ins rely on."""

    vocab_size: int
    mask_id: int | None  # None: uniform diffusion, no mask token
    eos_id: int  # the end-of-text token that is written; it is the first of `eos_ids`
    pad_id: int
    max_positions: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    eot_id: int | None = None  # end of turn, where it differs from eos
    attention: Attention = "bidirectional"
    blocks_from: BlocksFrom = "text"  # block-causal: where blocks are counted from
    block_length: int | None = None  # length of the blocks it was trained on. None if they have no single length
    shift: bool = False  # the hidden state at column i predicts token i + 1 (Dream)
    seeds: bool = False  # the column before a block predicts the block's first token. Others predict their own
    routing: int | None = None  # tokens of a block of this length choose their experts together
    cacheable: bool = True  # False: a forward computes whole rows only, so cache=none is the only cache
    encoder: bool = False  # an encoder reads the text before the block, and a forward predicts the whole block only
    self_conditioning: bool = False  # a forward reads the logits of the last step (`ForwardRequest.previous`)
    branches: int = 1  # 2 under classifier-free guidance: a cache keeps a twin
    folder: Path | None = None  # folder of the checkpoint, which may have files for plug-ins (Learn2PD's filter)
    other_eos_ids: tuple[int, ...] = ()  # further tokens that end an answer

    @property
    def noise_id(self) -> int:
        """Token at positions of noise: the mask token. Without one it is `pad_id`, which random tokens then replace."""
        return self.pad_id if self.mask_id is None else self.mask_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """All tokens that end an answer, `eos_id` first."""
        return end_ids((self.eos_id, *self.other_eos_ids))

    def with_ends(self, more: int | Iterable[int]) -> ModelSpec:
        """Return the same facts with `more` end-of-text tokens after the model's own."""
        found = end_ids((*self.eos_ids, *end_ids(more)))
        return self if found == self.eos_ids else replace(self, other_eos_ids=found[1:])


@dataclass(frozen=True)
class Traits:
    """Facts about a scheduler that others rely on. The defaults fit a rule that judges the block's masks by confidence.

    What is true of few schedulers is a `RareTrait`: `Traits(asks="window", rare=(BatchState(),))`. A wrapper copies the
    inner scheduler's traits with `replace`, `adding` and `without`, so none is lost.

    Each sentence of an attribute is true if the attribute is. "If VALUE:" begins the sentence for another value.
    Shadow rows are extra mask tokens in a forward, at committed positions (`ShadowRows`).

    Attributes:
        asks: It queries the block's masks only. If window: It queries the whole block in each step.
        asks_block: It queries the active block in every step. If false: It does not query the active block in every
            step: most schedulers cannot wrap it.
        needs_every_position: It needs a prediction of every mask that it queries: no cache that chooses among them.
        revises: It may remask or replace committed tokens.
        own_tokens: It may write other tokens than those that a step predicted: no guide on the answer's form.
        draws_order: It draws the positions that it commits.
        drafts: It queries states that may not come true: no stop that changes the canvas, no guide=grammar.
        graph_safe: Its steps only launch operations on tensors. If false: Its steps read the device: no CUDA graphs.
        ranks_by_confidence: A factor on `readout.confidence` changes what it commits. If false: It does not use
            confidence: no scheduler=eoser around it.
        scheduled: It depends on the block's length or on the forwards made in it: no blocks=multi_block, no
            blocks=sliding.
        scope: Its rule needs only the logits of one block. If answer: Its rule counts over the whole answer: see
            docs/engines.md. If model: Its rule needs more of the model than the logits of one block (shadow rows,
            drafts, hidden columns) or another model: see docs/engines.md.
    """

    asks: Literal["masks", "window"] = "masks"
    asks_block: bool = True
    needs_every_position: bool = False
    revises: bool = False
    own_tokens: bool = False
    draws_order: bool = False
    drafts: bool = False
    graph_safe: bool = True
    ranks_by_confidence: bool = True
    scheduled: bool = False
    scope: Literal["block", "answer", "model"] = "block"
    rare: tuple[RareTrait, ...] = ()

    @property
    def judges_draws(self) -> bool:
        """True if the tokens that a step drew, or their confidence, decide where it commits."""
        return self.ranks_by_confidence or self.has(JudgedTokens)

    def find(self, kind: type[Rare]) -> Rare | None:
        """Return the rare trait of this kind, or None."""
        return next((one for one in self.rare if isinstance(one, kind)), None)

    def has(self, kind: type[RareTrait]) -> bool:
        """Return True if there is a rare trait of this kind."""
        return self.find(kind) is not None

    def adding(self, *rare: RareTrait) -> Traits:
        """Return the same traits with these rare ones, which replace any of the same kinds."""
        return replace(self, rare=(*self.without(*map(type, rare)).rare, *rare))

    def without(self, *kinds: type[RareTrait]) -> Traits:
        """Return the same traits without the rare ones of these kinds."""
        return replace(self, rare=tuple(one for one in self.rare if not isinstance(one, kinds)))


@dataclass(frozen=True)
class RareTrait:
    """A fact that is true of few schedulers. The help prints the first paragraph of its docstring."""


@dataclass(frozen=True)
class AllColumns(RareTrait):
    """Every forward computes every column: no cache that leaves some out.

    It also queries or edits positions outside the block, or its shadow rows see every column.
    """


@dataclass(frozen=True)
class WatchedLayers(RareTrait):
    """It reads the attention of the model's last layers: no cache, and a model whose layers can be driven."""

    count: int = 4


@dataclass(frozen=True)
class OwnInputs(RareTrait):
    """Forwards have inputs that are not the canvas's tokens."""


@dataclass(frozen=True)
class SoftInputs(OwnInputs):
    """The model reads mixtures of embeddings (`Query.mixture`) at positions of the block, but not as it opens.

    A cache must not serve their keys to later forwards.
    """


@dataclass(frozen=True)
class ShadowRows(OwnInputs):
    """Shadow rows are added to the forward, for `leave_one_out` queries.

    A shadow row is a mask token at a queried position. It sees every column but its own, and predicts the token there.
    """


@dataclass(frozen=True)
class CausalQueries(RareTrait):
    """Drafts are verified causally, by a model with a causal context.

    It asks `causal` queries without shadow rows.
    """


@dataclass(frozen=True)
class HiddenMasks(RareTrait):
    """Some masks are hidden from the model in some forwards: no trajectories to train on."""

    horizon: int | None = None  # columns from the first noise on that the model sees. None: no fixed number


@dataclass(frozen=True)
class PlannedCommits(RareTrait):
    """Commits are known before the forward that makes them, as cache=dkv_greedy needs.

    The scheduler is a `Planner`, whose `ahead` knows the positions.
    """


@dataclass(frozen=True)
class ChangingLength(RareTrait):
    """The length of an answer changes while it is decoded, up to max_new_tokens."""

    initial_length: int  # columns that an answer begins with


@dataclass(frozen=True)
class TrainedBlocks(RareTrait):
    """The rule is learned, for blocks of one length."""

    length: int


@dataclass(frozen=True)
class BlocksOpenedAhead(RareTrait):
    """A block may be opened without a forward of its own, in which a cache would refresh what it keeps."""


@dataclass(frozen=True)
class LeftToRightVerifier(RareTrait):
    """A verifier reads from left to right: no given tokens after a gap."""


@dataclass(frozen=True)
class BatchState(RareTrait):
    """Numbers are kept for the whole batch: prompts are answered batch by batch."""


@dataclass(frozen=True)
class JudgedTokens(RareTrait):
    """The predicted token decides where it commits, with or without its confidence."""


@dataclass(frozen=True)
class UniformNoise(RareTrait):
    """Random tokens are denoised too, the noise of models without a mask token (uniform diffusion)."""

    masks: bool = True  # masks are denoised, too. If false: It writes the random tokens of a block after it has opened


@dataclass(frozen=True)
class CommittedMasks(RareTrait):
    """A mask token that it commits is final with compat=true. Otherwise the column stays noise."""


def with_bound_fields(plugin: Made, **values: object) -> Made:
    """Return a copy of a plug-in with `values` for fields that are not arguments (`field(init=False)`), in `bind`."""
    unknown = values.keys() - {one.name for one in fields(plugin) if not one.init}  # pyright: ignore
    assert not unknown, f"{type(plugin).__name__} has no bound fields {unknown}"
    twin = copy(plugin)
    vars(twin).update(values)
    return twin
