"""The scheduler of CONTRIBUTING.md, taken out of the page and run as its steps say."""

import re
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dllm_sampler import config
from dllm_sampler.cli.main import main
from tests.contract import test_fired
from tests.contract.cases import Case
from tests.contract.test_batching import test_a_row_in_a_batch_is_the_row_alone as alone_as_in_a_batch
from tests.contract.test_by_confidence import test_a_factor_on_confidences_is_felt_where_it_is_said_to_be as felt
from tests.contract.test_guarantees import test_progress_and_termination as ends
from tests.sampling import few

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
MODULE = "dllm_sampler.schedulers.margin"


def block(language: str, beginning: str) -> str:
    """The block of code that begins so."""
    found = [textwrap.dedent(code) for code in re.findall(rf"^ *```{language}\n(.*?)^ *```", PAGE, re.M | re.S)]
    return next(code for code in found if code.startswith(beginning))


@pytest.fixture
def margin(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Its settings, the module where step 1 puts it."""
    module = ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    exec(compile(block("python", '"""Margin'), "margin.py", "exec"), vars(module))
    entry = config.described("margin", block("yaml", "# Commits"))
    assert entry.about and entry.paper
    return {"name": "margin", **entry.settings}


def test_the_yaml_is_the_class(margin: dict[str, Any]) -> None:
    built = config.build("scheduler", margin)
    assert {"name": "margin", "_target_": f"{MODULE}.Margin", **asdict(built)} == margin


@few(("toy", "cache"), [("llada", "dual"), ("dream", "none"), ("causal", "block_causal")])
def test_the_contract_holds(toy: str, cache: str, margin: dict[str, Any]) -> None:
    rest = {"cache": {"name": cache}, "blocks": {"name": "fixed", "length": 5}, "stop": {"name": "prefix"}}
    case = Case(toy, margin, **rest, guide={"name": "none"})
    alone_as_in_a_batch(case)
    ends(case)


def test_it_says_truly_that_it_does_not_go_by_confidence(margin: dict[str, Any]) -> None:
    felt(margin)


def test_it_needs_no_row_in_the_table_of_mechanisms(margin: dict[str, Any]) -> None:
    assert test_fired.acts("scheduler", margin)


def test_as_the_users_own_file(
    margin: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf" / "scheduler").mkdir(parents=True)
    (tmp_path / "conf" / "scheduler" / "margin.yaml").write_text(block("yaml", "# Commits"))
    monkeypatch.chdir(tmp_path)
    assert main(["--help", "scheduler=margin"]) == 0
    assert "scheduler.margin=0.5" in capsys.readouterr().out
    assert main(["scheduler=margin", "sort: Dan, Ada, Cal", "device=cpu"]) == 0
    assert capsys.readouterr().out == "Ada, Cal, Dan\n"
