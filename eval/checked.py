"""Validation of the files of a run's folder, which may have been edited or cut off."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn, NotRequired

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from dllm_sampler.errors import UserError
from dllm_sampler.eval import records
from dllm_sampler.eval.records import Record
from dllm_sampler.host.reading import load_json

SCHEMA = 2  # of run.json
AGAIN = "Remove the file and rerun the dllm-eval command of this run, which restores it."


class _Place(TypedDict):
    dllm_sampler: Any
    commit: Any
    torch: Any
    python: Any
    device: Any
    processor: Any
    platform: Any


class _Choices(TypedDict):
    task: str
    model: str
    scheduler: str
    blocks: str
    stop: str
    cache: str
    guide: str


class _Task(TypedDict):
    content: NotRequired[str | None]


class _Guide(TypedDict):
    name: Any


class _Config(TypedDict):
    task: _Task
    model: dict[str, Any]
    scheduler: dict[str, Any]
    guide: list[_Guide]


class About(TypedDict):
    """The fields of `run.json`.

    - `schema`: 2
    - `name`: the name of the run's directory
    - `choices`: the chosen name in each group
    - `config`: the settings that decide about answers and times: `task` (with `canvas`, its length in tokens, and
      `content`, a hash of the files that it names), `model`, the plug-ins with all fields, and options
    - `samples`: number of samples of the complete run
    - `score`: the name of the grade that reports show first
    - `dependency`: the task's `Task.dependency`: `low`, `high` or null
    - `refused`: the reason that the configuration cannot run, or null
    - `measures`: the task's measures of all answers together, by name. A measure that is not finite is null. The whole
      field is null until the run is complete, and if the task has no such measures
    - `environments`: where samples ran: versions, git commit (`+`: files differed), device, processor and platform
    """

    name: str
    choices: _Choices
    config: _Config
    samples: Annotated[int, Field(ge=1)]
    score: str
    dependency: str | None
    refused: str | None
    measures: NotRequired[dict[str, float | None] | None]  # older files lack it
    environments: list[_Place]


_ABOUT, _RECORD = TypeAdapter(About), TypeAdapter(Record)


def about(file: Path, text: str) -> dict[str, Any]:
    """Return the validated content of `run.json`, given its path and text.

    Raises:
        UserError: the text is not JSON, has another schema, or has an invalid field.
    """
    try:
        found = load_json(text)
    except ValueError as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raise UserError(
            "run-damaged", f"{file}, line {line}: this is not JSON ({getattr(error, 'msg', error)}). {AGAIN}"
        ) from error
    if isinstance(found, dict) and (schema := found.get("schema", SCHEMA)) != SCHEMA:
        raise UserError(
            "version-differs",
            f"{file} is from another version of dllm_sampler (schema {schema}, not {SCHEMA}). Use that version, or name"
            " a folder without this run.",
        )
    try:
        _ABOUT.validate_python(found, strict=True)
    except ValidationError as error:
        place = error.errors()[0]["loc"]  # of the first invalid field
        line = _line_of(text, str(place[0])) if place else 1
        raise UserError("run-damaged", f"{file}, line {line}: {_wrong(error)}. {AGAIN}") from None
    return found


def differs(file: Path, name: str, found: object, wanted: object) -> NoReturn:
    """Raise `UserError` because the field `name` of `run.json` is `found`, and the task gives `wanted`."""
    line = _line_of(file.read_text(encoding="utf-8"), name)
    raise UserError(
        "run-damaged", f"{file}, line {line}: `{name}` should be {_short(wanted)}, not {_short(found)}. {AGAIN}"
    )


def sample(file: Path, number: int, line: bytes, run: Mapping[str, Any] | None) -> Record:
    """Return the sample in a line of a file. `line` is without its break, and `number` counts from 1.

    Raises:
        UserError: the line is not a sample of this run. The message has its number.
    """
    try:
        return parse(line, run)
    except ValueError as error:
        advice = "Remove the line and rerun the dllm-eval command of this run."
        raise UserError("run-damaged", f"{file}, line {number}: {error}. {advice}") from error


def parse(line: bytes, run: Mapping[str, Any] | None) -> Record:
    """Return the sample in a line without its line break. `run` is the content of `run.json`, or None.

    Raises:
        ValueError: the line is not a sample of this run. The message is a clause with the reason.
    """
    try:
        fields = load_json(line)
    except ValueError as error:
        why = "the text is not UTF-8" if isinstance(error, UnicodeDecodeError) else getattr(error, "msg", error)
        raise ValueError(f"this is not JSON ({why})") from error
    if isinstance(fields, dict):
        if (schema := fields.pop("schema", None)) != records.SCHEMA:
            raise ValueError(f"`schema` should be {records.SCHEMA}, not {_short(schema)}")
        times = fields.pop("times", None)
        fields |= times if isinstance(times, dict) else {}
    try:
        found = _RECORD.validate_python(fields)
    except ValidationError as error:
        raise ValueError(_wrong(error)) from None
    size = found.canvas
    for name in ("tokens", "pieces", "step_map", "confidence"):
        if len(getattr(found, name)) != size:
            raise ValueError(f"`{name}` should have {size} entries (`canvas`), not {len(getattr(found, name))}")
    if found.answer > size:
        raise ValueError(f"`answer` should be at most {size} (`canvas`), not {found.answer}")
    if any(step >= found.nfe for step in (*found.step_map, *(one[0] for one in found.revisions))):
        raise ValueError(f"`step_map` and `revisions` should have forwards below {found.nfe} (`nfe`)")
    if any(place >= size for _, place, _ in found.revisions):
        raise ValueError(f"`revisions` should have positions below {size} (`canvas`)")
    if run is not None and found.index >= run["samples"]:
        raise ValueError(f"`index` should be below {run['samples']} (`samples` of run.json), not {found.index}")
    if run is not None and run["score"] not in found.scores:
        raise ValueError(f"`scores` lacks {_short(run['score'])}, the `score` of run.json")
    return found


def _line_of(text: str, name: str) -> int:
    """Return the number of the first line of a JSON text that begins with the field `name`, or 1 if no line does."""
    lines = enumerate(text.splitlines(), 1)
    return next((number for number, line in lines if line.lstrip().startswith(f'"{name}"')), 1)


def _wrong(error: ValidationError) -> str:
    """Return a clause about the first invalid field of a JSON object."""
    one = error.errors()[0]
    name = ".".join(map(str, one["loc"]))
    if one["type"] == "missing":
        return f"`{name}` is missing"
    if one["type"] == "unexpected_keyword_argument":
        return f"`{name}` is unknown in a sample"
    what = f"`{name}`" if name else "the content"
    return f"{what} should be {one['msg'].removeprefix('Input should be ')}, not {_short(one['input'])}"


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:40]}..."
