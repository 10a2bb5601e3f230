"""Measuring every cache against no cache on the same canvases, resumably: the runs behind `eval.cache_table`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from dllm_sampler import config, prompts
from dllm_sampler.batch import Reader
from dllm_sampler.cache.base import Slots
from dllm_sampler.core.protocols import Cache, Denoiser, Plan
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.trace import Recorder
from dllm_sampler.core.values import Canvas, Query, Spent
from dllm_sampler.engine import layout
from dllm_sampler.engine.decide import Generation
from dllm_sampler.engine.loop import Engine
from dllm_sampler.eval.exact_match import held_out_prompts
from dllm_sampler.eval.scheduler_runs import Setup, settings
from dllm_sampler.eval.store import Plugins, Store
from dllm_sampler.prompts import Prompt
from dllm_sampler.sampler import Sampler
from dllm_sampler.training.tasks import TASKS

SCHEMA = 1
# Refused by models that see the whole canvas; `exact` is `none` there.
APART = ("block_causal", "sub_block", "exact")
RANDOM_WORDS = "random words"  # the task of a model without training


@dataclass(frozen=True)
class CacheSetup(Setup):
    """What is run, and where."""

    parallel: Plugins  # the scheduler of all caches
    foreseen: Plugins  # the one of caches that must know what comes
    prompt_length: int = 0  # of random words
    max_steps: int | None = None
    every: int = 1  # one step in this many is repeated without a cache

    def plugins(self, cache: str) -> Plugins:
        """What a cache is measured with."""
        foresees = cache == "dkv_greedy" or cache.startswith("none ")
        return {
            "cache": cache.partition(" ")[0],
            "scheduler": self.foreseen if foresees else self.parallel,
            "blocks": {"name": "fixed", "length": self.block_length},
            "stop": "prefix" if self.tasks != (RANDOM_WORDS,) else "none",
        }


@dataclass(frozen=True)
class Figures:
    """Sums over the generations of one task."""

    right: int  # answers
    answers: tuple[tuple[int, ...], ...]  # tokens, up to the first end token
    steps: int
    computed: int  # positions, over steps and rows that live
    columns: int  # the same without a cache
    whole: int  # steps that compute every position
    seconds: float  # process time of all steps
    seconds_without: float  # of the steps that were repeated without a cache
    repeated: int
    divergence: float  # sum over predictions, in nats
    predictions: int
    bytes_per_token: float  # held by the live cache per column and row

    @staticmethod
    def total(parts: Sequence[Figures]) -> Figures:
        """All of them together."""
        sums = {name: sum(getattr(one, name) for one in parts) for name in SUMS}
        held = max(one.bytes_per_token for one in parts)
        return Figures(answers=tuple(row for one in parts for row in one.answers), bytes_per_token=held, **sums)


SUMS = [one.name for one in fields(Figures) if one.name not in ("answers", "bytes_per_token")]


def store(path: Path, setup: CacheSetup) -> Store[Figures]:
    """What is measured already."""

    def read(entry: Mapping[str, Any]) -> Figures:
        answers = tuple(tuple(row) for row in entry["figures"]["answers"])
        return Figures(**{**entry["figures"], "answers": answers})

    about = {name: value for name, value in asdict(setup).items() if name not in ("tasks", "parallel", "foreseen")}
    return Store(path, SCHEMA, about, settings, read, lambda figures: {"figures": asdict(figures)})


def caches() -> list[str]:
    """The rows: no cache first, also as the schedule has it that `dkv_greedy` needs."""
    rest = [name for name in config.names("cache") if name not in (*APART, "none")]
    return ["none", *rest, "none random_order"]


def tensors(held: object) -> Iterator[Tensor]:
    """The tensors that a live cache holds, in fields, lists and objects of its own."""
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, Mapping):
        for value in held.values():
            yield from tensors(value)
    elif isinstance(held, list | tuple):
        for value in held:
            yield from tensors(value)
    elif isinstance(held, Cache | Slots) or (is_dataclass(held) and not isinstance(held, ModelSpec)):
        yield from tensors(vars(held))


def bytes_held(cache: Cache) -> int:
    """Bytes of the storage behind these tensors, each one once."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors(cache)}
    return sum(storages.values())


