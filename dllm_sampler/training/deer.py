"""The two-stage alignment of a drafter with an autoregressive target (DEER, arXiv 2512.15176)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, cast

import torch
import torch.nn.functional as F
from rich.progress import TaskID
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, logging

from dllm_sampler.core import files
from dllm_sampler.errors import UserError, unknown
from dllm_sampler.models import saving
from dllm_sampler.models.loading import as_device
from dllm_sampler.paths import expanded
from dllm_sampler.result import Speculation
from dllm_sampler.sampler import Sampler
from dllm_sampler.speculative.deer import SpeculativeSampler
from dllm_sampler.training import checkpoint, journal, sharding
from dllm_sampler.training.deer_losses import distill_mask, masked_loss, refine_mask
from dllm_sampler.training.deer_report import measured
from dllm_sampler.training.encoding import Encoder
from dllm_sampler.training.examples import Data, Source
from dllm_sampler.training.masking import Pair, collate
from dllm_sampler.training.progress import bar, interrupts
from dllm_sampler.training.settings import check_model, check_settings
from dllm_sampler.training.tokenizer import vocabulary
from dllm_sampler.training.trained import Trained, called

Loss = Callable[[int], Tensor]  # step -> loss
Model = str | dict[str, Any]
_FREE = ("output", "device", "checkpoint_every", "tracker", "gradient_checkpointing")  # a resumed run may change these


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
    data: settings of `examples.Data`; where its path is null, mini's tasks
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
    held_out: prompts that the report is measured on
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
    held_out: int
    tracker: str | None

    def __post_init__(self) -> None:
        counts = ("checkpoint_every", "target_steps", "answers", "new_tokens", "draft_length", "batch")
        for name in (*counts, "distill_steps", "refine_steps", "longest", "held_out"):
            if getattr(self, name) < 1:
                raise UserError(f"train.{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.least_t <= 1:
            raise UserError(f"train.least_t must be above 0 and at most 1, not {self.least_t}")
        if not 0 < self.alpha < math.inf:
            raise UserError(f"train.alpha must be a number above 0, not {self.alpha}")
        check_settings(vars(self))
        check_model(vars(self))
        self._data = Data.of(self.data)

    def run(self) -> Path:
        """Train what is not there yet, measure, and return the drafter's folder.

        Raises:
            UserError: a finished run, one of other settings, a model that does not fit, or a mistake in the examples.
            KeyboardInterrupt: after Ctrl-C, with the state saved.
        """
        sharding.check_alone("deer")
        logging.disable_progress_bar()  # ours is the one to look at
        self.folder, self._device = expanded("train.output", self.output), as_device(self.device)
        if (self.folder / "report.json").exists():
            raise UserError(f"{self.folder} already holds a finished run; choose another train.output or remove it")
        self.source: Source = self._data.source(self.tasks, self.seed, self.held_out, answers=self.target is None)
        start = self._sampler(self.model)
        self._read(start)
        files.make_folder(self.folder)
        self._same()
        target = self.target or str(self._train_target())
        self.pairs = self._answers(start, target)
        distilled = self._align(self.folder / "distilled", self.model, self.distill_steps, self._distill)
        drafter = self._align(self.folder / "drafter", self._at(distilled), self.refine_steps, self._refine)
        drafters: dict[str, tuple[Model, str | None]] = {"before": (self.model, None)}
        drafters["distilled"] = self._at(distilled), self.separator
        drafters["refined"] = self._at(drafter), self.separator
        prompts = [self._encode.prompt(one, self.new_tokens) for one in self._held]
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
            raise UserError(f"train.model={named} has a causal context: it cannot draft several blocks in one forward")
        if start.tokenizer is None:
            raise UserError(f"train.model={named} has no tokenizer, and training reads texts: add its files")
        if self._data.path is None and start.tokenizer.get_vocab() != vocabulary():
            raise UserError(
                f"train.model={named} does not have mini's tokenizer, which mini's tasks are written in: say"
                " train.data=FILE.jsonl"
            )
        self.tokenizer, self.spec = start.tokenizer, spec
        self._behind = [] if self.separator is None else [self._token(self.separator)]
        if self.target is None:
            longest = int(self.shape.get("max_position_embeddings", spec.max_positions))
        else:
            longest = SpeculativeSampler(start, self.target, draft_length=0).spec.max_positions
        self._most = min(spec.max_positions, longest)
        self._encode = Encoder(
            self.tokenizer, replace(spec, max_positions=self._most), self._most, "leave it out of train.data"
        )
        self._held = self.source.draw(f"{self.seed}/held", self.held_out, held=True)
        for example in (*self._held, *self.source.all()):
            self._encode.prompt(example, self.new_tokens)
            if self.target is None:
                self._encode(example)

    def _token(self, separator: str) -> int:
        found = self.tokenizer.get_vocab().get(separator)
        if found is None or found in (self.spec.mask_id, self.spec.eos_id):
            usual = (token for token in self.tokenizer.all_special_tokens if token != separator)
            raise unknown("train.separator", separator, [*usual, "another token of the model's", "null"])
        return found

    # Training ---------------------------------------------------------------------------------------------------------

    def _train_target(self) -> Path:
        folder = self.folder / "target"
        if _finished(folder):
            return folder
        ends = {"bos_token_id": None, "eos_token_id": self.spec.eos_id, "pad_token_id": None}
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed)
            network = LlamaForCausalLM(LlamaConfig(vocab_size=self.spec.vocab_size, **ends, **self.shape))
        network = cast(nn.Module, network).to(self._device)  # its own signature hides the module's

        def loss(step: int) -> Tensor:
            examples = self.source.draw(f"{self.seed}/target/{step}", self.batch, number=step)
            rows = collate([self._encode(one) for one in examples], self.spec.eos_id)
            ids, answer = rows.ids.to(self._device), rows.answer.to(self._device)
            # Padding stands behind the answer, which no token of it sees.
            logits = network(input_ids=ids).logits[:, :-1][answer[:, 1:]]
            return F.cross_entropy(logits, ids[answer])

        self._fit(folder, network, self.target_steps, self.target_learning_rate, loss)
        files.write_folder(folder, self.tokenizer.save_pretrained)
        files.write_folder(folder, cast(LlamaForCausalLM, network).save_pretrained)
        (folder / checkpoint.FILE).unlink()
        return folder

    def _align(self, folder: Path, model: Model, steps: int, corrupt: Callable[..., tuple[Tensor, Tensor]]) -> Path:
        """One stage: a drafter in `folder`, from the one that is `model`."""
        if _finished(folder):
            return folder
        trained = Trained.load(model, self._device, self.dtype, self.lora, self.seed)
        if self.gradient_checkpointing:
            trained.recompute()
        trained.network.train()

        def loss(step: int) -> Tensor:
            rng = Random(f"{self.seed}/{folder.name}/{step}")
            pairs = [self._cut(*rng.choice(self.pairs), rng) for _ in range(self.batch)]
            rows, generator = collate(pairs, self.spec.eos_id), torch.Generator()
            answer = rows.answer & (torch.arange(rows.ids.shape[1]) < rows.length[:, None] - len(self._behind))
            masked, weight = corrupt(answer, generator.manual_seed(rng.getrandbits(62)))
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self.precision == "bf16"):
                return masked_loss(trained.network, rows, answer, masked, weight, self.spec)

        self._fit(folder, trained.network, steps, self.learning_rate, loss)
        trained.save(folder)
        (folder / checkpoint.FILE).unlink()
        return folder

    def _distill(self, answer: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return distill_mask(answer, generator, self.least_t)

    def _refine(self, answer: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return refine_mask(answer, generator, self.longest, self.alpha)

    def _fit(self, folder: Path, network: nn.Module, steps: int, rate: float, loss: Loss) -> None:
        """Train from scratch or from the last saved state; what a step learns from depends on nothing but the step."""
        files.make_folder(folder)
        learning = [weight for weight in network.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(learning, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
        state: dict[str, Any] = {"step": 0}
        if (folder / checkpoint.FILE).exists():
            state = checkpoint.load(folder, network, optimizer)
        log = journal.Journal(folder / journal.FILE, state["step"], self.tracker, asdict(self))
        with interrupts() as interrupted, bar(folder.name, steps, state["step"]) as progress:
            total, count, begun = 0.0, 0, time.perf_counter()
            for step in range(state["step"], steps):
                for group in optimizer.param_groups:
                    warm = min(1.0, (step + 1) / (0.02 * steps))
                    group["lr"] = rate * warm * (0.5 + 0.5 * math.cos(math.pi * step / steps))
                optimizer.zero_grad()
                with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
                    torch.manual_seed(Random(f"{self.seed}/{folder.name}/dropout {step}").getrandbits(62))
                    now = loss(step)
                    now.backward()
                nn.utils.clip_grad_norm_(learning, 1.0)
                optimizer.step()
                total, count = total + now.item(), count + 1
                progress.advance(TaskID(0))
                last = step + 1 == steps
                if (step + 1) % self.checkpoint_every == 0 or last or interrupted.is_set():
                    spent = time.perf_counter() - begun
                    log.note(step + 1, {"loss": total / count, "seconds": spent})  # first: the state vouches for it
                    checkpoint.save(folder, network, optimizer, {"step": step + 1})
                    progress.console.print(
                        f"{folder.name} step {step + 1}/{steps}  loss {total / count:.4f}  seconds {spent:.0f}"
                    )
                    total, count = 0.0, 0
                if interrupted.is_set() and not last:
                    raise KeyboardInterrupt
        log.close()

    # Data -------------------------------------------------------------------------------------------------------------

    def _answers(self, start: Sampler, target: str) -> list[Pair]:
        """Prompts and the target's answers, end token included."""
        path = self.folder / "answers.json"
        if not path.exists():
            examples = self.source.draw(f"{self.seed}/answers", min(self.answers, self.source.size or self.answers))
            prompts = [self._encode.prompt(one, self.new_tokens) for one in examples]
            plain = SpeculativeSampler(start, target, draft_length=0)
            found = []
            for first in range(0, len(prompts), self.batch):
                some = prompts[first : first + self.batch]
                result = plain.generate(some, max_new_tokens=self.new_tokens)
                cut = zip(some, result.tokens.tolist(), result.lengths.tolist(), strict=True)
                found += [(prompt, tokens[:length]) for prompt, tokens, length in cut]
            checkpoint.write_json(path, found)
        return checkpoint.read_json(path)

    def _cut(self, prompt: list[int], answer: list[int], rng: Random) -> Pair:
        """A prompt, and its answer and the end tokens behind it up to a random token, the separator behind that."""
        room = self.spec.max_positions - len(prompt) - len(answer) - len(self._behind)
        tail = max(0, min(self.draft_length - 1, room)) if answer[-1] == self.spec.eos_id else 0
        whole: Sequence[int] = [*answer, *[self.spec.eos_id] * tail]
        whole = whole[: self.spec.max_positions - len(prompt) - len(self._behind)]
        return prompt, [*whole[: rng.randint(1, len(whole))], *self._behind]

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
        return Sampler.from_pretrained(model, device=self.device, dtype=self.dtype, temperature=temperature)

    def _same(self) -> None:
        """Refuse to go on with a run of other settings."""
        path = self.folder / "settings.json"
        mine = {key: value for key, value in asdict(self).items() if key not in _FREE}
        mine["content"] = self.source.content
        if path.exists():
            saved = checkpoint.read_json(path)
            checkpoint.check_same(self.folder, saved, {key: value for key, value in mine.items() if key != "content"})
            checkpoint.check_content(self.folder, saved, self.source.content, self._data.path)
        checkpoint.write_json(path, mine, indent=1)


def _finished(folder: Path) -> bool:
    """Whether a model stands there whole: its last state is removed behind the export."""
    return saving.finished(folder) and not (folder / checkpoint.FILE).exists()
