"""The trainer of a Learn2PD filter (arXiv 2509.25188): which predictions of a model are already final?"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import torch
from rich import box
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cli import inputs
from dllm_sampler.core.protocols import Scheduler
from dllm_sampler.errors import UserError
from dllm_sampler.host import files
from dllm_sampler.host.paths import expanded
from dllm_sampler.inputs.prompts import Prompt
from dllm_sampler.models import mini_tasks as tasks
from dllm_sampler.models.filter import Layers, about, judge
from dllm_sampler.models.loading import as_device
from dllm_sampler.models.mini_tokenizer import vocabulary
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.learn2pd import LearnedFilter
from dllm_sampler.schedulers.threshold import Threshold
from dllm_sampler.training import journal, sharding
from dllm_sampler.training.checkpoint import write_json, write_tensors
from dllm_sampler.training.comparison import Check, compare, rows
from dllm_sampler.training.encoding import check_prompts
from dllm_sampler.training.examples import Data, Example, Stored
from dllm_sampler.training.progress import bar
from dllm_sampler.training.replay import Records, collect
from dllm_sampler.training.settings import check_settings
from dllm_sampler.training.trained import called, check_masks

# Where training starts: logit SLOPE (c - CENTRE), a threshold on the confidence c of each position by itself.
SLOPE, CENTRE = 40.0, 0.9
# An unfinished run with other values of these would have other records.
_SAME = ("model", "new_tokens", "block_length", "batch")


@dataclass
class FilterTrainer:
    """Trains a filter on the sampler's own answers, one token per step, and measures what it buys.

    Most of the time goes into the answers, which an interrupted run does not make again. Several processes answer a
    batch of prompts each; the first trains and measures, as one alone would with these answers. Writes the filter;
    next to it, with the ending .json, the settings and the printed figures, and with .log.jsonl the losses.

    output: safetensors file to write; as `filter.safetensors` in the model's folder it is that model's default
    model: name, folder or hub id, or a dict with further settings of a model (`path`, `mask_id` ...)
    device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`
    prompts: text or JSONL file of prompts; None: those of `data`, or, where it names none, the tasks of `mini`, each as
        often, of which the test prompts are drawn from those that no training uses
    data: your own examples (docs/training.md); where all have answers, its metric judges the test prompts' answers
    count: prompts used at most; a tenth of them validates, another tests
    new_tokens, block_length: of each answer; a filter is good for one block length
    batch: prompts decoded together
    depth: linear layers
    committed: also learn from positions already committed, as published
    caution: weight in the loss of a candidate that is not final; 1 as published
    threshold: of the filter's output, for the reported precision, recall and decoding
    against: thresholds of `scheduler=threshold` that decoding is compared with
    steps, learning_rate: of AdamW on all records at once; the rate falls linearly to 0
    weight_decay: towards the start, a plain threshold on the confidence
    tracker: where the log of the losses goes besides: null, `tensorboard` or `trackio`, whose package must be there
    seed: of splits and prompts
    """

    output: str
    model: str | dict[str, Any]
    device: str
    prompts: str | None
    data: dict[str, Any]
    count: int
    new_tokens: int
    block_length: int
    batch: int
    depth: int
    committed: bool
    caution: float
    threshold: float
    against: tuple[float, ...]
    steps: int
    learning_rate: float
    weight_decay: float
    tracker: str | None
    seed: int

    def __post_init__(self) -> None:
        for name in ("count", "new_tokens", "block_length", "batch", "depth", "steps"):
            least = 10 if name == "count" else 1
            if getattr(self, name) < least:
                raise UserError("option-range", f"train.{name} must be at least {least}, not {getattr(self, name)}")
        if self.output.endswith(".json"):
            raise UserError(
                "file-name", f"train.output is a safetensors file, and {self.output} is the name that its figures get"
            )
        if not 0 < self.caution < float("inf"):
            raise UserError("option-range", f"train.caution must be a number above 0, not {self.caution}")
        if not 0 <= self.threshold <= 1:
            raise UserError("option-range", f"train.threshold must be between 0 and 1, not {self.threshold}")
        check_settings(vars(self))
        journal.check(self.tracker)
        self._data = Data.of(self.data)
        if self._data.path is not None and (self.prompts is not None or self._data.test is not None):
            raise UserError("options-conflict", "train.data has prompts. Remove train.prompts and train.data.test.")

    def run(self) -> Path:
        """Collect, train, measure and save; returns the filter's file.

        Raises:
            UserError: the file exists, too few prompts, or a model or file that cannot be read.
        """
        path = expanded("train.output", self.output)
        if path.exists():
            raise UserError("file-overwrite", f"{path} already exists; choose another train.output or remove it")
        accelerator, device = sharding.start(as_device(self.device))
        check_masks(self.model)
        reference = Sampler.from_pretrained(
            self.model, device=device, scheduler=FixedSteps(), blocks=FixedBlocks(self.block_length), stop="none"
        )
        splits, checks = self._splits(reference)
        run = {name: getattr(self, name) for name in _SAME}
        texts = json.dumps([[str(prompt) for prompt in split] for split in splits])
        named = self.prompts or self._data.path or "tasks of mini"
        run["prompts"] = f"{named}, checksum {crc32(texts.encode()):08x}"
        files.make_folder(path.parent)
        unfinished = path.with_name(path.name + ".unfinished")
        training, validation, test = collect(
            reference, splits, self.new_tokens, self.block_length, self.batch, unfinished, run, accelerator
        )
        if not accelerator.is_main_process:
            return path
        log = journal.Journal(path.with_name(f"{path.stem}.log.jsonl"), 0, self.tracker, asdict(self))
        layers, least = fit(
            training, validation, depth=self.depth, committed=self.committed, caution=self.caution, steps=self.steps,
            learning_rate=self.learning_rate, weight_decay=self.weight_decay, log=log,
        )  # fmt: skip
        log.close()
        trained = path.with_name(path.name + ".trained")  # the file takes its name when all is done
        self._write(trained, layers, about(reference.denoiser.spec, self.block_length))
        report = {
            "settings": {
                key: value for key, value in asdict(self).items() if key not in ("output", "device", "tracker")
            },
            "records": {"training": len(training), "validation": len(validation), "test": len(test)},
            "validation_loss": least,
            "test": judged(layers, test, self.threshold),
            "decoding": self._decode(reference, str(trained), splits[2], checks),
        }
        write_json(path.with_suffix(".json"), report, indent=1)
        files.move(trained, path)
        unfinished.unlink()
        show(report, Console(stderr=True))
        return path

    def _splits(self, reference: Sampler) -> tuple[list[list[Prompt]], list[Check] | None]:
        """Prompts to train, validate and test with, and what tells a right answer to each of the last."""
        prompts: list[Prompt]
        checks: list[Check] | None = None
        if self.prompts is not None or self._data.path is not None:
            prompts, right = self._given(reference)
            if len(prompts) < 10:
                named = "prompts" if self.prompts is not None else "data"
                raise UserError("nothing-to-learn", f"train.{named} holds {len(prompts)} prompts. Give at least 10.")
            tenth = len(prompts) // 10
            checks = right and right[:tenth]
        elif reference.tokenizer is None or reference.tokenizer.get_vocab() != vocabulary():
            raise UserError("option-missing", "train.prompts is missing: only mini has tasks to draw from")
        else:
            tenth, rng = self.count // 10, Random(self.seed)
            chosen = [list(tasks.TASKS.values())[number % len(tasks.TASKS)] for number in range(self.count)]
            drawn = [tasks.draw_example(task.draw, rng, held=number < tenth)[0] for number, task in enumerate(chosen)]
            checks = [partial(task.check, prompt) for task, prompt in zip(chosen[:tenth], drawn, strict=False)]
            prompts = [*drawn]
        return [prompts[2 * tenth :], prompts[tenth : 2 * tenth], prompts[:tenth]], checks

    def _given(self, reference: Sampler) -> tuple[list[Prompt], list[Check] | None]:
        """The user's prompts, shuffled, and what judges an answer to each, where their right answers are known."""
        if self.prompts is not None:
            prompts: list[Prompt] = list(inputs.read([], self.prompts, None).prompts)
            Random(self.seed).shuffle(prompts)
            return prompts[: self.count], None
        source = self._data.load(self.seed, 1, answers=False)
        every = [*source.held, *source.train]
        some = Random(self.seed).sample(every, len(every))[: self.count]
        if reference.tokenizer is None:
            raise UserError("tokenizer-missing", f"train.model={called(self.model)} has no tokenizer for train.data")
        check_prompts(some, reference.tokenizer, reference.denoiser.spec, self.new_tokens)
        known = all(isinstance(one.answer, str) for one in some)
        checks = [partial(_right, source, one) for one in some] if known else None
        return [one.prompt for one in some], checks

    @staticmethod
    def _write(path: Path, layers: Layers, said: dict[str, Any]) -> None:
        tensors = {
            f"fc{i}.{name}": tensor
            for i, layer in enumerate(layers, 1)
            for name, tensor in zip(("weight", "bias"), layer, strict=True)
        }
        # one entry: safetensors does not keep the order of several, and equal runs should give equal files
        write_tensors(path, tensors, {"filter": json.dumps(said)})

    def _decode(
        self, reference: Sampler, filter: str, prompts: list[Prompt], checks: list[Check] | None
    ) -> dict[str, dict[str, float]]:
        """Each scheduler on the test prompts, in the sampler's default setting."""
        contenders: dict[str, Scheduler] = {
            "one per step": FixedSteps(),
            f"learn2pd {self.threshold}": LearnedFilter(filter, self.threshold),
            **{f"threshold {each}": Threshold(each) for each in self.against},
        }
        samplers = {
            name: Sampler(
                reference.denoiser, scheduler=scheduler, blocks=reference.plugins.blocks, tokenizer=reference.tokenizer
            )
            for name, scheduler in contenders.items()
        }
        return compare(samplers, prompts, self.new_tokens, self.batch, checks)


def _right(source: Stored, example: Example, text: str) -> bool:
    return source.right(example, text, []) == 1


def fit(
    training: Records,
    validation: Records,
    *,
    depth: int = 2,
    committed: bool = False,
    caution: float = 1.0,
    steps: int = 2000,
    learning_rate: float = 1e-2,
    weight_decay: float = 0.1,
    log: journal.Journal | None = None,
) -> tuple[Layers, float]:
    """A filter for some records, the best on the validation records among those looked at; and its loss there.

    It starts as a threshold on each position's own confidence, and what is learnt is the difference: records are too
    few to find the steep rise just below 1 from random weights, and where they say nothing a threshold is no bad guess.
    """
    size = training.known.shape[1]
    scale = [1.0] * (depth - 1) + [SLOPE]
    start = [(each * torch.eye(size), torch.zeros(size)) for each in scale]
    start[-1] = start[-1][0], torch.full((size,), -SLOPE * CENTRE)
    learnt = [(torch.zeros(size, size, requires_grad=True), torch.zeros(size, requires_grad=True)) for _ in scale]
    optimizer = torch.optim.AdamW([each for pair in learnt for each in pair], weight_decay=weight_decay)

    def layers() -> Layers:
        return tuple((a + x, b + y) for (a, b), (x, y) in zip(start, learnt, strict=True))

    best, kept = float("inf"), layers()
    with bar("training the filter", steps) as progress:
        for step in range(steps + 1):
            if step % 50 == 0 or step == steps:
                with torch.no_grad():
                    if (now := float(loss(layers(), validation, committed, caution))) < best:
                        best, kept = now, layers()
                if log is not None:
                    log.note(step, {"validation_loss": now})
                progress.update(progress.task_ids[0], completed=step)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * (1 - step / (steps + 1))
            optimizer.zero_grad()
            loss(layers(), training, committed, caution).backward()
            optimizer.step()
    return tuple((weight.detach(), bias.detach()) for weight, bias in kept), best


def loss(layers: Layers, records: Records, committed: bool, caution: float) -> Tensor:
    """Mean cross-entropy of what a filter says of each position; one that is not final weighs `caution`.

    committed: positions already committed count too
    """
    counts = (records.there if committed else records.open).to(records.known)
    counts = torch.where(records.final, counts, caution * counts)
    said = judge(layers, records.known)
    each = binary_cross_entropy_with_logits(said, records.final.to(said), reduction="none")
    return (each * counts).sum() / counts.sum().clamp(min=1)


def judged(layers: Layers, records: Records, threshold: float) -> dict[str, float]:
    """Precision, recall and false-positive rate of a filter on masks, and the share of them that was final."""
    accepted = (judge(layers, records.known).sigmoid() > threshold) & records.open
    right, wrong = accepted & records.final, accepted & ~records.final
    final, other = records.open & records.final, records.open & ~records.final
    return {
        "precision": float(right.sum() / accepted.sum().clamp(min=1)),
        "recall": float(right.sum() / final.sum().clamp(min=1)),
        "false_positive_rate": float(wrong.sum() / other.sum().clamp(min=1)),
        "final": float(final.sum() / records.open.sum().clamp(min=1)),
        "records": float(len(records)),
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print the figures of a report."""
    test = report["test"]
    console.print(
        f"of {test['records']:.0f} test records: precision {test['precision']:.4f}, recall {test['recall']:.4f},"
        f" false positives {test['false_positive_rate']:.4f}; {test['final']:.4f} of the masks were final",
        highlight=False,
    )
    head, cells = rows(report["decoding"])
    table = Table(Column(head[0], no_wrap=True), *head[1:], box=box.SIMPLE)
    for row in cells:
        table.add_row(*row)
    console.print(table)
