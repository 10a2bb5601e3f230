"""Runs read from their directories, named by what differs between them, and put together into methods."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from dllm_sampler.core import files
from dllm_sampler.errors import UserError
from dllm_sampler.eval.curves import front
from dllm_sampler.eval.folders import ABOUT, RunFolder
from dllm_sampler.eval.measures import summary
from dllm_sampler.eval.records import Record
from dllm_sampler.eval.report import harness
from dllm_sampler.eval.report.labels import Label, named, usual
from dllm_sampler.eval.state import running

RATES = ("answer_tokens_per_forward", "canvas_tokens_per_forward", "tokens_per_second")
Figures = dict[str, float | None]


@dataclass(frozen=True)
class Run:
    """One configuration on one task, and its samples."""

    about: Mapping[str, Any]
    records: Sequence[Record]
    folder: Path = Path()  # the one that dllm-eval was told to write to
    counted: harness.Result | None = None  # figures without samples, of lm-evaluation-harness

    @cached_property
    def figures(self) -> Figures:
        """Every measure."""
        if self.counted is not None and self.counted.figures is not None:
            return self.counted.figures
        return summary(self.records, self.about["score"]) | self.together

    @property
    def is_measured(self) -> bool:
        """True if it has figures."""
        return bool(self.records) or (self.counted is not None and self.counted.figures is not None)

    @property
    def samples(self) -> int:
        """Samples that are there."""
        return self.about["samples"] if self.counted is not None else len(self.records)

    @property
    def grades(self) -> dict[str, float]:
        """The mean of every grade but the score, over the samples that have it."""
        if self.counted is not None:
            return dict(self.counted.grades)
        names = dict.fromkeys(name for record in self.records for name in record.scores if name != self.about["score"])
        return {name: fmean(one.scores[name] for one in self.records if name in one.scores) for name in names}

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
        return self.about["samples"] - self.samples


@dataclass(frozen=True)
class Method:
    """One configuration on all its tasks."""

    label: str
    family: str  # the same for methods that differ in numbers alone
    runs: Mapping[str, Run]  # by the task's label
    settings: Mapping[str, float] = field(default_factory=dict)  # the numbers that vary between methods

    @property
    def scheduler(self) -> str:
        """Its scheduler's name."""
        return str(next(iter(self.runs.values())).about["choices"]["scheduler"])

    @property
    def cache(self) -> str:
        """Its cache's name."""
        return str(next(iter(self.runs.values())).about["choices"]["cache"])

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

        if any(run.counted is not None for run in runs):
            found = harness.pooled(each) if len(each) > 1 else dict(each[0])
        else:
            scored = {id(record): run.about["score"] for run in runs for record in run.records}
            found = summary(everything, lambda record: record.scores[scored[id(record)]])
        # Rounding must not carry a bound past the mean of the tasks' bounds, below 0 say.
        low, high = (fmean(_number(one[name]) for one in each) for name in ("score_low", "score_high"))
        bounds = {
            "score_low": max(low, score - away("score_low")),
            "score_high": min(high, score + away("score_high")),
        }
        shared = [name for name in runs[0].together if all(name in run.together for run in runs)]
        return found | {"score": score, **bounds} | {name: _mean(run.together[name] for run in runs) for name in shared}


@dataclass(frozen=True)
class Comparison:
    """All that a report is about.

    methods: those with samples; tasks: label -> dependency; refused: label -> why; usual: plug-ins that labels leave
    out
    """

    methods: Sequence[Method]
    tasks: Mapping[str, str | None]
    refused: Sequence[tuple[str, str]]
    missing: int  # samples of unfinished runs
    environments: Sequence[Mapping[str, Any]]
    usual: Mapping[str, str] = field(default_factory=dict)

    @property
    def unsaid(self) -> str:
        """A sentence about what labels leave out; empty: nothing."""
        said = ", ".join(f"{group}={name}" for group, name in self.usual.items())
        return f"Unless a label says otherwise: {said}." if said else ""

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
        return front({label: (one[rate] or 0.0, _number(one["score"])) for label, one in found.items()})

    def oracle(self, view: str) -> tuple[float, float] | None:
        """Tokens per forward with perfect knowledge of the reference's answers, and their score."""
        if self.reference is None:
            return None
        figures = self.figures[view].get(self.reference.label)
        rate = None if figures is None else figures.get("oracle_tokens_per_forward")
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
    """What runs found, and folders of runs at any depth; raises as `read` does."""
    return compare(read(paths))


def results_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files under these folders that lm-evaluation-harness names so, each once."""
    found = (file.resolve() for path in paths for file in sorted(files.under(path, harness.PATTERN)))
    return list(dict.fromkeys(found))


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Return the directories of runs under these folders, at any depth, each once."""
    found = (file.parent.resolve() for path in paths for file in sorted(files.under(path, ABOUT)))
    return list(dict.fromkeys(found))


def read(paths: Sequence[Path]) -> list[Run]:
    """Read runs, and folders of runs, at any depth; those that have no samples too. And what the harness wrote there.

    Raises:
        UserError: there is none, or none has samples.
    """
    for path in paths:
        try:
            there = path.is_dir()
        except (OSError, ValueError):  # a name that is too long, or has a NUL
            there = False
        if not there:
            raise UserError(f"there is no folder {path}: name directories that dllm-eval wrote")
    runs = []
    for folder in run_folders(paths):
        about = RunFolder(folder).about()
        assert about is not None
        runs.append(Run(about, RunFolder(folder).records(), folder.parent))
    for file in results_files(paths):
        runs += [Run(one.about, (), file.parent, one) for one in harness.results(file)]
    if not any(run.is_measured for run in runs):
        where = ", ".join(map(str, paths))
        if lines := running(paths):
            raise UserError(f"there are no samples under {where} yet, ask again later: {lines[0]}")
        raise UserError(f"there are no samples under {where}: run dllm-eval, or name the folder it wrote")
    return runs


def compare(runs: Sequence[Run]) -> Comparison:
    """Name runs by what differs between them, and put those of a configuration together."""
    labels = named(runs)
    methods: dict[str, tuple[Label, dict[str, Run]]] = {}
    tasks: dict[str, str | None] = {}
    refused: dict[tuple[str, str], list[str]] = {}
    for run, label in zip(runs, labels, strict=True):
        if run.about["refused"] is not None:
            refused.setdefault((label.method, run.about["refused"]), []).append(label.task)
        elif run.is_measured:
            tasks.setdefault(label.task, run.about["dependency"])
            methods.setdefault(label.method, (label, {}))[1][label.task] = run
    places = {json.dumps(place, sort_keys=True): place for run in runs for place in run.about["environments"]}
    return Comparison(
        [Method(name, label.family, found, label.settings) for name, (label, found) in methods.items()],
        dict(sorted(tasks.items(), key=lambda item: (item[1] == "high", item[0]))),
        [(f"{label} ({_few(where)})", reason) for (label, reason), where in refused.items()],
        sum(run.missing for run in runs if run.about["refused"] is None),
        list(places.values()),
        usual(runs),
    )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{len(names)} tasks"


def _mean(values: Iterable[float | None]) -> float:
    return fmean(map(_number, values))


def _number(value: float | None) -> float:
    return math.nan if value is None else value
