"""Certainty-forcing distillation: a model learns to be sure of many tokens at once (dParallel, arXiv 2509.26488)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from accelerate.utils import gather_object
from torch import nn

from dllm_sampler.core.checks import check_choice
from dllm_sampler.errors import UserError
from dllm_sampler.host import files
from dllm_sampler.inputs.prompts import encode_one
from dllm_sampler.training import masked
from dllm_sampler.training.certainty import certainty_loss, split
from dllm_sampler.training.data import Row
from dllm_sampler.training.masked import Dice, chunk, collate
from dllm_sampler.training.trainer import DiffusionConfig, DiffusionTrainer

FIGURES = ("cross_entropy", "entropy", "right_masks")  # of `certainty_loss`
ANSWERS = "answers.json"  # in the folder of the run


@dataclass
class DistillConfig(DiffusionConfig):
    """Settings of `DistillTrainer`.

    teacher: settings of the sampler that answers the prompts; published: one token per step in blocks of 32
    keep: only right answers are learned from, else all that are complete
    tail: learn the end tokens after the answer, too, up to `new_tokens` (mini's canvases end in them; published: one)
    masking: `block`; `random`: the whole answer is active (Dream, which would unlearn its order)
    block_length: of the active block
    ratio: share of the active block that the first sample masks
    certainty: weight of the entropy; published: 2 for LLaDA, 1 for Dream
    entropy_temperature: of the distribution whose entropy it is
    """

    teacher: dict[str, Any] = field(default_factory=dict)
    keep: bool = True
    tail: bool = False
    masking: str = "block"
    block_length: int = 32
    ratio: float = 0.5
    certainty: float = 2.0
    entropy_temperature: float = 0.5

    samplers: ClassVar[tuple[str, ...]] = ("evaluation", "teacher")
    counts: ClassVar[tuple[str, ...]] = (*DiffusionConfig.counts, "block_length")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("masking", self.masking, Literal["block", "random"])
        if not 0 < self.ratio < 1:
            raise UserError("option-range", f"ratio must be a share between 0 and 1, not {self.ratio}")
        if not self.certainty >= 0 or not 0 < self.entropy_temperature < math.inf:
            raise UserError(
                "option-range",
                "certainty must be at least 0 and entropy_temperature above 0, not"
                f" {self.certainty}, {self.entropy_temperature}",
            )


class DistillTrainer(DiffusionTrainer):
    """Trains a model on its own answers, so that it predicts with certainty what it predicts rightly anyway.

    It answers the prompts of `train_dataset` first, with the weights as they are, and keeps the answers in
    `answers.json`. A run that resumes learns from the same ones.
    """

    config: ClassVar[type[DiffusionConfig]] = DistillConfig
    most_held_out: ClassVar[int] = 200

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        path = Path(self.args.output_dir) / ANSWERS
        pairs = json.loads(path.read_text()) if path.exists() else self._answer()
        self.accelerator.wait_for_everyone()
        if self.args.should_save and not path.exists():
            files.write(path, json.dumps(pairs))
        if not pairs:
            count = len(self.examples)
            raise UserError("nothing-to-learn", f"none of the {count} answers is right. Give more prompts.")
        self.train_dataset = [Row(at, None, *pair) for at, pair in enumerate(pairs)]

    def rows(self, args: DistillConfig) -> tuple[list[Row], list[Row]]:
        """See `DiffusionTrainer.rows`."""
        spec = self.trained.spec
        masked.check(spec, self.trained.named)
        if spec.attention == "block_causal" and (args.masking, args.block_length) != ("block", spec.block_length):
            raise UserError(
                "model-not-trainable",
                f"train.model={self.trained.named} needs masking=block and block_length={spec.block_length}",
            )
        return super().rows(args)

    def _answer(self) -> list[tuple[list[int], list[int]]]:
        """Return prompts and the model's own answers in tokens; the processes share the prompts."""
        rank, ranks, found = self.args.process_index, self.args.world_size, []
        spec, tokenizer = self.trained.spec, self.trained.tokenizer
        mine = self.examples[rank::ranks]
        self._move_model_to_device(self.trained, self.args.device)
        seeds = range(rank, rank + len(mine) * ranks, ranks)
        answers = self.answered(self.sampler(**self.args.teacher), [one.prompt for one in mine], [*seeds])
        for number, (example, answer) in enumerate(zip(mine, answers, strict=True)):
            ids = answer.tokens[: answer.length]
            right = example.right(answer.text or "", ids.tolist(), self.metric) == 1
            if right if self.args.keep else answer.complete:
                assert answer.trace is not None
                tokens = answer.trace.decoded[0] if self.args.tail else ids
                prompt = encode_one(example.prompt, tokenizer, spec, len(tokens), 1)
                found.append((rank + number * ranks, (prompt, tokens.tolist())))
        return [pair for _, pair in sorted(gather_object(found))]

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean over the rows of the losses of both samples."""
        some, spec, args = inputs["rows"], self.trained.spec, self.args
        rows = collate([(row.prompt, row.answer) for row in some], spec.eos_id)
        size = args.block_length if args.masking == "block" else rows.ids.shape[1]
        dice = Dice([self.seed_of("noise", self.state.global_step, row.number) for row in some])
        halves = split(rows, size, args.ratio, dice, aligned=spec.attention == "block_causal")
        asked = torch.cat([halves.one, halves.other])
        rows = rows.some(torch.arange(len(some)).repeat(2))
        one = chunk(rows, asked | halves.future.repeat(2, 1), asked, spec).to(spec.device)
        found = certainty_loss(one.logits(model), one.tokens, one.there, args.entropy_temperature, one.mask_id)
        self.note({name: float(value.detach().mean()) for name, value in zip(FIGURES, found, strict=True)})
        return (found[0] + args.certainty * found[1]).sum() / len(some)
