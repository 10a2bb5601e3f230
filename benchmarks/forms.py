"""Answers of a form: how many are valid with and without a guide, and what the guide costs.

    python benchmarks/forms.py                          # mini, half a minute on one core
    python benchmarks/forms.py --vocab 126464 --length 256
    python benchmarks/forms.py --plot docs/forms.png    # the picture of docs/guides.md alone

The table has answers of mini, drawn at temperature 1, by the number of forwards. The form is what the prompt asks for
(`named`), or the same with names that it does not have (`other`), or a JSON document. The last line is the time of the
guide alone per step and row, for a greedy choice, a draw, and the posterior, and next to it that of the readout and of
a draw's noise: random tokens, a schema of three fields, 32 masks asked of an answer with nothing decided.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from circumstances import circumstances, show
from options import command, parser
from rich.console import Console
from rich.table import Table

from dllm_sampler import Sampler
from dllm_sampler.blocks.fixed import FullBlock
from dllm_sampler.core import files
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.packing import Answers
from dllm_sampler.core.statistics import argmax, measure
from dllm_sampler.core.values import Query
from dllm_sampler.engine import layout
from dllm_sampler.eval.arguments import positive
from dllm_sampler.eval.tasks.base import Answer
from dllm_sampler.eval.tasks.formed import Formed
from dllm_sampler.guides import Regex
from dllm_sampler.guides.forms import automaton, compiled
from dllm_sampler.guides.forms.choice import choose, posterior
from dllm_sampler.guides.forms.edges import joined
from dllm_sampler.guides.forms.regular import JsonSchema

NAMED, OTHER = (
    "|".join(", ".join(order) for order in itertools.permutations(names))
    for names in (("Ada", "Ben", "Cal", "Dan"), ("Eve", "Tom", "Zoe", "Amy"))
)
SCHEMA = {
    "type": "object",
    "properties": {"Ada": {"type": "integer"}, "Ben": {"enum": ["red", "blue"]}},
    "required": ["Ada", "Ben"],
}
LARGE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "age", "tags"],
}
RULES: dict[str, dict[str, Any]] = {
    **{f"fixed {steps}": {"name": "fixed", "steps": steps} for steps in (1, 2, 4)},
    **{f"threshold {value}": {"name": "threshold", "threshold": value} for value in (0.7, 0.9)},
}


def is_json(text: str) -> bool:
    """Whether a text is a document of `SCHEMA`."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and set(value) == {"Ada", "Ben"} and type(value["Ada"]) is int


FORMS: dict[str, tuple[str, dict[str, Any], Callable[[str], object]]] = {
    "named": ("shuffle: Ada, Ben, Cal, Dan", {"name": "regex", "pattern": NAMED}, re.compile(NAMED).fullmatch),
    "other": ("shuffle: Ada, Ben, Cal, Dan", {"name": "regex", "pattern": OTHER}, re.compile(OTHER).fullmatch),
    "JSON": ("json: Ada 3, Ben red", {"name": "json_schema", "schema": SCHEMA}, is_json),
}


def valid(count: int) -> Table:
    """Valid answers of `count`, in percent, and mean forwards."""
    shown = Table(title="valid answers without the guide, with it, and with its posterior; mean forwards")
    for head in ("scheduler", *FORMS):
        shown.add_column(head, justify="right")
    for label, scheduler in RULES.items():
        cells = []
        for prompt, guide, fits in FORMS.values():
            found = []
            for guides in ([], [guide], [{**guide, "posterior": True}]):
                sampler = Sampler.from_pretrained(
                    "mini", device="cpu", scheduler=scheduler, temperature=1.0, guide=guides
                )
                made = sampler.generate([prompt] * count, max_new_tokens=24)
                share = sum(bool(fits(text)) for text in made.texts or []) / count
                found.append(f"{100 * share:.0f} % in {float(made.nfe.double().mean()):.1f}")
            cells.append(", ".join(found))
        shown.add_row(label, *cells)
    return shown


def curves(operation: str, count: int) -> dict[str, list[tuple[int, float]]]:
    """Right answers of `task=formed` in percent by the number of forwards, without the guide and with it."""
    task = Formed(operation=operation, count=count)
    samples = task.samples()
    forms = tuple(dict.fromkeys(map(task.form, samples)))
    chosen, prompts = [forms.index(task.form(one)) for one in samples], [str(one.prompt) for one in samples]
    found: dict[str, list[tuple[int, float]]] = {"without a guide": [], "with the form as a guide": []}
    for steps in (1, 2, 4, 8, 16):
        for label, guided in zip(found, (False, True), strict=True):
            guide, own = (Regex(forms) if guided else None), dict[str, Any](forms=chosen if guided else None)
            sampler = Sampler.from_pretrained(
                "mini", device="cpu", scheduler={"name": "fixed", "steps": steps}, guide=guide
            )
            answers = sampler.generate_many(prompts, max_new_tokens=task.max_new_tokens, order="given", **own)
            graded = [
                task.grade(sample, Answer(answer.text or "", answer.tokens.tolist()))
                for sample, answer in zip(samples, answers, strict=True)
            ]
            found[label].append((steps, 100 * statistics.fmean(one["exact_match"] for one in graded)))
    return found


