"""The two-stage alignment of a drafter with an autoregressive target (DEER, arXiv 2512.15176)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.visibility import block_causal
from dllm_sampler.errors import UserError, unknown
from dllm_sampler.generation.speculative import SpeculativeSampler
from dllm_sampler.models import saving
from dllm_sampler.training.cli import Command, last_checkpoint
from dllm_sampler.training.data import Encoder, Row
from dllm_sampler.training.masked import Dice, Masks, Rows, chunk, collate, draw, weighted
from dllm_sampler.training.sft import MaskedDiffusionConfig, MaskedDiffusionTrainer
from dllm_sampler.training.trainer import ANSWERS, Count, DiffusionConfig, Positive, collected


def refine_masks(rows: Rows, dice: Dice, longest: int, alpha: float) -> Masks:
    """Return the masks of stage II: an answer's last R tokens, R uniform on 1..longest, the i-th weighs alpha^(R-i)."""
    drawn = 1 + (dice.one() * longest).long()[:, None]
    after = rows.answer.flip(1).cumsum(1).flip(1) - 1  # R - i of the last R tokens
    hidden = rows.answer & (after < drawn)
    return Masks(hidden, torch.where(hidden, rows.share * alpha ** after.clamp(min=0).double(), 0))


def stage_loss(network: nn.Module, rows: Rows, masks: Masks, spec: ModelSpec) -> Tensor:
    """Return the weighted nats of the masked tokens."""
    one = chunk(rows, masks.hidden, masks.hidden, replace(spec, attention="bidirectional", seeds=False))
    if spec.attention == "block_causal":  # sees the masks of earlier blocks too: a draft masks several at once
        assert spec.block_length is not None
        seen = block_causal(one.positions, one.positions, spec.block_length)
        one = replace(one, keys=one.keys[:, None] & seen)
    return weighted(network, one, masks.weight, spec)


@dataclass
class DeerConfig(MaskedDiffusionConfig):
    """Settings of `DeerTrainer`, and of `train=deer`, which takes a target's answers and trains both stages.

    stage: `distill` (stage I) or `refine` (stage II)
    separator: token after each answer, which is cut at a random token. With None no token is added
    draft_length: proposals in a round: as many end-of-text tokens, less one, are learned after an answer
    least_t: stage I masks each token with probability t, uniform from here to 1
    longest, alpha: stage II masks the last R tokens, R uniform on 1..longest, and weighs the i-th of them alpha^(R-i)
    target: a causal LM with the drafter's tokenizer
    answers: prompts that the target answers, greedily, for the drafter
    distill_steps, refine_steps: optimizer steps of stage I and of stage II
    """

    stage: Literal["distill", "refine"] = "distill"
    separator: str | None = None
    draft_length: Count = 32
    least_t: Annotated[float, Field(gt=0, le=1)] = 0.05
    longest: Count = 96
    alpha: Positive = 1.01
    target: str | None = None
    answers: Count = 1000
    distill_steps: Count = 600
    refine_steps: Count = 300


class DeerTrainer(MaskedDiffusionTrainer):
    """A stage of the alignment of a drafter, on a target's answers to prompts.

    An answer with the end-of-text tokens that a draft may reach is cut at a random token. Stage I has the loss of
    masked diffusion, stage II the masks of `refine_masks`. Learning rate, batch, t and separator are not published.
    """

    config: ClassVar[type[DiffusionConfig]] = DeerConfig
    uniform: ClassVar[bool] = False

    def prepare(self) -> None:
        """Check the model and the separator."""
        spec, named = self.trained.spec, self.trained.named
        if spec.attention == "causal_context":
            raise UserError("model-not-trainable", f"train.model={named} has a causal context. Name one without it.")
        self._after = separator_ids(spec, self.trained.tokenizer, self.args.separator)
        super().prepare()

    def loss_of(self, model: nn.Module, some: list[Row], dice: Dice) -> Tensor:
        """Return the mean loss of some rows."""
        args, spec = self.args, self.trained.spec
        cuts = [self._cut(row, float(at)) for row, at in zip(some, dice.one(), strict=True)]
        rows = collate([(row.prompt, cut) for row, cut in zip(some, cuts, strict=True)], spec.eos_id)
        learned = replace(rows, length=rows.length - len(self._after))
        if args.stage == "distill":
            (masks,) = draw(learned, None, dice, complementary=False, inverse=True, floor=args.least_t)
        else:
            masks = refine_masks(learned, dice, args.longest, args.alpha)
        return stage_loss(model, rows, masks, spec)

    def _cut(self, row: Row, place: float) -> list[int]:
        spec = self.trained.spec
        room = spec.max_positions - len(row.prompt) - len(self._after)
        tail = self.args.draft_length - 1 if row.answer[-1] in spec.eos_ids else 0
        whole = [*row.answer, *[spec.eos_id] * tail][:room]
        return [*whole[: 1 + int(place * len(whole))], *self._after]

    @classmethod
    def command(cls, line: Command) -> Path:
        """Train the stages that are not finished, and return the drafter's folder."""
        args = line.arguments(cls.config)
        folder = Path(args.output_dir)
        if args.target is None:
            raise UserError("option-missing", "train.target is missing. Name a causal LM with the drafter's tokenizer.")
        examples, _ = line.examples(args, False, 0, args.answers)
        file = folder / ANSWERS
        line.begin(folder, saving.has_weights(folder / "drafter"), file.exists())
        start = line.sampler(args, args.dtype)
        tokenizer, spec = start.tokenizer, start.denoiser.spec
        separator_ids(spec, tokenizer, args.separator)
        plain = SpeculativeSampler(start, args.target, draft_length=0)
        encode = Encoder(tokenizer, replace(spec, max_positions=min(spec.max_positions, plain.spec.max_positions)))
        prompts = [encode.prompt(one, args.new_tokens) for one in examples]
        line.record(folder)

        def answer(some: list[list[int]], _: range) -> list[dict[str, list[int]]]:
            found, size = list[dict[str, list[int]]](), args.answer_batch_size
            for batch in (some[first : first + size] for first in range(0, len(some), size)):
                result = plain.generate(batch, max_new_tokens=args.new_tokens)
                cut = zip(batch, result.tokens.tolist(), result.lengths.tolist(), strict=True)
                found += [{"prompt": prompt, "completion": ids[:length]} for prompt, ids, length in cut]
            return found

        pairs = collected(file, prompts[: args.answers], answer)
        model = line.model
        more = {key: value for key, value in model.items() if key != "name"} if isinstance(model, Mapping) else {}
        stages = ("distill", "distilled", args.distill_steps), ("refine", "drafter", args.refine_steps)
        for stage, name, steps in stages:
            place = folder / name
            if not saving.has_weights(place):
                own = line.arguments(cls.config, output_dir=str(place), stage=stage, max_steps=steps)
                trainer = cls(model, own, pairs, peft_config=line.peft_config)
                trainer.train(resume_from_checkpoint=last_checkpoint(str(place)) if line.resume else None)
                trainer.save_model()
            model = {**more, "path": str(place)}
        return folder / "drafter"


def separator_ids(spec: ModelSpec, tokenizer: Any, separator: str | None) -> list[int]:
    """Return the ids of a separator: one id, or none for None."""
    if separator is None:
        return []
    ids, reserved = tokenizer.get_vocab(), (None, spec.mask_id, *spec.eos_ids)
    if ids.get(separator) in reserved:
        usual = (token for token in tokenizer.all_special_tokens if ids.get(token) not in reserved)
        raise unknown("train.separator", separator, [*usual, "another token of the model", "null"])
    return [ids[separator]]
