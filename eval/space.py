"""The space and the goal of a search: a file of `conf/tune`, checked before the first trial."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_sampler import config
from dllm_sampler.cli.user_files import entry, home
from dllm_sampler.core.checks import check_count, check_number, is_real
from dllm_sampler.errors import UserError, unknown
from dllm_sampler.eval.jobs import ELSEWHERE, Options
from dllm_sampler.eval.measures import SPEEDS

if TYPE_CHECKING:
    from optuna import Trial

Check = Callable[[object], None]  # raises UserError for a value that a field does not allow

SEEDS = 2**32  # Optuna takes seeds below it
TRIALS = 10_000  # most trials of a search: each is an evaluation


@dataclass(frozen=True)
class Domain:
    """The values of a knob (a searched field or option): one of `values`, or a number from `low` to `high`."""

    values: tuple[str | float | None, ...] = ()
    low: float = 0
    high: float = 0
    log: bool = False
    step: float | None = None
    real: bool = True  # fractions are allowed

    @staticmethod
    def of(where: str, given: object, check: Check) -> Domain:
        """Return the domain that a list of values, or a mapping with `low` and `high`, describes.

        `check` raises `UserError` for a value that the knob `where` does not allow.

        Raises:
            UserError: the value has another form, or contains a value that the knob does not allow.
        """
        if isinstance(given, list):
            if not given or not all(value is None or isinstance(value, str | int | float) for value in given):
                raise UserError("option-type", f"{where} is {given!r}. Give a list of texts, numbers or null.")
            for value in given:
                check(value)
            return Domain(tuple(given))
        if not isinstance(given, Mapping) or not {"low", "high"} <= set(given) <= {"low", "high", "log", "step"}:
            raise UserError(
                "option-type", f"{where} is {given!r}. Give a list of values, or low and high (and log or step)."
            )
        low, high, log, step = given["low"], given["high"], given.get("log", False), given.get("step")
        if not all(is_real(end) and math.isfinite(end) for end in (low, high)):
            raise UserError("option-type", f"{where}: low and high are {low!r} and {high!r}. Give finite numbers.")
        if low > high:
            raise UserError("option-range", f"{where}: low={low} is above high={high}. Swap them.")
        if not isinstance(log, bool):
            raise UserError("option-type", f"{where}: log is {log!r}. Set true or false.")
        if log and low <= 0:
            raise UserError("option-range", f"{where}: low is {low!r}, and log=true needs more than 0. Change one.")
        if log and step is not None:
            raise UserError("option-range", f"{where}: log=true excludes step={step!r}. Remove one.")
        if step is not None and (not is_real(step) or not 0 < step < math.inf):
            raise UserError("option-range", f"{where}: step is {step!r}. Set a finite number above 0.")
        check(low)
        check(high)
        if not _real(check) and not float(step or 1).is_integer():
            raise UserError("option-range", f"{where}: step is {step!r} for whole numbers. Set a whole number.")
        return Domain((), low, high, log, step, _real(check))

    def choose(self, trial: Trial, name: str) -> str:
        """Let `trial` suggest a value for the parameter `name`, and return it as text for the command line."""
        if self.values:
            value = trial.suggest_categorical(name, self.values)
            return "null" if value is None else str(value)
        if not self.real:
            step = int(self.step or 1)
            return str(trial.suggest_int(name, int(self.low), int(self.high), step=step, log=self.log))
        value = trial.suggest_float(name, float(self.low), float(self.high), step=self.step, log=self.log)
        return str(float(f"{value:.4g}"))


Knobs = Mapping[str, Domain]


@dataclass(frozen=True)
class Space:
    """The choices of each searched group, with the knobs of each choice, and the knobs of options."""

    groups: Mapping[str, Mapping[str, Knobs]]
    options: Knobs

    @staticmethod
    def of(given: Mapping[str, Any]) -> Space:
        """Return the space that `tune.space` describes.

        Raises:
            UserError: it is empty, has an unknown name, or has a value of another form.
        """
        if not given:
            raise UserError("option-missing", "tune.space is empty. Name groups, as in conf/tune/fast.yaml.")
        groups: dict[str, Mapping[str, Knobs]] = {}
        for group, choices in given.items():
            if group not in (known := (*config.GROUPS[1:], "options")):
                raise unknown("group of tune.space", group, known)
            if not isinstance(choices, Mapping) or not choices:
                form = "OPTION: [VALUE, ...]" if group == "options" else f"{group}: {{NAME: {{}}, ...}}"
                raise UserError("option-type", f"tune.space.{group} is {choices!r}. Write {form}.")
            if group != "options":
                groups[group] = {str(name): _knobs(group, str(name), knobs) for name, knobs in choices.items()}
        options = {knob: _option(knob, domain) for knob, domain in given.get("options", {}).items()}
        return Space(groups, options)

    @property
    def keys(self) -> list[str]:
        """Groups and options that a word must not set, since they are searched."""
        return [*self.groups, *self.options]

    def choose(self, trial: Trial) -> list[str]:
        """Return the words of a trial: a choice of each group, and a value for each knob of the choices and options."""
        words = []
        for group, choices in self.groups.items():
            name = trial.suggest_categorical(group, list(choices))
            words.append(f"{group}={name}")
            owner = f"{group}.{name}" if group == "guide" else group
            for knob, domain in choices[name].items():
                words.append(f"{owner}.{knob}={domain.choose(trial, f'{group}.{name}.{knob}')}")
        return [*words, *(f"{knob}={domain.choose(trial, knob)}" for knob, domain in self.options.items())]


@dataclass(frozen=True)
class Tuning:
    """The fields of a file of `conf/tune`.

    Args:
        name: the winner is written to ./conf/experiment/NAME.yaml.
        trials: number of configurations to try, including those of earlier calls.
        loss: largest loss of score against one token per step, in percentage points.
        measure: the measure of speed to maximise, for example tokens_per_second.
        seed: seed of the search.
        space: groups with their choices, and for each searched field a list of values, or low and high.
    """

    name: str = ""
    space: dict[str, Any] = field(default_factory=dict)
    trials: int = 40
    loss: float = 1.0
    measure: str = "answer_tokens_per_forward"
    seed: int = 0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w-]+", self.name):
            raise UserError("option-type", f"tune.name is {self.name!r}. Use letters, digits, - and _.")
        check_count("tune.trials", self.trials, most=TRIALS)
        check_count("tune.seed", self.seed, 0, most=SEEDS - self.trials)
        check_number("tune.loss", self.loss, "a number of points", most=100)
        if self.measure not in SPEEDS:
            raise unknown("tune.measure", self.measure, SPEEDS)
        _ = self.choices  # a mistake in it shows here

    @cached_property
    def choices(self) -> Space:
        """The checked space of the search."""
        return Space.of(self.space)

    @property
    def file(self) -> Path:
        """The file that the winner is written to."""
        return home() / "experiment" / f"{self.name}.yaml"


def _knobs(group: str, name: str, given: object) -> Knobs:
    where, settings = f"tune.space.{group}.{name}", entry(group, name).settings
    if given is not None and not isinstance(given, Mapping):
        raise UserError("option-type", f"{where} is {given!r}. Give fields, as in {{FIELD: [VALUE, ...]}}, or {{}}.")
    found = {}
    for knob, domain in (given or {}).items():
        names = [field for field in settings if field != "_target_"]
        if knob not in names:
            raise unknown(f"field of {group}={name}", str(knob), names)
        target = config.plugin_class(f"{group}={name}", group, str(settings["_target_"]))

        def check(value: object, knob: str = knob, target: Any = target) -> None:
            config.check(where, target, {knob: value})

        found[knob] = Domain.of(f"{where}.{knob}", domain, check)
    return found


def _option(knob: str, domain: object) -> Domain:
    where = f"tune.space.options.{knob}"
    names = [name for name in Options.__dataclass_fields__ if name not in ELSEWHERE]
    if "." not in knob and knob not in names:
        raise unknown("option of tune.space.options", knob, names)

    def check(value: object) -> None:
        if "." in knob:  # a field such as model.cfg_scale, which depends on other words: `tuning` checks it
            return
        given = config.check("tune.space.options", Options, {knob: value})
        try:
            Options(**given)
        except UserError as error:
            raise UserError(error.code, f"tune.space.options.{error}") from None

    return Domain.of(where, domain, check)


def _real(check: Check) -> bool:
    """Return True if `check` allows a fraction such as 0.5."""
    try:
        check(0.5)
    except UserError:
        return False
    return True
