"""A tiny checkpoint of every family, each with a tokenizer of single characters, and what reads them plainly."""

from __future__ import annotations

import json
import shutil
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dllm_sampler.models import loading

DATA = Path(__file__).parent / "conformance" / "data"
TRANSFORMERS = ("llada", "llada-gqa", "dream", "sdar", "llada-moe", "llada2-moe")
FAMILIES = ("llada", "dream", "sdar", "llada-moe", "llada2-moe", "bert")  # one of each network
NEWER = (
    "llada-gqa", "illada", "sdar-moe", "stable-diffcoder", "llada2.2-moe", "fast-dllm-v2", "nemotron-labs-diffusion",
)  # fmt: skip
EVERY = (*FAMILIES, *NEWER)
CHARACTERS = sorted({*string.ascii_letters, *string.digits, *" .,:;?!'-+=()\n"})
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


FACTS = Path(__file__).parents[1] / "examples" / "facts.jsonl"
TARGET: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "bos_token_id": None, "initializer_range": 0.3,
}  # fmt: skip


def write(name: str, folder: Path) -> Path:
    """Write the tiny checkpoint of a family, with its tokenizer, into a new folder."""
    folder.mkdir(parents=True)
    if name == "bert":
        mask, eos = _bert(folder)
    else:
        source = DATA / f"tiny-{name}"
        for file in ("config.json", "generation_config.json", "model.safetensors"):
            if (source / file).exists():
                shutil.copyfile(source / file, folder / file)
        raw = json.loads((folder / "config.json").read_text())
        raw |= raw.get("text_config", {})  # of DiffusionGemma, to whose model the mask token is one like any other
        last = raw["vocab_size"] - 1
        mask, eos = raw.get("mask_token_id", 286 if last > 286 else last), raw["eos_token_id"]
    unknown = 200 if mask > 200 else 150
    free = (index for index in range(mask) if index not in (eos, unknown))
    vocab = {sign: next(free) for sign in CHARACTERS} | {"<unk>": unknown, "<end>": eos, "<mask>": mask}
    made = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    named = {"eos_token": "<end>", "pad_token": "<end>", "mask_token": "<mask>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **named)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    return folder


def _bert(folder: Path) -> tuple[int, int]:
    """A masked LM of transformers; its mask and end token."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=96, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertForMaskedLM(config).save_pretrained(folder)
    return 255, 254


def target_of(model: Path) -> Path:
    """A random Llama with the tokens of a drafter, beside it."""
    spec, folder = loading.load(model, device="cpu").denoiser.spec, model.with_name("target")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = LlamaForCausalLM(LlamaConfig(vocab_size=spec.vocab_size, eos_token_id=spec.eos_id, **TARGET))
    target.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def tree(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A module of the checkpoint's names, as the family's own code has them; matrices are linear layers."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, kind = name.split(".")
        module = root
        for part in path[:-1]:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        leaf = getattr(module, path[-1], None)
        if leaf is None:
            prefix, weight = ".".join(path), tensors.get(f"{'.'.join(path)}.weight", tensor)
            shape = weight.shape if weight.dim() == 2 else (1, 1)
            leaf = nn.Linear(shape[1], shape[0], bias=f"{prefix}.bias" in tensors)
            module.add_module(path[-1], leaf)
        setattr(leaf, kind, nn.Parameter(tensor.clone()))
    return root
