"""Supervised fine-tuning: a masked-diffusion model learns right answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from dllm_sampler.core.checks import check_choice, check_count, check_number, check_share
from dllm_sampler.errors import UserError, counted
from dllm_sampler.sampler import Sampler
from dllm_sampler.training import masked
from dllm_sampler.training.data import Encoder, Row
from dllm_sampler.training.masked import Dice, MaskedLoss, Rows
from dllm_sampler.training.trainer import DiffusionConfig, DiffusionTrainer
from dllm_sampler.training.uniform import UniformLoss

Padding = Literal["longest", "block", "none"]


@dataclass
class MaskedDiffusionConfig(DiffusionConfig):
    """Settings of `MaskedDiffusionTrainer`.

    weight: `inverse`: a hidden token counts 1/p, p its probability of being hidden, as published for LLaDA and block
        diffusion; `none`: it counts 1
    complementary: each answer twice, the second time with the other tokens hidden (Fast-dLLM v2, arXiv 2509.26328)
    padding: end tokens after an answer, learned like it. `longest`: up to the longest row of the forward (LLaDA).
        `block`: up to the end of its block of `block_length` columns, counted from the row's first (in a causal
        context from the answer's). `none`: one. A number is the number of tokens of an answer. None chooses `longest`
        if the model is bidirectional, else `block`
    block_length: of `block`; None: the model's
    random_length: share of the answers that are cut at a random length (LLaDA's pre-training: 0.01)
    max_length: tokens of a prompt with its answer; None: the model's context
    longer: what is done with an example that is longer: `refuse` it, or `drop` it
    self_conditioning, encoder: of DiffusionGemma alone, see `UniformLoss`; `weight` does not apply there
    """

    weight: str = "inverse"
    complementary: bool = False
    padding: str | int | None = None
    block_length: int | None = None
    random_length: float = 0.0
    max_length: int | None = None
    longer: str = "refuse"
    self_conditioning: float = 0.5
    encoder: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("weight", self.weight, Literal["inverse", "none"])
        check_choice("longer", self.longer, Literal["refuse", "drop"])
        check_share("random_length", self.random_length)
        check_share("self_conditioning", self.self_conditioning)
        check_number("encoder", self.encoder, finite=True)
        for name in ("block_length", "max_length"):
            check_count(name, getattr(self, name), optional=True)
        if self.padding is not None and self.padding not in get_args(Padding):
            if not isinstance(self.padding, int):
                check_choice("padding", self.padding, Padding)
            check_count("padding", self.padding)


class MaskedDiffusionTrainer(DiffusionTrainer):
    """Hides tokens of right answers and makes the model predict them (LLaDA, arXiv 2502.09992; block diffusion,
    arXiv 2503.09573).

    The loss of an answer of R tokens is the sum over its hidden tokens of weight times cross-entropy, divided by R. A
    step's loss is the mean over its answers. What is hidden of an answer depends on the seed, the step and the answer
    alone. Examples are not packed: each is a row of its own.
    """

    config: ClassVar[type[DiffusionConfig]] = MaskedDiffusionConfig
    uniform: ClassVar[bool] = True

    def rows(self, args: Any) -> tuple[list[Row], list[Row]]:
        """See `DiffusionTrainer.rows`."""
        spec, named = self.trained.spec, self.trained.named
        masked.check(spec, named)
        self.loss: MaskedLoss | UniformLoss = MaskedLoss(spec, args.complementary, args.weight == "inverse")
        if spec.mask_id is None:
            if args.complementary:
                raise UserError("mask-token-missing", f"complementary needs a mask token: {named} has none")
            self.loss = UniformLoss(spec, args.self_conditioning, args.encoder)
        self.most = min(args.max_length or spec.max_positions, spec.max_positions)
        self._block = args.block_length or spec.block_length
        whole = spec.attention == "bidirectional" and not spec.encoder
        self._padding = args.padding or ("longest" if whole else "block")
        if self._padding == "block" and self._block is None:
            raise UserError("option-missing", "padding=block needs a length. Set block_length.")
        encode = Encoder(self.trained.tokenizer, spec, self.most)
        if args.longer == "drop":
            self._drop(encode)
        train = [Row(at, one, *encode(one)) for at, one in enumerate(self.examples)]
        held = [Row(at, one, *encode(one)) for at, one in enumerate(self.held)]
        for row in held:
            assert row.example is not None
            if len(row.answer) - 1 > args.new_tokens:
                raise UserError(
                    "example-too-long",
                    f"the answer of {row.example.where} has {len(row.answer) - 1} tokens. Raise"
                    f" new_tokens={args.new_tokens}.",
                )
            encode.prompt(row.example, args.new_tokens)
        return train, held

    def _drop(self, encode: Encoder) -> None:
        before = len(self.examples) + len(self.held)
        self.examples, self.held = (
            [one for one in some if sum(map(len, encode.pair(one))) <= self.most] for some in (self.examples, self.held)
        )
        if not self.examples:
            raise UserError("nothing-to-learn", "longer=drop leaves no examples. Raise max_length.")
        self.dropped = before - len(self.examples) - len(self.held)

    def say_examples(self) -> None:
        """See `DiffusionTrainer.say_examples`, and how many examples were dropped."""
        if dropped := getattr(self, "dropped", 0):
            self.say(f"dropped {counted(dropped, 'example')} of more than {counted(self.most, 'token')}")
        super().say_examples()

    def sampler(self, **settings: Any) -> Sampler:
        """See `DiffusionTrainer.sampler`."""
        rule = {"scheduler": "entropy_renoise"} if self.trained.spec.mask_id is None else {}
        return super().sampler(**rule | settings)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean over the rows of their losses. Held-out rows have the same tokens hidden every time."""
        some: list[Row] = inputs["rows"]
        step = self.state.global_step if model.training else "held"
        dice = Dice([self.seed_of("noise", step, row.number) for row in some])
        loss = self.loss_of(model, some, dice)
        return (loss, None) if return_outputs else loss

    def loss_of(self, model: nn.Module, some: list[Row], dice: Dice) -> Tensor:
        """Return the mean loss of some rows."""
        return self.loss(model, masked.cut(self.padded(some), self.args.random_length, dice), dice)

    def padded(self, some: list[Row]) -> Rows:
        """Return rows as one batch, with the end tokens that are learned."""
        spec, pairs = self.trained.spec, [(row.prompt, row.answer) for row in some]
        own = spec.attention == "causal_context" or spec.encoder
        eos = spec.eos_id
        return masked.collate(masked.padded(pairs, eos, self._padding, self._block or 1, self.most, own=own), eos)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any
    ) -> tuple[Tensor, None, None]:
        """Return the loss of held-out rows."""
        with torch.no_grad(), self.accelerator.autocast():
            return self.compute_loss(model, inputs).detach(), None, None

    def held_out_loss(self, *given: Any, **named: Any) -> EvalLoopOutput:
        """See `DiffusionTrainer.held_out_loss`."""
        return Trainer.evaluation_loop(self, *given, **named)
