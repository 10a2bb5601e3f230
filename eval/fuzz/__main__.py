"""`python -m dllm_sampler.eval.fuzz`: look for failures by random cases."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dllm_sampler.cli.ending import ending
from dllm_sampler.errors import UserError
from dllm_sampler.eval.arguments import Parser, positive
from dllm_sampler.eval.fuzz import harness, patience

COMMAND = "python -m dllm_sampler.eval.fuzz"
HELP = "Try random configurations, bad inputs or killed processes, and report what must not happen."
EPILOG = """\
batches  configurations of all plug-ins on tiny models of all families: a row of a batch, and one in flight, is the
         row alone
inputs   bad words, files and folders for every command: one sentence, or a right answer
kills    commands that are killed, interrupted or out of space: the same command completes what was begun

Case NUMBER of a seed is always the same case. A failure is made smaller and saved in --output. The figures are there,
too, after each case: in tally-CASES-SEED-FIRST.json, where `next` is the --first of a run that goes on.

exit status: 0 nothing failed, 1 something did, 2 a mistake in the arguments
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = Parser(
        prog=COMMAND,
        description=HELP,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("cases", metavar="batches|inputs|kills", choices=("batches", "inputs", "kills"), help="what is tried")
    add("--seconds", type=positive, metavar="N", help="stop after N seconds (60, unless --count is given)")
    add("--count", type=positive, metavar="N", help="stop after N cases")
    add("--seed", type=int, default=0, metavar="S", help="of the cases (0)")
    add("--first", type=int, default=0, metavar="NUMBER", help="number of the first case (0)")
    add("--output", type=Path, default=Path("outputs/fuzz"), metavar="FOLDER", help="of failures (outputs/fuzz)")
    add(
        "--slow",
        type=positive,
        default=1,
        metavar="N",
        help="all may take N times as long (1)",
    )
    add("--case", type=Path, metavar="FILE", help="try this saved case only")

    def run() -> int:
        options = parser.parse_args(arguments)
        if options.first < 0:
            raise UserError(f"--first should be at least 0, not {options.first}")
        patience.SLOW[0] = options.slow
        if options.case is not None:
            name, outcome = harness.replayed(options.case)
            print(f"{name}: {outcome.kind}{outcome.about and f', {outcome.about}'}")
            return int(outcome.failed)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes of the run end, too
        seconds = options.seconds or (60 if options.count is None else float("inf"))
        tally = harness.run(
            options.cases,
            options.seed,
            seconds=seconds,
            cases=options.count,
            first=options.first,
            folder=options.output,
        )
        console = Console()
        console.print(tally.table())
        if tally.troubles:
            console.print(f"{tally.troubles} times a run was killed or disturbed")
        for note, count in tally.notes.most_common():
            console.print(f"{count} passed: {note}")
        for fault, count in tally.faults.most_common():
            console.print(f"{count} of {fault}: {tally.saved[fault]}")
        return int(tally.failed > 0)

    return ending(COMMAND, run, "interrupted; --first with the `next` of the tally in --output goes on from there")


if __name__ == "__main__":
    sys.exit(main())
