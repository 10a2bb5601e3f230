"""The network itself: parts and whole agree, precision, gradients, initialisation."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dllm_sampler.models.moe import MoeConfig
from dllm_sampler.models.transformer import Layer, Rope, Transformer, TransformerConfig, pick_rows
from tests import toys
from tests.sampling import each

TINY = toys.transformer(kv_heads=2).config


def network(config: TransformerConfig = TINY, dtype: torch.dtype = torch.float64) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(config).to(dtype)
    model.init_weights(std=0.2, embedding_std=1.0, generator=torch.Generator().manual_seed(1))
    return model


def by_parts(index: int, layer: Layer, hidden: Tensor, rope: Rope, rows: Tensor | None) -> Tensor:
    hidden = hidden + layer.attend(*layer.qkv(hidden, rope))
    return pick_rows(hidden + layer.mlp(hidden), rows)


@settings(max_examples=25, deadline=None)
@given(
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 4),
    queries=st.integers(1, 5),
    keys=st.integers(1, 9),
    masked=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_grouped_attention_equals_repeated_heads(kv_heads, groups, queries, keys, masked, seed):
    generator = torch.Generator().manual_seed(seed)
    config = replace(TINY, num_heads=kv_heads * groups, num_kv_heads=kv_heads)
    layer = Layer(config, 0).double()
    q = torch.randn(2, kv_heads * groups, queries, 8, dtype=torch.float64, generator=generator)
    k, v = torch.randn(2, 2, kv_heads, keys, 8, dtype=torch.float64, generator=generator)
    mask = None
    if masked:
        mask = torch.rand(2, 1, 1, keys, generator=generator) < 0.6
        mask[..., 0] = True
    k_all, v_all = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    heads = F.scaled_dot_product_attention(q, k_all, v_all, mask)
    torch.testing.assert_close(layer.attend(q, k, v, mask), layer.o_proj(heads.transpose(1, 2).flatten(2)))
    torch.testing.assert_close(layer.weights(q, k, mask) @ v_all, heads)


@each("switches", [{}, {"qkv_bias": True, "qk_norm": True}, {"tie_embeddings": True}])
def test_driven_by_parts_equals_plain_forward(switches):
    model = network(replace(TINY, **switches))
    ids = torch.randint(0, 40, (3, 11))
    rows = torch.tensor([[0, 10], [4, 4], [7, 2]])
    expected = model(ids).gather(1, rows[..., None].expand(-1, -1, 40))
    torch.testing.assert_close(model.head(model(ids, drive=by_parts, rows=rows)), expected)
    torch.testing.assert_close(model(ids, rows=rows), expected)


@each("pool", [0, 3])
def test_the_last_layer_takes_no_more_rows_on_than_are_answered(pool: int):
    """But all of them where the tokens of a block choose their experts together."""
    layers = frozenset({TINY.num_layers - 1})
    model = network(replace(TINY, moe=MoeConfig(4, 2, expert_size=8, layers=layers, pool=pool, block=4)))
    ids, rows = torch.randint(0, 40, (3, 11)), torch.tensor([[0, 10], [4, 4], [7, 2]])
    fed: list[int] = []
    for layer in model.layers:
        assert isinstance(layer, Layer)
        layer.mlp_norm.register_forward_hook(lambda norm, given, hidden: fed.append(hidden.shape[1]))
    found = model(ids, rows=rows)
    assert fed == [11] * (TINY.num_layers - 1) + [11 if pool else 2]
    torch.testing.assert_close(found, model(ids).gather(1, rows[..., None].expand(-1, -1, 40)))


def test_hidden_keys_are_not_seen_and_rotary_positions_are_relative():
    model = network()
    ids = torch.randint(0, 40, (1, 9))
    padded = torch.cat((torch.full((1, 4), 7), ids), 1)
    keys = torch.arange(13)[None] >= 4
    torch.testing.assert_close(model(padded, keys=keys)[:, 4:], model(ids))
    torch.testing.assert_close(model(ids, positions=torch.arange(9)[None] + 100), model(ids))


def test_angles_stay_precise_in_every_dtype():
    positions = torch.tensor([[0, 1, 4095]])
    exact = network(dtype=torch.float64).rope(positions, torch.float64)
    assert exact.cos.dtype == torch.float64
    for dtype in (torch.float32, torch.bfloat16):
        rope = network(dtype=dtype).rope(positions, dtype)
        assert rope.cos.dtype == torch.float32
        torch.testing.assert_close(rope.sin.double(), exact.sin, atol=5e-4, rtol=0)
        heads = torch.randn(1, 4, 3, 8).to(dtype)
        assert rope.rotate(heads).dtype == dtype


def test_every_weight_gets_a_gradient():
    model = network(replace(TINY, qkv_bias=True, qk_norm=True))
    keys = torch.ones(2, 7, dtype=torch.bool)
    keys[0, :3] = False
    model(torch.randint(0, 40, (2, 7)), keys=keys).square().sum().backward()
    without = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert without == []


def test_initialisation():
    model = Transformer(replace(TINY, hidden_size=256, head_dim=64, qkv_bias=True))
    model.init_weights(std=0.05, embedding_std=1.0, generator=torch.Generator().manual_seed(0))
    deviation = {name: weight.std().item() for name, weight in model.named_parameters()}
    assert deviation["embed.weight"] == pytest.approx(1.0, rel=0.05)
    assert deviation["layers.0.q_proj.weight"] == pytest.approx(0.05, rel=0.05)
    assert deviation["layers.1.ffn.down_proj.weight"] == pytest.approx(0.05 / 2, rel=0.05)  # sqrt(2 * 2 layers)
    assert deviation["layers.0.k_proj.bias"] == 0
    assert model.norm.weight.eq(1).all()


def test_tied_embeddings_are_one_tensor():
    model = Transformer(replace(TINY, tie_embeddings=True))
    assert model.lm_head.weight is model.embed.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
