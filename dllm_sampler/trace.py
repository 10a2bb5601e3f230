"""What happened: which forward committed each token, and how sure it was. Saved, loaded, replayed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dllm_sampler.canvas import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError

SCHEMA = 1
FIELDS = ("ids", "step_map", "logprob", "nfe", "rows", "begin", "end", "seeds")


class Recorder:
    """Device buffers of a running generation; nothing is transferred before the end."""

    def __init__(self, canvas: Canvas):
        self.step_map = torch.full_like(canvas.ids, -1)  # [B, L+1]
        self.logprob = torch.zeros(canvas.ids.shape, dtype=torch.float32, device=canvas.ids.device)  # [B, L+1]

    def note(self, before: Canvas, after: Canvas, query: Query, edit: Edit, readout: Readout) -> None:
        """Take down what one step wrote, by the row's own count of forwards."""
        at = query.positions
        wrote = edit.commit & ~after.masked.gather(1, at) & ~before.frozen.gather(1, at) & ~before.done[:, None]
        step = torch.where(wrote, before.step[:, None], self.step_map.gather(1, at))
        sure = readout.confidence[:, 0] if edit.sure is None else edit.sure
        sure = torch.where(wrote, sure.log().float(), self.logprob.gather(1, at))
        if edit.remask is not None:
            step = torch.where(after.masked.gather(1, at), -1, step)
        self.step_map.scatter_(1, at, step)
        self.logprob.scatter_(1, at, sure)


@dataclass(frozen=True)
class Trace:
    """The history of a generation, on the CPU. Columns are absolute: rows are left-padded, column `origin` is the first
    generated one."""

    ids: Tensor  # [B, L] the final canvas
    step_map: Tensor  # [B, L] forward that committed each token, from 0; -1: prompt, padding, never committed
    logprob: Tensor  # [B, L] float32 log-probability of the token at its commit
    nfe: Tensor  # [B]
    rows: Tensor  # [B] positions computed
    begin: Tensor  # [B] first real column
    end: Tensor  # [B] end of the row
    seeds: Tensor  # [B]
    origin: int
    mask_id: int | None
    pad_id: int

    @staticmethod
    def of(canvas: Canvas, recorder: Recorder, mask_id: int | None, pad_id: int) -> Trace:
        """The trace of a finished (or interrupted) generation."""
        part = slice(0, canvas.length)
        kept = {
            "ids": canvas.ids[:, part],
            "step_map": recorder.step_map[:, part],
            "logprob": recorder.logprob[:, part],
            "nfe": canvas.nfe,
            "rows": canvas.rows,
            "begin": canvas.begin,
            "end": canvas.end,
            "seeds": canvas.row_seed,
        }
        tensors = {name: tensor.cpu().clone() for name, tensor in kept.items()}
        return Trace(**tensors, origin=canvas.origin, mask_id=mask_id, pad_id=pad_id)

    @property
    def generated(self) -> Tensor:
        """`[B, N]` step map of the generated part alone."""
        return self.step_map[:, self.origin :]

    def steps(self, row: int = 0) -> list[list[int]]:
        """Positions inside the generation that each forward of a row committed, in order of position.

        A token that was taken back counts for the forward that committed it last.
        """
        found: list[list[int]] = [[] for _ in range(int(self.nfe[row]))]
        for position, step in enumerate(self.generated[row].tolist()):
            if step >= 0:
                found[step].append(position)
        return found

    def replay(self) -> Iterator[Tensor]:
        """`[B, L]` the canvas before each forward and after the last, rebuilt from the step map.

        Exact for schedulers that never overwrite or remask a token.
        """
        noise = self.pad_id if self.mask_id is None else self.mask_id
        generated = torch.arange(self.ids.shape[1]) >= self.origin
        for step in range(int(self.nfe.max()) + 1):
            hidden = generated & (self.step_map >= step)
            yield torch.where(hidden, noise, self.ids)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file whose metadata holds the rest as JSON; atomically.

        Raises:
            UserError: it cannot be written there.
        """
        about = {"schema": SCHEMA, "origin": self.origin, "mask_id": self.mask_id, "pad_id": self.pad_id}
        data = save({name: getattr(self, name).contiguous() for name in FIELDS}, {"trace": json.dumps(about)})
        partial = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
        try:
            partial.write_bytes(data)
            os.replace(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UserError(f"the trace cannot be written to {path}: {error.strerror}") from error

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read what `save` wrote.

        Raises:
            UserError: no such file, not a trace, or one of another schema.
        """
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {}).get("trace", "{}"))
                if about.get("schema") != SCHEMA:
                    raise UserError(f"{path} is not a trace of schema {SCHEMA}, the one this version reads")
                tensors = {name: file.get_tensor(name) for name in FIELDS}
        except (OSError, SafetensorError, json.JSONDecodeError) as error:
            raise UserError(f"{path} cannot be read as a trace: {error}") from error
        return Trace(**tensors, origin=about["origin"], mask_id=about["mask_id"], pad_id=about["pad_id"])
