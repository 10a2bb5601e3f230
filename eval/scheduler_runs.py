"""Measuring every method on `mini`, resumably: the runs behind `dllm_sampler.eval.scheduler_table`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress

from dllm_sampler import config
from dllm_sampler.errors import UserError
from dllm_sampler.eval.exact_match import HARD, Tally, held_out_prompts
from dllm_sampler.eval.oracle import decode
from dllm_sampler.eval.store import Plugins, Store
from dllm_sampler.result import Result
from dllm_sampler.sampler import Sampler
from dllm_sampler.training.tasks import TASKS
from dllm_sampler.training.tokenizer import vocabulary

ORACLE = "oracle"
ONE_PER_STEP = ("fixed", "origin", "budgeted", "pc", "certainty", "rcr", "remdm")  # until told how many steps
NEEDS = {
    "learn2pd": "needs a filter",
    "apd": "needs a verifier",
    "svdd": "needs a reward",
    "linear_spec": "needs a causal context",
    "s2d2": "needs a block-causal model",
    "s2d2_editing": "needs a block-causal model",
}  # methods that may lack what no default can give
SCHEMA = 1

Answer = Callable[[list[str]], tuple[Result, float | None]]  # prompts -> answers, and the seconds they took


@dataclass(frozen=True)
class Setup:
    """What is run, and where: figures of two setups are never mixed in one table."""

    model: str
    tasks: tuple[str, ...]
    prompts: int
    seed: int
    max_new_tokens: int
    block_length: int
    batch: int
    threads: int
    machine: str
    versions: str


@dataclass(frozen=True)
class Figures:
    """The answers of a method to a task's prompts, and the time per token of each batch (none for the oracle)."""

    tally: Tally
    milliseconds: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """The figures of one method."""

    method: str
    all: Tally
    easy: Tally | None
    hard: Tally | None
    milliseconds: float | None  # per token, the median batch

    @property
    def point(self) -> tuple[float, float]:
        """Tokens per forward, and exact match in %."""
        return self.all.tokens_per_forward, self.all.exact


