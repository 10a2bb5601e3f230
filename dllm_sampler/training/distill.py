"""Certainty-forcing distillation: a model learns to be sure of many tokens at once (dParallel, arXiv 2509.26488).

The published code writes the mask of one row over all rows of its batch, so it needs batches of one; here rows are
independent. Its draw of a block may be empty if the answer ends with a block; here it is not.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from dllm_sampler.errors import UserError, invalid
from dllm_sampler.training.data import Row
from dllm_sampler.training.masked import FLOOR, Dice, Rows, chunk, collate
from dllm_sampler.training.trainer import ANSWERS, Count, DiffusionConfig, DiffusionTrainer, Number, Positive, collected


def split(rows: Rows, size: int, ratio: float, dice: Dice, *, aligned: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one of each row's blocks of `size`; return its two parts, and the columns after it, `[B, L] bool` each.

    A token is in the first part with probability `ratio`. Blocks begin with the answer, or with the row if `aligned`.
    """
    origin = rows.prompt - rows.prompt % size if aligned else rows.prompt
    blocks = (rows.length - origin + size - 1).div(size, rounding_mode="floor").clamp(min=1)
    drawn = (dice.one() * blocks).long()  # [B]
    first = (origin + drawn * size)[:, None]
    column = torch.arange(rows.ids.shape[1])
    active = (column >= first) & (column < first + size) & rows.answer
    one = active & (dice.uniform(rows.length, rows.ids.shape[1]) < (1 - FLOOR) * ratio + FLOOR)
    return one, active & ~one, rows.there & (column >= first + size)


def certainty_loss(
    logits: Tensor, ids: Tensor, masked: Tensor, temperature: float, mask_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean cross-entropy, mean entropy of correct predictions, and their share, `[B]` each; 0 if there are none.

    `logits [B, L, V]` in row i predict token i, never the mask token. Only `masked [B, L] bool` tokens count.
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


@dataclass
class DistillConfig(DiffusionConfig):
    """Settings of `DistillTrainer`.

    teacher: settings of the sampler that answers the prompts; published: one token per step in blocks of 32
    keep: only right answers are learned from, else all that are complete
    tail: learn the end-of-text tokens after the answer, up to `new_tokens`, as mini writes them; published: one
    block_length: of the active block. None: the whole answer is active (Dream, which would unlearn its order)
    ratio: share of the active block that the first sample masks
    certainty: weight of the entropy; published: 2 for LLaDA, 1 for Dream
    entropy_temperature: divides the logits for the entropy
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
    """Trains a model on its own answers, which are sampled before training and stored in `answers.json`.

    One block of an answer is active: what is before it is clean, and what is after it is masked. A random part of the
    block is masked in one sample, and the rest in a second one. The entropy of correct predictions adds to the loss.
    """

    config: ClassVar[type[DiffusionConfig]] = DistillConfig
    most_held_out: ClassVar[int] = 200

    def prepare(self) -> None:
        """Check the length of the active block."""
        size = self.trained.spec.block_length
        if self.trained.spec.attention == "block_causal" and self.args.block_length != size:
            raise invalid("train.block_length", self.args.block_length, f"Set {size}, the length of the model's blocks")

    def train(self, *given: Any, **named: Any) -> Any:
        """Answer the prompts, unless an earlier run did, and train on the answers that are kept."""
        pairs = collected(Path(self.args.output_dir) / ANSWERS, self.train_rows, self._answer)
        if not pairs:
            said = "right" if self.args.keep else "complete"
            raise UserError("nothing-to-learn", f"No answer is {said}. Add prompts or raise train.new_tokens.")
        self.train_dataset = [Row(at, None, *pair) for at, pair in enumerate(pairs)]
        return super().train(*given, **named)

    def _answer(self, rows: list[Row], seeds: range) -> list[Any]:
        self._move_model_to_device(self.trained, self.args.device)
        answers = self.answered(self.sampler(**self.args.teacher), [row.example.prompt for row in rows], [*seeds])
        found = []
        for row, answer in zip(rows, answers, strict=True):
            kept = row.example.right(answer, self.metric) == 1 if self.args.keep else answer.complete
            assert answer.trace is not None
            tokens = answer.trace.decoded[0] if self.args.tail else answer.tokens[: answer.length]
            found.append((row.prompt, tokens.tolist()) if kept else None)
        return found

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        """Return the mean over the rows of the losses of both samples."""
        some, spec, args = inputs["rows"], self.trained.spec, self.args
        rows = collate([(row.prompt, row.answer) for row in some], spec.eos_id)
        size = args.block_length or rows.ids.shape[1]
        dice = Dice([self.seed_of("noise", self.state.global_step, row.number) for row in some])
        first, second, future = split(rows, size, args.ratio, dice, aligned=spec.attention == "block_causal")
        asked = torch.cat([first, second])
        rows = rows.some(torch.arange(len(some)).repeat(2))
        one = chunk(rows, asked | future.repeat(2, 1), asked, spec).to(spec.device)
        found = certainty_loss(one.logits(model), one.tokens, one.there, args.entropy_temperature, one.mask_id)
        cross, entropy, right = (value.detach().mean() for value in found)
        self.note({"cross_entropy": cross, "entropy": entropy, "right_masks": right})
        return (found[0] + args.certainty * found[1]).sum() / len(some)
