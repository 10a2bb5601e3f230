"""The published sampler of LLaDA itself, where its file is at hand: `--official FILE` of the benchmarks.

FILE is `generate.py` of github.com/ML-GSAI/LLaDA (arXiv 2502.09992), from a clone of your own. It is run as it is, on
the network that our sampler runs, which answers as its own model would: with logits for every column. The mask cannot
be predicted, here as in our sampler.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dllm_sampler.errors import UserError, first_line
from dllm_sampler.models.transformer import Transformer


@dataclass
class Predictor:
    """The network as the published code calls a model."""

    network: Transformer
    mask_id: int
    forwards: int = 0

    @property
    def device(self) -> torch.device:
        return self.network.embed.weight.device

    def __call__(self, ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        assert attention_mask is None
        self.forwards += 1
        logits = self.network(ids)
        logits[..., self.mask_id] = -torch.inf
        return SimpleNamespace(logits=logits)


def load(file: str | Path) -> Callable[..., Tensor]:
    """Return the function `generate` of a file.

    Raises:
        UserError: the file does not exist, cannot be imported, or has no such function.
    """
    named, file = file or "''", Path(file)
    found = importlib.util.spec_from_file_location("official_llada_generate", file)
    if not file.is_file() or found is None or found.loader is None:
        raise UserError(
            "file-missing", f"The Python file {named} does not exist. Name generate.py of a clone of LLaDA."
        )
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # a dataclass looks for its module there
    try:
        found.loader.exec_module(module)
    except Exception as error:  # whatever the file does when it is imported
        raise UserError(
            "function-missing", f"{file} cannot be imported ({type(error).__name__}: {first_line(error)}). Correct it."
        ) from error
    if not callable(getattr(module, "generate", None)):
        raise UserError("function-missing", f"{file} has no function generate. Name generate.py of LLaDA.")
    return module.generate


@torch.no_grad()
def generate(
    official: Callable[..., Tensor], network: Transformer, prompts: Tensor, new_tokens: int, block: int, steps: int,
    mask_id: int,
) -> tuple[Tensor, int]:  # fmt: skip
    """Answers `[B, new_tokens]` to `prompts [B, P]`, greedy, and the number of forwards."""
    model = Predictor(network, mask_id)
    options = {"steps": steps, "gen_length": new_tokens, "block_length": block, "temperature": 0.0, "mask_id": mask_id}
    ids = official(model, prompts, **options)
    return ids[:, prompts.shape[1] :], model.forwards
