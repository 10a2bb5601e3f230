"""Runs read from their directories, named by what differs between them, and put together into methods."""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from dllm_sampler.errors import UserError
from dllm_sampler.eval.curves import front
from dllm_sampler.eval.folders import ABOUT, RunFolder
from dllm_sampler.eval.jobs import LATER, LATER_GROUPS
from dllm_sampler.eval.measures import summary
from dllm_sampler.eval.passes import BOUNDS, passes
from dllm_sampler.eval.records import Record
from dllm_sampler.eval.report import harness
from dllm_sampler.host import files

RATES = ("answer_tokens_per_forward", "canvas_tokens_per_forward", "tokens_per_second")
Figures = dict[str, float | None]


@dataclass(frozen=True)
class Run:
    """One configuration on one task, and its samples."""

    about: Mapping[str, Any]
    records: Sequence[Record]
    folder: Path = Path()  # output=FOLDER of dllm-eval
    counted: harness.Result | None = None  # figures of lm-evaluation-harness, without samples

    @cached_property
    def figures(self) -> Figures:
        """Every measure of the run by name."""
        if self.counted is not None and self.counted.figures is not None:
            return self.counted.figures
        return summary(self.records, self.about["score"], self.prompts) | self.passes | self.together

    @property
    def is_measured(self) -> bool:
        """True if the run has figures."""
        return bool(self.records) or (self.counted is not None and self.counted.figures is not None)

    @property
    def samples(self) -> int:
        """The number of finished samples."""
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
        """The task's measures of all answers together. Empty until the run is complete."""
        return self.about.get("measures") or {}

    @property
    def samples_per_prompt(self) -> int:
        """The number of samples for each prompt: the option `samples`."""
        return int(self.about["config"].get("samples", 1))

    @cached_property
    def prompts(self) -> list[list[Record]]:
        """A list of samples for each prompt."""
        found: dict[int, list[Record]] = {}
        for record in self.records:
            found.setdefault(record.index // self.samples_per_prompt, []).append(record)
        return list(found.values())

    @cached_property
    def passes(self) -> Figures:
        """The measures of `eval.passes` over prompts with all samples finished. Empty with one sample for each."""
        whole = [prompt for prompt in self.prompts if len(prompt) == self.samples_per_prompt]
        if self.samples_per_prompt == 1 or not whole:
            return {}
        return dict(passes(whole, self.about["score"]))

    @property
    def config(self) -> dict[str, Any]:
        """All settings except those of the task."""
        return {key: value for key, value in self.about["config"].items() if key != "task"}

    @property
    def missing(self) -> int:
        """The number of missing samples."""
        return self.about["samples"] - self.samples


@dataclass(frozen=True)
class Method:
    """One configuration on all its tasks."""

    label: str
    family: str  # the same for methods that differ only in numbers
    runs: Mapping[str, Run]  # by the task's label
    settings: Mapping[str, float] = field(default_factory=dict)  # the numbers that vary between methods

    @property
    def scheduler(self) -> str:
        """The name of the scheduler."""
        return str(next(iter(self.runs.values())).about["choices"]["scheduler"])

    @property
    def cache(self) -> str:
        """The name of the cache."""
        return str(next(iter(self.runs.values())).about["choices"]["cache"])

    def figures(self, tasks: Iterable[str]) -> Figures:
        """Return every measure over several tasks.

        The score and the measures of `Run.passes` are means over tasks, whatever the sizes of the tasks. Their
        intervals follow from those of the tasks (MOVER). Measures of `Run.together` are means over tasks, if all tasks
        have them. All other measures are computed from all samples.
        """
        runs = [self.runs[task] for task in tasks]
        everything = [record for run in runs for record in run.records]
        each = [run.figures for run in runs]
        if any(run.counted is not None for run in runs):
            found = harness.pooled(each) if len(each) > 1 else dict(each[0])
        else:
            scored = {id(record): run.about["score"] for run in runs for record in run.records}
            prompts = [prompt for run in runs for prompt in run.prompts]
            found = summary(everything, lambda record: record.scores[scored[id(record)]], prompts)
        ends = tuple(f"_{end}" for end in BOUNDS)
        means = [name for name in runs[0].passes if not name.endswith(ends) and all(name in run.passes for run in runs)]
        for name in ("score", *means):
            found |= _mean_of_tasks(each, name)
        shared = [name for name in runs[0].together if all(name in run.together for run in runs)]
        return found | {name: fmean(value_of(run.together, name) for run in runs) for name in shared}


@dataclass(frozen=True)
class Comparison:
    """All that a report is about.

    methods: the configurations with samples; tasks: the dependency of each task, by its label
    refused: label and reason of each configuration that cannot run
    usual: the plug-ins that labels leave out, by group
    """

    methods: Sequence[Method]
    tasks: Mapping[str, str | None]
    refused: Sequence[tuple[str, str]]
    missing: int  # samples of unfinished runs
    environments: Sequence[Mapping[str, Any]]
    usual: Mapping[str, str] = field(default_factory=dict)

    @property
    def unsaid(self) -> str:
        """A sentence with the plug-ins that labels leave out, or "" if there are none."""
        said = ", ".join(f"{group}={name}" for group, name in self.usual.items())
        return f"Unless a label says otherwise: {said}." if said else ""

    @cached_property
    def views(self) -> dict[str, list[str]]:
        """The tasks of each view by its name: all tasks, those of low or of high dependency, and each task alone."""
        found = {"all tasks": list(self.tasks)}
        for level in ("low", "high"):
            group = [task for task, dependency in self.tasks.items() if dependency == level]
            if group and len(group) < len(self.tasks):
                found[f"{level} dependency"] = group
        return found | ({task: [task] for task in self.tasks} if len(self.tasks) > 1 else {})

    @cached_property
    def figures(self) -> dict[str, dict[str, Figures]]:
        """The measures of each method in each view. A method that lacks a task of the view is left out."""
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
        """The names of the tasks' measures of all answers together."""
        found = [run.together for method in self.methods for run in method.runs.values()]
        return list(dict.fromkeys(name for one in found for name in one))

    @cached_property
    def passes(self) -> list[str]:
        """The names of the measures of several samples for each prompt, without the ends of their intervals."""
        found = [name for method in self.methods for run in method.runs.values() for name in run.passes]
        names = [name for name in dict.fromkeys(found) if not name.endswith(tuple(f"_{end}" for end in BOUNDS))]
        return sorted(names, key=_rank)

    @cached_property
    def reference(self) -> Method | None:
        """The method with one token per step that others are compared with, or None if none was run.

        Among several it is the best with scheduler `fixed`, since a test bed's samples may be exact in one order only.
        """
        whole = self.figures["all tasks"]
        slow = [
            method
            for method in self.methods
            if method.label in whole and value_of(whole[method.label], "canvas_tokens_per_forward") <= 1.001
        ]
        plain = [m for m in slow if next(iter(m.runs.values())).about["choices"]["scheduler"] == "fixed"]
        return max(plain or slow, key=lambda method: value_of(whole[method.label], "score"), default=None)

    def front(self, view: str, rate: str) -> set[str]:
        """Return the labels of the methods on the Pareto front of score and `rate`."""
        found = self.figures[view]
        return front({label: (one[rate] or 0.0, value_of(one, "score")) for label, one in found.items()})

    def oracle(self, view: str) -> tuple[float, float] | None:
        """Return the oracle's tokens per forward on the answers of `reference`, and their score, or None."""
        if self.reference is None:
            return None
        figures = self.figures[view].get(self.reference.label)
        rate = None if figures is None else figures.get("oracle_tokens_per_forward")
        return None if figures is None or rate is None else (rate, value_of(figures, "score"))

    @cached_property
    def families(self) -> dict[str, list[Method]]:
        """Groups of at least two methods that differ only in numbers, by the name of their family."""
        found: dict[str, list[Method]] = {}
        for method in self.methods:
            if method.label in self.figures["all tasks"]:
                found.setdefault(method.family, []).append(method)
        return {name: methods for name, methods in found.items() if len(methods) > 1}


def load(paths: Sequence[Path]) -> Comparison:
    """Return the comparison of the runs that `read` finds under folders."""
    return compare(read(paths))


def results_files(paths: Sequence[Path]) -> list[Path]:
    """Return the results files of lm-evaluation-harness under these folders, each once."""
    found = (file.resolve() for path in paths for file in sorted(files.under(path, harness.PATTERN)))
    return list(dict.fromkeys(found))


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Return the directories of runs under these folders, at any depth, each once."""
    found = (file.parent.resolve() for path in paths for file in sorted(files.under(path, ABOUT)))
    return list(dict.fromkeys(found))


def read(paths: Sequence[Path]) -> list[Run]:
    """Return the runs under these folders, at any depth, also those without samples.

    Results of lm-evaluation-harness count as runs, too.

    Raises:
        UserError: a folder does not exist, a file is invalid, or no run has samples.
    """
    for path in paths:
        if not path.is_dir():
            wrong = "is not a folder" if path.exists() else "does not exist"
            raise UserError("file-missing", f"{path} {wrong}. Name output folders of dllm-eval.")
    runs = []
    for folder in run_folders(paths):
        if (about := RunFolder(folder).about()) is not None:  # None: it vanished meanwhile, or is a broken link
            runs.append(Run(about, RunFolder(folder).records(), folder.parent))
    for file in results_files(paths):
        runs += [Run(one.about, (), file.parent, one) for one in harness.results(file)]
    if not any(run.is_measured for run in runs):
        where = ", ".join(map(str, paths))
        refused = next((f"A run was refused: {run.about['refused']}" for run in runs if run.about["refused"]), "")
        advice = refused or "Run dllm-eval, or name another folder."
        raise UserError("samples-missing", f"No samples are under {where}. {advice}")
    return runs


def compare(runs: Sequence[Run]) -> Comparison:
    """Return the comparison of runs. Labels show what differs, and runs of a configuration form a method."""
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


def _mean_of_tasks(each: Sequence[Figures], name: str) -> Figures:
    """Return the mean of a measure of several tasks, and the ends of its interval from theirs (MOVER)."""
    values = [value_of(one, name) for one in each]
    mean = fmean(values)
    low, high = ([value_of(one, f"{name}_{end}") for one in each] for end in BOUNDS)

    def away(bounds: Sequence[float]) -> float:
        return math.sqrt(sum((value - bound) ** 2 for value, bound in zip(values, bounds, strict=True))) / len(each)

    # Rounding must not carry a bound past the mean of the tasks' bounds, for example below 0.
    return {
        name: mean,
        f"{name}_low": max(fmean(low), mean - away(low)),
        f"{name}_high": min(fmean(high), mean + away(high)),
    }


def _rank(name: str) -> tuple[str, int]:
    """Return a key that sorts the measures of several samples: by kind, then by number."""
    kind, _, number = name.rpartition("_")
    return (kind, int(number)) if number.isdigit() else (name, 0)


def value_of(figures: Figures, name: str) -> float:
    """Return a measure as a number, NaN for None."""
    value = figures[name]
    return math.nan if value is None else value


# What runs are called: what differs between them.

GROUPS = ("scheduler", "cache", "blocks", "stop", "guide", "particles", "model")
LEFT_OUT = ("_target_", "name", "path", "content", "forwards")  # settings that no label shows


@dataclass(frozen=True)
class Label:
    """The name of a run.

    task: the label of its task; method: that of all else; family: the same for methods that differ only in numbers
    settings: the numbers that vary, by their names in `method`
    """

    task: str
    method: str
    family: str
    settings: Mapping[str, float]


def named(runs: Sequence[Run]) -> list[Label]:
    """Return a label for each run. No two runs have the same task and method."""
    tasks = _tasks(runs)
    methods = _methods(runs)
    labels = _apart(runs, tasks, [(method, family) for method, family, _ in methods])
    return [
        Label(task, method, family, settings)
        for task, (method, family), (*_, settings) in zip(tasks, labels, methods, strict=True)
    ]


def _tasks(runs: Sequence[Run]) -> list[str]:
    """Return a label of each run's task, with the hash of its files where these changed between runs."""
    settings = [run.about["config"]["task"] for run in runs]
    names = [
        f"{given['protocol']}/{given['task']}" if "protocol" in given else run.about["choices"]["task"]
        for run, given in zip(runs, settings, strict=True)
    ]
    labels = _labels([{"name": name, **leaves(given)} for name, given in zip(names, settings, strict=True)])
    known: dict[str, set[str | None]] = {}
    for label, given in zip(labels, settings, strict=True):
        known.setdefault(label, set()).add(given.get("content"))
    return [
        f"{label} ({str(given.get('content'))[:6]})" if len(known[label]) > 1 else label
        for label, given in zip(labels, settings, strict=True)
    ]


def choice(run: Run, group: str) -> str:
    """Return the name chosen in a group. An older run lacks groups that were added later, so it has their default."""
    return str(run.about["choices"].get(group, LATER_GROUPS.get(group)))


def usual(runs: Sequence[Run]) -> dict[str, str]:
    """Return the plug-ins that labels leave out although runs differ: those of more than three quarters of the runs."""
    found = {}
    for group in GROUPS[1:]:
        (name, most), *others = Counter(choice(run, group) for run in runs).most_common()
        if others and 4 * most > 3 * len(runs):
            found[group] = name
    return found


def _methods(runs: Sequence[Run]) -> list[tuple[str, str, dict[str, float]]]:
    """Return a label, a family and numbers for each run.

    The label has the scheduler, the other plug-ins that vary, and the fields that vary. The numbers are of
    these fields.
    """
    chosen = [{group: choice(run, group) for group in GROUPS} for run in runs]
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
            " ".join([*words, *(say(v) if key == one["scheduler"] else f"{key}={say(v)}" for key, v in some.items())])
            for some in (varied, kinds)
        )
        found.append((label, family, {key: value for key, value in varied.items() if key not in kinds}))
    return found


