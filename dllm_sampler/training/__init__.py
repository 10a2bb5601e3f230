"""Trainers on transformers' `Trainer`, and their pieces: losses, trajectories, rewards."""

from importlib import import_module
from typing import Any

_HOMES = {
    "MaskedDiffusionConfig": "sft",
    "MaskedDiffusionTrainer": "sft",
    "DistillConfig": "distill",
    "DistillTrainer": "distill",
    "TrajectoryGRPOConfig": "grpo",
    "TrajectoryGRPOTrainer": "grpo",
    "DeerConfig": "deer",
    "DeerTrainer": "deer",
    "FilterConfig": "filter",
    "FilterTrainer": "filter",
    "MiniConfig": "mini",
    "MiniTrainer": "mini",
}
__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a trainer when it is asked for: transformers takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
