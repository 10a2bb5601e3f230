"""What distilling a model bought: forwards at equal accuracy before and after, several seeds.

`python -m tests.tables.distilled --before mini --after runs/distill-0 runs/distill-1 runs/distill-2`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.options import positive
from dllm_sampler.cli.terminal import Parser, command
from dllm_sampler.errors import unknown
from dllm_sampler.eval.curves import pbx
from dllm_sampler.host import files
from dllm_sampler.models.mini_rewards import solved
from dllm_sampler.models.mini_tasks import LESSONS, draw_example
from dllm_sampler.sampler import Sampler
from tests.tables import markdown
from tests.tables.comparison import Figures, compare

SECTION, BATCH = "distilled", 64
COMMAND = "python -m tests.tables.distilled"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"
BOUNDS: Mapping[str, tuple[float, ...]] = {
    "entropy": (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7),
    "threshold": (0.998, 0.99, 0.98, 0.97, 0.95, 0.92, 0.88, 0.8),
}
LEVELS = (0.9, 0.8)


def measured(
    model: str, tasks: Sequence[str], count: int, seed: int, new_tokens: int, length: int
) -> dict[str, Figures]:
    """Accuracy and forwards of a model by rule and bound, on prompts that no training uses."""
    loaded = Sampler.from_pretrained(model, device="cpu", dtype="float32")
    settings: dict[str, Any] = {"blocks": {"name": "fixed", "length": length}, "cache": "none"}
    samplers = {
        f"{rule} {bound:g}": Sampler(
            loaded.denoiser, tokenizer=loaded.tokenizer, scheduler={"name": rule, rule: bound}, **settings
        )
        for rule, bounds in BOUNDS.items()
        for bound in bounds
    }
    rng = Random(f"distilled/{seed}")
    asked = [(task, *draw_example(LESSONS[task], rng, held=True)) for task in tasks for _ in range(count)]
    checks = [partial(solved, *each) for each in asked]
    return compare(samplers, [prompt for _, prompt, _ in asked], new_tokens, BATCH, checks)


def forwards(found: Mapping[str, Figures], rule: str, level: float) -> float | None:
    """Fewest forwards with that accuracy; None: the rule does not reach it.

    Between two neighbouring bounds on a straight line, which is what choosing one of them at random for each prompt
    would give.
    """
    points = [(-found[f"{rule} {bound:g}"]["nfe"], found[f"{rule} {bound:g}"]["right"]) for bound in BOUNDS[rule]]
    return -pbx(points, level, interpolate=True) or None


def equal(before: Mapping[str, Figures], after: Sequence[Mapping[str, Figures]]) -> str:
    """The table of forwards at equal accuracy."""
    rows = []
    for rule in BOUNDS:
        for level in LEVELS:
            base, ours = forwards(before, rule, level), [forwards(one, rule, level) for one in after]
            reached = [one for one in ours if one is not None]
            cells = ["not reached" if base is None else f"{base:.2f}", spread(reached), ""]
            if len(reached) < len(ours):
                cells[1] += f", {len(ours) - len(reached)} of {len(ours)} do not reach it"
            if base is not None and len(reached) == len(ours):
                cells[2] = spread([base / one for one in reached])
            rows.append([rule, f"{100 * level:g} %", *cells])
    head = ["rule", "accuracy", "forwards before", "after", "times fewer"]
    return markdown.table(head, rows)


def spread(values: Sequence[float]) -> str:
    """Mean and range."""
    return markdown.spread(values, 2) if values else "not reached"


@command(COMMAND)
def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = parse(words)
    page = markdown.read(options.docs, SECTION)
    torch.set_num_threads(1)
    sizes = (options.tasks, options.prompts, options.seed, options.new_tokens, options.block_length)
    before, *after = (measured(model, *sizes) for model in (options.before, *options.after))
    tasks = ", ".join(options.tasks)
    kind = "mean and range" if len(after) >= markdown.ENOUGH else "mean"
    text = "\n\n".join(
        [
            f"Forwards per answer at equal accuracy, {options.prompts} held-out prompts of each task ({tasks});"
            f" canvas of {options.new_tokens} tokens in blocks of {options.block_length}. After: {kind} of"
            f" {len(after)} seeds.",
            equal(before, after),
        ]
    )
    files.write(options.docs, markdown.fill(page, SECTION, text))
    print(text)
    return 0


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(prog=COMMAND, description="Compare forwards at equal accuracy before and after a distillation.")
    add = parser.add_argument
    add("--before", default="mini", metavar="MODEL", help="name or folder of the model that was distilled (mini)")
    add("--after", nargs="+", required=True, metavar="MODEL", help="folders of the runs, one per seed")
    add("--tasks", nargs="+", default=["proper sudoku"], metavar="TASK", help="that mini knows or not (proper sudoku)")
    add("--prompts", type=positive, default=240, metavar="N", help="held-out prompts per task (240)")
    add("--seed", type=int, default=0, metavar="N", help="of these prompts (0)")
    add("--new-tokens", type=positive, default=20, metavar="N", help="length of the canvas (20)")
    add("--block-length", type=positive, default=20, metavar="N", help="of its blocks (20)")
    add("--docs", type=Path, default=PAGE, metavar="FILE", help="document whose figures are replaced")
    options = parser.parse_args(words)
    for task in options.tasks:
        if task not in LESSONS:
            raise unknown("task", task, LESSONS)
    return options


if __name__ == "__main__":
    sys.exit(main())
