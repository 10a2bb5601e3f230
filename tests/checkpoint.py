"""A tiny random checkpoint in a folder, with its tokenizer: what commands load in tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dllm_sampler.models.families import llada_config, to_checkpoint
from dllm_sampler.models.transformer import Transformer, TransformerConfig

SPECIAL = ["<pad>", "<eos>", "<mask>", "<unk>"]
WORDS = [*SPECIAL, "user", "copy", "reverse", ":", ",", "Ada", "Ben", "Cal", "Dan", "Eve", "1", "2", "3", "é"]


def write(folder: Path) -> Path:
    """Write a two-layer LLaDA over `WORDS`, context 64, and its word tokenizer into a folder."""
    config = TransformerConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        max_positions=64,
    )
    model = Transformer(config)
    model.init_weights(std=0.3, embedding_std=1.0, generator=torch.Generator().manual_seed(0))
    save_file(to_checkpoint(model), folder / "model.safetensors", metadata={"format": "pt"})
    ids = {f"{name}_token_id": WORDS.index(f"<{name}>") for name in ("mask", "eos", "pad")}
    (folder / "config.json").write_text(json.dumps(llada_config(config, **ids)))

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "mask", "unk")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **named)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder
