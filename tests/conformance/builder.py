"""What a published system is turned into: a `Sampler` that does the same, and how its record is to be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dllm_sampler.core.protocols import Denoiser, Plan
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Canvas, Query, Spent
from dllm_sampler.errors import UserError
from dllm_sampler.models import loading
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.sampler import Sampler
from tests.conformance.lines import Line, Steps
from tests.conformance.lines import Unsupported as Unsupported


class NoCheckpoint(UserError):
    """The model of a line cannot be loaded."""


@dataclass(frozen=True)
class Checkpoints:
    """Models of a trace folder, each loaded once."""

    folder: Path
    loaded: dict[str, Denoiser] = field(default_factory=dict)

    def load(self, name: str, mask_id: int | None = None, eos_id: int | None = None) -> Denoiser:
        """The checkpoint `name`, on the CPU in the traces' float32, with the special tokens that a line names.

        Published loops know one end token: that of the line, or else the checkpoint's first.

        Raises:
            NoCheckpoint: there is no such folder, or it is no checkpoint.
        """
        if name not in self.loaded:
            folder = self.folder / name
            if not folder.is_dir():
                raise NoCheckpoint("made-up", f"the traces want the checkpoint {name}, and there is no folder {folder}")
            try:
                self.loaded[name] = loading.load(folder, device="cpu", dtype="float32", mask_id=mask_id).denoiser
            except UserError as error:
                raise NoCheckpoint("made-up", str(error)) from None
        denoiser = self.loaded[name]
        if isinstance(denoiser, TransformerDenoiser):
            mask_id = denoiser.mask_id if mask_id is None else mask_id
            return replace(denoiser, mask_id=mask_id, eos_id=denoiser.spec.eos_id if eos_id is None else eos_id)
        return denoiser


@dataclass(frozen=True)
class Measured:
    """A denoiser that takes down how many positions each forward computes for the longest row."""

    denoiser: Denoiser
    lengths: list[int] = field(default_factory=list)

    @property
    def spec(self) -> ModelSpec:
        """The model's."""
        return self.denoiser.spec

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        """See `Denoiser`."""
        hidden, spent = self.denoiser(canvas, query, plan)
        self.lengths.append(int(spent.computed.max()))
        return hidden, spent

    def head(self, hidden: Tensor) -> Tensor:
        """See `Denoiser`."""
        return self.denoiser.head(hidden)


@dataclass(frozen=True)
class Setup:
    """A recorded run, ready to be made again.

    Args:
        sampler: made for this one run, since recorded draws are used up.
        new_tokens: length of the generation.
        rows_first: how `steps` of a batch are indexed, see `Line.committed`.
        wasted_block: see `compare.mismatch`.
        lockstep: block length of a loop whose rows wait for each other at the end of a block; ours do not.
        suffix: tokens that the published loop puts at the end of the row, and does not decode.
        steps: what the run committed, where the record's steps are not forwards; None: see `Line.committed`.
        fill: token that the published loop writes over whatever was never decoded.
        measured: the sampler's denoiser, where the record says how many positions each forward computed.
        guided: whether the record has two forwards for the step of this number (from 0), one of them without prompt.
        only_commits: the record lists no forwards that committed nothing, though it counts them.
        counted: further lists of numbers that the record has under these names, filled while the run is made.
        accepted: positions that each forward accepted, where the record has those and acceptance is not for good.
        ends: tokens with which an output ends, where what was never begun is no part of it and `pad` stands behind
            the first of them up to the end of its block.
        before: the output ends before the first of `ends`.
        cut: the recorded output ends behind the first end token, or at this length; `steps` goes on.
        empties: an end token cuts all of it instead.
    """

    sampler: Sampler
    new_tokens: int
    rows_first: bool = False
    wasted_block: int | None = None
    lockstep: int | None = None
    fill: int | None = None
    measured: Measured | None = None
    guided: Callable[[int], bool] | None = None
    only_commits: bool = False
    cut: int | None = None
    empties: bool = False
    accepted: Steps | None = None
    counted: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    ends: tuple[int, ...] | None = None
    pad: int | None = None
    before: bool = False
    suffix: list[int] | None = None
    steps: Callable[[], Steps] | None = None


# What replays a line: a run that is made again and compared, or what does both and says what differs first.
Task = Setup | Callable[[], str | None]
Builder = Callable[[Line, Checkpoints], Task]
