"""One row for each prompt."""

from dataclasses import dataclass

from dllm_sampler.core.protocols import Particles


@dataclass(frozen=True)
class OneRow(Particles):
    """One row for each prompt, which is the answer."""
