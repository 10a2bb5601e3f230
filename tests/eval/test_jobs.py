"""From words to configurations."""

from pathlib import Path

import pytest

from dllm_sampler.eval.jobs import job, jobs, values
from tests.refusals import refused
from tests.sampling import each


def test_every_combination_once_and_in_order() -> None:
    found = jobs(["scheduler=threshold,wino,threshold", "task.operation=copy,insert randomly"])
    said = [(one.choices["scheduler"], one.task["operation"]) for one in found]
    assert said == [(s, t) for s in ("threshold", "wino") for t in ("copy", "insert randomly")]
    assert len({one.name for one in found}) == 4
    alone = [job([f"scheduler={scheduler}", f"task.operation={task}"]) for scheduler, task in said]
    assert [one.identity for one in alone] == [one.identity for one in found], "as if composed alone"


def test_values() -> None:
    assert values("scheduler.threshold=0.5,0.9") == ["scheduler.threshold=0.5", "scheduler.threshold=0.9"]
    assert values("batch_size=range(1,4)") == ["batch_size=1", "batch_size=2", "batch_size=3"]
    assert values("cache=glob(dk*)") == ["cache=dkv", "cache=dkv_greedy"]
    assert values("guide=[temperature,top_p]") == ["guide=[temperature,top_p]"]
    assert values("output=a,b") == ["output=a,b"]
    assert values("guide.regex.pattern=[a-z]{2,3}") == ["guide.regex.pattern=[a-z]{2,3}"]
    assert values("model=mini,org/other") == ["model=mini", "model=org/other"]


def test_what_changes_no_answer_is_the_same_run() -> None:
    plain = job([])
    assert job(["output=elsewhere", "workers=3", "report=r.html"]).name == plain.name
    for word in ("seed=1", "batch_size=3", "cache=none", "task.count=5", "temperature=1", "scheduler.threshold=0.8"):
        assert job([word]).name != plain.name, word


@each(
    ("words", "sentence"),
    [
        (["sheduler=wino"], "option-unknown"),
        (["scheduler=threshold,wno"], "choice-unknown: 'wno'"),
        (["scheduler.tresh=1"], "field-unknown: scheduler=threshold, 'tresh', 'threshold'"),
        (["task=minni"], "choice-unknown: 'minni', 'mini'"),
        (["task.operation=copy,cpoy"], "choice-unknown: task.operation, 'cpoy', 'copy'"),
        (["task.opertion=copy"], "field-unknown: task=mini, 'opertion'"),
        (["task.count=0"], "option-range: task.count"),
        (["workers=0"], "option-range: workers"),
        (["workers=5000"], "option-range: workers"),
        (["threads=99999999999"], "option-range: 4096"),
        (["batch_size=x"], "option-type: batch_size"),
        (["suite=copare"], "choice-unknown: 'copare', 'compare'"),
        (["scheduler=glob(x*)"], "choice-unknown: scheduler=glob"),
        (["task.operation=glob(*)"], "option-syntax"),
        (["scheduler=[threshold,wino]"], "option-missing: scheduler=[threshold"),
    ],
)
def test_mistakes_are_sentences(words: list[str], sentence: str) -> None:
    with refused(sentence):
        jobs(words)


def test_a_suite_of_ones_own_and_words_that_overrule_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf" / "suite").mkdir(parents=True)
    sweeps = "  - [scheduler=threshold, 'scheduler.threshold=0.5,0.9']\n  - [scheduler=wino]\n"
    suite = f"common: [task.count=3]\nsweeps:\n{sweeps}"
    (tmp_path / "conf" / "suite" / "mine.yaml").write_text(suite)
    monkeypatch.chdir(tmp_path)
    assert [one.choices["scheduler"] for one in jobs(["suite=mine"])] == ["threshold", "threshold", "wino"]
    assert {one.task["count"] for one in jobs(["suite=mine"])} == {3}
    assert {one.task["count"] for one in jobs(["suite=mine", "task.count=7"])} == {7}
    other = jobs(["suite=mine", "task=mini", "scheduler=factor"])
    assert [(one.choices["scheduler"], one.task["count"]) for one in other] == [("factor", 100)], "with its own fields"


@each(
    ("text", "sentence"),
    [
        ("sweeps:\n  - [scheduler: threshold]\n", "config-invalid"),
        ("sweeps:\n  - scheduler=threshold\n", "config-invalid: 'scheduler=threshold'"),
        ("sweeps: [[scheduler=wino]]\ncommon: seed=1\n", "config-invalid"),
        ("- [scheduler=threshold]\n", "file-unreadable: conf/suite/mine.yaml"),
        ("sweeps:\n  - [wino\ncommon: 3\n", "file-unreadable: mine.yaml, ']', ':'"),
        ("sweeps: wino\n", "config-invalid: sweeps is 'wino'"),
        ("title: mine\nsweeps: [[scheduler=wino]]\n", "config-invalid: 'title'"),
    ],
)
def test_mistakes_in_a_suite(text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf" / "suite").mkdir(parents=True)
    (tmp_path / "conf" / "suite" / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    with refused(sentence):
        jobs(["suite=mine"])


def test_a_file_with_the_name_of_ours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf" / "scheduler").mkdir(parents=True)
    text = "# Mine.\n_target_: dllm_sampler.schedulers.threshold.Threshold\nthreshold: 0.25\n"
    (tmp_path / "conf" / "scheduler" / "threshold.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    with refused("choice-taken: conf/scheduler/threshold.yaml"):
        job([])
