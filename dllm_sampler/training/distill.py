"""Certainty-forcing distillation: a model learns to be sure of many tokens at once (dParallel, arXiv 2509.26488)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from accelerate.utils import gather_object
from pydantic import Field
from torch import nn

from dllm_sampler.errors import UserError
from dllm_sampler.host import files
from dllm_sampler.training.certainty import certainty_loss, split
from dllm_sampler.training.data import Row
from dllm_sampler.training.masked import Dice, chunk, collate
from dllm_sampler.training.trainer import Count, DiffusionConfig, DiffusionTrainer, Number, Positive

FIGURES = ("cross_entropy", "entropy", "right_masks")  # of `certainty_loss`
ANSWERS = "answers.json"  # in the folder of the run


@dataclass
class DistillConfig(DiffusionConfig):
    """Settings of `DistillTrainer`.

    teacher: settings of the sampler that answers the prompts; published: one token per step in blocks of 32
    keep: only right answers are learned from, else all that are complete
    tail: learn the end tokens after the answer, too, up to `new_tokens` (mini's canvases end in them; published: one)
    block_length: of the active block. None: the whole answer is active (Dream, which would unlearn its order)
    ratio: share of the active block that the first sample masks
    certainty: weight of the entropy; published: 2 for LLaDA, 1 for Dream
    entropy_temperature: of the distribution whose entropy it is
    """

    teacher: dict[str, Any] = field(default_factory=dict)
    keep: bool = True
    tail: bool = False
    block_length: Count | None = 32
    ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5
    certainty: Number = 2.0
    entropy_temperature: Positive = 0.5

    samplers: ClassVar[tuple[str, ...]] = ("evaluation", "teacher")


class DistillTrainer(DiffusionTrainer):
    """Trains a model on its own answers, so that it predicts with certainty what it predicts rightly anyway.

    Training begins with its answers to the prompts of `train_dataset`, by the weights as they are, which are kept in
    `answers.json`. A run that resumes learns from the same ones.
    """

    config: ClassVar[type[DiffusionConfig]] = DistillConfig
    most_held_out: ClassVar[int] = 200

    def rows(self, args: DistillConfig) -> tuple[list[Row], list[Row]]:
        """Check and encode the prompts, and the length of the active block."""
        spec = self.trained.spec
        if spec.attention == "block_causal" and args.block_length != spec.block_length:
            said = f"train.model={self.trained.named} needs block_length={spec.block_length}"
            raise UserError("model-not-trainable", said)
        return super().rows(args)

    def train(self, *given: Any, **named: Any) -> Any:
        """Answer the prompts, unless a run before this one did, and train on what is kept."""
        path = Path(self.args.output_dir) / ANSWERS
        pairs = json.loads(path.read_text()) if path.exists() else self._answer()
        if not pairs:
            count = len(self.examples)
            raise UserError("nothing-to-learn", f"none of the {count} answers is right. Give more prompts.")
        self.accelerator.wait_for_everyone()
        if self.args.should_save and not path.exists():
            files.write(path, json.dumps(pairs))
        self.train_dataset = [Row(at, None, *pair) for at, pair in enumerate(pairs)]
        return super().train(*given, **named)

    def _answer(self) -> list[tuple[list[int], list[int]]]:
        """Return prompts and the model's own answers in tokens; the processes share the prompts."""
        mine, seeds = self.shared(list(zip(self.examples, self.train_rows, strict=True)))
        self._move_model_to_device(self.trained, self.args.device)
        answers = self.answered(self.sampler(**self.args.teacher), [one.prompt for one, _ in mine], [*seeds])
        found = []
        for number, (example, row), answer in zip(seeds, mine, answers, strict=True):
            ids = answer.tokens[: answer.length].tolist()
            if example.right(answer.text or "", ids, self.metric) == 1 if self.args.keep else answer.complete:
                assert answer.trace is not None
                tokens = answer.trace.decoded[0].tolist() if self.args.tail else ids
                found.append((number, (row.prompt, tokens)))
        return [pair for _, pair in sorted(gather_object(found))]

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean over the rows of the losses of both samples."""
        some, spec, args = inputs["rows"], self.trained.spec, self.args
        rows = collate([(row.prompt, row.answer) for row in some], spec.eos_id)
        size = args.block_length or rows.ids.shape[1]
        dice = Dice([self.seed_of("noise", self.state.global_step, row.number) for row in some])
        halves = split(rows, size, args.ratio, dice, aligned=spec.attention == "block_causal")
        asked = torch.cat([halves.one, halves.other])
        rows = rows.some(torch.arange(len(some)).repeat(2))
        one = chunk(rows, asked | halves.future.repeat(2, 1), asked, spec).to(spec.device)
        found = certainty_loss(one.logits(model), one.tokens, one.there, args.entropy_temperature, one.mask_id)
        self.note({name: float(value.detach().mean()) for name, value in zip(FIGURES, found, strict=True)})
        return (found[0] + args.certainty * found[1]).sum() / len(some)
