"""What is known before the first step: of a model (`ModelSpec`) and of a scheduler (`Traits`)."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, TypeVar

import torch

from dllm_sampler.core.ends import end_ids

Made = TypeVar("Made")
# What a token sees: everything; its own block, on a grid, and earlier ones; or, in the active block, that block and all
# before it, and before the active block nothing behind itself.
Attention = Literal["bidirectional", "block_causal", "causal_context"]


@dataclass(frozen=True)
class ModelSpec:
    """A model, in a few numbers and facts."""

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
    prompt_block: bool = False  # block-causal: the prompt is one block, and the others are counted from its end
    block_length: int | None = None  # blocks it was trained on, where that is one length
    shift: bool = False  # raw row i predicts token i + 1 (Dream)
    seeds: bool = False  # the row before a block predicts the block's first token; other rows predict their own
    routing: int | None = None  # tokens of a block of this length choose their experts together
    cacheable: bool = True  # False: only whole rows can be run, no cache but `none` is legal
    encoder: bool = False  # one reads the text before the block; the block, whole, is all that is predicted
    self_conditioning: bool = False  # wants the logits of the last step back (`Query.previous`)
    branches: int = 1  # 2 under classifier-free guidance: a cache keeps a twin
    folder: Path | None = None  # of the checkpoint, which may ship what was learnt for the model (Learn2PD's filter)
    other_eos_ids: tuple[int, ...] = ()  # further tokens that end an answer

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """All tokens that end an answer, `eos_id` first."""
        return end_ids((self.eos_id, *self.other_eos_ids))

    def with_ends(self, more: int | Iterable[int]) -> ModelSpec:
        """Return the same model with `more` end-of-text tokens, after those that it has."""
        found = end_ids((*self.eos_ids, *end_ids(more)))
        return self if found == self.eos_ids else replace(self, other_eos_ids=found[1:])


@dataclass(frozen=True)
class Traits:
    """Facts about a scheduler that others rely on."""

    asks: Literal["masks", "window"] = "masks"  # what the default `ask` wants of the block: its noise, or all of it
    asks_block: bool = True  # it asks for the active block in every step, so that others can ask for it
    whole: bool = False  # every forward computes every column (choices or edits outside the block, shadow rows)
    leave_one_out: bool = False  # it asks `leave_one_out` queries, for which the forward computes shadow rows
    causal: bool = False  # it asks `causal` queries without shadows, for a model with a causal context
    exact: bool = False  # it must hear about every mask it asks: no cache may choose among them
    revises: bool = False  # it may take back or replace tokens that are committed
    may_commit_mask: bool = False  # under `compat` a mask token that it commits is final; False: the column stays noise
    uniform: bool = False  # its rule is also good for uniform diffusion, whose noise are random tokens
    own_tokens: bool = False  # it may write other tokens than this step's candidates
    plans: bool = False  # it knows before a forward which positions the forward will commit (`Planner`)
    draws_order: bool = False  # `tell` draws which positions it commits
    drafts: bool = False  # it asks about states that may not come true: what it foresees must not be disturbed
    opens_ahead: bool = False  # it may open a block without a forward of its own, which a cache may want for a refresh
    static: bool = True  # its steps are launches on tensors and nothing else: a CUDA graph can repeat them
    reads_ahead: bool = True  # its judgement sees text behind a gap; False: only what stands before a token
    shared: bool = False  # it keeps something for the batch as a whole: no row can join one that runs
    ranks_by_confidence: bool = True  # what it commits depends on `readout.confidence`: a factor on that is felt
    scheduled: bool = False  # what it commits follows from the block's length or from the forwards made in it
    block_length: int | None = None  # the one block length it was made for (a learned rule); None: any
    # What its rule rests on: the logits of one block; counts over the whole answer; or more of the model than logits of
    # a block (shadow rows, drafts, hidden columns), or of others (a second model, a reward).
    scope: Literal["block", "answer", "model"] = "block"
    initial: int | None = None  # columns an answer begins with, whose number then changes; None: all, for good
    hides: bool = False  # some of its queries hide masks from the model
    horizon: int | None = None  # columns from the first noise on in which the model sees masks; None: all


def learned(plugin: Made, **values: object) -> Made:
    """A copy of a plug-in with `values` for fields that are no arguments (`field(init=False)`): what `bind` returns."""
    unknown = values.keys() - {one.name for one in fields(plugin) if not one.init}  # pyright: ignore
    assert not unknown, f"{type(plugin).__name__} has no fields {unknown} to learn"
    twin = copy(plugin)
    vars(twin).update(values)
    return twin
