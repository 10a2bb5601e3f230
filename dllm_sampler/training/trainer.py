"""The common part of the trainers: transformers' `Trainer` around a model that is sampled from while it learns."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from pydantic import Field
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from tqdm import tqdm
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput
from typing_extensions import override

from dllm_sampler import config
from dllm_sampler.core.checks import check_count
from dllm_sampler.errors import NotFiniteError, UserError, as_typed, first_line
from dllm_sampler.host import files
from dllm_sampler.inputs.metrics import Metric
from dllm_sampler.inputs.prompts import Prompt
from dllm_sampler.models import saving
from dllm_sampler.models.huggingface import wrap
from dllm_sampler.result import Answer
from dllm_sampler.sampler import Sampler
from dllm_sampler.training.cli import Command, last_checkpoint
from dllm_sampler.training.data import Encoder, Example, Row, examples
from dllm_sampler.training.model import Model, Trainable

ANSWERS = "answers.json"  # in the folder of a run that learns from collected answers
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass
class Arguments(TrainingArguments):
    """transformers' `TrainingArguments`. The fields that a subclass adds are checked by their types."""

    fsdp: bool | str | None = None  # pyright: ignore[reportIncompatibleVariableOverride] (transformers takes both)
    remove_unused_columns: bool = False
    dataloader_pin_memory: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        own = {one.name for one in fields(self)} - {one.name for one in fields(TrainingArguments)}
        config.check("train", type(self), {name: getattr(self, name) for name in own})
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            check_count(f"train.{name}", getattr(self, name))


@dataclass
class DiffusionConfig(Arguments):
    """transformers' `TrainingArguments`, and what all trainers here have besides.

    dtype: of the weights: `float32` or `float64`; `bfloat16` where adapters learn
    new_tokens: longest answer that is sampled
    evaluation: settings of the sampler whose answers to held-out prompts are measured; greedy by default
    answer_batch_size: answers that are sampled at a time. The next prompt joins when one ends
    average: decay of a moving average of the weights, which is what is measured and saved; 0: the weights themselves
    """

    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    new_tokens: Count = 128
    evaluation: dict[str, Any] = field(default_factory=dict)
    answer_batch_size: Count = 16
    average: Annotated[float, Field(ge=0, lt=1)] = 0.0

    samplers: ClassVar[tuple[str, ...]] = ("evaluation",)  # fields that are settings of a sampler


class WeightCopy(TrainerCallback):
    """A copy `a = decay * a + (1 - decay) * w` of the weights w that learn, moved every few optimizer steps.

    It is a moving average (Polyak and Juditsky, 1992), or an earlier policy. With `every=0` it is not moved.
    """

    def __init__(self, name: str, decay: float = 0.0, every: int = 1):
        self.name, self.decay, self.every = name, decay, every
        self.copies: dict[str, Any] = {}  # empty before training

    @torch.no_grad()
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Copy the weights, or read the copy of the checkpoint that the run resumes from."""
        self._model = model
        self.copies = {name: weight.detach().clone() for name, weight in model.learned().items()}
        file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / f"{self.name}.safetensors"
        for name, tensor in load_file(file).items() if state.global_step and file.exists() else ():
            copy = self.copies[name]
            if isinstance(copy, DTensor):
                tensor = distribute_tensor(tensor.to(copy.to_local().device), copy.device_mesh, copy.placements)
            copy.copy_(tensor)

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Move the copy towards the weights."""
        if self.every and state.global_step % self.every == 0:
            for name, weight in self._model.learned().items():
                self.copies[name].mul_(self.decay).add_(weight, alpha=1 - self.decay)

    def save(self, folder: Path, write: bool) -> None:
        """Write the copy, if there is one, into a checkpoint. Collective: every process must call it; one writes."""
        whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in self.copies.items()}
        if write and whole:
            tensors = {name: one.cpu().contiguous() for name, one in whole.items()}
            files.write(folder / f"{self.name}.safetensors", save(tensors))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the copy's weights inside, if there is a copy."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        if not self.copies:
            return
        for module in self._model.modules():  # what was gathered for a forward has the old values
            if isinstance(module, FSDPModule):
                module.reshard()
        for name, weight in self._model.learned().items():
            held = weight.detach().clone()
            weight.copy_(self.copies[name])
            self.copies[name].copy_(held)


class FiniteGradients(TrainerCallback):
    """Leaves out the gradients of a step if one of them is not finite, and reports it."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Look at the norm, which is the same in all processes."""
        norm: Any = nn.utils.get_total_norm([w.grad for w in model.learned().values() if w.grad is not None])
        if not math.isfinite(norm.full_tensor() if hasattr(norm, "full_tensor") else norm):
            model.zero_grad()
            say(f"step {state.global_step + 1}: the gradients are not finite and were left out")


def say(text: str) -> None:
    """Write a line for the user in the first process, above a bar if there is one."""
    if PartialState().is_main_process:
        tqdm.write(text, file=sys.stderr)


