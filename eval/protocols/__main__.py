"""`python -m dllm_sampler.eval.protocols`: check protocols against recordings of the authors' harnesses."""

import sys
from collections.abc import Sequence
from pathlib import Path

from dllm_sampler.cli.terminal import Parser, ending
from dllm_sampler.errors import UserError, counted
from dllm_sampler.eval.protocols import packages, programs, published, spec
from dllm_sampler.eval.protocols.replay import replay
from dllm_sampler.host.paths import expanded

NAME = "python -m dllm_sampler.eval.protocols"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = Parser(prog=NAME, description="Check published protocols and figures (docs/protocols.md).")
    add = parser.add_argument
    add("--install", action="store_true", help="install the packages that grading needs, in a folder of their own")
    add("--replay", metavar="DIR", help="compare DIR/prompts/*.jsonl and DIR/grading/*.jsonl; runs recorded programs")
    add(
        "--check", nargs="?", const=published.FILE, metavar="FILE",
        help="check the schema of published.csv (or FILE) and protocols",
    )  # fmt: skip

    def run() -> int:
        given = parser.parse_args(arguments)
        if not given.install and given.replay is None and given.check is None:
            raise UserError("option-missing", f"{NAME} has no option. Add --install, --check or --replay DIR.")
        if given.check is not None:
            check(given.check)
        if given.install:
            print(packages.install())
        return 0 if given.replay is None else show(expanded("--replay", given.replay))

    return ending(NAME, run)


def check(file: str) -> None:
    """Read every figure of a file like `published.csv`, and every protocol. Print how many there are."""
    rows = published.read(file)
    works = {row.source.split(" arXiv")[0].split(" @")[0].split(" Table")[0].split()[0] for row in rows}
    cells = [cell for name in spec.names() for cell in spec.load(name).cells.values()]
    figures, tasks = counted(len(rows), "figure"), counted(len(cells), "task")
    print(f"ok: {figures} of {counted(len(works), 'work')}, and {tasks} of protocols")


def show(folder: Path) -> int:
    """Print the lines of a folder of recordings that differ, and the counts. Return 1 if a line differs, else 0."""
    try:
        print(f"packages: {packages.install()}", file=sys.stderr)
    except UserError as error:  # lines that need none are compared all the same
        print(f"{error} Lines that need these packages fail.", file=sys.stderr)
    print(programs.notice(), file=sys.stderr)
    passed = failed = 0
    for outcome in replay(folder):
        passed, failed = passed + (not outcome.wrong), failed + bool(outcome.wrong)
        if outcome.wrong:
            print(f"{outcome.name}: {', '.join(outcome.wrong)}")
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
