"""The two-stage alignment of a drafter with an autoregressive target (DEER, arXiv 2512.15176)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
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
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.loading import as_device
from dllm_sampler.paths import expanded
from dllm_sampler.result import Speculation
from dllm_sampler.sampler import Sampler
from dllm_sampler.speculative.deer import SpeculativeSampler
from dllm_sampler.training import checkpoint, journal
from dllm_sampler.training.deer_losses import Rows, distill_mask, masked_loss, refine_mask
from dllm_sampler.training.export import export
from dllm_sampler.training.progress import bar, interrupts
from dllm_sampler.training.settings import check_settings
from dllm_sampler.training.tasks import LESSONS, draw_example
from dllm_sampler.training.tokenizer import EOS, build_tokenizer, vocabulary

Loss = Callable[[int], Tensor]  # step -> loss
_FREE = ("output", "device", "checkpoint_every", "tracker")  # a resumed run may change these


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
    model: the drafter to begin with: name or folder, in `mini`'s format
    target: a causal LM with `mini`'s tokenizer; None: train one
    checkpoint_every: steps between two saved states
    tasks: share of each of mini's tasks among the prompts
    shape: fields of transformers' `LlamaConfig`, of the target that is trained
    target_steps, target_learning_rate: of its training
    answers: prompts that the target answers, greedily, for the drafter
    temperature: at which the result is measured besides greedy decoding
    new_tokens, draft_length: longest answer, and proposals in a round
    separator: token behind the cut
    batch: rows of a step
    distill_steps, refine_steps: of stages I and II
    learning_rate: peak of both, falling as a cosine
    least_t: stage I masks each token with probability t, uniform from here to 1
    longest, alpha: stage II's R is uniform on 1..longest, its weights alpha^(R-i)
    held_out: prompts that the report is measured on
    tracker: where the log of each stage goes besides: null, `tensorboard` or `trackio`, whose package must be there
    """

    output: str
    device: str
    seed: int
    model: str
    target: str | None
    checkpoint_every: int
    tasks: dict[str, float]
    shape: dict[str, Any]
    target_steps: int
    target_learning_rate: float
    answers: int
    temperature: float
    new_tokens: int
    draft_length: int
    separator: str
    batch: int
    distill_steps: int
    refine_steps: int
    learning_rate: float
    least_t: float
    longest: int
    alpha: float
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
        for name in self.tasks:
            if name not in LESSONS:
                raise unknown("task", name, LESSONS)
        if self.separator not in vocabulary():
            raise unknown("train.separator", self.separator, vocabulary())
        journal.check(self.tracker)

    def run(self) -> Path:
        """Train what is not there yet, measure, and return the drafter's folder.

        Raises:
            UserError: a finished run, one of other settings, or a model that does not fit.
            KeyboardInterrupt: after Ctrl-C, with the state saved.
        """
        logging.disable_progress_bar()  # ours is the one to look at
        self.folder, self._device = expanded("train.output", self.output), as_device(self.device)
        if (self.folder / "report.json").exists():
            raise UserError(f"{self.folder} already holds a finished run; choose another train.output or remove it")
        files.make_folder(self.folder)
        self._same()
        start = self._sampler(self.model)
        self.tokenizer = build_tokenizer(start.denoiser.spec.max_positions)
        self._end = self.tokenizer.get_vocab()[EOS]
        if start.tokenizer is None or start.tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise UserError(f"train.model={self.model} does not have mini's tokenizer, which the tasks are written in")
        target = self.target or str(self._train_target())
        self.pairs = self._answers(start, target)
        distilled = self._align(self.folder / "distilled", self.model, self.distill_steps, self._distill)
        drafter = self._align(self.folder / "drafter", str(distilled), self.refine_steps, self._refine)
        drafters = {"before": (self.model, None), "distilled": (str(distilled), self.separator)}
        report = self._measure(target, {**drafters, "refined": (str(drafter), self.separator)})
        checkpoint.write_json(self.folder / "report.json", {"decoding": report, "settings": asdict(self)}, indent=1)
        return drafter

    # Training ---------------------------------------------------------------------------------------------------------

    def _train_target(self) -> Path:
        folder = self.folder / "target"
        if _finished(folder):
            return folder
        ids = self.tokenizer.get_vocab()
        ends = {"bos_token_id": None, "eos_token_id": self._end, "pad_token_id": None}
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed)
            network = LlamaForCausalLM(LlamaConfig(vocab_size=len(ids), **ends, **self.shape))
        network = cast(nn.Module, network).to(self._device)  # its own signature hides the module's

        def loss(step: int) -> Tensor:
            rng = Random(f"{self.seed}/target/{step}")
            rows = self._rows([self._encode(*self._example(rng, held=False)) for _ in range(self.batch)])
            # Padding stands behind the answer, which no token of it sees.
            logits = network(input_ids=rows.ids).logits[:, :-1][rows.answer[:, 1:]]
            return F.cross_entropy(logits, rows.ids[rows.answer])

        self._fit(folder, network, self.target_steps, self.target_learning_rate, loss)
        files.write_folder(folder, self.tokenizer.save_pretrained)
        files.write_folder(folder, cast(LlamaForCausalLM, network).save_pretrained)
        (folder / checkpoint.FILE).unlink()
        return folder

    def _align(self, folder: Path, model: str, steps: int, corrupt: Callable[..., tuple[Tensor, Tensor]]) -> Path:
        """One stage: a drafter in `folder`, from the one named `model`."""
        if _finished(folder):
            return folder
        denoiser = self._sampler(model).denoiser
        if not isinstance(denoiser, TransformerDenoiser):
            raise UserError(f"train.model={model} is no model in mini's format: start from mini")
        network = denoiser.transformer.float().train()

        def loss(step: int) -> Tensor:
            rng = Random(f"{self.seed}/{folder.name}/{step}")
            rows = self._rows([self._cut(*rng.choice(self.pairs), rng) for _ in range(self.batch)], behind=1)
            masked, weight = corrupt(rows.answer.cpu(), torch.Generator().manual_seed(rng.getrandbits(62)))
            return masked_loss(network, rows, masked.to(self._device), weight.to(self._device), denoiser.mask_id)

        self._fit(folder, network, steps, self.learning_rate, loss)
        export(network, self.tokenizer, folder)
        (folder / checkpoint.FILE).unlink()
        return folder

    def _distill(self, answer: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return distill_mask(answer, generator, self.least_t)

    def _refine(self, answer: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return refine_mask(answer, generator, self.longest, self.alpha)

    def _fit(self, folder: Path, network: nn.Module, steps: int, rate: float, loss: Loss) -> None:
        """Train from scratch or from the last saved state; what a step learns from depends on nothing but the step."""
        files.make_folder(folder)
        optimizer = torch.optim.AdamW(network.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
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
                now = loss(step)
                now.backward()
                nn.utils.clip_grad_norm_(network.parameters(), 1.0)
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

    def _example(self, rng: Random, *, held: bool) -> tuple[str, str]:
        (name,) = rng.choices(list(self.tasks), list(self.tasks.values()))
        return draw_example(LESSONS[name], rng, held=held)

    def _encode(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        ids = self.tokenizer(answer, add_special_tokens=False).input_ids
        return self.tokenizer(prompt).input_ids, [*ids, self._end]

    def _answers(self, start: Sampler, target: str) -> list[tuple[list[int], list[int]]]:
        """Prompts and the target's answers, end token included."""
        path = self.folder / "answers.json"
        if not path.exists():
            rng = Random(f"{self.seed}/answers")
            prompts = [self.tokenizer(self._example(rng, held=False)[0]).input_ids for _ in range(self.answers)]
            plain = SpeculativeSampler(start, target, draft_length=0)
            found = []
            for first in range(0, len(prompts), self.batch):
                some = prompts[first : first + self.batch]
                result = plain.generate(some, max_new_tokens=self.new_tokens)
                cut = zip(some, result.tokens.tolist(), result.lengths.tolist(), strict=True)
                found += [(prompt, tokens[:length]) for prompt, tokens, length in cut]
            checkpoint.write_json(path, found)
        return checkpoint.read_json(path)

    def _cut(self, prompt: list[int], answer: list[int], rng: Random) -> tuple[list[int], list[int]]:
        """A prompt, and its answer and the end tokens behind it up to a random token, the separator behind that."""
        tail = self.draft_length - 1 if answer[-1] == self._end else 0
        whole = [*answer, *[self._end] * tail]
        return prompt, [*whole[: rng.randint(1, len(whole))], self.tokenizer.get_vocab()[self.separator]]

    def _rows(self, pairs: list[tuple[list[int], list[int]]], behind: int = 0) -> Rows:
        """Prompts and answers as a batch; `behind` last tokens of each are there but no part of the answer."""
        length = max(len(prompt) + len(answer) for prompt, answer in pairs)
        ids = torch.tensor([[*p, *a, *[self._end] * (length - len(p) - len(a))] for p, a in pairs])
        column = torch.arange(length)
        first = torch.tensor([len(p) for p, _ in pairs])[:, None]
        end = torch.tensor([len(p) + len(a) for p, a in pairs])[:, None]
        answer = (column >= first) & (column < end - behind)
        return Rows(*(each.to(self._device) for each in (ids, column < end, answer)))

    # The report -------------------------------------------------------------------------------------------------------

    def _measure(self, target: str, drafters: Mapping[str, tuple[str, str | None]]) -> dict[str, Any]:
        """Each drafter and plain decoding on the same prompts, one by one, in turns, so that they share the weather."""
        rng = Random(f"{self.seed}/held")
        prompts = [self._example(rng, held=True)[0] for _ in range(self.held_out)]
        report: dict[str, Any] = {}
        for temperature in (0.0, self.temperature):
            arms = {"plain": SpeculativeSampler(self._sampler(self.model, temperature), target, draft_length=0)}
            for name, (model, separator) in drafters.items():
                drafter = self._sampler(model, temperature)
                arms[name] = SpeculativeSampler(drafter, target, draft_length=self.draft_length, separator=separator)
            results: dict[str, list[Speculation]] = {name: [] for name in arms}
            seconds = dict.fromkeys(arms, 0.0)
            for number, prompt in enumerate(prompts):
                for name, arm in arms.items():
                    begun = time.process_time()
                    results[name].append(arm.generate(prompt, max_new_tokens=self.new_tokens, seed=number))
                    seconds[name] += time.process_time() - begun
            plain = results["plain"]
            report[f"temperature {temperature:g}"] = {
                name: {
                    **_figures(found),
                    "cpu_seconds": round(seconds[name], 3),
                    "speed_up": round(seconds["plain"] / seconds[name], 3),
                    "same_answer": sum(a.texts == b.texts for a, b in zip(found, plain, strict=True)) / len(plain),
                }
                for name, found in results.items()
            }
        return report

    # ------------------------------------------------------------------------------------------------------------------

    def _sampler(self, model: str, temperature: float | None = None) -> Sampler:
        return Sampler.from_pretrained(model, device=self.device, dtype="float32", temperature=temperature)

    def _same(self) -> None:
        """Refuse to go on with a run of other settings."""
        path = self.folder / "settings.json"
        mine = {key: value for key, value in asdict(self).items() if key not in _FREE}
        if path.exists():
            checkpoint.check_same(self.folder, checkpoint.read_json(path), mine)
        checkpoint.write_json(path, mine, indent=1)


def _figures(results: list[Speculation]) -> dict[str, float]:
    rounds = sum(int(result.nfe.sum()) for result in results)
    accepted = sum(int(result.accepted.clamp(min=0).sum()) for result in results)
    return {
        "mean_accepted": round(accepted / rounds, 3),
        "tokens_per_round": round(sum(int(result.lengths.sum()) for result in results) / rounds, 3),
        "rounds": rounds / len(results),
    }


def _finished(folder: Path) -> bool:
    """Whether a model stands there whole: its last state is removed behind the export."""
    return (folder / "model.safetensors").exists() and not (folder / checkpoint.FILE).exists()
