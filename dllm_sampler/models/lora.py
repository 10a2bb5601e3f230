"""LoRA adapters (arXiv 2106.09685) of peft in a model in training, and their file for the family's own network."""

from copy import copy
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save as serialise
from torch import Tensor, nn

from dllm_sampler.host import files
from dllm_sampler.models import saving
from dllm_sampler.models.adapter import PREFIX, WEIGHTS
from dllm_sampler.models.transformer import Transformer

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # of a network of ours


def attach(network: nn.Module, lora: Any, seed: int, shared: tuple[str, str] | None = None) -> Any:
    """Put LoRA adapters on linear layers of a network, in place. Only the adapters are trained from then on.

    By default all linear layers but the head have one. Experts have none, since they are stacked parameters. Adapters
    are in float32 or the network's dtype, whichever is more precise.

    Args:
        network: the network, with the weights of its checkpoint.
        lora: a `LoraConfig`.
        seed: seed of the adapters' initial weights.
        shared: names of two lists of layers with the same weights. The first gets adapters on attention and
            feed-forward, which the second one shares.

    Returns:
        The peft model around the network.
    """
    from peft import LoraModel
    from peft.tuners.lora import LoraLayer

    shape = copy(lora)
    if shape.target_modules is None:
        shape.target_modules = list(TARGETS) if isinstance(network, Transformer) else "all-linear"
    if shared is not None:
        shape.target_modules = rf"{shared[0]}\.\d+\.(self_attn|mlp)\.\w+_proj"
    with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
        torch.manual_seed(seed)
        adapter = LoraModel(network, shape, "default")
    if shared is not None:
        for name, layer in network.get_submodule(shared[0]).named_modules():
            if isinstance(layer, LoraLayer):
                network.set_submodule(f"{shared[1]}.{name}", cast(nn.Module, layer))
    for weight in network.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
    return adapter


def merged(adapter: Any) -> nn.Module:
    """Return the network with the adapters merged into its weights and removed."""
    from peft.tuners.lora import LoraLayer

    network = adapter.merge_and_unload()
    for name, layer in list(network.named_modules(remove_duplicate=False)):
        if isinstance(layer, LoraLayer):  # the other place of a shared one, whose weights have it already
            network.set_submodule(name, layer.get_base_layer())
    return network


def save(adapter: Any, source: Path, base: str, folder: Path) -> None:
    """Write LoRA adapters as peft reads them for the checkpoint's own network.

    Layers of ours may be rows of one layer of the checkpoint (fused queries, keys and values). They become one adapter,
    whose rank is the sum of theirs: down-projections are stacked, and up-projections are blocks on a diagonal. Scaling
    factors are multiplied into the up-projections.

    Args:
        adapter: a `LoraModel` of peft around the network.
        source: folder of the checkpoint that the network was loaded from.
        base: folder or hub id of the base model, as the file names it.
        folder: folder to write to. It is created if it is missing.

    Raises:
        NotWrittenError: a file cannot be written.
    """
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

    found: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
    for name, layer in adapter.model.named_modules(remove_duplicate=False):
        if isinstance(layer, LoraLayer):
            pair: tuple[Any, Any] = layer.lora_A["default"], layer.lora_B["default"]
            down, up = (part.weight.detach().cpu() for part in pair)
            module, row = _place(name, adapter.model, source)
            found.setdefault(module, []).append((row, down, up * layer.scaling["default"]))
    tensors: dict[str, Tensor] = {}
    for module, parts in found.items():
        _, downs, ups = zip(*sorted(parts, key=lambda part: part[0]), strict=True)
        tensors |= {
            f"{PREFIX}{module}.lora_A.weight": torch.cat(downs),
            f"{PREFIX}{module}.lora_B.weight": torch.block_diag(*ups),
        }
    rank = {module: sum(len(down) for _, down, _ in parts) for module, parts in found.items()}
    shape = LoraConfig(
        target_modules=sorted(found), rank_pattern=rank, alpha_pattern=dict(rank), base_model_name_or_path=base,
        r=min(rank.values()), lora_alpha=min(rank.values()), inference_mode=True,
    )  # fmt: skip
    files.write_folder(folder, shape.save_pretrained)
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    files.write(folder / WEIGHTS, serialise(plain, {"format": "pt"}))


def _place(name: str, network: nn.Module, source: Path) -> tuple[str, int]:
    """Return the checkpoint's module that contains our linear layer `name`, and the first of its rows there."""
    if not isinstance(network, Transformer):
        return name, 0
    (part,) = saving.family_of(source).parts(f"{name}.weight", network.config)
    return part.name.removesuffix(".weight"), part.rows.start if part.rows else 0
