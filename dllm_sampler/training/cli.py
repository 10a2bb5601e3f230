"""`dllm-train`: a trainer described by a file of `conf/train`."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, is_dataclass
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Console

from dllm_sampler import config
from dllm_sampler.cli import compose, threads, user_files
from dllm_sampler.cli.explain import listing
from dllm_sampler.cli.help import check_topics
from dllm_sampler.cli.terminal import ending, say, show
from dllm_sampler.cli.user_files import about
from dllm_sampler.cli.words import quoted
from dllm_sampler.errors import NotWrittenError, UserError, unknown
from dllm_sampler.host import files
from dllm_sampler.host.functions import resolve_callable
from dllm_sampler.host.paths import expanded
from dllm_sampler.host.version import __version__
from dllm_sampler.options import AUTO, check_threads

USAGE = """\
Train a model.

Usage: dllm-train train=NAME [train.FIELD=VALUE ...]

  dllm-train train=sft train.model=llada-8b train.data=mine.jsonl train.output=my-llada
  dllm-sample model=my-llada chat=true "..."
  dllm-train train=mini train.output=my-mini
  dllm-train train=mini train.output=quick train.steps=4000 train.device=cuda
  dllm-sample model=my-mini "reverse: Ada, Ben, Cal, Dan"
  dllm-train train=filter train.model=my-mini train.output=my-mini/filter.safetensors
  dllm-sample model=my-mini scheduler=learn2pd "sort: Dan, Ada, Cal"

