"""What a run's folder says, checked as it is read: its files may have been edited, or cut."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from dllm_sampler.config import GROUPS
from dllm_sampler.core.checks import is_real, is_whole
from dllm_sampler.errors import UserError
from dllm_sampler.eval.records import Record
from dllm_sampler.host.reading import load_json

SCHEMA = 2  # of run.json; docs/formats.md
PLACE = (
    "dllm_sampler",
    "commit",
    "torch",
    "python",
    "device",
    "processor",
    "platform",
)  # what a report says


def about(file: Path, text: str) -> dict[str, Any]:
    """What `run.json` says.

    Raises:
        UserError: it is no JSON object of this schema; the sentence names the line.
    """
    try:
        found = load_json(text)
    except ValueError as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raise UserError(
            "run-damaged", f"{file}, line {line}: not JSON ({getattr(error, 'msg', error)}): {_AGAIN}"
        ) from error
    if not isinstance(found, dict):
        raise UserError("run-damaged", f"{file}, line 1: here should be a JSON object, not {_short(found)}: {_AGAIN}")
    if found.get("schema") != SCHEMA:
        raise UserError("version-differs", f"{file.parent} is not a run of schema {SCHEMA}. Name another folder.")
    for name, (holds, wanted) in _ABOUT.items():
        if not holds(found.get(name)) or (name not in found and name not in _LATER):
            raise UserError("run-damaged", f"{file}, line {_line(text, name)}: {_wrong(name, found, wanted)}: {_AGAIN}")
    return found


def differs(file: Path, name: str, found: object, wanted: object) -> NoReturn:
    """Raise a UserError: a field of `run.json` is not what the task says."""
    line = _line(file.read_text(encoding="utf-8"), name)
    raise UserError("run-damaged", f"{file}, line {line}: `{name}` is {_short(found)}, not {_short(wanted)}: {_AGAIN}")


def sample(file: Path, number: int, line: bytes, run: Mapping[str, Any] | None) -> Record:
    """The sample in a whole line of a file.

    Args:
        file: where it stands, for messages.
        number: of the line, from 1.
        line: without its end.
        run: what `run.json` says; None: there is none.

    Raises:
        UserError: it is no sample of this run; the sentence names the line.
    """
    try:
        return parse(line, run)
    except ValueError as error:
        raise UserError("run-damaged", f"{file}, line {number}: {error}. Remove the line and resume.") from error


def parse(line: bytes, run: Mapping[str, Any] | None) -> Record:
    """The sample in a line; raises a ValueError that says what is wrong."""
    try:
        fields = load_json(line)
    except ValueError as error:
        why = "its letters are not UTF-8" if isinstance(error, UnicodeDecodeError) else getattr(error, "msg", error)
        raise ValueError(f"this is not JSON ({why})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"here should be a JSON object, not {_short(fields)}")
    flat = {**fields, **(fields["times"] if isinstance(fields.get("times"), dict) else {})}
    for name, (holds, wanted) in _SAMPLE.items():
        if not holds(flat.get(name)):
            raise ValueError(_wrong(name, flat, wanted))
    size = flat["canvas"]
    for name in ("tokens", "pieces", "step_map", "confidence"):
        if len(flat[name]) != size:
            raise ValueError(f"`{name}` should have {size} entries, as `canvas` says, not {len(flat[name])}")
    if flat["answer"] > size:
        raise ValueError(f"`answer` should be at most {size}, as `canvas` says, not {flat['answer']}")
    if any(step >= flat["nfe"] for step in (*flat["step_map"], *(one[0] for one in flat["revisions"]))):
        raise ValueError(f"`step_map` and `revisions` should name forwards below {flat['nfe']}, as `nfe` says")
    if any(place >= size for _, place, _ in flat["revisions"]):
        raise ValueError(f"`revisions` should name positions below {size}, as `canvas` says")
    if run is not None and flat["index"] >= run["samples"]:
        raise ValueError(f"`index` should be below {run['samples']}, the samples of run.json, not {flat['index']}")
    if run is not None and run["score"] not in flat["scores"]:
        raise ValueError(f"`scores` should have {run['score']}, which counts in run.json")
    try:
        return Record.of(fields)
    except (TypeError, KeyError) as error:
        raise ValueError(f"this is no sample ({error})") from error


_AGAIN = "remove the file, and the command of the run writes it again"


def _line(text: str, name: str) -> int:
    """The line of a JSON object that has a field; 1 where none has."""
    lines = enumerate(text.splitlines(), 1)
    return next((number for number, line in lines if line.lstrip().startswith(f'"{name}"')), 1)


def _wrong(name: str, fields: Mapping[str, Any], wanted: str) -> str:
    return f"`{name}` should be {wanted}, not {_short(fields[name])}" if name in fields else f"`{name}` is missing"


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _whole(value: object, least: int = 0) -> bool:
    return is_whole(value) and value >= least


def _positive(value: object) -> bool:
    return _whole(value, 1)


def _seconds(value: object) -> bool:
    return _finite(value) and value >= 0  # type: ignore[operator]


def _finite(value: object) -> bool:
    return is_real(value) and math.isfinite(value)


def _known(value: object) -> bool:
    """A number, or null for one that is not finite."""
    return value is None or is_real(value)


def _text(value: object) -> bool:
    return isinstance(value, str)


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def _optional(holds: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or holds(value)


def _many(holds: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(holds, value))


def _named(holds: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and all(map(holds, value.values()))


def _having(*names: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and all(name in value for name in names)


def _revision(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_whole, value[:2])) and _optional(_text)(value[2])


def _chosen(value: object) -> bool:
    return _having("task", *GROUPS)(value) and _named(_text)(value)


def _setup(value: object) -> bool:
    if not isinstance(value, dict) or not all(isinstance(value.get(name), dict) for name in ("task", "model")):
        return False
    return _many(_having("name"))(value.get("guide")) and _optional(_text)(value["task"].get("content"))


_COUNT = (_whole, "a whole number of at least 0")
# What each field must be: a test, and how it is said.
_ABOUT: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (_text, "a text"),
    "choices": (_chosen, "an object with the name of each group"),
    "config": (_setup, "an object with `task`, `model` and the list `guide`, as dllm-eval writes it"),
    "samples": (_positive, "a whole number of at least 1"),
    "score": (_text, "the name of a grade"),
    "dependency": (_optional(_text), "low, high or null"),
    "refused": (_optional(_text), "a text or null"),
    "measures": (_optional(_named(_known)), "an object of numbers, or null"),
    "environments": (_many(_having(*PLACE)), f"a list of objects with {', '.join(PLACE)}"),
}
_LATER = ("measures",)  # a field that older files lack
_SAMPLE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "schema": (lambda value: _whole(value) and value == 2, "2"),
    "index": _COUNT,
    "seed": (lambda value: _whole(value, -(2**63)), "a whole number"),
    "text": (_optional(_text), "a text or null"),
    "scores": (_named(_finite), "an object of finite numbers"),
    "complete": (_flag, "true or false"),
    "ended": (_flag, "true or false"),
    **dict.fromkeys(("prompt_tokens", "answer", "nfe", "rows", "commits", "peak_memory"), _COUNT),
    **dict.fromkeys(("canvas", "batch"), (_positive, "a whole number of at least 1")),
    **dict.fromkeys(("text_tokens", "oracle_nfe"), (_optional(_whole), "a whole number of at least 0, or null")),
    "rejections": (_optional(_whole), "a whole number of at least 0"),
    "tokens": (_many(_whole), "a list of whole numbers of at least 0"),
    "pieces": (_many(_text), "a list of texts"),
    "step_map": (_many(lambda value: _whole(value, -1)), "a list of whole numbers of at least -1"),
    "confidence": (_many(_known), "a list of numbers"),
    "revisions": (_many(_revision), "a list of [forward, position, text]"),
    "seconds": (_seconds, "a number of at least 0"),
    "finish_reason": (_optional(_text), "a text or null"),
    "valid": (_optional(_flag), "true, false or null"),
}
