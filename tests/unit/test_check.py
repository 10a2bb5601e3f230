"""`python -m dllm_sampler.check`: what is wrong with a scheduler of the working directory is said in a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from dllm_sampler import config
from dllm_sampler.check import __main__ as command
from dllm_sampler.check.__main__ import main
from dllm_sampler.cli.main import main as sample
from tests.sampling import each, few

RULE = """
from dataclasses import dataclass

from dllm_sampler import Edit, Scheduler, Traits


@dataclass(frozen=True)
class Rule(Scheduler):
    count: int = 1

    @property
    def traits(self):
        return Traits(ranks_by_confidence=False{traits})

    def tell(self, canvas, query, readout, carry):
        eligible = canvas.eligible(query.positions)
        commit = eligible & (eligible.cumsum(1) <= self.count)
        {line}
        return Edit(readout.token[:, 0], commit), carry
"""
BROKEN = {
    "commit.any().item()": "A step reads the device: item(), bool(tensor) or int(tensor) (rule_of_mine.py, line 18, in",
    "commit &= readout.confidence[:, 0] >= readout.confidence.mean()": "A row of a batch differs from the row alone",
    "commit &= False": "Row 0 does not end: it has 10 masks after 10 forwards, and `bound` promises at most 10",
    "canvas.ids[:, 0] = 5": "The prompt of row 1 is [7, 1,",
    "commit.no_such_thing": "It raised AttributeError: 'Tensor' object has no attribute 'no_such_thing' (rule_of_mine",
    "return Edit(readout.token[:, 0] + 1000, commit), carry": "An edit commits token 10",
    "readout.margin + 1": "reads readout.margin, which is not measured",
}
UNDECLARED = {  # a trait: a rule that needs it, and what is said where it is not declared
    "revises": (
        "known = canvas.inside(query.positions) & ~eligible & (canvas.step == 1)[:, None];"
        " return Edit(readout.token[:, 0], commit, remask=known), carry",
        "A committed token changes, and `traits` says revises=False: position 0 of row 0 is token",
    ),
    "scheduled": (
        "commit = eligible & (eligible.cumsum(1) <= 1 + canvas.age[:, None])",
        "`traits` says scheduled=False, and a greater `canvas.age` changes what it commits.",
    ),
}
# Ends `tell`, and overrides `ask`. What the template adds after it is not reached.
ASKS_ALL = """return Edit(readout.token[:, 0], commit), carry

    def ask(self, canvas, carry):
        from dllm_sampler import Query

        return Query.window(canvas)"""


TOYS = command.TOYS
TRIED = {"cache": ["none", "exact"], "blocks": ["fixed"], "stop": ["none", "prefix"], "guide": ["none"]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the YAML of a scheduler. Few other plug-ins and networks are tried, which saves time."""
    names = config.names
    monkeypatch.setattr(config, "names", lambda group: TRIED.get(group) or names(group))
    monkeypatch.setattr(command, "TOYS", ("llada", "causal"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "rule_of_mine", raising=False)
    (tmp_path / "own" / "scheduler").mkdir(parents=True)
    (tmp_path / "own" / "scheduler" / "mine.yaml").write_text("# Mine.\n_target_: rule_of_mine.Rule\ncount: 2\n")
    return tmp_path


def run(folder: Path, line: str, *words: str, traits: str = "") -> int:
    (folder / "rule_of_mine.py").write_text(RULE.format(line=line, traits=traits))
    return main(["--config-dir", "own", "scheduler=mine", *words])


@few("line", BROKEN)
def test_what_is_broken_is_said(
    folder: Path, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "TOYS", TOYS)
    assert run(folder, line) == 1
    lines = capsys.readouterr().out.splitlines()
    said = [one for one in lines if one.startswith("FAILED")]
    assert any(BROKEN[line] in one for one in said), said
    hints = [after.strip() for one, after in pairwise(lines) if "A row of a batch differs" in one]
    assert all(hint.startswith("Look for a sum or mean over all rows") for hint in hints)
    ran = not any("It raised" in one or "An edit commits" in one or "not measured" in one for one in said)
    assert ran == ("    --  What `traits.scheduled` says is not tried: a promise above is broken." in lines)


@pytest.mark.parametrize("trait", UNDECLARED)
def test_a_trait_that_is_not_declared(folder: Path, trait: str, capsys: pytest.CaptureFixture[str]) -> None:
    rule, sentence = UNDECLARED[trait]
    assert run(folder, rule, traits=", asks='window'") == 1
    said = [one for one in capsys.readouterr().out.splitlines() if one.startswith("FAILED")]
    assert len(said) == 1 and sentence in said[0]


def test_an_answer_without_a_commit_names_the_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rule_of_mine.py").write_text(RULE.format(line="commit &= False", traits=""))
    assert sample(["--config-dir", "own", "scheduler=mine", "max_new_tokens=4", "copy: Ada"]) == 0
    assert "no token was committed. Check the scheduler: python -m dllm_sampler.check" in capsys.readouterr().err


def test_what_it_asks_about_is_declared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, ASKS_ALL) == 1
    said = [one for one in capsys.readouterr().out.splitlines() if one.startswith("FAILED")]
    assert len(said) == 1 and "`traits` says asks='masks', and `ask` names committed positions." in said[0]
    sys.modules.pop("rule_of_mine", None)
    assert run(folder, ASKS_ALL, traits=", asks='window'") == 0


