"""Nothing that lies in a directory runs because a command is called there: what counts was typed (docs/security.md)."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from dllm_sampler import Sampler, config
from dllm_sampler.cli.main import main as sample
from dllm_sampler.cli.user_files import FLAG
from dllm_sampler.errors import UserError
from dllm_sampler.eval.command import main as evaluate
from dllm_sampler.eval.jobs import jobs, lines
from dllm_sampler.eval.tuning import main as tune
from dllm_sampler.training.cli import main as train
from tests.refusals import refused
from tests.sampling import each

POPEN = "_target_: subprocess.Popen\nargs: [touch, RAN]\n"
OURS = "dllm_sampler.schedulers.threshold.Threshold"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a module that leaves a mark when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    (tmp_path / "evil.py").write_text("open('RAN', 'w').close()\n")
    return tmp_path


def put(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


EVIL = "_target_: evil.Evil\n"
PLANTED = {  # a file in ./conf, and a command that does not name it
    "scheduler/threshold": (POPEN, sample, ["copy: Ada"]),
    "cache/exact": (POPEN, sample, ["copy: Ada"]),
    "model/mini": ("path: x/y\ntrust_remote_code: true\n", sample, ["copy: Ada"]),
    "stop/prefix": (EVIL, sample, ["copy: Ada"]),
    "blocks/fixed": (f"# @package _global_\noutput: RAN\nblocks:\n  {EVIL}", sample, ["copy: Ada"]),
    "scheduler/fixed": (POPEN, sample, ["copy: Ada", "scheduler=freedave", "scheduler.inner=fixed"]),
    "guide/top_p": (f"# @package guide.top_p\n{POPEN}", sample, ["copy: Ada", "guide=[top_p]"]),
    "experiment/fast-dllm": (f"# @package _global_\nscheduler: {{{EVIL.strip()}}}\n", sample, ["experiment=fast-dllm"]),
    "guide/top_k": (f"# @package guide.top_k\n{POPEN}", sample, ["copy: Ada", "experiment=own"]),
    "scheduler/klass": (EVIL, sample, ["--help", "scheduler=klass"]),
    "task/mini": (EVIL, evaluate, ["task.count=1"]),
    "scheduler/wino": (EVIL, evaluate, ["scheduler=glob(win*)", "task.count=1"]),
    "suite/markov": ("sweeps: [['scheduler._target_=evil.Evil']]\n", evaluate, ["task=markov"]),
    "tune/fast": ("space: {scheduler: {evil: {}}}\n", tune, ["tune.name=x"]),
    "train/mini": (POPEN, train, ["train=mini"]),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_file_with_the_name_of_ours_is_refused(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, command, words = PLANTED[name]
    put(folder, "conf/experiment/own.yaml", "# @package _global_\ndefaults:\n  - override /guide: [top_k]\n")
    put(folder, f"conf/{name}.yaml", text)
    assert command(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"conf/{name}.yaml has the name of a packaged file" in said
    assert not (folder / "RAN").exists()


def test_a_prompt_may_be_written_like_the_flag(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(folder, "conf/scheduler/threshold.yaml", f"_target_: {OURS}\n")
    assert sample(["--", FLAG, "more"]) == 2 and "has the name of a packaged file" in capsys.readouterr().err


def test_the_same_file_is_no_other_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkout of this project has all of our names."""
    ours = Path(str(config.files("dllm_sampler.conf"))) / "scheduler" / "threshold.yaml"
    put(folder, "conf/scheduler/threshold.yaml", ours.read_text())
    assert sample(["copy: Ada"]) == 0 and capsys.readouterr().out == "Ada\n"


def test_what_is_no_file_does_not_count(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "conf/scheduler/threshold.yaml").mkdir(parents=True)
    (folder / "conf/cache").mkdir()
    (folder / "conf/cache/exact.yaml").symlink_to("gone")
    assert sample(["copy: Ada"]) == 0 and capsys.readouterr().out == "Ada\n"
    put(folder, "conf/model/mini.yaml", "path: x/y\n")
    monkeypatch.setattr(Path, "read_bytes", lambda _: (_ for _ in ()).throw(PermissionError(13, "no")))
    assert sample(["copy: Ada"]) == 2 and "has the name of a packaged file" in capsys.readouterr().err


