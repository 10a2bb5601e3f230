"""`dllm-train`: a trainer and its arguments from a file of `conf/train`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors import SafetensorError

from dllm_sampler import config
from dllm_sampler.cli import compose, user_files
from dllm_sampler.cli.explain import LIMITS, listing
from dllm_sampler.cli.help import check_topics
from dllm_sampler.cli.terminal import ending, say, show
from dllm_sampler.cli.user_files import about
from dllm_sampler.cli.words import quoted
from dllm_sampler.core.checks import check_switch
from dllm_sampler.errors import NotWrittenError, UserError, first_line, unknown
from dllm_sampler.host.paths import expanded
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
_FIELD = re.compile(r"train\.(\w+)[\w.]*=")  # a plain override; + and ~ are left to Hydra
# A path, a name: Hydra's grammar has its own ideas of commas and brackets.
_LITERAL = re.compile(r"train\.(model|output_dir|data\.path|data\.test)=(?!null\Z|['\"{])")


@dataclass(frozen=True)
class Options:
    """The options of `dllm-train`, besides the trainer."""

    threads: int | str = AUTO


TRAIN = compose.App("dllm-train", "train", ("train",), Options)


@dataclass(frozen=True)
class Command:
    """A command line that was read."""

    name: str  # of the task
    target: Any  # class of its trainer
    settings: dict[str, Any]  # of its YAML, with what was typed
    threads: int | str

    def run(self) -> None:
        """Train, and print the file or folder of the result."""
        from accelerate import PartialState  # these take seconds to import

        from dllm_sampler.training.command import Front

        settings = dict(self.settings)
        resume = settings.pop("resume", False)
        check_switch("train.resume", resume)
        if not sys.stderr.isatty():  # a bar is for a terminal; in a file it would be a line a step
            settings.setdefault("disable_tqdm", True)
        front = Front.of(self.name, settings, self.threads)
        try:
            with redirect_stdout(sys.stderr):  # where transformers prints its log
                path = self.target.command(front, resume)
        except SafetensorError as error:
            said = f"{settings['output_dir']} cannot be written ({first_line(error)})."
            raise NotWrittenError(f"{said} Check the path, the disk and the permissions.") from None
        except UserError:
            raise
        except ImportError as error:  # of DeepSpeed, for example
            said = f"train={self.name} needs a package that is not installed ({first_line(error)}). Install it."
            raise UserError("package-missing", said) from error
        except Exception as error:  # what transformers and accelerate refuse, and the hub
            reason, module = f"train={self.name}: {first_line(error)}", type(error).__module__.partition(".")[0]
            if isinstance(error, ValueError) and module == "builtins":
                raise UserError("option-range", f"{reason}. Change this setting.") from error
            if module in ("httpx", "huggingface_hub"):
                reason += ". Check the network and your access to the hub."
                raise UserError("hub-unreachable", reason) from error
            raise
        if PartialState().is_main_process:
            show(str(path))


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
                word = f"++{word}"
        elif not re.match(r"train=|threads=|[+~]{1,2}train\.", word):
            raise UserError("option-syntax", f"'{word}' is not train.FIELD=VALUE. See dllm-train --help.")
        kept += _as_hydra(word)
    tree = compose.composition(TRAIN, kept).tree
    check_threads("threads", tree["threads"])
    settings = dict(tree["train"])
    target = str(settings.pop("_target_"))
    if not isinstance(folder := settings.get("output_dir"), str):
        raise UserError("option-type", f"train.output_dir is {folder!r}. Name a folder.")
    settings["output_dir"] = str(expanded("train.output_dir", folder))
    return Command(name, config.plugin_class(f"train={name}", "train", target), settings, tree["threads"])


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
                show(f"  train={name}: {about('train', name)}")
            show(f"\nLimits: {LIMITS['log-probability']}")
            print(ENDING, end="")
    elif "--version" in words:
        print(f"dllm-train {__version__}")
    else:
        read(words).run()
    return 0


def _help(name: str) -> None:
    settings = user_files.entry("train", name).settings  # a mistake in the name shows here
    from dllm_sampler.training.command import Front

    console, cls = Console(), config.plugin_class(f"train={name}", "train", str(settings.get("_target_")))
    say(console, f"train={name}: {about('train', name)}")
    listing(console, "train", type("Fields", (Front, cls.config), {}), settings)
    say(console, "The other fields are those of transformers' TrainingArguments, and any of them can be set.")


def _as_hydra(word: str) -> list[str]:
    """Return overrides by which Hydra reads a word as it is meant.

    Paths and names are taken to the letter. `train.data=FILE` is short for `train.data.path=FILE`, and
    `train.FIELD={...}` replaces a mapping, where Hydra would merge both.
    """
    key, _, value = word.partition("=")
    if key == "train.rewards":  # names of functions have colons, which Hydra takes for those of a mapping
        word = re.sub(r"(?<=\w):(?=[^\W\d])", r"\:", word)
    if value.startswith("{") and key.startswith("train."):
        return [f"~{key}", f"+{word}"]
    if key == "train.data":
        word = f"train.data.path={value}"
    return [f"{word.partition('=')[0]}={quoted(value)}" if _LITERAL.match(word) else word]


if __name__ == "__main__":
    sys.exit(main())
