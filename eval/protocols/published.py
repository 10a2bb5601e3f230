"""Published figures of diffusion language models, and the distance of our figures from them."""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from io import StringIO

from dllm_sampler.errors import UserError, first_line
from dllm_sampler.host.paths import expanded

QUESTIONS = {"gsm8k": 1319, "minerva_math": 5000, "humaneval": 164, "mbpp": 500}  # of the whole test sets
CACHES = (
    "", "none", "prefix", "dual", "dkv", "dllm", "dsb", "dpad", "streaming", "d2f", "block_causal", "engine", "ar",
)  # fmt: skip
NUMBERS = ("accuracy", "nfe", "tpf", "tps")
DIFFERS = 2.0  # of z, above which two figures are hardly of one protocol


@dataclass(frozen=True)
class Figure:
    """A row of `published.csv`. Texts are as in the file; an empty one is not stated in the source.

    model: the name on the hub without its owner; method: the decoding rule; cache: one of `CACHES`
    task, shots: as in the source; gen_length, block_length: tokens, or `full` for no blocks
    settings: thresholds, temperature, chat template; accuracy: per cent
    metric: the metric of `accuracy`, with `(stated)` if the source names it, else `(inferred)`
    nfe, tpf, tps: forwards per question, tokens per forward, tokens per second; gpu: the GPU of `tps`
    source: work, table and commit; note: what breaks a comparison
    """

    model: str
    method: str
    cache: str
    task: str
    shots: str
    gen_length: str
    block_length: str
    settings: str
    accuracy: float | None
    nfe: float | None
    tpf: float | None
    tps: float | None
    gpu: str
    source: str
    metric: str
    note: str

    @property
    def decoding(self) -> str:
        """Method, cache and lengths in words."""
        cache = f", {self.cache} cache" if self.cache not in ("", "none") else ""
        lengths = "/".join(filter(None, [self.gen_length, self.block_length]))
        return f"{self.method}{cache}{f' ({lengths})' if lengths else ''}"

    @property
    def tokens_per_forward(self) -> float | None:
        """Tokens per forward as published. Without them it is the length over the forwards, which counts padding."""
        if self.tpf is not None or self.nfe is None or not self.gen_length.isdecimal():
            return self.tpf
        return int(self.gen_length) / self.nfe


COLUMNS = [one.name for one in fields(Figure)]
FILE = str(files("dllm_sampler.eval.protocols") / "published.csv")


@cache
def figures() -> Sequence[Figure]:
    """Return every row of `published.csv`.

    Raises:
        UserError: the file does not have its schema.
    """
    return read(FILE)


def read(file: str) -> list[Figure]:
    """Return the rows of a CSV file with the columns of `Figure`, in any order.

    Raises:
        UserError: the file cannot be read, or a row does not have the schema. The message has its line.
    """
    try:
        text = expanded("--check", file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("file-unreadable", f"Cannot read {file} ({first_line(error)}). Name another file.") from None
    reader = csv.DictReader(StringIO(text, newline=""))
    found, seen = [], set()
    if sorted(reader.fieldnames or ()) != sorted(COLUMNS):
        raise UserError("file-invalid", f"{file} has other columns. Write {', '.join(COLUMNS)} in its first line.")
    for row in reader:
        wrong = _wrong(row)
        key = tuple(row.items())
        if wrong or key in seen:
            where, wrong = f"{file} line {reader.line_num}", wrong or "an earlier row is the same"
            raise UserError("file-invalid", f"{where}: {wrong}. Correct or remove the row.")
        seen.add(key)
        numbers = {name: float(row[name]) if row[name] else None for name in NUMBERS}
        found.append(Figure(**{**row, **numbers}))  # type: ignore[arg-type]
    return found


def _wrong(row: Mapping[str, str]) -> str:
    """Return a clause about the first mistake in a row. Returns "" if it has none."""
    if None in row or None in row.values():
        return f"the row does not have {len(COLUMNS)} cells"
    for name in ("model", "method", "task", "source"):
        if not row[name].strip():
            return f"`{name}` is empty"
    for name in NUMBERS:
        if row[name] and not re.fullmatch(r"\d+(\.\d+)?", row[name]):
            return f"`{name}` is {row[name]!r}, not a number of digits and a point"
    for name, form in (("shots", r"\d*"), ("gen_length", r"\d*"), ("block_length", r"\d*|full")):
        if not re.fullmatch(form, row[name]):
            return f"`{name}` is {row[name]!r}, not a whole number{' or full' * ('full' in form)}"
    if row["accuracy"] and float(row["accuracy"]) > 100:
        return f"`accuracy` is {row['accuracy']}, more than 100 per cent"
    if not any(row[name] for name in NUMBERS):
        return f"{', '.join(NUMBERS[:-1])} and {NUMBERS[-1]} are all empty"
    if row["cache"] not in CACHES:
        return f"`cache` is {row['cache']!r}, not one of {', '.join(CACHES[1:])}"
    if row["metric"] and row["tps"] and not row["accuracy"]:
        return "`accuracy` is empty, but `metric` names the metric of it"
    return ""


def z_score(ours: float, asked: int, published: float, questions: int) -> float:
    """Return the difference of two accuracies in standard errors of a difference of two independent runs.

    With as many questions on both sides that is `(ours - published) / (√2 SE)`, where SE is √(p(1-p)/n). Greedy runs
    answer the same questions, so |z| is usually below 1 if the protocol is the same.

    `ours` and `published` are shares of right answers, from 0 to 1, of `asked` and of `questions` questions.
    """
    share = min(max(published, 0.5 / questions), 1 - 0.5 / questions)  # a share of 0 or 1 has an error, too
    return (ours - published) / math.sqrt(share * (1 - share) * (1 / questions + 1 / asked))
