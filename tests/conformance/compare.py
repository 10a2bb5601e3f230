"""The match rule: equal tokens, equal forwards, equal positions committed by each forward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from tests.conformance.lines import Steps, Tokens


def mismatch(
    wanted: Sequence[tuple[Tokens, Steps]],
    got: Sequence[tuple[Tokens, Steps]],
    nfe: int,
    wasted_block: int | None,
    only_commits: bool = False,
    forwards: int | None = None,
) -> str | None:
    """What differs first between the recorded rows (tokens and steps each) and ours; None where they match.

    Args:
        wanted: tokens and steps of each row as recorded.
        got: ours; one entry of steps per forward, empty where it committed nothing.
        nfe: forwards of the recorded run.
        wasted_block: block length of a loop that makes one more forward when a block's first one has filled it;
            such a forward may be missing, together with its empty entry. None: nothing may be missing.
        only_commits: `wanted` has no entries for forwards that committed nothing.
        forwards: of our run, where `steps` are something else.
    """
    for row, ((tokens, steps), (our_tokens, our_steps)) in enumerate(zip(wanted, got, strict=True)):
        made = len(our_steps) if forwards is None else forwards
        if only_commits:
            steps, our_steps = ([step for step in made_steps if step] for made_steps in (steps, our_steps))
        allowed = [(steps, nfe)]
        if wasted_block is not None:
            kept = without_waste(steps, wasted_block)
            allowed.append((kept, nfe - (len(steps) - len(kept))))
        if our_tokens == tokens and (our_steps, made) in allowed:
            continue
        reason = _steps(min((wanted for wanted, _ in allowed), key=lambda w: w != our_steps), our_steps)
        reason = reason or _tokens(tokens, our_tokens) or f"NFE {made}, recorded {nfe}"
        return reason if len(wanted) == 1 else f"row {row}: {reason}"
    return None


def without_waste(steps: Steps, block: int) -> Steps:
    """Recorded steps less the forwards made right after one forward had filled a whole block."""
    before = [[], *steps]
    return [now for last, now in zip(before, steps, strict=False) if now or len(last) != block]


def lockstep(rows: list[Steps], block: int) -> list[Steps]:
    """Steps of rows that ran on their own, as a loop records them whose rows wait for each other in every block."""
    split = [{number: list(part) for number, part in groupby(steps, lambda s: s[0] // block)} for steps in rows]
    longest = {n: max(len(parts.get(n, [])) for parts in split) for n in sorted({n for parts in split for n in parts})}
    return [
        [step for n, size in longest.items() for step in parts.get(n, []) + [[]] * (size - len(parts.get(n, [])))]
        for parts in split
    ]


def _steps(wanted: Steps, got: Steps) -> str | None:
    for number, (a, b) in enumerate(zip(wanted, got, strict=False), 1):
        if a != b:
            return f"forward {number} committed {b}, recorded {a}"
    if len(wanted) != len(got):
        return f"{len(got)} forwards, recorded {len(wanted)}"
    return None


def _tokens(wanted: Tokens, got: Tokens) -> str | None:
    for position, (a, b) in enumerate(zip(wanted, got, strict=False)):
        if a != b:
            return f"token {b} at position {position}, recorded {a}"
    return f"{len(got)} tokens, recorded {len(wanted)}" if len(wanted) != len(got) else None
