"""Published figures: the table's schema, which rows belong to a run, and how far apart figures are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dllm_sampler.eval.curves import aup
from dllm_sampler.eval.measures import summary
from dllm_sampler.eval.protocols import published
from dllm_sampler.eval.protocols.__main__ import main
from dllm_sampler.eval.protocols.task import FORWARDS, TOKENS, ProtocolTask
from dllm_sampler.eval.report.data import Comparison, Run, compare
from dllm_sampler.eval.report.figure import draw, panels
from dllm_sampler.eval.report.page import page
from dllm_sampler.eval.report.published import beside, points, warnings
from dllm_sampler.eval.tasks.base import Answer
from tests.eval.made import HERE, record
from tests.refusals import refused

TABLE = Path(published.__file__).with_name("published.csv")


def ran(right: int, asked: int, scheduler: str, cache: str, task: str = "gsm8k", **fields: Any) -> Run:
    """A run of Fast-dLLM's protocol with LLaDA-8B-Instruct, of which some answers are right."""
    metric = {"gsm8k": "exact_match,flexible-extract", "minerva_math": "math_verify,none"}[task]
    other = {"gsm8k": "exact_match,strict-match", "minerva_math": "exact_match,none"}[task]
    grades = [{metric: float(index < right), other: 0.0} for index in range(asked)]
    records = [record(index, scores=one, nfe=100, canvas=6) for index, one in enumerate(grades)]
    choices = {"task": "protocol", "model": "llada-8b", "scheduler": scheduler, "blocks": "fixed", "stop": "none"}
    about = {
        "schema": 2, "name": f"{scheduler}-{cache}-{task}", "choices": {**choices, "cache": cache, "guide": "none"},
        "config": {
            "task": {
                "name": "protocol", "protocol": "fast-dllm", "task": task, "variant": "fast-dllm-llada/instruct",
                "canvas": 256, "count": None, "forwards": "all" if cache == "none" else "two-per-block",
            },
            "model": {"path": "GSAI-ML/LLaDA-8B-Instruct"}, "scheduler": {"name": scheduler, **fields},
            "blocks": {"name": "fixed", "length": 32}, "cache": {"name": cache}, "guide": [], "seed": 0,
        },
        "samples": asked, "score": metric, "dependency": None, "refused": None, "measures": None,
        "environments": [HERE],
    }  # fmt: skip
    return Run(about, records)


@pytest.fixture(scope="module")
def found() -> Comparison:
    prefix = ran(157, 200, "threshold", "prefix", threshold=0.9)
    return compare([prefix, ran(120, 200, "fixed", "none", steps=None)])


def test_how_forwards_are_counted_makes_no_other_task(found) -> None:
    assert list(found.tasks) == ["fast-dllm/gsm8k"]


def test_rows_of_sliding_windows_stand_beside_runs_of_them() -> None:
    """Accuracies of DSB's main table, for windows with and without a bound, and of fixed blocks."""
    runs = [ran(157, 200, "threshold", cache, threshold=0.9) for cache in ("sliding", "sliding", "none")]
    for run, width in zip(runs, (None, 32), strict=False):
        run.about["choices"]["blocks"] = "sliding"
        run.about["config"]["blocks"] = {"name": "sliding", "masks": 32, "max_width": width}
    greedy, constant, fixed = ({one.figure.accuracy for one in beside(compare([run]))} for run in runs)
    assert (greedy, constant) == ({80.29}, {80.14})
    assert 77.26 in fixed and not fixed & {77.94, 78.17, 78.54}


def test_every_matching_row_stands_beside_a_figure_and_no_average(found) -> None:
    rows = beside(found)
    prefix = [row for row in rows if row.figure.cache == "prefix"]
    assert {row.figure.method for row in prefix} == {"threshold"}
    assert {row.figure.source.partition(" arXiv")[0] for row in prefix} >= {"Fast-dLLM", "Streaming-dLLM"}
    table = next(row for row in prefix if "Table 1 (paper" in row.figure.source)
    assert (table.figure.accuracy, table.figure.gen_length, table.figure.block_length) == (78.5, "256", "32")
    share = 0.785
    assert table.z == pytest.approx((157 / 200 - share) / math.sqrt(share * (1 - share) * (1 / 1319 + 1 / 200)))
    assert abs(table.z) < 0.1
    assert table.ours[1] < 0.785 < table.ours[2]
    assert {row.figure.method for row in rows if row.figure.cache != "prefix"} == {"one per step"}


def test_a_figure_far_from_the_published_one_is_warned_of(found) -> None:
    rows = beside(found)
    assert all(row.z < -2 and "!" in row.cells[4] for row in rows if row.figure.method == "one per step")
    (sentence,) = warnings(rows)
    assert "chat template" in sentence
    assert warnings([row for row in rows if row.figure.cache == "prefix" and abs(row.z) < 2]) == []


