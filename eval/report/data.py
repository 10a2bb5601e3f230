"""Runs read from their directories, named by what differs between them, and put together into methods."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from dllm_sampler.errors import UserError
from dllm_sampler.eval.curves import front
from dllm_sampler.eval.folders import ABOUT, RunFolder
from dllm_sampler.eval.jobs import LATER
from dllm_sampler.eval.measures import summary
from dllm_sampler.eval.records import Record

RATES = ("answer_tokens_per_forward", "canvas_tokens_per_forward", "tokens_per_second")
GROUPS = ("scheduler", "cache", "blocks", "stop", "guide", "model")
Figures = dict[str, float | None]


@dataclass(frozen=True)
class Run:
    """One configuration on one task, and its samples."""

    about: Mapping[str, Any]
    records: Sequence[Record]
    folder: Path = Path()  # the one that dllm-eval was told to write to

    @cached_property
    def figures(self) -> Figures:
        """Every measure."""
        return summary(self.records, self.about["score"]) | self.together

    @property
    def together(self) -> Figures:
        """What the task says of all answers together, once all are there."""
        return self.about.get("measures") or {}

    @property
    def config(self) -> dict[str, Any]:
        """All settings but the task's."""
        return {key: value for key, value in self.about["config"].items() if key != "task"}

    @property
    def missing(self) -> int:
        """Samples that are not there yet."""
        return self.about["samples"] - len(self.records)


@dataclass(frozen=True)
class Method:
    """One configuration on all its tasks."""

    label: str
    family: str  # the same for methods that differ in numbers alone
    runs: Mapping[str, Run]  # by the task's label

    def figures(self, tasks: Iterable[str]) -> Figures:
        """Every measure over several tasks: the score is the mean of theirs, whatever their sizes; the others are of
        all samples. The bounds of the score's interval follow from those of the tasks (MOVER). What a task says of all
        its answers together is the mean over tasks, where each has it."""
        runs = [self.runs[task] for task in tasks]
        everything = [record for run in runs for record in run.records]
        each = [run.figures for run in runs]
        score = fmean(_number(one["score"]) for one in each)

        def away(bound: str) -> float:
            return math.sqrt(sum((_number(one["score"]) - _number(one[bound])) ** 2 for one in each)) / len(each)

        scored = {id(record): run.about["score"] for run in runs for record in run.records}
        found = summary(everything, lambda record: record.scores[scored[id(record)]])
        bounds = {"score_low": score - away("score_low"), "score_high": score + away("score_high")}
        shared = [name for name in runs[0].together if all(name in run.together for run in runs)]
        return found | {"score": score, **bounds} | {name: _mean(run.together[name] for run in runs) for name in shared}


@dataclass(frozen=True)
class Comparison:
    """All that a report is about.

    methods: those with samples; tasks: label -> dependency; refused: label -> why
    """

    methods: Sequence[Method]
    tasks: Mapping[str, str | None]
    refused: Sequence[tuple[str, str]]
    missing: int  # samples of unfinished runs
    environments: Sequence[Mapping[str, Any]]

    @cached_property
    def views(self) -> dict[str, list[str]]:
        """Which tasks are looked at together, by name: all, those of a group, each alone."""
        found = {"all tasks": list(self.tasks)}
        for level in ("low", "high"):
            group = [task for task, dependency in self.tasks.items() if dependency == level]
            if group and len(group) < len(self.tasks):
                found[f"{level} dependency"] = group
        return found | ({task: [task] for task in self.tasks} if len(self.tasks) > 1 else {})

    @cached_property
    def figures(self) -> dict[str, dict[str, Figures]]:
        """View -> method's label -> its measures; a method that lacks one of the tasks is left out."""
        return {
            view: {
                method.label: method.figures(tasks)
                for method in self.methods
                if all(task in method.runs for task in tasks)
            }
            for view, tasks in self.views.items()
        }

    @cached_property
    def together(self) -> list[str]:
        """The names of what tasks say of all answers together."""
        found = [run.together for method in self.methods for run in method.runs.values()]
        return list(dict.fromkeys(name for one in found for name in one))

    @cached_property
    def reference(self) -> Method | None:
        """One token per step: what the others are measured against, the best if there are several (a test bed's samples
        are exact in one order, and not in another); None if it was not run."""
        whole = self.figures["all tasks"]
        slow = [
            method
            for method in self.methods
            if method.label in whole and _number(whole[method.label]["canvas_tokens_per_forward"]) <= 1.001
        ]
        plain = [m for m in slow if next(iter(m.runs.values())).about["choices"]["scheduler"] == "fixed"]
        return max(plain or slow, key=lambda method: _number(whole[method.label]["score"]), default=None)

    def front(self, view: str, rate: str) -> set[str]:
        """The methods that no other one beats in score and rate."""
        found = self.figures[view]
        return front({label: (_number(one[rate]), _number(one["score"])) for label, one in found.items()})

    def oracle(self, view: str) -> tuple[float, float] | None:
        """Tokens per forward with perfect knowledge of the reference's answers, and their score."""
        if self.reference is None:
            return None
        figures = self.figures[view].get(self.reference.label)
        rate = None if figures is None else figures["oracle_tokens_per_forward"]
        return None if figures is None or rate is None else (rate, _number(figures["score"]))

    @cached_property
    def families(self) -> dict[str, list[Method]]:
        """Methods that differ in numbers alone, where there are several."""
        found: dict[str, list[Method]] = {}
        for method in self.methods:
            if method.label in self.figures["all tasks"]:
                found.setdefault(method.family, []).append(method)
        return {name: methods for name, methods in found.items() if len(methods) > 1}


