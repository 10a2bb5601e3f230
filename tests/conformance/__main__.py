"""The command line of the conformance check."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from dllm_sampler.cli.terminal import Parser, command
from dllm_sampler.errors import UserError
from tests.conformance import lines, replay
from tests.conformance.builder import Checkpoints

COMMAND = "python -m tests.conformance"
HELP = "Replay recorded runs of published decoders and compare tokens, forwards and the positions each forward commits."
LAYOUT = """\
DIR is laid out like this:
  DIR/traces/*.jsonl    one recorded run a line; `model` names a checkpoint folder, `params` are the
                        published function's arguments; companion files lie here too
  DIR/<model>/          config.json and model.safetensors

A line passes if the output ids, the number of forwards (NFE) and the positions committed by each forward are
equal. Where a published loop is known to waste a forward on a full block, that forward may be missing together
with its empty entry. SDAR's records count forwards that only store keys, but do not list them. Lines with `rng`
repeat the recorded run's draws.

A line is unsupported if there are no plug-ins for its system, or they refuse one of its values; the reason is said.

exit status: 0 nothing failed, 1 some line failed, 2 a wrong folder or system name, or a malformed line
"""


@command(COMMAND)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = Parser(prog=COMMAND, description=HELP, epilog=LAYOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder with traces and their checkpoints")
    parser.add_argument("--system", metavar="NAME", help="only lines whose `system` is exactly NAME")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the verdict on each line to FILE")
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.parent.is_dir():
        raise UserError("file-missing", f"cannot write {options.json}: there is no folder {options.json.parent}")
    verdicts = check(options.folder, options.system)
    if options.json is not None:
        replay.save(verdicts, options.json)
    print(replay.report(verdicts))
    return int(replay.counts(verdicts)["failed"] > 0)


def check(folder: Path, system: str | None = None) -> list[replay.Verdict]:
    """Verdicts on the lines of a folder; nothing runs before every line has been found legal.

    Raises:
        UserError: see `lines.read` and `replay.prepare`.
    """
    checkpoints = Checkpoints(folder)
    work = [(line, replay.prepare(line, checkpoints)) for line in lines.read(folder, system)]
    console = Console(stderr=True)
    shown = track(work, "replaying", console=console, transient=True, disable=not console.is_terminal)
    return [task if isinstance(task, replay.Verdict) else replay.replay(line, task) for line, task in shown]


if __name__ == "__main__":
    sys.exit(main())
