"""What a run leaves behind: one JSON line per sample, and one line of figures on stderr."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dllm_sampler.cli.inputs import Prompt
from dllm_sampler.errors import UserError
from dllm_sampler.result import Result

if TYPE_CHECKING:
    from dllm_sampler.result import Speculation

SCHEMA = 1  # of a line of output=FILE.jsonl; docs/formats.md


class Records:
    """The file of `output=FILE.jsonl`. Each line is written whole, as soon as the sample is done."""

    def __init__(self, path: str, prompts_file: str | None = None) -> None:
        self.path = Path(path).expanduser()
        if prompts_file is not None and self.path.resolve() == Path(prompts_file).expanduser().resolve():
            raise UserError(f"output={path} would overwrite prompts_file: give it another name")
        # Opened without truncating: a mistake found later must not cost the file of an earlier run.
        try:
            self.file = self.path.open("ab", buffering=0)  # a line is one write: whole, or an error here and now
        except OSError as error:
            raise UserError(f"cannot write output {path}: {error.strerror}") from None
        self.written = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.file.close()

    def write(self, first: int, prompts: list[Prompt], result: Result | Speculation, seconds: float) -> None:
        """Append samples that came together.

        Args:
            first: index of the first prompt in the run.
            prompts: their prompts.
            result: what the sampler returned for them.
            seconds: wall-clock time that they share.
        """
        if not self.written:
            self.file.truncate(0)
            self.written = True
        lengths, steps = result.lengths.tolist(), result.step_map.tolist()
        complete = result.complete.tolist()
        tokens, nfe, tpf = result.tokens.tolist(), result.nfe.tolist(), result.tokens_per_forward.tolist()
        for row, prompt in enumerate(prompts):
            record = {
                "schema": SCHEMA,
                "index": first + row,
                "prompt": prompt,
                "text": None if result.texts is None else result.texts[row],
                "tokens": tokens[row][: lengths[row]],
                "complete": complete[row],
                "nfe": nfe[row],
                "tokens_per_forward": tpf[row],
                "step_map": steps[row][: lengths[row]],
                "time": round(seconds, 6),
            }
            if not isinstance(result, Result):
                taken = [one for one in result.accepted[row].tolist() if one >= 0]
                record |= {"accepted": taken, "drafter_nfe": int(result.drafter_nfe[row])}
            try:
                self.file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
            except OSError as error:
                raise UserError(f"cannot write output {self.path}: {error.strerror}") from None


class Totals:
    """The figures of a run, summed over its batches."""

    def __init__(self) -> None:
        self.samples = self.tokens = 0
        self.forwards: list[int] = []
        self.accepted: int | None = None  # drafted tokens that a target took
        self.seconds = 0.0

    def add(self, result: Result | Speculation, seconds: float) -> None:
        """Count one batch."""
        self.samples += len(result.lengths)
        self.tokens += int(result.lengths.sum())
        self.forwards += result.nfe.tolist()
        self.seconds += seconds
        if not isinstance(result, Result):
            self.accepted = (self.accepted or 0) + int(result.accepted.clamp(min=0).sum())

    def line(self, where: str) -> str:
        """The one line of the run, as in `2 samples, 23 tokens in 0.12 s on cpu: NFE 8 to 12, 1.15 tokens per ...`."""
        low, high = min(self.forwards), max(self.forwards)
        nfe = str(low) if low == high else f"{low} to {high}"
        samples = "1 sample" if self.samples == 1 else f"{self.samples} samples"
        per_forward, per_second = self.tokens / max(1, sum(self.forwards)), self.tokens / max(self.seconds, 1e-9)
        taken = (
            "" if self.accepted is None else f", {self.accepted / max(1, sum(self.forwards)):.2f} drafted tokens taken"
        )
        return (
            f"{samples}, {self.tokens} tokens in {self.seconds:.2f} s on {where}: "
            f"NFE {nfe}, {per_forward:.2f} tokens per forward{taken}, {per_second:.1f} tokens/s"
        )
