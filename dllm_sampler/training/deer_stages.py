"""The runs that make up the alignment of a drafter (DEER, arXiv 2512.15176): its target's, and two stages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from dllm_sampler.core import files
from dllm_sampler.training.deer_losses import distill_mask, masked_loss, refine_mask
from dllm_sampler.training.examples import Source
from dllm_sampler.training.finetune import FREE, FineTuner
from dllm_sampler.training.masking import collate
from dllm_sampler.training.trained import Trained

if TYPE_CHECKING:
    from dllm_sampler.training.deer import DeerTrainer

SHARED = (
    "device", "seed", "model", "dtype", "checkpoint_every", "data", "tasks", "new_tokens", "lora", "precision",
    "gradient_checkpointing", "shard", "held_out", "tracker",
)  # fmt: skip


class Stage(FineTuner):
    """One of the runs. Nothing is measured on the way, and a step is one forward of each process.

    trainer: which it is a part of, and has most settings from
    folder: to write to
    changes: further settings
    """

    # The trainer has checked the settings of the whole, and its folder may have another name now.
    free: ClassVar[tuple[str, ...]] = (*FREE, "model")

    def __init__(self, trainer: DeerTrainer, folder: Path, **changes: Any):
        self._trainer = trainer
        steps = changes["steps"]
        fixed: Mapping[str, Any] = {
            "output": str(folder), "warmup": round(0.02 * steps), "schedule": "cosine", "betas": (0.9, 0.98),
            "weight_decay": 0.01, "clip": 1.0, "average": 0.0, "batch_size": trainer.batch, "batch_tokens": 1,
            "evaluate_every": steps, "evaluation": {},
        }  # fmt: skip
        super().__init__(**{name: getattr(trainer, name) for name in SHARED} | fixed | changes)

    def part(self, number: int, share: slice) -> Tensor:
        """The loss of a step, as far as it comes from a share of its rows."""
        raise NotImplementedError

    def read(self) -> Source:
        """See `FineTuner.read`."""
        return self._trainer.source

    def measure(self) -> dict[str, float]:
        """See `FineTuner.measure`: nothing."""
        return {}

    def step(self, number: int) -> dict[str, float]:
        """One batch."""
        process, processes = self.accelerator.process_index, self.accelerator.num_processes
        share = slice(process, None, processes)
        # Gradients are averaged over processes.
        figures = self.update(iter([lambda: (self.part(number, share) * processes, {})]), f"step {number}")
        figures["loss"] = self.summed(figures["loss"])[0] / processes
        if (number + 1) % self.checkpoint_every == 0 or number + 1 == self.steps:
            self.say(f"{self.name} step {number + 1}/{self.steps}  loss {figures['loss']:.4f}")
        return figures


class Target(Stage):
    """Trains a small Llama on right answers."""

    name: ClassVar[str] = "target"

    def fresh(self, device: torch.device) -> Trained:
        """See `FineTuner.fresh`."""
        start = self._trainer.start
        assert start.tokenizer is not None
        spec = start.denoiser.spec
        ends = {
            "bos_token_id": None,
            "eos_token_id": [*spec.eos_ids] if spec.other_eos_ids else spec.eos_id,
            "pad_token_id": None,
        }
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed)
            made = LlamaForCausalLM(LlamaConfig(vocab_size=spec.vocab_size, **ends, **self._trainer.shape))
        network = cast(nn.Module, made).to(device)  # its own signature hides the module's
        return _Made(network, cast(Any, start.denoiser), start.tokenizer, self.name, self.folder, None)

    def part(self, number: int, share: slice) -> Tensor:
        """See `Stage.part`."""
        trainer, device = self._trainer, self.trained.denoiser.spec.device
        examples = self.source.draw(f"{self.seed}/target/{number}", trainer.batch, number=number)
        rows = collate([trainer.encode(one) for one in examples], trainer.spec.eos_id)
        ids, answer = rows.ids[share].to(device), rows.answer[share].to(device)
        # Padding stands behind the answer, which no token of it sees.
        logits = self.trained.wrapped(input_ids=ids).logits[:, :-1][answer[:, 1:]]
        return F.cross_entropy(logits, ids[answer], reduction="sum") / int(rows.answer.sum())


class _Made(Trained):
    """A target: no checkpoint was there before. Its denoiser is the drafter's, and says where tensors lie."""

    def save(self, folder: Path) -> None:
        """See `Trained.save`."""
        files.write_folder(folder, self.tokenizer.save_pretrained)
        files.write_folder(folder, cast(LlamaForCausalLM, self.network).save_pretrained)


class Distilled(Stage):
    """Stage I of a drafter: the answers of the target."""

    name: ClassVar[str] = "distilled"

    def part(self, number: int, share: slice) -> Tensor:
        """See `Stage.part`."""
        trainer, rng = self._trainer, Random(f"{self.seed}/{self.name}/{number}")
        pairs = [trainer.cut(*rng.choice(trainer.pairs), rng) for _ in range(trainer.batch)]
        rows, generator = collate(pairs, trainer.spec.eos_id), torch.Generator()
        answer = rows.answer & (torch.arange(rows.ids.shape[1]) < rows.length[:, None] - len(trainer.behind))
        masked, weight = self.corrupt(answer, generator.manual_seed(rng.getrandbits(62)))
        mine = rows.some(torch.arange(len(rows.ids))[share])
        own, masked, weight = (each[share, : mine.ids.shape[1]] for each in (answer, masked, weight))
        found = masked_loss(self.trained.wrapped, mine, own, masked, weight, trainer.spec)
        return found * (int(own.sum()) / int(answer.sum()))

    def corrupt(self, answer: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """What is masked of answers, and the weights."""
        return distill_mask(answer, generator, self._trainer.least_t)


class Refined(Distilled):
    """Stage II: the last tokens of what a draft is to say."""

    name: ClassVar[str] = "drafter"

    def corrupt(self, answer: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See `Distilled.corrupt`."""
        return refine_mask(answer, generator, self._trainer.longest, self._trainer.alpha)
