"""`dllm-eval` as a command: its table, its refusals, its mistakes."""

import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from rich.console import Console

from dllm_sampler.config import PACKAGE
from dllm_sampler.eval import command
from dllm_sampler.eval.folders import RunFolder
from dllm_sampler.eval.jobs import jobs
from dllm_sampler.eval.launch import launch, run_all
from dllm_sampler.eval.report.data import compare, load
from dllm_sampler.eval.runner import Share
from dllm_sampler.schedulers.threshold import Threshold
from tests.eval.made import record, run
from tests.sampling import each


def test_options_that_came_later_leave_old_runs_their_names() -> None:
    (old,) = jobs(["task=mini"])
    assert not {"backend", "cuda_graph", "compile", "judge"} & old.identity.keys()
    assert "position_temperature" not in old.identity["scheduler"]
    assert "batching" not in jobs(["task=mini", "batching=static"])[0].identity
    assert old.identity["batching"] == "in_flight", "runs of before were static"
    (new,) = jobs(["task=mini", "backend=torch", "compile=step"])
    assert (new.identity["backend"], new.identity["compile"]) == ("torch", "step") and new.name != old.name


def test_what_cannot_run_is_said_and_the_rest_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["scheduler=threshold,wino", "cache=dual", "task.count=2", f"output={tmp_path}", "device=cpu"]
    assert command.main(words) == 0
    out = capsys.readouterr().out
    assert "cannot run wino" in out and "cache=none" in out and "\n1 run in " in out
    assert command.main([*words[1:], "scheduler=wino"]) == 2
    assert "cache=none" in capsys.readouterr().err
    assert command.main(["schedular=x"]) == 2
    assert command.main(["foo"]) == 2


@pytest.mark.slow
def test_a_table_in_a_file_has_the_width_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["scheduler=slowfast", "scheduler.threshold=0.1,0.9", "cache=none,dual", "task.operation=copy,shuffle"]
    assert command.main([*words, "task.count=1", f"output={tmp_path}", "device=cpu", "oracle=false"]) == 0
    head, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.strip()][:10]
    assert "tokens/forward" in head and head.rstrip().endswith("oracle's share")
    assert len(rows) == 8 and all(" copy " in row or " shuffle " in row for row in rows)


def test_a_narrow_terminal_gets_fewer_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """No number is broken over lines: each configuration and its figures are on a line of their own."""
    found = compare([run([record()], name, task) for name in ("fixed", "wino") for task in ("copy", "sort")])
    for width, heads in ((200, 9), (70, 6), (50, 4)):
        command.show(jobs(["task.count=1"]), {}, found, Console(width=width, force_terminal=True, color_system=None))
        head, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
        assert len(re.split(" {2,}", head.strip())) == heads, head
        for name, line in zip(("fixed", "fixed", "wino", "wino"), rows, strict=False):
            assert re.search(rf"{name}.* 100\.0 .*2\.00", line), line
        said = "Left out, since the terminal is narrow: " in " ".join(rows)
        assert said is (width < 200)


