"""`dllm-train`: a trainer, its model, its data and its arguments, from a file of `conf/train` and what was typed."""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from rich.console import Console
from safetensors import SafetensorError

from dllm_sampler import config
from dllm_sampler.cli import compose, threads, user_files
from dllm_sampler.cli.explain import LIMITS, listing
from dllm_sampler.cli.help import check_topics
from dllm_sampler.cli.terminal import ending, say, show, written
from dllm_sampler.cli.words import quoted
from dllm_sampler.errors import NotWrittenError, UserError, first_line, invalid, unknown
from dllm_sampler.host import files
from dllm_sampler.host.paths import expanded
from dllm_sampler.host.reading import load_json
from dllm_sampler.host.version import __version__
from dllm_sampler.options import AUTO, check_threads

USAGE = """\
Train a model.

Usage: dllm-train train=NAME [train.FIELD=VALUE ...]

  dllm-train train=sft train.model=llada-8b train.data=mine.jsonl train.output_dir=my-llada
  dllm-sample model=my-llada chat=true "..."
  dllm-train train=sft train.max_steps=4000 train.report_to=tensorboard train.bf16=true
  accelerate launch --num_processes 4 -m dllm_sampler.training.cli train=sft ...

Each trainer is a Trainer of transformers: any field of its TrainingArguments can be set.
The same command with train.resume=true resumes from the last checkpoint, and comes to the
same losses. What is finished is never written to.
"""
ENDING = """
dllm-train --help train=NAME lists the fields of one: defaults, and what they mean.
threads=N sets torch's threads on a CPU (auto: 1 for models below 20M parameters).
Flags: -h, --help   --version   --config-dir DIR
Exit status: 0, 2 after a mistake in the input (a message on stderr), 130 after Ctrl-C.
"""
_FIELD = re.compile(r"train\.(\w+)([\w.]*)=")  # a plain override; + and ~ are left to Hydra
# Options with a path or a name, whose commas and brackets are not Hydra's syntax.
_LITERAL = re.compile(r"train\.(model|output_dir|data\.path|data\.test)=(?!null\Z|['\"{])")

RUN = "run.json"  # in the folder of a run: its deciding settings
DECIDING = ("model", "tasks", "held_out", "prompts", "seed", "new_tokens", "block_length")
DECIDING += ("teacher", "keep", "tail", "target", "answers")
OWN = ("model", "data", "tasks", "held_out", "lora", "rewards", "prompts", "resume")  # fields of `Command`


@dataclass(frozen=True)
class Options:
    """Options of `dllm-train` that are not the trainer's (`train.*`)."""

    threads: int | str = AUTO


TRAIN = compose.App("dllm-train", "train", ("train",), Options)


