"""What a published system is turned into: a `Sampler` that does the same, and how its record is to be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dllm_sampler.errors import UserError
from dllm_sampler.eval.conformance.lines import Line, Steps
from dllm_sampler.models import loading
from dllm_sampler.protocols import Denoiser
from dllm_sampler.sampler import Sampler


class Unsupported(Exception):
    """A line that asks for something no plug-in does; the message says what."""


@dataclass(frozen=True)
class Checkpoints:
    """Models of a trace folder, each loaded once."""

    folder: Path
    loaded: dict[str, Denoiser] = field(default_factory=dict)

    def load(self, name: str) -> Denoiser:
        """The checkpoint `name`, on the CPU in the traces' float32.

        Raises:
            UserError: there is no such folder, or it is no checkpoint.
        """
        if name not in self.loaded:
            if not (self.folder / name).is_dir():
                raise UserError(f"the traces want the checkpoint {name}, and there is no folder {self.folder / name}")
            self.loaded[name] = loading.load(self.folder / name, device="cpu", dtype="float32").denoiser
        return self.loaded[name]


@dataclass(frozen=True)
class Setup:
    """A recorded run, ready to be made again.

    Args:
        sampler: made for this one run, since recorded draws are used up.
        new_tokens: length of the generation.
        rows_first: how `steps` of a batch are indexed, see `Line.committed`.
        wasted_block: see `compare.mismatch`.
        lockstep: block length of a loop whose rows wait for each other at the end of a block; ours do not.
        steps: what the run committed, where the record's steps are not forwards; None: see `Line.committed`.
        fill: token that the published loop writes over whatever was never decoded.
    """

    sampler: Sampler
    new_tokens: int
    rows_first: bool = False
    wasted_block: int | None = None
    lockstep: int | None = None
    fill: int | None = None
    steps: Callable[[], Steps] | None = None


Builder = Callable[[Line, Checkpoints], Setup]
