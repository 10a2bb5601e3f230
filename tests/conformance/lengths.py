"""The published loops that change the length of answers: DAEDAL and rho-EOS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import override

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.none import NoCache
from dllm_sampler.core.protocols import Scheduler
from dllm_sampler.core.resize import effect_on
from dllm_sampler.core.spec import ChangingLength
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.engine import layout
from dllm_sampler.published import AboveThreshold, PublishedRhoEos, RenewedGuidance, RestlessEngine
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.daedal import Daedal
from tests.conformance import tilted
from tests.conformance.builder import Checkpoints, Unsupported
from tests.conformance.lines import Count, Line, Size


class Arguments(BaseModel):
    """What both functions take."""

    model_config = ConfigDict(strict=True, frozen=True)

    initial_gen_length: Size
    max_gen_length: Size
    block_length: Size = 32
    temperature: float = Field(default=0.0, ge=0)
    cfg_scale: float = Field(default=0.0, ge=0)
    high_conf_threshold: float = 0.9
    expansion_factor: Size = 8
    eos_check_tokens: Size = 32
    mask_id: Count | None = None
    eos_token_id: Count | None = None
    # The published rho-EOS takes these too, and does not use them.
    low_conf_threshold: float = 0.1
    eos_confidence_threshold: float = 0.5
    expand_eos_confidence_threshold: float = 0.9


class RhoArguments(Arguments):
    """What rho-EOS's takes besides."""

    low_density_threshold: float = 0.4
    high_density_threshold: float = 0.6
    scheduler: Literal["exp", "linear", "const"] = "exp"


@dataclass
class Step:
    """What a forward led to: the row's length before it, what was committed, and how the length changed."""

    length: int
    commits: list[int]
    edits: list[list[Any]]


