"""Small random networks in float64, on which every exactness claim is checked."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from dllm_sampler import Canvas, Context, Denoiser, ModelSpec, Query, Sampler
from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.none import NoCache
from dllm_sampler.core import packing
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.protocols import Cache, Plan
from dllm_sampler.core.values import Sizes, Spent
from dllm_sampler.models.cfg import guided
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.moe import MoeConfig
from dllm_sampler.models.transformer import Transformer, TransformerConfig

VOCAB, MASK, EOS, EOT = 40, 39, 34, 15  # a random network likes some tokens better: these two do occur
PROMPTS = [[5, 11, 3], [7, 1, 30, 22, 9, 14, 2], [16], [4, 4, 28, 13, 33], [12, 6]]  # ragged, none alike
SEEDS = [7, 7, 3, 2**40, -5]


def _filter() -> str:
    """A Learn2PD filter for `FILTER_BLOCK` positions that accepts what is surer than a half, more or less."""
    path = Path(tempfile.gettempdir()) / f"dllm-sampler-test-filter-{os.getuid()}.safetensors"
    near = 0.2 * torch.randn(FILTER_BLOCK, FILTER_BLOCK, generator=torch.Generator().manual_seed(0))
    weight = 8 * torch.eye(FILTER_BLOCK) + near
    partial = path.with_suffix(f".{os.getpid()}")
    save_file({"fc1.weight": weight, "fc1.bias": torch.full((FILTER_BLOCK,), -4.0)}, partial)
    os.replace(partial, path)  # every test process writes the same
    return str(path)


FILTER_BLOCK = 6  # as the blocks of `sampler`
FILTER = _filter()


def transformer(
    seed: int = 2, kv_heads: int = 4, sharp: float = 1.0, dtype: torch.dtype = torch.float64, layers: int = 2
) -> Transformer:
    """Random layers. Wide weights make the answers varied and the confidences anything from 0.1 to 1."""
    config = TransformerConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=kv_heads,
        head_dim=8,
        max_positions=64,
    )
    model = Transformer(config).to(dtype)
    model.init_weights(std=0.8, embedding_std=1.0, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        model.lm_head.weight *= sharp
    return model


def causal_transformer(seed: int = 2) -> Transformer:
    """As LLaDA2: norms on queries and keys, partly rotated heads, experts in groups behind a dense layer."""
    experts = MoeConfig(
        num_experts=8, top_k=2, expert_size=24, layers=frozenset({1}), shared_size=16, score="sigmoid", groups=4,
        top_groups=2, normalise=True, scale=1.5, bias=True,
    )  # fmt: skip
    config = replace(transformer(kv_heads=2).config, qk_norm=True, rotary_dim=4, moe=experts)
    model, generator = Transformer(config).to(torch.float64), torch.Generator().manual_seed(seed)
    model.init_weights(std=0.8, embedding_std=1.0, generator=generator)
    for name, weight in model.named_parameters():
        if name.endswith("router.bias"):
            weight.data.normal_(std=0.3, generator=generator)
    return model


def wrapped(model: Transformer, shift: bool = False) -> TransformerDenoiser:
    return TransformerDenoiser(model, MASK, EOS, eot_id=EOT, shift=shift)


@cache
def denoiser(kind: str = "llada", device: str = "cpu") -> Denoiser:
    """`llada`, `gqa` (two key heads for four), `dream` (logit shift), `cfg` (guided), `causal` (block-causal)."""
    if kind == "causal":
        return replace(wrapped(causal_transformer().to(device)), attention="block_causal")
    model = wrapped(transformer(kv_heads=2 if kind == "gqa" else 4).to(device), shift=kind == "dream")
    return guided(model, 1.5) if kind == "cfg" else model


def context(spec: ModelSpec | None = None) -> Context:
    """What a plug-in is bound to, on one of the toys."""
    spec, blocks = spec or denoiser().spec, FixedBlocks()
    return Context(spec, blocks.bind(Context(spec, blocks)))


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """More for more kinds of tokens, whatever their names; alike for many answers."""
    return [float(len(set(ids))) for ids in completion_ids]


@cache
def verifier(seed: int = 3, vocab: int = VOCAB) -> Any:
    """A random causal LM of transformers with the toys' tokens, in float64."""
    from transformers import Qwen2Config, Qwen2ForCausalLM  # takes a second or two to import

    class Toy(Qwen2ForCausalLM):
        def __repr__(self) -> str:
            return "toy"  # in the names of tests

    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        use_sliding_window=False,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Toy(config).double().eval()


