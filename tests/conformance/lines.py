"""Reading trace files: one published run a line, checked before anything is replayed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dllm_sampler.core.checks import is_whole
from dllm_sampler.errors import UserError, unknown
from dllm_sampler.host.reading import load_json
from tests.conformance.records import RECORDS, named

Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]
Tokens = list[Count]
Steps = list[list[Count]]  # per forward, the positions it committed
Model = TypeVar("Model", bound=BaseModel)
# In `params`, yet said elsewhere too (masks, and how a run drew) or without a bearing on what is decoded.
ASIDES = frozenset(
    {"attention_mask", "pad_id", "pad_token_id", "return_dict_in_generate", "token_draw"}
    | {"measure_time", "return_order", "tokenizer"}
)


class Unsupported(Exception):
    """A line that asks for something no plug-in does; the message says what."""


class Rng(BaseModel):
    """How a seeded run drew: `torch.manual_seed` on the CPU just before the call."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    torch_manual_seed: int


class Line(BaseModel):
    """One recorded run. What only some systems record stays available in `model_extra`."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, protected_namespaces=())

    where: str  # file and line number, for error messages
    id: str
    system: str
    model: str  # a checkpoint folder next to `traces/`
    prompt_ids: Tokens | list[Tokens]  # a list of rows in a batch, left-padded
    params: dict[str, Any]  # arguments of the published function, under its own names
    output_ids: Tokens | list[Tokens]  # the generated part as the run left it, masks included
    nfe: Count
    steps: list[Any] | None = None  # see `committed`; None: what each forward committed is not recorded
    attention_mask: list[int] | list[list[int]] | None = None
    rng: Rng | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        outputs = self.output_ids if self.batched else [self.output_ids]
        if not self.prompt_ids or not all(isinstance(row, list) for row in outputs):
            raise ValueError("prompt_ids and output_ids should be both one row, or both a batch of rows")
        if len(outputs) != len(self.rows):
            raise ValueError(f"{len(self.rows)} prompts have {len(outputs)} rows of output_ids")
        recorded = [] if self.steps is None else self.steps if self.batched else [self.steps]
        for steps in recorded:
            if not _is_steps(steps):
                raise ValueError("steps should list the positions that each forward committed")
        if self.padding is not None and _shape(self.padding) != _shape(self.rows):
            raise ValueError("attention_mask should have the shape of prompt_ids")
        return self

    @property
    def batched(self) -> bool:
        """Whether the run decoded several rows at once."""
        return bool(self.prompt_ids) and isinstance(self.prompt_ids[0], list)

    @property
    def rows(self) -> list[Tokens]:
        """The prompts as recorded, padding included."""
        return self.prompt_ids if self.batched else [self.prompt_ids]  # pyright: ignore[reportReturnType]

    @property
    def padding(self) -> list[Any] | None:
        """The attention mask of each row, which some traces record as an argument and some as an input."""
        mask = self.attention_mask or self.params.get("attention_mask")
        flat = isinstance(mask, list) and not any(isinstance(row, list) for row in mask)
        return [mask] if flat else mask

    @property
    def prompts(self) -> list[Tokens]:
        """The prompts without their padding."""
        if self.padding is None:
            return self.rows
        return [
            [t for t, real in zip(*pair, strict=True) if real] for pair in zip(self.rows, self.padding, strict=True)
        ]

    @property
    def outputs(self) -> list[Tokens]:
        """The generated part of each row."""
        return self.output_ids if self.batched else [self.output_ids]  # pyright: ignore[reportReturnType]

    def committed(self, rows_first: bool) -> list[Steps] | None:
        """`steps` of each row; None: the record has none.

        Args:
            rows_first: in a batch, `steps` is indexed by row and then by forward, not the other way round.

        Raises:
            UserError: the batch is laid out differently.
        """
        if self.steps is None:
            return None
        if not self.batched:
            return [self.steps]
        size = len(self.rows)
        if (len(self.steps) if rows_first else min(map(len, self.steps), default=size)) != size:
            raise UserError(
                "trace-invalid", f"{self.where}: steps should have one entry for each of the {size} rows of the batch"
            )
        return self.steps if rows_first else [[forward[row] for forward in self.steps] for row in range(size)]

    def arguments(self, model: type[Model]) -> Model:
        """`params` as a system understands them; a null stands for the default, except where null says something.

        Raises:
            Unsupported: the system knows nothing of one that is set.
            UserError: one is missing or has no legal value.
        """
        known = model.model_fields.keys() | ASIDES
        strange = [name for name, value in self.params.items() if value is not None and name not in known]
        if strange:
            raise Unsupported(f"no plug-in knows the argument{'s' * (len(strange) > 1)} {', '.join(strange)}")
        meaningful = {name for name, about in model.model_fields.items() if type(None) in get_args(about.annotation)}
        given = {name: value for name, value in self.params.items() if value is not None or name in meaningful}
        return check(model, given, f"{self.where}: params")


def read(folder: Path, system: str | None = None) -> list[Line]:
    """The lines of `folder/traces/*.jsonl`, in the order of file names; all of them, or those of one system.

    Raises:
        UserError: the folder has no trace files, a line is malformed, or no line has the system.
    """
    if not folder.is_dir():
        raise UserError("file-missing", f"there is no folder {folder}")
    files = sorted((folder / "traces").glob("*.jsonl"))
    if not files:
        raise UserError(
            "file-missing", f"{folder} holds no traces: *.jsonl files are looked for in {folder / 'traces'}"
        )
    lines = [line for file in files for line in _lines(file)]
    if system is None:
        return lines
    chosen = [line for line in lines if line.system == system]
    if not chosen:
        raise unknown("system", system, dict.fromkeys(line.system for line in lines))
    return chosen


def check(model: type[Model], raw: Any, where: str) -> Model:
    """`raw` as a `model`; what is wrong with it becomes one sentence that begins with `where`."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"] if part in raw or isinstance(part, int))
        place = place or ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise UserError("trace-invalid", f"{where}: {f'{place}: ' if place else ''}{message}") from None


def _lines(file: Path) -> Iterator[Line]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("file-unreadable", f"{file} cannot be read as text: {error}") from None
    # Not splitlines(): it also splits at characters that JSON strings may hold.
    for number, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        where = f"{file}, line {number}"
        try:
            raw = load_json(content)
        except ValueError as error:
            raise UserError("json-invalid", f"{where}: not JSON ({error})") from None
        if not isinstance(raw, dict):
            raise UserError("trace-invalid", f"{where}: should be a JSON object")
        raw = {**named(raw), "where": where}
        if isinstance(raw.get("system"), str) and raw["system"] in RECORDS:
            try:
                raw = RECORDS[raw["system"]](raw)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise UserError(
                    "trace-invalid", f"{where}: not a record of {raw['system']} ({type(error).__name__}: {error})"
                ) from None
        yield check(Line, raw, where)


def _is_steps(steps: Any) -> bool:
    """Lists of positions, or, in a batch, of rows of positions."""
    flat = isinstance(steps, list) and all(isinstance(entry, list) for entry in steps)
    return flat and all(is_whole(p) and p >= 0 for entry in steps for p in entry)


def _shape(rows: Any) -> list[int] | None:
    """Length of each row; None where these are no rows of numbers."""
    lists = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
    if not lists or not all(isinstance(entry, int) for row in rows for entry in row):
        return None
    return [len(row) for row in rows]
