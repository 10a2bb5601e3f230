"""Protocols as their YAML files state them: one cell for each variant and task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal

from dllm_sampler import config
from dllm_sampler.cli import user_files
from dllm_sampler.errors import UserError, unknown

GROUP = "suite/protocol"


@dataclass(frozen=True, kw_only=True)
class Data:
    """A data set of the hub.

    path: its name; subsets: its configurations, one after the other; split: the split with the questions
    """

    path: str
    subsets: list[str | None] = field(default_factory=lambda: [None])
    split: str = "test"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One task under one protocol.

    Args:
        variant: the part of the protocol that holds for some models, for example `fast-dllm-llada/instruct`.
        task: the name in the YAML.
        kind: the data set, by default the task.
        data: the data set of its questions.
        lm_eval: the file of the task in lm-evaluation-harness, under `lm_eval/tasks`.
        opencompass: the file of the task in OpenCompass, under `opencompass/configs/datasets`.
        shots: examples before the question. lm-eval draws those of GSM8K for each question (seed 1234); other tasks
            have fixed ones.
        prompt: the question as Jinja, in place of the task's own.
        prefix: the beginning of the answer as Jinja.
        wrap: a text around the request, with `{request}` in its place.
        chat: `none`; `wrapper-turn`: the whole request is one user turn; `lm-eval-turn`: lm-eval makes that turn, and
            draws examples twice for each question; `lm-eval-turns`, `opencompass-turns`: each example is two turns.
        bos: True if the tokenizer's BOS token is put before the text.
        keep: the number of tokens that are kept at the end of the prompt. None keeps all.
        until: stop strings in place of the task's own.
        escape: True if the stop strings are stated and not applied.
        answer: `cut-with-special-tokens` and `cut-without-special-tokens` look for stop strings before or after special
            tokens are dropped. `cut-at-end-token` ends at the first end-of-text token, then at a stop string.
        extract: `lm-eval`: its filters; `minerva`: both metrics of MATH; `raw`: the text is the program, so a code
            fence fails; `after-prompt`: prompt and text; `after-prompt-sanitized`: prompt and the definitions that the
            function needs from the first code fence; `opencompass-...`: its rules.
        script: the rule by which a second script of the authors takes the program. `sanitized` takes the inside of the
            code fence without tests. None if the authors have no such script.
        published: the metric of the published figure.
        shows: `stated` if a source names the published metric, else `inferred`.
        tokens: what counts as a token. `cut-text-again` encodes the cut text again; `generated` is all ids (both
            without end-of-text tokens); `whole-row` adds the prompt; `canvas` is everything.
        skip: the number of first questions that counts of tokens, forwards and seconds leave out.
        length: the length of the canvas in tokens.
        settings: words for the sampler that hold for every method.
    """

    variant: str
    task: str
    kind: Literal["gsm8k", "minerva_math", "humaneval", "mbpp"]
    data: Data
    published: str
    shows: str = "inferred"
    lm_eval: str | None = None
    opencompass: str | None = None
    shots: int = 0
    prompt: str | None = None
    prefix: str | None = None
    wrap: str | None = None
    chat: Literal["none", "wrapper-turn", "lm-eval-turn", "lm-eval-turns", "opencompass-turns"] = "none"
    bos: bool = False
    keep: int | None = None
    until: list[str] | None = None
    escape: bool = False
    answer: Literal["cut-with-special-tokens", "cut-without-special-tokens", "cut-at-end-token"]
    extract: Literal[
        "lm-eval", "minerva", "raw", "after-prompt", "after-prompt-sanitized", "opencompass-last-number",
        "opencompass-answer-is", "opencompass-boxed", "opencompass-math-verify", "opencompass-fence",
        "opencompass-indented", "opencompass-begin",
    ]  # fmt: skip
    script: Literal["after-prompt-sanitized", "sanitized"] | None = None
    tokens: Literal["cut-text-again", "whole-row", "generated", "canvas"]
    skip: int = 0
    length: int
    settings: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """The fields of a protocol's file, or of a variant in it, that are not fields of `Cell`."""

    tasks: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    variants: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    methods: dict[str, list[str] | dict[str, list[str]]] = field(default_factory=dict)
    models: list[str] = field(default_factory=list)
    only: bool = False


