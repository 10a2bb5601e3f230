"""Supervised fine-tuning: a masked-diffusion model learns right answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from dllm_sampler.errors import UserError, counted
from dllm_sampler.sampler import Sampler
from dllm_sampler.training import masked
from dllm_sampler.training.data import Encoder, Example, Row
from dllm_sampler.training.masked import Dice, MaskedLoss
from dllm_sampler.training.trainer import Count, DiffusionConfig, DiffusionTrainer, Number, Share, say
from dllm_sampler.training.uniform import UniformLoss


@dataclass
class MaskedDiffusionConfig(DiffusionConfig):
    """Settings of `MaskedDiffusionTrainer`.

    weight: `inverse`: a hidden token counts 1/p, p its probability of being hidden, as published; `none`: it counts 1
    complementary: each answer twice, the second time with the other tokens hidden (Fast-dLLM v2, arXiv 2509.26328)
    padding: end-of-text tokens after an answer, see `padded`. None: `longest` for bidirectional models, else `block`
    max_length: tokens of a prompt with its answer. By default the model's context
    longer: what is done with an example that is longer: `refuse` it, or `drop` it
    self_conditioning, encoder: of DiffusionGemma alone, see `UniformLoss`; `weight` does not apply there
    """

    weight: Literal["inverse", "none"] = "inverse"
    complementary: bool = False
    padding: Literal["longest", "block", "none"] | Count | None = None
    max_length: Count | None = None
    longer: Literal["refuse", "drop"] = "refuse"
    self_conditioning: Share = 0.5
    encoder: Number = 1.0


class MaskedDiffusionTrainer(DiffusionTrainer):
    """Hides tokens of right answers and makes the model predict them (arXiv 2502.09992, arXiv 2503.09573)."""

    config: ClassVar[type[DiffusionConfig]] = MaskedDiffusionConfig
    uniform: ClassVar[bool] = True
    held_out_loss: ClassVar[bool] = True

    def prepare(self) -> None:
        """Choose the loss and the padding."""
        args, spec = self.args, self.trained.spec
        inverse = args.weight == "inverse"
        self.loss: MaskedLoss | UniformLoss = MaskedLoss(spec, args.complementary, inverse)
        self._held_loss: MaskedLoss | UniformLoss = MaskedLoss(spec, complementary=True, inverse=inverse)
        if spec.mask_id is None:
            if args.complementary:
                said = f"train.complementary=true needs a mask token, and {self.trained.named} has none."
                raise UserError("mask-token-missing", f"{said} Set it to false.")
            self.loss = self._held_loss = UniformLoss(spec, args.self_conditioning, args.encoder)
        self.most = min(args.max_length or spec.max_positions, spec.max_positions)
        whole = spec.attention == "bidirectional" and not spec.encoder
        self._padding = args.padding or ("longest" if whole else "block")
        if self._padding == "block" and spec.block_length is None:
            said = f"train.padding=block needs a model with blocks, unlike {self.trained.named}. Set longest or none."
            raise UserError("option-not-applicable", said)

    def rows(self, some: Sequence[Example], held: bool = False) -> list[Row]:
        """Check and encode prompts and answers. Too long ones may be dropped."""
        encode, found = Encoder(self.trained.tokenizer, self.trained.spec), list[Row]()
        limit, way = f"train.max_length={self.most}", "Raise it"
        if self.most == self.trained.spec.max_positions:
            limit, way = f"the model's context of {self.most}", "Shorten the examples"
        for example in some:
            prompt, answer = encode(example)
            size = len(prompt) + len(answer)
            if size > self.most and self.args.longer == "refuse":
                said = f"{example.where} has {size} tokens of prompt and answer, too many for {limit}."
                raise UserError("example-too-long", f"{said} {way}, or set train.longer=drop.")
            if size <= self.most:
                found.append(Row(len(found), example, prompt, answer))
        if len(found) < len(some):
            say(f"dropped {counted(len(some) - len(found), 'example')} of more than {counted(self.most, 'token')}")
        if not found and not held:
            said = f"train.longer=drop leaves no examples: all are too long for {limit}."
            raise UserError("nothing-to-learn", f"{said} {way}.")
        for row in found if held else ():
            if (size := len(row.answer) - 1) > self.args.new_tokens:
                said = f"train.new_tokens={self.args.new_tokens} is less than the {size} tokens of the answer of"
                raise UserError("example-too-long", f"{said} {row.example.where}. Raise it.")
            encode.prompt(row.example, self.args.new_tokens)
        return found

    def sampler(self, **settings: Any) -> Sampler:
        """Return a sampler that shares the model's weights. Without a mask token it renoises."""
        rule = {"scheduler": "entropy_renoise"} if self.trained.spec.mask_id is None else {}
        return super().sampler(**rule | settings)

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, *_: Any, **__: Any) -> Any:
        """Return the mean loss of the rows. A held-out row always has the same noise."""
        some: list[Row] = inputs["rows"]
        step = self.state.global_step if model.training else "held"
        loss = self.loss_of(model, some, Dice([self.seed_of("noise", step, row.number) for row in some]))
        return (loss, {}) if return_outputs else loss

    def loss_of(self, model: nn.Module, some: list[Row], dice: Dice) -> Tensor:
        """Return the mean loss of some rows."""
        pairs = [(row.prompt, row.answer) for row in some]
        loss = self.loss if model.training else self._held_loss
        return loss(model, masked.padded(pairs, self.trained.spec, self._padding, self.most), dice)
