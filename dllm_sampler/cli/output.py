"""Results of a run: one JSON line per sample, and one line of figures on stderr."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dllm_sampler.cli.inputs import Prompt
from dllm_sampler.core.checks import is_whole
from dllm_sampler.errors import NotWrittenError, UserError, counted
from dllm_sampler.host import files
from dllm_sampler.host.reading import load_json
from dllm_sampler.result import Result

if TYPE_CHECKING:
    from dllm_sampler.result import Speculation

BEGINS = b'{"schema": '  # first bytes of each line
SCHEMA = 1  # of a line of output=FILE.jsonl


def listed(numbers: Sequence[int]) -> str:
    """Return the first eight numbers as text, and the count of the others."""
    few = ", ".join(map(str, numbers[:8]))
    return few if len(numbers) <= 8 else f"{few} and {len(numbers) - 8} more"


def _other(path: Path) -> bool:
    """Return True if a file holds something other than samples, for example a model's config or a schema."""
    if files.is_stream(path):
        return False
    try:
        with path.open("rb") as file:
            return not BEGINS.startswith(file.read(len(BEGINS)))
    except OSError:  # reported when it is opened for writing
        return False


class Records:
    """The file, or the stream, of `output=FILE.jsonl`: a JSON object per line, in the order of the prompts.

    A line is written once its sample and those before it are done. A run replaces an existing file of that name, and
    locks it. Pipes and devices are not replaced. `output=/dev/stdout` prints these lines instead of the answers.

    `resume=true` continues an interrupted run. The file must have answers to the same prompts under the same settings.
    There may be more prompts than before. `batch_size`, `batching`, `device`, `threads` and `stream` may differ.

    - `schema`: 1
    - `settings`: what the samples depend on besides their prompts, as 12 hexadecimal digits
    - `index`: number of the prompt in the run, from 0
    - `sample`: number of the answer to that prompt, from 0. Only with `samples=N`
    - `prompt`: a text, token ids or messages, as given
    - `text`: the answer, cut at the first end-of-text token or stop string. Null without a tokenizer
    - `gaps`: the text of each gap. Only with given tokens
    - `tokens`: the answer's token ids, up to and with the first end-of-text token, or before the stop string
    - `complete`: false if `max_steps`, a guide, or logits that are not finite ended the sample early
    - `finish_reason`: `end` (an end-of-text token), `length` (cut at `max_new_tokens`), `stop_string`, `max_steps`,
      `constraint` (the guide allows nothing that is left) or `not_finite`. Not with `target=`
    - `valid`, `rejections`: true if the answer has the guide's form; commits that the guide refused. Only with a guide
      that judges answers by their form alone
    - `particles`: the number of the chosen row (`winner`), `ratings` and forwards (`nfe`) of all rows, and `ancestors`
      at each meeting. Only with `particles=`
    - `nfe`: forwards that the sample took part in. With `particles=` those of all its rows
    - `tokens_per_forward`: number of `tokens`, without given ones, over `nfe`
    - `step_map`: for each of `tokens` the forward that committed it, from 0. -1: given, or never committed
    - `accepted`, `drafter_nfe`: drafted tokens taken in each round, and forwards of the drafter. `nfe` and `step_map`
      are then the target's. Only with `target=`
    - `time`: seconds since the answer before it ended, or of the whole batch if there is one. Loading and display are
      excluded

    Args:
        path: path of the file.
        prompts_file: path of the run's prompts, which must be another file.
        samples: answers to each prompt.
        settings: a digest of all settings that change samples.

    Attributes:
        there: numbers of the samples of an earlier run that `resume` found in the file.

    Raises:
        UserError: the file cannot be written, holds prompts or other data, or is being written by another process.
    """

    def __init__(self, path: str, prompts_file: str | None = None, samples: int = 1, settings: str = "") -> None:
        self.path, self.samples, self.settings = Path(path).expanduser(), samples, settings
        self.there: set[int] = set()
        if prompts_file is not None and files.same(self.path, Path(prompts_file).expanduser()):
            raise UserError("file-overwrite", f"output={path} would overwrite prompts_file. Name another file.")
        if self.path.suffix != ".jsonl" and _other(self.path):
            said = f"output={path} exists and contains no samples"
            raise UserError("file-overwrite", f"{said}. Name another file, for example samples.jsonl.")
        self.lines = files.Lines(self.path, f"output={path}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            try:
                self._sort()
            finally:
                self.lines.close()
        else:
            with suppress(NotWrittenError):  # the first error is reported
                self.lines.close()

    @property
    def replaces_answers(self) -> bool:
        """True if the lines go to standard output and replace the answers."""
        return self.lines.stdout

    def resume(self, prompts: Sequence[Prompt]) -> None:
        """Find the samples of this run that the file has already. An incomplete last line is replaced.

        Args:
            prompts: all prompts of the run.

        Raises:
            UserError: the output is not a regular file, or one of its lines does not belong to this run.
        """
        if not self.lines.regular:
            raise UserError(
                "file-invalid", f"resume=true cannot continue output={self.path}, a pipe or device. Name a file."
            )
        data = self.path.read_bytes()
        self.lines.kept = data.rfind(b"\n") + 1
        for number, line in enumerate(data[: self.lines.kept].splitlines(), 1):
            self.there.add(self._known(line, prompts, f"{self.path} line {number}"))

    def _known(self, line: bytes, prompts: Sequence[Prompt], where: str) -> int:
        """Return the number of the sample in a line that an earlier run wrote.

        Raises:
            UserError: the line is not a sample, or belongs to another run.
        """
        try:
            found = load_json(line)
            index, sample = found["index"], found.get("sample", 0)
            if found["schema"] != SCHEMA or not is_whole(index) or not is_whole(sample):
                raise ValueError
            settings, prompt = found.get("settings"), found["prompt"]
        except (ValueError, KeyError, TypeError, AttributeError):
            way = "Remove the line, or name another output="
            raise UserError("file-invalid", f"{where} is not a sample. {way}.") from None
        if settings != self.settings or not 0 <= sample < self.samples:
            raise UserError(
                "run-differs", f"{where} was made with other settings. Give the same settings, or another output=."
            )
        if not 0 <= index < len(prompts) or prompt != prompts[index]:
            what = f"another prompt than prompt {index + 1} of"
            what = what if 0 <= index < len(prompts) else f"prompt {index + 1}, which is not in"
            raise UserError("run-differs", f"{where} holds {what} this run. Give the same prompts, or another output=.")
        return index * self.samples + sample

    def left(self, total: int) -> str:
        """Return a sentence with the number of samples in the file and the way to make the missing ones.

        Args:
            total: number of samples of the run.
        """
        written = len(self.there) + self.lines.count
        if written == total:
            return f"{self.path} is complete ({counted(total, 'sample')})"
        if not written:
            return f"no sample was done yet, and {self.path} is as it was: the same command starts over"
        said = f"{self.path} has {written} of {total} samples"
        return f"{said}: the same command with resume=true makes the rest" if self.lines.regular else said

    def _sort(self) -> None:
        """Sort the lines of a resumed run by prompt. An interrupted run may have written a later sample early."""
        if not self.there or not self.lines.count:
            return
        lines = self.path.read_bytes().splitlines(keepends=True)
        ordered = sorted(lines, key=lambda line: ((found := load_json(line))["index"], found.get("sample", 0)))
        if ordered != lines:
            files.write(self.path, b"".join(ordered))

    def write(self, first: int, prompts: list[Prompt], result: Result | Speculation, seconds: float) -> None:
        """Append the samples of one result.

        Args:
            first: number of the first sample in the run, from 0.
            prompts: their prompts.
            result: what the sampler returned for them.
            seconds: wall-clock time of all of them.

        Raises:
            NotWrittenError: a line cannot be written. The lines before it are complete.
        """
        lengths, steps = result.lengths.tolist(), result.step_map.tolist()
        complete = result.complete.tolist()
        tokens, nfe, tpf = result.tokens.tolist(), result.nfe.tolist(), result.tokens_per_forward.tolist()
        for row, prompt in enumerate(prompts):
            record = {
                "schema": SCHEMA,
                "settings": self.settings,
                "index": (first + row) // self.samples,
                **({"sample": (first + row) % self.samples} if self.samples > 1 else {}),
                "prompt": prompt,
                "text": None if result.texts is None else result.texts[row],
                **_filled(result, row),
                "tokens": tokens[row][: lengths[row]],
                "complete": complete[row],
                **_ending(result, row),
                **_rows(result, row),
                "nfe": nfe[row],
                "tokens_per_forward": tpf[row],
                "step_map": steps[row][: lengths[row]],
                "time": round(seconds, 6),
            }
            if not isinstance(result, Result):
                taken = [one for one in result.accepted[row].tolist() if one >= 0]
                record |= {"accepted": taken, "drafter_nfe": int(result.drafter_nfe[row])}
            self.lines.add(json.dumps(record, ensure_ascii=False))


def _filled(result: Result | Speculation, row: int) -> dict[str, object]:
    """Return the field `gaps` of a sample that has gaps."""
    gaps = result.gaps[row] if isinstance(result, Result) and result.gaps is not None else None
    return {} if gaps is None else {"gaps": gaps}


def _ending(result: Result | Speculation, row: int) -> dict[str, object]:
    """Return the fields about a sample's end, and about its form if a guide judges that."""
    if not isinstance(result, Result):
        return {}
    said = {} if result.valid is None else {"valid": bool(result.valid[row]), "rejections": int(result.rejections[row])}
    return {"finish_reason": result.finish_reason[row], **said}


def _rows(result: Result | Speculation, row: int) -> dict[str, object]:
    """Return the field `particles` of a sample that was chosen from several rows."""
    rows = result.rows[row] if isinstance(result, Result) and result.rows is not None else None
    return {} if rows is None else {"particles": rows.record()}


# The note in the summary for each reason that an answer is incomplete.
SHORT = {
    "length": "cut at max_new_tokens",
    "unended": "cut at the end of the canvas, whose length the scheduler chose",
    "max_steps": "stopped at max_steps",
    "idle": "no token was committed. Check the scheduler: python -m dllm_sampler.check scheduler=NAME",
    "constraint": "nothing that the guide allows was left to commit",
    "stopped": "cut at a stop string before it had the guide's form",
    "invalid": "complete, but not of the guide's form",
}


class Totals:
    """The figures of a run, summed over its batches.

    Args:
        fills: do not report that an answer with gaps was cut, since its text sets the length.
        all_fill: do not report this of any answer, even one that is a single gap.
    """

    def __init__(self, fills: bool = False, all_fill: bool = False) -> None:
        self.fills, self.all_fill = fills, all_fill
        self.samples = self.tokens = 0
        self.short: dict[str, list[int]] = {}  # reason -> numbers of such samples, from 1
        self.forwards: list[int] = []
        self.accepted: int | None = None  # drafted tokens that a target took
        self.seconds = 0.0

    def add(self, first: int, result: Result | Speculation, seconds: float) -> None:
        """Count one batch, whose first sample has the number `first` (from 0) in the run."""
        self.samples += len(result.lengths)
        self.tokens += int((result.generated if isinstance(result, Result) else result.lengths).sum())
        self.forwards += result.nfe.tolist()
        self.seconds += seconds
        if isinstance(result, Result):
            for row, reason in enumerate(result.finish_reason):
                valid = None if result.valid is None else bool(result.valid[row])
                unfit = {"end": "invalid", "length": "invalid", "stop_string": "stopped"}
                why = unfit.get(reason, reason) if valid is False else reason
                if why == "length" and int(result.trace.end[row]) < result.trace.ids.shape[1]:
                    why = "unended"
                why = "idle" if why == "max_steps" and not bool((result.step_map[row] >= 0).any()) else why
                whole = self.all_fill or (self.fills and result.gaps is not None and result.gaps[row] is not None)
                if why in SHORT and not valid and not (whole and why == "length"):
                    self.short.setdefault(why, []).append(first + row + 1)
        else:
            self.accepted = (self.accepted or 0) + int(result.accepted.clamp(min=0).sum())

    def shortcomings(self) -> str:
        """Return the numbers of incomplete samples with the reasons, or "" if there are none."""
        parts = []
        for why, numbers in self.short.items():
            name = "the answer:" if self.samples == 1 else f"sample{'s' * (len(numbers) > 1)} {listed(numbers)}:"
            parts.append(f"{name} {SHORT[why]}")
        return "; ".join(parts)

    def line(self, where: str) -> str:
        """Return the summary of the run, for example `2 samples, 23 tokens in 0.12 s on cpu: NFE 8 to 12, ...`."""
        low, high = min(self.forwards), max(self.forwards)
        nfe = str(low) if low == high else f"{low} to {high}"
        per_forward, per_second = self.tokens / max(1, sum(self.forwards)), self.tokens / max(self.seconds, 1e-9)
        taken = (
            "" if self.accepted is None else f", {self.accepted / max(1, sum(self.forwards)):.2f} drafted tokens taken"
        )
        return (
            f"{counted(self.samples, 'sample')}, {counted(self.tokens, 'token')} in {self.seconds:.2f} s on {where}: "
            f"NFE {nfe}, {per_forward:.2f} tokens per forward{taken}, {per_second:.1f} tokens/s"
        )