def plot(path: str, count: int) -> None:
    """A PNG file: right answers against forwards."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=120, layout="constrained")
    titles = {"latin": "a latin square, some cells given", "shuffle": "the prompt's names in any order"}
    for axes, (operation, title) in zip(figure.subplots(1, 2, sharey=True), titles.items(), strict=True):
        for (label, points), color in zip(curves(operation, count).items(), ("#5b6f82", "#c8410b"), strict=True):
            axes.plot(*zip(*points, strict=True), "o-", label=label, color=color, markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_xticks([1, 2, 4, 8, 16], labels=["1", "2", "4", "8", "16"])
        axes.set(title=title, xlabel="forwards per answer", ylim=(-4, 104))
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("right answers, %")
    figure.axes[0].legend(frameon=False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    files.write(path, drawn.getvalue())


def tokens(vocab: int) -> list[bytes]:
    """Every byte, two special tokens, and random words."""
    rng, signs = random.Random(0), "etaoinshrdlucmfwypvbgkjqxz ETAOINSHRDLU0123456789.,:;{}[]\"'-_()"
    found = dict.fromkeys([bytes([byte]) for byte in range(256)])
    while len(found) < vocab - 2:
        found["".join(rng.choices(signs, k=rng.randint(2, 8))).encode()] = None
    return [b"", b"", *list(found)[: vocab - 2]]


def milliseconds(
    vocab: int, length: int, rows: int, repeats: int, asked: int = 32
) -> tuple[dict[str, float], float, automaton.Automaton]:
    """Of what a guide does in a step, and of a readout and of noise without one, per row; in turn, on one machine.

    Also the seconds of the first choice of each kind.
    """
    made = automaton.build(JsonSchema(LARGE).expressions()[0], tokens(vocab), vocab, (0,), 1)
    listed = joined((made,))
    spec = replace(Sampler.from_pretrained("mini", device="cpu").denoiser.spec, vocab_size=vocab, mask_id=1)
    prompts = [[2] * 8] * rows
    canvas = layout.canvas(prompts, length, range(rows), spec, FullBlock(), CounterNoise(), cuts=False)
    query = Query.at(canvas, canvas.answer()[:, :asked])
    canvas = replace(canvas, sizes=replace(canvas.sizes, stretch=asked))  # as the engine has measured it
    answers, logits = Answers.every(query), torch.randn(query.ids.numel(), vocab)
    noisy, needs, spare = logits + canvas.noise.tokens(canvas, answers, vocab), frozenset[str](), logits.clone()
    works: dict[str, Callable[[], object]] = {
        "greedy": lambda: choose(listed, logits, logits, canvas, answers, 1, False),
        "drawn": lambda: choose(listed, logits, noisy, canvas, answers, 1, True),
        "posterior": lambda: posterior(listed, logits, canvas, answers, 1),
        "readout": lambda: measure(spare, argmax(spare), answers.pick(query.ids), needs, None),
        "noise": lambda: canvas.noise.tokens(canvas, answers, vocab),
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats + 1):
        for name, work in works.items():
            with torch.inference_mode():  # as a step runs
                begun = time.process_time()
                work()
                seconds[name].append(time.process_time() - begun)
    found = {name: 1000 * statistics.median(each[1:]) / rows for name, each in seconds.items()}
    return found, sum(seconds[name][0] for name in ("greedy", "drawn", "posterior")), made


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    it = parser(__doc__)
    add = it.add_argument
    add("--count", type=positive, default=20, help="answers of each kind (default %(default)s)")
    add("--plot", metavar="FILE", help="draw right answers there, and no more (default: measure)")
    add("--vocab", type=positive, default=32000, help="tokens, 300 at least (default %(default)s)")
    add("--length", type=positive, default=128, help="tokens of an answer (default %(default)s)")
    add("--asked", type=positive, default=32, help="masks that a step asks about (default %(default)s)")
    add("--rows", type=positive, default=1, help="of a step (default %(default)s)")
    add("--repeats", type=positive, default=5, help="choices timed (default %(default)s)")
    add("--threads", type=positive, default=1, help="of torch (default %(default)s)")
    add("--no-numba", action="store_true", help="time torch's operations, as where numba is not installed")
    options = it.parse_args(words)
    if options.vocab < 300 or options.length < options.asked:
        it.error("--vocab should be at least 300, and --length at least --asked")
    return options


@command
def main(words: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = arguments(words)
    torch.set_num_threads(options.threads)
    console = Console(width=120)
    if options.plot is not None:
        plot(options.plot, 5 * options.count)
        return 0
    show(console, circumstances(**vars(options)))
    console.print(valid(options.count))
    if options.no_numba:
        compiled.MANY = options.vocab + 1
    found, first, made = milliseconds(options.vocab, options.length, options.rows, options.repeats, options.asked)
    states, classes = made.moves.shape
    times = ", ".join(f"{name} {each:.1f}" for name, each in found.items())
    sizes = f"{options.vocab} tokens in {classes} classes, {states} states"
    print(f"{times} ms per step and row, first {first:.1f} s: {sizes}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
