"""Which schedulers run inside other engines, by their traits.

    python -m tests.tables.engines
    python -m tests.tables.engines --docs docs/engines.md

The first column of engines is for models with a mask token (LLaDA2, SDAR), the second for uniform diffusion
(DiffusionGemma).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dllm_sampler import config
from dllm_sampler.cli.terminal import Parser, command
from dllm_sampler.core.protocols import Scheduler
from dllm_sampler.core.spec import UniformNoise
from dllm_sampler.host import files
from dllm_sampler.integrations.block import reason
from tests.tables import markdown

COMMAND = "python -m tests.tables.engines"
SECTION = "engines"
HEAD = ("scheduler", "SGLang, and `LLaDA2Pipeline` of diffusers", "`DiffusionGemmaPipeline` of diffusers")


def rows() -> Iterator[tuple[str, str, str]]:
    """A line for each scheduler of `conf/`, under its defaults."""
    for name in config.names("scheduler"):
        scheduler: Scheduler = config.build("scheduler", name)
        uniform = scheduler.traits.find(UniformNoise)
        masks = serves(scheduler) if uniform is None or uniform.masks else "no: it denoises random tokens"
        yield f"`{name}`", masks, "no: it fills masks" if uniform is None else serves(scheduler)


def serves(scheduler: Scheduler) -> str:
    """What becomes of a scheduler in an engine that shows one block."""
    why = reason(scheduler.traits)
    if why is not None:
        return f"no: {why}"
    return "yes" if scheduler.traits.scope == "block" else "counts over each block, and warns"


def content() -> str:
    """The table as Markdown, with the command that makes it."""
    return f"`{COMMAND} --docs docs/engines.md`; under default settings.\n\n{markdown.table(HEAD, rows())}"


@command(COMMAND)
def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or put it into a document; returns the exit status."""
    it = Parser(prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    it.add_argument(
        "--docs", type=Path, metavar="FILE", help=f"fill its section {SECTION!r} (default: print the table)"
    )
    options = it.parse_args(argv)
    if options.docs is None:
        print(content())
    else:
        files.write(options.docs, markdown.fill(markdown.read(options.docs, SECTION), SECTION, content()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
