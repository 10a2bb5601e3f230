"""Figures of the drafters of a DEER run (arXiv 2512.15176) and of plain decoding, on the same prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dllm_sampler.generation.speculative import SpeculativeSampler
from dllm_sampler.result import Speculation
from dllm_sampler.sampler import Sampler


def measured(
    sampler: Callable[[Any, float], Sampler],
    target: str,
    drafters: Mapping[str, tuple[Any, str | None]],
    prompts: Sequence[list[int]],
    right: Callable[[int, Speculation], float] | None,
    temperatures: Sequence[float],
    *,
    draft_length: int,
    new_tokens: int,
) -> dict[str, Any]:
    """Return figures of each drafter and of plain decoding, prompt by prompt, in turns.

    Args:
        sampler: makes one of a model and a temperature.
        target: what judges.
        drafters: model and separator of each.
        prompts: token ids.
        right: returns how right the answer to a numbered prompt is. None leaves it out.
        temperatures: of each table.
        draft_length: tokens of a draft.
        new_tokens: longest answer.
    """
    report: dict[str, Any] = {}
    first = next(iter(drafters.values()))[0]
    for temperature in temperatures:
        arms = {"plain": SpeculativeSampler(sampler(first, temperature), target, draft_length=0)}
        for name, (model, separator) in drafters.items():
            drafter = sampler(model, temperature)
            arms[name] = SpeculativeSampler(drafter, target, draft_length=draft_length, separator=separator)
        results: dict[str, list[Speculation]] = {name: [] for name in arms}
        seconds = dict.fromkeys(arms, 0.0)
        for number, prompt in enumerate(prompts):
            for name, arm in arms.items():
                begun = time.process_time()
                results[name].append(arm.generate(prompt, max_new_tokens=new_tokens, seed=number))
                seconds[name] += time.process_time() - begun
        plain = results["plain"]
        report[f"temperature {temperature:g}"] = {
            name: {
                **_figures(found),
                "cpu_seconds": round(seconds[name], 3),
                "speed_up": round(seconds["plain"] / seconds[name], 3),
                **({} if right is None else {"right": sum(map(right, range(len(found)), found)) / len(found)}),
                "same_answer": sum(a.texts == b.texts for a, b in zip(found, plain, strict=True)) / len(plain),
            }
            for name, found in results.items()
        }
    return report


def _figures(results: list[Speculation]) -> dict[str, float]:
    rounds = sum(int(result.nfe.sum()) for result in results)
    accepted = sum(int(result.accepted.clamp(min=0).sum()) for result in results)
    return {
        "mean_accepted": round(accepted / rounds, 3),
        "tokens_per_round": round(sum(int(result.lengths.sum()) for result in results) / rounds, 3),
        "rounds": rounds / len(results),
    }
