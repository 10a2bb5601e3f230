"""What a Learn2PD filter learns from: a model's own answers, replayed to see when each token was final."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor
from tqdm import tqdm

from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.errors import UserError
from dllm_sampler.host import files
from dllm_sampler.host.reading import load_json
from dllm_sampler.inputs.prompts import Prompt
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.learn2pd import lay_out


@dataclass(frozen=True)
class Records:
    """A model's predictions of a block, one row per forward: `[R, N]` each."""

    known: Tensor  # float32 confidence of each position's candidate; 1 behind the block's end
    final: Tensor  # bool: the candidate is the token of the reference
    open: Tensor  # bool: still noise
    there: Tensor  # bool: inside the block

    def __len__(self) -> int:
        return self.known.shape[0]

    def to(self, device: torch.device) -> Records:
        """Return the same on another device."""
        return Records(*(getattr(self, one.name).to(device) for one in fields(self)))

    def rows(self, first: int, last: int) -> Records:
        """Return some of the rows."""
        return Records(*(getattr(self, one.name)[first:last] for one in fields(self)))

    @staticmethod
    def join(parts: Sequence[Records]) -> Records:
        """Return all rows of several, on the CPU."""
        return Records(*(torch.cat([getattr(part, one.name) for part in parts]).cpu() for one in fields(Records)))


@dataclass(frozen=True)
class Replay(Scheduler):
    """Decode towards a known answer: commit every candidate that is right, and write down what was to be seen.

    Where no new candidate is right the rest of the block is written from the answer. The published procedure makes
    one more forward there, which says the same again.

    Args:
        answer: `[B, N]` the reference of each row of the batch.
        size: positions per block.
    """

    answer: Tensor
    size: int
    seen: list[Records] = field(default_factory=list)

    @property
    def traits(self) -> Traits:
        """See `Scheduler.traits`."""
        return Traits(asks="window")

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        """See `Scheduler.tell`."""
        at, eligible = query.positions, canvas.eligible(query.positions)  # [B, Q]
        answer = self.answer.gather(1, (at - canvas.layout.first[:, None]).clamp(0, self.answer.shape[1] - 1))
        right = readout.token[:, 0] == answer
        blank = torch.ones(at.shape[0], self.size, device=at.device)
        live = ~canvas.done
        known, offset = lay_out(canvas, at, readout.confidence[:, 0], blank)
        there = torch.zeros_like(torch.cat([blank, blank[:, :1]], 1)).scatter(1, offset, 1.0)[:, : self.size] > 0
        final, open_ = (lay_out(canvas, at, each, blank)[0] > 0 for each in (right, eligible))
        self.seen.append(Records(known[live], final[live], (open_ & there)[live], there[live]))
        new = eligible & right
        return Edit(answer, new | (eligible & ~new.any(1, keepdim=True))), carry


def collect(
    reference: Sampler, splits: Sequence[Sequence[Prompt]], new_tokens: int, size: int, batch: int, path: Path,
    run: Mapping[str, Any],
) -> list[Records]:  # fmt: skip
    """Return the records of each split's prompts. What there is goes to a file, and is taken up from it.

    Each process answers a batch at a time; the records are the same however many there are.

    Args:
        reference: decodes one token per step, in blocks of `size`.
        splits: prompts, each split on its own.
        new_tokens: of each answer.
        size: positions per block.
        batch: prompts decoded together.
        path: of the unfinished run's file.
        run: facts that an unfinished run must share; anything JSON can say.

    Raises:
        UserError: the file is damaged or of another run.
    """
    state = PartialState()
    batches = [prompts[first : first + batch] for prompts in splits for first in range(0, len(prompts), batch)]
    counts, parts = _resume(path, run)
    state.wait_for_everyone()  # the file is written to when all have read it
    for first in tqdm(range(len(counts), len(batches), state.num_processes), "collecting answers", disable=None):
        mine = batches[first : first + state.num_processes][state.process_index : state.process_index + 1]
        found = gather_object([replay(reference, list(prompts), new_tokens, size) for prompts in mine])
        counts += [len(part) for part in found]
        parts = [Records.join([*parts, *found])]
        if state.is_main_process:
            tensors = {one.name: getattr(parts[0], one.name).contiguous() for one in fields(Records)}
            files.write(path, serialise(tensors, {"state": json.dumps({"run": dict(run), "counts": counts})}))
    each, row = [], 0
    for prompts in splits:
        here = -(-len(prompts) // batch)
        last = row + sum(counts[:here])
        each.append(parts[0].rows(row, last))
        counts, row = counts[here:], last
    return each


def replay(reference: Sampler, prompts: list[Prompt], new_tokens: int, size: int) -> Records:
    """Return the records of one batch: its answers one token per step, then again towards them."""
    trace = reference.generate(prompts, max_new_tokens=new_tokens).trace
    towards = Replay(trace.ids[:, trace.origin :].to(reference.device), size)
    Sampler(
        reference.denoiser, scheduler=towards, blocks=reference.plugins.blocks, stop="none",
        tokenizer=reference.tokenizer,
    ).generate(prompts, max_new_tokens=new_tokens)  # fmt: skip
    return Records.join(towards.seen)


def _resume(path: Path, run: Mapping[str, Any]) -> tuple[list[int], list[Records]]:
    """Return the rows of each batch that an unfinished run has done, and the records; nothing for a fresh one."""
    if not path.exists():
        return [], []
    try:
        with safe_open(path, "pt") as file:
            state = load_json(file.metadata()["state"])
            records = Records(*(file.get_tensor(one.name) for one in fields(Records)))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError("run-damaged", f"{path} is damaged ({error}). Remove it to restart.") from None
    if differs := [key for key, value in run.items() if state["run"].get(key) != value]:
        raise UserError(
            "run-differs",
            f"{path} is of an unfinished run with another train.{differs[0]}. Resume it as it was, or choose another"
            " train.output_dir.",
        )
    return list(state["counts"]), [records]
