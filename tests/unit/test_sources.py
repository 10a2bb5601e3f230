"""The sources: no import runs in a circle or upwards, codes of errors are described, one module writes files."""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import dllm_sampler
from dllm_sampler import errors

PACKAGE = Path(dllm_sampler.__file__).parent
ROOT = Path(__file__).parents[2]


def modules() -> dict[str, Path]:
    """The package's files by the names under which they are imported."""
    found = {}
    for folder in (PACKAGE, PACKAGE / "eval"):  # the second is a link, which `rglob` does not follow
        for file in folder.rglob("*.py"):
            parts = (PACKAGE.name, *file.relative_to(PACKAGE).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@functools.cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def nodes(file: Path) -> list[ast.Call | ast.ImportFrom]:
    return [node for node in ast.walk(tree(file)) if isinstance(node, ast.Call | ast.ImportFrom)]


# Imports


def imported(node: ast.AST) -> Iterator[str]:
    """What code imports when it runs, also inside functions; not what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (one.name for one in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield from (f"{child.module}.{one.name}" for one in child.names)
        elif not (isinstance(child, ast.expr) or (isinstance(child, ast.If) and _is_for_types(child.test))):
            yield from imported(child)


def _is_for_types(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def graph(names: dict[str, list[str]]) -> dict[str, set[str]]:
    """The modules that each module imports, of those in `names`, by the names that it imports."""

    def modules_of(full: Iterable[str]) -> set[str]:
        return {one if one in names else one.rpartition(".")[0] for one in full} & names.keys()

    return {name: modules_of(full) - {name} for name, full in names.items()}


def test_no_import_runs_in_a_circle() -> None:
    names = {name: list(imported(tree(file))) for name, file in modules().items()}
    assert "dllm_sampler.eval.runner" in names
    TopologicalSorter(graph(names)).prepare()
    late = ast.parse("def late():\n    from dllm_sampler.core import packing\n")
    names["dllm_sampler.core.values"] += imported(late)
    with pytest.raises(CycleError):
        TopologicalSorter(graph(names)).prepare()


def top(module: str) -> str:
    """The folder of the package, or the file at its top, that a module is in."""
    return [*module.split("."), ""][1]


def test_the_drawing_of_the_folders_is_true() -> None:
    """Each imports only from lines below its own. What only a type checker imports counts, too."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (drawing,) = re.findall(r"^```\n(│  eval/.+?)```", page, re.M | re.S)
    lines = [
        re.findall(r"(\w+)(?:/|\.py)(?=  |\n|\Z)", line.split("  ", 1)[1].rstrip()) for line in drawing.splitlines()
    ]
    floor = {name: at for at, line in enumerate(lines) for name in line}
    found = {name for module in modules() if (name := top(module)) not in ("", "conf")}
    assert {*floor} == found
    wrong = set[tuple[str, str]]()
    for name, file in modules().items():
        place = top(name)
        for node in nodes(file) if place in floor else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE.name:
                others = {top(f"{node.module}.{one.name}") for one in node.names} & {*floor}
                wrong |= {(place, other) for other in others if other != place and floor[other] <= floor[place]}
    assert not wrong


# Codes of errors


def listed() -> list[str]:
    """Return the codes that the docstring of the module lists, in its order."""
    return re.findall(r"`([a-z]+(?:-[a-z]+)+)`", errors.__doc__ or "")


def raised() -> set[str]:
    """Return the codes that the package's source gives errors."""
    codes = {"field-unknown", "flag-unknown", "option-unknown", "choice-unknown", "file-not-written", "not-finite"}
    for file in modules().values():
        for node in nodes(file):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
                continue
            if node.func.id in ("UserError", "RowError"):
                first = node.args[0]
                if isinstance(first, ast.Constant):
                    codes.add(str(first.value))
                else:
                    assert ast.unparse(first).endswith("code"), f"{file}:{node.lineno} has no code"
    return codes


def test_codes_of_errors_are_described() -> None:
    """The docstring lists each code once, and no other."""
    codes = listed()
    assert len(set(codes)) == len(codes)
    assert set(codes) == raised()
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)+", code) for code in codes)


# Files


# What opens files by itself, and why it may.
ALLOWED = {
    "host/files.py": "the one place",
    "cli/terminal.py": "the null device",
    "benchmarks/ahead_of_time.py": "a temporary file, for a tool to read",
    "benchmarks/campaign.py": "what a stage prints, while it runs",
    "examples/antibody.py": "a folder of its own",
}
WRITES = {"write_text", "write_bytes", "savez", "savetxt", "save_file", "save_pretrained", "dump", "rename", "tofile"}


def test_nothing_else_writes_files() -> None:
    """By the names of the calls: a file opened for writing, and the methods that write one."""
    others = [path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    found = []
    for path in sorted([*modules().values(), *others]):
        name = str(path.relative_to(ROOT)).removeprefix("dllm_sampler/")
        for node in nodes(path) if name not in ALLOWED else ():
            if isinstance(node, ast.Call) and _writes(node):
                found.append(f"{name}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert found == []


def _writes(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in WRITES | {"open", "save", "savefig", "replace"}:
        return False
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    texts = [one.value for one in (*call.args, *(key.value for key in call.keywords)) if isinstance(one, ast.Constant)]
    if name == "open":
        return owner == "os" or any(isinstance(one, str) and one.strip("bt+") in ("w", "a", "x") for one in texts)
    if name == "save":
        return owner in ("torch", "np", "numpy")
    if name == "savefig":  # into memory first
        return ast.unparse(call.args[0]) not in ("out", "drawn")
    if name == "replace":  # of paths; texts and dataclasses have one, too
        return owner == "os" or (bool(owner) and len(call.args) == 1 and isinstance(call.args[0], ast.Name))
    return name in WRITES