def shared(items: Sequence[Any]) -> tuple[list[Any], range]:
    """Return the items of this process, and their numbers among all, which seed what is drawn for them."""
    numbers = range(PartialState().process_index, len(items), PartialState().num_processes)
    return [items[at] for at in numbers], numbers


def collected(file: Path, items: Sequence[Any], answer: Callable[[list[Any], range], list[Any]]) -> list[Any]:
    """Return `answer(items, numbers)` without None, or the content of `file` if an earlier run has written it."""
    if file.exists():
        return json.loads(file.read_text())
    mine, numbers = shared(items)
    made = gather_object([*zip(numbers, answer(mine, numbers), strict=True)])
    found = [one for _, one in sorted(made, key=itemgetter(0)) if one is not None]
    if found and PartialState().is_main_process:
        files.write(file, json.dumps(found))
    return found


class CommandTrainer(Trainer):
    """A `Trainer` that `dllm-train` can run."""

    config: ClassVar[type[Any]]  # of its settings
    args: Any  # the settings

    @classmethod
    def command(cls, line: Command) -> Path:
        """Train and save with the settings of `dllm-train`, and return the file or folder of the result."""
        raise NotImplementedError

    @override
    def create_scheduler(self, *given: Any, **how: Any) -> Any:
        try:
            return super().create_scheduler(*given, **how)
        except TypeError as error:  # transformers does not check them
            said = f"train.lr_scheduler_kwargs={as_typed(self.args.lr_scheduler_kwargs)}: {first_line(error)}"
            raise UserError("option-type", f"{said}. Correct them.") from error


