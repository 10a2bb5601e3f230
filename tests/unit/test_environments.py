"""`tests/environments.py`: its table, and what becomes of environments that fail, hang or cannot be made."""

from __future__ import annotations

import json
import os
import re
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import environments, versions
from tests.tables import markdown
from tests.unit.test_campaign import runs
from tests.versions import ENVIRONMENTS, PINNED, ROOT, interpreter, requirements

pytestmark = pytest.mark.slow

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="one"/>
<testcase classname="a" name="two"><skipped message="no luck"/></testcase>
{}</testsuite></testsuites>"""
FAILURE = '<testcase classname="a" name="three"><failure/></testcase>'
# An interpreter whose environment is a copy of itself; the environment's name says what pip and pytest do.
PYTHON = """#!/bin/sh
case "$1 $2 $0" in
  "-m venv "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  "-m pip "*/unresolved/*) echo "ERROR: no such version"; exit 1 ;;
  "-m pip "*) ;;
  "-m pytest "*) for word; do case "$word" in --junitxml=*) report="${word#*=}" ;; esac; done
    case "$0" in */failing/*) kind=failed ;; */dead/*) exit 3 ;; *) kind=passed ;; esac
    cp "$(dirname "$report")/$kind" "$report"; [ $kind = passed ] ;;
  *) echo '{"python": "9.9.1", "torch": "8.7"}' ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for results; there is a Python 9.9, which is scripted, and no 9.8."""
    python = tmp_path / "python9.9"
    python.write_text(PYTHON)
    python.chmod(0o755)
    (tmp_path / "passed").write_text(REPORT.format(""))
    (tmp_path / "failed").write_text(REPORT.format(FAILURE))
    names = {"unresolved": "9.9", "failing": "9.9", "dead": "9.9", "missing": "9.8", "good": "9.9"}
    found = [replace(ENVIRONMENTS[0], name=name, python=version) for name, version in names.items()]
    monkeypatch.setattr(environments, "ENVIRONMENTS", found)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    return tmp_path


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / environments.FILE).read_text())["environments"]


def test_what_fails_does_not_stop_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert environments.main(["--out", str(folder)]) == 1
    told, pins = f"see {folder}", "triton 3.4.0 numpy 2.0.0 transformers 5.0.0 torchao 0.16.0"
    assert re.sub(r"\d+ \+ \d+ s", "TIME", capsys.readouterr().out).splitlines() == [
        f"unresolved: not installed (python 9.9 torch 2.8.0 {pins}) {told}/unresolved.log",
        f"failing: failed: 1 passed, 1 failed, 1 skipped, TIME (python 9.9.1 torch 8.7 {pins})",
        f"dead: failed, TIME (python 9.9.1 torch 8.7 {pins}) {told}/dead.log",
        f"missing: no interpreter (python 9.8 torch 2.8.0 {pins}) there is no python9.8 here",
        f"good: passed: 1 passed, 0 failed, 1 skipped, TIME (python 9.9.1 torch 8.7 {pins})",
    ]
    found = results(folder)
    assert found["failing"]["failed"] == ["a::three"] and found["good"]["skipped"] == {"no luck": 1}
    assert "ERROR: no such version" in (folder / "unresolved.log").read_text()
    assert "torch==2.8.0\n" in (folder / "good.txt").read_text()
    assert not [name for name in found if (folder / name).exists()], "an environment is removed after its tests"
    del found["dead"]
    rows = {row[0]: row[1:3] + row[8:9] for row in markdown.tables(environments.table(found))[0][1:]}
    assert rows == {
        "unresolved": ["9.9", "2.8.0", "not installed"],
        "failing": ["9.9.1", "8.7", "failed, 1 failed, 1 skipped"],
        "dead": ["9.9", "2.8.0", "not run"],
        "missing": ["9.8", "2.8.0", "no interpreter"],
        "good": ["9.9.1", "8.7", "passed, 1 skipped"],
    }


def test_continue_leaves_out_what_has_passed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--out", str(folder), "--only", "good"]
    assert environments.main([*words, "--keep"]) == 0 and (folder / "good" / "bin" / "python").exists()
    before = results(folder)
    assert environments.main([*words, "--continue"]) == 0 and results(folder) == before
    capsys.readouterr()
    assert environments.main(["--out", str(folder), "--continue", "--only", "missing", "good", "dead"]) == 1
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["missing", "dead"]
    assert results(folder)["good"] == before["good"] and "missing" in results(folder)
    assert environments.main([*words, "--continue", "--tests", "tests/kernels"]) == 0
    assert capsys.readouterr().out.startswith("good: passed")  # these tests it has not passed before


def test_one_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    begun = time.monotonic()
    with (tmp_path / "log").open("w") as log:
        assert environments.call(["/bin/sh", "-c", "sleep 60 & echo $!; wait"], log, 0.1) is None
        assert environments.call(["/bin/sh", "-c", "exit 3"], log, 60) == 3
    assert time.monotonic() - begun < 30
    pid = int((tmp_path / "log").read_text().splitlines()[1])
    while runs(pid):  # a signal takes a moment
        assert time.monotonic() - begun < 30
        time.sleep(0.01)


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert environments.main(["--only", "py2"]) == 2
    assert "invalid choice: 'py2'" in capsys.readouterr().err
    (tmp_path / environments.FILE).write_text('{"environments": 3}')
    assert environments.main(["--out", str(tmp_path)]) == 2
    assert "is no result of this command: remove it" in capsys.readouterr().err


def test_a_name_that_runs_nothing_is_no_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pyenv's names on the PATH, of versions that it has not switched to."""
    for name, status in {"python9.9": 127, "versions/9.9.2/bin/python9.9": 0}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert interpreter("9.9") == str(tmp_path / "versions/9.9.2/bin/python9.9") and interpreter("9.8") is None


def test_the_table_covers_what_the_package_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least = dict(
        re.findall(
            r"^([\w-]+)(?:\[.*\])?>=([\d.]+)",
            "\n".join([*project["dependencies"], *project["optional-dependencies"]["quantize"]]),
            re.MULTILINE,
        )
    )
    assert len({one.name for one in ENVIRONMENTS}) == len(ENVIRONMENTS)
    oldest = next(one for one in ENVIRONMENTS if one.rest == "oldest")
    assert project["requires-python"] == f">={oldest.python}"
    for name in PINNED:
        version = getattr(oldest, name)
        assert version.startswith(least[name]) and version.removeprefix(least[name]) in ("", ".0"), name
    for one in ENVIRONMENTS:
        wanted, held = requirements(one)
        pinned = {name: version for name, _, version in (line.partition("==") for line in held)}
        assert {name: pinned.get(name, "") for name in PINNED} == {name: getattr(one, name) for name in PINNED}
        assert [line.partition("=")[0] for line in held].count("torch") == bool(one.torch)
        assert any(line.startswith("pytest>=") for line in wanted)
    _, held = requirements(oldest)
    assert f"hydra-core=={least['hydra-core']}" in held and not [line for line in held if ">=" in line or "[" in line]
    assert any(not requirements(one)[1] for one in ENVIRONMENTS), "one environment has the newest of everything"
    pages = [(ROOT / name).read_text() for name in ("docs/versions.md", "constraints.txt")]
    assert not [one.name for one in ENVIRONMENTS if one.name not in pages[0]]
    tested = next(one for one in ENVIRONMENTS if one.rest == "constraints.txt")
    assert all(f"\n{name}=={getattr(tested, name)}\n" in pages[1] for name in PINNED)


def test_private_modules_of_other_libraries_are_listed() -> None:
    """`tests/versions.py` lists what we use of the inside of other libraries: a release may change it."""
    page = versions.__doc__ or ""
    sources = [path for name in ("dllm_sampler", "eval") for path in (ROOT / name).rglob("*.py")]
    imports = re.compile(r"^ *(?:from|import) ((?!dllm_sampler)[\w.]*\._(?!_)[\w.]+)", re.MULTILINE)
    used = {name for path in sources for name in imports.findall(path.read_text(encoding="utf-8"))}
    assert used and not [name for name in used if f"`{name}`" not in page]