@pytest.mark.slow
def test_the_report_covers_the_output_folder(tmp_path: Path) -> None:
    """Also what an earlier call ran; what cannot be read there is said before anything runs."""
    pytest.importorskip("matplotlib")
    few = ["task.count=1", f"output={tmp_path / 'runs'}", "device=cpu", "oracle=false"]
    assert command.main(["scheduler=fixed", *few]) == 0
    assert command.main(["scheduler=wino", *few, f"report={tmp_path / 'report.html'}"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert '"label":"fixed"' in page and '"label":"wino"' in page


def test_a_run_of_another_schema_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["scheduler=threshold,fixed", "task.count=1", f"output={tmp_path}", "device=cpu"]
    _, old = (RunFolder(job.folder) for job in jobs(words))
    old.path.mkdir()
    (old.path / "run.json").write_text('{"schema": 1}')
    (old.path / "samples.jsonl").touch()
    assert command.main(words) == 2
    assert f"{old.path}/run.json is from another version of dllm_sampler (schema 1, not 2)." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [old.path.name], "nothing was run before that"


def test_a_refusal_stands_whoever_begins_later(tmp_path: Path) -> None:
    (one,) = jobs(["task.count=2", f"output={tmp_path}"])
    folder = RunFolder(one.folder)
    folder.begin(one, "cpu")
    folder.refuse("it is too slow")
    folder.begin(one, "cpu")
    folder.begin(one, "mps")  # another process, elsewhere
    about = folder.about()
    assert about is not None and about["refused"] == "it is too slow" and len(about["environments"]) == 2
    assert launch([], [one], Console(quiet=True)) == {}, "a new command tries again"
    assert (about := folder.about()) is not None and about["refused"] is None


@each(
    ("wrong", "sentence"),
    [
        (lambda: [][1], "IndexError: list index out of range"),
        (lambda: None, "scheduler=threshold: tell returned NoneType. Return a tuple (edit, carry)."),
    ],
)
def test_an_error_in_a_scheduler_ends_its_run_alone(
    wrong: Any, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tell = Threshold.tell

    def fails(self: Threshold, *args: Any) -> Any:
        return tell(self, *args) if self.threshold == 0.5 else wrong()

    monkeypatch.setattr(Threshold, "tell", fails)
    words = ["scheduler=threshold", "scheduler.threshold=0.9,0.5", "task.count=2", "device=cpu", f"output={tmp_path}"]
    assert command.main(words) == 2
    said, first = capsys.readouterr().err, jobs(words)[0]
    assert sum(line.endswith(sentence) for line in said.splitlines()) == 1
    assert said.splitlines()[-1] == (
        f"dllm-eval: this run ended with an error that is printed above: {first.name}."
        " Correct the cause, then rerun the command to resume."
    )
    assert [RunFolder(job.folder).complete for job in jobs(words)] == [False, True]
    monkeypatch.undo()
    assert command.main(words) == 0 and "cannot run" not in capsys.readouterr().out


@each(
    ("words", "sentence"),
    [
        (["device=cudaa"], "'cudaa'"),
        (["device=cuda:99"], "device=cuda:99"),
        (["device=cuda:99", "workers=2"], "device=cuda:99"),
        (["output=file"], "output=file: file is a file, but must be a folder"),
        (["output=file/below"], "file/below: "),
        (["output="], "output is empty. Name a path"),
        (["seed=range(5,1)"], "seed=range(5,1) lists no values"),
        (["seed=range(0,3,0)"], "seed=range(0,3,0) lists no values"),
        (["temperature=interval(0,1)"], "temperature=interval(0,1) lists no values"),
        (["seed=range(0,nan)"], "seed=range(0,nan) lists no values"),
        (["device=cpu,cuda"], "device=cpu,cuda has several values"),
        (["seed=range(1,1000000000)"], "seed=range(1,1000000000) makes over 10000 runs"),
        (["seed=range(0,200)", "temperature=range(0,200)"], "makes over 10000 runs"),
        (["report=report.pdf"], "report.pdf should end in .html"),
        (["report=file/x.html"], "report=file/x.html: file is a file, but must be a folder"),
        (["hydra/launchr=slurm"], "hydra/launchr=slurm"),
        (["hydra.launcher.partition=gpu"], "hydra/launcher=NAME"),
        (["hydra/launchr=joblib", "workers=2"], "Did you mean 'hydra/launcher'"),
        (["hydra.launcher.n_jbs=2", "workers=2"], "Did you mean 'hydra.launcher.n_jobs'"),
        (["hydra/launcher=jobbib"], "unknown hydra/launcher 'jobbib'. Did you mean 'joblib'"),
    ],
)
def test_mistakes_are_sentences_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    if any("launch" in word for word in words):
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
        pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("a file")
    assert command.main(["task.count=2", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.rglob("run.json"))


def test_a_missing_launcher_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ConfigLoaderImpl, "get_group_options", lambda *_, **__: ["basic"])
    assert command.main(["task.count=2", "hydra/launcher=unheard_of"]) == 2
    assert "Run pip install -c constraints.txt -e '.[eval]'" in capsys.readouterr().err


def test_missing_samples_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["task.count=2", "batch_size=1", f"output={tmp_path}", "device=cpu"]
    found = jobs(words)
    run_all(found, Share(0, 2), "cpu", lambda job: None, lambda done: None)
    command.show(found, {}, load([tmp_path]), Console())
    assert "1 sample is missing" in capsys.readouterr().out


def test_answers_that_max_steps_ended_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["task.count=2", "max_steps=1", "scheduler=fixed,threshold", f"output={tmp_path}", "device=cpu"]
    assert command.main(words) == 0
    said = capsys.readouterr().err.splitlines()
    note = "fixed: 2 of 2 answers stopped at max_steps before they were complete. Set a larger max_steps, or null."
    assert [one for one in said if one] == [note]


def test_the_slurm_launcher_is_submitits() -> None:
    pytest.importorskip("submitit")
    with initialize_config_module(PACKAGE, version_base="1.3"):
        cfg = compose("eval", overrides=["hydra/launcher=slurm", "hydra.sweep.dir=here"], return_hydra_config=True)
    assert cfg.hydra.launcher._target_.endswith("SlurmLauncher")
    assert cfg.hydra.launcher.gpus_per_node == 1 and cfg.hydra.launcher.submitit_folder == "here/.submitit/%j"


def test_the_table_says_how_sure_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Samples, intervals, and the front of each task alone."""
    slow, fast = ([record(index, nfe=nfe) for index in range(4)] for nfe in (6, 2))
    lost = [record(index, nfe=1, scores={"exact_match": 0.0}) for index in range(4)]
    found = compare(
        [
            *(run(slow, "fixed", task) for task in ("copy", "sort")),
            *(run(fast, "wino", task) for task in ("copy", "sort")),
            *(run(some, "klass", task) for some, task in ((fast, "copy"), (lost, "sort"))),
            *(run(lost, "dus", task) for task in ("copy", "sort")),
            *(run(some, "rcr", task) for some, task in ((fast, "copy"), (slow, "sort"))),
        ]
    )
    command.show(jobs(["task.count=1"]), {}, found, Console(width=200))
    out = capsys.readouterr().out
    rows = {tuple(line[2:].split()[:2]): line for line in out.splitlines()[3:13]}
    assert {name for name, line in rows.items() if line.strip().startswith("*")} == {
        ("wino", "copy"), ("klass", "copy"), ("dus", "copy"), ("rcr", "copy"),
        ("wino", "sort"), ("klass", "sort"), ("dus", "sort"),
    }  # fmt: skip
    assert " 4   100.0   [51.0, 100.0] " in rows["fixed", "copy"] and " 0.0     [0.0, 49.0] " in rows["dus", "sort"]
    assert "* Pareto front: " in out and "95 % intervals, Wilson's for right or wrong answers, else bootstrap" in out
