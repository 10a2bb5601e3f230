"""Reading of safetensors, and loading them into a `Transformer` on the meta device. Each tensor is read once."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dllm_sampler.errors import UserError, counted
from dllm_sampler.host.reading import load_json
from dllm_sampler.models.family import HARMLESS, Family, Part
from dllm_sampler.models.fields import shown
from dllm_sampler.models.transformer import Transformer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def fill(
    model: Transformer, folder: Path, family: Family, dtype: torch.dtype | None, place: Callable[[str], torch.device]
) -> None:
    """Replace every parameter of a model on the meta device by the checkpoint's tensor.

    Args:
        model: the model. Weights that it has are replaced.
        folder: a folder with `model.safetensors`, or an index and its shards. No other file is opened.
        family: the family, for the checkpoint's names of our parameters.
        dtype: dtype of the parameters. None keeps each tensor's own.
        place: returns the device of a parameter by our name.

    Raises:
        UserError: tensors are missing, unknown or of another shape, or a file is missing, truncated or corrupt.
    """
    tied = {"lm_head.weight"} if model.config.tie_embeddings else set()
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    ours, spare = family.held(own, model.config), family.held(tied, model.config)
    files = tensor_files(folder)
    used = [name for name in files if name not in spare and not HARMLESS.search(name)]
    complain(
        folder,
        "lacks {} that its config.json needs",
        [name for name in ours if name not in files and name not in spare],
    )
    complain(folder, "has {} that its config.json does not need", [name for name in used if name not in ours])

    wanted, held = {name: _shape(ours[name], own) for name in used}, shapes(folder)
    wrong = [
        f"{name} {list(held[name])} instead of {list(wanted[name])}" for name in used if held[name] != wanted[name]
    ]
    complain(folder, "has {} of another shape than its config.json says", wrong)

    state: dict[str, Tensor] = {}
    for file in sorted({files[name] for name in used}):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in (name for name in used if files[name] == file):
                    if not _floating(opened, name):
                        raise _not_floating(file, name, opened)
                    tensor = opened.get_tensor(name)
                    for parameter, part in ours[name]:
                        target, kind = place(parameter), dtype or tensor.dtype
                        if part.expert is None:
                            # A copy: safetensors maps the file, and a checkpoint overwritten later must not reach us.
                            rows = tensor if part.rows is None else tensor[part.rows]
                            state[parameter] = rows.to(target, kind, copy=True)
                        else:
                            if parameter not in state:
                                state[parameter] = torch.empty(own[parameter], device=target, dtype=kind)
                            state[parameter][part.expert] = tensor
        except SafetensorError as error:
            raise _corrupt(file, error) from None
    if tied:
        state["lm_head.weight"] = state["embed.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()


def check_floating(folder: Path, parameters: Collection[str]) -> None:
    """Refuse a checkpoint that does not store floating-point numbers for some parameters.

    Args:
        folder: folder of the checkpoint.
        parameters: names in a model of transformers. They may have a longer or shorter prefix than in the checkpoint.

    Raises:
        UserError: one of these tensors is stored as integers or in 8 bits, or as `tensor_files`.
    """
    for file, names in _by_file(folder).items():
        with safe_open(file, framework="pt") as opened:
            for name in (name for name in names if not _floating(opened, name)):
                if any(name == one or one.endswith(f".{name}") or name.endswith(f".{one}") for one in parameters):
                    raise _not_floating(file, name, opened)


def _floating(opened: Any, name: str) -> bool:
    return opened.get_slice(name).get_dtype() in ("F64", "F32", "F16", "BF16")  # F8 is half of a number: scales apart


def _not_floating(file: Path, name: str, opened: Any) -> UserError:
    stored = opened.get_slice(name).get_dtype()
    return UserError(
        "checkpoint-unsupported",
        f"{file}: the tensor {name} is in {stored}. Use a checkpoint in float16, bfloat16, float32 or float64.",
    )


def _shape(held: list[tuple[str, Part]], shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape that a tensor of the checkpoint should have, by the parameters of ours that it contains."""
    name, part = held[0]
    if part.rows is not None:
        return max(each.rows.stop for _, each in held if each.rows is not None), *shapes[name][1:]
    return shapes[name] if part.expert is None else shapes[name][1:]


