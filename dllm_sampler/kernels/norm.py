"""RMSNorm, with the residual addition before it, in one pass over memory."""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dllm_sampler.kernels.sizes import cdiv, next_power_of_2


@triton.jit
def norm_kernel(
    hidden, delta, weight, normed, residual, rows, stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add and normalise ROWS rows, each held in registers in between."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None]
    inside = (row < rows) & (column < WIDTH)
    at = row * WIDTH + column
    x = tl.load(hidden + row * stride + column, mask=inside, other=0.0)
    if delta is not None:
        x = (x.to(tl.float32) + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(residual + at, x, mask=inside)
    precise = x.to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(precise * precise, 1) / WIDTH + eps)
    # The weight is applied after the cast back to the stream's dtype, as in `models.transformer.RMSNorm`.
    scaled = (precise * inverse[:, None]).to(x.dtype).to(tl.float32)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(normed + at, scaled * scale, mask=inside)


def norm(hidden: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the RMSNorm of `hidden + delta`, and that sum: `(normed, residual)`, both `[..., D]`.

    It reduces in float32 and rounds like `norm_reference`: after the sum, after the norm and after the weight.

    Args:
        hidden: `[..., D]` residual stream, or the heads `[..., H, Dh]` of a per-head norm.
        weight: `[D]`, in the dtype of `hidden`.
        eps: added to the mean square.
        delta: `[..., D]` to add first, in the dtype of `hidden`. Without it `residual` is `hidden` itself.
    """
    width = hidden.shape[-1]
    flat = hidden.reshape(-1, width)  # [R, D]
    normed = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    residual = hidden if delta is None else torch.empty_like(normed)
    if normed.numel():
        block, rows, warps = tile(width)
        launch: dict[str, Any] = {"WIDTH": width, "BLOCK": block, "ROWS": rows, "num_warps": warps}
        launch["enable_fp_fusion"] = True
        norm_kernel[(cdiv(len(flat), rows),)](
            flat,
            None if delta is None else delta.contiguous(),
            weight,
            normed,
            None if delta is None else residual,
            len(flat),
            flat.stride(0),
            eps,
            **launch,
        )
    return normed, residual


def norm_reference(hidden: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute `norm` in torch."""
    residual = hidden if delta is None else hidden + delta
    return F.rms_norm(residual, weight.shape, None, eps) * weight, residual


def tile(width: int) -> tuple[int, int, int]:
    """Return the padded width, the rows of a program (1024 numbers or more), and its warps."""
    block = next_power_of_2(width)
    return block, max(1, 1024 // block), min(16, max(4, block // 1024))