@dataclass
class Command:
    """A command line that was read: the settings of a task of `dllm-train`.

    model: name, folder or hub id, or a dict with further settings of a model (`path`, `mask_id` ...)
    data: your own examples (docs/training.md); where its path is null, mini's tasks
    tasks: share of each of mini's tasks among the prompts
    held_out: number of examples to measure on. None chooses a tenth of `data`, or a number of the trainer's for mini
    lora: fields of peft's `LoraConfig`, of adapters on the linear layers. With None all weights learn
    rewards: weight of each reward, which is a name or `package.module:function` in TRL's form
    prompts: number of examples that are answered before training. None means all
    resume: continue from the last checkpoint in the folder, if there is one
    """

    name: str
    trainer: Any  # its class
    model: Any = None
    data: Mapping[str, Any] = field(default_factory=dict)
    tasks: Mapping[str, float] = field(default_factory=dict)
    held_out: Annotated[int, Field(ge=1)] | None = None
    lora: Mapping[str, Any] | None = None
    rewards: Mapping[str, Annotated[float, Field(allow_inf_nan=False)]] = field(default_factory=dict)
    prompts: Annotated[int, Field(ge=1)] | None = None
    resume: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    threads: int | str = AUTO

    def run(self) -> None:
        """Train, and print the file or folder of the result."""
        from accelerate import PartialState

        try:
            _ = self.peft_config  # a mistake in it shows here
            with redirect_stdout(sys.stderr):  # where transformers prints its log
                path = self.trainer.command(self)
        except ImportError as error:  # of DeepSpeed, for example
            said = f"train={self.name} needs a package that is not installed ({first_line(error)}). Install it."
            raise UserError("package-missing", said) from error
        except Exception as error:  # what transformers and accelerate refuse, and the hub
            output, file = self.settings["output_dir"], getattr(error, "filename", "")
            if isinstance(error, SafetensorError) or f"{file}/".startswith(f"{output}/"):
                said = f"{output} cannot be written ({getattr(error, 'strerror', None) or first_line(error)})."
                raise NotWrittenError(f"{said} Check the path, the disk and the permissions.") from None
            if type(error) is UserError:  # from a part that knows only the option of `dllm-sample`
                said = re.sub(
                    r"(?<![\w.-])(model|target)(?!\.safetensors)(?=[.=]| is empty| has no field)",
                    r"train.\1",
                    str(error),
                )
                raise UserError(error.code, said.replace("max_new_tokens", "train.new_tokens")) from None
            reason, module = f"train={self.name}: {first_line(error)}", type(error).__module__.partition(".")[0]
            if isinstance(error, ValueError) and module in ("builtins", "peft"):
                raise UserError("option-range", f"{reason}. Change this setting.") from error
            if module in ("httpx", "httpx2", "huggingface_hub"):
                raise UserError("hub-unreachable", f"{reason}. Check the network and access to the hub.") from error
            raise
        if PartialState().is_main_process:
            show(str(path))

    @cached_property
    def source(self) -> Any:
        """The settings of the data, checked: a `Data`."""
        from dllm_sampler.training.data import Data

        return Data(**config.check("train.data", Data, self.data))

    @cached_property
    def peft_config(self) -> Any:
        """The `LoraConfig` of the adapters, checked. None if there are none."""
        if self.lora is None:
            return None
        from peft import LoraConfig

        return LoraConfig(**config.check("train.lora", LoraConfig, self.lora))

    def arguments(self, kind: type[Any], **changes: Any) -> Any:
        """Return the arguments of a trainer, each field checked."""
        return kind(**config.check(f"train={self.name}", kind, {**self.settings, **changes}))

    def sampler(self, args: Any, dtype: str | None = None, **options: Any) -> Any:
        """Return a sampler of the model, and set the threads of torch for it."""
        from dllm_sampler.sampler import Sampler
        from dllm_sampler.training.model import Trainable

        trained = Trainable.load(self.model, dtype)
        self.choose_threads([trained], args.device)
        return Sampler(trained.to(args.device).denoiser, tokenizer=trained.tokenizer, **options)

    def choose_threads(self, networks: Iterable[Any], device: object) -> None:
        """Set the threads of torch for some networks."""
        threads.choose(self.threads, threads.parameters(networks), str(device))

    def examples(self, args: Any, answers: bool, most: int, count: int | None = None) -> tuple[list[Any], list[Any]]:
        """Return examples to learn from and to measure on, of the data, or `count` of mini's tasks: see `Data.load`."""
        if self.source.path is not None:
            train, held = self.source.load(args.seed, self.held_out, answers, most)
            return train[: self.prompts], held
        from dllm_sampler.training.data import drawn

        size = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
        number = count or self.prompts or max(args.max_steps, 1) * size
        return drawn(self.tasks, args.seed, number), drawn(self.tasks, args.seed, self.held_out or most, held=True)

    @property
    def deciding(self) -> dict[str, Any]:
        """The settings that the data of a run, and the answers that it collects, depend on."""
        known = {**self.settings, **vars(self)}
        data = {f"data.{name}": value for name, value in vars(self.source).items()}
        return {name: known[name] for name in known if name in DECIDING} | data

    def begin(self, folder: Path, finished: bool, begun: object) -> None:
        """Refuse to write into a finished run, or to resume one without `resume` or with other deciding settings."""
        from accelerate import PartialState

        if not PartialState().is_main_process:  # it may write there before the others look
            return
        output = self.settings["output_dir"]
        if finished:
            raise UserError("run-finished", f"{output} has a finished run. Choose another train.output_dir.")
        if begun and not self.resume:
            said = f"{output} has an unfinished run. Set train.resume=true or another train.output_dir."
            raise UserError("run-unfinished", said)
        before = load_json((folder / RUN).read_text()) if begun and (folder / RUN).exists() else {}
        for name, then in before.items():
            if then != (now := self.deciding.get(name)):
                said = f"train.{name}={written(now)}, but the unfinished run in {output} has {written(then)}."
                raise UserError("run-differs", f"{said} Choose another train.output_dir or delete this folder.")

    def record(self, folder: Path) -> None:
        """Write the deciding settings into the folder of a run that has passed its checks."""
        from accelerate import PartialState

        if PartialState().is_main_process:
            files.make_folder(folder)
            files.write(folder / RUN, json.dumps(self.deciding, indent=1) + "\n")


def last_checkpoint(folder: str) -> str | None:
    """Return the last whole checkpoint in the folder of a run. Returns None if there is none."""
    found = [file.parent for file in Path(folder).glob("checkpoint-*/trainer_state.json")]  # the file is written last
    return str(max(found, key=lambda path: int(path.name.rpartition("-")[2]))) if found else None


