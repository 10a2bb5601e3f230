"""From the settings of `dllm-train` to a trainer and its run: the model, the data, the arguments."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from accelerate import PartialState
from torch import nn

from dllm_sampler import config
from dllm_sampler.cli import threads
from dllm_sampler.cli.terminal import written
from dllm_sampler.errors import UserError
from dllm_sampler.host import files
from dllm_sampler.host.reading import load_json
from dllm_sampler.options import AUTO
from dllm_sampler.sampler import Sampler
from dllm_sampler.training.data import Data, Example, check_tokenizer, drawn
from dllm_sampler.training.model import Trainable, lora_config

RUN = "run.json"  # in the folder of a run: its deciding settings
DECIDING = ("model", "tasks", "held_out", "prompts", "seed", "new_tokens", "block_length")
DECIDING += ("teacher", "keep", "tail", "target", "answers")


@dataclass
class Front:
    """The settings of a task of `dllm-train`.

    model: name, folder or hub id, or a dict with further settings of a model (`path`, `mask_id` ...)
    data: your own examples (docs/training.md); where its path is null, mini's tasks
    tasks: share of each of mini's tasks among the prompts
    held_out: examples that no training uses, to measure on. None chooses a tenth of `data`, and of mini's tasks a
        number of the task's
    lora: fields of peft's `LoraConfig`, of adapters on the linear layers. With None all weights learn
    rewards: weight of each: a name, or `package.module:function` in TRL's form
    prompts: examples that are answered before training; null: all
    resume: from the last checkpoint in the folder, if there is one
    settings: any field of the trainer's arguments
    """

    name: str
    model: Any = None
    data: Mapping[str, Any] = field(default_factory=dict)
    tasks: Mapping[str, float] = field(default_factory=dict)
    held_out: int | None = None
    lora: Mapping[str, Any] | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    prompts: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    threads: int | str = AUTO

    @classmethod
    def of(cls, name: str, settings: Mapping[str, Any], threads: int | str = AUTO) -> Front:
        """Return the settings of a YAML of `conf/train`. Those that are not the trainer's are checked."""
        known = ("model", "data", "tasks", "held_out", "lora", "rewards", "prompts")
        own = config.check(f"train={name}", cls, {key: settings[key] for key in known if key in settings})
        rest = {key: value for key, value in settings.items() if key not in own}
        found = cls(name, **own, settings=rest, threads=threads)
        _ = found.peft_config
        return found

    @cached_property
    def source(self) -> Data:
        """The settings of the data, checked."""
        return Data(**config.check("train.data", Data, self.data))

    @cached_property
    def peft_config(self) -> Any:
        """The configuration of the adapters, checked."""
        return lora_config(self.lora)

    @property
    def reward_options(self) -> dict[str, Any]:
        """The rewards as arguments of a trainer. Empty if there are none."""
        return {"reward_funcs": [*self.rewards], "reward_weights": [*self.rewards.values()]} if self.rewards else {}

    def arguments(self, kind: type[Any], **changes: Any) -> Any:
        """Return the arguments of a trainer, each field checked."""
        return kind(**config.check(f"train={self.name}", kind, {**self.settings, **changes}))

    def sampler(self, args: Any, dtype: str | None = None, **options: Any) -> Sampler:
        """Return a sampler of the model, and set the threads of torch for it."""
        trained = Trainable.load(self.model, dtype)
        if self.source.path is None:
            check_tokenizer(trained.tokenizer, trained.named)
        self.choose_threads([trained], args.device)
        return Sampler(trained.to(args.device).denoiser, tokenizer=trained.tokenizer, **options)

    def choose_threads(self, networks: Iterable[nn.Module], device: object) -> None:
        """Set the threads of torch for some networks."""
        threads.choose(self.threads, threads.parameters(networks), str(device))

    def examples(
        self, args: Any, answers: bool, most: int, count: int | None = None
    ) -> tuple[list[Example], list[Example]]:
        """Return examples to learn from and to measure on, of the data or of mini's tasks.

        answers: each example must have an answer
        most: held-out examples at most, if `held_out` is None
        count: examples of mini's tasks. None chooses as many as the steps take
        """
        if self.source.path is not None:
            train, held = self.source.load(args.seed, self.held_out, answers, most)
            return train[: self.prompts], held
        size = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
        number = count or self.prompts or max(args.max_steps, 1) * size
        return drawn(self.tasks, args.seed, number), drawn(self.tasks, args.seed, self.held_out or most, held=True)

    @property
    def deciding(self) -> dict[str, Any]:
        """The settings that the data of a run, and the answers that it collects, depend on."""
        known = {**self.settings, **vars(self)}
        return {name: known[name] for name in known if name in DECIDING} | {
            f"data.{name}": value for name, value in vars(self.source).items()
        }

    def begin(self, folder: Path, resume: bool, finished: bool, begun: object) -> None:
        """Refuse a folder with a finished run, or one that has `begun` unless it resumes with the same settings."""
        if not PartialState().is_main_process:  # it may write there before the others look
            return
        if finished:
            raise UserError("run-finished", f"{folder} has a finished run. Choose another train.output_dir.")
        if begun and not resume:
            raise UserError(
                "run-unfinished", f"{folder} has an unfinished run. Set train.resume=true or another train.output_dir."
            )
        before = load_json((folder / RUN).read_text()) if begun and (folder / RUN).exists() else {}
        for name, then in before.items():
            if then != (now := self.deciding.get(name)):
                raise UserError(
                    "run-differs",
                    f"train.{name}={written(now)}, but the unfinished run in {folder} has {written(then)}. Choose"
                    " another train.output_dir or delete this folder.",
                )

    def record(self, folder: Path) -> None:
        """Write the deciding settings into the folder of a run that has passed its checks."""
        if PartialState().is_main_process:
            files.make_folder(folder)
            files.write(folder / RUN, json.dumps(self.deciding, indent=1) + "\n")


def last_checkpoint(folder: str) -> str | None:
    """Return the last whole checkpoint in the folder of a run. Returns None if there is none."""
    found = [file.parent for file in Path(folder).glob("checkpoint-*/trainer_state.json")]  # the file is written last
    return str(max(found, key=lambda path: int(path.name.rpartition("-")[2]))) if found else None
