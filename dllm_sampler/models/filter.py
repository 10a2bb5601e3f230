"""Learn2PD's filter (arXiv 2509.25188): linear layers from a block's confidences to one logit per position."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor, nn
from torch.nn.functional import linear

from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.errors import UserError, first_line
from dllm_sampler.host import files
from dllm_sampler.host.paths import expanded
from dllm_sampler.host.reading import load_json
from dllm_sampler.models.fields import shown

FILE = "filter.safetensors"  # in the folder of a checkpoint that ships its own
SCHEMA = 1
# Where training starts: logit SLOPE (c - CENTRE), a threshold on the confidence c of each position by itself.
SLOPE, CENTRE = 40.0, 0.9
Layers = tuple[tuple[Tensor, Tensor], ...]  # weight [out, in] and bias [out] of each


def judge(layers: Layers, known: Tensor) -> Tensor:
    """Return logits `[B, N]` for confidences `known [B, N]`. ReLU between layers is an assumption (not published)."""
    for index, (weight, bias) in enumerate(layers):
        known = linear(known if index == 0 else known.relu(), weight, bias)
    return known


class Filter(nn.Module):
    """A filter that starts as a threshold on each position's own confidence, and learns the difference.

    Records are too few to find the steep rise just below 1 from random weights.
    """

    def __init__(self, size: int, depth: int):
        super().__init__()
        scale = [1.0] * (depth - 1) + [SLOPE]
        self._start = [(each * torch.eye(size), torch.full((size,), 0.0)) for each in scale]
        self._start[-1][1].fill_(-SLOPE * CENTRE)
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size, size)) for _ in scale)
        self.offsets = nn.ParameterList(nn.Parameter(torch.zeros(size)) for _ in scale)

    def layers(self) -> Layers:
        """Return weight and bias of each layer."""
        learned = zip(self._start, self.weights, self.offsets, strict=True)
        return tuple((a.to(x.device) + x, b.to(y.device) + y) for (a, b), x, y in learned)

    def forward(self, known: Tensor) -> Tensor:
        """Return the logits of confidences `[R, N]`."""
        return judge(self.layers(), known)


def find(path: str | None, spec: ModelSpec) -> Path:
    """Return the filter's file: `path`, or by default the one in the model's checkpoint.

    Raises:
        UserError: `path` is None and the checkpoint has no filter.
    """
    if path is not None:
        return expanded("scheduler.filter", path)
    if spec.folder is None or not (spec.folder / FILE).is_file():
        raise UserError(
            "option-missing",
            "scheduler.filter is missing, and the model's checkpoint has no filter. Train one by `dllm-train"
            f" {_training(spec)}`, then set scheduler.filter=FOLDER/{FILE}.",
        )
    return spec.folder / FILE


def _training(spec: ModelSpec) -> str:
    return f"train=filter train.model={spec.folder or 'MODEL'} train.output_dir=FOLDER"


def save(path: Path, layers: Layers, spec: ModelSpec, block_length: int) -> None:
    """Write the layers of a filter as `load` reads them, with its block length and the sizes of its model."""
    tensors = {
        f"fc{i}.{name}": tensor.contiguous()
        for i, layer in enumerate(layers, 1)
        for name, tensor in zip(("weight", "bias"), layer, strict=True)
    }
    shape = {"vocab_size": spec.vocab_size, "num_layers": spec.num_layers}
    facts = json.dumps({"schema": SCHEMA, "block_length": block_length, **shape})
    # one entry: safetensors does not keep the order of several, and equal runs should give equal files
    files.write(path, serialise(tensors, {"filter": facts}))


def load(path: Path, spec: ModelSpec) -> Layers:
    """Return the layers of a file, on the model's device.

    For blocks of N positions the safetensors file has `fc1.weight`, `fc1.bias`, `fc2.weight` and so on. The first layer
    reads N numbers, and the last one returns N. The metadata entry `filter` is a JSON object with `schema` (1),
    `block_length` (N), and `vocab_size` and `num_layers` of the model. A file without it, such as a published one, fits
    any model.

    Raises:
        UserError: the file cannot be read, has other tensors, or was trained on another model.
    """
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            said = load_json((file.metadata() or {}).get("filter", "{}"))  # published filters say nothing
    except (OSError, SafetensorError, ValueError) as error:
        text = f"scheduler.filter: cannot read {path} as safetensors ({first_line(error)}). Name another file."
        raise UserError("filter-invalid", text) from error
    said = said if isinstance(said, dict) else {}
    if said.get("schema", SCHEMA) != SCHEMA:
        text = f"scheduler.filter: {path} has schema {shown(said['schema'])}, not {SCHEMA}. Train it again."
        raise UserError("filter-incompatible", text)
    for name in ("vocab_size", "num_layers"):  # it would run, and commit wrong tokens
        own = getattr(spec, name)
        if said.get(name, own) != own:
            raise UserError(
                "filter-incompatible",
                f"scheduler.filter: {path} is for a model with {name}={shown(said[name])}, and this one has {own}."
                f" Train one by `dllm-train {_training(spec)}`.",
            )
    names = [f"fc{index + 1}" for index in range(len(tensors) // 2)]
    if not names or set(tensors) != {f"{name}.{part}" for name in names for part in ("weight", "bias")}:
        raise UserError(
            "filter-invalid",
            f"scheduler.filter: {path} does not have exactly the tensors fc1.weight, fc1.bias, fc2.weight and so on."
            " Name a filter.",
        )
    layers = tuple((tensors[f"{name}.weight"].float(), tensors[f"{name}.bias"].float()) for name in names)
    size = layers[0][0].shape[-1] if layers[0][0].dim() else 0
    for weight, bias in layers:
        if weight.dim() != 2 or weight.shape[1] != size or bias.shape != weight.shape[:1]:
            raise UserError("filter-invalid", f"scheduler.filter: shapes in {path} do not match. Name another file.")
        size = weight.shape[0]
    if size != layers[0][0].shape[1]:
        shape = f"{layers[0][0].shape[1]} positions to {size}"
        text = f"scheduler.filter: {path} maps {shape}"
        raise UserError("filter-invalid", f"{text}. Name a file that returns as many as it reads.")
    return tuple((weight.to(spec.device), bias.to(spec.device)) for weight, bias in layers)