def stored_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype of the checkpoint's first floating-point tensor, or None if it has no such tensor."""
    return next((dtype for dtype in dtypes(folder).values() if dtype.is_floating_point), None)


def dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Return the dtype of every tensor of a checkpoint that is not a scalar."""
    found: dict[str, torch.dtype] = {}
    for file, names in _by_file(folder).items():
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in names}
            found |= {name: one[:0].dtype for name, one in slices.items() if one.get_shape()}
    return found


def _by_file(folder: Path) -> dict[Path, list[str]]:
    found: dict[Path, list[str]] = {}
    for name, file in tensor_files(folder).items():
        found.setdefault(file, []).append(name)
    return found


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a checkpoint, from the files' headers.

    Raises:
        UserError: see `tensor_files`.
    """
    found: dict[str, tuple[int, ...]] = {}
    for file, names in _by_file(folder).items():
        with safe_open(file, framework="pt") as opened:
            found |= {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    return found


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of a checkpoint, by the tensor's name.

    Raises:
        UserError: safetensors are missing (pickles are not read), a file is damaged, or the index and its shards do
            not fit together.
    """
    if (folder / SINGLE).is_file():
        return dict.fromkeys(_names(folder / SINGLE), folder / SINGLE)
    if not (folder / INDEX).is_file():
        pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
        if pickles:
            raise UserError(
                "checkpoint-pickled", f"{folder} has pickle weights ({pickles[0]}). Convert them to safetensors."
            )
        raise UserError("checkpoint-incomplete", f"{folder} has no weights ({SINGLE} or {INDEX}). Copy them there.")
    located = read_json(folder / INDEX).get("weight_map")
    if not isinstance(located, dict) or not all(isinstance(shard, str) for shard in located.values()):
        raise UserError(
            "checkpoint-damaged", f"{folder / INDEX} has no weight_map from tensors to shards. Copy it again."
        )
    files: dict[str, Path] = {}
    for shard in sorted(set(located.values())):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise UserError(
                "checkpoint-damaged",
                f"{folder / INDEX} names the shard {shown(shard)}. Name .safetensors files in the same folder.",
            )
        if not (folder / shard).is_file():
            raise UserError("checkpoint-incomplete", f"{folder / INDEX}: the shard {shard} is missing. Copy it there.")
        for name in _names(folder / shard):
            files[name] = folder / shard
    complain(folder, "lacks {} that its index names", [name for name in located if name not in files])
    return files


def present(folder: Path) -> bool:
    """Return True if a folder contains weights of a whole model, in any format."""
    names = {file.name for pattern in (SINGLE, INDEX, *PICKLES) for file in folder.glob(pattern)}
    return any(not name.startswith("adapter_") for name in names)


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        UserError: the file cannot be read, or is not a JSON object.
    """
    try:
        found = load_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError("json-invalid", f"Cannot read {file} ({error.strerror}). Make it readable.") from None
    except ValueError as error:
        raise UserError("json-invalid", f"Cannot read {file} as JSON ({error}). Copy it again.") from None
    if not isinstance(found, dict):
        raise UserError("json-invalid", f"{file} contains {shown(found)}, not a JSON object. Copy it again.")
    return found


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise _corrupt(file, error) from None


def _corrupt(file: Path, error: Exception) -> UserError:
    return UserError("checkpoint-damaged", f"Cannot read {file} ({error}). Copy or download it again.")


def complain(folder: Path, what: str, tensors: list[str]) -> None:
    """Raise an error that counts `tensors` and names up to three of them. Does nothing if there are none.

    `{}` in `what` stands for their number, for example `2 tensors`.
    """
    if tensors:
        more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
        listing = f"{', '.join(tensors[:3])}{more}"
        wrong = f"{folder} {what.format(counted(len(tensors), 'tensor'))}: {listing}"
        raise UserError("checkpoint-tensors", f"{wrong}. Copy the whole checkpoint again, or correct its files.")