TOYS = ("llada", "gqa", "dream", "cfg")  # those that every cache but `block_causal` serves


SIGNS = [*"abcdefghij0123456789", "ab", "ba", "cd", "abc", *'"{}:,[]- ', "true", "false", "null", "x", "y"]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Signs and short words; end token and mask where the toys have them."""
    ids = [token for token in range(VOCAB) if token not in (EOS, MASK)]
    vocab = dict(zip(SIGNS, ids, strict=True)) | {"<end>": EOS, "<mask>": MASK}
    made = Tokenizer(WordLevel(vocab, unk_token="<mask>"))
    made.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>", mask_token="<mask>")


def sampler(kind: str = "llada", device: str = "cpu", **plugins: Any) -> Sampler:
    given = {"blocks": {"name": "fixed", "length": 6}, "stop": "none", "tokenizer": tokenizer(), **plugins}
    return Sampler(denoiser(kind, device), **given)


@dataclass
class Spy:
    """A denoiser that remembers every call and may rewrite the logits."""

    inner: Denoiser
    raise_mask: float = 0.0  # added to the mask token's logit

    def __post_init__(self) -> None:
        self.calls: list[tuple[Canvas, Query, Plan]] = []
        self.logits: list[Tensor] = []  # [B, K, Q, V] of each call, 0 where nothing was answered

    @property
    def spec(self) -> ModelSpec:
        return self.inner.spec

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        self.calls.append((canvas, query, plan))
        return self.inner(canvas, query, plan)

    def head(self, hidden: Tensor) -> Tensor:
        logits = self.inner.head(hidden)
        logits[..., MASK] += self.raise_mask
        self.logits.append(self.calls[-1][2].answers.spread(logits.clone()))
        return logits

    @property
    def computed(self) -> list[list[int]]:
        """Positions computed per forward and row; 0 for a finished row."""
        return [plan.computed.tolist() for _, _, plan in self.calls]


def wanted(canvas: Canvas, query: Query, spec: ModelSpec, chosen: Tensor | None = None) -> packing.Request:
    """The request for a query when the columns `chosen [B, L+1]` are computed, as far as they are seen; None: all."""
    return packing.request(canvas, query, chosen, spec)


def planned(canvas: Canvas, query: Query, spec: ModelSpec, live: Cache | None = None) -> tuple[Canvas, Plan]:
    """The canvas in the sizes that a query needs, and how a live cache computes it; by default without a cache."""
    live = NoCache().init(canvas, spec) if live is None else live
    asked = wanted(canvas, query, spec, live.computes(canvas))
    canvas = packing.sized(canvas, asked)
    return canvas, live.plan(canvas, asked)


def computed(plan: Plan) -> Tensor:
    """`[B, L+1] bool` the columns that a pack holds, without the empty slot."""
    assert plan.pack is not None
    at = torch.zeros_like(plan.wanted.computed)
    at[plan.pack.row, plan.pack.column] = True
    at[:, -1] = False
    return at


def columns(plan: Plan) -> list[list[int]]:
    """The same, by row."""
    return [row.nonzero()[:, 0].tolist() for row in computed(plan)]


def canvas(masked: Tensor, **changes: Any) -> Canvas:
    """A canvas without prompt whose noise is `masked [B, L] bool`, one block over everything."""
    batch, length = masked.shape
    zero = torch.zeros(batch, dtype=torch.long)
    empty = torch.zeros(batch, 1, dtype=torch.bool)
    masked = torch.cat([masked, empty], 1)
    fields: dict[str, Any] = dict.fromkeys(("first", "start", "age", "step", "nfe", "computed", "row_seed"), zero)
    fields |= {
        "ids": torch.where(masked, MASK, 1),
        "masked": masked,
        "frozen": torch.arange(length + 1).expand(batch, -1) == length,
        "end": zero + length,
        "stop": zero + length,
        "done": zero > 0,
        "new_tokens": torch.full((batch,), length),
        "shortest": length,
        "longest": length,
        "padded": False,
        "sizes": Sizes(
            length, length, batch * length, batch * length, length, whole=True, rows=((length, length),) * batch
        ),
        "noise": CounterNoise(),
        "lookahead": zero + length,
        "width": length,
    }
    return Canvas(**{**fields, **changes})
