"""Checks that drafting changes no token, and measures what it saves; writes docs/drafting.md.

`python -m dllm_sampler.eval.drafting [--model mini] [--prompts 20] [--timed 24] [--page docs/drafting.md]`
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from dllm_sampler.eval.mini_card import held_out_prompts, table
from dllm_sampler.protocols import Denoiser
from dllm_sampler.result import Result
from dllm_sampler.sampler import Sampler
from dllm_sampler.training.tasks import TASKS

CANVAS, BLOCK, BATCH = 32, 16, 25
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
    "freedave 8, tree mask": {"name": "freedave", "draft": 8, "layout": "tree"},
    "freedave 4, eager": {"name": "freedave", "draft": 4, "eager": True},
    "ssd 3, width 3": {"name": "ssd", "length": 3, "width": 3},
}
CACHES = ("none", "prefix", "dual")


@dataclass(frozen=True)
class Agreement:
    """How the rows of one drafting method came out against the scheduler inside, over every cache."""

    base: str
    draft: str
    rows: int
    equal: int
    saved: float  # share of forwards that were not needed


def same_path(alone: Result, drafted: Result) -> Tensor:
    """`[B] bool` rows with equal tokens whose states are among those that the scheduler alone went through.

    That is so where what one step commits is committed together, and never before what an earlier step commits.
    """
    then, now = alone.trace.generated, drafted.trace.generated  # [B, N]
    ordered = (then[:, :, None] >= then[:, None]) | (now[:, :, None] <= now[:, None])
    together = (then[:, :, None] != then[:, None]) | (now[:, :, None] == now[:, None])
    tokens = (alone.tokens == drafted.tokens).all(1)
    return tokens & (ordered & together).flatten(1).all(1) & (drafted.nfe <= alone.nfe)


def compare(denoiser: Denoiser, tokenizer: Any, prompts: Sequence[str]) -> Iterator[Agreement]:
    """Each drafting method around each scheduler under each cache it may have, in float64, in ragged batches."""
    work = list(product(BASES, DRAFTS))
    alone: dict[tuple[str, str], list[Result]] = {}
    for base, draft in track(work, "comparing", console=Console(stderr=True), transient=True):
        rows = equal = before = after = 0
        for cache in CACHES[:1] if DRAFTS[draft].get("eager") else CACHES:
            if (base, cache) not in alone:
                alone[base, cache] = list(run(denoiser, tokenizer, BASES[base], cache, prompts))
            drafted = run(denoiser, tokenizer, {**DRAFTS[draft], "inner": BASES[base]}, cache, prompts)
            for one, two in zip(alone[base, cache], drafted, strict=True):
                rows, equal = rows + len(one.nfe), equal + int(same_path(one, two).sum())
                before, after = before + int(one.nfe.sum()), after + int(two.nfe.sum())
        yield Agreement(base, draft, rows, equal, 1 - after / before)


def run(
    denoiser: Denoiser, tokenizer: Any, scheduler: Settings, cache: str, prompts: Sequence[str]
) -> Iterator[Result]:
    """Answers batch by batch."""
    blocks = {"name": "fixed", "length": BLOCK}
    sampler = Sampler(denoiser, tokenizer=tokenizer, scheduler=scheduler, cache=cache, blocks=blocks, stop="none")
    for start in range(0, len(prompts), BATCH):
        yield sampler.generate(prompts[start : start + BATCH], max_new_tokens=CANVAS)


def agreement(found: Sequence[Agreement]) -> str:
    """The table of comparisons: forwards saved, and rows that differ if there are any."""
    cells = {(one.base, one.draft): one for one in found}

    def cell(one: Agreement) -> str:
        return f"{100 * one.saved:.0f} %" + (f", {one.rows - one.equal} DIFFER" if one.equal < one.rows else "")

    return table(["", *BASES], [[draft, *(cell(cells[base, draft]) for base in BASES)] for draft in DRAFTS])


def cost(model: str, prompts: Sequence[str], base: str, cache: str, device: str) -> str:
    """Forwards, positions computed and time by the number of branches, one prompt at a time."""
    drafts: dict[str, Settings] = {"alone": BASES[base]}
    for draft in range(1, 9):
        for layout in ("batch", "tree") if draft > 1 else ("batch",):
            drafts[f"{draft}, {layout}"] = {
                "name": "freedave", "inner": BASES[base], "draft": draft, "layout": layout,
            }  # fmt: skip
    loaded = Sampler.from_pretrained(model, device=device)
    samplers = {
        name: Sampler(loaded.denoiser, tokenizer=loaded.tokenizer, scheduler=spec, cache=cache, stop="none")
        for name, spec in drafts.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in drafts}
    nfe, rows, ratio = dict.fromkeys(drafts, 0), dict.fromkeys(drafts, 0), {}
    shown = track([prompts[0], *prompts], "timing", console=Console(stderr=True), transient=True)
    for number, prompt in enumerate(shown):
        for name, sampler in samplers.items():  # in turns, so that a busy machine slows all alike
            begun = perf_counter()
            result = sampler.generate(prompt, max_new_tokens=CANVAS, block_length=CANVAS)
            if number:  # the first one warms up
                seconds[name].append(perf_counter() - begun)
                nfe[name], rows[name] = nfe[name] + int(result.nfe), rows[name] + int(result.trace.rows)
    for name in drafts:
        ratio[name] = median(a / b for a, b in zip(seconds["alone"], seconds[name], strict=True))
    return table(
        ["branches", "forwards", "positions computed", "ms per forward", "times as fast"],
        [
            [
                name,
                f"{nfe[name] / len(prompts):.1f}",
                f"{rows[name] / len(prompts):.0f}",
                f"{1000 * sum(seconds[name]) / nfe[name]:.2f}",
                f"{ratio[name]:.2f}",
            ]
            for name in drafts
        ],
    )


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; 1 where some row differs."""
    parser = argparse.ArgumentParser(prog="python -m dllm_sampler.eval.drafting", description=__doc__)
    parser.add_argument("--model", default="mini", help="a model that answers mini's tasks")
    parser.add_argument("--prompts", type=int, default=20, help="prompts per task that are compared")
    parser.add_argument("--timed", type=int, default=24, help="prompts that are timed")
    parser.add_argument("--page", type=Path, help="Markdown file whose part between the marks is replaced")
    options = parser.parse_args(words)
    prompts = [prompt for task in TASKS.values() for prompt in held_out_prompts(task, options.prompts)]
    exact = Sampler.from_pretrained(options.model, dtype="float64")
    found = list(compare(exact.denoiser, exact.tokenizer, prompts))
    timed = [held_out_prompts(task, 1 + i)[i] for i in range(options.timed) for task in TASKS.values()][: options.timed]
    parts = [
        f"{len(prompts)} prompts in ragged batches of {BATCH}, {CANVAS} tokens in blocks of {BLOCK}, float64, caches"
        f" {', '.join(CACHES)} (eager: none): {sum(one.rows for one in found)} rows compared,"
        f" {sum(one.rows - one.equal for one in found)} differ. Forwards saved:",
        agreement(found),
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for base, cache in (("fixed", "dual"), ("fixed", "none"), ("threshold 0.9", "dual")):
        parts.append(
            f"{options.model} on {device}, float32, {options.timed} prompts one at a time, {CANVAS} tokens in one"
            f" block; inside: {base}; cache={cache}; {torch.get_num_threads()} threads."
        )
        parts.append(cost(options.model, timed, base, cache, device))
    if device == "cpu":
        parts.append("There was no GPU: how long a step takes there by the number of branches was not measured.")
    text = "\n\n".join(parts)
    print(text)
    if options.page is not None:
        page = options.page.read_text(encoding="utf-8")
        marked = re.sub(r"(<!-- measured -->\n).*(<!-- end -->)", lambda m: f"{m[1]}{text}\n{m[2]}", page, flags=re.S)
        options.page.write_text(marked, encoding="utf-8")
    return int(any(one.equal < one.rows for one in found))


if __name__ == "__main__":
    sys.exit(main())
