"""What a search of `dllm-tune` found, and the experiment that it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from dllm_sampler import config
from dllm_sampler.cli.yours import LOCAL, entry
from dllm_sampler.eval.jobs import Job
from dllm_sampler.eval.space import Tuning

MARK = "Found by dllm-tune"


@dataclass(frozen=True)
class Found:
    """What a configuration reached over all tasks."""

    jobs: Sequence[Job]
    chosen: Sequence[str]  # its words, besides those of every trial
    score: float
    speed: float
    samples: int


def say(found: Found, tuning: Tuning) -> str:
    """Score and speed, for a person."""
    return f"{100 * found.score:.1f} % at {found.speed:.2f} {tuning.measure.replace('_', ' ')}"


def experiment(tuning: Tuning, winner: Found, fresh: Found, plain: Found, unseen: str) -> str:
    """The YAML file of the winner: what differs from the defaults.

    Args:
        tuning: the search.
        winner: what it chose.
        fresh, plain: the winner, and one token per step, on the samples that confirm it.
        unseen: how many of these the search has not seen.
    """
    job, defaults, body = winner.jobs[0], [], {}
    for group in config.GROUPS:
        name = job.choices[group]
        if group == "guide":
            if name != "none":
                defaults.append({"override /guide": name.split("+")})
                guides: Any = job.plugins["guide"]
                body["guide"] = {one["name"]: _fields("guide", one["name"], one) for one in guides}
            continue
        spec: Mapping[str, Any] = job.model if group == "model" else job.plugins[group]
        known = name if name in config.names(group) or (LOCAL / group / f"{name}.yaml").is_file() else "checkpoint"
        defaults.append({f"override /{group}": known})
        if fields := _fields(group, known, spec):
            body[group] = fields
    options = asdict(job.options)
    names = ("block_length", "temperature", "top_k", "top_p", "max_steps", "dtype", "compat", "chat")
    body |= {name: options[name] for name in names if options[name] not in (None, False, "auto")}
    body["max_new_tokens"] = job.max_new_tokens
    return (
        f"# @package _global_\n# {MARK}: {say(fresh, tuning)} on {tasks_of(winner)}; one token per step:"
        f" {say(plain, tuning)}; {unseen}.\n"
        + yaml.safe_dump({"defaults": defaults, **body}, sort_keys=False, allow_unicode=True)
    )


def _fields(group: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not the defaults of the choice."""
    defaults = entry(group, name).settings
    changed = {key: value for key, value in given.items() if value != defaults.get(key)}
    return {key: value for key, value in changed.items() if key not in ("name", "_target_")}


def tasks_of(found: Found) -> str:
    """The tasks with what was set of them."""
    names = set()
    for job in found.jobs:
        fields = {key: value for key, value in job.task.items() if value is not None}
        told = [str(value) for key, value in fields.items() if key not in ("name", "_target_", "count", "seed")]
        names.add(" ".join([job.choices["task"], *told]))
    return ", ".join(sorted(names))
