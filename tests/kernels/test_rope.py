"""From the fused projection to heads: as `models.transformer.Layer` does it, and as float64 does."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sampler.kernels.rope import qkv_rope
from dllm_sampler.models.transformer import Transformer, TransformerConfig
from tests.kernels import checks


@given(
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1), (20, 5)]),
    sizes=st.sampled_from([(64, 64), (80, 80), (96, 96), (128, 64), (10, 6)]),
    norm=st.booleans(), slots=st.booleans(), fresh=st.booleans(), shaped=st.booleans(),
)  # fmt: skip
@settings(max_examples=6, deadline=None)
def test_as_in_float64(seed, dtype, heads, sizes, **given):
    checks.rope(seed, dtype, *heads, *sizes, **given)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rotary", [None, 32])
def test_as_the_network_does(norm, rotary):
    config = TransformerConfig(
        vocab_size=8, hidden_size=48, intermediate_size=8, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64,
        rotary_dim=rotary, qk_norm=norm, rope_theta=500.0,
    )  # fmt: skip
    model = Transformer(config).half()
    layer: Any = model.layers[0]
    if norm:
        layer.q_norm.weight.data.normal_()
        layer.k_norm.weight.data.normal_()
    hidden = torch.randn(1, 5, 48).half()
    rope = model.rope(torch.arange(3, 8)[None] * 17, hidden.dtype)
    want = layer.qkv(hidden, rope)
    normed = layer.attn_norm(hidden)
    fused = torch.cat([p(normed) for p in (layer.q_proj, layer.k_proj, layer.v_proj)], -1)[0]
    weights = {f"{x}_weight": getattr(layer, f"{x}_norm").weight.detach() for x in "qk"} if norm else {}
    got = qkv_rope(fused.detach(), rope.cos, rope.sin, 4, 2, eps=config.norm_eps, **weights)
    for mine, its in zip(got, want, strict=True):
        assert mine is not None
        its = its[0].detach().transpose(0, 1)
        apart = (mine.float() - its.float()).abs()
        assert apart.max() <= 2**-10 * its.abs().max() and (apart > 0).float().mean() < 0.01  # the order of a sum
