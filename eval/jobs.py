"""Configurations to run, from the words of a command line: Hydra's sweeps, and suites of sweeps.

A word is one argument, for example `cache=none,dual`.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.types import Glob
from hydra.errors import HydraException

from dllm_sampler import config, options
from dllm_sampler.cli.compose import App, composition, parts
from dllm_sampler.cli.user_files import choices, entry, own
from dllm_sampler.cli.words import TEXTS, parse, readable, spelled_out
from dllm_sampler.core.checks import check_count
from dllm_sampler.errors import UserError
from dllm_sampler.eval import sources
from dllm_sampler.eval.protocols.words import is_protocol
from dllm_sampler.eval.protocols.words import lines as protocol_lines
from dllm_sampler.eval.tasks.asked import Asked
from dllm_sampler.eval.tasks.base import Task
from dllm_sampler.eval.tasks.repeated import Repeated
from dllm_sampler.host.paths import expanded
from dllm_sampler.options import option

_FIELD = "task."
MOST_CONFIGURATIONS = 10_000  # of one sweep
LETTERS = ("output", "report")  # values that are paths, in which a comma does not separate values
MOST_PROCESSES = 2**12
MOST_SAMPLES = 2**12  # for each prompt
# Options that do not identify a run: where results go, and on what it runs.
ELSEWHERE = ("output", "report", "workers", "device")
# Options that were added later, with the values that leave the identity of an older run as it was.
LATER = {
    "backend": "auto", "cuda_graph": False, "compile": False, "batching": "static", "guided": False,
    "stop_token_ids": None, "samples": 1, "judge": "draw",
    "measure": "generation",
}  # fmt: skip
LATER_OF_MODEL = {"adapter": None}  # the same for settings of a model
LATER_GROUPS = {"particles": "none"}  # the same for groups of plug-ins
LATER_OF_SCHEDULER = {"position_temperature": 0.0}  # the same for settings of a scheduler


def check_folder(what: str, folder: Path) -> None:
    """Raise `UserError` if a file is where this folder or one above it must be. `what` names the setting."""
    above = next((one for one in (folder, *folder.parents) if one.exists()), folder)
    if above.exists() and not above.is_dir():
        raise UserError(
            "folder-invalid", f"{what}: {above} is a file, but must be a folder. Move it, or name another path."
        )


def _check_output(name: str, path: str) -> None:
    check_folder(f"{name}={path}", expanded(name, path))


def _check_report(name: str, path: str | None) -> None:
    if path is not None:
        expanded(name, path)


@dataclass(frozen=True, kw_only=True)
class Options(options.Options):
    """The options of `dllm-eval` besides the plug-ins. The default of `max_new_tokens` is the task's."""

    chat: bool = option(False, "send each text prompt as a user's message, through the model's chat template")
    guided: bool = option(
        False, "hold each answer to the regular expression that the task gives for it, through a guide"
    )
    measure: str = option(
        "generation",
        "generation: answer the prompts; likelihood: score the task's right answers instead (docs/likelihood.md)",
        options.check_among("generation", "likelihood"),
    )
    output: str = option(
        "outputs/eval",
        "folder with a run directory for each configuration; finished samples there are not run again",
        _check_output,
    )
    oracle: bool = option(True, "also count the forwards that a sampler with knowledge of each answer needs")
    report: str | None = option(
        None, "FILE.html: write a report of all runs in the output folder at the end", _check_report
    )
    samples: int = option(
        1, "answers to each prompt, each with its own seed, for pass@k", partial(check_count, most=MOST_SAMPLES)
    )
    workers: int = option(
        1,
        "number of processes that share the samples; hydra/launcher sets where they run (joblib: on this machine)",
        partial(check_count, most=MOST_PROCESSES),
    )


EVAL = App("dllm-eval", "eval", ("task", *config.GROUPS, "experiment"), Options)