@pytest.mark.slow
@pytest.mark.parametrize("trait", UNDECLARED)
def test_a_trait_that_is_declared(folder: Path, trait: str) -> None:
    sys.modules.pop("rule_of_mine", None)
    assert run(folder, UNDECLARED[trait][0], traits=f", asks='window', {trait}=True") == 0


@pytest.mark.slow
def test_what_is_kept_is_a_line_each(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRIED, "cache", ["none", "dual", "exact", "dkv_greedy"])
    assert run(folder, "pass", "scheduler.count=3") == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("scheduler=mine, on")
    assert [line[:8] for line in lines[:9]] == ["    ok  "] * 9
    assert lines[9] == "runs with cache: none, dual, exact"
    assert lines[-1].startswith("refused cache=dkv_greedy: cache=dkv_greedy must know before each forward")


@pytest.mark.parametrize(
    ("yaml", "said"),
    [
        ("cuont: 2", "scheduler=mine has no field 'cuont'. Did you mean 'count'?"),
        ("count: two", "scheduler.count='two' is invalid. Set a whole number"),
        ("_target_: rule_of_mine.Ruel", "scheduler=mine: _target_ rule_of_mine.Ruel cannot be imported"),
        ("_target_: torch.load", "scheduler=mine: _target_=torch.load"),
        ("_target_: null", "scheduler=mine: _target_"),
        ("count: ${gone}", "scheduler.count in a YAML file: Interpolation key 'gone' not found"),
        ("count: [", "mine.yaml cannot be read"),
        ("- a", "mine.yaml cannot be read (it should have names with values"),
        ("", "scheduler=mine: _target_"),
    ],
)
def test_a_mistake_in_the_yaml(folder: Path, yaml: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = "_target_: rule_of_mine.Rule\n" * yaml.startswith("c")
    (folder / "own" / "scheduler" / "mine.yaml").write_text(f"# Mine.\n{first}{yaml}\n")
    assert run(folder, "pass") == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and said in err


@pytest.mark.slow
def test_no_guide_is_a_choice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "pass", "guide=none") == 0
    out = capsys.readouterr().out
    assert out.startswith("scheduler=mine guide=none, on")
    assert "    ok  What `traits.ranks_by_confidence` says is true." in out


@pytest.mark.slow
def test_a_neighbour_of_the_file_is_not_found_as_by_the_other_commands(folder: Path) -> None:
    (folder / "neighbour.py").touch()
    (folder / "rule_of_mine.py").write_text("import neighbour\n" + RULE.format(line="pass", traits=""))
    command = [sys.executable, "-m", "dllm_sampler.check", "--config-dir", "own", "scheduler=mine"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONSAFEPATH": ""})
    assert done.returncode == 2
    assert "a file of the working directory cannot import neighbour.py" in done.stderr


@each(
    ("words", "said"),
    [
        ([], "Add scheduler=NAME"),
        (["temperature=1"], "temperature=1 does not set a plug-in"),
        (["scheduler=treshold"], "Did you mean 'threshold'"),
        (["scheduler=threshold", "scheduler.treshold=1"], "Did you mean"),
    ],
)
def test_mistakes(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err
