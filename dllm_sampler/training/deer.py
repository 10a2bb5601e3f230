"""The two-stage alignment of a drafter with an autoregressive target (DEER, arXiv 2512.15176)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from rich.console import Console
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, logging

from dllm_sampler.errors import UserError, counted, unknown
from dllm_sampler.generation.speculative import SpeculativeSampler
from dllm_sampler.host import files
from dllm_sampler.host.paths import expanded
from dllm_sampler.models import saving
from dllm_sampler.models.loading import as_device
from dllm_sampler.models.mini_tokenizer import vocabulary
from dllm_sampler.result import Speculation
from dllm_sampler.sampler import Sampler
from dllm_sampler.training import checkpoint, sharding
from dllm_sampler.training.deer_losses import distill_mask, masked_loss, refine_mask
from dllm_sampler.training.deer_report import measured
from dllm_sampler.training.encoding import Encoder
from dllm_sampler.training.examples import Data, Source
from dllm_sampler.training.finetune import FREE, FineTuner
from dllm_sampler.training.masking import Pair, collate
from dllm_sampler.training.settings import check_llama, check_model, check_settings
from dllm_sampler.training.trained import Trained, called, check_masks

Model = str | dict[str, Any]
MOST_HELD_OUT = 60  # prompts, where `held_out` is None
# A resumed run may change these.
_FREE = ("output", "device", "checkpoint_every", "tracker", "gradient_checkpointing", "shard")


@dataclass
class DeerTrainer:
    """Trains a drafter for a target, and a small target first where there is none; then measures.

    Source: DEER, arXiv 2512.15176. Stage I: the target's answers, cut at a random token, a separator behind the cut;
    masked-diffusion loss over the answer, weight 1/t. Stage II: only the last R tokens are masked, R uniform on 1..96,
    and the i-th of them weighs alpha^(R-i), most next to the text that a draft goes on from. Learning rate, batch,
    range of t and the separator are not published. Behind the answer stand end tokens, as many as a draft may reach
    past it, and the cut may fall among them.

    output: folder; `target`, `distilled` (stage I) and `drafter` (stage II) in it are checkpoints
    device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`
    seed: of weights, prompts and masks
    model: the drafter to begin with: name, folder or hub id, or a dict with further settings of a model
    dtype: of its weights: `float32` or `float64`; `bfloat16` where adapters learn
    target: a causal LM with the drafter's tokenizer; None: train one, on right answers
    checkpoint_every: steps between two saved states
    data: your own examples (docs/training.md); where its path is null, mini's tasks
    tasks: share of each of mini's tasks among the prompts
    shape: fields of transformers' `LlamaConfig`, of the target that is trained
    target_steps, target_learning_rate: of its training
    answers: prompts that the target answers, greedily, for the drafter
    temperature: at which the result is measured besides greedy decoding
    new_tokens, draft_length: longest answer, and proposals in a round
    separator: token behind the cut; None: there is none
    batch: rows of a step
    distill_steps, refine_steps: of stages I and II
    learning_rate: peak of both, falling as a cosine
    least_t: stage I masks each token with probability t, uniform from here to 1
    longest, alpha: stage II's R is uniform on 1..longest, its weights alpha^(R-i)
    lora: `r`, `alpha`, `dropout` of the drafter's adapters (needs peft), merged at the end of each stage; None: all
        weights learn
    precision: `no` or `bf16`, of the drafter's forwards in training
    gradient_checkpointing: compute its layers a second time in the backward pass, for less memory
    shard: spread weights, gradients and moments over the processes (FSDP2); else each has all of them (DDP)
    held_out: prompts that the report is measured on. None chooses a tenth of `data`, at most 60; of mini's tasks 60
    tracker: where the log of each stage goes besides: null, `tensorboard` or `trackio`, whose package must be there
    """

    output: str
    device: str
    seed: int
    model: str | dict[str, Any]
    dtype: str
    target: str | None
    checkpoint_every: int
    data: dict[str, Any]
    tasks: dict[str, float]
    shape: dict[str, Any]
    target_steps: int
    target_learning_rate: float
    answers: int
    temperature: float
    new_tokens: int
    draft_length: int
    separator: str | None
    batch: int
    distill_steps: int
    refine_steps: int
    learning_rate: float
    least_t: float
    longest: int
    alpha: float
    lora: dict[str, float] | None
    precision: str
    gradient_checkpointing: bool
    shard: bool
    held_out: int | None
    tracker: str | None

    def __post_init__(self) -> None:
        counts = ("checkpoint_every", "target_steps", "answers", "new_tokens", "draft_length", "batch")
        for name in (*counts, "distill_steps", "refine_steps", "longest", "held_out"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError("option-range", f"train.{name} must be at least 1, not {value}")
        if not 0 < self.least_t <= 1:
            raise UserError("option-range", f"train.least_t must be above 0 and at most 1, not {self.least_t}")
        if not 0 < self.alpha < math.inf:
            raise UserError("option-range", f"train.alpha must be a number above 0, not {self.alpha}")
        check_settings(vars(self))
        check_model(vars(self))
        if self.target is None:
            check_llama(self.shape)
        self._data = Data.of(self.data)

    def run(self) -> Path:
        """Train what is not there yet, measure, and return the drafter's folder.

        Raises:
            UserError: a finished run, one of other settings, a model that does not fit, or a mistake in the examples.
            KeyboardInterrupt: after Ctrl-C, with the state saved.
        """
        logging.disable_progress_bar()  # ours is the one to look at
        self.folder = expanded("train.output", self.output)
        if (self.folder / "report.json").exists():
            raise UserError("run-finished", f"{self.folder} has a finished run. Choose another train.output.")
        self.accelerator, self._device = sharding.start(as_device(self.device))
        processes = self.accelerator.num_processes
        if self.batch < processes:
            raise UserError("option-range", f"train.batch={self.batch} is less than {processes} processes. Raise it.")
        self.accelerator.wait_for_everyone()  # one may be through before another has looked whether there is a report
        self.source: Source = self._data.source(
            self.tasks, self.seed, self.held_out, most=MOST_HELD_OUT, answers=self.target is None
        )
        check_masks(self.model)
        self.start = self._sampler(self.model)
        self._read(self.start)
        files.make_folder(self.folder)
        self._same()
        target = self.target or str(self._target())
        self.pairs = self._answers(target)
        distilled = self._train(Distilled, steps=self.distill_steps)
        drafter = self._train(Refined, model=self._at(distilled), steps=self.refine_steps)
        if not self.accelerator.is_main_process:
            return drafter
        drafters: dict[str, tuple[Model, str | None]] = {"before": (self.model, None)}
        drafters["distilled"] = self._at(distilled), self.separator
        drafters["refined"] = self._at(drafter), self.separator
        prompts = [self.encode.prompt(one, self.new_tokens) for one in self._held]
        known = all(one.answer is not None for one in self._held)
        limits = {"draft_length": self.draft_length, "new_tokens": self.new_tokens}
        report = measured(
            self._sampler, target, drafters, prompts, self._right if known else None, (0.0, self.temperature), **limits
        )
        checkpoint.write_json(self.folder / "report.json", {"decoding": report, "settings": asdict(self)}, indent=1)
        return drafter

    def _read(self, start: Sampler) -> None:
        """What the drafter, its tokenizer and the examples say: a mistake is told before the first step."""
        named, spec = called(self.model), start.denoiser.spec
        if spec.attention == "causal_context":
            raise UserError("model-not-trainable", f"train.model={named} has a causal context and cannot draft blocks")
        if start.tokenizer is None:
            raise UserError("tokenizer-missing", f"train.model={named} has no tokenizer. Add its files.")
        if self._data.path is None and start.tokenizer.get_vocab() != vocabulary():
            raise UserError(
                "tokenizer-differs", f"train.model={named} lacks mini's tokenizer. Set train.data=FILE.jsonl."
            )
        self.tokenizer, self.spec = start.tokenizer, spec
        self.behind = [] if self.separator is None else [self._token(self.separator)]
        if self.target is None:
            longest = int(self.shape.get("max_position_embeddings", spec.max_positions))
        else:
            longest = SpeculativeSampler(start, self.target, draft_length=0).spec.max_positions
        self._most = min(spec.max_positions, longest)
        self.encode = Encoder(
            self.tokenizer, replace(spec, max_positions=self._most), self._most, "leave it out of train.data"
        )
        self._held = self.source.draw(f"{self.seed}/held", self.held_out or MOST_HELD_OUT, held=True)
        if self.source.size is not None and self.accelerator.is_main_process:
            text = f"{counted(self.source.size, 'example')} to learn from; {len(self._held)} held out for the report"
            Console(stderr=True).print(text, highlight=False)
        for example in (*self._held, *self.source.all()):
            self.encode.prompt(example, self.new_tokens)
            if self.target is None:
                self.encode(example)

    def _token(self, separator: str) -> int:
        found = self.tokenizer.get_vocab().get(separator)
        if found is None or found in (self.spec.mask_id, *self.spec.eos_ids):
            usual = (token for token in self.tokenizer.all_special_tokens if token != separator)
            raise unknown("train.separator", separator, [*usual, "another token of the model's", "null"])
        return found

    def _target(self) -> Path:
        """A target, trained unless it is there."""
        own: dict[str, Any] = {"dtype": "float32", "lora": None, "precision": "no", "gradient_checkpointing": False}
        return self._train(Target, steps=self.target_steps, learning_rate=self.target_learning_rate, **own)

    def _train(self, kind: type[Stage], **changes: Any) -> Path:
        """The folder of a stage, which runs unless it is through: the weights of a model are written last."""
        folder = self.folder / kind.name
        if saving.finished(folder):
            return folder
        return kind(self, folder, **{"learning_rate": self.learning_rate, **changes}).run()

    # Data -------------------------------------------------------------------------------------------------------------

    def _answers(self, target: str) -> list[Pair]:
        """Prompts and the target's answers, end token included; the processes share the batches."""
        path = self.folder / "answers.json"
        if not path.exists():
            examples = self.source.draw(f"{self.seed}/answers", min(self.answers, self.source.size or self.answers))
            prompts = [self.encode.prompt(one, self.new_tokens) for one in examples]
            plain = SpeculativeSampler(self.start, target, draft_length=0)
            process, processes = self.accelerator.process_index, self.accelerator.num_processes
            found: list[tuple[int, list[Pair]]] = []
            for first in range(process * self.batch, len(prompts), processes * self.batch):
                some = prompts[first : first + self.batch]
                result = plain.generate(some, max_new_tokens=self.new_tokens)
                cut = zip(some, result.tokens.tolist(), result.lengths.tolist(), strict=True)
                found.append((first, [(prompt, tokens[:length]) for prompt, tokens, length in cut]))
            pairs = [pair for _, some in sorted(gather_object(found)) for pair in some]
            if self.accelerator.is_main_process:
                checkpoint.write_json(path, pairs)
            self.accelerator.wait_for_everyone()
        return checkpoint.read_json(path)

    def cut(self, prompt: list[int], answer: list[int], rng: Random) -> Pair:
        """A prompt, and its answer and the end tokens behind it up to a random token, the separator behind that."""
        room = self.spec.max_positions - len(prompt) - len(answer) - len(self.behind)
        tail = max(0, min(self.draft_length - 1, room)) if answer[-1] in self.spec.eos_ids else 0
        whole: Sequence[int] = [*answer, *[self.spec.eos_id] * tail]
        whole = whole[: self.spec.max_positions - len(prompt) - len(self.behind)]
        return prompt, [*whole[: rng.randint(1, len(whole))], *self.behind]

    def _right(self, number: int, result: Speculation) -> float:
        """How right the answer to a held-out prompt is."""
        assert result.texts is not None
        return self.source.right(self._held[number], result.texts[0], result.tokens[0, : result.lengths[0]].tolist())

    # ------------------------------------------------------------------------------------------------------------------

    def _at(self, folder: Path) -> Model:
        """The model in another folder, with the user's settings."""
        given = self.model if isinstance(self.model, dict) else {}
        return {**{key: value for key, value in given.items() if key != "name"}, "path": str(folder)}

    def _sampler(self, model: Model, temperature: float | None = None) -> Sampler:
        return Sampler.from_pretrained(model, device=self._device, dtype=self.dtype, temperature=temperature)

    def _same(self) -> None:
        """Refuse to go on with a run of other settings."""
        path = self.folder / "settings.json"
        mine = {key: value for key, value in asdict(self).items() if key not in _FREE}
        mine["content"] = self.source.content
        if path.exists():
            saved = checkpoint.read_json(path)
            checkpoint.check_same(self.folder, saved, {key: value for key, value in mine.items() if key != "content"})
            checkpoint.check_content(self.folder, saved, self.source.content, self._data.path)
        if self.accelerator.is_main_process:
            checkpoint.write_json(path, mine, indent=1)


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
        # Padding comes after the answer, and no token of the answer sees it.
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
        """Return the masked tokens of answers, and their weights."""
        return distill_mask(answer, generator, self._trainer.least_t)


class Refined(Distilled):
    """Stage II: the last tokens of what a draft is to say."""

    name: ClassVar[str] = "drafter"

    def corrupt(self, answer: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See `Distilled.corrupt`."""
        return refine_mask(answer, generator, self._trainer.longest, self._trainer.alpha)