@dataclass(frozen=True)
class Job:
    """One configuration to run.

    choices: the chosen name in each group
    model, plugins, task: the settings of each
    """

    options: Options
    choices: Mapping[str, str]
    model: dict[str, Any]
    plugins: dict[str, Any]
    task: dict[str, Any]

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without cached values, so that another process builds the task again."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @cached_property
    def built_task(self) -> Task:
        """The task, built from its settings. `Asked` wraps a user's task, and `Repeated` any task with samples=N.

        Raises:
            UserError: a field has an invalid value.
        """
        task = config.build("task", self.task)
        check_count("task.count", task.count, optional=task.count is None)  # a task that takes null has a type for it
        if self.choices["task"] in own("task"):
            task = cast(Task, Asked(task, self.choices["task"]))
        return cast(Task, Repeated(task, self.options.samples)) if self.options.samples > 1 else task

    @property
    def max_new_tokens(self) -> int:
        """The number of answer positions. It is the option, or the task's number if the option is not set."""
        return self.options.max_new_tokens or self.built_task.max_new_tokens

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The identity of this run, as a JSON object. Jobs with equal identities are the same run.

        It has the settings that change answers or times, except the device, and digests of the files that the task and
        the plug-ins name. A checkpoint is identified by its path alone.
        """
        given = asdict(self.options).items()
        said = {name: value for name, value in given if name not in ELSEWHERE and (name, value) not in LATER.items()}
        if self.options.threads == options.AUTO:  # older runs have null for it
            said["threads"] = None
        task = {**self.task, "canvas": self.max_new_tokens}
        model = {name: value for name, value in self.model.items() if (name, value) not in LATER_OF_MODEL.items()}
        given = self.plugins["scheduler"].items()
        scheduler = {name: value for name, value in given if (name, value) not in LATER_OF_SCHEDULER.items()}
        later = [group for group, name in LATER_GROUPS.items() if self.choices.get(group, name) == name]
        plugins = {group: given for group, given in self.plugins.items() if group not in later}
        whole = {"task": task, "model": model, **plugins, "scheduler": scheduler, **said}
        of_task = sources.digest(sources.files("task", self.task), self.built_task.content)
        if of_task is not None:
            task["content"] = of_task
        named = [file for group, given in self.plugins.items() for file in sources.files(group, given)]
        if named:
            whole["content"] = sources.digest(named)
        return json.loads(json.dumps(whole))

    @property
    def name(self) -> str:
        """The name of the run's directory: four of the choices, and a hash of `identity`."""
        chosen = "-".join(self.choices[group] for group in ("task", "model", "scheduler", "cache"))
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:12]
        return f"{re.sub(r'[^A-Za-z0-9._-]', '_', chosen)}-{digest}"

    @property
    def folder(self) -> Path:
        """The path of the run's directory."""
        return Path(self.options.output).expanduser() / self.name


def job(words: Sequence[str]) -> Job:
    """Return the job for a command line without sweeps.

    Raises:
        UserError: a word cannot be parsed, names an unknown group, choice or field, or has an invalid value.
    """
    composed = composition(EVAL, words)
    model, plugins = parts(composed)
    task = composed.tree.pop("task", None)
    if not isinstance(task, dict):
        raise UserError("option-missing", f"The task is missing. Add task=NAME, one of {', '.join(choices('task'))}.")
    made_of = Options(**config.check("", Options, composed.tree))
    chosen = {group: str(composed.choices.get(group)) for group in ("task", *config.GROUPS)}
    chosen["guide"] = "+".join(guide["name"] for guide in plugins["guide"]) or "none"  # type: ignore[union-attr]
    if chosen["model"] == config.CHECKPOINT:
        chosen["model"] = Path(model["path"]).name
    made = Job(made_of, chosen, model, plugins, {"name": chosen["task"], **task})
    _ = made.built_task  # a mistake in it shows here
    return made


def variants(first: Job, words: Sequence[Sequence[str]]) -> list[Job]:
    """Return a copy of the job for each list of words, which set fields of its task.

    Composing each copy with Hydra would give the same and take much longer.
    """
    found = []
    for combination in words:
        given = {str(one.get_key_element()).removeprefix(_FIELD): one.value() for one in map(parse, combination)}
        found.append(replace(first, task={**first.task, **given}))
        _ = found[-1].built_task
    return found


def of_hydra(word: str) -> bool:
    """Return True if a word sets Hydra itself, for example `hydra/launcher=slurm`."""
    return word.lstrip("+~").startswith(("hydra/", "hydra."))


def jobs(words: Sequence[str]) -> list[Job]:
    """Return all configurations that the words describe, each once, in order.

    Raises:
        UserError: see `job`. Or the suite is unknown or invalid, a word sets Hydra beyond its launcher, or there are
            too many combinations.
    """
    for word in words:
        if of_hydra(word) and (not re.match(r"[+~]*hydra[/.]launch", word) or "_target_" in word):
            known = "Remove it. Only hydra/launcher=NAME and fields of hydra.launcher other than _target_ may be set"
            raise UserError("option-reserved", f"{word} is a setting of Hydra that dllm-eval controls. {known}.")
    found: dict[str, Job] = {}
    for given in lines([word for word in words if not of_hydra(word)]):
        line = spelled_out(given)
        each = {word: values(word) for word in line}
        _check_count(prod(map(len, each.values())), " ".join(given))
        of_task = [word for word in line if re.match(rf"{re.escape(_FIELD)}\w+=", word)]
        of_tasks = list(product(*(each[word] for word in of_task)))
        for combination in product(*(each[word] for word in line if word not in of_task)):
            first = job([*combination, *of_tasks[0]])
            found |= {made.name: made for made in (first, *variants(first, of_tasks[1:])) if made.name not in found}
    return list(found.values())


