"""The ahead-of-time table of docs/kernels.md: what every kernel takes of four GPUs (`benchmarks/kernels.py --aot`).

`python -m tests.tables.kernels [--processes 2]`
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import ahead_of_time
from dllm_sampler.eval.arguments import Parser, command, output, positive
from dllm_sampler.host import files
from tests.tables import markdown

SECTION = "ahead-of-time table"
COMMAND = "python -m tests.tables.kernels"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


@command(COMMAND)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 1 if a kernel does not compile or does not fit."""
    parser = Parser(prog=COMMAND, description="Compile every kernel ahead of time and write docs/kernels.md.")
    parser.add_argument("--docs", type=output, default=DOCS, metavar="FILE", help="document whose table is written")
    parser.add_argument("--processes", type=positive, default=2, metavar="N", help="at work at once (2)")
    options = parser.parse_args(arguments)
    text = markdown.read(options.docs, SECTION)
    version = ahead_of_time.check()
    places = [(module, place) for module, place, _ in ahead_of_time.discover()]
    jobs = [(*place, target) for place in places for target in ahead_of_time.TARGETS]
    found = ahead_of_time.compile_all(jobs, options.processes, Console(stderr=True))
    for one in found:
        if one.error:
            print(f"{one.kernel} on {one.target}: {one.error}", file=sys.stderr)
    if any(one.error for one in found):
        print(f"{options.docs} was left as it is: not every kernel compiles and fits", file=sys.stderr)
        return 1
    section = f"Triton {version}; `{COMMAND}`.\n\n{markdown.table(*ahead_of_time.cells(found))}"
    files.write(options.docs, markdown.fill(text, SECTION, section))
    return 0


if __name__ == "__main__":
    sys.exit(main())
