"""The loss of uniform diffusion (DiffusionGemma): some tokens of a canvas are replaced by any others, and all of its
tokens are predicted.

There is no paper. The loss is that of NVIDIA's public recipe for the model (NeMo AutoModel, `dllm_sft`): the mean
cross-entropy without the 1/t of masked diffusion, self-conditioning in half of the examples, and the next-token loss of
the encoder, which shares its weights with the decoder. That recipe learns one canvas of each answer in a step; this
module learns all of them, each with a noise level of its own.

Letters: B rows, L columns, A columns of the longest answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.models.diffusion_gemma import additive, capped
from dllm_sampler.models.huggingface import cache_keyword
from dllm_sampler.training import masking, sharding
from dllm_sampler.training.masking import Rows

if TYPE_CHECKING:
    from transformers import DiffusionGemmaForBlockDiffusion


@dataclass(frozen=True)
class Noise:
    """What some rows look like to the decoder."""

    ids: Tensor  # [B, L]
    hidden: Tensor  # [B, L] bool tokens of answers that were replaced
    weight: Tensor  # [B, L] float64: what each token of an answer counts
    again: Tensor  # [B] bool rows whose decoder sees its own first prediction

    def some(self, rows: Tensor, width: int) -> Noise:
        """Some of the rows, and their first columns."""
        ids, hidden, weight = (each[rows, :width] for each in (self.ids, self.hidden, self.weight))
        return Noise(ids, hidden, weight, self.again[rows])


@dataclass(frozen=True)
class UniformLoss:
    """The loss of a model that denoises canvases of random tokens.

    spec: of the model; its blocks, counted from the answer's first token, are the canvases
    self_conditioning: share of the examples whose decoder sees its own prediction of a first pass without gradient
    encoder: weight of the encoder's next-token loss
    """

    spec: ModelSpec
    self_conditioning: float
    encoder: float
    copies: int = 2  # the encoder's columns, and the decoder's

    def draw(self, rows: Rows, generator: torch.Generator) -> list[Noise]:
        """Replace tokens of each canvas with probability t, uniform from 0.001 to 1, by any token."""
        assert self.spec.block_length is not None
        block = (torch.arange(rows.ids.shape[1]) - rows.prompt[:, None]) // self.spec.block_length  # [B, L]
        (masks,) = masking.draw(rows, block, generator, complementary=False, inverse=False)
        other = torch.randint(self.spec.vocab_size, rows.ids.shape, generator=generator)
        again = torch.rand(len(rows.ids), generator=generator) < self.self_conditioning
        share = 1 / (rows.answer.sum(1, keepdim=True).double() * len(rows.ids))  # [B, 1]
        return [Noise(torch.where(masks.hidden, other, rows.ids), masks.hidden, share * rows.answer, again)]

    def of(self, network: nn.Module, rows: Rows, noise: Noise) -> Tensor:
        """The weighted sum over the tokens of the rows' answers.

        network: a `UniformLM`, or DDP around one
        """
        device = self.spec.device
        width = int((rows.length - rows.prompt).max())
        columns = rows.prompt[:, None] + torch.arange(width)  # [B, A]
        there = columns < rows.length[:, None]
        columns = columns.minimum(rows.length[:, None] - 1)
        tokens, weight = rows.ids.gather(1, columns), torch.where(there, noise.weight.gather(1, columns), 0)
        given = (rows.ids, rows.length, noise.ids.gather(1, columns), columns, rows.prompt, noise.again)
        losses = [
            F.cross_entropy(logits.flatten(0, 1), tokens.to(device).flatten(), reduction="none").view(tokens.shape)
            for logits in network(*(each.to(device) for each in given), read=self.encoder > 0)
        ]
        total = losses[0] if len(losses) == 1 else losses[0] + self.encoder * losses[1]
        return (total * weight.to(total)).sum()


class _Text:
    """The encoder's keys and values of whole rows, as transformers' layers write and read them."""

    is_compileable = False

    def __init__(self) -> None:
        self.layers: list[Any] = []

    def update(self, keys: Tensor, values: Tensor, index: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep `[B, H, L, D]` of layer `index`, but not when the backward pass runs it again."""
        if index == len(self.layers):
            self.layers.append(SimpleNamespace(keys=keys, values=values))
        return keys, values


def _twice(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A layer's forward that keeps only its input, and runs again in the backward pass."""

    def run(*given: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*given, **named)
        return checkpoint(forward, *given, use_reentrant=False, **named)

    return run


class UniformLM(nn.Module):
    """A DiffusionGemma as training calls it: the encoder reads clean rows, the decoder denoises all of their canvases.

    model: the module, used as it is
    """

    def __init__(self, model: DiffusionGemmaForBlockDiffusion):
        super().__init__()
        self.model: Any = model
        self.spread = False  # whether processes share the weights, and so make the same forwards

    def recompute(self) -> None:
        """Keep only the layers' inputs and the encoder's keys and values for the backward pass, and recompute the rest.

        transformers does so for the decoder alone, since a layer of its encoder must not write a cache twice.
        """
        inner = self.model.model
        for layer in (*inner.encoder.language_model.layers, *inner.decoder.layers):
            layer.forward = _twice(layer.forward)

    def units(self) -> list[sharding.Unit]:
        """The parts whose weights FSDP2 gathers together; call it once, before these are sharded.

        FSDP2 takes a weight in one module alone, and the layers of encoder and decoder have the same weights. So their
        large parts become the same modules.
        """
        self.spread, units = True, list[sharding.Unit]()
        inner = self.model.model
        for own, other in zip(inner.decoder.layers, inner.encoder.language_model.layers, strict=True):
            products = {name: part for name, part in own.self_attn.named_children() if name.endswith("_proj")}
            for name, part in products.items():
                setattr(other.self_attn, name, part)
            other.mlp, other.experts = own.mlp, own.experts
            units += [list(products.values()), own.mlp, own.experts]
        return units

    def forward(
        self, ids: Tensor, length: Tensor, noisy: Tensor, columns: Tensor, prompt: Tensor, again: Tensor, *, read: bool
    ) -> list[Tensor]:
        """Logits `[B, A, V]` of the tokens at `columns`: the decoder's and, where they are to be `read`, the encoder's.

        Args:
            ids: `[B, L]` clean rows, padded on the right.
            length: `[B]` of each.
            noisy: `[B, A]` what the decoder sees of their answers.
            columns: `[B, A]` where these stand, ascending; what is too long repeats the last.
            prompt: `[B]` where each row's first canvas begins.
            again: `[B] bool` rows whose decoder sees its own prediction.
            read: also return how the encoder predicts each token from those before it.
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
        first[:, 1:] = columns[:, 1:] > columns[:, :-1]  # the others stand for nothing
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

        known, repeats = None, bool(again.any())
        if sharding.anyone(repeats, ids.device) if self.spread else repeats:
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
