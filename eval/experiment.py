"""Results of a search by `dllm-tune`, and the experiment that it writes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.text import Text

from dllm_sampler import config
from dllm_sampler.cli.terminal import Column, show_table
from dllm_sampler.cli.user_files import entry, own
from dllm_sampler.errors import counted
from dllm_sampler.eval.jobs import Job
from dllm_sampler.eval.space import Tuning

if TYPE_CHECKING:
    from optuna import Study

MARK = "Found by dllm-tune"
ONE_PER_STEP = "one token per step"
SLOW = f"no faster than {ONE_PER_STEP}"
LONG = 40  # most trials that the table has a row for


@dataclass(frozen=True)
class Found:
    """Results of a configuration over all tasks.

    chosen: the words that select it, besides those of every trial
    score: mean over tasks, from 0 to 1
    speed: the value of `tune.measure`
    """

    jobs: Sequence[Job]
    chosen: Sequence[str]
    score: float
    speed: float


@dataclass(frozen=True)
class Trial:
    """A configuration that a search tried.

    words: the words that select it, besides those of every trial
    score: mean over tasks, on the samples of the search. None if it cannot run
    speed: the value of `tune.measure` on these samples. None if it cannot run, or an earlier version did not store it
    reason: the reason that it does not qualify. Empty if it does
    """

    words: tuple[str, ...]
    score: float | None
    speed: float | None
    reason: str


def holds(score: float, speed: float | None, plain: Found, tuning: Tuning) -> str:
    """Return the reason that a configuration does not qualify, or "" if it does.

    It qualifies if it is faster than `plain` and loses at most `tune.loss` points. `plain` is one token per step on the
    same samples.
    """
    lost = 100 * (plain.score - score)
    if lost > tuning.loss + 1e-7:
        return f"loses {lost:.1f} points, {tuning.loss:g} allowed"
    return SLOW if speed is not None and speed <= plain.speed + 1e-9 else ""


def trials(study: Study, plain: Found, tuning: Tuning) -> list[Trial]:
    """Return the configurations that a study tried, each once.

    Those that qualify come first, the fastest first. Those that do not follow by score, then those that cannot run.
    """
    found: dict[tuple[str, ...], Trial] = {}
    for one in study.get_trials():
        if one.value is None:
            continue
        words, score = tuple(one.user_attrs["words"]), one.user_attrs.get("score")
        # Studies of earlier versions lack the speed of trials that lost too much.
        speed = one.user_attrs.get("speed", one.value if one.value > 0 else None)
        if score is None:
            reason = f"cannot run: {one.user_attrs.get('refused', 'its settings conflict')}"
        else:
            reason = holds(score, speed, plain, tuning)
        found.setdefault(words, Trial(words, score, speed, reason))

    def order(trial: Trial) -> tuple[bool, bool, float, float]:
        score, speed = trial.score or 0.0, trial.speed or 0.0
        rank = (-score, -speed) if trial.reason else (-speed, -score)
        return bool(trial.reason), trial.score is None, *rank

    return sorted(found.values(), key=order)


def too_few(samples: Sequence[int], tuning: Tuning) -> str:
    """Return a warning if `tune.loss` is less than one wrong answer costs. Returns "" otherwise.

    The score is the mean over tasks, so an answer costs least in the largest task. `samples` has the number of samples
    of each task.
    """
    least = 100 / (len(samples) * max(samples))
    if tuning.loss >= least - 1e-9:
        return ""
    more = f", or task.count={math.ceil(100 / (len(samples) * tuning.loss))}" if tuning.loss else ""
    return (
        f"tune.loss={tuning.loss:g} allows no additional wrong answer: with {counted(sum(samples), 'sample')} one costs"
        f" at least {least:.2f} points. Set tune.loss={math.ceil(100 * least) / 100:g}{more} to allow one."
    )


def show_trials(tried: Sequence[Trial], plain: Found, verdicts: Mapping[Sequence[str], str], tuning: Tuning) -> None:
    """Print a search as a table on standard output, the best configuration first.

    `verdicts` has the results of qualified trials on samples that the search did not see, by the trials' words.
    """
    rows = [(t.words, t.score, t.speed, verdicts.get(t.words) or t.reason) for t in tried]
    rows.insert(sum(not one.reason for one in tried), (tuple(plain.chosen), plain.score, plain.speed, ONE_PER_STEP))
    shown, console = rows[:LONG], Console()
    narrow = show_table(
        [
            Column("configuration", [" ".join(words) for words, *_ in shown], words=True),
            Column("score, %", ["" if score is None else f"{100 * score:.1f}" for _, score, *_ in shown]),
            Column(speed_of(tuning), ["" if speed is None else f"{speed:.2f}" for _, _, speed, _ in shown]),
            Column("result", [result for *_, result in shown], words=True),
        ],
        console,
    )
    assert not narrow
    results = ["loses too much" if row[-1].startswith("loses") else row[-1].partition(":")[0] for row in rows[LONG:]]
    if rest := Counter(results):
        counts = ", ".join(f"{kind} ({count})" for kind, count in rest.most_common())
        console.print(Text(f"{rest.total()} more: {counts}"), soft_wrap=True)


def speed_of(tuning: Tuning) -> str:
    """Return the name of the search's measure in words."""
    return tuning.measure.replace("_", " ")