class DiffusionTrainer(CommandTrainer):
    """A `Trainer` that learns from rows of prompts and answers, and measures answers to held-out prompts.

    model: as `Sampler.from_pretrained` takes it, a `Sampler`, or a masked language model of transformers
    train_dataset, eval_dataset: rows with a `prompt` and a `completion` (or `answer`), or with `messages`. A prompt is
        a text, token ids or messages
    processing_class: the tokenizer of a model of transformers; others have theirs
    peft_config: a `LoraConfig` of peft, whose adapters alone learn. With None all weights learn
    metric: how answers are judged, see `Metric`
    """

    config: ClassVar[type[DiffusionConfig]] = DiffusionConfig
    uniform: ClassVar[bool] = False  # True accepts models without a mask token
    answers: ClassVar[bool] = True  # each example must have an answer
    held_out_loss: ClassVar[bool] = False  # held-out examples have a loss
    most_held_out: ClassVar[int] = 64  # most examples that `held_out=null` holds out

    def __init__(
        self, model: Model | PreTrainedModel, args: DiffusionConfig | None = None, train_dataset: Any = None,
        eval_dataset: Any = None, processing_class: Any = None, *, peft_config: Any = None,
        metric: Metric | str = "exact_match", callbacks: Sequence[TrainerCallback] = (), **options: Any,
    ):  # fmt: skip
        args = args or self.config(output_dir="trained")
        if args.dtype == "bfloat16" and peft_config is None:
            said = "train.dtype=bfloat16 rounds small updates of all weights away."
            raise UserError("options-conflict", f"{said} Set train.lora, or train.dtype=float32 with train.bf16=true.")
        self.args = args
        self.examples = examples(train_dataset, self.answers, "train_dataset")
        held = [] if eval_dataset is None else examples(eval_dataset, self.answers, "eval_dataset")
        if isinstance(model, PreTrainedModel):
            model = Sampler(wrap(model, processing_class), tokenizer=processing_class)
        self.trained = Trainable.load(model, args.dtype, peft_config, args.seed, self.uniform)
        self.metric = Metric("metric", metric) if isinstance(metric, str) else metric
        self._figures: dict[str, list[float]] = {}
        self.average = WeightCopy("average", args.average)
        self.copies: list[WeightCopy] = [self.average, *(one for one in callbacks if isinstance(one, WeightCopy))]
        for name in args.samplers:
            self.sampler(**config.check(f"train.{name}", Sampler, getattr(args, name)))  # a mistake in one shows here
        self.prepare()
        self.train_rows, self.held_rows = self.rows(self.examples), self.rows(held, held=True)
        data: Any = self.train_rows, self.held_rows or None  # a list is a data set by position
        super().__init__(
            model=self.trained, args=args, data_collator=lambda rows: {"rows": rows}, train_dataset=data[0],
            eval_dataset=data[1], processing_class=self.trained.tokenizer,
            callbacks=[FiniteGradients(), *([self.average] if args.average else []), *callbacks], **options,
        )  # fmt: skip
        self.model_accepts_loss_kwargs = False  # a loss is the mean over its rows
        self.can_return_loss = self.held_out_loss

    @classmethod
    def command(cls, line: Command) -> Path:
        """Train and save, and return the folder of the result."""
        args = line.arguments(cls.config)
        folder, found = Path(args.output_dir), last_checkpoint(args.output_dir)
        last = found if line.resume else None
        args.eval_on_start = args.eval_on_start and last is None
        train, held = line.examples(args, cls.answers, cls.most_held_out)
        line.begin(folder, saving.has_weights(folder), found or (folder / ANSWERS).exists())
        weights = line.rewards
        more = {"reward_funcs": [*weights], "reward_weights": [*weights.values()]} if weights else {}
        trainer = cls(
            line.model, args=args, train_dataset=train, eval_dataset=held, peft_config=line.peft_config,
            metric=Metric("train.data.metric", line.source.metric), **more,
        )  # fmt: skip
        line.choose_threads([trainer.trained], args.device)
        line.record(folder)
        trainer.train(resume_from_checkpoint=last)
        trainer.save_model()
        trainer.save_state()
        return folder

    def prepare(self) -> None:
        """Check the settings against the model, before examples are encoded."""

    def rows(self, some: Sequence[Example], held: bool = False) -> list[Row]:
        """Check and encode examples to learn from, or to measure on if they are `held`."""
        encode = Encoder(self.trained.tokenizer, self.trained.spec)
        return [Row(at, one, encode.prompt(one, self.args.new_tokens)) for at, one in enumerate(some)]

    def sampler(self, **settings: Any) -> Sampler:
        """Return a sampler that shares the model's weights, and so follows the training."""
        return Sampler(self.trained.denoiser, tokenizer=self.trained.tokenizer, **settings)

    def seed_of(self, *parts: object) -> str:
        """Return a seed made of the run's seed and some parts."""
        return "/".join(map(str, (self.args.seed, *parts)))

    def note(self, figures: Mapping[str, Tensor | float]) -> None:
        """Add figures to the next line of the log, which has their means over its steps and over the processes."""
        for name, value in figures.items():
            self._figures.setdefault(name, []).append(float(value))

    def answered(self, sampler: Sampler, prompts: Sequence[Prompt], seeds: list[int], samples: int = 1) -> list[Answer]:
        """Return answers in the order of the prompts."""
        size = max(self.args.answer_batch_size, samples)  # answers to one prompt may have to begin together
        options: dict[str, Any] = {"max_new_tokens": self.args.new_tokens, "batch_size": size, "order": "given"}
        with self.accelerator.autocast():
            found = self.trained.sampling(
                lambda: [*sampler.generate_many(prompts, seed=seeds, samples=samples, **options)]
            )
        for answer in found:
            if answer.finish_reason == "not_finite":
                raise NotFiniteError(answer.nfe, [answer.index + 1])
        return found

    def together(self, items: Sequence[Any]) -> list[tuple[Any, bool]]:
        """Return the items, each with True. An FSDP process with fewer than another repeats its last, with False."""
        most = max(gather_object([len(items)])) if self.is_fsdp_enabled else len(items)
        return [(items[min(at, len(items) - 1)], at < len(items)) for at in range(most)]

    def log(self, logs: dict[str, float], *given: Any, **named: Any) -> None:
        """Log a line with the means of the figures that were noted since the last one."""
        if "loss" in logs:
            means = gather_object([{name: sum(some) / len(some) for name, some in self._figures.items()}])
            self._figures.clear()
            logs |= {name: sum(one[name] for one in means) / len(means) for name in means[0]}
        super().log(logs, *given, **named)

    def evaluation_loop(self, *given: Any, metric_key_prefix: str = "eval", **named: Any) -> EvalLoopOutput:
        """Return the loss of held-out examples, and the figures of `measured`."""
        with self.average.applied():
            found = EvalLoopOutput(None, None, {}, len(self.held_rows))  # pyright: ignore[reportArgumentType]
            if self.held_out_loss:
                found = super().evaluation_loop(*given, metric_key_prefix=metric_key_prefix, **named)
            measured = self.measured()
        found.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in measured.items()})  # pyright: ignore
        return found

    def measured(self) -> dict[str, float]:
        """Return the share of right answers to all held-out prompts, forwards per answer, and tokens per forward."""
        rows, seeds = shared(self.held_rows)
        mine = [row.example for row in rows]
        answers = self.answered(self.sampler(**self.args.evaluation), [one.prompt for one in mine], [*seeds])
        right = [
            one.right(answer, self.metric) for one, answer in zip(mine, answers, strict=True) if one.answer is not None
        ]
        counts = [sum(right), len(right), sum(one.nfe for one in answers), sum(one.length for one in answers)]
        total, count, nfe, tokens = (sum(some) for some in zip(*gather_object([counts]), strict=True))
        found = {"nfe": nfe / len(self.held_rows), "tokens_per_forward": tokens / nfe}
        return {"right": total / count, **found} if count else found

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model in its family's own format. A checkpoint on the way has the learned weights alone."""
        if _internal_call and output_dir is not None:
            super().save_model(output_dir, _internal_call)
            for copy in self.copies:
                copy.save(Path(output_dir), self.args.should_save)
            return
        with self.average.applied():
            state: Any = self.accelerator.get_state_dict(self.model) if self.is_fsdp_enabled else None
            if self.args.should_save:
                self.trained.save(Path(output_dir or self.args.output_dir), state)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        state, learned = self.trained.state_dict() if state_dict is None else state_dict, self.trained.learned()
        super()._save(output_dir, {name: tensor for name, tensor in state.items() if name in learned})

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        pass  # the hub gets the family's format from `save_model`
