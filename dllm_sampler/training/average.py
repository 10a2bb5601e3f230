"""Copies of the weights that follow them: a moving average (Polyak and Juditsky, 1992), or an earlier policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import TrainerCallback

from dllm_sampler.host import files


class WeightCopy(TrainerCallback):
    """A copy `a = decay * a + (1 - decay) * w` of the weights w that learn, moved every few optimizer steps.

    A trainer saves it in each checkpoint, and it is read back from it.

    Args:
        name: of its file.
        decay: from 0 (the weights themselves) to below 1; about the last 1 / (1 - decay) steps count.
        every: steps between two of its moves; 0: it stays as the weights were before the first step.
    """

    def __init__(self, name: str, decay: float = 0.0, every: int = 1):
        self.name, self.decay, self.every = name, decay, every
        self.copies: dict[str, Tensor] | None = None  # None before training

    @torch.no_grad()
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Copy the weights, or read the copy of the checkpoint that the run resumes from."""
        self._model = model
        self.copies = {name: weight.detach().clone() for name, weight in model.learned().items()}
        file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / f"{self.name}.safetensors"
        for name, tensor in load_file(file).items() if state.global_step and file.exists() else ():
            copy = self.copies[name]
            if isinstance(copy, DTensor):
                tensor = distribute_tensor(tensor.to(copy.to_local().device), copy.device_mesh, copy.placements)
            copy.copy_(tensor)

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Move the copy towards the weights."""
        if self.every and state.global_step % self.every == 0:
            assert self.copies is not None
            for name, weight in self._model.learned().items():
                self.copies[name].mul_(self.decay).add_(weight, alpha=1 - self.decay)

    def save(self, folder: Path, write: bool) -> None:
        """Write the copy, if there is one, into a checkpoint. Collective: every process must call it; one writes."""
        spread: dict[str, Any] = {**(self.copies or {})}
        whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in spread.items()}
        if write and whole:
            tensors = {name: one.cpu().contiguous() for name, one in whole.items()}
            files.write(folder / f"{self.name}.safetensors", save(tensors))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the copy's weights inside, if there is a copy."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        if self.copies is None:
            return
        for module in self._model.modules():  # what was gathered for a forward has the old values
            if isinstance(module, FSDPModule):
                module.reshard()
        for name, weight in self._model.learned().items():
            held = weight.detach().clone()
            weight.copy_(self.copies[name])
            self.copies[name].copy_(held)


class Reference(WeightCopy):
    """The policy that a divergence is measured from."""