@dataclass(frozen=True)
class Protocol:
    """A protocol: its cells, the models that each variant is for, and its methods as words of a command line."""

    cells: Mapping[tuple[str, str], Cell]  # by variant and task
    models: Mapping[str, Sequence[str]]
    methods: Mapping[str, Mapping[str, Any]]  # by variant and name; see `words`

    def variant(self, model: str | None, given: str | None = None) -> str:
        """Return the variant for a model of `conf/model`, or the first one if no variant names the model.

        Raises:
            UserError: `given` does not name a variant.
        """
        if given is not None:
            if given not in self.models:
                raise unknown("task.variant", given, self.models)
            return given
        return next((name for name, models in self.models.items() if model in models), next(iter(self.models)))

    def words(self, variant: str, method: str, task: str) -> list[list[str]]:
        """Return the words of a method: those of all tasks, then those of a task, which replace them."""
        given = self.methods[variant][method]
        if isinstance(given, Mapping):
            return [list(given.get("all", ())), list(given.get(task, ()))]
        return [list(given)]

    def tasks(self, variant: str) -> list[str]:
        """Return the names of a variant's tasks."""
        return [task for owner, task in self.cells if owner == variant]


def names() -> list[str]:
    """Return the names of the packaged protocols that have variants. Others are plain suites."""
    return [name for name in config.names(GROUP) if "variants" in config.entry(GROUP, name).settings]


@cache
def load(name: str) -> Protocol:
    """Return a protocol: a packaged one, or the user's of `./conf/suite/protocol`.

    Raises:
        UserError: no protocol has this name, or its file has an unknown field, a wrong value, or lacks a field.
    """
    owner, whole = f"suite=protocol/{name}", {}
    if name in user_files.choices(GROUP):
        whole = dict(user_files.entry(GROUP, name).settings)
    if "variants" not in whole:  # a file of a plain suite
        raise unknown("protocol", name, [*names(), *user_files.own(GROUP)])
    shared = _take(owner, whole)
    whole.pop("evidence", None)  # for readers of the file
    cells, models, methods = {}, {}, {}
    for variant, given in shared.variants.items():
        rest = dict(given or {})
        own = _take(f"{owner}, {variant}", rest)
        models[variant], methods[variant] = own.models, own.methods or shared.methods
        for task in own.tasks if own.only else dict.fromkeys([*shared.tasks, *own.tasks]):
            said = {**whole, **(shared.tasks.get(task) or {}), **rest, **(own.tasks.get(task) or {})}
            cells[variant, task] = _cell(name, variant, task, said)
    if not cells or not all(methods.values()):
        raise UserError("config-invalid", f"{owner} has no variants, tasks or methods. Add them.")
    return Protocol(cells, models, methods)


def _take(owner: str, given: dict[str, Any]) -> _Parts:
    """Remove the fields of `_Parts` from those of a file or a variant, and return them."""
    found = {one.name: given.pop(one.name, None) for one in fields(_Parts)}
    said = {name: value for name, value in found.items() if value is not None}
    return _Parts(**config.check(owner, _Parts, said, path=f"{owner}: "))


def _cell(name: str, variant: str, task: str, said: Mapping[str, Any]) -> Cell:
    owner = f"suite=protocol/{name}, {variant}, {task}"
    given = said.get("data", {})
    data = Data(**config.check(f"{owner}: data", Data, given if isinstance(given, Mapping) else {}, whole=True))
    values = {"kind": task, **said, "variant": variant, "task": task, "data": data}
    cell = Cell(**config.check(owner, Cell, values, whole=True))
    if (cell.lm_eval is None) == (cell.opencompass is None):
        raise UserError("config-invalid", f"{owner} does not have exactly one of lm_eval and opencompass. Set one.")
    if cell.wrap is not None and "{request}" not in cell.wrap:
        raise UserError("config-invalid", f"{owner}: wrap has no {{request}}. Add it.")
    return cell
