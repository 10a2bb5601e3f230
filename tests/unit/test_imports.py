"""Imports: none runs in a circle, and pages and typos do not wait for torch, which takes seconds."""

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import dllm_sampler

PACKAGE = Path(dllm_sampler.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"

CODE = """
import importlib, json, sys
said = []
for module, line in json.loads(sys.argv[1]):
    main = importlib.import_module(module).main
    try:
        status = main(line)
    except SystemExit as end:
        status = end.code
    heavy = {name.partition(".")[0] for name in sys.modules} & {"torch", "transformers"}
    said.append([module, line, status, sorted(heavy)])
print(json.dumps(said))
"""
PAGES = [["--help"], ["--version"]]
TYPOS = {
    "dllm_sampler.cli.main": [
        ["copy: Ada", "scheduler=treshold"],
        ["copy: Ada", "scheduler.treshold=0.5"],
        ["copy: Ada", "tempreature=1"],
        ["copy: Ada", "seed=abc"],
        ["copy: Ada", "dtype=fp16"],
        ["copy: Ada", "stream=yes"],
        ["copy: Ada", "output=out.csv"],
        ["copy: Ada", "output=" + "a" * 5000],
        ["copy: Ada", "model=~nobody-at-all/x"],
        ["copy: Ada", "model.revision=main"],
        ["copy: Ada", "model.mask_id=true"],
        ["copy: Ada", "hydra.run.dir="],
        ["copy: Ada", "samples=99999999"],
        ["prompts_file=gone.txt"],
        ["--inof"],
    ],
    "dllm_sampler.eval.command": [["cache=duel"], ["task.operatio=sort"], ["batch_size=many"]],
    "dllm_sampler.eval.tuning": [
        ["tune.trails=3"],
        ["workers=2"],
        ["tune.name=a", "task=minni"],
        ["tune.name=a", "batch_siz=2"],
    ],
    "dllm_sampler.training.cli": [["train=min"], ["train=mini", "train.step=3"]],
    "dllm_sampler.integrations.__main__": [
        ["scheduler=klas"],
        ["temperture=1"],
        ["cache=dual"],
        ["seed=3"],
        ["klass"],
        ["temperature=hot"],
        ["experiment=gone"],
    ],
    "dllm_sampler.eval.report.command": [["gone"], ["--replay=x"]],
}


def test_pages_and_typos_do_not_import_torch(tmp_path: Path) -> None:
    """In one process for all of them: what none imports is not there at the end either."""
    pages = [(module, page) for module in TYPOS for page in (PAGES[:1] if module.endswith("report.command") else PAGES)]
    typos = [(module, line) for module in TYPOS for line in TYPOS[module]]
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(pages + typos)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == [[*one, 0, []] for one in pages] + [[*one, 2, []] for one in typos]
    assert done.stderr.count("\n") == len(typos), "one sentence each"


def modules() -> dict[str, Path]:
    """The package's files by the names under which they are imported."""
    found = {}
    for folder in (PACKAGE, PACKAGE / "eval"):  # the second is a link, which `rglob` does not follow
        for file in folder.rglob("*.py"):
            parts = (PACKAGE.name, *file.relative_to(PACKAGE).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


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


@functools.cache
def imports(source: str) -> list[str]:
    return list(imported(ast.parse(source)))


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """The modules that each module imports, of those in `sources`."""

    def of(name: str) -> Iterator[str]:
        for full in imports(sources[name]):
            yield full if full in sources else full.rpartition(".")[0]

    return {name: {one for one in of(name) if one in sources and one != name} for name in sources}


def test_no_import_runs_in_a_circle() -> None:
    sources = {name: file.read_text(encoding="utf-8") for name, file in modules().items()}
    assert "dllm_sampler.eval.runner" in sources
    TopologicalSorter(graph(sources)).prepare()
    sources["dllm_sampler.core.values"] += "\ndef late():\n    from dllm_sampler.core import packing\n"
    with pytest.raises(CycleError):
        TopologicalSorter(graph(sources)).prepare()


def top(module: str) -> str:
    """The folder of the package, or the file at its top, that a module is in."""
    return [*module.split("."), ""][1]


def test_the_drawing_of_the_folders_is_true() -> None:
    """Each imports only from lines below its own. What only a type checker imports counts, too."""
    (drawing,) = re.findall(r"^```\n(│  eval/.+?)```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    lines = [
        re.findall(r"(\w+)(?:/|\.py)(?=  |\n|\Z)", line.split("  ", 1)[1].rstrip()) for line in drawing.splitlines()
    ]
    floor = {name: at for at, line in enumerate(lines) for name in line}
    found = {name for module in modules() if (name := top(module)) not in ("", "conf")}
    assert {*floor} == found
    wrong = set[tuple[str, str]]()
    for name, file in modules().items():
        tree, place = ast.parse(file.read_text(encoding="utf-8")), top(name)
        for node in ast.walk(tree) if place in floor else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE.name:
                others = {top(f"{node.module}.{one.name}") for one in node.names} & {*floor}
                wrong |= {(place, other) for other in others if other != place and floor[other] <= floor[place]}
    assert not wrong
