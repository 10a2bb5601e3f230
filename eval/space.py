"""The space and the goal of a search: a file of `conf/tune`, checked before anything is tried."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_sampler import config
from dllm_sampler.cli.user_files import entry, home
from dllm_sampler.core.checks import is_real
from dllm_sampler.errors import UserError, unknown
from dllm_sampler.eval.jobs import ELSEWHERE, Options
from dllm_sampler.eval.measures import SPEEDS

if TYPE_CHECKING:
    from optuna import Trial

Check = Callable[[object], None]  # raises UserError where a knob cannot have the value

SEEDS = 2**32  # that optuna knows
TRIALS = 10_000  # most of a search: each is an evaluation


@dataclass(frozen=True)
class Domain:
    """The values of a knob: one of `values`, or a number from `low` to `high`."""

    values: tuple[str | float | None, ...] = ()
    low: float = 0
    high: float = 0
    log: bool = False
    step: float | None = None
    real: bool = True  # not whole numbers alone

    @staticmethod
    def of(where: str, given: object, check: Check) -> Domain:
        """Read it from YAML.

        Raises:
            UserError: nothing can be chosen from it.
        """
        if isinstance(given, list):
            if not given or not all(value is None or isinstance(value, str | int | float) for value in given):
                raise UserError("option-type", f"{where} is {given!r}. Give a list of values.")
            for value in given:
                check(value)
            return Domain(tuple(given))
        if not isinstance(given, Mapping) or not {"low", "high"} <= set(given) <= {"low", "high", "log", "step"}:
            raise UserError("option-type", f"{where} is {given!r}. Give a list, or low and high.")
        low, high, log, step = given["low"], given["high"], given.get("log", False), given.get("step")
        if not all(map(is_real, (low, high))):
            raise UserError("option-type", f"{where}: low and high are {low!r} and {high!r}. Give numbers.")
        if low > high:
            raise UserError("option-range", f"{where}: low={low} is above high={high}. Swap them.")
        if not isinstance(log, bool) or (log and (low <= 0 or step is not None)):
            raise UserError("option-range", f"{where}: log=true excludes step and low=0. Change one.")
        if step is not None and (not is_real(step) or step <= 0):
            raise UserError("option-range", f"{where}: step is {step!r}. Set a number above 0.")
        check(low)
        check(high)
        return Domain((), low, high, log, step, _real(check) or not float(step or 1).is_integer())

    def choose(self, trial: Trial, name: str) -> str:
        """Return the word of the command line for a value."""
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
    """Group -> choice -> its knobs, and the knobs of the options."""

    groups: Mapping[str, Mapping[str, Knobs]]
    options: Knobs

    @staticmethod
    def of(given: Mapping[str, Any]) -> Space:
        """Read it from YAML.

        Raises:
            UserError: something unknown, empty or of another form.
        """
        if not given:
            raise UserError("option-missing", "tune.space is empty. Name groups, as conf/tune/fast.yaml.")
        groups: dict[str, Mapping[str, Knobs]] = {}
        for group, choices in given.items():
            if group not in (known := (*config.GROUPS[1:], "options")):
                raise unknown("group of tune.space", group, known)
            if not isinstance(choices, Mapping) or not choices:
                form = "KNOB: [VALUE, ...]" if group == "options" else f"{group}: {{NAME: {{}}, ...}}"
                raise UserError("option-type", f"tune.space.{group} is {choices!r}. Write {form}.")
            if group != "options":
                groups[group] = {str(name): _knobs(group, str(name), knobs) for name, knobs in choices.items()}
        options = {knob: _option(knob, domain) for knob, domain in given.get("options", {}).items()}
        return Space(groups, options)

    @property
    def keys(self) -> list[str]:
        """Options that a word must not set, since they are searched."""
        return [*self.groups, *self.options]

    def choose(self, trial: Trial) -> list[str]:
        """Return the words of a trial: a choice of each group, and values for the knobs of what is chosen."""
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
        name: of ./conf/experiment/NAME.yaml, which the winner is written to.
        trials: configurations to try, those of earlier calls included.
        loss: points of score, in %, that may be lost.
        measure: what is made large, as tokens_per_second or answer_tokens_per_full_forward.
        seed: of the search.
        space: what may be chosen; a list of values, or low and high.
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
        if not 1 <= self.trials <= TRIALS:
            raise UserError("option-range", f"tune.trials is {self.trials}. Set 1 to {TRIALS}.")
        if not 0 <= self.seed <= SEEDS - self.trials:
            raise UserError("option-range", f"tune.seed is {self.seed}. Set 0 to {SEEDS - self.trials}.")
        if not 0 <= self.loss <= 100:
            raise UserError("option-range", f"tune.loss is {self.loss}. Set 0 to 100 points.")
        if self.measure not in SPEEDS:
            raise unknown("measure of speed", self.measure, SPEEDS)
        _ = self.choices  # a mistake in it shows here

    @cached_property
    def choices(self) -> Space:
        """`space`, checked."""
        return Space.of(self.space)

    @property
    def file(self) -> Path:
        """The file that the winner is written to."""
        return home() / "experiment" / f"{self.name}.yaml"


def _knobs(group: str, name: str, given: object) -> Knobs:
    where, settings = f"tune.space.{group}.{name}", entry(group, name).settings
    if given is not None and not isinstance(given, Mapping):
        raise UserError("option-type", f"{where} is {given!r}. Give knobs, as in {{KNOB: [VALUE, ...]}}, or {{}}.")
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
        raise unknown("option", knob, names)

    def check(value: object) -> None:
        if "." not in knob:
            config.check("tune.space.options", Options, {knob: value})

    return Domain.of(where, domain, check)


def _real(check: Check) -> bool:
    """Return True if a knob may be a fraction."""
    try:
        check(0.5)
    except UserError:
        return False
    return True