def lines(words: Sequence[str]) -> list[list[str]]:
    """Return the words of each sweep: the suite's, except those that given words replace, and the given words.

    Without suite=NAME, a task uses the suite of its own name, if there is one. A packaged task uses only a packaged
    suite, and a user's task only a user's suite.
    """
    named = [word.partition("=")[2] for word in words if word.startswith("suite=")]
    words = [word for word in words if not word.startswith("suite=")]
    if not named:
        tasks = [word.partition("=")[2] for word in words if word.startswith("task=")]
        mine = own("suite")
        named = [task for task in tasks if task in (mine if task in own("task") else config.names("suite"))]
    if not named:
        return [words]
    if is_protocol(named[-1]):
        return protocol_lines(named[-1], words)
    suite = _suite(named[-1])
    given = {_key(word) for word in words}
    found: list[list[str]] = []
    for sweep in suite["sweeps"]:
        said = {_key(word): word for word in [*suite.get("common", []), *sweep]}
        # another task or scheduler has other fields
        kept = [word for key, word in said.items() if key not in given and key.partition(".")[0] not in given]
        if (line := [*kept, *words]) not in found:
            found.append(line)
    return found


def values(word: str) -> list[str]:
    """Return one word KEY=VALUE for each value of a sweep.

    Raises:
        UserError: the word cannot be parsed, has no values, or has too many.
    """
    key, _, value = word.partition("=")
    if key in LETTERS:
        return [word]
    if key in ("model", "model.path") and not value.startswith(("'", '"', "glob(")):
        given = [value] if Path(value).exists() else value.split(",")
        return [f"{key}={one}" for one in given]
    if key in TEXTS and not readable(word):
        return [word]  # a pattern or a schema may have any signs, and is one value then
    override = parse(word)
    if not override.is_sweep_override():
        return [word]
    if isinstance(override.value(), Glob):
        if key not in EVAL.groups:
            raise UserError("option-syntax", f"{word}: {key} is not a group, and glob needs one. Write {key}=A,B.")
        known = config.names(key)  # a pattern names no file of the user's
        names = override.value().filter(known)  # type: ignore[union-attr]
        if not names:
            yours = f", or name your own: {', '.join(own(key))}" if own(key) else ""
            raise UserError("choice-unknown", f"{word} matches nothing. Choose from {', '.join(known)}{yours}.")
        return [f"{key}={name}" for name in names]
    try:
        found = list(islice(override.sweep_string_iterator(), MOST_CONFIGURATIONS + 1))
    except (HydraException, ValueError, ArithmeticError):  # an interval, a step of 0, or a range to NaN
        found = []
    if not found:
        raise UserError("option-syntax", f"{word} lists no values. Write {key}=A,B or '{key}=range(0,9,3)'.")
    if key in ELSEWHERE and len(found) > 1:  # such runs would be the same run
        raise UserError("option-repeated", f"{word} has several values. Give one.")
    _check_count(len(found), word)
    return [f"{override.get_key_element()}={one}" for one in found]


def _check_count(count: int, said: str) -> None:
    if count > MOST_CONFIGURATIONS:
        raise UserError("option-range", f"{said} makes over {MOST_CONFIGURATIONS} runs. Write fewer values.")


def _suite(name: str) -> dict[str, list[Any]]:
    """Return the content of a suite's file: `sweeps`, a list of lists of words, and `common`, words of all sweeps."""
    folder, _, file = f"suite/{name}".rpartition("/")
    suite = entry(folder, file).settings
    if unknown := [key for key in suite if key not in ("common", "sweeps")]:
        raise UserError(
            "config-invalid", f"suite={name} has the unknown key {unknown[0]!r}. Keep only common and sweeps."
        )
    form, sweeps = "[scheduler=threshold, 'scheduler.threshold=0.5,0.9']", suite.get("sweeps", [])
    if not isinstance(sweeps, list) or not sweeps:
        raise UserError("config-invalid", f"suite={name}: sweeps is {sweeps!r}. Write a list of lists, as in [{form}].")
    for place, line in [("common", suite.get("common", [])), *(("a sweep", one) for one in sweeps)]:
        if not isinstance(line, list) or not all(isinstance(word, str) and "=" in word for word in line):
            raise UserError("config-invalid", f"suite={name}: {place} is {line!r}. Give a list of words, as in {form}.")
    return suite


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")
