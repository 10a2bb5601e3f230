"""DiffusionGemma in training: the encoder reads whole rows, and the decoder denoises all of their canvases.

Letters: B rows, L columns, A columns of the longest answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dllm_sampler.models.diffusion_gemma import additive, capped
from dllm_sampler.models.huggingface import cache_keyword

if TYPE_CHECKING:
    from transformers import DiffusionGemmaForBlockDiffusion


class _Text:
    """The encoder's keys and values of whole rows, as transformers' layers write and read them."""

    is_compileable = False

    def __init__(self) -> None:
        self.layers: list[Any] = []

    def update(self, keys: Tensor, values: Tensor, index: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store and return `[B, H, L, D]` of layer `index`. If the backward pass runs it again, nothing is stored."""
        if index == len(self.layers):
            self.layers.append(SimpleNamespace(keys=keys, values=values))
        return keys, values


def _twice(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a layer's forward that stores only its input, and runs again in the backward pass."""

    def run(*given: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*given, **named)
        return checkpoint(forward, *given, use_reentrant=False, **named)

    return run


class UniformLM(nn.Module):
    """A DiffusionGemma in training: the encoder reads clean rows, the decoder denoises all of their canvases."""

    def __init__(self, model: DiffusionGemmaForBlockDiffusion):
        super().__init__()
        self.model: Any = model
        self.spread = False  # processes share the weights, and so make the same forwards

    def recompute(self) -> None:
        """Store only the layers' inputs and the encoder's keys and values for a backward pass, and recompute the rest.

        transformers does so for the decoder alone, since a layer of its encoder must not write a cache twice.
        """
        inner = self.model.model
        for layer in (*inner.encoder.language_model.layers, *inner.decoder.layers):
            layer.forward = _twice(layer.forward)

    def join_layers(self) -> tuple[str, ...]:
        """Make the large parts of encoder and decoder the same modules, and return the names of their classes.

        Their layers have the same weights, and FSDP2 allows a weight in one module only. Call it before sharding.
        """
        self.spread, names = True, set[str]()
        inner = self.model.model
        for own, other in zip(inner.decoder.layers, inner.encoder.language_model.layers, strict=True):
            for name, part in own.self_attn.named_children():
                if name.endswith("_proj"):
                    setattr(other.self_attn, name, part)
            other.mlp, other.experts = own.mlp, own.experts
            names |= {type(own.mlp).__name__, type(own.experts).__name__}
        return tuple(sorted(names))

    def forward(
        self, ids: Tensor, length: Tensor, noisy: Tensor, columns: Tensor, prompt: Tensor, again: Tensor, *, read: bool
    ) -> list[Tensor]:
        """Return logits `[B, A, V]` at `columns`: the decoder's, and with `read` also the encoder's.

        Args:
            ids: `[B, L]` clean rows, padded on the right.
            length: `[B]` number of tokens of each row.
            noisy: `[B, A]` tokens of the answers that the decoder sees.
            columns: `[B, A]` columns of these tokens, ascending. Shorter answers repeat their last column.
            prompt: `[B]` first column of each row's first canvas.
            again: `[B] bool` rows whose decoder is conditioned on its own prediction.
            read: also return the encoder's predictions of each token from those before it.
        """
        text, inner = self.model.config.text_config, self.model.model
        column = torch.arange(ids.shape[1], device=ids.device)
        causal = (column <= column[:, None]) & (column < length[:, None, None])  # [B, L, L]
        near = causal & (column > column[:, None] - text.sliding_window)
        memory = _Text()
        hidden = inner.encoder.language_model(
            input_ids=ids,
            attention_mask=self._masks(causal, near),
            position_ids=column.expand_as(ids),
            **{cache_keyword(type(inner.encoder.language_model)): memory},
        ).last_hidden_state  # [B, L, D]
        size = self.model.config.canvas_length
        start = columns - (columns - prompt[:, None]) % size  # [B, A] where each token's canvas begins
        before = column < start[..., None]  # [B, A, L]
        first = torch.ones_like(columns, dtype=torch.bool)
        first[:, 1:] = columns[:, 1:] > columns[:, :-1]  # the others are padding
        canvas = (start[:, None] == start[..., None]) & first[:, None]  # [B, A, A]
        masks = self._masks(
            torch.cat([before, canvas], 2),
            torch.cat([before & (column > start[..., None] - text.sliding_window), canvas], 2),
        )

        def decoded(logits: Tensor | None) -> Tensor:
            found = inner.decoder(
                decoder_input_ids=noisy,
                **{cache_keyword(type(inner.decoder)): memory},
                self_conditioning_logits=logits,
                self_conditioning_mask=again,
                decoder_attention_mask=masks,
                decoder_position_ids=columns,
            ).last_hidden_state
            return capped(self.model, found)

        known, repeats = None, again.any().long()
        if self.spread:
            torch.distributed.all_reduce(repeats, torch.distributed.ReduceOp.MAX)
        if repeats:
            with torch.no_grad():
                known = decoded(None)
        found = [decoded(known)]
        if read:
            last = (columns - 1).clamp(min=0)[..., None].expand(-1, -1, hidden.shape[-1])
            found.append(capped(self.model, hidden.gather(1, last)))
        return found

    def _masks(self, full: Tensor, sliding: Tensor) -> dict[str, Tensor]:
        named = {"full_attention": full, "sliding_attention": sliding}
        return {kind: additive(seen, self.model.dtype) for kind, seen in named.items()}
