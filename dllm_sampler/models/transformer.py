"""The one network: a pre-norm transformer (RMSNorm, rotary positions, grouped-query attention, SwiGLU or experts).

A mask decides what a position sees: bidirectional and block-causal models differ in nothing else.

`Transformer(config)(ids)` is the plain forward of trainers and parity tests. A sampler with a cache passes `drive`, a
function that runs one layer from its parts (`qkv`, `attend`, `mlp`). So the network itself does not depend on caches.
Both ways go through `module(...)` calls, where FSDP and accelerate have their hooks.

Letters: N rows (batch times candidates), M computed positions, Q answered positions, S keys, H heads, Dh width of a
head, D width of the stream, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dllm_sampler.core import select
from dllm_sampler.models.moe import MoE, MoeConfig, feed
from dllm_sampler.models.yarn import Yarn


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and options of a `Transformer`. The names are the same for all model families."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rotary_dim: int | None = None  # number of a head's first dimensions that rotate. None: all
    yarn: Yarn | None = None  # stretches rotary positions
    norm_eps: float = 1e-5
    max_positions: int = 4096
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    moe: MoeConfig | None = None


@dataclass(frozen=True)
class Rope:
    """Rotary factors of some positions. In a tuple FSDP's mixed precision would round them to bfloat16.

    Args:
        cos: `[N, 1, M, R]`. The first R dimensions of a head rotate.
        sin: `[N, 1, M, R]`, negative in the first half, so that rotating is one multiply and one multiply-add.
        scale: `[N, 1, M, 1]` factor on rotated queries. None means 1.
    """

    cos: Tensor
    sin: Tensor
    scale: Tensor | None = None

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Rope:
        """Return the same factors on another device (accelerate moves a layer's arguments by this method)."""
        scale = None if self.scale is None else self.scale.to(device, non_blocking=non_blocking)
        return Rope(
            self.cos.to(device, non_blocking=non_blocking), self.sin.to(device, non_blocking=non_blocking), scale
        )

    def at(self, rows: Tensor) -> Rope:
        """Return the factors of the positions at `rows [N, Q]` among the M."""
        index = rows[:, None, :, None]
        scale = None if self.scale is None else self.scale.expand(len(rows), -1, -1, -1).gather(2, index)
        cos, sin = (f.expand(len(rows), -1, -1, -1) for f in (self.cos, self.sin))
        index = index.expand(-1, -1, -1, cos.shape[-1])
        return Rope(cos.gather(2, index), sin.gather(2, index), scale)

    def rotate(self, heads: Tensor) -> Tensor:
        """Return `heads [N, H, M, Dh]` with the first R dimensions rotated ("rotate half"), in the dtype of `heads`."""
        size = self.cos.shape[-1]
        if size < heads.shape[-1]:
            return torch.cat([self.rotate(heads[..., :size]), heads[..., size:]], -1)
        swapped = heads.roll(size // 2, -1)  # [N, H, M, Dh]
        return torch.addcmul(heads * self.cos, swapped, self.sin).to(heads.dtype)


# Runs layer `index` in place of its own forward: (index, layer, hidden [N, M, D], rope, rows) -> hidden [N, M, D]. The
# last layer gets the rows [N, Q] that are answered, and returns only these, [N, Q, D]. The others get None.
Drive = Callable[[int, "Layer", Tensor, Rope, Tensor | None], Tensor]

# Returns the first layer's input [N, M, D] from the tokens' embeddings [N, M, D] and the module that embeds tokens.
Inputs = Callable[[Tensor, nn.Module], Tensor]


def pick_rows(hidden: Tensor, rows: Tensor | None) -> Tensor:
    """Return the rows `[N, Q]` of `hidden [N, M, D]`, as `[N, Q, D]`. Without `rows`, return all of them."""
    return hidden if rows is None else hidden.gather(1, rows.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, reduced in float32 (float64 for float64)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the norm of `hidden [..., D]` over its last axis, of the same shape."""
        # The weight is applied after the cast back to the stream's dtype, as every family's own code does.
        return F.rms_norm(hidden, self.weight.shape, None, self.eps) * self.weight


class SwiGLU(nn.Module):
    """Gated feed-forward: `down(silu(gate x) * up x)`."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the feed-forward `[N, M, D]` of `hidden [N, M, D]`."""
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    """One layer. Its methods are also the parts from which a cache runs it (`LayerParts`)."""

    def __init__(self, config: TransformerConfig, index: int):
        super().__init__()
        self.index = index
        self.head_dim = config.head_dim
        self.grouped = config.num_heads != config.num_kv_heads
        width = config.hidden_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.attn_norm = RMSNorm(width, config.norm_eps)
        self.q_proj = nn.Linear(width, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.o_proj = nn.Linear(queries, width, bias=config.o_bias)
        self.mlp_norm = RMSNorm(width, config.norm_eps)
        self.ffn: nn.Module = SwiGLU(width, config.intermediate_size)
        if config.moe is not None and index in config.moe.layers:
            shared = SwiGLU(width, config.moe.shared_size) if config.moe.shared_size else None
            self.ffn = MoE(config.moe, width, shared)

    def forward(
        self,
        hidden: Tensor,
        rope: Rope,
        mask: Tensor | None = None,
        drive: Drive | None = None,
        together: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run the layer on the stream `[N, M, D]`, or let `drive` do so.

        Args:
            mask: `[N, 1, 1|M, M] bool` keys that are seen. None means all.
            together: see `mlp`.
            rows: `[N, Q]` positions to return, as `[N, Q, D]`. The others are keys and values only,
                and with `together` they also go through `mlp`. None means all.
        """
        if drive is not None:
            return drive(self.index, self, hidden, rope, rows)
        early, late = (rows, None) if together is None else (None, rows)  # tokens that choose together are all fed
        heads = self.heads(*self.qkv(hidden, rope), mask).transpose(1, 2).flatten(2)  # [N, M, H Dh]
        hidden = pick_rows(hidden, early) + self.o_proj(pick_rows(heads, early))
        return pick_rows(hidden + self.mlp(hidden, together), late)

    def qkv(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries `[N, H, M, Dh]`, rotated keys and plain values `[N, Hkv, M, Dh]` of the stream."""
        normed = self.attn_norm(hidden)  # [N, M, D]
        return self.q(normed, rope), self.k(normed, rope), self.v(normed)

    def q(self, normed: Tensor, rope: Rope) -> Tensor:
        """Return rotated queries `[N, H, M, Dh]` of the normed stream `attn_norm(hidden) [N, M, D]`."""
        heads = self.q_proj(normed).unflatten(-1, (-1, self.head_dim))  # [N, M, H, Dh]
        turned = rope.rotate((heads if self.q_norm is None else self.q_norm(heads)).transpose(1, 2))
        return turned if rope.scale is None else turned * rope.scale.to(turned.dtype)

    def k(self, normed: Tensor, rope: Rope) -> Tensor:
        """Return rotated keys `[N, Hkv, M, Dh]` of the normed stream `[N, M, D]`."""
        heads = self.k_proj(normed).unflatten(-1, (-1, self.head_dim))  # [N, M, Hkv, Dh]
        return rope.rotate((heads if self.k_norm is None else self.k_norm(heads)).transpose(1, 2))

    def v(self, normed: Tensor) -> Tensor:
        """Return values `[N, Hkv, M, Dh]` of the normed stream `[N, M, D]`."""
        return self.v_proj(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def values(self, hidden: Tensor) -> Tensor:
        """Return values `[N, Hkv, M, Dh]` of the stream `[N, M, D]`."""
        return self.v(self.attn_norm(hidden))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return attention `[N, M, D]` after the output projection, see `LayerParts.attend`."""
        return self.output(self.heads(q, k, v, mask))

    def heads(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return attention `[N, H, M, Dh]` before the output projection. Arguments are as in `LayerParts.attend`."""
        # Stored keys may be wider than the computation: slots are float32 under FSDP's bfloat16 mixed precision.
        k, v = k.to(q.dtype), v.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=self.grouped)

    def output(self, heads: Tensor) -> Tensor:
        """Return the output projection `[N, M, D]` of attention `[N, H, M, Dh]`."""
        return self.o_proj(heads.transpose(1, 2).flatten(2))

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return attention probabilities `[N, H, M, S]`. Arguments are as in `LayerParts.attend`."""
        groups = q.unflatten(1, (k.shape[1], -1))  # [N, Hkv, H/Hkv, M, Dh]
        scores = (groups @ k.unsqueeze(2).mT).flatten(1, 2) * self.head_dim**-0.5  # [N, H, M, S]
        return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1)

    def mlp(self, hidden: Tensor, together: Tensor | None = None) -> Tensor:
        """Return norm and feed-forward `[N, M, D]` of the stream. The residual is not added.

        Args:
            together: `[N M]` numbers of blocks whose tokens choose experts together (`Transformer.together`), or None.
        """
        return feed(self.ffn, self.mlp_norm(hidden), together)


class Transformer(nn.Module):
    """A masked-diffusion transformer, with torch's default weights until they are loaded or `init_weights` is called.

    If `recompute` is set, only each layer's input is kept for the backward pass, which runs the layer again.
    """

    recompute: bool = False

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        size = (config.vocab_size, config.hidden_size)
        self.embed = nn.Embedding(*size, _weight=torch.empty(size))
        if not self.embed.weight.is_meta:  # there it does nothing, but imports torch._dynamo: seconds for every start
            self.embed.reset_parameters()
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._frequencies: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.tie_weights()

    def forward(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        keys: Tensor | None = None,
        drive: Drive | None = None,
        rows: Tensor | None = None,
        inputs: Inputs | None = None,
    ) -> Tensor:
        """Return logits `[N, M|Q, V]`.

        With a `drive`, return the normed hidden states `[N, M|Q, D]`, from which `head` computes the logits.

        Args:
            ids: `[N, M] int64` tokens.
            positions: `[N, M]` rotary positions. The default is 0..M-1.
            keys: `[N, M] bool` keys that are seen (false for padding), or `[N, M, M]` by position. The default is all.
                A `drive` makes its own mask.
            drive: runs each layer in place of the layer's own forward.
            rows: `[N, Q]` indices of the positions to answer. In the last layer the others are keys and values only.
                With a pool of experts they also go through the feed-forward layer. The default is all.
            inputs: returns the first layer's input. The default is the embeddings themselves.
        """
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)  # [1, M]
        hidden = self.embed(ids)  # [N, M, D]
        if inputs is not None:
            hidden = inputs(hidden, self.embed)
        rope = self.rope(positions, hidden.dtype)
        together = self.together(positions.expand_as(ids), keys) if drive is None else None
        mask = None
        if keys is not None:
            mask = keys[:, None] if keys.dim() == 3 else keys[:, None, None]  # [N, 1, 1|M, M]
        again = self.recompute and drive is None and torch.is_grad_enabled()
        for number, layer in enumerate(self.layers, 1):
            run = partial(checkpoint, layer, use_reentrant=False) if again else layer
            hidden = run(hidden, rope, mask, drive, together, rows if number == len(self.layers) else None)
        hidden = self.norm(hidden)  # [N, M|Q, D]
        return self.head(hidden) if drive is None else hidden

    def together(self, positions: Tensor, keys: Tensor | None) -> Tensor | None:
        """Return `[N M]` numbers of blocks whose tokens choose experts together, or None if each token chooses alone.

        Args:
            positions: `[N, M]`. Where they decrease, a second copy of the row begins, with other blocks.
            keys: as in `forward`. Positions that no position sees are padding, and belong to no block.
        """
        moe = self.config.moe
        if moe is None or not moe.pool:
            return None
        block = positions // moe.block
        copy = (positions[:, 1:] < positions[:, :-1]).cumsum(1)
        block[:, 1:] += copy * (block.max() + 1)
        row = torch.arange(len(block), device=block.device)[:, None] * (block.max() + 1)
        number = block + row
        if keys is not None:
            number = number.masked_fill(~(keys.any(1) if keys.dim() == 3 else keys), -1)
        return torch.searchsorted(number.flatten().sort().values, number.flatten())

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., V]` of normed hidden states `[..., D]`."""
        return self.lm_head(hidden)

    def rope(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """Return rotary factors of `positions [N, M]`, in float32 (in float64 if the stream's `dtype` is float64)."""
        angles = positions[:, None, :, None] * self._inverse_frequencies(positions.device, dtype)  # [N, 1, M, R/2]
        cos, sin = angles.cos(), angles.sin()
        scale = None if self.config.yarn is None else self.config.yarn.scale(positions, cos.dtype)
        return Rope(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), scale)

    def _inverse_frequencies(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        # Not a buffer: `.to(bfloat16)` would round it and meta-device loading would leave it unset.
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        if (device, precise) not in self._frequencies:
            size, yarn = self.config.rotary_dim or self.config.head_dim, self.config.yarn
            with torch.inference_mode(False):  # autograd may want them later
                exponents = torch.arange(0, size, 2, dtype=precise, device=device) / size  # [R/2]
                found = 1.0 / self.config.rope_theta**exponents
                found = found if yarn is None else yarn.stretched(found, self.config.rope_theta, size)
            select.wait_for(device)
            self._frequencies.setdefault((device, precise), found)
        return self._frequencies[device, precise]

    def tie_weights(self) -> None:
        """Share the embedding with the head if the config says so. Call it again after assigning new tensors."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.embed.weight

    @torch.no_grad()
    def init_weights(
        self, *, std: float = 0.02, embedding_std: float = 0.02, generator: torch.Generator | None = None
    ) -> None:
        """Draw normal weights. Those of projections back into the stream are divided by sqrt(2 layers). Biases are 0.

        Args:
            std: standard deviation of the linear weights, the head's included (unless it is tied).
            embedding_std: standard deviation of the token embeddings. 1.0 makes small models learn much faster.
        """
        residual = std / (2 * self.config.num_layers) ** 0.5
        for name, weight in self.named_parameters():
            if name == "embed.weight":
                weight.normal_(0, embedding_std, generator=generator)
            elif name.endswith("norm.weight"):
                weight.fill_(1)
            elif name.endswith(".bias"):
                weight.zero_()
            else:
                into_stream = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
                weight.normal_(0, residual if into_stream else std, generator=generator)
