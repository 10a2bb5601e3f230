"""LoRA adapters (arXiv 2106.09685) by peft: on a network's linear layers, and saved under its checkpoint's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from dllm_sampler.core.checks import check_positive
from dllm_sampler.errors import UserError, installing
from dllm_sampler.host import files
from dllm_sampler.models.transformer import Transformer
from dllm_sampler.training.checkpoint import write_tensors

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WEIGHTS = "adapter_model.safetensors"  # as peft calls it
Place = tuple[str, int]  # a module of the checkpoint, and the first of its rows


def check(lora: Mapping[str, float] | None) -> None:
    """Refuse settings of adapters that cannot be had.

    Raises:
        UserError: a field is missing or cannot be, or peft is missing.
    """
    if lora is None:
        return
    if set(lora) != {"r", "alpha", "dropout"}:
        raise UserError("option-type", f"train.lora needs r, alpha and dropout, or is null, not {lora}")
    if not (lora["r"] >= 1 and float(lora["r"]).is_integer()):
        raise UserError("option-range", f"train.lora.r must be a whole number of at least 1, not {lora['r']}")
    check_positive("train.lora.alpha", lora["alpha"])
    if not 0 <= lora["dropout"] < 1:
        raise UserError("option-range", f"train.lora.dropout must be from 0 to below 1, not {lora['dropout']}")
    if find_spec("peft") is None:
        raise UserError("package-missing", f"train.lora needs the package peft: {installing('train')}")


def attach(network: nn.Module, lora: Mapping[str, float], seed: int, shared: tuple[str, str] | None = None) -> Any:
    """Put adapters on the linear layers of a network, in place, the head left out; only they learn from here on.

    Experts are stacked parameters and no layers: they have none. Adapters are float32 at least, whatever the network.

    Args:
        network: as its checkpoint has it.
        lora: `r`, `alpha` and `dropout`.
        seed: of the adapters.
        shared: two lists of layers whose weights are the same. The first gets adapters on attention and feed-forward,
            and the second has the same ones.

    Returns:
        The peft model around the network.
    """
    from peft import LoraConfig, LoraModel  # takes seconds to import
    from peft.tuners.lora import LoraLayer

    targets: Any = list(TARGETS) if isinstance(network, Transformer) else "all-linear"
    if shared is not None:
        targets = rf"{shared[0]}\.\d+\.(self_attn|mlp)\.\w+_proj"
    shape = LoraConfig(
        r=int(lora["r"]),
        lora_alpha=lora["alpha"],  # pyright: ignore[reportArgumentType] (any number will do)
        lora_dropout=lora["dropout"],
        target_modules=targets,
    )
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
    """The network with the adapters added to its weights, and none left."""
    from peft.tuners.lora import LoraLayer

    network = adapter.merge_and_unload()
    for name, layer in list(network.named_modules(remove_duplicate=False)):
        if isinstance(layer, LoraLayer):  # the other place of a shared one, whose weights have it already
            network.set_submodule(name, layer.get_base_layer())
    return network


def save(adapter: Any, place: Callable[[str], Place], base: str, folder: Path) -> None:
    """Write adapters as peft reads them around the checkpoint's own network.

    Layers of ours that are rows of one of the checkpoint's (fused queries, keys and values) become one adapter of the
    sum of their ranks: its down-projections one below the other, its up-projections in blocks.

    Args:
        adapter: what `attach` returned.
        place: where the checkpoint has a linear layer of ours.
        base: what the adapters belong to, a folder or hub id.
        folder: it is made where it is not there.

    Raises:
        NotWrittenError: a file cannot be written.
    """
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

    found: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
    for name, layer in adapter.model.named_modules(remove_duplicate=False):
        if isinstance(layer, LoraLayer):
            module, row = place(name)
            pair: tuple[Any, Any] = layer.lora_A["default"], layer.lora_B["default"]
            down, up = (part.weight.detach().cpu() for part in pair)
            found.setdefault(module, []).append((row, down, up))
    tensors: dict[str, Tensor] = {}
    for module, parts in found.items():
        _, downs, ups = zip(*sorted(parts, key=lambda part: part[0]), strict=True)
        prefix = f"base_model.model.{module}"
        tensors |= {f"{prefix}.lora_A.weight": torch.cat(downs), f"{prefix}.lora_B.weight": torch.block_diag(*ups)}
    old = adapter.peft_config["default"]
    several = {module: len(parts) for module, parts in found.items() if len(parts) > 1}
    shape = LoraConfig(
        r=old.r, lora_alpha=old.lora_alpha, lora_dropout=old.lora_dropout, target_modules=sorted(found),
        rank_pattern={name: count * old.r for name, count in several.items()},
        alpha_pattern={name: count * old.lora_alpha for name, count in several.items()},
        base_model_name_or_path=base, inference_mode=True,
    )  # fmt: skip
    files.write_folder(folder, shape.save_pretrained)
    write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