def say(found: Found, tuning: Tuning) -> str:
    """Return score and speed as text for a message."""
    return f"{100 * found.score:.1f} % at {found.speed:.2f} {speed_of(tuning)}"


def experiment(tuning: Tuning, winner: Found, fresh: Found, plain: Found, unseen: str, none: str = "") -> str:
    """Return the text of a YAML file with the settings in which the winner differs from the defaults.

    `fresh` and `plain` are the winner and one token per step on the confirming samples, which `unseen` describes.
    `none` is a clause that says that no configuration qualified, or "" if one did.
    """
    found = f"{say(fresh, tuning)} on {tasks_of(winner.jobs)}"
    told = f"{none} {ONE_PER_STEP}: {found}" if none else f"{found}; {ONE_PER_STEP}: {say(plain, tuning)}"
    job, defaults, body = winner.jobs[0], [], {}
    for group in config.GROUPS:
        name = job.choices[group]
        if group == "particles" and name == "none":
            continue
        if group == "guide":
            if name != "none":
                defaults.append({"override /guide": name.split("+")})
                guides: Any = job.plugins["guide"]
                body["guide"] = {one["name"]: _fields("guide", one["name"], one) for one in guides}
            continue
        spec: Mapping[str, Any] = job.model if group == "model" else job.plugins[group]
        known = name if name in config.names(group) or name in own(group) else "checkpoint"
        defaults.append({f"override /{group}": known})
        if fields := _fields(group, known, spec):
            body[group] = fields
    options = asdict(job.options)
    names = ("block_length", "temperature", "top_k", "top_p", "stop_token_ids", "max_steps", "dtype", "compat", "judge")
    defaults_of = (None, False, "auto", "draw")
    body |= {name: options[name] for name in (*names, "chat") if options[name] not in defaults_of}
    body["max_new_tokens"] = job.max_new_tokens
    return f"# @package _global_\n# {MARK}: {told}; {unseen}.\n" + yaml.safe_dump(
        {"defaults": defaults, **body}, sort_keys=False, allow_unicode=True
    )


def _fields(group: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the defaults of `group=name`."""
    defaults = entry(group, name).settings
    changed = {key: value for key, value in given.items() if value != defaults.get(key)}
    return {key: value for key, value in changed.items() if key not in ("name", "_target_")}


def tasks_of(jobs: Sequence[Job]) -> str:
    """Return the names of the jobs' tasks, each followed by its fields. A text has no name before it."""
    names = set()
    for job in jobs:
        fields = {key: value for key, value in job.task.items() if value is not None}
        named = {key: value if isinstance(value, str) else f"{key}={value}" for key, value in fields.items()}
        told = [text for key, text in named.items() if key not in ("name", "_target_", "count", "seed")]
        names.add(" ".join([job.choices["task"], *told]))
    return ", ".join(sorted(names))
