"""Certainty-forcing distillation: a model learns to be sure of many tokens at once (dParallel, arXiv 2509.26488)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from dllm_sampler.errors import UserError, unknown
from dllm_sampler.inputs.prompts import encode_one
from dllm_sampler.training import masking
from dllm_sampler.training.checkpoint import read_json, write_json
from dllm_sampler.training.finetune import FineTuner, Part
from dllm_sampler.training.masking import FLOOR, Rows, chunk, collate
from dllm_sampler.training.progress import bar

Masking = Literal["block", "random"]
FIGURES = ("cross_entropy", "entropy", "right_masks")  # of `certainty_loss`


@dataclass
class DistillTrainer(FineTuner):
    """Trains a model on its own answers, so that what it predicts rightly anyway it predicts with certainty.

    Of each answer one block is active: what stands before it is kept, what comes behind is masked. A random half of the
    block is masked in one sample and the other half in a second one. The loss of a sample is the cross-entropy, mean
    over the masked tokens of the block, plus `certainty` times the entropy, mean over those of them that are predicted
    rightly. The published code writes the mask of one row over all rows of its batch and so needs batches of one; here
    rows are independent. Where the answer ends with a block the published draw of the block may come out empty; here it
    does not.

    answers: prompts that the model answers, once, before training; of a user's data at most as many as there are
    teacher: settings of the sampler that does; published: one token per step in blocks of 32
    keep: only right answers are learnt from, else all that are complete
    tail: learn the end tokens behind the answer, too, up to `new_tokens` (mini's canvases end in them; published: one)
    batch: answers of a step
    masking: `block`; `random`: the whole answer is active (Dream, which would unlearn its order)
    block_length: of the active block
    ratio: share of the active block that the first sample masks
    certainty: weight of the entropy; published: 2 for LLaDA, 1 for Dream
    entropy_temperature: of the distribution whose entropy it is
    """

    answers: int
    teacher: dict[str, Any]
    keep: bool
    tail: bool
    batch: int
    masking: str
    block_length: int
    ratio: float
    certainty: float
    entropy_temperature: float

    name: ClassVar[str] = "distill"
    most_held_out: ClassVar[int] = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("answers", "batch", "block_length"):
            if getattr(self, name) < 1:
                raise UserError("option-range", f"train.{name} must be at least 1, not {getattr(self, name)}")
        if self.masking not in get_args(Masking):
            raise unknown("train.masking", self.masking, get_args(Masking))
        if not 0 < self.ratio < 1:
            raise UserError("option-range", f"train.ratio must be a share between 0 and 1, not {self.ratio}")
        if not self.certainty >= 0 or not 0 < self.entropy_temperature < math.inf:
            raise UserError(
                "option-range",
                "train.certainty must be at least 0 and train.entropy_temperature above 0, not"
                f" {self.certainty}, {self.entropy_temperature}",
            )

    @property
    def needs_answers(self) -> bool:
        """See `FineTuner.needs_answers`: only what judges needs them."""
        return self.keep

    def prepare(self) -> None:
        """Checks, and the model's own answers, from `answers.json` where an interrupted run has written them."""
        spec = self.trained.denoiser.spec
        masking.check(spec, self.trained.named)
        if spec.attention == "block_causal" and (self.masking, self.block_length) != ("block", spec.block_length):
            raise UserError(
                "model-not-trainable",
                f"train.model={self.trained.named} needs train.masking=block and"
                f" train.block_length={spec.block_length}",
            )
        self.check_prompts()
        self.say_examples()
        path = self.folder / f"answers{self.accelerator.process_index or ''}.json"
        if not path.exists():
            write_json(path, self._answer())
        self.pairs: list[tuple[list[int], list[int]]] = read_json(path)
        if not self.pairs:
            raise UserError("nothing-to-learn", f"none of the {self.answers} answers is right. Ask for more.")

    def step(self, number: int) -> dict[str, float]:
        """One batch, both samples of it."""
        rng = Random(f"{self.seed}/step {number}/{self.accelerator.process_index}")
        rows = collate([rng.choice(self.pairs) for _ in range(self.batch)], self.trained.denoiser.spec.eos_id)
        size = self.block_length if self.masking == "block" else rows.ids.shape[1]
        generator = torch.Generator().manual_seed(rng.getrandbits(62))
        pair = split(rows, size, self.ratio, generator, aligned=self.trained.denoiser.spec.attention == "block_causal")
        figures = self.update(self._parts(rows, pair), f"step {number}")
        return figures | {name: figures[name] / 2 for name in FIGURES}

    def _parts(self, rows: Rows, pair: Pair) -> Iterator[Part]:
        size = max(1, self.batch_tokens // rows.ids.shape[1])
        spec = self.trained.denoiser.spec

        def part(some: Tensor, masked: Tensor) -> tuple[Tensor, dict[str, float]]:
            hidden = masked | pair.future
            width = int(rows.length[some].max())
            one = chunk(rows.some(some), hidden[some, :width], masked[some, :width], spec).to(spec.device)
            logits = one.logits(self.trained.wrapped)
            found = certainty_loss(logits, one.tokens, one.there, self.entropy_temperature, one.mask_id)
            share = 1 / len(rows.ids)
            figures = {name: float(value.detach().sum()) * share for name, value in zip(FIGURES, found, strict=True)}
            return (found[0] + self.certainty * found[1]).sum() * share, figures

        for some in torch.arange(len(rows.ids)).split(size):
            for masked in (pair.one, pair.other):
                yield partial(part, some, masked)

    def _answer(self) -> list[tuple[list[int], list[int]]]:
        sampler, found = self.sampler(**self.teacher), []
        examples = self.examples("answers", min(self.answers, self.source.size or self.answers))
        with bar("answering", len(examples)) as progress:
            advance = partial(progress.advance, progress.task_ids[0])
            answers = self.answered(sampler, [example.prompt for example in examples], done=advance)
        for example, answer in zip(examples, answers, strict=True):
            if self.right(example, answer) == 1 if self.keep else answer.complete:
                assert answer.trace is not None
                tokens = answer.trace.decoded[0] if self.tail else answer.tokens[: answer.length]
                spec, tokenizer = self.trained.denoiser.spec, self.trained.tokenizer
                found.append((encode_one(example.prompt, tokenizer, spec, len(tokens), 1), tokens.tolist()))
        return found


@dataclass(frozen=True)
class Pair:
    """What two complementary samples mask, `[B, L] bool`."""

    one: Tensor
    other: Tensor  # the rest of the active block
    future: Tensor  # behind it: masked in both, in no loss


def split(rows: Rows, size: int, ratio: float, generator: torch.Generator, *, aligned: bool = False) -> Pair:
    """Each row's active block, one of its blocks of `size` with equal chances, in two complementary parts.

    ratio: share of the first part, drawn for each token by itself
    aligned: blocks are counted from the row's first token, as block-causal models do; else from the answer's
    """
    origin = rows.prompt - rows.prompt % size if aligned else rows.prompt
    blocks = (rows.length - origin + size - 1).div(size, rounding_mode="floor").clamp(min=1)
    drawn = (torch.rand(len(blocks), generator=generator, dtype=torch.double) * blocks).long()  # [B]
    first = (origin + drawn * size)[:, None]
    column = torch.arange(rows.ids.shape[1])
    active = (column >= first) & (column < first + size) & rows.answer
    chance = (1 - FLOOR) * ratio + FLOOR
    one = active & (torch.rand(rows.ids.shape, generator=generator) < chance)
    return Pair(one, active & ~one, rows.there & (column >= first + size))


def certainty_loss(
    logits: Tensor, ids: Tensor, masked: Tensor, temperature: float, mask_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, entropy of what is right, share that is right, `[B]` each; 0 where nothing is masked, or right.

    logits: `[B, L, V]`, row i predicts token i; the mask token is no answer
    ids: `[B, L]` the tokens; `masked [B, L] bool` those that count
    temperature: of the distribution whose entropy it is
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    mask = torch.arange(logits.shape[-1], device=logits.device) == mask_id
    logits = logits.masked_fill(mask, -torch.inf)
    losses = -logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]  # [B, L]
    right = masked & (logits.argmax(-1) == ids)
    sure = (logits / temperature).log_softmax(-1)
    entropy = -(sure.exp() * sure.masked_fill(mask, 0)).sum(-1)  # [B, L]

    def mean(values: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, values, 0).sum(1) / where.sum(1).clamp(min=1)

    return mean(losses, masked), mean(entropy, right), mean(right.to(losses), masked)
