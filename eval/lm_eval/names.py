"""Names of the harness's tasks, and the command that runs one: `dllm-eval` says it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from dllm_sampler.eval.lm_eval.settings import OWN, PLUGINS


def is_task(name: str) -> bool:
    """Return True if the installed harness has a task, a group or a tag of this name. Reads its files, not its code."""
    spec = find_spec("lm_eval")
    if spec is None or not re.fullmatch(r"[\w.-]+", name):
        return False
    line = re.compile(rf"^(task|group|tag): *['\"]?{re.escape(name)}['\"]? *$".encode(), re.MULTILINE)
    folders = [Path(place) / "tasks" for place in spec.submodule_search_locations or ()]
    return any(line.search(file.read_bytes()) for folder in folders for file in folder.rglob("*.yaml"))


def command(task: str, words: Sequence[str]) -> str:
    """Return the command line that runs a task with the settings of these words, the first one of several values."""
    arguments = {"pretrained": "mini"}
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        value = value if value.startswith(("[", "{", "'", '"')) else value.partition(",")[0]
        if key in ("model", "model.path"):
            arguments["pretrained"] = value
        elif key.partition(".")[0] in PLUGINS or (key in (*OWN, "block_length") and key != "batch_size"):
            arguments[key] = value
    given = ",".join(f"{key}={value}" for key, value in arguments.items())
    return f"python -m dllm_sampler.eval.lm_eval --model dllm_sampler --model_args {given} --tasks {task}"
