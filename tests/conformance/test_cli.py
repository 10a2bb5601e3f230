"""`python -m tests.conformance`: the altered traces fail, every mistake is named."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import compare
from tests.conformance.__main__ import main
from tests.sampling import crossed

DATA = Path(__file__).parent / "data"
Raw = dict[str, Any]


def recorded(id: str) -> Raw:
    for file in (DATA / "traces").glob("*.jsonl"):
        for line in file.read_text().splitlines():
            if json.loads(line)["id"] == id:
                return json.loads(line)
    raise KeyError(id)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A trace folder with the checkpoints and no traces yet."""
    for name in ("tiny-llada", "tiny-dream"):
        (tmp_path / name).symlink_to(DATA / name)
    (tmp_path / "traces").mkdir()
    return tmp_path


def write(folder: Path, *records: Raw | str) -> None:
    content = [line if isinstance(line, str) else json.dumps(line) for line in records]
    (folder / "traces" / "some.jsonl").write_text("\n".join(content) + "\n")


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_as_a_module_with_one_system(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    other = recorded("dream-a-07") | {"system": "dream/other"}
    write(folder, recorded("fastdream-plain-a-01"), other)
    monkeypatch.setattr(sys, "argv", ["conformance", str(folder), "--system", "fast-dllm-dream/plain-threshold"])
    with pytest.raises(SystemExit) as ended, pytest.warns(RuntimeWarning, match="found in sys.modules"):
        runpy.run_module("tests.conformance", run_name="__main__")
    assert ended.value.code == 0
    assert last_line(capsys) == "conformance: 1 passed, 0 failed, 0 unsupported"


def test_help(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0
    assert "exit status" in capsys.readouterr().out


def test_a_system_without_plugins_is_no_failure(folder: Path, capsys: pytest.CaptureFixture[str]):
    write(folder, recorded("llada-vanilla-01") | {"system": "unheard-of", "model": "nowhere"})
    assert main([str(folder), "--json", str(folder / "out.json")]) == 0
    assert last_line(capsys) == "conformance: 0 passed, 0 failed, 1 unsupported"
    (verdict,) = json.loads((folder / "out.json").read_text())["lines"]
    assert verdict["status"] == "unsupported"
    assert verdict["reason"]


def test_a_random_run_without_its_draws_is_unsupported(folder: Path, capsys: pytest.CaptureFixture[str]):
    record = recorded("llada-vanilla-01")
    record["params"]["temperature"] = 0.5
    write(folder, record)
    assert main([str(folder)]) == 0
    assert last_line(capsys) == "conformance: 0 passed, 0 failed, 1 unsupported"


@pytest.mark.parametrize(
    ("id", "changed"),
    [
        ("llada-vanilla-01", {"confidence_floor": 0.1, "odd": 1}),
        ("adablock-none-01", {"remasking": "random"}),
        ("adablock-none-01", {"odd": 1}),
        ("dream-a-07", {"odd": False}),
    ],
)
def test_an_argument_that_nothing_acts_on_is_unsupported(id: str, changed: Raw, folder: Path):
    record = recorded(id)
    write(
        folder,
        record | {"params": record["params"] | {"nothing": None}},
        record | {"params": record["params"] | changed},
    )
    assert main([str(folder), "--json", str(folder / "out.json")]) == 0
    verdicts = json.loads((folder / "out.json").read_text())["lines"]
    assert [verdict["status"] for verdict in verdicts] == ["passed", "unsupported"]
    assert all(name in verdicts[1]["reason"] for name in changed)


def test_a_single_row_may_have_a_mask(folder: Path):
    record = recorded("llada-vanilla-cfg-01")
    ones = [1] * len(record["prompt_ids"])
    write(folder, *(record | {"params": record["params"] | {"attention_mask": mask}} for mask in (ones, [ones])))
    assert main([str(folder)]) == 0


def alter_ids(record: Raw) -> None:
    row = record["output_ids"]
    row = row[-1] if isinstance(row[0], list) else row
    row[-1] += 1


def alter_nfe(record: Raw) -> None:
    record["nfe"] += 1


def alter_steps(record: Raw) -> None:
    """The same positions, one forward later or earlier."""
    steps = record["steps"]
    if isinstance(record["prompt_ids"][0], list) and record["model"] == "tiny-dream":
        steps = steps[-1]
    first = next(k for k in range(len(steps) - 1) if steps[k] != steps[k + 1])
    steps[first], steps[first + 1] = steps[first + 1], steps[first]


def alter_by_an_idle_forward(record: Raw) -> None:
    """One more forward in the middle of a block is not a wasted one that the rule excuses."""
    record["steps"].insert(2, [])
    record["nfe"] += 1


ALTERED = [alter_ids, alter_nfe, alter_steps]


RECORDS = ["llada-vanilla-02", "llada-vanilla-leftpad-03", "fast-dllm-dual-threshold-02", "dream-a-batch"]


@pytest.mark.parametrize(("alter", "id"), crossed({one.__name__: one for one in ALTERED}, RECORDS, together=0))
def test_an_altered_record_fails(alter: Callable[[Raw], None], id: str, folder: Path, capsys):
    record = recorded(id)
    alter(record)
    write(folder, recorded(id), record)
    assert main([str(folder), "--json", str(folder / "out.json")]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "conformance: 1 passed, 1 failed, 0 unsupported"
    assert out[0].split() == [record["system"], "1/2"]
    verdict = json.loads((folder / "out.json").read_text())["lines"][1]
    assert verdict["status"] == "failed"
    assert out[1].strip() == f"first mismatch: {id}: {verdict['reason']}"
    assert "recorded" in verdict["reason"]


@pytest.mark.parametrize("id", ["fast-dllm-none-threshold-02", "fast-dllm-prefix-threshold-02", "dream-a-07"])
def test_an_idle_forward_in_the_middle_fails(id: str, folder: Path):
    record = recorded(id)
    alter_by_an_idle_forward(record)
    write(folder, record)
    assert main([str(folder)]) == 1


def test_only_the_wasted_forward_may_be_missing(folder: Path, capsys: pytest.CaptureFixture[str]):
    record = recorded("fast-dllm-prefix-threshold-02")
    assert record["steps"].count([]) == 1
    kept = record | {"steps": [step for step in record["steps"] if step], "nfe": record["nfe"] - 1}
    unnamed = record | {"nfe": record["nfe"] - 1}  # its entry is there, its count is not
    later = record | {"system": "fast-dllm-v1"}  # the later release wastes nothing
    write(folder, record, kept, unnamed, later)
    assert main([str(folder)]) == 1
    assert last_line(capsys) == "conformance: 2 passed, 2 failed, 0 unsupported"


def mistakes() -> dict[str, tuple[Callable[[Raw], Raw | str], str]]:
    """What to make of a good line, and what the error must say."""

    def params(record: Raw, **changed: Any) -> Raw:
        return record | {"params": record["params"] | changed}

    return {
        "not JSON": (lambda r: json.dumps(r)[:-9], "not JSON"),
        "no object": (lambda r: "[1, 2]", "JSON object"),
        "missing field": (lambda r: {k: v for k, v in r.items() if k != "nfe"}, "nfe"),
        "text for a number": (lambda r: r | {"nfe": "8"}, "nfe"),
        "negative token": (lambda r: r | {"output_ids": [-1]}, "output_ids"),
        "steps no lists": (lambda r: r | {"steps": [1, 2]}, "steps"),
        "batch against row": (lambda r: r | {"prompt_ids": [[1, 2]]}, "output_ids"),
        "empty prompt": (lambda r: r | {"prompt_ids": []}, "prompt_ids"),
        "other mask shape": (lambda r: r | {"attention_mask": [[1]]}, "attention_mask"),
        "no mask": (lambda r: params(r, attention_mask=7), "attention_mask"),
        "missing checkpoint": (lambda r: r | {"model": "nowhere"}, "nowhere"),
        "text for steps": (lambda r: params(r, steps="many"), "steps"),
        "zero blocks": (lambda r: params(r, block_length=0), "block_length"),
        "unknown cache": (lambda r: params(r, cache="magic"), "cache"),
    }


@pytest.mark.parametrize("mistake", mistakes())
def test_a_malformed_line_is_named(mistake: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    change, about = mistakes()[mistake]
    good = recorded("fast-dllm-none-threshold-02")
    write(folder, good, "", change(good))
    assert main([str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "some.jsonl, line 3" in captured.err
    assert about in captured.err


@pytest.mark.parametrize(("name", "value"), [("threshold", -1.0), ("cfg_scale", -1.0)])
def test_a_value_that_plug_ins_refuse_concerns_its_line_alone(
    name: str, value: float, folder: Path, capsys: pytest.CaptureFixture[str]
):
    good = recorded("fast-dllm-none-threshold-02")
    write(folder, good | {"params": good["params"] | {name: value}}, good)
    assert main([str(folder), "--json", str(folder / "verdicts.json")]) == 0
    assert last_line(capsys) == "conformance: 1 passed, 0 failed, 1 unsupported"
    refused, _ = json.loads((folder / "verdicts.json").read_text())["lines"]
    assert name in refused["reason"]


def test_a_batch_indexed_the_other_way_round_is_malformed(folder: Path, capsys: pytest.CaptureFixture[str]):
    record = recorded("dream-a-batch")
    write(folder, record | {"steps": [list(step) for step in zip(*record["steps"], strict=True)]})
    assert main([str(folder)]) == 2
    assert "some.jsonl, line 1: steps" in capsys.readouterr().err


def test_wrong_folders_names_and_arguments(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def sentence(*arguments: str) -> str:
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert len(captured.err.splitlines()) == 1
        return captured.err

    assert "there is no folder" in sentence(str(tmp_path / "nowhere"))
    assert "holds no traces" in sentence(str(folder))
    assert "holds no traces" in sentence(str(DATA / "tiny-llada"))
    write(folder, recorded("llada-vanilla-01"))
    assert "Did you mean 'llada-vanilla'" in sentence(str(folder), "--system", "lada-vanilla")
    assert "nowhere" in sentence(str(folder), "--json", str(folder / "nowhere" / "out.json"))
    assert "--magic" in sentence(str(folder), "--magic")
    assert "DIR" in sentence()
    (folder / "traces" / "some.jsonl").write_bytes(b"\xff\xfe")
    assert "cannot be read as text" in sentence(str(folder))


def test_rows_of_a_batch_wait_for_each_other():
    fast, slow = [[0, 1], [2], [3]], [[0], [1], [2, 3]]
    assert compare.lockstep([fast, slow], 2) == [[[0, 1], [], [2], [3]], [[0], [1], [2, 3], []]]


def test_waste_follows_a_block_that_one_forward_filled():
    steps = [[0, 1], [], [2], [3], [], [4, 5]]
    assert compare.without_waste(steps, 2) == [[0, 1], [2], [3], [], [4, 5]]


def test_a_system_that_is_no_name(folder: Path, capsys: pytest.CaptureFixture[str]):
    write(folder, recorded("llada-vanilla-01") | {"system": {"a": 1}})
    assert main([str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "some.jsonl, line 1" in said and "system" in said