class Spy:
    """The denoiser, with what it was asked last and what it answered."""

    def __init__(self, inner: Denoiser):
        self.inner = inner
        self.plan: Plan
        self.hidden: Tensor  # [R, D]; logits would not do, a readout overwrites them

    @property
    def spec(self) -> ModelSpec:
        """See `Denoiser.spec`."""
        return self.inner.spec

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        """See `Denoiser.__call__`."""
        self.plan = plan
        self.hidden, spent = self.inner(canvas, query, plan)
        return self.hidden, spent

    def head(self, hidden: Tensor) -> Tensor:
        """See `Denoiser.head`."""
        return self.inner.head(hidden)

    @property
    def asked(self) -> tuple[Tensor, Tensor]:
        """`[B, Q]` sorted positions of the last query, and `[B, Q] bool` which of them were answered."""
        wanted = self.plan.wanted
        return wanted.query.positions.contiguous(), wanted.asked[:, 0]

    def says(self, row: Tensor, place: Tensor) -> Tensor:
        """Log-probabilities `[N, V]` of the answers at the rows and places `[N]` of the last query."""
        hidden = self.plan.answers.spread(self.hidden)[row, 0, place]
        return self.inner.head(hidden).double().log_softmax(-1)


def divergence(canvas: Canvas, without: Spy, served: Spy) -> tuple[float, int]:
    """Sum of KL(no cache, cache) in nats over the masks of the block that both predict, and how many these are."""
    (at, answered), (all_masks, all_answered) = served.asked, without.asked
    place = torch.searchsorted(all_masks, at).clamp(max=all_masks.shape[1] - 1)
    both = (all_masks.gather(1, place) == at) & all_answered.gather(1, place) & answered & canvas.eligible(at)
    row, column = both.nonzero(as_tuple=True)
    true, ours = without.says(row, place[row, column]), served.says(row, column)
    return float((true.exp() * (true - ours)).sum()), len(row)


def timed(engine: Engine, state: Generation, step: int) -> float:
    """One step; its process time, which leaves out waiting on a shared machine."""
    start = time.process_time()
    engine.step(state)
    engine.poll(state, step)
    return time.process_time() - start


@torch.no_grad()
def follow(base: Sampler, plugins: Plugins, given: Sequence[Prompt], setup: CacheSetup) -> tuple[Figures, list[str]]:
    """A generation, step by step; every so often the step is made without a cache too, on the same canvas."""
    sampler = Sampler(base.denoiser, tokenizer=base.tokenizer, **plugins)
    other = Sampler(base.denoiser, tokenizer=base.tokenizer, **{**plugins, "cache": "none"})
    served, without = Spy(base.denoiser), Spy(base.denoiser)
    engine, reference = Engine(served, sampler.plugins, 1), Engine(without, other.plugins, 1)
    chosen, spec = sampler.plugins, base.denoiser.spec
    rows = prompts.encode(list(given), base.tokenizer, spec, setup.max_new_tokens)
    seeds = [setup.seed + i for i in range(len(rows))]
    canvas = layout.canvas(rows, setup.max_new_tokens, seeds, spec, chosen.blocks, sampler.noise, cuts=chosen.stop.cuts)
    state = engine.begin(canvas)
    sums: dict[str, Any] = dict.fromkeys(SUMS, 0)
    held = 0
    for step in range(1, (setup.max_steps or chosen.scheduler.bound(setup.max_new_tokens)) + 1):
        before, repeats = state.canvas, (step - 1) % setup.every == 0 and plugins["cache"] != "none"
        if repeats:
            plain = replace(state, cache=other.plugins.cache.init(before, spec), recorder=Recorder(before))
            reference.ask(plain)
            reference.poll(plain, 0)
            sums["seconds_without"] += timed(reference, plain, step)
        seconds = timed(engine, state, step)
        if repeats:
            found, count = divergence(before, without, served)
            sums["divergence"] += found
            sums["predictions"] += count
            sums["repeated"] += 1
        columns = int((before.seen().sum(1) * ~before.done).sum())
        computed = int((state.canvas.computed - before.computed).sum())
        sums["computed"] += computed
        sums["columns"] += columns
        sums["whole"] += computed == columns
        sums["seconds"] += seconds
        sums["steps"] += 1
        held = max(held, bytes_held(state.cache))
        if state.finished:
            break
    result = Reader(spec, base.tokenizer, ()).result(state.canvas, state.recorder)
    answers = tuple(
        tuple(row[:length]) for row, length in zip(result.tokens.tolist(), result.lengths.tolist(), strict=True)
    )
    return Figures(answers=answers, bytes_per_token=held / (len(rows) * canvas.length), **sums), result.texts or []


