"""Checks of the kernels of a layer that hold on a GPU as in the interpreter."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dllm_sampler.kernels import linear as linears
from dllm_sampler.kernels import norm as norms
from dllm_sampler.kernels import reference
from dllm_sampler.kernels import rope as ropes
from dllm_sampler.kernels import swiglu as swiglus
from dllm_sampler.kernels.attention import packed_attention
from tests.kernels import oracles


def close(got: Tensor, want: Tensor, dtype: torch.dtype, roundings: float = 2) -> None:
    """Within the dtype's tolerance of the largest wanted number; no number where there is none.

    roundings: to the dtype, one after the other; bfloat16's tolerance is that of two
    """
    scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    one = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}.get(dtype, 0.0)  # the interpreter cuts bfloat16 off
    tolerance = max(oracles.TOLERANCE[dtype], roundings * one)
    torch.testing.assert_close(got.double().cpu(), want.double().cpu(), rtol=0, atol=tolerance * scale)


def attention(given, options, device="cpu") -> Tensor:
    """Kernel and reference against the oracle; no slot changes. Returns the kernel's output."""
    want = oracles.attention(*given, **options)

    def moved(x: Any) -> Any:
        return tuple(map(moved, x)) if isinstance(x, tuple) else x.to(device) if isinstance(x, Tensor) else x

    here, there = moved(given), {name: moved(x) for name, x in options.items()}
    before = () if given[3] is None else tuple(s.clone() for s in given[3])
    with sdpa_kernel(SDPBackend.MATH):  # a GPU's others take float32 apart into TF32
        plain = reference.attention(*map(_finite, here), **there)
        out = packed_attention(*here, **there)
    for answer in (plain, out):
        assert answer.dtype == given[0].dtype
        close(answer, want, answer.dtype)
    for slot, old in zip(here[3] or (), before, strict=True):
        assert torch.equal(slot.cpu().nan_to_num(777.0), old.nan_to_num(777.0))
    return out


def _finite(given: Any) -> Any:
    """Numbers in place of NaN: the reference multiplies what nothing sees by 0."""
    if isinstance(given, tuple):
        return tuple(map(_finite, given))
    return given.nan_to_num(777.0) if isinstance(given, Tensor) and given.is_floating_point() else given


def norm(seed: int, shape, dtype, add: bool, factor: float, device="cpu") -> None:
    """RMSNorm with and without the addition against float64."""
    source = torch.Generator().manual_seed(seed)
    hidden, delta = (torch.randn(2, *shape, generator=source) * factor).to(dtype)
    weight = torch.randn(shape[-1], generator=source).to(dtype)
    residual = (hidden + delta if add else hidden).double()
    want = residual * (residual.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    for answer in (norms.norm_reference, norms.norm):
        got, kept = answer(hidden.to(device), weight.to(device), 1e-5, delta.to(device) if add else None)
        assert got.dtype == kept.dtype == dtype
        close(got, want, dtype, roundings=3)  # of the sum, the norm, and the product with its weight
        close(kept, residual, dtype)


def swiglu(seed: int, shape, dtype, fused: bool, factor: float, device="cpu") -> None:
    """The gated product of one projection or of two against float64."""
    source = torch.Generator().manual_seed(seed)
    gate, up = (torch.randn(2, *shape, generator=source) * factor).to(dtype)
    want = torch.nn.functional.silu(gate.double()) * up.double()
    given = (torch.cat([gate, up], -1),) if fused else (gate, up)
    for answer in (swiglus.swiglu_reference, swiglus.swiglu):
        close(answer(*(x.to(device) for x in given)), want, dtype)


def rope(
    seed: int, dtype, heads: int, kv_heads: int, size: int, rotary: int, *, norm: bool, slots: bool, fresh: bool,
    shaped: bool, device="cpu",
) -> None:  # fmt: skip
    """Split, norm, rotation and storage against float64; shaped: cosines as the network has them."""
    source = torch.Generator().manual_seed(seed)
    batch, length, entries, eps = 2, 9, 7, 1e-6

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source).to(dtype)

    fused = normal(entries, (heads + 2 * kv_heads) * size)
    angles = torch.rand(entries, rotary // 2, generator=source) * 1000
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    options: dict[str, Any] = {"eps": eps, "fresh": fresh}
    options |= {f"{x}_weight": normal(size) if norm else None for x in "qk"}
    stored = [torch.full((batch, length + 1, kv_heads, size), torch.nan, dtype=dtype) for _ in range(2)]
    places = torch.randperm(batch * length, generator=source)[:entries]
    places += places // length  # no empty slot
    places[torch.rand(entries, generator=source) < 0.3] = -1

    parts = list(fused.double().unflatten(-1, (-1, size)).split([heads, kv_heads, kv_heads], 1))
    for i, weight in enumerate((options["q_weight"], options["k_weight"])):
        x = parts[i]
        if weight is not None:
            x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
        a, b, rest = x.split([rotary // 2, rotary // 2, size - rotary], -1)
        c, s = (f.double()[:, None, rotary // 2 :] for f in (cos, sin))
        parts[i] = torch.cat([a * c - b * s, b * c + a * s, rest], -1)
    # Of the rotation, and before it of the norm and its weight, whose errors a rotation adds up.
    roundings = 1 + 2**0.5 * 2 * norm
    cos, sin = (x[None, None] if shaped else x for x in (cos, sin))
    for answer in (ropes.qkv_rope_reference, ropes.qkv_rope):
        own = tuple(x.clone().to(device) for x in stored)
        here: dict[str, Any] = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
        if slots:
            here |= {"slots": own, "places": places.to(device)}
        got = answer(fused.to(device), cos.to(device), sin.to(device), heads, kv_heads, **here)
        assert fresh or got[1] is got[2] is None
        for mine, want in zip([x for x in got if x is not None], parts, strict=False):
            close(mine, want, dtype, roundings)
        for slot, want in zip(own, parts[1:], strict=True):
            expected = torch.full((batch * (length + 1), kv_heads, size), torch.nan, dtype=torch.float64)
            if slots:
                expected[places[places >= 0]] = want[places >= 0]
            found = slot.cpu().double().flatten(0, 1)
            assert torch.equal(found.isnan(), expected.isnan())
            close(found.nan_to_num(0.0), expected.nan_to_num(0.0), dtype, roundings)


def linear(seed: int, rows: int, outputs: int, inputs: int, dtype, bias: bool, device="cpu") -> None:
    """The product with integers, their scales and a bias, against float64."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=source).to(dtype)
    weight = torch.randint(-127, 128, (outputs, inputs), generator=source).to(torch.int8)
    scale = torch.rand(outputs, generator=source) / 127
    offset = torch.randn(outputs, generator=source).to(dtype) if bias else None
    worth = weight.double() * scale.double()[:, None]
    want = x.double() @ worth.T + (0 if offset is None else offset.double())
    # In float16 the reference rounds each weight, by at most 2^-11 of it. These errors add up as the terms' norm does:
    # four times that is seven standard deviations.
    rounded = 4 * 2.0**-11 * (x.double().square() @ worth.square().T).sqrt()
    moved = (x.to(device), weight.to(device), scale.to(device), None if offset is None else offset.to(device))
    for answer in (linears.linear_reference, linears.linear):
        got = answer(*moved)
        assert got.dtype == dtype
        if answer is linears.linear_reference and dtype == torch.float16:
            got = torch.where((got.double().cpu() - want).abs() <= rounded, want, got.double().cpu())
        close(got, want, dtype)
