"""Adapters of peft, for example LoRA (arXiv 2106.09685), merged into the weights of a loaded model."""

import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dllm_sampler.errors import UserError, counted, first_line, installing
from dllm_sampler.models import weights
from dllm_sampler.models.family import Family, Held, assembled
from dllm_sampler.models.fields import shown
from dllm_sampler.models.transformer import Transformer

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # as peft calls them
PREFIX = "base_model.model."  # of all names in the file of weights
ELSEWHERE = "Load the model that the adapter was trained on."


def has_adapter(folder: Path) -> bool:
    """Return True if a folder contains the configuration of an adapter, with or without the weights of its base."""
    return (folder / CONFIG).is_file()


def base_advice(folder: Path) -> str:
    """Return the advice for an adapter whose base is unknown, as the second sentence of an error."""
    return f"Set it to the folder or hub id of the base model, or set model=BASE model.adapter={folder}."


def find_base(folder: Path) -> tuple[str, str | None]:
    """Return the base that an adapter names: a folder or a hub id, and the revision of a hub id.

    A relative path is tried from the adapter's folder first.

    Raises:
        UserError: the configuration of the adapter cannot be read, or names no base.
    """
    raw = weights.read_json(folder / CONFIG)
    path, revision = raw.get("base_model_name_or_path"), raw.get("revision")
    if not isinstance(path, str) or not path:
        raise UserError(
            "adapter-invalid",
            f"{folder / CONFIG}: base_model_name_or_path is {shown(path)}. {base_advice(folder)}",
        )
    near = folder / Path(path).expanduser()
    if near.is_dir():
        return str(near), None
    local = Path(path).expanduser().is_dir()
    return path, revision if isinstance(revision, str) and not local else None


@contextmanager
def base_alone(folder: Path) -> Iterator[Path]:
    """Yield a folder of the same files without the adapter, since transformers would load the adapter, too."""
    if not has_adapter(folder):
        yield folder
        return
    with TemporaryDirectory() as made:
        for file in folder.iterdir():
            if not file.name.startswith("adapter_"):
                (Path(made) / file.name).symlink_to(file.resolve())
        yield Path(made)


def merge(network: nn.Module, folder: Path, family: Family | None = None) -> None:
    """Add an adapter to the weights of a network, in place.

    peft merges it, so all kinds of adapters that peft can merge are supported. The parameters of a `Transformer` get
    the names of its checkpoint for that.

    Args:
        network: a `Transformer`, or a model of transformers.
        folder: the adapter's folder.
        family: the checkpoint's family, for a `Transformer`.

    Raises:
        UserError: peft is missing, or the adapter is damaged, belongs to another model or cannot be merged.
    """
    raw, tensors, held, touched = check(network, folder, family)
    if isinstance(network, Transformer):
        assert family is not None
        with torch.no_grad():
            merged = _merged(_as_checkpoint(network, held, touched, family), raw, tensors, folder)
            _take_back(network, held, touched, merged)
        return
    learns = {name for name, weight in network.named_parameters() if weight.requires_grad}
    with torch.no_grad():
        _merged(network, raw, tensors, folder)
    for name, weight in network.named_parameters():
        weight.requires_grad_(name in learns)


def check(
    network: nn.Module, folder: Path, family: Family | None
) -> tuple[dict[str, Any], dict[str, Tensor], Held, set[str]]:
    """Refuse an adapter that does not belong to a network. The network's weights may be on the meta device.

    Returns:
        The adapter's configuration and tensors, the checkpoint's tensors of a `Transformer`, and the layers that the
        adapter changes.

    Raises:
        UserError: peft is missing, or the adapter is damaged or belongs to another model.
    """
    raw = weights.read_json(folder / CONFIG)
    if find_spec("peft") is None:
        raise UserError("package-missing", f"The adapter {folder} needs the package peft. Run {installing('train')}.")
    tensors, held = _tensors(folder), {}
    known = {name for name, _ in network.named_modules()} - {""}
    if isinstance(network, Transformer):
        assert family is not None
        held = family.held(network.state_dict(), network.config)
        known = {name.rpartition(".")[0] for name in held}
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PromptLearningConfig

    kinds: dict[Any, type] = PEFT_TYPE_TO_CONFIG_MAPPING
    if issubclass(kinds.get(str(raw.get("peft_type")), object), PromptLearningConfig):
        said = f"{folder / CONFIG}: peft_type {shown(raw['peft_type'])} adds no weights to merge"
        raise UserError("adapter-unsupported", f"{said}. Use an adapter that does, for example LoRA.")
    touched = _modules(tensors, known, folder)
    _refuse_shared(network, held, touched, folder)
    return raw, tensors, held, touched


def _tensors(folder: Path) -> dict[str, Tensor]:
    file = folder / WEIGHTS
    if not file.is_file():
        pickles = sorted(found.name for found in folder.glob("adapter_model.*"))
        other = f", only {pickles[0]}. Convert that to safetensors." if pickles else ". Copy the whole adapter again."
        raise UserError("adapter-invalid", f"{folder} has no {WEIGHTS}{other}")
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError("checkpoint-damaged", f"Cannot read {file} ({first_line(error)}). Copy it again.") from None


