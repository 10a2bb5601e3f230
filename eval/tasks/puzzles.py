"""Latin squares and small sudokus (arXiv 2510.04767)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from random import Random
from string import ascii_uppercase, digits
from typing import Any

from dllm_sampler.core.checks import check_count
from dllm_sampler.eval.tasks.base import Answer, Sample
from dllm_sampler.eval.tasks.drawn import Drawn, Prompt, chat
from dllm_sampler.models.mini_tasks import sudokus

SIDE = 4  # of a sudoku, with boxes of 2 by 2


@dataclass
class LatinSquare(Drawn):
    """Any latin square of given symbols.

    Args:
        side: number of rows and of columns.
        compat: count a line as a row if the *set* of its cells is that of the symbols, as published. A line with
            repeated cells then passes.
    """

    name = "latin_square"
    many = True

    side: int = 4
    compat: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("task.side", self.side, 2, most=9)

    @property
    def max_new_tokens(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The length of the canvas: two tokens for each cell, rounded up to a multiple of 32, at least 64."""
        return max(64, 32 * ceil(2 * self.side**2 / 32))

    def draw(self, rng: Random, index: int) -> tuple[Prompt, Mapping[str, Any]]:
        """Draw the symbols, and an example with other symbols."""
        shown, asked = (rng.sample(ascii_uppercase + digits, self.side) for _ in range(2))
        rows, columns = (rng.sample(range(self.side), self.side) for _ in range(2))
        square = "\n".join(",".join(shown[(row + column) % self.side] for column in columns) for row in rows)
        return chat(self._message(asked), self._message(shown), square), {"symbols": asked}

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """Grade an answer. `score`: its rows make a latin square. `score_strict`: it has no other lines or spaces."""
        symbols, lines = set(sample.facts["symbols"]), answer.text.strip().splitlines()
        cells = [[cell.strip() for cell in line.split(",")] for line in lines]
        rows = [row for row in cells if set(row) == symbols and (self.compat or len(row) == self.side)][: self.side]
        whole = len(rows) == self.side
        columns = [set(column) == symbols for column in zip(*rows, strict=not self.compat)]
        right = whole and all(columns)
        foreign = any(cell and cell not in symbols for row in cells for cell in row)
        return {
            "score": float(right),
            "score_strict": float(right and len(lines) == self.side and all(" " not in line for line in lines)),
            "error_rows": float(not whole),
            "error_columns": float(whole and not right),
            "error_duplicate": float(any(len(set(row)) < len(row) for row in cells)),
            "error_unknown": float(foreign),
            "error_truncated": float(not whole and len(answer.ids) >= self.max_new_tokens),
        }

    def _message(self, symbols: Sequence[str]) -> str:
        return (
            f"Write down a Latin square with {self.side} rows and {self.side} columns, made of the symbols"
            f" {', '.join(symbols)}: each of them once in every row and once in every column. Answer with the rows"
            " alone, one per line, cells separated by commas."
        )


@dataclass
class Sudoku(Drawn):
    """A sudoku of 4 by 4 cells with one solution.

    Args:
        holes: number of cells to fill (published: 4, later 8).
    """

    name = "sudoku"
    max_new_tokens = 64

    holes: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("task.holes", self.holes, most=10)

    def draw(self, rng: Random, index: int) -> tuple[Prompt, Mapping[str, Any]]:
        """Draw a puzzle, and an example."""
        (shown, answer), (asked, solution) = self._puzzle(rng), self._puzzle(rng)
        return chat(self._message(asked), self._message(shown), answer), {"puzzle": asked, "solution": solution}

    def grade(self, sample: Sample, answer: Answer) -> Mapping[str, float]:
        """Grade an answer.

        `score`: the lines that have four digits, once spaces and commas are removed, are the solution.
        `score_strict`: the whole text is the solution, but for white space around it.
        """
        solution, puzzle = str(sample.facts["solution"]), str(sample.facts["puzzle"])
        lines = [line.replace(" ", "").replace(",", "") for line in answer.text.splitlines()]
        rows = [line for line in lines if len(line) == SIDE and line.isascii() and line.isdigit()]
        found, whole = "\n".join(rows), len(rows) == SIDE
        kept = whole and all(given in ("0", cell) for given, cell in zip(puzzle, found, strict=True))
        return {
            "score": float(found == solution),
            "score_strict": float(answer.text.strip() == solution),
            "error_rows": float(not whole),
            "error_given": float(whole and not kept),
            "error_cell": float(whole and kept and found != solution),
            "error_truncated": float(not whole and len(answer.ids) >= self.max_new_tokens),
        }

    def _puzzle(self, rng: Random) -> tuple[str, str]:
        grids = [grid.replace(", ", "") for grid in sudokus()]
        while True:
            cells = rng.choice(grids)
            order, open_cells = rng.sample(range(SIDE**2), SIDE**2), set[int]()
            for place in order:
                trial = open_cells | {place}
                kept = [place for place in range(SIDE**2) if place not in trial]
                if sum(all(one[at] == cells[at] for at in kept) for one in grids) == 1:
                    open_cells = trial
                if len(open_cells) == self.holes:
                    puzzle = ["0" if at in open_cells else cell for at, cell in enumerate(cells)]
                    return _lines(puzzle), _lines(cells)

    def _message(self, puzzle: str) -> str:
        return (
            "Fill in this sudoku of 4 rows and 4 columns: each of the digits 1 to 4 stands once in every row, every"
            " column and every box of 2 by 2, and a 0 is a cell to fill. Answer with the 4 rows alone, one per"
            f" line.\n\n{puzzle}"
        )


def _lines(cells: Sequence[str]) -> str:
    return "\n".join("".join(cells[start : start + SIDE]) for start in range(0, SIDE**2, SIDE))
