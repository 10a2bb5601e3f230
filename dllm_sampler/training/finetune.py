"""What the trainers of a model that exists have in common: steps, measurements, log, checkpoints, resume."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dllm_sampler.errors import NotFiniteError, UserError, counted
from dllm_sampler.host import files
from dllm_sampler.host.paths import expanded
from dllm_sampler.inputs.prompts import Prompt
from dllm_sampler.models import saving
from dllm_sampler.models.loading import as_device
from dllm_sampler.models.mini_tokenizer import vocabulary
from dllm_sampler.result import Answer
from dllm_sampler.sampler import Sampler
from dllm_sampler.training import checkpoint, journal, sharding
from dllm_sampler.training.averaging import Average
from dllm_sampler.training.encoding import check_prompts
from dllm_sampler.training.examples import Data, Example, Source
from dllm_sampler.training.progress import bar, interrupts
from dllm_sampler.training.settings import check_run
from dllm_sampler.training.trained import Trained

# A resumed run may change these; anything else would make it another run.
FREE = (
    "output", "device", "checkpoint_every", "tracker", "batch_size", "batch_tokens", "steps", "gradient_checkpointing",
    "shard",
)  # fmt: skip
Part = Callable[[], tuple[Tensor, Mapping[str, float]]]  # one forward's share of the loss, and of figures


@dataclass
class FineTuner:
    """A run of `steps` steps on a model, of which a subclass says what one is. See its docstring for the other fields.

    Everything random is a function of (seed, step), so that a resumed run needs no generator's state. Under
    `accelerate launch` each process has its own prompts, and gradients are averaged (DDP).

    output: folder of the run; ends up a checkpoint in the format of the model's own, with `log.jsonl`
    device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`
    seed: of everything
    model: name, folder or hub id, or a dict with further settings of a model (`path`, `mask_id` ...)
    dtype: of the weights: `float32` or `float64`; `bfloat16` where adapters learn
    steps: in all
    checkpoint_every: steps between two saved states
    data: your own examples (docs/training.md); where its path is null, mini's tasks
    tasks: share of each of mini's tasks among the prompts
    new_tokens: length of an answer that is sampled
    learning_rate, warmup, schedule: peak, steps to reach it, then `constant` or `cosine`
    betas, weight_decay, clip: of AdamW, and the gradient norm's limit
    average: decay of a moving average of the weights, which is what is measured and saved; 0: the weights themselves
    lora: `r`, `alpha`, `dropout` of adapters on the linear layers (needs peft); None: all weights learn
    precision: `no` or `bf16`, of the forwards
    gradient_checkpointing: compute layers a second time in the backward pass, for less memory
    shard: spread weights, gradients and moments over the processes (FSDP2); else each has all of them (DDP)
    batch_size: answers that are sampled at a time; one that ends gives its place to the next
    batch_tokens: columns of a training forward at most, which bounds its memory
    evaluate_every: steps between two measurements
    held_out: prompts that no training uses, to measure on. None chooses a tenth of `data`, at most `most_held_out`; of
        mini's tasks it is `most_held_out`
    evaluation: a sampler's settings for these; greedy by default
    tracker: where the log goes besides: null, `tensorboard` or `trackio`, whose package must be there
    """

    output: str
    device: str
    seed: int
    model: str | dict[str, Any]
    dtype: str
    steps: int
    checkpoint_every: int
    data: dict[str, Any]
    tasks: dict[str, float]
    new_tokens: int
    learning_rate: float
    warmup: int
    schedule: str
    betas: tuple[float, float]
    weight_decay: float
    clip: float
    average: float
    lora: dict[str, float] | None
    precision: str
    gradient_checkpointing: bool
    shard: bool
    batch_size: int
    batch_tokens: int
    evaluate_every: int
    held_out: int | None
    evaluation: dict[str, Any]
    tracker: str | None

    name: ClassVar[str]  # on the progress bar
    most_held_out: ClassVar[int]  # where `held_out` is None
    uniform: ClassVar[bool] = False  # whether it knows models without a mask token
    free: ClassVar[tuple[str, ...]] = FREE

    def __post_init__(self) -> None:
        check_run(vars(self))
        self._data = Data.of(self.data)

    @property
    def needs_answers(self) -> bool:
        """Whether examples without a right answer are refused."""
        return True

    # What a trainer says ----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make what the steps need, from the model as it is before the first step, also in a run that goes on."""

    def others(self) -> dict[str, nn.Module]:
        """Modules besides the network that training changes, and so are saved with it."""
        return {}

    def step(self, number: int) -> dict[str, float]:
        """One step: any number of `update`s. Returns figures for the log."""
        raise NotImplementedError

    def read(self) -> Source:
        """Where its examples come from."""
        processes = self.accelerator.num_processes
        return self._data.source(
            self.tasks,
            self.seed,
            self.held_out,
            most=self.most_held_out,
            answers=self.needs_answers,
            processes=processes,
        )

    # What it can use --------------------------------------------------------------------------------------------------

    def sampler(self, **settings: Any) -> Sampler:
        """A sampler of the model as it is now."""
        return Sampler(self.trained.denoiser, tokenizer=self.trained.tokenizer, **settings)

    def update(self, parts: Iterator[Part], seed: str) -> dict[str, float]:
        """One optimizer step on the sum of some losses; returns `loss`, the sums of their figures, and the norm of the
        gradients as `gradient`. Where that is not finite nothing changes, and the user is told."""
        self.trained.network.train()
        self.optimizer.zero_grad()
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(Random(f"{self.seed}/{seed}").getrandbits(62))  # of dropout
            figures = self._backward(parts)
        norm = float(sharding.whole(nn.utils.clip_grad_norm_(self.trained.learning(), self.clip)))
        if math.isfinite(norm):
            self.optimizer.step()
            self._average.update()
        else:
            self.say(f"{seed} (from 0): the gradients are not finite and were left out")
        self.trained.network.eval()
        return {**figures, "gradient": norm}

    def _backward(self, parts: Iterator[Part]) -> dict[str, float]:
        """One part after the other, so that one's activations are alive at a time."""
        figures = {"loss": 0.0}
        several = self.trained.together(parts)
        one = next(several, None)
        sync = nullcontext if self.trained.sharded else partial(self.accelerator.no_sync, self.trained.wrapped)
        while one is not None:
            (part, counts), one = one, next(several, None)
            # Gradients of all processes are averaged once, with the last.
            with sync() if one else nullcontext(), self._attention():
                with self.autocast():
                    loss, found = part()
                self.accelerator.backward(loss if counts else 0 * loss)
            for name, value in {"loss": float(loss.detach()), **found}.items() if counts else ():
                figures[name] = figures.get(name, 0.0) + value
        return figures

    def check_prompts(self) -> None:
        """Refuse examples whose answers could not be sampled."""
        some = [*self.source.all(), *self.held_out_examples()]
        check_prompts(some, self.trained.tokenizer, self.trained.denoiser.spec, self.new_tokens)

    def autocast(self) -> torch.autocast:
        """What every forward runs under, a rollout's too; bfloat16 has the range of float32, so no loss is scaled."""
        return torch.autocast(self.trained.denoiser.spec.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def _attention(self) -> AbstractContextManager[Any]:
        """On a CPU the backward pass of torch's flash attention takes ten times as long in bfloat16 as products do."""
        slow = self.precision == "bf16" and self.trained.denoiser.spec.device.type == "cpu"
        return sdpa_kernel(SDPBackend.MATH) if slow else nullcontext()

    def examples(self, seed: str, count: int, *, number: int = 0, held: bool = False) -> list[Example]:
        """This process's `count` examples of a step, the one of this `number`; or its share of the held-out ones."""
        process, processes = self.accelerator.process_index, self.accelerator.num_processes
        if self.source.size is None:
            return self.source.draw(f"{self.seed}/{seed}/{process}", count, held=held)
        return self.source.draw("", count if held else count * processes, number=number, held=held)[process::processes]

    def held_out_examples(self) -> list[Example]:
        """Return this process's share of the held-out examples."""
        return self.examples("held", self.held_out or self.most_held_out, held=True)

    def say_examples(self, each: int | None = None) -> None:
        """Say how many examples are learned from and how many are held out. Says nothing of mini's endless tasks.

        Args:
            each: examples of a step. None leaves out how often each is used.
        """
        if self.source.size is None:
            return
        held = len(self.source.draw("", self.held_out or self.most_held_out, held=True))
        times = "" if each is None else f", {self.steps * each / self.source.size:.3g} times each"
        self.say(f"{counted(self.source.size, 'example')} to learn from{times}; {held} held out to measure on")

    def say(self, text: str) -> None:
        """A line for the user, above the bar where there is one; of the first process alone."""
        console = self._bar.console if hasattr(self, "_bar") else Console(stderr=True)
        if self.accelerator.is_main_process:
            console.print(text, highlight=False)

    # The run ----------------------------------------------------------------------------------------------------------

    def run(self) -> Path:
        """Train from the start or the last saved state, export the result, and return its folder.

        Raises:
            UserError: a finished run, one of other settings, or a model that does not fit.
            KeyboardInterrupt: after Ctrl-C, with the state saved.
        """
        folder = self.folder = expanded("train.output", self.output)
        if saving.finished(folder):
            raise UserError("run-finished", f"{folder} has a finished model. Choose another train.output.")
        files.make_folder(folder)
        self._load()
        self.prepare()
        done = self._resume()
        with bar(self.name, self.steps, done) as self._bar, interrupts() as interrupted:
            if done == 0 and (figures := self._measured()):
                self._log(0, figures)
            for number in range(done, self.steps):
                began = time.perf_counter()
                for group in self.optimizer.param_groups:
                    group["lr"] = self.learning_rate * self._share(number)
                figures = {**self.step(number), "seconds": time.perf_counter() - began}
                last = number + 1 == self.steps
                if last or (number + 1) % self.evaluate_every == 0:
                    figures |= self._measured()
                self._log(number + 1, figures)
                self._bar.advance(self._bar.task_ids[0])
                stop = sharding.anyone(interrupted.is_set(), self.accelerator.device)
                if last or (number + 1) % self.checkpoint_every == 0 or stop:
                    self._save(number + 1)
                if stop and not last:
                    raise KeyboardInterrupt
        return self._finish()

    def _measured(self) -> dict[str, float]:
        with self._average.applied():
            return self.measure()

    def fresh(self, device: torch.device) -> Trained:
        """The model as it is before the first step."""
        return Trained.load(self.model, device, self.dtype, self.lora, self.seed, uniform=self.uniform)

    def measure(self) -> dict[str, float]:
        """Right answers, forwards and tokens per forward on held-out prompts, those of all processes."""
        examples = self.held_out_examples()
        processes = self.accelerator.num_processes  # a prompt has the same seed, whichever of them answers it
        seeds = range(self.accelerator.process_index, len(examples) * processes, processes)
        answers = self.answered(self.sampler(**self.evaluation), [one.prompt for one in examples], seeds)
        right = sum(map(self.right, examples, answers))
        nfe, tokens = (sum(getattr(answer, name) for answer in answers) for name in ("nfe", "length"))
        right, nfe, tokens, count = self.summed(right, nfe, tokens, len(examples))
        return {"right": right / count, "nfe": nfe / count, "tokens_per_forward": tokens / nfe}

    def right(self, example: Example, answer: Answer) -> float:
        """How right an answer is, from 0 to 1."""
        return self.source.right(example, answer.text or "", answer.tokens[: answer.length].tolist())

    def summed(self, *values: float) -> list[float]:
        """Each of the numbers, summed up over the processes."""
        if self.accelerator.num_processes == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        return torch.as_tensor(self.accelerator.reduce(tensor, "sum")).tolist()

    def answered(
        self, sampler: Sampler, prompts: Sequence[Prompt], seed: int | Sequence[int] = 0, samples: int = 1,
        done: Callable[[], object] | None = None,
    ) -> list[Answer]:  # fmt: skip
        """Answers in the order of the prompts; `done` is called after each.

        Raises:
            NotFiniteError: the model returned NaN.
        """
        found = []
        size = max(self.batch_size, samples)  # answers to one prompt may have to begin together
        options: dict[str, Any] = {"max_new_tokens": self.new_tokens, "seed": seed, "samples": samples}
        with self.autocast(), self.trained.sampling():
            for answer in sampler.generate_many(prompts, batch_size=size, order="given", **options):
                if answer.finish_reason == "not_finite":
                    raise NotFiniteError(answer.nfe, [answer.index + 1])
                found.append(answer)
                if done is not None:
                    done()
        return found

    def _load(self) -> None:
        """Data, model, optimizer."""
        self.accelerator, device = sharding.start(as_device(self.device))
        self.source: Source = self.read()
        self.trained = self.fresh(device)
        if self._data.path is None and self.trained.tokenizer.get_vocab() != vocabulary():
            raise UserError(
                "tokenizer-differs",
                f"train.model={self.trained.named} lacks mini's tokenizer. Set train.data=FILE.jsonl.",
            )
        if self.gradient_checkpointing:
            self.trained.recompute()
        self.trained.wrap(self.accelerator, self.shard)
        learning = self.trained.learning()
        self.optimizer = torch.optim.AdamW(learning, betas=self.betas, weight_decay=self.weight_decay)
        changed = partial(sharding.reshard, self.trained.network)
        self._average = Average(learning if self.average else [], self.average, changed)

    def _resume(self) -> int:
        """How many steps are done."""
        mine = {key: value for key, value in asdict(self).items() if key not in self.free}
        self._settings = json.loads(json.dumps({**mine, "content": self.source.content}))
        done = 0
        if (self.folder / checkpoint.FILE).exists():
            saved = checkpoint.settings(self.folder)
            checkpoint.check_same(self.folder, saved, mine)
            checkpoint.check_content(self.folder, saved, self.source.content, self._data.path)
            done = checkpoint.load(self.folder, self.trained.network, self.optimizer, self._others())["step"]
        path, main = self.folder / journal.FILE, self.accelerator.is_main_process
        self._journal = journal.Journal(path, done, self.tracker, mine, main)
        return done

    def _others(self) -> dict[str, nn.Module]:
        return self.others() | ({"average": self._average} if self.average else {})

    def _save(self, done: int) -> None:
        state, main = {"step": done, "config": self._settings}, self.accelerator.is_main_process
        if main or self.trained.sharded:
            checkpoint.save(self.folder, self.trained.network, self.optimizer, state, self._others(), write=main)

    def _finish(self) -> Path:
        self._average.swap()
        weights = self.trained.whole() if self.trained.sharded else None
        if self.accelerator.is_main_process:
            if weights is not None:
                self.trained = self.fresh(torch.device("cpu"))
                self.trained.network.load_state_dict(weights)
            self.trained.save(self.folder)
            (self.folder / checkpoint.FILE).unlink()
        self._journal.close()
        self.accelerator.wait_for_everyone()
        return self.folder

    def _log(self, step: int, figures: dict[str, float]) -> None:
        line = self._journal.note(step, figures)
        if "right" in line and self.accelerator.is_main_process:
            self.say("  ".join(f"{key} {value:.4g}" for key, value in line.items()))

    def _share(self, step: int) -> float:
        rising = min((step + 1) / max(self.warmup, 1), 1.0)
        return rising * (1.0 if self.schedule == "constant" else 0.5 + 0.5 * math.cos(math.pi * step / self.steps))
