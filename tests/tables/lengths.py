"""Answers that find their length against canvases of one length, on `mini`: writes the table of docs/lengths.md.

`python -m tests.tables.lengths [--prompts 40] [--tasks NAME ...] [--seed 0]`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.options import positive
from dllm_sampler.cli.terminal import Parser, command
from dllm_sampler.core.naming import described
from dllm_sampler.core.spec import ChangingLength
from dllm_sampler.errors import unknown
from dllm_sampler.eval.tasks.mini import held_out_prompts
from dllm_sampler.host import files
from dllm_sampler.models.mini_tasks import TASKS
from dllm_sampler.sampler import Sampler
from tests.tables import markdown
from tests.tables.answers import Tally

SECTION = "length table"
HEAD = ("`scheduler=`", "columns", "exact match", "forwards", "positions computed", "last canvas")
COMMAND = "python -m tests.tables.lengths"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "lengths.md"
FIXED = (16, 32, 128)
BOUND, BATCH, BLOCK = 128, 8, 32
# Answers of `mini` have some 10 tokens: settings that suit canvases of 16 to 32, and the published ones of rho-EOS.
GROWING: tuple[dict[str, Any], ...] = (
    {"name": "daedal", "initial": 16, "eos_tokens": 8},
    {"name": "rho_eos", "initial": 32, "expand": 4, "scale": "const"},
    {"name": "rho_eos", "min_length": 0},
    {"name": "rho_eos"},
)


@dataclass(frozen=True)
class Row:
    """Sums over the answers of a method."""

    method: str
    columns: str
    tally: Tally
    computed: int
    canvas: int  # columns in the end

    def cells(self) -> list[str]:
        """A line of the table: means per answer."""
        count = self.tally.count
        means = (self.tally.nfe / count, self.computed / count, self.canvas / count)
        shares = (f"{self.tally.exact:.1f}", *(f"{mean:.1f}" for mean in means))
        return [self.method, self.columns, *shares]


def measure(base: Sampler, plugins: dict[str, Any], tokens: int, options: argparse.Namespace) -> Row:
    """All tasks under one setting, `threshold` without any."""
    sampler, tallies, computed, canvas = base.using(**plugins), [], 0, 0
    for name in options.tasks:
        prompts = held_out_prompts(TASKS[name], options.prompts, options.seed)
        for start in range(0, len(prompts), BATCH):
            part = prompts[start : start + BATCH]
            result = sampler.generate(part, max_new_tokens=tokens, seed=options.seed)
            tallies.append(Tally.of(TASKS[name], part, result))
            computed += int(result.trace.rows.sum())
            canvas += int((result.trace.end - result.trace.origin).sum())
    rule = sampler.plugins.scheduler
    length_change = rule.traits.find(ChangingLength)
    columns = str(tokens) if length_change is None else f"{length_change.initial_length} to {tokens}"
    return Row(f"`{described(rule)}`", columns, Tally.total(tallies), computed, canvas)


def content(rows: Sequence[Row], options: argparse.Namespace) -> str:
    """What stands in the document."""
    notes = (
        f"{options.prompts} held-out prompts for each of {len(options.tasks)} tasks of `mini`, seed {options.seed},"
        f" blocks of {BLOCK}, no cache, no stop; means per answer. Made by `{COMMAND}`."
    )
    return "\n\n".join([markdown.table(HEAD, [row.cells() for row in rows]), notes])


@command(COMMAND)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = Parser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=positive, default=40, help="of each task")
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], metavar="NAME", help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the document whose section is written")
    options = parser.parse_args(arguments)
    for name in options.tasks:
        if name not in TASKS:
            raise unknown("task", name, TASKS)
    markdown.read(options.docs, SECTION)  # a mistake shows before the work
    torch.set_num_threads(1)
    blocks = {"name": "fixed", "length": BLOCK}
    base = Sampler.from_pretrained("mini", device="cpu", scheduler="threshold", blocks=blocks, stop="none")
    runs: list[tuple[dict[str, Any], int]] = [({}, tokens) for tokens in FIXED]
    runs += [({"scheduler": one}, BOUND) for one in GROWING]
    console = Console(stderr=True)
    shown = track(runs, "measuring", console=console, transient=True, disable=not console.is_terminal)
    section = content([measure(base, *run, options) for run in shown], options)
    text = markdown.read(options.docs, SECTION)
    files.write(options.docs, markdown.fill(text, SECTION, section))
    print(section)
    return 0


if __name__ == "__main__":
    sys.exit(main())
