"""Checks that drafting changes no token, and measures what it saves; writes the figures of docs/drafting.md.

`python -m tests.tables.drafting`; a cut run goes on from what it has compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from benchmarks.options import positive
from dllm_sampler import __version__
from dllm_sampler.cli.terminal import Parser, command
from dllm_sampler.eval.tasks.mini import held_out_prompts
from dllm_sampler.host import files
from dllm_sampler.models.mini_tasks import TASKS
from dllm_sampler.result import Result
from dllm_sampler.sampler import Sampler
from tests.tables import markdown
from tests.tables.store import Store

CANVAS, BLOCK, BATCH = 32, 16, 25
SECTION = "drafting"
COMMAND = "python -m tests.tables.drafting"
OUTPUT = Path("outputs/drafting")
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "drafting.md"
TINY = ROOT / "tests" / "conformance" / "data"  # tiny checkpoints, not part of the wheel
CHECKPOINTS = ("tiny-llada", "tiny-dream", "tiny-sdar")
Settings = Mapping[str, object]
BASES: dict[str, Settings] = {
    "fixed": {"name": "fixed"},
    "two per step": {"name": "fixed", "steps": CANVAS // 2},
    "threshold 0.9": {"name": "threshold", "threshold": 0.9},
    "random order": {"name": "fixed", "score": "random"},
    "klass": {"name": "klass"},
}
DRAFTS: dict[str, Settings] = {
    "freedave 2": {"name": "freedave", "draft": 2},
    "freedave 4": {"name": "freedave", "draft": 4},
    "freedave 8": {"name": "freedave", "draft": 8},
    "freedave 4, eager": {"name": "freedave", "draft": 4, "eager": True},
    "ssd 3, width 3": {"name": "ssd", "length": 3, "width": 3},
}
CACHES: tuple[str | Settings, ...] = ("none", "prefix", "dual")
CAUSAL: tuple[str | Settings, ...] = ("none", "block_causal", {"name": "block_causal", "store_pass": "separate"})


@dataclass(frozen=True)
class Subject:
    """A model and what it is asked: text, or token ids where it has no tokenizer."""

    name: str
    sampler: Sampler
    prompts: Sequence[str] | Sequence[list[int]]

    @property
    def batch(self) -> int:
        """Prompts decoded together: few enough for every cache to have its turn."""
        return min(BATCH, -(-len(self.prompts) // len(self.caches)))

    @property
    def caches(self) -> tuple[str | Settings, ...]:
        """Those that drafting may use with it."""
        return CAUSAL if self.sampler.denoiser.spec.attention == "block_causal" else CACHES


def subjects(model: str, count: int) -> list[Subject]:
    """The model with `count` prompts per task, and the tiny checkpoints, where they are, with as many random ones."""
    asked = [prompt for task in TASKS.values() for prompt in held_out_prompts(task, count)]
    found = [Subject(model, Sampler.from_pretrained(model, dtype="float64"), asked)]
    for name in CHECKPOINTS:
        if (TINY / name).is_dir():
            sampler = Sampler.from_pretrained(str(TINY / name), dtype="float64")
            random, spec = Random(name), sampler.denoiser.spec
            plain = [one for one in range(spec.vocab_size) if one not in (spec.mask_id, *spec.eos_ids, spec.pad_id)]
            ids = [random.choices(plain, k=random.randint(4, 40)) for _ in asked]
            found.append(Subject(name, sampler, ids))
    return found


@dataclass(frozen=True)
class Agreement:
    """How the rows of one drafting method came out against the scheduler inside."""

    subject: str
    base: str
    draft: str
    rows: int
    equal: int
    before: int  # forwards of the scheduler alone
    after: int


def same_path(alone: Result, drafted: Result) -> Tensor:
    """`[B] bool` rows with equal tokens whose states are among those that the scheduler alone went through.

    That is so where what one step commits is committed together, and never before what an earlier step commits.
    """
    then, now = alone.trace.generated, drafted.trace.generated  # [B, N]
    ordered = (then[:, :, None] >= then[:, None]) | (now[:, :, None] <= now[:, None])
    together = (then[:, :, None] != then[:, None]) | (now[:, :, None] == now[:, None])
    tokens = (alone.tokens == drafted.tokens).all(1)
    return tokens & (ordered & together).flatten(1).all(1) & (drafted.nfe <= alone.nfe)


def compare(subject: Subject, store: Store[Agreement]) -> Iterator[Agreement]:
    """Each drafting method around each scheduler, in float64, in ragged batches that take the caches by turns."""

    @cache
    def alone(base: str, start: int, under: str) -> Result:
        return run(subject, BASES[base], choices[under], start)

    choices = {str(choice): choice for choice in subject.caches}
    work = list(product(BASES, DRAFTS))
    for base, draft in track(work, subject.name, console=Console(stderr=True), transient=True):
        plugins = {"base": BASES[base], "draft": DRAFTS[draft]}
        found = store.find(plugins, subject.name)
        if found is None:
            rows = equal = before = after = 0
            turns = ["none"] if DRAFTS[draft].get("eager") else list(choices)
            for turn, start in enumerate(range(0, len(subject.prompts), subject.batch)):
                under = turns[turn % len(turns)]
                one = alone(base, start, under)
                two = run(subject, {**DRAFTS[draft], "inner": BASES[base]}, choices[under], start)
                rows, equal = rows + len(one.nfe), equal + int(same_path(one, two).sum())
                before, after = before + int(one.nfe.sum()), after + int(two.nfe.sum())
            found = Agreement(subject.name, base, draft, rows, equal, before, after)
            store.add(plugins, subject.name, found)
        yield found


def run(subject: Subject, scheduler: Settings, cache: str | Settings, start: int) -> Result:
    """Answers to the batch of prompts that begins at `start`."""
    blocks, given = {"name": "fixed", "length": BLOCK}, subject.sampler
    options = {"scheduler": scheduler, "cache": cache, "blocks": blocks, "stop": "none"}
    sampler = Sampler(given.denoiser, tokenizer=given.tokenizer, **options)
    return sampler.generate(subject.prompts[start : start + subject.batch], max_new_tokens=CANVAS)


def savings(found: Sequence[Agreement]) -> str:
    """The table of forwards saved on one model."""
    cells = {(one.base, one.draft): f"{100 * (1 - one.after / one.before):.0f}" for one in found}
    return markdown.table(["", *BASES], [[draft, *(cells[base, draft] for base in BASES)] for draft in DRAFTS])


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog=COMMAND,
        description="Compare every drafting method with the scheduler inside and write docs/drafting.md.",
        epilog="A cut run goes on from the comparisons in --output. Exit status: 0; 1: some row differs;"
        " 2: a mistake in the arguments",
    )
    add = parser.add_argument
    add("--model", default="mini", help="a model that answers mini's tasks (mini)")
    add("--prompts", type=positive, default=15, metavar="N", help="prompts per task that are compared (15)")
    add("--threads", type=positive, default=1, metavar="N", help="of torch (1)")
    add("--docs", type=Path, default=PAGE, metavar="FILE", help="document whose figures are replaced")
    add("--output", type=Path, default=OUTPUT, metavar="DIR", help=f"comparisons, kept until deleted ({OUTPUT})")
    return parser.parse_args(words)


@command(COMMAND)
def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = parse(words)
    markdown.read(options.docs, SECTION)  # a mistake shows before the work
    torch.set_num_threads(options.threads)
    chosen = subjects(options.model, options.prompts)
    done = store(options)
    found = [one for subject in chosen for one in compare(subject, done)]
    text = content(options.model, found)
    files.write(options.docs, markdown.fill(markdown.read(options.docs, SECTION), SECTION, text))
    print(text)
    return int(any(one.equal < one.rows for one in found))


def store(options: argparse.Namespace) -> Store[Agreement]:
    """Where comparisons are kept: those of other prompts, sizes or versions are not found again."""
    sizes = {"model": options.model, "prompts": options.prompts, "canvas": CANVAS, "block": BLOCK, "batch": BATCH}
    setup = {**sizes, "torch": str(torch.__version__), "dllm_sampler": __version__}
    return Store(options.output / "results.jsonl", 1, setup, dict, lambda line: Agreement(**line["found"]), kept)


def kept(found: Agreement) -> dict[str, object]:
    """As a line of the file has it."""
    return {"found": asdict(found)}


def content(model: str, found: Sequence[Agreement]) -> str:
    """What the document's section contains."""
    rows, equal = sum(one.rows for one in found), sum(one.equal for one in found)
    models = ", ".join(dict.fromkeys(one.subject for one in found))
    about = (
        f"Of {rows:,} rows ({models}; float64) {rows - equal} differ from the scheduler inside in tokens or order, or"
        f" take more forwards. Forwards saved on {model}, %, {CANVAS} tokens in blocks of {BLOCK}:"
    )
    table = savings([one for one in found if one.subject == model])
    legend = (
        "Rows name `draft` and `eager` of `freedave`, and `length` and `width` of `ssd`. Columns name the scheduler"
        f" inside: *two per step* is `fixed steps={CANVAS // 2}`, *random order* is `fixed score=random`."
    )
    return "\n\n".join([about, table, legend, f"Made by `{COMMAND}`."])


if __name__ == "__main__":
    sys.exit(main())