def methods(setup: Setup) -> dict[str, Plugins]:
    """The plug-ins of each row: every scheduler, then blocks and stops that are methods.

    AdaBlock may end a block at a comma, which `mini` has for the line break of other models.
    """
    blocks, steps = {"name": "fixed", "length": setup.block_length}, max(1, setup.max_new_tokens // 4)
    found: dict[str, Plugins] = {name: {"scheduler": name} for name in config.names("scheduler")}
    found |= {f"{name} steps={steps}": {"scheduler": {"name": name, "steps": steps}} for name in ONE_PER_STEP}
    inner = {"_target_": config.entry("scheduler", "fixed").settings["_target_"], "steps": steps}
    ada = {"name": "adablock", "length": setup.block_length, "delimiters": [vocabulary()[", "]]}
    short = max(1, setup.block_length // 4)
    found |= {
        f"eoser inner.steps={steps}": {"scheduler": {"name": "eoser", "inner": inner}},
        "fixed steps=1": {"scheduler": {"name": "fixed", "steps": 1}},
        "threshold blocks=adablock": {"scheduler": "threshold", "blocks": ada},
        "ascending blocks=ascending": {"scheduler": "ascending", "blocks": "ascending"},
        "fixed stop=prophet": {"scheduler": "fixed", "stop": "prophet"},
        "fixed stop=end_of_text": {"scheduler": "fixed", "stop": "end_of_text"},
        **{
            f"{rule} blocks={name} blocks.length={short}": {
                "scheduler": rule,
                "blocks": {"name": name, "length": short},
            }
            for rule in ("threshold", "entropy")
            for name in ("fixed", "multi_block")
        },
        ORACLE: {"scheduler": ORACLE},
    }
    return {name: {"blocks": blocks, **plugins} for name, plugins in found.items()}


def settings(plugins: Plugins) -> Plugins:
    """The plug-ins with every default spelt out: a changed default is another measurement."""
    full = {}
    for group, spec in plugins.items():
        given = {"name": spec} if isinstance(spec, str) else spec
        known = {} if given["name"] == ORACLE else config.entry(group, given["name"]).settings
        full[group] = {**known, **given}
    return full


def store(path: Path, setup: Setup) -> Store[Figures]:
    """What is measured already: a method's answers to a task, and their times."""

    def read(entry: Mapping[str, Any]) -> Figures:
        return Figures(Tally(**entry["sums"]), tuple(entry["ms_per_token"]))

    def written(figures: Figures) -> dict[str, Any]:
        return {"sums": asdict(figures.tally), "ms_per_token": figures.milliseconds}

    about = {name: value for name, value in asdict(setup).items() if name != "tasks"}
    return Store(path, SCHEMA, about, settings, read, written)


def measure(answer: Answer, task: str, setup: Setup) -> Figures:
    """The answers to a task's prompts, batch by batch."""
    prompts, parts, pace = held_out_prompts(TASKS[task], setup.prompts, setup.seed), [], []
    for start in range(0, len(prompts), setup.batch):
        part = prompts[start : start + setup.batch]
        result, seconds = answer(part)
        parts.append(Tally.of(TASKS[task], part, result))
        if seconds is not None:
            pace.append(1000 * seconds / max(parts[-1].tokens, 1))
    return Figures(Tally.total(parts), tuple(pace))


def answering(base: Sampler, plugins: Plugins, setup: Setup) -> Answer:
    """What `measure` calls for a method. The time is that of the process: on a shared machine waiting is left out."""
    tokens, seed = setup.max_new_tokens, setup.seed
    if plugins["scheduler"] == ORACLE:
        rest = {group: spec for group, spec in plugins.items() if group != "scheduler"}

        def reproduce(prompts: list[str]) -> tuple[Result, float | None]:
            reference, oracle = decode(
                base.denoiser, prompts, max_new_tokens=tokens, seed=seed, tokenizer=base.tokenizer, **rest
            )
            assert reference.texts == oracle.texts and bool((oracle.nfe <= reference.nfe).all())
            return oracle, None  # it needs the answer first: there is no time to speak of

        return reproduce
    sampler = Sampler(base.denoiser, tokenizer=base.tokenizer, **plugins)

    def timed(prompts: list[str]) -> tuple[Result, float | None]:
        start = time.process_time()
        result = sampler.generate(prompts, max_new_tokens=tokens, seed=seed)
        return result, time.process_time() - start

    return timed


def run(base: Sampler, setup: Setup, store: Store[Figures], console: Console) -> tuple[list[Row], list[str]]:
    """Measure what the store does not have. Returns rows, and the methods that lack something.

    All methods answer one task before the next: a machine that gets slower or faster does so for all of them.
    """
    answers, lacking, chosen = {}, [], methods(setup)
    for method, plugins in chosen.items():
        try:
            if any(store.find(plugins, task) is None for task in setup.tasks):
                answers[method] = answering(base, plugins, setup)
        except UserError:
            if method not in NEEDS:
                raise
            lacking.append(method)
    warm = held_out_prompts(TASKS[setup.tasks[0]], min(setup.batch, setup.prompts))
    work = [(task, method) for task in setup.tasks for method in answers]
    with Progress(console=console, transient=True) as progress:
        shown = progress.add_task("", total=len(work))
        for done, (task, method) in enumerate(work):
            progress.update(shown, completed=done, description=f"{task}: {method}")
            if done < len(answers):
                answers[method](warm)  # the first call pays for what later ones reuse
            if store.find(chosen[method], task) is None:
                store.add(chosen[method], task, measure(answers[method], task, setup))
    rows = []
    for method, plugins in chosen.items():
        found = {task: store.find(plugins, task) for task in setup.tasks}
        if method not in lacking:
            rows.append(row(method, {task: figures for task, figures in found.items() if figures}))
    return rows, lacking


def row(method: str, found: Mapping[str, Figures]) -> Row:
    """A method's figures from those of each task."""

    def total(hard: bool) -> Tally | None:
        chosen = [figures.tally for task, figures in found.items() if (task in HARD) == hard]
        return Tally.total(chosen) if chosen else None

    pace = [time for figures in found.values() for time in figures.milliseconds]
    everything = Tally.total(figures.tally for figures in found.values())
    return Row(method, everything, total(False), total(True), median(pace) if pace else None)


def front(rows: Sequence[Row]) -> set[str]:
    """Methods to which no other is superior in both exact match and tokens per forward; the oracle is no method."""

    def beats(one: Row, other: Row) -> bool:
        return one.point != other.point and all(a >= b for a, b in zip(one.point, other.point, strict=True))

    rivals = [row for row in rows if row.method != ORACLE]
    return {row.method for row in rivals if not any(beats(other, row) for other in rivals)}