def load(paths: Sequence[Path]) -> Comparison:
    """Read runs, and folders of runs, at any depth.

    Raises:
        UserError: there is none.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"there is no folder {path}: name directories that dllm-eval wrote")
        folders |= dict.fromkeys(sorted(file.parent.resolve() for file in path.rglob(ABOUT)))
    runs = []
    for folder in folders:
        about = RunFolder(folder).about()
        assert about is not None
        runs.append(Run(about, RunFolder(folder).records(), folder.parent))
    if not any(run.records for run in runs):
        where = ", ".join(map(str, paths))
        raise UserError(f"there are no samples under {where}: run dllm-eval, or name the folder it wrote")
    return compare(runs)


def compare(runs: Sequence[Run]) -> Comparison:
    """Name runs by what differs between them, and put those of a configuration together."""
    task_labels = _labels(
        [{"name": run.about["choices"]["task"], **_leaves(run.about["config"]["task"])} for run in runs]
    )
    labels = _apart(runs, task_labels, _method_labels(runs))
    methods: dict[str, tuple[str, dict[str, Run]]] = {}
    tasks: dict[str, str | None] = {}
    refused: dict[tuple[str, str], list[str]] = {}
    for run, task, (label, family) in zip(runs, task_labels, labels, strict=True):
        if run.about["refused"] is not None:
            refused.setdefault((label, run.about["refused"]), []).append(task)
        elif run.records:
            tasks.setdefault(task, run.about["dependency"])
            methods.setdefault(label, (family, {}))[1][task] = run
    places = {json.dumps(place, sort_keys=True): place for run in runs for place in run.about["environments"]}
    return Comparison(
        [Method(label, family, found) for label, (family, found) in methods.items()],
        dict(sorted(tasks.items(), key=lambda item: (item[1] == "high", item[0]))),
        [(f"{label} ({_few(named)})", reason) for (label, reason), named in refused.items()],
        sum(run.missing for run in runs if run.about["refused"] is None),
        list(places.values()),
    )


def _method_labels(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """A label and a family for each run: the scheduler, the other plug-ins that vary, the fields that vary."""
    chosen = [{group: str(run.about["choices"][group]) for group in GROUPS} for run in runs]
    names = {group: {one[group] for one in chosen} for group in GROUPS}
    fields = [_fields(run.config, one) for run, one in zip(runs, chosen, strict=True)]
    known: dict[str, set[str]] = {}
    for one in fields:
        for key, value in one.items():
            known.setdefault(key, set()).add(json.dumps(value))
    told = _names(known)
    found = []
    for one, own in zip(chosen, fields, strict=True):
        words = [one["scheduler"], *(f"{group}={one[group]}" for group in GROUPS[1:] if len(names[group]) > 1)]
        varied = {told[key]: value for key, value in own.items() if key in told and value is not None}
        kinds = {key: value for key, value in varied.items() if isinstance(value, str | bool | list)}
        # "threshold 0.9", not "threshold threshold=0.9"
        label, family = (
            " ".join([*words, *(_say(v) if key == one["scheduler"] else f"{key}={_say(v)}" for key, v in some.items())])
            for some in (varied, kinds)
        )
        found.append((label, family))
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
            found |= {f"{owner}:{key}": leaf for key, leaf in _leaves(value).items()}
        elif group == "guide":
            for guide in value:
                found |= {f"{guide['name']}:{guide['name']}.{key}": leaf for key, leaf in _leaves(guide).items()}
        else:
            found[f":{group}"] = value
    return found


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, value in settings.items():
        if key in ("_target_", "name", "path"):
            continue
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
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


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{len(names)} tasks"


def _say(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _mean(values: Iterable[float | None]) -> float:
    return fmean(map(_number, values))


def _number(value: float | None) -> float:
    return math.nan if value is None else value
