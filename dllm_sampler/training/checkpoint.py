"""State of an unfinished training run in one safetensors file: tensors, and JSON in its header. No pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor, nn, optim

from dllm_sampler.errors import UserError
from dllm_sampler.host import files
from dllm_sampler.host.reading import load_json
from dllm_sampler.training import sharding

FILE = "checkpoint.safetensors"


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file whole or not at all."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    files.write(path, serialise(plain, metadata))


def write_json(path: Path, content: Any, indent: int | None = None) -> None:
    """Write a JSON file whole or not at all."""
    files.write(path, json.dumps(content, indent=indent) + "\n")


def read_json(path: Path) -> Any:
    """What `write_json` wrote.

    Raises:
        UserError: it was damaged since.
    """
    try:
        return load_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError("run-damaged", f"{path} is damaged ({error}). Remove it to restart.") from None


def check_same(path: Path, saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse to go on with a run of other settings.

    Raises:
        UserError: naming the first that differs.
    """
    for key, value in settings.items():
        if saved.get(key) != json.loads(json.dumps(value)):
            raise UserError(
                "run-differs",
                f"{path} holds an unfinished run with another train.{key} ({saved.get(key)}, not {value});"
                " resume it as it was or choose another train.output",
            )


def check_content(folder: Path, saved: Mapping[str, Any], content: str, path: str | None) -> None:
    """Refuse to go on with a run on other examples.

    Args:
        folder: of the run.
        saved: its settings, with the hash of its examples under `content`.
        content: the hash of the examples of now.
        path: where they are from.

    Raises:
        UserError: the examples have changed since.
    """
    if saved.get("content") != content:
        raise UserError("run-differs", f"{folder} has a run on an older train.data={path}. Change train.output.")


def save(
    folder: Path, model: nn.Module, optimizer: optim.Optimizer, state: dict[str, Any],
    others: Mapping[str, nn.Module] | None = None, write: bool = True,
) -> None:  # fmt: skip
    """Write weights, optimizer moments and `state` (anything JSON can say) to `folder`, replacing the last ones.

    Weights that do not learn are not written, and weights that are shared are written once.

    others: further modules by name, whose weights are written, too
    write: False in all processes but one; all must call where weights are spread over them
    """
    left = _left_out(model)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items() if name not in left}
    for other, module in (others or {}).items():
        tensors |= {f"other.{other}.{name}": tensor.clone() for name, tensor in module.state_dict().items()}
    for name, parameter in model.named_parameters():
        moments = optimizer.state.get(parameter, {})
        tensors |= {f"optimizer.{key}.{name}": value for key, value in moments.items()}
    tensors = {name: sharding.whole(tensor) for name, tensor in tensors.items()}
    if write:
        write_tensors(folder / FILE, tensors, {"state": json.dumps(state)})


def _left_out(model: nn.Module) -> set[str]:
    """The names of weights that do not learn, and further names of one that has several."""
    once = {name for name, weight in model.named_parameters() if weight.requires_grad}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - once


@contextmanager
def _opened(folder: Path) -> Iterator[Any]:
    try:
        with safe_open(folder / FILE, "pt") as file:
            yield file
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError("run-damaged", f"{folder / FILE} is damaged ({error}). Remove it to restart.") from None


def settings(folder: Path) -> dict[str, Any]:
    """The settings, `config` of the `state`, to see whether the rest would fit."""
    with _opened(folder) as file:
        return load_json(file.metadata()["state"])["config"]


def load(
    folder: Path, model: nn.Module, optimizer: optim.Optimizer, others: Mapping[str, nn.Module] | None = None
) -> dict[str, Any]:
    """Put weights and moments back and return the `state` that was saved with them."""
    with _opened(folder) as file:
        state = load_json(file.metadata()["state"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    now = model.state_dict()
    learnt = {name[6:]: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    learnt = {name: sharding.like(tensor, now[name]) if name in now else tensor for name, tensor in learnt.items()}
    model.load_state_dict({name: now[name] for name in _left_out(model)} | learnt)
    for other, module in (others or {}).items():
        prefix = f"other.{other}."
        found = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        own = module.state_dict()
        module.load_state_dict({key: sharding.like(tensor, own[key]) for key, tensor in found.items()})
    for name, parameter in model.named_parameters():
        keys = [key for key in tensors if key.startswith("optimizer.") and key.split(".", 2)[2] == name]
        moments = {key.split(".", 2)[1]: tensors[key] for key in keys}
        # The step counter stays on the CPU unless the optimizer is fused; torch moves it where it is needed.
        optimizer.state[parameter] = {key: sharding.like(value, parameter) for key, value in moments.items()}
    return state
