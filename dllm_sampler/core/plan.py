"""What a cache tells the denoiser to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dllm_sampler.core.masks import Visible
from dllm_sampler.core.packing import Answers, Pack, Request

if TYPE_CHECKING:
    from dllm_sampler.core.protocols import Cache


@dataclass(frozen=True)
class Plan:
    """How one forward computes a request, and what each position sees. Made by a cache."""

    cache: Cache
    wanted: Request
    answers: Answers  # which queried places the forward answers
    visible: Visible
    computed: Tensor  # [B] positions computed, candidates and shadows included; 0 for finished rows
    pack: Pack | None = None  # None: the padded form (`PaddedPlan`)
    attention: Any = None  # of the pack; None: the denoiser's (`models.packed.PackedAttention`)
    pairs: list[tuple[Tensor, Tensor]] | None = None  # [T, Hkv, Dh] each layer's keys and values; None: not kept
    last: bool = False  # in the last layer of a pack: only `pack.answers` go on behind attention