@dataclass
class Noted(NoCache):
    """Takes down every step of each row, in the words of the records."""

    rows: dict[int, list[Step]] = field(default_factory=dict, repr=False, compare=False)

    @override
    def observe(self, canvas: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        assert edit.resize is not None
        moved = effect_on(canvas, edit.resize, ~canvas.done)
        wrote = edit.commit & canvas.eligible(query.positions)
        count = torch.zeros_like(canvas.end) if edit.resize.count is None else edit.resize.count
        behind = canvas.layout.first if edit.resize.behind is None else edit.resize.behind
        for row in (~canvas.done).nonzero()[:, 0].tolist():
            first = int(canvas.layout.first[row])
            before, after = int(canvas.end[row]) - first, int(moved.end[row]) - first
            inserted, edits = int(count[row]), list[list[Any]]()
            if inserted:
                edits.append(["insert_mask", int(behind[row]) - first, inserted])
            change = after - before - inserted
            if change > 0:
                edits.append(["append_mask" if edit.resize.masked[row] else "append_eos", before, change])
            if change < 0:
                edits.append(["cut", after, -change])
            commits = (query.positions[row][wrote[row]] - first).tolist()
            self.rows.setdefault(row, []).append(Step(before, commits, edits))


def daedal(line: Line, checkpoints: Checkpoints) -> Callable[[], str | None]:
    """DAEDAL's `generate`."""
    args = line.arguments(Arguments)
    if args.cfg_scale > 0:
        raise Unsupported("the published loop fails under guidance as soon as the length changes")
    scheduler = Daedal(
        AboveThreshold(args.high_conf_threshold),
        initial=args.initial_gen_length,
        expand=args.expansion_factor,
        eos_tokens=args.eos_check_tokens,
        grow=args.eos_confidence_threshold,
        insert=args.expand_eos_confidence_threshold,
        unsure=args.low_conf_threshold,
    )
    return _run(line, checkpoints, args, scheduler)


def rho_eos(line: Line, checkpoints: Checkpoints) -> Callable[[], str | None]:
    """rho-EOS's `generate`."""
    args = line.arguments(RhoArguments)
    scheduler = PublishedRhoEos(
        AboveThreshold(args.high_conf_threshold),
        initial=args.initial_gen_length,
        expand=args.expansion_factor,
        eos_tokens=args.eos_check_tokens,
        low=args.low_density_threshold,
        high=args.high_density_threshold,
        scale=args.scheduler,
    )
    return _run(line, checkpoints, args, scheduler, args.max_gen_length)


def _run(
    line: Line, checkpoints: Checkpoints, args: Arguments, scheduler: Scheduler, most: int | None = None
) -> Callable[[], str | None]:
    """A run of at most `most` forwards, ready to be made and compared."""
    if args.temperature > 0:
        raise Unsupported("no order of draws is published")
    denoiser, notes = checkpoints.load(line.model, args.mask_id, args.eos_token_id), Noted()
    sampler = Sampler(
        RenewedGuidance(denoiser, args.cfg_scale) if args.cfg_scale > 0 else denoiser,
        scheduler=scheduler,
        blocks=FixedBlocks(args.block_length),
        stop="none",
        cache=notes,
        guide=tilted.guides(line),
        max_steps=most,
        compat=True,
    )

    def replay() -> str | None:
        room = max(args.initial_gen_length, args.max_gen_length)
        made = _restless if most is not None else _alone
        tokens = made(sampler, line.prompts, room)
        return mismatch(line, [notes.rows[row] for row in range(len(tokens))], tokens)

    return replay


def _alone(sampler: Sampler, prompts: list[list[int]], room: int) -> list[list[int]]:
    """Tokens of each answer, by the rule: rows do not depend on one another."""
    trace = sampler.generate(prompts, max_new_tokens=room).trace
    return [row[trace.origin : end] for row, end in zip(trace.ids.tolist(), trace.end.tolist(), strict=True)]


def _restless(sampler: Sampler, prompts: list[list[int]], room: int) -> list[list[int]]:
    """Tokens of each answer, by rho-EOS's published loop: no row of a batch rests before the others."""
    plugins, spec = sampler.plugins, sampler.denoiser.spec
    changing = plugins.scheduler.traits.find(ChangingLength)
    canvas = layout.canvas(
        prompts, room, [0] * len(prompts), spec, plugins.blocks, sampler.noise, cuts=False, changing=changing
    )
    assert sampler.max_steps is not None
    for state in RestlessEngine(sampler.denoiser, plugins).run(canvas, sampler.max_steps):
        canvas = state.canvas
    rows = zip(canvas.ids.tolist(), canvas.layout.first.tolist(), canvas.end.tolist(), strict=True)
    return [ids[first:end] for ids, first, end in rows]


def mismatch(line: Line, rows: list[list[Step]], tokens: list[list[int]]) -> str | None:
    """What differs first between a record and the steps and tokens of each row; None where they match.

    In a recorded batch of DAEDAL rows wait for each other before the end tokens are appended.
    """
    extra = line.model_extra or {}
    grows = "nfe_stage1" in extra
    early = [len(list(takewhile(lambda step: not step.commits, steps))) if grows else 0 for steps in rows]
    first = max(early)
    for row, (steps, own) in enumerate(zip(rows, early, strict=True)):
        waits = [Step(steps[own - 1].length, [], []) for _ in range(first - own)]
        rows[row] = steps[: max(own - 1, 0)] + waits + steps[max(own - 1, 0) :]
    if extra.get("nfe_stage1", first) != first:
        return f"{first} forwards before the first commit, recorded {extra['nfe_stage1']}"
    made = max(map(len, rows))
    if made != line.nfe:
        return f"NFE {made}, recorded {line.nfe}"
    recorded = {"gen_lengths": extra["gen_lengths"], "edits": extra["edits"], "steps": line.steps or []}
    for row, steps in enumerate(rows):
        for number, step in enumerate(steps):
            ours = {"gen_lengths": step.length, "edits": step.edits, "steps": step.commits}
            for name, values in recorded.items():
                wanted = values[number][row] if line.batched else values[number]
                if wanted != ours[name]:
                    return f"row {row}, forward {number + 1}: {name} {ours[name]}, recorded {wanted}"
        wanted = line.outputs[row]
        if tokens[row] != wanted:
            return f"row {row}: tokens {tokens[row]}, recorded {wanted}"
    return None
