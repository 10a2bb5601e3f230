"""Runs real schedulers on exact test beds and compares validity with what it must be: expected, measured, z.

`python -m tests.tables.closed_form [--rows 4000] [--items 2 3 4 5] [--seed 0] [--only shuffle]`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations
from math import copysign, inf, sqrt
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from typing_extensions import override

from benchmarks.options import positive
from dllm_sampler.cli.terminal import Parser, command
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.select import top
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError, unknown
from dllm_sampler.eval.testbeds.denoiser import LawDenoiser
from dllm_sampler.eval.testbeds.laws import LAWS, Listed, Shuffle
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.score import Score, rate, score_needs
from tests.tables import exact, formulas

COMMAND = "python -m tests.tables.closed_form"
EVEN_TIES = 1e-3  # a temperature so low that it decides nothing but ties
LARGE = (10, 20)  # items where only closed forms say what is right
FAR = 4.5  # standard deviations; one cell in 150,000 lies further by chance


@dataclass(frozen=True)
class GivenSizes(Scheduler):
    """This many positions per step, the best by a score; more steps than sizes repeat the last size.

    `fixed` divides a block evenly and gives the remainder to its first steps; here the sizes are free.
    """

    sizes: tuple[int, ...]
    score: Score = "random"

    @property
    def needs(self) -> frozenset[str]:
        """The score's statistic."""
        return score_needs(self.score)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        sizes = torch.tensor(self.sizes, device=canvas.ids.device)
        count = sizes[canvas.age.clamp(max=len(self.sizes) - 1)]
        score = rate(self.score, canvas, query, readout)
        return Edit(readout.token[:, 0], top(score, canvas.eligible(query.positions), count)), carry


@dataclass(frozen=True)
class GivenParts(Scheduler):
    """Positions of the generation, counted from 0, that each step commits."""

    parts: tuple[tuple[int, ...], ...]

    def init(self, canvas: Canvas) -> Carry:
        """`[B, L+1]` the step of each column."""
        turn = torch.zeros_like(canvas.ids)
        for step, part in enumerate(self.parts):
            turn.scatter_(1, canvas.layout.first[:, None] + torch.tensor(part, device=turn.device), step)
        return turn

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Tensor) -> tuple[Edit, Carry]:
        due = carry.gather(1, query.positions) <= canvas.step[:, None]
        return Edit(readout.token[:, 0], due & canvas.eligible(query.positions)), carry


@dataclass(frozen=True)
class Cell:
    """One comparison: a law, a sampler, and the share of valid results it must have."""

    operation: str
    n: int
    method: str
    scheduler: object
    valid: Fraction
    nfe: Fraction | None = None  # mean forwards, where known
    temperature: float = 1.0
    blocks: object = "full"


@dataclass(frozen=True)
class Found:
    """What a sampler did: share of valid rows, mean forwards, and how far both are from what they must be."""

    valid: float
    nfe: float
    z: float
    z_nfe: float | None


def outcomes(law: Listed | Shuffle) -> exact.Outcomes:
    """What may come out."""
    if isinstance(law, Listed):
        return law.outcomes
    return tuple(permutations(range(law.n)))[int(law.moved) :]


def distance(mean: float, expected: float, spread: float, rows: int) -> float:
    """Standard deviations between a mean over `rows` and its expectation."""
    gap = mean - expected
    return gap / (spread / sqrt(rows)) if spread else 0.0 if abs(gap) < 1e-12 else copysign(inf, gap)


def run(cell: Cell, rows: int, seed: int = 0) -> Found:
    """Sample `rows` rows."""
    law = LAWS[cell.operation](cell.n)
    sampler = Sampler(
        LawDenoiser(law),
        scheduler=cell.scheduler,
        blocks=cell.blocks,
        stop="none",
        cache="none",
        temperature=cell.temperature,
    )
    result = sampler.generate([[0]] * rows, max_new_tokens=law.length, seed=seed * rows)
    nfe, valid = result.nfe.double(), law.valid(result.tokens).double()
    p = float(cell.valid)
    z = distance(float(valid.mean()), p, sqrt(p * (1 - p)), rows)
    z_nfe = None if cell.nfe is None else distance(float(nfe.mean()), float(cell.nfe), float(nfe.std()), rows)
    return Found(float(valid.mean()), float(nfe.mean()), z, z_nfe)


