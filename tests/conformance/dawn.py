"""DAWN's loops for LLaDA and for Dream, but for a walk that writes over the prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict
from torch import Tensor
from typing_extensions import override

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.core.values import Canvas, Readout
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.dawn import Dawn
from tests.conformance.builder import Checkpoints, Setup, Unsupported
from tests.conformance.lines import Line, Size


class Arguments(BaseModel):
    """What both loops take. LLaDA's has `gen_length` and `tau_low`, Dream's `max_new_tokens` and `conf_threshold`."""

    model_config = ConfigDict(strict=True, frozen=True)

    gen_length: Size | None = None
    max_new_tokens: Size | None = None
    block_length: Size = 128
    steps: Size = 128
    temperature: float = 0.0
    remasking: str = "low_confidence"
    mask_id: int | None = None
    tau_sink: float = 0.01
    tau_edge: float = 0.07
    tau_induce: float = 0.7
    tau_low: float | None = None
    conf_threshold: float | None = None


@dataclass(frozen=True)
class Recorded(Dawn):
    """The rule of the published code, with a record of its graphs for one row."""

    graphs: list[dict[str, Any] | None] = field(default_factory=list, repr=False, kw_only=True)

    @override
    def walk(self, rest: Tensor, confidence: Tensor, links: Tensor) -> Tensor:
        taken = super().walk(rest, confidence, links)
        self.graphs.append({"rest": rest[0], "taken": taken[0], "links": links[0]})
        return taken

    @override
    def chosen(self, canvas: Canvas, block: Tensor, confidence: Tensor, readout: Readout) -> Tensor:
        found = super().chosen(canvas, block, confidence, readout)
        last, at = self.graphs.pop(), (block[0] - canvas.layout.first[0]).tolist()
        assert last is not None
        places = last["rest"].nonzero()[:, 0].tolist()
        pairs = [[at[i], at[j]] for i in places for j in places if i < j and bool(last["links"][i, j])]
        picked = [at[i] for i in last["taken"].nonzero()[:, 0].tolist()]
        graph = {"candidates": [at[i] for i in places], "conflicts": pairs, "picked": picked}
        self.graphs.append(graph if places else None)
        return found


def generate(line: Line, checkpoints: Checkpoints) -> Setup:
    """Both loops, which average the layers that the line names."""
    args, extra = line.arguments(Arguments), line.model_extra or {}
    if args.temperature:
        raise Unsupported("no order of draws is published")
    denoiser = checkpoints.load(line.model, args.mask_id)
    length, low = args.gen_length or args.max_new_tokens, args.conf_threshold if args.tau_low is None else args.tau_low
    if length is None or low is None:
        raise Unsupported("the line has no length, or no lower bound")
    layers = len(extra.get("attention_layers", range(4)))
    rule = Recorded(
        low=low,
        induce=args.tau_induce,
        edge=args.tau_edge,
        sink=args.tau_sink,
        exclude="published",
        attention_layers=layers,
    )
    sampler = Sampler(denoiser, scheduler=rule, blocks=FixedBlocks(args.block_length), stop="none", compat=True)
    return Setup(sampler, length, counted={"graph": rule.graphs})
