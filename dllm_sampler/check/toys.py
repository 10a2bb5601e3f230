"""Small random networks, in float64 by default, on which plug-ins are checked."""

from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.models.cfg import guided
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.moe import MoeConfig
from dllm_sampler.models.transformer import Transformer, TransformerConfig
from dllm_sampler.models.yarn import Yarn
from dllm_sampler.sampler import Sampler

VOCAB, MASK, EOS, EOT = 40, 39, 34, 15  # a random network likes some tokens better: these two do occur
PROMPTS = [[5, 11, 3], [7, 1, 30, 22, 9, 14, 2], [16], [4, 4, 28, 13, 33], [12, 6]]  # ragged, none alike
SEEDS = [7, 7, 3, 2**40, -5]


# A Learn2PD filter that accepts what is surer than a half, more or less: weights 8 I + 0.2 N(0, 1), biases -4.
FILTER = str(files("dllm_sampler.check") / "filter.safetensors")
FILTER_BLOCK = 6  # positions that it judges together: the block length of the settings in `settings.py`


def transformer(
    seed: int = 2,
    kv_heads: int = 4,
    sharp: float = 1.0,
    dtype: torch.dtype = torch.float64,
    layers: int = 2,
    vocab: int = VOCAB,
) -> Transformer:
    """Return a random network. Its weights are large, so that answers vary and confidences range from 0.1 to 1."""
    config = TransformerConfig(
        vocab_size=vocab,
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
    """Return a network like LLaDA2's: query and key norms, partly rotated heads, a dense layer, groups of experts."""
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
    """Return a network as a denoiser, with the toys' special tokens."""
    return TransformerDenoiser(model, MASK, EOS, eot_id=EOT, shift=shift)


@cache
def denoiser(kind: str = "llada", device: str = "cpu", dtype: torch.dtype = torch.float64) -> Denoiser:
    """Return the toy of a kind.

    Kinds: `llada`, `gqa` (four query heads, two key heads), `dream` (logit shift), `cfg` (classifier-free guidance),
    `causal` (block-causal), `fast` (block-causal with a logit shift), `context` (blocks in a causal context),
    `in_blocks` (its network as a block-causal model whose prompt is a block), `uniform` (no mask token).
    """
    if kind == "in_blocks":
        given = denoiser("context", device, dtype)
        assert isinstance(given, TransformerDenoiser)
        return given.in_blocks("whole_prompt")
    if kind == "context":
        plain = transformer(kv_heads=2)
        model = Transformer(replace(plain.config, yarn=Yarn(4.0, 8, queries=0.3))).to(torch.float64)
        model.load_state_dict(plain.state_dict())
        return replace(wrapped(model.to(device, dtype)), attention="causal_context", seeds=True)
    if kind in ("causal", "fast"):
        model = wrapped(causal_transformer().to(device, dtype), shift=kind == "fast")
        return replace(model, attention="block_causal")
    if kind == "uniform":
        return TransformerDenoiser(transformer(vocab=VOCAB - 1).to(device, dtype), None, EOS)
    model = wrapped(transformer(kv_heads=2 if kind == "gqa" else 4).to(device, dtype), shift=kind == "dream")
    return guided(model, 1.5) if kind == "cfg" else model


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the number of different tokens in each answer, so that many answers tie."""
    return [float(len(set(ids))) for ids in completion_ids]


@cache
def verifier(seed: int = 3, vocab: int = VOCAB) -> Any:
    """Return a random causal LM of transformers with the toys' tokens, in float64."""
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
    """Return a tokenizer of signs and short words, with the end-of-text token and the mask of the toys."""
    ids = [token for token in range(VOCAB) if token not in (EOS, MASK)]
    vocab = dict(zip(SIGNS, ids, strict=True)) | {"<end>": EOS, "<mask>": MASK}
    made = Tokenizer(WordLevel(vocab, unk_token="<mask>"))
    made.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>", mask_token="<mask>")


def sampler(kind: str = "llada", device: str = "cpu", **plugins: Any) -> Sampler:
    """Assemble a sampler on a toy. By default blocks have six positions and no row is ended early."""
    given = {"blocks": {"name": "fixed", "length": FILTER_BLOCK}, "stop": "none", "tokenizer": tokenizer(), **plugins}
    return Sampler(denoiser(kind, device), **given)