def cells(items: Sequence[int]) -> Iterator[Cell]:
    """Every comparison."""
    for operation in LAWS:
        for n in items:
            if operation == "latin_square" or n < 2 + (operation == "shuffle_not_identity"):
                continue
            yield from _orders(operation, n)
    for n in (*items, *LARGE):
        if n >= 3:
            yield from _adaptive(n)
            yield from _long(n)
    for n in (2, 3, 4):
        yield from _squares(n)


def _orders(operation: str, n: int) -> Iterator[Cell]:
    """Fixed sizes per step, in an order that does not depend on what is drawn."""
    law = LAWS[operation](n)
    valid, length = outcomes(law), law.length
    for steps in range(1, length + 1):
        sizes = tuple(length // steps + (step < length % steps) for step in range(steps))
        took = Fraction(steps)
        expected = exact.decode(valid, sizes, "random").valid
        for name in ("random_order", "fixed"):
            rule = {"name": name, "steps": steps, **({"score": "random"} if name == "fixed" else {})}
            yield Cell(operation, n, f"{name} random steps={steps}", rule, expected, took)
        expected = exact.decode(valid, sizes, "random", greedy=True).valid
        rule = {"name": "random_order", "steps": steps}
        yield Cell(operation, n, f"random_order greedy steps={steps}", rule, expected, took, EVEN_TIES)
        rule = {"name": "fixed", "steps": steps, "score": "position"}
        yield Cell(operation, n, f"fixed position steps={steps}", rule, exact.decode(valid, sizes, "l2r").valid, took)
    for k in range(1, length + 1):
        sizes, rule = formulas.evenly(length, k), {"name": "leftright", "tokens_per_step": k}
        expected, took = exact.decode(valid, sizes, "l2r").valid, Fraction(len(sizes))
        yield Cell(operation, n, f"leftright k={k}", rule, expected, took)
        expected = exact.decode(valid, sizes, "l2r", greedy=True).valid
        yield Cell(operation, n, f"leftright greedy k={k}", rule, expected, took, EVEN_TIES)


def _adaptive(n: int) -> Iterator[Cell]:
    """Rules that look at the marginals, on the two operations whose marginals are simple enough."""
    for gamma in (0.95, 0.77, 0.6, 0.45, 0.3, 0.22):
        rule, label = {"name": "threshold", "threshold": gamma}, f"threshold {gamma}"
        sizes = formulas.threshold_shuffle(n, gamma)
        yield Cell("shuffle", n, label, rule, formulas.shuffle(sizes))
        valid, forwards = formulas.threshold_replace_random(n, gamma)
        yield Cell("replace_random", n, label, rule, valid, forwards)
        sure = 1 - 1 / n >= gamma
        valid, forwards = (Fraction(0), Fraction(1)) if sure else (Fraction(1), Fraction(n))
        yield Cell("replace_random", n, f"{label} greedy", rule, valid, forwards, EVEN_TIES)
    for factor in (0.7, 1.1, 1.3, 1.6, 1.9):
        sizes, rule = formulas.factor_shuffle(n, factor), {"name": "factor", "factor": factor}
        yield Cell("shuffle", n, f"factor {factor}", rule, formulas.shuffle(sizes))
    for gamma in (0.1, 0.5, 0.8, 1.2, 2.0, 3.0):
        rule, label = {"name": "entropy_bound", "gamma": gamma}, f"entropy_bound {gamma}"
        yield Cell("shuffle", n, label, rule, formulas.shuffle(formulas.bound_shuffle(n, gamma)))
        expected = formulas.replace_random(formulas.bound_replace_random(n, gamma))
        yield Cell("replace_random", n, label, rule, expected)
    for k in range(2, min(n, 5)):
        sizes = formulas.evenly(n, k)
        expected = formulas.lowconf_replace_random(sizes)
        yield Cell("replace_random", n, f"confidence k={k}", GivenSizes(sizes, "confidence"), expected)
        if n % k == 0:
            rule = {"name": "fixed", "steps": n // k}
            yield Cell("replace_random", n, f"fixed confidence k={k}", rule, expected)


def _long(n: int) -> Iterator[Cell]:
    """Closed forms at any length."""
    for k in (2, 4, n):
        sizes, rule = formulas.evenly(n, k), {"name": "leftright", "tokens_per_step": k}
        for operation, formula in (("shuffle", formulas.shuffle), ("replace_random", formulas.replace_random)):
            yield Cell(operation, n, f"leftright k={k}", rule, formula(sizes))
            yield Cell(operation, n, f"random k={k}", GivenSizes(sizes), formula(sizes))
        yield Cell("insert_random", n, f"leftright k={k}", rule, formulas.insert_l2r(formulas.evenly(n + 1, k)))
        yield Cell("remove_random", n, f"leftright k={k}", rule, formulas.remove_l2r(formulas.evenly(n - 1, k)))


def _squares(n: int) -> Iterator[Cell]:
    """Latin squares: rows, broken diagonals, pairs."""
    valid = outcomes(LAWS["latin_square"](n))
    cells = range(n * n)
    rows = [tuple(cells[start : start + n]) for start in range(0, n * n, n)]
    lines = [tuple(row * n + (row + shift) % n for row in range(n)) for shift in range(n)]
    pairs = [tuple(cells[start : start + 2]) for start in range(0, n * n, 2)]
    whole = exact.decode_parts(valid, rows).valid
    by_row = {"name": "fixed", "steps": n}
    yield Cell("latin_square", n, "rows", by_row, whole, Fraction(n), blocks={"name": "fixed", "length": n})
    diagonal = exact.decode_parts(valid, lines).valid
    yield Cell("latin_square", n, "broken diagonals", GivenParts(tuple(lines)), diagonal, Fraction(n))
    rule = {"name": "leftright", "tokens_per_step": 2}
    yield Cell("latin_square", n, "leftright k=2", rule, exact.decode_parts(valid, pairs).valid)


@command(COMMAND)
def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; 1 where a cell is too far off for chance, 2 after a mistake in the arguments."""
    parser = Parser(prog=COMMAND, description="Compare schedulers on exact test beds with the validity they must have.")
    parser.add_argument("--rows", type=positive, default=4000, help="samples per cell")
    parser.add_argument("--items", type=positive, nargs="+", default=[2, 3, 4, 5], help="list lengths to enumerate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one operation")
    options: Any = parser.parse_args(arguments)
    if options.only and options.only not in LAWS:
        raise unknown("operation", options.only, LAWS)
    if max(options.items) > 6:
        raise UserError(
            "made-up", "--items must not be above 6: enumeration takes too long, longer lists are compared anyway"
        )
    torch.set_num_threads(1)
    table = Table("operation", "n", "method", "expected", "measured", "z", "forwards", "z", box=None)
    far = 0
    chosen = [cell for cell in cells(options.items) if options.only in (None, cell.operation)]
    for cell in chosen:
        found = run(cell, options.rows, options.seed)
        z_nfe = found.z_nfe or 0.0
        off = max(abs(found.z), abs(z_nfe)) > FAR
        far += off
        table.add_row(
            cell.operation,
            str(cell.n),
            cell.method,
            f"{float(cell.valid):.4f}",
            f"{found.valid:.4f}",
            f"{found.z:+.2f}",
            f"{found.nfe:.3f}",
            "" if found.z_nfe is None else f"{z_nfe:+.2f}",
            style="red" if off else None,
        )
    Console(width=120).print(table)
    print(f"{len(chosen)} cells of {options.rows} samples, {far} further than {FAR} standard deviations")
    return int(far > 0)


if __name__ == "__main__":
    raise SystemExit(main())
