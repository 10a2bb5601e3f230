"""Measures `mini` on held-out prompts and writes the figures into its model card.

`python -m tests.tables.mini_card [--model NAME] [--prompts 200] [--card FILE]`
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.options import positive
from dllm_sampler.cli.terminal import Parser, command
from dllm_sampler.eval.tasks.mini import CANVAS, held_out_prompts
from dllm_sampler.host.files import write
from dllm_sampler.models.mini_tasks import CITIES, COLORS, NAMES, TASKS, Task
from dllm_sampler.models.mini_tokenizer import vocabulary
from dllm_sampler.sampler import Sampler
from tests.tables.answers import Tally
from tests.tables.markdown import fill, read, table

COMMAND = "python -m tests.tables.mini_card"
LONGER = (64, 128)
DECODERS: dict[str, dict[str, object]] = {
    "one per step": {"name": "fixed"},
    "τ = 0.9": {"name": "threshold", "threshold": 0.9},
    "τ = 0.7": {"name": "threshold", "threshold": 0.7},
    "all at once": {"name": "fixed", "steps": 1},
}


def score(sampler: Sampler, task: Task, prompts: Sequence[str], canvas: int = CANVAS) -> tuple[float, float]:
    """Right answers in %, and tokens per forward (the first end token counts, later ones do not)."""
    found = Tally.of(task, prompts, sampler.generate(prompts, max_new_tokens=canvas, block_length=CANVAS))
    return found.exact, found.tokens_per_forward


def results(model: str, count: int) -> str:
    """The table of scores, and a line on longer canvases."""
    samplers = {name: Sampler.from_pretrained(model, scheduler=spec) for name, spec in DECODERS.items()}
    rows, long = [], dict.fromkeys(LONGER, 0.0)
    for task in track(TASKS.values(), "measuring", console=Console(stderr=True), transient=True):
        prompts = held_out_prompts(task, count)
        cells = [score(sampler, task, prompts) for sampler in samplers.values()]
        rows.append([task.name, *(f"{right:.1f} ({rate:.1f})" for right, rate in cells)])
        for canvas in LONGER:
            long[canvas] += score(samplers["τ = 0.9"], task, prompts, canvas)[0] / len(TASKS)
    more = ", ".join(f"{right:.1f} at {canvas}" for canvas, right in long.items())
    scores = table(["task", *DECODERS], rows)
    longer = f"Mean of the tasks at τ = 0.9 on longer canvases (tokens): {more}."
    return f"{count} prompts for each task.\n\n{scores}\n\n{longer}"


def operations() -> str:
    """The table of operations."""
    rows = [[task.name, f"`{task.syntax}`", f"`{task.answer}`", task.limits] for task in TASKS.values()]
    return table(["operation", "prompt", "a right answer", "trained on"], rows)


def words() -> str:
    """The vocabulary by kind."""
    kinds = {"Names": NAMES, "Cities": CITIES, "Colors": COLORS}
    known = {word for kind in kinds.values() for word in kind}
    others = [word for word in vocabulary() if word not in known]
    lines = [f"{kind} ({len(found)}): {', '.join(found)}." for kind, found in kinds.items()]
    return "\n\n".join([*lines, f"Everything else ({len(others)}): {' '.join(f'`{word}`' for word in others)}"])


@command(COMMAND)
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and rewrite the card; returns the exit status, 2 after a mistake in the arguments."""
    parser = Parser(prog=COMMAND, description="Measure mini on held-out prompts and write its model card's tables.")
    parser.add_argument("--model", default="mini", help="a model name or checkpoint folder")
    parser.add_argument("--prompts", type=positive, default=200, help="held-out prompts per task")
    parser.add_argument("--card", type=Path, default=Path(str(files("dllm_sampler") / "models/mini/README.md")))
    options = parser.parse_args(arguments)
    card = read(options.card, "operations", "vocabulary", "results")
    found = results(options.model, options.prompts)
    for section, content in (("operations", operations()), ("vocabulary", words()), ("results", found)):
        card = fill(card, section, content)
    write(options.card, card)
    print(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
