"""Rewards inside a generation against the best of several answers.

    python benchmarks/rewards.py                          # mini, three minutes on one core

4x4 latin squares, and sudokus with 3 or 4 given cells, which mini takes for latin squares: it was not trained on
boxes. The reward is the share of rows, columns and boxes that are right. Answers of 20 tokens are drawn at temperature
1, in 6 forwards. `svdd` takes one of M candidates in each step; `best` draws M answers and keeps the one with the
highest reward. `computed` counts the positions that the model computes for an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

import torch
from circumstances import circumstances, show
from options import command, parser
from rich.console import Console
from rich.table import Table

from dllm_sampler import Sampler
from dllm_sampler.eval.arguments import positive
from dllm_sampler.eval.exact_match import held_out_prompts
from dllm_sampler.training import rewards
from dllm_sampler.training.tasks import TASKS, UNSEEN

TOKENS, STEPS = 20, 6
PUZZLES = {"latin": ("lines", rewards.lines), "sudoku": ("units", rewards.units)}


def answers(rule: Any, prompts: list[str], samples: int = 1) -> tuple[list[str], float]:
    """Texts, and positions computed for each answer that is kept."""
    sampler = Sampler.from_pretrained(
        "mini", device="cpu", scheduler=rule, temperature=1.0, cache="none", blocks={"name": "fixed", "length": TOKENS}
    )
    found = sampler.generate(prompts, max_new_tokens=TOKENS, samples=samples)
    assert found.texts is not None
    return found.texts, float(found.trace.rows.sum()) / len(prompts)


def rows(puzzle: str, count: int, candidates: Sequence[int]) -> list[tuple[str, ...]]:
    """The lines of the table for one kind of puzzle."""
    task, (name, reward) = (TASKS | UNSEEN)[puzzle], PUZZLES[puzzle]
    prompts, inner = held_out_prompts(task, count), {"name": "fixed", "steps": STEPS}
    made = []
    for number in candidates:
        guided = {"name": "svdd", "inner": inner, "reward": f"{rewards.__name__}:{name}", "candidates": number}
        ways = {"svdd": answers(guided, prompts), "best": answers(inner, prompts, number)}
        for way, (texts, computed) in ways.items():
            if way == "best":
                groups = [texts[at : at + number] for at in range(0, len(texts), number)]
                judged = [
                    reward(prompts=[it] * number, completions=group) for it, group in zip(prompts, groups, strict=True)
                ]
                texts = [group[value.index(max(value))] for group, value in zip(groups, judged, strict=True)]
            right = sum(task.check(it, text) for it, text in zip(prompts, texts, strict=True))
            score = mean(reward(prompts=prompts, completions=texts))
            made.append((puzzle, way, f"{number}", f"{100 * right / count:.0f} %", f"{score:.3f}", f"{computed:.0f}"))
    return made


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    it = parser(__doc__)
    it.add_argument("--count", type=positive, default=200, help="prompts of each kind (default %(default)s)")
    it.add_argument(
        "--candidates", type=positive, nargs="+", default=[1, 2, 4, 8], metavar="M", help="(default %(default)s)"
    )
    options = it.parse_args(argv)
    torch.set_num_threads(1)
    table = Table(title="reward of one answer, by M")
    for head in ("puzzle", "way", "M", "right", "reward", "computed"):
        table.add_column(head, justify="right")
    for puzzle in PUZZLES:
        for row in rows(puzzle, options.count, options.candidates):
            table.add_row(*row)
    console = Console(width=120)
    show(console, circumstances(**vars(options)))
    console.print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