@each("root", ["sample", "hydra/config", "hydra/job_logging/default", "hydra/env/default"])
def test_files_outside_of_groups_are_not_read(root: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(folder, f"conf/{root}.yaml", f"# @package _global_\nscheduler: {{{EVIL.strip()}}}\noutput: RAN\nplanted: 1\n")
    assert sample(["copy: Ada"]) == 0 and capsys.readouterr().out == "Ada\n"
    assert not (folder / "RAN").exists()


def test_a_pattern_and_a_task_name_none_of_the_users_files(folder: Path) -> None:
    put(folder, "conf/scheduler/evil.yaml", EVIL)
    put(folder, "conf/suite/mini.yaml", "sweeps: [['scheduler._target_=evil.Evil']]\n")
    found = jobs(["scheduler=glob(e*)", "task.operation=copy"])
    assert "evil" not in {one.choices["scheduler"] for one in found} and len(found) > 1
    with refused("choice-unknown: scheduler=glob"):
        jobs(["scheduler=glob(evi*)"])
    assert lines(["task=mini"]) == [["task=mini"]]
    put(folder, "conf/task/own.yaml", "_target_: dllm_sampler.eval.tasks.mini.MiniTask\n")
    put(folder, "conf/suite/own.yaml", "sweeps: [[seed=3]]\n")
    assert lines(["task=own"]) == [["seed=3", "task=own"]]
    assert not (folder / "RAN").exists()


def test_what_is_typed_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The own file that was named may name any module; so may the command line."""
    put(folder, "conf/scheduler/mine.yaml", EVIL)
    for words in (["scheduler=mine"], ["scheduler._target_=evil.Evil"]):
        assert sample(["copy: Ada", *words]) == 2
        assert "evil.Evil cannot be imported (AttributeError" in capsys.readouterr().err
        (folder / "RAN").unlink()
        del sys.modules["evil"]


INNER = "{_target_:subprocess.Popen,args:[touch,RAN]}"
CALLS = [
    ["scheduler._target_=subprocess.Popen", "+scheduler.args=[touch,RAN]", "~scheduler.threshold"],
    [f"+guide.x={INNER}"],
    ["scheduler=freedave", f"scheduler.inner={INNER}"],
    [f"scheduler.threshold={INNER}"],
    ["scheduler.threshold={_target_:builtins.open,file:RAN,mode:w}"],
    ["scheduler.threshold={_target_:evil.Evil,_partial_:true}"],
    ["cache._target_=os.system", "+cache._args_=['touch RAN']"],
    ["+scheduler._args_=[0.5]"],
    ["+scheduler._partial_=true"],
    ["+scheduler._convert_=all", "+scheduler._recursive_=false"],
    ["blocks._target_=dllm_sampler.schedulers.threshold.Threshold", "~blocks.length"],
    ["hydra.run.dir="],
    ["hydra.searchpath=[file:///tmp]"],
    ["hydra/job_logging=default"],
    ["++hydra.launcher._target_=evil.Evil"],
]


@each("words", CALLS)
def test_a_class_of_another_kind_is_not_called(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sample(["copy: Ada", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (folder / "RAN").exists()


@each(
    ("command", "words"),
    [
        (evaluate, ["task._target_=subprocess.Popen"]),
        (evaluate, ["workers=2", "hydra.launcher._target_=evil.Evil"]),
        (evaluate, ["workers=2", f"+hydra.launcher.x={INNER}"]),
        (evaluate, ["workers=2", "hydra.run.dir=x"]),
        (tune, ["hydra.run.dir=x"]),
        (train, ["train=mini", "train._target_=subprocess.Popen"]),
        (train, ["train=mini", "train._target_=multiprocessing.Process"]),
        (train, ["hydra.run.dir=x", "train=mini"]),
    ],
)
def test_other_commands_call_none_either(
    command: Callable[[list[str]], int], words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert command is not train or "_target_" not in words[-1] or "is not a class that extends CommandTrainer" in said
    assert not (folder / "RAN").exists()


def test_a_launcher_is_one_of_hydras(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(folder, "conf/hydra/launcher/mine.yaml", POPEN)
    assert evaluate(["task.operation=copy", "task.count=1", "device=cpu", "hydra/launcher=mine"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0 and "Invalid plugin 'subprocess.Popen'" in said
    assert not (folder / "RAN").exists()


def test_from_python_too(folder: Path) -> None:
    for group, spec in (
        ("scheduler", {"_target_": "subprocess.Popen", "args": ["touch", "RAN"]}),
        ("scheduler", {"name": "freedave", "inner": {"_target_": "subprocess.Popen", "args": ["touch", "RAN"]}}),
        ("scheduler", {"name": "threshold", "threshold": {"_target_": "evil.Evil"}}),
        ("guide", [{"_target_": "subprocess.Popen", "args": ["touch", "RAN"]}]),
        ("cache", {"_target_": OURS}),
        ("cache", {"_target_": "dllm_sampler.core.protocols.Cache"}),
        ("stop", {"_target_": ""}),
    ):
        with pytest.raises(UserError):
            Sampler.from_pretrained("mini", **cast(Any, {group: spec}))
    assert not (folder / "RAN").exists()
