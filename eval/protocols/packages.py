"""Packages that published protocols need in versions of their own, each in a folder that no other code imports from.

Hydra needs antlr 4.9 and sympy's LaTeX parser 4.11, so that both cannot be in one environment.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dllm_sampler.errors import UserError, installing
from dllm_sampler.host import files
from dllm_sampler.host.paths import expanded

FOLDER = "DLLM_SAMPLER_PROTOCOLS"  # an environment variable
INSTALL = "python -m dllm_sampler.eval.protocols --install"
PINNED = {
    "math": ("antlr4-python3-runtime==4.11.1", "math-verify==0.9.0", "latex2sympy2_extended==1.11.0"),
    "lm_eval_0_4_8": ("lm-eval==0.4.8",),
    "opencompass": ("opencompass==0.5.4",),
}


def folder() -> Path:
    """Return the folder of the packages: `$DLLM_SAMPLER_PROTOCOLS`, else one in the user's cache."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(FOLDER, os.environ.get(FOLDER) or Path(cache_home) / "dllm_sampler" / "protocols")


def install() -> Path:
    """Install the packages that are missing with pip, without their dependencies. Return their folder.

    Raises:
        UserError: pip failed, or the folder cannot be written.
    """
    for name, packages in PINNED.items():
        target = folder() / name
        if not (target / ".complete").exists():
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(target)]
            done = subprocess.run([*command, *packages], capture_output=True, text=True)
            if done.returncode:
                said = [line for line in done.stderr.strip().splitlines() if not line.startswith("[notice]")]
                reason = (said or ["no reason given"])[-1]
                raise UserError(
                    "package-missing",
                    f"pip cannot install {' '.join(packages)} in {target} ({reason}). Correct the cause, or name"
                    f" another folder in the environment variable {FOLDER}.",
                )
            files.write(target / ".complete", "")
    return folder()


def located(name: str) -> Path:
    """Return the folder of the packages of an entry of `PINNED`.

    Raises:
        UserError: they are not installed. The message has the command that installs them.
    """
    target = folder() / name
    if not (target / ".complete").exists():  # pip may have been stopped
        raise UserError("package-missing", f"This protocol needs {' '.join(PINNED[name])}. Run `{INSTALL}` once.")
    return target


def lm_eval_tasks() -> Path:
    """Return the folder of tasks of the installed lm-evaluation-harness.

    Raises:
        UserError: the harness is not installed.
    """
    spec = find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("package-missing", f"Published protocols need lm-evaluation-harness. Run {installing('eval')}.")
    return Path(spec.submodule_search_locations[0]) / "tasks"


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(read(file))


def read(file: Path) -> str:
    """Return the text of a file that a protocol names."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        text = f"The protocol names {file}, which cannot be read ({error.strerror})"
        raise UserError("file-unreadable", f"{text}. Correct lm_eval or opencompass in the protocol's file.") from None


def read_literal(file: Path, function: str) -> Any:
    """Return the literal that a function of a Python file returns. The file is not executed."""
    found = next(node for node in _tree(file).body if isinstance(node, ast.FunctionDef) and node.name == function)
    returned = next(node for node in ast.walk(found) if isinstance(node, ast.Return) and node.value is not None)
    return ast.literal_eval(returned.value)  # type: ignore[arg-type]


def read_template(file: Path) -> list[dict[str, str]]:
    """Return the rounds of a template of OpenCompass, each with `role` and `prompt`. The file is not executed."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.keyword) and node.arg == "round":
            assert isinstance(node.value, ast.List)
            calls = [call for call in node.value.elts if isinstance(call, ast.Call)]
            return [{str(one.arg): ast.literal_eval(one.value) for one in call.keywords} for call in calls]
    raise UserError("file-invalid", f"{file} has no rounds of a prompt. Correct opencompass in the protocol's file.")


@cache
def load_definitions(file: Path, names: tuple[str, ...]) -> Mapping[str, Any]:
    """Return functions and classes of a Python file without importing the package that it is part of.

    Decorators and base classes are dropped, and so are imports that fail.

    Args:
        file: the path.
        names: the definitions to return, with all of the file that they call.
    """
    space: dict[str, Any] = {"__name__": file.stem}
    for node in _tree(file).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            with suppress(ImportError):
                exec(compile(ast.Module([node], []), str(file), "exec"), space)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
            node.decorator_list = []
            if isinstance(node, ast.ClassDef):
                node.bases = []
            exec(compile(ast.Module([node], []), str(file), "exec"), space)
    return {name: space[name] for name in names}
