"""Sample from masked-diffusion language models: any scheduler, cache and model in one loop."""

from importlib import import_module
from typing import TYPE_CHECKING

from dllm_sampler.errors import NotFiniteError, UserError
from dllm_sampler.host.version import __version__

if TYPE_CHECKING:
    from dllm_sampler.core.noise import CounterNoise, ReplayNoise
    from dllm_sampler.core.protocols import (
        Blocks,
        Cache,
        Context,
        Denoiser,
        Guide,
        Meeting,
        Particles,
        Resampled,
        Scheduler,
        Stop,
    )
    from dllm_sampler.core.spec import ModelSpec, Traits
    from dllm_sampler.core.values import Canvas, Edit, Query, Readout
    from dllm_sampler.generation.speculative import SpeculativeSampler
    from dllm_sampler.inputs.prompts import Infill
    from dllm_sampler.models.denoiser import TransformerDenoiser
    from dllm_sampler.models.transformer import Transformer, TransformerConfig
    from dllm_sampler.result import Answer, Commits, Result, Speculation, Trace
    from dllm_sampler.sampler import Sampler

_HOMES = {
    "core.values": ("Canvas", "Edit", "Query", "Readout"),
    "generation.speculative": ("SpeculativeSampler",),
    "core.noise": ("CounterNoise", "ReplayNoise"),
    "core.protocols": (
        *("Blocks", "Cache", "Context", "Denoiser", "Guide", "Meeting", "Particles", "Resampled"),
        *("Scheduler", "Stop"),
    ),
    "core.spec": ("ModelSpec", "Traits"),
    "inputs.prompts": ("Infill",),
    "result": ("Answer", "Commits", "Result", "Speculation", "Trace"),
    "models.denoiser": ("TransformerDenoiser",),
    "models.transformer": ("Transformer", "TransformerConfig"),
    "sampler": ("Sampler",),
}

__all__ = [
    "Answer",
    "Blocks",
    "Cache",
    "Canvas",
    "Commits",
    "Context",
    "CounterNoise",
    "Denoiser",
    "Edit",
    "Guide",
    "Infill",
    "Meeting",
    "ModelSpec",
    "NotFiniteError",
    "Particles",
    "Query",
    "Readout",
    "ReplayNoise",
    "Resampled",
    "Result",
    "Sampler",
    "Scheduler",
    "Speculation",
    "SpeculativeSampler",
    "Stop",
    "Trace",
    "Traits",
    "Transformer",
    "TransformerConfig",
    "TransformerDenoiser",
    "UserError",
    "__version__",
]


def __dir__() -> list[str]:
    """Return all public names, also those that are not imported yet."""
    return sorted({*__all__, *globals()})


def __getattr__(name: str) -> object:
    """Import a public name at its first use, so that `dllm-sample --help` does not import torch."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"dllm_sampler.{module}"), name)
    raise AttributeError(f"module 'dllm_sampler' has no attribute '{name}'")