def _names(known: Mapping[str, set[str]]) -> dict[str, str]:
    """Return the name of each field that varies, with its group where another group has a field of that name.

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
    """Return the labels, with an addition to those that several runs of one task share.

    The addition is the folder of the run, else the model's path, else the hash of the configuration, else all three.
    """
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
    """Return settings by a key that two runs share if the same plug-in has them: `scheduler=threshold:threshold`."""
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
    """Return settings of a plug-in or task by dotted names, without those in `LEFT_OUT`."""
    found = {}
    for key, value in settings.items():
        if key in LEFT_OUT:
            continue
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a label for each task: its `name`, and the values of fields in which tasks of this name differ."""
    known: dict[tuple[str, str], set[str]] = {}
    for one in settings:
        for key, value in one.items():
            known.setdefault((one["name"], key), set()).add(json.dumps(value))
    names = {one["name"] for one in settings}

    def label(one: Mapping[str, Any]) -> str:
        varied = [key for key in one if key != "name" and len(known[one["name"], key]) > 1]
        told = [say(one[key]) if isinstance(one[key], str) else f"{key}={say(one[key])}" for key in varied]
        return " ".join([one["name"]] * (len(names) > 1 or not told) + told)

    return [label(one) for one in settings]


def say(value: Any) -> str:
    """Return a setting's value as reports write it: text without quotes, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value)
