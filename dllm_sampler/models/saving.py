"""Saving a model in the form of the checkpoint that it was loaded from: files, tensor names, shapes and dtypes."""

import json
import shutil
from collections.abc import Collection
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel

from dllm_sampler.host import files
from dllm_sampler.models import loading, weights
from dllm_sampler.models.families import to_checkpoint
from dllm_sampler.models.family import Family
from dllm_sampler.models.transformer import Transformer

# Files of a checkpoint besides its weights. A card and a filter describe the old weights, so they are not copied.
FILES = (
    "config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.*", "merges.txt", "*.model", "chat_template.*", "*.py", "LICENSE*",
)  # fmt: skip


def save(network: nn.Module, source: Path, target: Path, hub: str | None = None) -> None:
    """Write a checkpoint that the family's own code loads, and `loading.load` too.

    The weights come last: a folder that has them is complete.

    Args:
        network: a `Transformer`, or a masked LM of transformers, loaded from `source` and trained since.
        source: the folder that the network was loaded from. Its configuration and tokenizer are copied unchanged.
        target: the folder to write to.
        hub: hub id that `source` is a copy of. If `source` has no code, the configuration names the code there.

    Raises:
        NotWrittenError: a file cannot be written.
    """
    stored = weights.dtypes(source)
    _copy(source, target, hub)
    if isinstance(network, PreTrainedModel):
        tensors = _as_stored(network.state_dict(), stored)
        if not stored.keys() <= tensors.keys():  # transformers renames tensors, and writes the names of the file
            files.write_folder(target, partial(network.save_pretrained, state_dict=tensors))
            _copy(source, target, hub)  # transformers writes a configuration of its own, too
            return
        # transformers 5.0 renames BERT's norms even where the file has the names that the model has.
        tensors = {name: tensors[name] for name in stored}
    else:
        assert isinstance(network, Transformer)
        tensors = _as_stored(named(network, family_of(source), stored), stored)
    files.write_folder(target, lambda made: save_torch_state_dict(tensors, made, metadata={"format": "pt"}))


def has_weights(folder: Path) -> bool:
    """Return True if a folder has the weights of a checkpoint, in one file or in several."""
    return (folder / weights.SINGLE).exists() or (folder / weights.INDEX).exists()


def family_of(source: Path) -> Family:
    """Return the family of a checkpoint that was loaded as a `Transformer`."""
    family = loading.find_family(weights.read_json(source / "config.json"), source)
    assert family is not None
    return family


def named(network: Transformer, family: Family, stored: Collection[str] = ()) -> dict[str, Tensor]:
    """Return the network's tensors under the family's names. A tied head is left out unless `stored` names it."""
    tensors = to_checkpoint(network, family)
    (head,) = family.parts("lm_head.weight", network.config)
    if head.name in stored and head.name not in tensors:
        tensors[head.name] = network.embed.weight.detach().clone()
    return tensors


def _as_stored(tensors: dict[str, Tensor], stored: dict[str, torch.dtype]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, in the dtypes `stored` by name. Two names of one tensor still share memory."""
    made: dict[tuple[int, torch.Size], Tensor] = {}
    found = {}
    for name, tensor in tensors.items():
        key = tensor.data_ptr(), tensor.shape
        if key not in made:
            one = tensor.detach().to("cpu", stored.get(name, tensor.dtype))
            whole = one.untyped_storage().nbytes() == one.nbytes
            made[key] = one if whole else one.clone()  # for example one expert of a stack
        found[name] = made[key]
    return found


def _copy(source: Path, target: Path, hub: str | None) -> None:
    """Copy the files of a checkpoint except the weights. Name code on the `hub` if there is none in the folder."""
    found = sorted({file for pattern in FILES for file in source.glob(pattern) if file.is_file()})
    files.write_folder(target, lambda made: [shutil.copyfile(file, Path(made) / file.name) for file in found])
    raw = weights.read_json(source / "config.json")
    code = raw.get("auto_map")
    if hub is not None and isinstance(code, dict) and not any(source.glob("*.py")):
        raw["auto_map"] = {key: name if "--" in str(name) else f"{hub}--{name}" for key, name in code.items()}
        files.write(target / "config.json", json.dumps(raw, indent=2, ensure_ascii=False) + "\n")
