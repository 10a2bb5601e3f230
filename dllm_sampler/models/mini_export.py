"""A trained network as a checkpoint folder in LLaDA's format, which `model=FOLDER` and LLaDA's own code load."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from transformers import PreTrainedTokenizerFast

from dllm_sampler.host import files
from dllm_sampler.models.families import llada_config, to_checkpoint
from dllm_sampler.models.mini_tokenizer import EOS, MASK
from dllm_sampler.models.transformer import Transformer

# Fields that LLaDA's own modelling code reads besides the shape. They switch off what this network does not have.
_OFF: dict[str, Any] = {
    "alibi_bias_max": 8.0,
    "attention_dropout": 0.0,
    "attention_layer_norm_with_affine": True,
    "embedding_dropout": 0.0,
    "flash_attention": False,
    "init_cutoff_factor": None,
    "init_device": "cpu",
    "init_fn": "mitchell",
    "init_std": 0.02,
    "mlp_ratio": 4,
    "multi_query_attention": None,
    "precision": "fp32",
    "residual_dropout": 0.0,
    "rope_full_precision": True,
    "use_cache": False,
}


def export(model: Transformer, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write config, tokenizer and float16 weights. The weights come last: a folder that has them is complete.

    Raises:
        UserError: LLaDA's format has no field for a part of the network.
    """
    ids = tokenizer.get_vocab()
    ends = {"eos_token_id": ids[EOS], "pad_token_id": ids[EOS]}
    config = llada_config(model.config, mask_token_id=ids[MASK], **ends)
    lengths = {"train_max_sequence_length": model.config.max_positions, "torch_dtype": "float16"}
    files.write_folder(folder, partial(tokenizer.save_pretrained, save_jinja_files=False))
    _write_json(folder / "config.json", dict(sorted({**config, **_OFF, **lengths}.items())))
    _write_json(folder / "generation_config.json", {**ends, "use_cache": False})
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    # The class's name in every version of transformers, where the newest writes one that older ones do not know.
    _write_json(folder / "tokenizer_config.json", {**settings, "tokenizer_class": "PreTrainedTokenizerFast"})
    weights = {name: tensor.to(torch.float16) for name, tensor in to_checkpoint(model).items()}
    files.write(folder / "model.safetensors", save(weights, {"format": "pt"}))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    files.write(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
