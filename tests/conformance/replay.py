"""Making recorded runs again and reporting how they compare."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from dllm_sampler.errors import UserError
from dllm_sampler.host import files
from tests.conformance.builder import Checkpoints, NoCheckpoint, Setup, Task, Unsupported
from tests.conformance.compare import lockstep, mismatch
from tests.conformance.lines import Line, Steps, Tokens
from tests.conformance.systems import find

Status = Literal["passed", "failed", "unsupported"]
STATUSES: tuple[Status, ...] = ("passed", "failed", "unsupported")


@dataclass(frozen=True)
class Verdict:
    """How one line came out; `reason` is empty where it passed."""

    id: str
    system: str
    status: Status
    reason: str = ""


def prepare(line: Line, checkpoints: Checkpoints) -> Task | Verdict:
    """The run of a line, ready to be made; a verdict where no plug-ins do that, or refuse one of its values.

    Raises:
        UserError: an argument is missing or of the wrong kind, or the line's checkpoint cannot be loaded.
    """
    try:
        setup = find(line.system)(line, checkpoints)
        if isinstance(setup, Setup):
            line.committed(setup.rows_first)
    except Unsupported as reason:
        return Verdict(line.id, line.system, "unsupported", str(reason))
    except UserError as error:
        if str(error).startswith(line.where):
            raise
        if isinstance(error, NoCheckpoint):
            raise UserError(error.code, f"{line.where}: {error}") from None
        return Verdict(line.id, line.system, "unsupported", str(error))
    return setup


def replay(line: Line, setup: Task) -> Verdict:
    """Make a run again and compare."""
    if not isinstance(setup, Setup):
        reason = setup()
        return Verdict(line.id, line.system, "failed" if reason else "passed", reason or "")
    try:
        tokens, steps, remasked = _make(line, setup)
    except UserError as error:
        return Verdict(line.id, line.system, "failed", str(error))
    wanted_back = (line.model_extra or {}).get("remasked")
    if wanted_back is not None and remasked[0] != wanted_back:
        return Verdict(line.id, line.system, "failed", f"took back {remasked[0]}, recorded {wanted_back}")
    if setup.lockstep is not None and line.batched:
        steps = lockstep(steps, setup.lockstep)
    if setup.guided is not None:
        steps = [[part for i, step in enumerate(row) for part in [[]] * setup.guided(i) + [step]] for row in steps]
    forwards = len(steps[0]) if setup.steps else None
    if setup.steps is not None:
        steps = [setup.steps()]
    recorded = line.committed(setup.rows_first)
    only_commits = setup.only_commits and recorded is not None
    wanted = list(zip(line.outputs, steps if recorded is None else recorded, strict=True))
    got = list(zip(tokens, steps, strict=True))
    reason = mismatch(wanted, got, line.nfe, setup.wasted_block, only_commits, forwards)
    reason = reason or _lengths(line, setup)
    return Verdict(line.id, line.system, "failed" if reason else "passed", reason or "")


def _lengths(line: Line, setup: Setup) -> str | None:
    """What differs first in the number of positions each forward computed; None where that is not recorded."""
    extra = line.model_extra or {}
    for name, made in setup.counted.items():
        if name in extra and extra[name] != made:
            wanted = extra[name]
            at = next((at for at, pair in enumerate(zip(made, wanted, strict=False)) if pair[0] != pair[1]), None)
            if at is None:
                return f"there are {len(made)} {name}, recorded {len(wanted)}"
            return f"number {at + 1} of the {name} is {made[at]}, recorded {wanted[at]}"
    wanted = extra.get("query_lengths") or [shape[1] for shape in extra.get("forward_shapes", [])]
    if setup.measured is None or not wanted or setup.measured.lengths == wanted:
        return None
    return f"forwards computed {setup.measured.lengths} positions, recorded {wanted}"


def _make(line: Line, setup: Setup) -> tuple[list[Tokens], list[Steps], list[Steps]]:
    """Make a run: each row's tokens, and per forward the positions it committed and those it turned back to noise."""
    size, mask_id = len(line.prompts), setup.sampler.denoiser.spec.mask_id
    before = torch.ones(size, setup.new_tokens, dtype=torch.bool)
    committed: list[Steps] = [[] for _ in range(size)]
    remasked: list[Steps] = [[] for _ in range(size)]
    last = None
    for last in setup.sampler.stream(line.prompts, max_new_tokens=setup.new_tokens, suffix=setup.suffix):
        # Records go by the tokens: a mask token is noise, whether or not the loop takes it for decided.
        noise = last.masked if mask_id is None else last.masked | (last.tokens == mask_id)
        # What a cut takes away is noise no more, though no forward committed it.
        opened = before & ~noise & (last.step_map == last.step - 1)
        for row in range(size):
            if int(last.nfe[row]) == last.step:
                committed[row].append(opened[row].nonzero()[:, 0].tolist())
                remasked[row].append((~before & noise)[row].nonzero()[:, 0].tolist())
        before = noise
    assert last is not None and last.result is not None
    trace = last.result.trace
    ids = trace.ids[:, trace.origin :]
    gone = trace.gone[:, trace.origin :].tolist()
    # What a forward commits and cuts off at once leaves no trace.
    committed = [
        [[at for at in step if gone[row][at] != number] for number, step in enumerate(steps)]
        for row, steps in enumerate(committed)
    ]
    if setup.fill is not None:
        ids = ids.where(~last.masked, setup.fill)
        if not setup.only_commits:
            for steps, masked in zip(committed, last.masked, strict=True):
                _fill(steps, masked.nonzero()[:, 0].tolist(), setup.wasted_block)
    lengths = (trace.end - trace.origin).tolist()
    tokens = [row[:length] for row, length in zip(ids.tolist(), lengths, strict=True)]
    if setup.cut is not None:
        eos = setup.sampler.denoiser.spec.eos_id
        ends = [[0 if setup.empties else i + 1 for i, token in enumerate(row) if token == eos] for row in tokens]
        tokens = [row[: min([setup.cut, *first])] for row, first in zip(tokens, ends, strict=True)]
    if setup.ends is not None:
        noise = last.masked.tolist()
        tokens = [[t for t, open_ in zip(*pair, strict=True) if not open_] for pair in zip(tokens, noise, strict=True)]
        tokens = [_padded(row, setup) for row in tokens]
    if setup.accepted is not None:
        committed = [setup.accepted]
    return tokens, committed, remasked


