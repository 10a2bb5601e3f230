"""SVDD's recorded runs on a denoiser and a reward in closed form: kernel and noise are the code's, the rest is ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Carry, Plan
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Canvas, Edit, Query, Readout, Spent
from dllm_sampler.models.denoiser import spent
from dllm_sampler.published.svdd import AbsorbingKernel
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.svdd import SoftValueGuided
from tests.conformance.builder import Checkpoints
from tests.conformance.lines import Line
from tests.conformance.lines import check as parsed

LENGTH, MASK = 6, 4  # positions; symbols below the mask
Cell = Annotated[int, Field(ge=0, le=MASK)]
Canvases = list[Annotated[list[Cell], Field(min_length=LENGTH, max_length=LENGTH)]]


class Run(BaseModel):
    """One recorded run of a batch, as the trace file has it."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    id: str
    variant: Literal["mc", "pm", "zeros"]
    batch: Annotated[int, Field(ge=1)]
    candidates: Annotated[int, Field(ge=1)]
    steps: Annotated[int, Field(ge=1)]
    seed: int
    states: list[Canvases]  # after each step
    output: Canvases


@dataclass(frozen=True)
class ClosedForm:
    """Logits in closed form of the positions behind the prompt; the head is the identity."""

    @property
    def spec(self) -> ModelSpec:
        """See `Denoiser.spec`; there is no end token."""
        return ModelSpec(
            vocab_size=MASK + 1,
            mask_id=MASK,
            eos_id=MASK + 1,
            pad_id=MASK + 1,
            max_positions=2 * LENGTH,
            num_layers=0,
            num_kv_heads=0,
            head_dim=0,
            dtype=torch.float32,
            device=torch.device("cpu"),
            cacheable=False,
        )

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        """Logits `[R, V]`."""
        candidates = query.ids.shape[1]
        rows = canvas.ids[:, None].expand(-1, candidates, -1)  # [B, K, L+1]
        rows = rows.scatter(2, query.positions[:, None].expand_as(query.ids), query.ids)
        answer = canvas.answer()[:, None].expand(-1, candidates, -1)
        table = torch.zeros(*rows.shape, MASK + 1)
        table.scatter_(2, answer[..., None].expand(*answer.shape, MASK + 1), self.logits(rows.gather(2, answer)))
        at = query.positions[:, None, :, None].expand(-1, candidates, -1, MASK + 1)
        return plan.head_rows.pick(table.gather(2, at)), spent(canvas, plan)

    @staticmethod
    def logits(ids: Tensor) -> Tensor:
        """`[..., LENGTH, V] float32` of canvases `[..., LENGTH]`."""
        place, token = torch.arange(LENGTH).double(), torch.arange(MASK + 1).double()
        context = (ids.double() + 1) @ torch.cos(0.5 * (place[:, None] - place))  # [..., LENGTH]
        angle = 1.7 * (place + 1)[:, None] * (token + 1) + 0.9 * context[..., None]
        return (2 * torch.sin(angle)).float()

    def head(self, hidden: Tensor) -> Tensor:
        """The logits themselves, as a copy: the readout overwrites it."""
        return hidden.clone()


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The runs' reward in float32; masks count for nothing, so it is the value of a candidate with masks too."""
    return [float(torch.tensor(_reward(ids), dtype=torch.float32)) for ids in completion_ids]


def _reward(ids: list[int]) -> float:
    there = [(place, token) for place, token in enumerate(ids) if token != MASK]
    alone = sum(math.cos(1.3 * (token + 1) * (place + 1)) for place, token in there) / LENGTH
    return alone + 0.3 * sum(one == other != MASK for one, other in pairwise(ids))


@dataclass(frozen=True)
class Noted(AbsorbingKernel):
    """The kernel, with a list of the canvases that it steps from."""

    states: dict[int, list[list[int]]] = field(init=False, default_factory=dict, repr=False, compare=False)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        step = int(canvas.step.masked_fill(canvas.done, 0).max())
        self.states[step] = canvas.ids.gather(1, canvas.answer()).tolist()
        return super().tell(canvas, query, readout, carry)


def check(line: Run) -> str | None:
    """The first difference between a recorded run and ours: states, output, more forwards than steps; None: none.

    The recorded loop of `pm` calls the model once for the canvas and once for each candidate. Ours makes one forward of
    all candidates, which is the next step's too, so the numbers of calls are not compared.
    """
    kernel = Noted(line.steps, line.seed)
    value = "fill" if line.variant == "pm" else "masked"
    rule = SoftValueGuided(candidates=line.candidates, inner=kernel, reward=reward, value=value)
    sampler = Sampler(ClosedForm(), scheduler=rule, blocks="full", stop="none", cache="none")
    result = sampler.generate([[0]] * line.batch, max_new_tokens=LENGTH)
    output = result.tokens.tolist()
    for step, state in enumerate(line.states, 1):
        found = kernel.states.get(step, output)  # rows that are full take no further step
        if found != state:
            return f"after step {step} the canvases are {found} and should be {state}"
    if output != line.output:
        return f"the output is {output} and should be {line.output}"
    if int(result.nfe.max()) > line.steps + 1:
        return f"{int(result.nfe.max())} forwards were made in {line.steps} steps"
    return None


def recorded(line: Line, _: Checkpoints) -> Callable[[], str | None]:
    """What replays a line."""
    extra = line.model_extra or {}
    given = {**extra, "id": line.id, "steps": extra.get("length"), "output": line.output_ids}
    return partial(check, parsed(Run, given, line.where))
