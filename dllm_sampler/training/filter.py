"""The trainer of a Learn2PD filter (arXiv 2509.25188), which learns which predictions of a model are already final."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from accelerate import PartialState
from safetensors.torch import load_file
from safetensors.torch import save as serialise
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm
from typing_extensions import override

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout
from dllm_sampler.host import files
from dllm_sampler.inputs.prompts import Prompt
from dllm_sampler.models.filter import Filter, save
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.learn2pd import lay_out
from dllm_sampler.training.cli import Command
from dllm_sampler.training.data import Encoder
from dllm_sampler.training.trainer import Arguments, CommandTrainer, Count, Positive


class Records(NamedTuple):
    """A model's predictions of a block, one row per forward and answer: `[R, N]` each."""

    known: Tensor  # float32 confidence of each position's candidate; 1 after the block's end
    final: Tensor  # bool: the candidate is the token of the reference
    open: Tensor  # bool: still noise
    there: Tensor  # bool: inside the block

    @staticmethod
    def join(parts: Sequence[Records]) -> Records:
        """Return all rows of several, on the CPU."""
        return Records(*(torch.cat(each).cpu() for each in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Replay(Scheduler):
    """A scheduler that decodes towards a known answer: it commits every candidate that is right, and keeps records.

    If none is right, it writes the rest of the block. The published procedure repeats the same forward before that.
    """

    answer: Tensor  # [B, N] the reference of each row of the batch
    size: int  # positions per block
    seen: list[Records] = field(default_factory=list)

    @property
    @override
    def traits(self) -> Traits:
        return Traits(asks="window")

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
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
    reference: Sampler, prompts: Sequence[Prompt], new_tokens: int, size: int, batch: int, folder: Path
) -> Records:
    """Return the records of some prompts. Each batch has a file in the folder, which is read if it exists."""
    state, names = PartialState(), [folder / f"{first}+{batch}.safetensors" for first in range(0, len(prompts), batch)]
    for at in tqdm(range(state.process_index, len(names), state.num_processes), folder.name, disable=None):
        if not names[at].exists():
            found = replay(reference, [*prompts[at * batch : (at + 1) * batch]], new_tokens, size)
            files.make_folder(folder)
            files.write(names[at], serialise(found._asdict()))
    state.wait_for_everyone()
    return Records.join([Records(**load_file(name)) for name in names])


def replay(reference: Sampler, prompts: list[Prompt], new_tokens: int, size: int) -> Records:
    """Decode answers by `reference`, decode again towards them by `Replay` in blocks of `size`; return the records."""
    trace = reference.generate(prompts, max_new_tokens=new_tokens).trace
    towards = Replay(trace.ids[:, trace.origin :].to(reference.device), size)
    reference.using(scheduler=towards).generate(prompts, max_new_tokens=new_tokens)
    return Records.join(towards.seen)


@dataclass
class FilterConfig(Arguments):
    """Settings of `FilterTrainer`, and of `train=filter`.

    new_tokens, block_length: of each answer; a filter is good for one block length
    answer_batch_size: prompts decoded together
    depth: linear layers
    committed: also learn from positions already committed, as published
    caution: weight in the loss of a candidate that is not final; 1 as published
    """

    new_tokens: Count = 32
    block_length: Count = 32
    answer_batch_size: Count = 64
    depth: Count = 2
    committed: bool = False
    caution: Positive = 3.0
    per_device_train_batch_size: Literal[1] = 1  # pyright: ignore[reportIncompatibleVariableOverride] (of all records)


class FilterTrainer(CommandTrainer):
    """Trains a filter on all records at once; `best` are the layers with the least loss on the validation records."""

    config: ClassVar[type[FilterConfig]] = FilterConfig
    most_held_out: ClassVar[int] = 700

    def __init__(self, args: FilterConfig, training: Records, validation: Records, **options: Any):
        filter = Filter(training.known.shape[1], args.depth)
        self.best, self.least = filter.layers(), float("inf")
        steps: Any = [training] * (args.max_steps * args.world_size)
        held: Any = [validation]
        super().__init__(filter, args, lambda rows: rows[0]._asdict(), steps, held, **options)
        self.can_return_loss = True

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, *_: Any, **__: Any) -> Any:
        """Return the `loss` of the filter."""
        records = Records(**inputs)
        found = loss(model(records.known), records, self.args.committed, self.args.caution)
        return (found, {}) if return_outputs else found

    def evaluate(self, *given: Any, **named: Any) -> dict[str, float]:
        """Return the measured figures, and keep the layers if they are the best so far."""
        found = super().evaluate(*given, **named)
        if found["eval_loss"] < self.least:
            filter: Any = self.accelerator.unwrap_model(self.model)
            self.least = found["eval_loss"]
            self.best = tuple((weight.detach().cpu(), bias.detach().cpu()) for weight, bias in filter.layers())
        return found

    @classmethod
    def command(cls, line: Command) -> Path:
        """Collect records, train and save; return the filter's file. A folder `records` is an unfinished run's."""
        args = line.arguments(FilterConfig)
        path = Path(args.output_dir) / "filter.safetensors"
        records = path.with_name("records")
        train, held = line.examples(args, False, cls.most_held_out)
        line.begin(records, path.exists(), records.exists())  # the folder around it may be the model's
        reference = line.sampler(args, scheduler=FixedSteps(), blocks=FixedBlocks(args.block_length), stop="none")
        spec = reference.denoiser.spec
        for one in (*train, *held):
            Encoder(reference.tokenizer, spec).prompt(one, args.new_tokens)
        limits = args.new_tokens, args.block_length, args.answer_batch_size
        line.record(records)
        training, validation = (
            collect(reference, [one.prompt for one in part], *limits, records / name)
            for name, part in (("training", train), ("validation", held))
        )
        trainer = cls(args, training, validation)
        trainer.train()
        if not trainer.is_world_process_zero():
            return path
        report = {
            "settings": {**line.settings, "model": line.model},
            "records": {"training": len(training.known), "validation": len(validation.known)},
            "validation_loss": trainer.least,
        }
        files.write(path.with_suffix(".json"), json.dumps(report, indent=1) + "\n")
        save(path, trainer.best, spec, args.block_length)
        shutil.rmtree(records)
        return path


def loss(said: Tensor, records: Records, committed: bool, caution: float) -> Tensor:
    """Return the mean cross-entropy of logits `said [R, N]`: of open positions, or also of those `committed`."""
    counts = (records.there if committed else records.open).to(records.known)
    counts = torch.where(records.final, counts, caution * counts)
    each = binary_cross_entropy_with_logits(said, records.final.to(said), reduction="none")
    return (each * counts).sum() / counts.sum().clamp(min=1)