def measure(base: Sampler, plugins: Plugins, task: str, setup: CacheSetup) -> Figures:
    """The generations of one task, batch by batch."""
    if task == RANDOM_WORDS:
        rng, mask = Random(setup.seed), base.denoiser.spec.mask_id
        words = [word for word in range(2, base.denoiser.spec.vocab_size) if word != mask]
        given: list[Any] = [rng.choices(words, k=setup.prompt_length) for _ in range(setup.prompts)]
    else:
        given = held_out_prompts(TASKS[task], setup.prompts, setup.seed)
    parts = []
    for start in range(0, len(given), setup.batch):
        part = given[start : start + setup.batch]
        figures, texts = follow(base, plugins, part, setup)
        if task != RANDOM_WORDS:
            right = sum(TASKS[task].check(prompt, text) for prompt, text in zip(part, texts, strict=True))
            figures = replace(figures, right=right)
        parts.append(figures)
    return Figures.total(parts)


@dataclass(frozen=True)
class Row:
    """A cache's figures, with those of no cache under the same schedule."""

    cache: str
    figures: Figures
    without: Figures

    @property
    def share(self) -> float:
        """Positions computed, in %."""
        return 100 * self.figures.computed / self.figures.columns

    @property
    def milliseconds(self) -> float:
        """Process time of a step, the mean: a median would hide the refreshes."""
        return 1000 * self.figures.seconds / self.figures.steps

    @property
    def ratio(self) -> float:
        """Mean time of a step over that of the steps repeated without a cache."""
        found = self.figures
        return found.seconds / found.steps * found.repeated / found.seconds_without if found.repeated else 1.0

    @property
    def agreement(self) -> float:
        """Tokens in % that are those of no cache, over the answers of the latter."""
        pairs = zip(self.figures.answers, self.without.answers, strict=True)
        equal = sum(sum(a == b for a, b in zip(mine, true, strict=False)) for mine, true in pairs)
        return 100 * equal / max(1, sum(len(true) for true in self.without.answers))

    @property
    def divergence(self) -> float:
        """Mean KL(no cache, cache) in nats."""
        return self.figures.divergence / max(1, self.figures.predictions)

    @property
    def exact(self) -> float:
        """Right answers in %."""
        return 100 * self.figures.right / len(self.figures.answers)


def run(base: Sampler, setup: CacheSetup, found: Store[Figures], console: Console) -> list[Row]:
    """Measure what the store does not have, all caches on one task before the next."""
    chosen = {cache: setup.plugins(cache) for cache in caches()}
    work = [(task, cache) for task in setup.tasks for cache in chosen if found.find(chosen[cache], task) is None]
    with Progress(console=console, transient=True) as progress:
        shown = progress.add_task("", total=len(work))
        for done, (task, cache) in enumerate(work):
            progress.update(shown, completed=done, description=f"{setup.model}, {task}: {cache}")
            if done == 0 or (task != RANDOM_WORDS and done < len(chosen)):  # the first call pays for later ones
                measure(base, chosen[cache], task, replace(setup, prompts=min(setup.batch, setup.prompts), max_steps=1))
            found.add(chosen[cache], task, measure(base, chosen[cache], task, setup))

    def figures(cache: str) -> Figures:
        parts = [found.find(chosen[cache], task) for task in setup.tasks]
        return Figures.total([one for one in parts if one is not None])

    each = {cache: figures(cache) for cache in chosen}
    return [Row(cache, each[cache], each[without(chosen, cache)]) for cache in chosen]


def without(chosen: Mapping[str, Plugins], cache: str) -> str:
    """The row without a cache under the schedule of `cache`."""
    return next(
        name for name in ("none", "none random_order") if chosen[name]["scheduler"] == chosen[cache]["scheduler"]
    )
