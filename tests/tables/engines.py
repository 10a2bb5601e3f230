"""Which schedulers run inside other engines, by their traits.

    python -m tests.tables.engines
    python -m tests.tables.engines --docs docs/engines.md

The table is for models with a mask token (LLaDA2, SDAR), the sentence after it for uniform diffusion (DiffusionGemma).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
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
HEAD = ("SGLang, and `LLaDA2Pipeline` of diffusers", "schedulers")


def answers() -> tuple[dict[str, list[str]], list[str]]:
    """Return the schedulers of `conf/` by what becomes of them under their defaults, and those of uniform diffusion."""
    found: dict[str, list[str]] = {"yes": []}
    uniform = []
    for name in config.names("scheduler"):
        scheduler: Scheduler = config.build("scheduler", name)
        noise = scheduler.traits.find(UniformNoise)
        answer = serves(scheduler) if noise is None or noise.masks else "no: it denoises random tokens"
        found.setdefault(answer, []).append(f"`{name}`")
        if noise is not None and serves(scheduler) == "yes":
            uniform.append(f"`{name}`")
    return found, uniform


def serves(scheduler: Scheduler) -> str:
    """Say what becomes of a scheduler in an engine that shows one block."""
    why = reason(scheduler)
    if why is not None:
        return f"no: {why}"
    return "yes" if scheduler.traits.scope == "block" else "counts over each block, and warns"


def content() -> str:
    """The table as Markdown, with the command that makes it."""
    found, uniform = answers()
    table = markdown.table(HEAD, ((answer, ", ".join(names)) for answer, names in found.items()))
    others = f"`DiffusionGemmaPipeline` of diffusers runs {', '.join(uniform)}; the others fill masks."
    return f"{table}\n\n{others} Under default settings; made by `{COMMAND} --docs docs/engines.md`."


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
