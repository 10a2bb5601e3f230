"""`silu(gate) * up`, the middle of a gated feed-forward, in one pass over memory."""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dllm_sampler.kernels.sizes import cdiv

BLOCK, WARPS = 1024, 4


@triton.jit
def swiglu_kernel(gate, up, out, width, gate_stride, up_stride, BLOCK: tl.constexpr):
    """Compute BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    x = g.to(tl.float32)
    # torch rounds silu to the stream's dtype before it multiplies.
    silu = (x / (1.0 + tl.exp(-x))).to(g.dtype).to(tl.float32)
    tl.store(out + row * width + column, silu * u, mask=inside)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return `silu(gate) * up` of `[..., F]` each. Without `up`, `gate` is both halves `[..., 2F]`, gate first.

    Rounds like `swiglu_reference`: after silu and after the product.
    """
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    width = gate.shape[-1]
    flat, other = gate.reshape(-1, width), up.reshape(-1, width)  # [R, F]: halves stay views
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        launch: dict[str, Any] = {"BLOCK": BLOCK, "num_warps": WARPS, "enable_fp_fusion": True}
        swiglu_kernel[len(flat), cdiv(width, BLOCK)](flat, other, out, width, flat.stride(0), other.stride(0), **launch)
    return out


def swiglu_reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Compute `swiglu` in torch."""
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return F.silu(gate) * up