def _fill(steps: Steps, filled: Tokens, wasted_block: int | None) -> None:
    """List what was filled at the end with the last forward: the one made for nothing, where there was one."""
    if filled and wasted_block is not None and len(steps[-1]) == wasted_block > 1:
        steps.append(filled)
    else:
        steps[-1] = sorted(steps[-1] + filled)


def _padded(row: Tokens, setup: Setup) -> Tokens:
    first = min((i for i, token in enumerate(row) if token in (setup.ends or ())), default=len(row))
    if setup.before:
        return row[:first]
    return row if setup.pad is None else row[: first + 1] + [setup.pad] * len(row[first + 1 :])


def counts(verdicts: Iterable[Verdict]) -> dict[Status, int]:
    """How many lines passed, failed, and have no plug-ins."""
    statuses = [verdict.status for verdict in verdicts]
    return {status: statuses.count(status) for status in STATUSES}


def by_system(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    """Verdicts of each system, in the order of first appearance."""
    grouped: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        grouped.setdefault(verdict.system, []).append(verdict)
    return grouped


def report(verdicts: Sequence[Verdict]) -> str:
    """One line per system with its first mismatch below, then the summary line."""
    grouped = by_system(verdicts)
    width = max(map(len, grouped), default=0)
    lines = []
    for system, own in grouped.items():
        count = counts(own)
        if count["unsupported"] == len(own):
            lines.append(f"{system:<{width}}  unsupported ({len(own)}): {own[0].reason}")
            continue
        rest = f", {count['unsupported']} unsupported" if count["unsupported"] else ""
        lines.append(f"{system:<{width}}  {count['passed']}/{len(own)}{rest}")
        failed = next((verdict for verdict in own if verdict.status == "failed"), None)
        if failed is not None:
            lines.append(f"{'':<{width}}  first mismatch: {failed.id}: {failed.reason}")
    total = counts(verdicts)
    lines.append("conformance: " + ", ".join(f"{total[status]} {status}" for status in STATUSES))
    return "\n".join(lines)


def save(verdicts: Sequence[Verdict], path: Path) -> None:
    """Write the verdicts as JSON, whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    systems = {system: counts(own) for system, own in by_system(verdicts).items()}
    content = {"systems": systems, "lines": [asdict(verdict) for verdict in verdicts]}
    files.write(path, json.dumps(content, indent=1))
