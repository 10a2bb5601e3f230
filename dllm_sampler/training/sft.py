"""Supervised fine-tuning: a masked-diffusion model learns the answers of a user's data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from dllm_sampler.core.checks import check_choice, check_count, check_number, check_share
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.errors import UserError, counted
from dllm_sampler.sampler import Sampler
from dllm_sampler.training import masking
from dllm_sampler.training.encoding import Encoder
from dllm_sampler.training.examples import Example
from dllm_sampler.training.finetune import FineTuner, Part
from dllm_sampler.training.masking import MaskedLoss, Masks, Pair, Rows
from dllm_sampler.training.uniform import Noise, UniformLoss

Padding = Literal["longest", "block", "none"]
Weight = Literal["inverse", "none"]
Longer = Literal["refuse", "drop"]
Drawn = Sequence[Masks] | Sequence[Noise]


@dataclass
class SftTrainer(FineTuner):
    """Hides tokens of right answers and makes the model predict them (LLaDA, arXiv 2502.09992; block diffusion,
    arXiv 2503.09573).

    The loss of an answer of R tokens is the sum over its hidden tokens of weight times cross-entropy, divided by R.
    That of a step is the mean over its answers, however these are spread over processes and cut into forwards. What is
    hidden depends on seed and step alone. There is no packing: an example is a row of its own.

    batch: examples of a step, over all processes
    weight: `inverse`: a hidden token counts 1/p, p its probability of being hidden, as published for LLaDA and block
        diffusion; `none`: it counts 1
    complementary: each answer twice, the second time with the other tokens hidden (Fast-dLLM v2, arXiv 2509.26328)
    padding: end tokens behind an answer, learnt like it: `longest`: up to the longest row of the step (LLaDA);
        `block`: up to the end of its block of `block_length` columns, counted from the row's first (in a causal
        context from the answer's); `none`: one; or the number of tokens of an answer. None: `longest` where the model
        is bidirectional, else `block`
    block_length: of `block`; None: the model's
    random_length: share of the answers that are cut at a random length (LLaDA's pre-training: 0.01)
    max_length: tokens of a prompt with its answer; None: the model's context
    longer: what is done with an example that is longer: `refuse` it, or `drop` it
    self_conditioning, encoder: of DiffusionGemma alone, see `UniformLoss`; `weight` does not apply there
    """

    batch: int
    weight: str
    complementary: bool
    padding: str | int | None
    block_length: int | None
    random_length: float
    max_length: int | None
    longer: str
    self_conditioning: float
    encoder: float

    uniform: ClassVar[bool] = True
    name: ClassVar[str] = "sft"
    most_held_out: ClassVar[int] = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("train.batch", self.batch)
        check_choice("train.weight", self.weight, Weight)
        check_choice("train.longer", self.longer, Longer)
        check_share("train.random_length", self.random_length)
        check_share("train.self_conditioning", self.self_conditioning)
        check_number("train.encoder", self.encoder, finite=True)
        for name in ("block_length", "max_length"):
            check_count(f"train.{name}", getattr(self, name), optional=True)
        if self.padding is not None and self.padding not in get_args(Padding):
            if not isinstance(self.padding, int):
                check_choice("train.padding", self.padding, Padding)
            check_count("train.padding", self.padding)

    @property
    def spec(self) -> ModelSpec:
        """Of the model."""
        return self.trained.denoiser.spec

    def sampler(self, **settings: Any) -> Sampler:
        """See `FineTuner.sampler`."""
        rule = {"scheduler": "entropy_renoise"} if self.spec.mask_id is None else {}
        return super().sampler(**rule | settings)

    def prepare(self) -> None:
        """Check and encode all examples: a mistake in one is told before the first step."""
        spec, processes, named = self.spec, self.accelerator.num_processes, self.trained.named
        masking.check(spec, named)
        if self.batch < processes:
            raise UserError("option-range", f"train.batch={self.batch} is less than {processes} processes. Raise it.")
        self._loss: MaskedLoss | UniformLoss = MaskedLoss(spec, self.complementary, self.weight == "inverse")
        if spec.mask_id is None:
            if self.complementary:
                raise UserError("mask-token-missing", f"train.complementary needs a mask token: {named} has none")
            self._loss = UniformLoss(spec, self.self_conditioning, self.encoder)
        self._block = self.block_length or spec.block_length
        whole = spec.attention == "bidirectional" and not spec.encoder
        self._padding = self.padding or ("longest" if whole else "block")
        if self._padding == "block" and self._block is None:
            raise UserError("option-missing", "train.padding=block needs train.block_length")
        most = min(self.max_length or spec.max_positions, spec.max_positions)
        self._encode = Encoder(self.trained.tokenizer, spec, most)
        if self.longer == "drop":
            dropped = self.source.keep(lambda example: self._encode.fits(example))
            if dropped:
                self.say(f"dropped {counted(dropped, 'example')} of more than {counted(most, 'token')}")
        for example in self.source.all():
            self._encode(example)
        self._held = self.source.draw(f"{self.seed}/held/0", self.held_out or self.most_held_out, held=True)
        for example in self._held:
            self._encode.check_canvas(example, self.new_tokens)
        self.say_examples(self.batch)

    def step(self, number: int) -> dict[str, float]:
        """One batch."""
        examples = self.source.draw(f"{self.seed}/step {number}", self.batch, number=number)
        rows, draws = self._noisy(examples, f"{self.seed}/noise {number}")
        figures = self.update(self._parts(rows, draws), f"step {number}")
        figures["loss"] = self.summed(figures["loss"])[0] / self.accelerator.num_processes
        hidden = sum(int(one.hidden.sum()) for one in draws)
        return {**figures, "answer_tokens": int(rows.answer.sum()), "hidden": hidden}

    def measure(self) -> dict[str, float]:
        """See `FineTuner.measure`, and the loss on held-out examples, with the same tokens hidden every time."""
        rows, draws = self._noisy(self._held, f"{self.seed}/held noise")
        with torch.no_grad(), self.autocast():
            losses = [(float(part()[0]), counts) for part, counts in self.trained.together(self._parts(rows, draws))]
        loss = sum(loss for loss, counts in losses if counts)
        return {"held_out_loss": self.summed(loss)[0] / self.accelerator.num_processes, **super().measure()}

    def _noisy(self, examples: Sequence[Example], seed: str) -> tuple[Rows, Drawn]:
        """The rows of a batch, and what is hidden of them or replaced."""
        generator = torch.Generator().manual_seed(Random(seed).getrandbits(62))
        pairs: list[Pair] = [self._encode(example) for example in examples]
        most, eos = self._encode.most, self.spec.eos_id
        own = self.spec.attention == "causal_context" or self.spec.encoder
        rows = masking.collate(masking.padded(pairs, eos, self._padding, self._block or 1, most, own=own), eos)
        rows = masking.cut(rows, self.random_length, generator)
        return rows, self._loss.draw(rows, generator)

    def _parts(self, rows: Rows, draws: Drawn) -> Iterator[Part]:
        """This process's share of the loss times the number of processes, in parts of one forward each."""
        processes = self.accelerator.num_processes

        def part(some: Tensor, noise: Any) -> tuple[Tensor, dict[str, float]]:
            few = rows.some(some)
            return self._loss.of(self.trained.wrapped, few, noise.some(some, few.ids.shape[1])) * processes, {}

        mine = torch.arange(len(rows.ids))[self.accelerator.process_index :: processes]
        mine = mine[rows.length[mine].argsort(stable=True)]
        for some in cuts(rows.length[mine] * self._loss.copies, self.batch_tokens):
            for noise in draws:
                yield partial(part, mine[some], noise)


def cuts(lengths: Tensor, budget: int) -> Iterator[slice]:
    """Rows of these ascending lengths in groups of at most `budget` columns, padding included; one row at least."""
    first = 0
    for last, length in enumerate(lengths.tolist()):
        if last > first and (last + 1 - first) * length > budget:
            yield slice(first, last)
            first = last
    yield slice(first, len(lengths))
