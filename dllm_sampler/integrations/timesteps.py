"""The steps of a block as diffusers counts them: a time that falls from 1, and the number of the step."""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_sampler.core.checks import check_count
from dllm_sampler.errors import UserError


class Timesteps:
    """N steps per block, at the times 1, 1 - 1/N, ... 1/N."""

    num_inference_steps: int | None = None
    timesteps: Tensor = torch.empty(0)  # [N] float32
    step_index: int | None = None  # the number, from 0, of the next step; None: the block has not been entered
    begin_index: int | None = None  # the step at which it is entered, where a pipeline has said so

    @property
    def steps(self) -> int:
        """N.

        Raises:
            UserError: it has not been said.
        """
        if self.num_inference_steps is None:
            raise UserError("call set_timesteps before step: it says how many forwards a block may take")
        return self.num_inference_steps

    def clock(self, num_inference_steps: int, device: str | torch.device | None) -> None:
        """Set N, and begin with the first step."""
        check_count("num_inference_steps", num_inference_steps)
        self.num_inference_steps = num_inference_steps
        self.timesteps = torch.arange(num_inference_steps, 0, -1, device=device).float() / num_inference_steps
        self.step_index = self.begin_index = None

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Say at which step a block is entered, so that no timestep must be read from the device."""
        self.begin_index = begin_index

    def index_for_timestep(self, timestep: float | Tensor) -> int:
        """The number, from 0, of the step at a time."""
        return self.steps - round(float(timestep) * self.steps)

    def index(self, timestep: int | float | Tensor) -> int:
        """The number, from 0, of this step: `timestep` itself if that is whole, else the next one of the block."""
        if isinstance(timestep, int) or (isinstance(timestep, Tensor) and not timestep.is_floating_point()):
            return int(timestep)
        if self.step_index is None:
            return self.index_for_timestep(timestep) if self.begin_index is None else self.begin_index
        return self.step_index
