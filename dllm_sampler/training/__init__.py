"""Trainers on transformers' `Trainer`, and their pieces: losses, trajectories, rewards."""

from importlib import import_module
from typing import Any

_MODULES = {
    "MaskedDiffusion": "sft", "Distill": "distill", "TrajectoryGRPO": "grpo",
    "Deer": "deer", "Filter": "filter", "Mini": "mini",
}  # fmt: skip
_HOMES = {method + kind: module for method, module in _MODULES.items() for kind in ("Config", "Trainer")}
__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a trainer when it is asked for: transformers takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
