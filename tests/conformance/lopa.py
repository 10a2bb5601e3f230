"""The published loops of LoPA and, without branches, of D2F."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict
from typing_extensions import override

from dllm_sampler.blocks.pipeline import Pipeline
from dllm_sampler.cache.d2f import D2FCache
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.d2f import D2F, Sureness
from dllm_sampler.schedulers.lopa import LoPA
from tests.conformance.builder import Checkpoints, Measured, Task, Unsupported
from tests.conformance.lines import Count, Line, Size

SCORES: dict[str, Sureness] = dict(zip(("neg_entropy", "margin", "default"), get_args(Sureness), strict=True))


class Arguments(BaseModel):
    """What both loops take, with their defaults."""

    model_config = ConfigDict(strict=True, frozen=True)

    max_new_tokens: Size = 128
    block_size: Size = 4
    block_add_threshold: float = 0.5
    decoded_token_threshold: float = 0.9
    skip_threshold: float = 1.0
    sampling_strategy: str = "default"
    branching_factor: Size = 2
    branch_topp: float = 0.5
    selection_conf_alpha: float = 0.5
    branch_verification_mode: bool = True
    base_branch_competition: bool = True
    use_uncertainty_logic: bool = True
    use_full_attention: bool = True
    eos_token_id: Count
    mask_token_id: Count | None = None
    temperature: float = 0.0


@dataclass(frozen=True)
class Rounds(LoPA):
    """`LoPA` that takes its rounds down as the published loop does: forks first, the canvas (the anchor) last."""

    rounds: list[dict[str, Any]] = field(default_factory=list)
    shapes: list[list[list[int]]] = field(default_factory=list)  # of the candidates of each round

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, after = super().tell(canvas, query, readout, carry)
        assert self.blocks is not None
        whole = edit if self.forks else self.blocks.progress(canvas, query, readout, edit)
        order = [*range(1, self.forks + 1), 0]
        order = [number for number in order if query.candidates.live is None or query.candidates.live[0, number]]
        first, start, columns = int(canvas.layout.first), int(canvas.start), query.positions[0]
        stops = [
            int(canvas.stop) if query.candidates.stops is None else int(query.candidates.stops[0, number])
            for number in order
        ]
        forks = [int(carry.forks.at[0, number - 1]) - first if number else None for number in order]
        won = order.index(0 if edit.candidate is None else int(edit.candidate))
        commit = (columns[whole.commit[0]] - first).tolist()
        self.rounds.append(
            {
                "forks": forks,
                "lengths": [stop - first for stop in stops],
                "winner": won,
                "commit": [position for position in commit if position != forks[won]],
                "shared_prefix": start - first,
            }
        )
        stored = sum(shape[0][2] for shape in self.shapes)
        self.shapes.append([[stop - stored, stored, start - stored] for stop in stops])
        return edit, after


def lopa(line: Line, checkpoints: Checkpoints) -> Task:
    """Either loop. The published one runs the branches of a round one after another, which we do in one forward.

    Where nothing is left to fork, it runs the same branch twice; that forward is not made again.
    """
    args = line.arguments(Arguments)
    if args.temperature:
        raise Unsupported("only greedy runs can be repeated")
    if args.sampling_strategy not in SCORES:
        raise Unsupported(f"sampling_strategy {args.sampling_strategy} is not one of {', '.join(SCORES)}")
    if not args.branch_verification_mode or not args.base_branch_competition:
        raise Unsupported("without branch_verification_mode or base_branch_competition another branch goes on")
    if args.use_uncertainty_logic != (line.system == "lopa"):
        raise Unsupported(f"use_uncertainty_logic {args.use_uncertainty_logic} is not {line.system}'s")
    score = SCORES[args.sampling_strategy]
    scheduler = Rounds(
        D2F(args.skip_threshold, score),
        forks=args.branching_factor if args.use_uncertainty_logic and args.branching_factor > 1 else 0,
        score=score,
        share=args.branch_topp,
        alpha=args.selection_conf_alpha,
    )
    denoiser = Measured(checkpoints.load(line.model, args.mask_token_id, args.eos_token_id))
    sampler = Sampler(
        denoiser,
        scheduler=scheduler,
        blocks=Pipeline(args.block_size, args.block_add_threshold, args.decoded_token_threshold),
        stop="none",
        cache=D2FCache("full" if args.use_full_attention else "block_causal"),
    )
    tokens = args.max_new_tokens // args.block_size * args.block_size

    def run() -> str | None:
        trace = sampler.generate(line.prompts, max_new_tokens=tokens).trace
        made = trace.ids[0, trace.origin :][trace.generated[0] >= 0].tolist()
        computed = [sum(shape[0] for shape in shapes) for shapes in scheduler.shapes]
        assert denoiser.lengths == computed, "the forwards computed other columns than the rounds say"
        extra = line.model_extra or {}
        rounds = [dict(one) for one in extra.get("rounds", [])]
        shapes, calls = list(extra["forward_shapes"]), 0
        for number, one in enumerate(rounds):
            count = len(one["forks"])
            if one["forks"] == [None, None]:  # the same branch twice: the second call is not made
                one |= {"forks": [None], "lengths": one["lengths"][:1]}
                del shapes[calls + 1]
                count = 1
            calls += count
            reason = _round(number, one, scheduler.rounds)
            if reason is not None:
                return reason
        ours = [shape for one in scheduler.shapes for shape in one]
        if made != line.outputs[0]:
            return f"tokens {made}, recorded {line.outputs[0]}"
        if ours != shapes:
            return f"forwards [computed, before, stored] {ours}, recorded {shapes}"
        return None

    return run


def _round(number: int, wanted: dict[str, Any], rounds: Sequence[dict[str, Any]]) -> str | None:
    """What a round has that the record of it has not."""
    if number >= len(rounds):
        return f"{len(rounds)} rounds, recorded more"
    for name, value in rounds[number].items():
        if value != wanted[name]:
            return f"round {number + 1} has {name} {value}, recorded {wanted[name]}"
    return None
