"""The trainer of a Learn2PD filter (arXiv 2509.25188): which predictions of a model are already final?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save as serialise
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import Trainer, TrainingArguments

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cli import inputs
from dllm_sampler.core.checks import check_count
from dllm_sampler.errors import UserError
from dllm_sampler.host import files
from dllm_sampler.models.filter import Layers, about, judge
from dllm_sampler.models.mini_tasks import TASKS
from dllm_sampler.models.mini_tokenizer import vocabulary
from dllm_sampler.sampler import Sampler
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.training.command import SETTINGS, Front, check_masks
from dllm_sampler.training.data import Encoder, Example, drawn
from dllm_sampler.training.replay import Records, collect
from dllm_sampler.training.trainer import say

# Where training starts: logit SLOPE (c - CENTRE), a threshold on the confidence c of each position by itself.
SLOPE, CENTRE = 40.0, 0.9


@dataclass
class FilterConfig(TrainingArguments):
    """Settings of `FilterTrainer`, and of `train=filter`.

    prompts_file: text or JSONL file of prompts. None takes those of `data` or, where it names none, the tasks of
        `mini`, each as often; their test prompts are used in no training
    count: prompts used at most; a tenth of them validates, another tests
    new_tokens, block_length: of each answer; a filter is good for one block length
    answer_batch_size: prompts decoded together
    depth: linear layers
    committed: also learn from positions already committed, as published
    caution: weight in the loss of a candidate that is not final; 1 as published
    threshold: of the filter's output, for the reported precision and recall
    """

    prompts_file: str | None = None
    count: int = 7000
    new_tokens: int = 32
    block_length: int = 32
    answer_batch_size: int = 64
    depth: int = 2
    committed: bool = False
    caution: float = 3.0
    threshold: float = 0.96
    per_device_train_batch_size: int = 1  # all records
    remove_unused_columns: bool = False
    dataloader_pin_memory: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("count", "new_tokens", "block_length", "answer_batch_size", "depth"):
            check_count(name, getattr(self, name), 10 if name == "count" else 1)
        if not 0 < self.caution < float("inf"):
            raise UserError("option-range", f"caution must be a number above 0, not {self.caution}")
        if not 0 <= self.threshold <= 1:
            raise UserError("option-range", f"threshold must be between 0 and 1, not {self.threshold}")


class Filter(nn.Module):
    """A filter that starts as a threshold on each position's own confidence, and learns the difference.

    Records are too few to find the steep rise just below 1 from random weights. Where they say nothing a threshold is
    not a bad guess.
    """

    def __init__(self, size: int, depth: int):
        super().__init__()
        scale = [1.0] * (depth - 1) + [SLOPE]
        self._start = [(each * torch.eye(size), torch.zeros(size)) for each in scale]
        self._start[-1] = self._start[-1][0], torch.full((size,), -SLOPE * CENTRE)
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size, size)) for _ in scale)
        self.offsets = nn.ParameterList(nn.Parameter(torch.zeros(size)) for _ in scale)

    def layers(self) -> Layers:
        """Return weight and bias of each layer."""
        learned = zip(self._start, self.weights, self.offsets, strict=True)
        return tuple((a.to(x.device) + x, b.to(y.device) + y) for (a, b), x, y in learned)

    def forward(self, known: Tensor) -> Tensor:
        """Return the logits of confidences `[R, N]`."""
        return judge(self.layers(), known)


class FilterTrainer(Trainer):
    """Trains a filter on all records at once; `best` are the layers with the least loss on the validation records."""

    config: ClassVar[type[FilterConfig]] = FilterConfig
    args: Any

    def __init__(self, args: FilterConfig, training: Records, validation: Records, **options: Any):
        self.best, self.least = Filter(training.known.shape[1], args.depth).layers(), float("inf")
        steps: Any = [training] * (args.max_steps * args.world_size)
        held: Any = [validation]
        super().__init__(
            model=Filter(training.known.shape[1], args.depth), args=args, train_dataset=steps, eval_dataset=held,
            data_collator=lambda rows: {"records": rows[0]}, **options,
        )  # fmt: skip

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean cross-entropy of the filter, see `loss`."""
        records = inputs["records"].to(self.args.device)
        return loss(model(records.known), records, self.args.committed, self.args.caution)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any
    ) -> tuple[Tensor, None, None]:
        """Return the loss of the validation records."""
        with torch.no_grad():
            return self.compute_loss(model, inputs), None, None

    def evaluate(self, *given: Any, **named: Any) -> dict[str, float]:
        """See `Trainer.evaluate`; the best layers so far are kept."""
        found = super().evaluate(*given, **named)
        if found["eval_loss"] < self.least:
            filter: Any = self.accelerator.unwrap_model(self.model)
            self.least = found["eval_loss"]
            self.best = tuple((weight.detach().cpu(), bias.detach().cpu()) for weight, bias in filter.layers())
        return found

    @classmethod
    def command(cls, front: Front, resume: bool) -> Path:
        """Collect records, train and save; return the filter's file.

        Most of the time goes into the answers, which a run that resumes does not make again. Several processes answer a
        batch of prompts each.

        Raises:
            UserError: the file exists, too few prompts, or a model or file that cannot be read.
        """
        args: Any = front.arguments(FilterConfig)
        path = Path(args.output_dir) / "filter.safetensors"
        if path.exists():
            raise UserError("file-overwrite", f"{path} already exists. Choose another train.output_dir or remove it.")
        front.begin(path.parent, resume, finished=False)
        check_masks(front.model)
        reference = Sampler.from_pretrained(
            front.model, device=args.device, scheduler=FixedSteps(), blocks=FixedBlocks(args.block_length), stop="none"
        )
        splits = _splits(front, args, reference)
        records = path.with_name("records.safetensors")
        front.started(path.parent)
        texts = [[str(prompt) for prompt in split] for split in splits]
        run = {"model": str(front.model), "prompts": texts}
        run |= {name: getattr(args, name) for name in ("new_tokens", "block_length", "answer_batch_size")}
        training, validation, test = collect(
            reference, splits, args.new_tokens, args.block_length, args.answer_batch_size, records, run
        )
        trainer = cls(args, training, validation)
        trainer.train()
        if not trainer.is_world_process_zero():
            return path
        report = {
            "settings": {**front.settings, "model": front.model},
            "records": {"training": len(training), "validation": len(validation), "test": len(test)},
            "validation_loss": trainer.least,
            "test": judged(trainer.best, test, args.threshold),
        }
        files.write(path.with_suffix(".json"), json.dumps(report, indent=1) + "\n")
        write(path, trainer.best, about(reference.denoiser.spec, args.block_length))
        records.unlink()
        (path.parent / SETTINGS).unlink()
        say(", ".join(f"{name} {value:.4f}" for name, value in report["test"].items()))
        return path


