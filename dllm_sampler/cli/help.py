"""`dllm-sample --help` and `--info`, written from the YAML files themselves."""

import json
import re
from importlib.resources import files

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dllm_sampler import config
from dllm_sampler.cli import compose

_DEFAULT = re.compile(r"^  - (\w+): (\S+)$", re.MULTILINE)
_OPTION = re.compile(r"^(\w+): (.+?) +# (.+)$", re.MULTILINE)

USAGE = """\
Sample from a masked-diffusion language model.

Usage: dllm-sample [PROMPT ...] [NAME=VALUE ...] [-- PROMPT ...]

  dllm-sample "reverse: Ada, Ben, Cal, Dan" stream=true
  dllm-sample "sort: Dan, Ada, Cal" scheduler.threshold=0.7 cache=dual
  dllm-sample "shuffle: Ada, Ben, Cal" temperature=1 top_p=0.9 seed=7
  dllm-sample prompts_file=prompts.jsonl output=samples.jsonl
  dllm-sample "copy: Ada, Ben" model=my-drafter target=my-ar-model draft_length=16
  echo "copy: Ada, Ben" | dllm-sample scheduler=fixed scheduler.steps=4
  dllm-sample "Why is the sky blue?" model=llada-8b chat=true max_new_tokens=256

A word that begins like an override (name=, group@package=, +, ++, ~) sets an
option; any other word is a prompt, and so is every word after --. Without one,
prompts are read from a pipe, one a line. Answers go to stdout, one per prompt;
the line of figures, and errors, to stderr.
"""
PLUGINS = """\
Plug-ins: GROUP=NAME, GROUP.FIELD=VALUE (* is the default; --info explains them)
"""
OPTIONS = """\
Options: NAME=VALUE
"""
ENDING = """\
Flags: -h, --help   --version   --info
Your own YAML files in ./conf/GROUP/ are choices too, as in Hydra.
Exit status: 0, or 2 after a mistake in the input (one sentence on stderr), or
130 after Ctrl-C (what is done is printed).
"""


def defaults() -> dict[str, str]:
    """The choice of each group in `conf/sample.yaml`."""
    return dict(_DEFAULT.findall(_root()))


def options() -> list[tuple[str, str, str]]:
    """Each option of `conf/sample.yaml`: name, default, what its comment says."""
    return _OPTION.findall(_root())


def show_help(console: Console) -> None:
    """Print the usage, the groups with their choices and fields, the options."""
    _say(console, USAGE)
    _say(console, PLUGINS)
    for group in compose.GROUPS:
        choices = [name for name in compose.choices(group) if name != config.CHECKPOINT]
        names = [f"{name}*" if name == defaults()[group] else name for name in choices]
        _row(console, group, " ".join([*names, "FOLDER ORG/NAME"] if group == "model" else names))
        fields = {name: _fields(group, name) for name in choices if group != "experiment"}
        for name, given in ({"": fields["mini"]} if group == "model" else fields).items():
            if given:
                _row(console, "", f"{name}: {given}" if name else given, "bright_black")
    _say(console, "")
    _say(console, OPTIONS)
    for name, default, comment in options():
        _row(console, f"{name}={default}", comment)
    _say(console, "")
    _say(console, ENDING.rstrip("\n"))


def show_info(console: Console) -> None:
    """Print every choice of every group: name, one line, paper."""
    for group in compose.GROUPS:
        table = Table("name", "what it is", "paper", title=f"{group}=NAME", **_STYLE)
        for name in config.names(group):
            entry = config.entry(group, name)
            about = re.sub(r"(, )?arXiv [\d.]+", "", entry.about).replace(" ()", "")
            mark = "*" if name == defaults()[group] else ""
            table.add_row(f"{name}{mark}", Text(about), f"arXiv {entry.paper}" if entry.paper else "")
        console.print(table)
    _say(console, "* is the default. For the fields see --help.")


_STYLE = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD, "pad_edge": False, "expand": True}


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)


def _row(console: Console, left: str, right: str, style: str = "") -> None:
    """Two columns, the right one wrapped to the terminal."""
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=22)
    table.add_column()
    table.add_row(Text("  " + left, "bold"), Text(right, style))
    console.print(table)


def _fields(group: str, name: str) -> str:
    settings = config.entry(group, name).settings
    shown = {key: value for key, value in settings.items() if key not in ("_target_", "path")}
    return " ".join(f"{key}={json.dumps(value)}" for key, value in shown.items())


def _root() -> str:
    return (files("dllm_sampler.conf") / "sample.yaml").read_text(encoding="utf-8")