def main(words: Sequence[str] | None = None) -> int:
    """Run `dllm-train` with the words of a command line, and return its exit status. None stands for the process's."""
    given = list(sys.argv[1:] if words is None else words)
    interrupted = "interrupted. Set train.resume=true to resume from the last checkpoint."
    return ending("dllm-train", lambda: user_files.with_config_dir(given, _run), interrupted)


def read(words: Sequence[str]) -> Command:
    """Return the command that the overrides describe."""
    names = [word.partition("=")[2] for word in words if word.startswith("train=")]
    if not names:
        known = ", ".join(user_files.choices("train"))
        raise UserError("option-missing", f"The trainer is missing. Set train to one of {known}.")
    name = names[-1]
    defaults = user_files.entry("train", name).settings
    kept = list[str]()
    for word in words:
        if match := _FIELD.match(word):
            if match[1] not in defaults:
                known = [*(key for key in defaults if key != "_target_"), *_arguments()]
                if match[1] not in known:
                    raise unknown(f"field of train={name}", match[1], known, "See dllm-train --help train=" + name)
            if match[2] and isinstance(defaults.get(match[1]), str | int | float):
                way = f"train.{match[1]} has no fields. Write train.{match[1]}=VALUE"
                if match[1] == "model":
                    way = "train.model is a name. To set its fields, write 'train.model={name: NAME, FIELD: VALUE}'"
                raise UserError("field-unknown", f"{word}: {way}.")
            if match[1] not in defaults or match[2]:  # a field of TrainingArguments, or a key of a mapping
                word = f"++{word}"
        elif not re.match(r"train=|threads=|[+~]{1,2}train\.", word):
            raise UserError("option-syntax", f"'{word}' is not train.FIELD=VALUE. See dllm-train --help.")
        kept += _as_hydra(word)
    tree = compose.composition(TRAIN, kept).tree
    check_threads("threads", tree["threads"])
    settings = dict(tree["train"])
    trainer = config.plugin_class(f"train={name}", "train", str(settings.pop("_target_")))
    for key in ("rewards", "tasks"):
        if isinstance(word := settings.get(key), str):
            raise invalid(f"train.{key}", word, f"Write train.{key}={{{word}: 1}}", "option-type")
    if not isinstance(folder := settings.get("output_dir"), str):
        raise invalid("train.output_dir", folder, "Name a folder", "option-type")
    settings["output_dir"] = str(expanded("train.output_dir", folder))
    if not sys.stderr.isatty():  # a bar is for a terminal; in a file it would be a line a step
        settings.setdefault("disable_tqdm", True)
    own = config.check(f"train={name}", Command, {key: settings.pop(key) for key in OWN if key in settings})
    return Command(name, trainer, **own, settings=settings, threads=tree["threads"])


def _arguments() -> list[str]:
    """Return the fields of transformers' `TrainingArguments`, from its text: importing it takes seconds."""
    found: Any = find_spec("transformers")
    text = (Path(found.submodule_search_locations[0]) / "training_args.py").read_text(encoding="utf-8")
    return re.findall(r"^    (\w+): ", text[text.index("\nclass TrainingArguments") :], re.M)


def _run(words: list[str]) -> int:
    if "-h" in words or "--help" in words:
        named = [word.partition("=")[2] for word in words if word.startswith("train=")]
        for name in named:
            _help(name)
        if not named:
            check_topics("dllm-train", words, "train=NAME")
            print(USAGE)
            for name in user_files.choices("train"):
                show(f"  train={name}: {user_files.about('train', name)}")
            show(f"\nLimits: {LIMITS['log-probability']}")
            print(ENDING, end="")
    elif "--version" in words:
        print(f"dllm-train {__version__}")
    else:
        read(words).run()
    return 0


def _help(name: str) -> None:
    settings = user_files.entry("train", name).settings  # a mistake in the name shows here
    console = Console()
    cls: Any = config.plugin_class(f"train={name}", "train", str(settings.get("_target_")))
    say(console, f"train={name}: {user_files.about('train', name)}")
    listing(console, "train", type("Fields", (Command, cls.config), {}), settings)
    say(console, "The other fields are those of transformers' TrainingArguments, and any of them can be set.")


def _as_hydra(word: str) -> list[str]:
    """Return overrides by which Hydra reads paths to the letter, and replaces a mapping where it would merge both."""
    key, _, value = word.partition("=")
    if key == "train.rewards":  # names of functions have colons, which Hydra takes for those of a mapping
        word = re.sub(r"(?<=\w):(?=[^\W\d]\w*:)", r"\:", word)
    if value.startswith("{") and (typed := key.removeprefix("++")).startswith("train."):
        return [f"++{typed}=null", f"++{word.removeprefix('++')}"]
    if key == "train.data":
        word = f"train.data.path={value}"
    return [f"{word.partition('=')[0]}={quoted(value)}" if _LITERAL.match(word) else word]


if __name__ == "__main__":
    sys.exit(main())