def fit(training: Records, validation: Records, **settings: Any) -> tuple[Layers, float]:
    """Return a filter for some records, the best on the validation records, and its loss there.

    settings: fields of `FilterConfig`
    """
    usual: dict[str, Any] = {"output_dir": "filter", "max_steps": 2000, "learning_rate": 1e-2, "weight_decay": 0.1}
    usual |= {"eval_strategy": "steps", "eval_steps": 50, "eval_on_start": True, "save_strategy": "no"}
    trainer = FilterTrainer(FilterConfig(**{**usual, **settings}), training, validation)
    trainer.train()
    return trainer.best, trainer.least


def _splits(front: Front, args: FilterConfig, reference: Sampler) -> list[list[Any]]:
    """Return prompts to train, validate and test with."""
    if args.prompts_file is not None and front.data.get("path") is not None:
        raise UserError("options-conflict", "train.data has prompts, too. Remove train.prompts_file.")
    tokenizer, spec = reference.tokenizer, reference.denoiser.spec
    if args.prompts_file is not None:
        given = inputs.read([], args.prompts_file, None).prompts
        some = [Example(f"prompt {number}", prompt, None) for number, prompt in enumerate(given, 1)]
    elif front.data.get("path") is not None:
        assert tokenizer is not None
        train, held = front.source.load(args.seed, 1, False)
        some, encode = [*held, *train], Encoder(tokenizer, spec, spec.max_positions)
        for one in some:
            encode.prompt(one, args.new_tokens)
    elif tokenizer is None or tokenizer.get_vocab() != vocabulary():
        raise UserError("option-missing", "nothing to answer. Set train.data or train.prompts_file.")
    else:
        test, tasks = args.count // 10, dict.fromkeys(TASKS, 1.0)
        train, held = drawn(tasks, args.seed, args.count - test), drawn(tasks, args.seed, test, held=True)
        return [[one.prompt for one in part] for part in (train[test:], train[:test], held)]
    generator = torch.Generator().manual_seed(args.seed)
    some = [some[at] for at in torch.randperm(len(some), generator=generator).tolist()][: args.count]
    if len(some) < 10:
        raise UserError("nothing-to-learn", f"there are {len(some)} prompts. Give at least 10.")
    tenth = len(some) // 10
    parts = some[2 * tenth :], some[tenth : 2 * tenth], some[:tenth]
    return [[one.prompt for one in part] for part in parts]


def write(path: Path, layers: Layers, facts: Mapping[str, Any]) -> None:
    """Write a filter, and the facts about the model that it belongs to."""
    tensors = {
        f"fc{i}.{name}": tensor.contiguous()
        for i, layer in enumerate(layers, 1)
        for name, tensor in zip(("weight", "bias"), layer, strict=True)
    }
    # one entry: safetensors does not keep the order of several, and equal runs should give equal files
    files.write(path, serialise(tensors, {"filter": json.dumps(facts)}))


def loss(said: Tensor, records: Records, committed: bool, caution: float) -> Tensor:
    """Return the mean cross-entropy of a filter's logits `said [R, N]`; a position that is not final weighs `caution`.

    committed: positions already committed count too
    """
    counts = (records.there if committed else records.open).to(records.known)
    counts = torch.where(records.final, counts, caution * counts)
    each = binary_cross_entropy_with_logits(said, records.final.to(said), reduction="none")
    return (each * counts).sum() / counts.sum().clamp(min=1)


def judged(layers: Layers, records: Records, threshold: float) -> dict[str, float]:
    """Return precision, recall and false-positive rate of a filter on masks, and the share of them that was final."""
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