The state is saved on the way (of mini every train.checkpoint_every steps and after
Ctrl-C, of a filter after every batch of answers); the same command goes on from there
and ends up where an uninterrupted run would have. What is finished is never written
to. The same seed, settings and machine give the same model, down to the arithmetic of
the device.
"""
ENDING = """
dllm-train --help train=NAME lists the fields of one: defaults, and what they mean.
threads=N sets torch's threads on a CPU (auto: 1 for models below 20M parameters).
Flags: -h, --help   --version   --config-dir DIR
Exit status: 0, or 2 after a mistake in the input (one sentence on stderr), or
130 after Ctrl-C (the state is saved).
"""
_FIELD = re.compile(r"train\.([\w.]+)=")  # a plain override; + and ~ are left to Hydra
_OUTPUT, _THREADS = "train.output=", "threads="


@dataclass(frozen=True)
class Options:
    """The options of `dllm-train`, besides the trainer."""

    threads: int | str = AUTO


TRAIN = compose.App("dllm-train", "train", ("train",), Options)


def main(words: Sequence[str] | None = None) -> int:
    """Run `dllm-train`; returns its exit status.

    Args:
        words: the command line without the program's name; None: that of the process.
    """
    given = list(sys.argv[1:] if words is None else words)
    return ending(
        "dllm-train",
        lambda: user_files.with_config_dir(given, _run),
        "interrupted; the same command goes on from the last saved state",
    )


def trainer(words: Sequence[str]) -> Any:
    """The trainer that the overrides describe.

    Raises:
        UserError: an override that cannot be read, or that names nothing there is.
    """
    return _read(words)[0]


def _read(words: Sequence[str]) -> tuple[Any, int | str]:
    """The trainer, and what is said of threads."""
    choices = [word.partition("=")[2] for word in words if word.startswith("train=")]
    if not choices:
        raise UserError(
            "option-missing", f"nothing to train. Set train to one of {', '.join(user_files.choices('train'))}"
        )
    name = choices[-1]
    defaults = user_files.entry("train", name).settings
    for word in words:
        if match := _FIELD.match(word):
            _known(name, defaults, match[1].split("."))
        elif not word.startswith(("train=", _THREADS)):
            _refuse(word)
    paths = [word.removeprefix(_OUTPUT) for word in words if word.startswith(_OUTPUT)]
    words = [_to_the_letter(word, defaults) for word in words if not word.startswith(_OUTPUT)]
    kept = [part for word in words for part in _replacing(word, defaults)]
    tree = compose.composition(TRAIN, kept).tree
    settings = dict(tree["train"])
    check_threads("threads", tree["threads"])
    if paths:
        settings["output"] = None if paths[-1] == "null" else paths[-1]  # a folder of that name is ./null
    if isinstance(output := settings.get("output"), str):
        expanded("train.output", output)
    target = str(settings.pop("_target_"))
    cls: Any = resolve_callable(f"train={name}: _target_", target)
    if not inspect.isclass(cls) or not is_dataclass(cls) or not hasattr(cls, "run"):  # asked before it is called
        raise UserError("target-invalid", f"train={name}: _target_={target} is not a dataclass with a method run")
    return cls(**config.check(f"train={name}", cls, settings, whole=True)), tree["threads"]


def _run(words: list[str]) -> int:
    if "-h" in words or "--help" in words:
        named = [word.partition("=")[2] for word in words if word.startswith("train=")]
        for name in named:
            settings = user_files.entry("train", name).settings  # a mistake in the name shows here
            console, cls = Console(), resolve_callable(f"train={name}: _target_", str(settings.get("_target_")))
            say(console, f"train={name}: {about('train', name)}")
            listing(console, "train", cls, settings)
        if not named:
            check_topics("dllm-train", words, "train=NAME")
            print(USAGE)
            for name in user_files.choices("train"):
                show(f"  train={name}: {about('train', name)}")
            print(ENDING, end="")
    elif "--version" in words:
        print(f"dllm-train {__version__}")
    else:
        chosen, said = _read(words)
        threads.choose(said, _parameters(chosen) if said == AUTO else None, _device(chosen))
        with _alone(chosen):
            found = chosen.run()
        if os.environ.get("RANK", "0") == "0":  # of processes that train together one says it
            show(str(found))
    return 0


def _device(trainer: Any) -> str:
    """Return where a trainer computes, as far as its settings say it."""
    from dllm_sampler.models.loading import as_device  # imports torch: a mistake does not wait for it

    try:
        return str(as_device(getattr(trainer, "device", "auto")))
    except UserError:  # the trainer says what is wrong
        return ""


def _parameters(trainer: Any) -> int | None:
    """Return about how many parameters the model of a trainer has. Returns None if it cannot be known yet."""
    from dllm_sampler.models import loading, weights

    model: Any = getattr(trainer, "model", None)
    if isinstance(model, Mapping) and "hidden_size" in model:  # a shape, of a model that begins at random
        layers, size, inner = (model.get(name) for name in ("num_layers", "hidden_size", "intermediate_size"))
        if not (isinstance(layers, int) and isinstance(size, int) and isinstance(inner, int)):
            return None  # the trainer says what is wrong
        return layers * size * (4 * size + 3 * inner)
    try:
        settings = config.model(model)
        folder = loading.find(*(settings[name] for name in ("path", "revision", "trust_remote_code")))
        return sum(map(prod, weights.shapes(folder).values()))
    except (UserError, TypeError):  # the trainer says what is wrong, or has no model of ours
        return None


@contextmanager
def _alone(trainer: Any) -> Iterator[None]:
    """No other process trains to the same place meanwhile; those that train together count as one."""
    given = getattr(trainer, "output", None)  # a trainer of the user's own may have none
    if given is None or os.environ.get("RANK", "0") != "0":
        yield
        return
    output = Path(os.path.realpath(expanded("train.output", given)))
    parents = [one for one in output.parents if not one.exists()]  # the nearest first
    files.make_folder(output.parent)
    busy = f"another dllm-train is writing {given}: wait until it is done, or choose another train.output"
    there = output.exists()
    try:
        with files.locked(output.with_name(f".{output.name}.lock"), busy):
            try:
                yield
            except BaseException:
                _remove([] if there else [output])
                raise
    except BaseException as error:
        _remove(parents)
        if isinstance(error, NotWrittenError):
            raise NotWrittenError(f"{error}; the same command goes on from the last saved state") from error
        raise


def _remove(folders: Iterable[Path]) -> None:
    """Remove folders that were made for nothing, up to the first one that is not empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _to_the_letter(word: str, defaults: Mapping[str, Any]) -> str:
    """A path or a name as a string of Hydra's grammar, which has its own ideas of commas and brackets.

    `train.data=FILE` is short for `train.data.path=FILE`.
    """
    key, _, value = word.partition("=")
    if key == "train.rewards":  # names of functions have colons, which Hydra takes for those of a mapping
        return re.sub(r"(?<=\w):(?=[^\W\d])", r"\:", word)
    if value == "null" or value.startswith(("{", "'", '"')):
        return word
    data = defaults.get("data")
    if isinstance(data, Mapping) and "path" in data and key in ("train.data", "train.data.path", "train.data.test"):
        return f"{'train.data.path' if key == 'train.data' else key}={quoted(value)}"
    return f"{key}={quoted(value)}" if key == "train.model" and isinstance(defaults.get("model"), str) else word


def _replacing(word: str, defaults: Mapping[str, Any]) -> list[str]:
    """`train.FIELD={...}` means these settings and no others, where Hydra would merge them into the defaults."""
    if not (match := _FIELD.match(word)) or not word.partition("=")[2].startswith("{"):
        return [word]
    node: Any = defaults
    for key in match[1].split("."):
        node = node[key]
    # what is null cannot be deleted, and a field of it cannot be overridden
    return [f"~{word.partition('=')[0]}", f"+{word}"] if isinstance(node, Mapping) else [f"++{word}"]


def _known(name: str, settings: Mapping[str, Any], path: list[str]) -> None:
    """Check that the dotted field exists."""
    owner, node = f"train={name}", settings
    for key in path:
        if not isinstance(node, Mapping) or key not in node:
            raise unknown(f"field of {owner}", key, _fields(node))
        owner, node = f"{owner}.{key}" if "." in owner else f"train.{key}", node[key]


def _refuse(word: str) -> None:
    if not re.match(r"[+~]{1,2}train\.", word):
        raise UserError("option-syntax", f"'{word}' is not train.FIELD=VALUE. See dllm-train --help.")


def _fields(node: Any) -> list[str]:
    return [key for key in node if key != "_target_"] if isinstance(node, Mapping) else []


if __name__ == "__main__":
    sys.exit(main())