def test_a_row_is_compared_in_its_own_metric() -> None:
    run = ran(33, 100, "threshold", "none", "minerva_math", threshold=0.9)
    assert {row.figure.metric.partition(" ")[0] for row in beside(compare([run])) if row.figure.metric} == {
        "math_verify"
    }
    assert all(row.ours[0] == 0.33 for row in beside(compare([run])))


def test_another_threshold_matches_no_row_that_states_one() -> None:
    run = ran(75, 100, "threshold", "prefix", threshold=0.5)
    assert not [row for row in beside(compare([run])) if "threshold 0.9" in row.figure.settings]


def test_z() -> None:
    assert published.z_score(0.80, 1319, 0.785, 1319) == pytest.approx(0.015 / (math.sqrt(2 * 0.785 * 0.215 / 1319)))
    assert math.isfinite(published.z_score(0.5, 10, 1.0, 164))


def test_the_page_and_the_picture(found) -> None:
    text = page(found, "Mine", 1)
    assert "Published figures" in text
    assert "arXiv 2505.22618 Table 1" in text
    (panel,) = panels(found, ["answer_tokens_per_forward"], published=True)
    assert len(panel.published) > 10
    assert panel.published == points(found, ["fast-dllm/gsm8k"], "answer_tokens_per_forward")
    assert draw(found, "svg", published=True).count(b"Fast-dLLM") > 0


def test_the_table_has_its_schema(capsys) -> None:
    assert main(["--check"]) == 0
    assert capsys.readouterr().out.startswith("ok: 788 figures of 13 works")


def written(folder: Path, text: str) -> str:
    file = folder / "figures.csv"
    file.write_text(text, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("file", ["gone", "tests"])
def test_a_table_that_cannot_be_read_is_named(file, capsys) -> None:
    assert main(["--check", file]) == 2
    assert f"Cannot read {file} (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "refusal"),
    [
        ("model,method", "modell,method", "file-invalid: columns"),
        (",ar,gsm8k", ",arr,gsm8k", "file-invalid: line 2, arr"),
        ("74.1", "741", "file-invalid: line 2, accuracy"),
        ("74.1", "about 74", "file-invalid: line 2, accuracy, about 74"),
        ("Qwen2.5-7B-Instruct", "", "file-invalid: line 2, model"),
        (",0,256,", ",none,256,", "file-invalid: line 2, shots"),
    ],
)
def test_a_damaged_table_is_named_with_its_line(old, new, refusal, tmp_path) -> None:
    text = TABLE.read_text(encoding="utf-8").replace(old, new, 1)
    with refused(refusal):
        published.read(written(tmp_path, text))


def test_a_row_twice_is_named(tmp_path) -> None:
    head, first, *_ = TABLE.read_text(encoding="utf-8").splitlines()
    with refused("file-invalid: line 3"):
        published.read(written(tmp_path, "\n".join([head, first, first])))


def test_aup_of_the_published_table_is_that_of_its_owners() -> None:
    rows = [row for row in published.figures() if "AUP_leaderboard/data_llada.yaml" in row.source]
    rows = [row for row in rows if row.task.startswith("gsm8k_cot")]
    best = max(row.accuracy or 0 for row in rows) / 100
    areas = {}
    for first, owner in ((1, "LLaDA-8B-Instruct"), (2, "Fast"), (0, "dParallel"), (0, "d3LLM")):
        mine = [row for row in rows if row.model.startswith("LLaDA-8B" if first else owner)]
        mine = mine[:1] if first == 1 else mine[1:] if first == 2 else mine
        areas[owner] = round(aup([(row.tpf or 0, (row.accuracy or 0) / 100) for row in mine], best), 1)
    assert areas == {"LLaDA-8B-Instruct": 72.5, "Fast": 205.8, "dParallel": 358.1, "d3LLM": 637.7}


def test_tokens_and_forwards_as_a_protocol_counts_them() -> None:
    early = record(0, scores={"x": 1.0}, nfe=9)
    counted = [
        record(1, scores={"x": 1.0, TOKENS: 3.0, FORWARDS: 2.0}, seconds=1.0, batch=1),
        record(2, scores={"x": 1.0, TOKENS: 5.0, FORWARDS: 6.0}, seconds=3.0, batch=1),
    ]
    found = summary([early, *counted], "x")
    assert found["protocol_tokens_per_forward"] == 1
    assert found["protocol_tokens_per_second"] == 2
    assert found["protocol_steps"] == 4
    assert summary([early], "x")["protocol_tokens_per_forward"] is None


def test_a_block_with_a_cache_counts_two_forwards_at_least() -> None:
    task = object.__new__(ProtocolTask)
    task.__dict__ |= {"protocol": "fast-dllm", "task": "gsm8k", "variant": None, "forwards": "two-per-block"}
    steps = [0] * 32 + [1] * 16 + [2] * 16 + [3, 4, 5, 6] * 8
    answer = Answer("", (), (5,) * len(steps), steps, 7)
    assert task._count_forwards(answer) == 2 + 2 + 4
    task.forwards = "all"
    assert task._count_forwards(answer) == 7