def _modules(tensors: Collection[str], known: set[str], folder: Path) -> set[str]:
    """Return the layers of the base that the tensors of an adapter belong to."""
    touched = set[str]()
    for name in tensors:
        module = name.removeprefix(PREFIX)
        while module and module not in known:
            module = module.rpartition(".")[0]
        if not module:
            raise UserError(
                "adapter-incompatible",
                f"{folder / WEIGHTS}: the tensor {name} is for a layer that the model does not have. {ELSEWHERE}",
            )
        touched.add(module)
    return touched


def _refuse_shared(network: nn.Module, held: Held, touched: set[str], folder: Path) -> None:
    """Refuse an adapter on weights that two layers share: merged into one, it would change the other."""
    own = {one: name for name, parts in held.items() for one, _ in parts}
    names = {own.get(name, name): weight for name, weight in network.named_parameters(remove_duplicate=False)}
    count = Counter(id(weight) for weight in names.values())
    for name, weight in names.items():
        if count[id(weight)] > 1 and name.rpartition(".")[0] in touched:
            raise UserError(
                "adapter-incompatible",
                f"The adapter {folder} changes {name}, which another layer shares (tied embeddings). Use an adapter"
                " that leaves it unchanged.",
            )


def _as_checkpoint(network: Transformer, held: Held, touched: set[str], family: Family) -> nn.Module:
    """Return the layers `touched` under their names in the checkpoint, on the memory of our parameters if possible."""
    root, own = nn.Module(), network.state_dict()
    embeddings = {part.name for part in family.parts("embed.weight", network.config)}
    for name in sorted(touched):  # a layer comes before those inside it
        found = {one.rpartition(".")[2]: assembled(own, held[one]) for one in held if one.rpartition(".")[0] == name}
        made = _layer(found, f"{name}.weight" in embeddings)
        for kind, tensor in found.items():
            made.register_parameter(kind, nn.Parameter(tensor, requires_grad=False))
        parent, _, last = name.rpartition(".")
        node = root
        for part in parent.split(".") if parent else ():
            if part not in node._modules:
                node.add_module(part, nn.Module())
            node = node.get_submodule(part)
        node.add_module(last, made)
    return root


def _layer(tensors: dict[str, Tensor], embeds: bool) -> nn.Module:
    """Return a layer without memory for its weights, of the kind that has these tensors: an embedding if `embeds`."""
    weight = tensors.get("weight")
    if weight is None or weight.dim() != 2:
        return nn.Module()
    rows, columns = weight.shape
    if embeds:
        return nn.Embedding(rows, columns, device="meta")
    return nn.Linear(columns, rows, "bias" in tensors, device="meta")


def _take_back(network: Transformer, held: Held, touched: set[str], merged: nn.Module) -> None:
    """Copy merged tensors into our parameters."""
    own, found = network.state_dict(), merged.state_dict()
    for name, parts in held.items():
        if name.rpartition(".")[0] not in touched:
            continue
        for one, part in parts:
            target = own[one] if part.expert is None else own[one][part.expert]
            target.copy_(found[name] if part.rows is None else found[name][part.rows])


def _merged(network: nn.Module, raw: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> nn.Module:
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict  # takes seconds to import
    from peft.utils import set_peft_model_state_dict

    source = folder / CONFIG
    try:
        config = PeftConfig.from_pretrained(str(folder))
        config.task_type, config.inference_mode = None, True  # a task would ask for a model of transformers
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is wrong is an error below
            model = PeftModel(network, config)
            wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
            wrong = [name for name in wanted if name in tensors and tensors[name].shape != wanted[name].shape]
            _complain(folder, "lacks {} of its configuration", wanted.keys() - tensors.keys())
            _complain(folder, "has {} of another shape than configuration and model give", wrong)
            found: Any = set_peft_model_state_dict(model, tensors)
            _complain(folder, "has {} that its configuration does not have", found.unexpected_keys)
            merged = model.merge_and_unload()
    except UserError:
        raise
    except Exception as error:  # peft raises many kinds for a config that does not fit
        raise UserError(
            "adapter-incompatible",
            f"peft cannot merge the adapter {folder} ({type(error).__name__}: {first_line(error)}). Correct {source},"
            " or load the model that the adapter was trained on.",
        ) from None
    left = next((name for name, _ in merged.named_modules() if re.search(r"lora_|modules_to_save", name)), None)
    if left is not None:
        said = f"peft cannot merge {left} of the adapter {folder} into the model"
        raise UserError("adapter-unsupported", f"{said}. Use an adapter without it.")
    return merged


def _complain(folder: Path, what: str, names: Collection[str]) -> None:
    """Raise an error with the number of `names`, in place of `{}` in `what`, and the first name, if there are any."""
    if names:
        wrong = f"{folder / WEIGHTS} {what.format(counted(len(names), 'tensor'))}, for example {min(names)}"
        raise UserError("adapter-incompatible", f"{wrong}. Copy the adapter again, or load the model of its training.")
