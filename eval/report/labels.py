"""What runs are called: by that in which they differ."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_sampler.eval.jobs import LATER

if TYPE_CHECKING:
    from dllm_sampler.eval.report.data import Run

GROUPS = ("scheduler", "cache", "blocks", "stop", "guide", "model")
LEFT_OUT = ("_target_", "name", "path", "content")  # settings that no label shows


@dataclass(frozen=True)
class Label:
    """What a run is called.

    task: its task; method: all else; family: the same for methods that differ in numbers alone
    settings: the numbers that vary, by their names in `method`
    """

    task: str
    method: str
    family: str
    settings: Mapping[str, float]


def named(runs: Sequence[Run]) -> list[Label]:
    """A label for each run. No two runs have the same task and method."""
    tasks = _tasks(runs)
    methods = _methods(runs)
    labels = _apart(runs, tasks, [(method, family) for method, family, _ in methods])
    return [
        Label(task, method, family, settings)
        for task, (method, family), (*_, settings) in zip(tasks, labels, methods, strict=True)
    ]


def _tasks(runs: Sequence[Run]) -> list[str]:
    """A label of each run's task; with the hash of its files where these changed between runs."""
    settings = [run.about["config"]["task"] for run in runs]
    labels = _labels(
        [{"name": run.about["choices"]["task"], **leaves(given)} for run, given in zip(runs, settings, strict=True)]
    )
    known: dict[str, set[str | None]] = {}
    for label, given in zip(labels, settings, strict=True):
        known.setdefault(label, set()).add(given.get("content"))
    return [
        f"{label} ({str(given.get('content'))[:6]})" if len(known[label]) > 1 else label
        for label, given in zip(labels, settings, strict=True)
    ]


def usual(runs: Sequence[Run]) -> dict[str, str]:
    """Plug-ins that labels leave out although they vary: the one of a group that more than three quarters have."""
    found = {}
    for group in GROUPS[1:]:
        (name, most), *others = Counter(str(run.about["choices"][group]) for run in runs).most_common()
        if others and 4 * most > 3 * len(runs):
            found[group] = name
    return found


def _methods(runs: Sequence[Run]) -> list[tuple[str, str, dict[str, float]]]:
    """A label and a family for each run: the scheduler, the other plug-ins that vary, the fields that vary. And of
    these the numbers."""
    chosen = [{group: str(run.about["choices"][group]) for group in GROUPS} for run in runs]
    names, common = {group: {one[group] for one in chosen} for group in GROUPS}, usual(runs)
    fields = [_fields(run.config, one) for run, one in zip(runs, chosen, strict=True)]
    known: dict[str, set[str]] = {}
    for one in fields:
        for key, value in one.items():
            known.setdefault(key, set()).add(json.dumps(value))
    told = _names(known)
    found = []
    for one, own in zip(chosen, fields, strict=True):
        plugins = [group for group in GROUPS[1:] if len(names[group]) > 1 and one[group] != common.get(group)]
        words = [one["scheduler"], *(f"{group}={one[group]}" for group in plugins)]
        varied = {told[key]: value for key, value in own.items() if key in told and value is not None}
        kinds = {key: value for key, value in varied.items() if isinstance(value, str | bool | list)}
        # "threshold 0.9", not "threshold threshold=0.9"
        label, family = (
            " ".join([*words, *(_say(v) if key == one["scheduler"] else f"{key}={_say(v)}" for key, v in some.items())])
            for some in (varied, kinds)
        )
        found.append((label, family, {key: value for key, value in varied.items() if key not in kinds}))
    return found


def _names(known: Mapping[str, set[str]]) -> dict[str, str]:
    """What each field that varies is called: by itself, with its group where that could be another group's.

    The scheduler's keep the short name unless another one of that name varies, too.
    """
    varied = [key for key, values in known.items() if len(values) > 1]

    def split(key: str) -> tuple[str, str]:
        owner, _, name = key.rpartition(":")
        return owner.partition("=")[0], name

    found = {}
    for key in varied:
        group, name = split(key)
        rivals = varied if group == "scheduler" else known
        shared = any(split(other)[1] == name and split(other)[0] != group for other in rivals)
        found[key] = f"{group}.{name}" if group and shared else name
    return found


def _apart(runs: Sequence[Run], tasks: Sequence[str], labels: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The labels, those that stand for several runs of one task with what tells these apart: the folder that they lie
    in, else the model's path, else the hash of the configuration."""
    here: dict[str, list[int]] = {}
    for place, (label, _) in enumerate(labels):
        here.setdefault(label, []).append(place)
    found = list(labels)
    for label, places in here.items():
        if len({tasks[place] for place in places}) == len(places):
            continue
        root = Path(os.path.commonpath([runs[place].folder.parent for place in places]))
        ways: list[Callable[[Run], str]] = [
            lambda run, root=root: str(run.folder.relative_to(root)),
            lambda run: str(run.about["config"]["model"].get("path")),
            lambda run: str(run.about["name"]).rpartition("-")[2],
        ]
        told = [[way(runs[place]) for place in places] for way in ways]
        told.append([" ".join(ways) for ways in zip(*told, strict=True)])
        each = [one for one in told if len({(tasks[p], t) for p, t in zip(places, one, strict=True)}) == len(places)]
        for place, one in zip(places, each[0], strict=True):
            found[place] = (f"{label} ({one})", f"{labels[place][1]} ({one})")
    return found


def _fields(config: Mapping[str, Any], chosen: Mapping[str, str]) -> dict[str, Any]:
    """Settings by a key that two runs share if the same plug-in has them: `scheduler=threshold:threshold`."""
    found: dict[str, Any] = {f":{name}": value for name, value in LATER.items()}  # what a run does not list
    for group, value in config.items():
        if isinstance(value, Mapping):
            owner = f"{group}={chosen.get(group, '')}"
            found |= {f"{owner}:{key}": leaf for key, leaf in leaves(value).items()}
        elif group == "guide":
            for guide in value:
                found |= {f"{guide['name']}:{guide['name']}.{key}": leaf for key, leaf in leaves(guide).items()}
        else:
            found[f":{group}"] = value
    return found


def leaves(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings of a plug-in or task by their dotted names, but for those that say where they come from."""
    found = {}
    for key, value in settings.items():
        if key in LEFT_OUT:
            continue
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each of them: `name`, and the values of the fields in which those of that name differ."""
    known: dict[tuple[str, str], set[str]] = {}
    for one in settings:
        for key, value in one.items():
            known.setdefault((one["name"], key), set()).add(json.dumps(value))
    names = {one["name"] for one in settings}

    def label(one: Mapping[str, Any]) -> str:
        varied = [key for key in one if key != "name" and len(known[one["name"], key]) > 1]
        told = [_say(one[key]) if isinstance(one[key], str) else f"{key}={_say(one[key])}" for key in varied]
        return " ".join([one["name"]] * (len(names) > 1 or not told) + told)

    return [label(one) for one in settings]


def _say(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
