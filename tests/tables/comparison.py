"""Compares a scheduler's answers and cost with those of one token per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from dllm_sampler.inputs.prompts import Prompt
from dllm_sampler.result import Result
from dllm_sampler.sampler import Sampler

Check = Callable[[str], bool]  # whether a text is a right answer
Figures = dict[str, float]
# what the columns of a table are called, and how their figures are written
COLUMNS = {
    "same": ("same", "{:.1%}"),
    "right": ("right", "{:.1%}"),
    "nfe": ("forwards", "{:.2f}"),
    "tokens_per_forward": ("tokens per forward", "{:.2f}"),
    "seconds": ("seconds", "{:.2f}"),
    "speed_up": ("speed-up", "{:.1f}"),
}


def compare(
    samplers: Mapping[str, Sampler],
    prompts: Sequence[Prompt],
    new_tokens: int,
    batch: int,
    checks: Sequence[Check] | None = None,
) -> dict[str, Figures]:
    """Return the figures of each sampler by its name; the first is the one that the others are measured by.

    `same`: share of answers that are the first one's, up to the end token; `right`: share that the checks accept (with
    `checks` only); `nfe`: mean forwards of an answer; `tokens_per_forward`: of all answers, end tokens counted once;
    `seconds`: wall-clock time of all; `speed_up`: the first one's seconds over its own.
    """
    batches = [list(prompts[first : first + batch]) for first in range(0, len(prompts), batch)]
    results: dict[str, list[Result]] = {name: [] for name in samplers}
    seconds = dict.fromkeys(samplers, 0.0)
    for sampler in samplers.values():
        sampler.generate(batches[0][:1], max_new_tokens=new_tokens)  # what only a first call costs
    for some in batches:  # all take turns, so that whatever else the machine does hits them alike
        for name, sampler in samplers.items():
            began = time.perf_counter()
            results[name].append(sampler.generate(some, max_new_tokens=new_tokens))
            seconds[name] += time.perf_counter() - began
    first = next(iter(samplers))
    own = _answers(results[first])
    found: dict[str, Figures] = {}
    for name, some in results.items():
        nfe = torch.cat([result.nfe for result in some])
        found[name] = {
            "same": _share(a == b for a, b in zip(_answers(some), own, strict=True)),
            "nfe": float(nfe.double().mean()),
            "tokens_per_forward": float(torch.cat([result.lengths for result in some]).sum() / nfe.sum()),
            "seconds": seconds[name],
            "speed_up": seconds[first] / seconds[name],
        }
        if checks is not None:
            texts = [text for result in some for text in result.texts or ()]
            found[name]["right"] = _share(check(text) for check, text in zip(checks, texts, strict=True))
    return found


def rows(found: Mapping[str, Figures]) -> tuple[list[str], list[list[str]]]:
    """Return the figures as text: the head of a table, and its rows."""
    kinds = [kind for kind in COLUMNS if any(kind in figures for figures in found.values())]
    cells = [[name, *(COLUMNS[kind][1].format(figures[kind]) for kind in kinds)] for name, figures in found.items()]
    return ["scheduler", *(COLUMNS[kind][0] for kind in kinds)], cells


def _answers(results: Sequence[Result]) -> list[list[int]]:
    """Return token ids up to and with the end token."""
    rows = [pair for one in results for pair in zip(one.tokens.tolist(), one.lengths.tolist(), strict=True)]
    return [row[:length] for row, length in rows]


def _share(each: Iterable[bool]) -> float:
    found = list(each)
    return sum(found) / len(found)
