"""The search: resumed, confirmed, and its winner usable by name."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from dllm_sampler.cli.compose import settings
from dllm_sampler.eval import tuning
from dllm_sampler.eval.experiment import too_few
from dllm_sampler.eval.jobs import job, jobs
from dllm_sampler.eval.space import Space
from dllm_sampler.host import files
from tests.disks import full_after
from tests.sampling import each, few

pytest.importorskip("optuna")

WORDS = ["task.operation=copy", "task.count=4", "max_new_tokens=24", "threads=1", "device=cpu", "tune=tiny"]
SPACE = """\
# A space for tests.
name: quick
trials: 2
space:
  scheduler:
    threshold:
      threshold: {low: 0.5, high: 0.9}
    fixed:
      steps: [6]
  options:
    block_length: [24]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "conf" / "tune").mkdir(parents=True)
    (tmp_path / "conf" / "tune" / "tiny.yaml").write_text(SPACE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_winner_is_an_experiment(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*WORDS, "task.count=2", "dtype=float64"]
    assert tuning.main(words) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "one token per step" in said and "experiment=quick" in said
    file = here / "conf" / "experiment" / "quick.yaml"
    first = file.read_text()
    written = yaml.safe_load(first)
    assert {"override /model": "mini"} in written["defaults"] and written["max_new_tokens"] == 24
    chosen, evaluated = settings(["experiment=quick"]), job(["experiment=quick"])
    assert chosen.options.dtype == "float64"
    assert chosen.options.block_length == 24 == evaluated.options.block_length
    assert chosen.plugins == evaluated.plugins

    # the same command does nothing again, and ends up in the same file
    asked: list[int] = []
    monkeypatch.setattr(tuning.Tuner, "trial", lambda *given: asked.append(1))
    assert tuning.main(words) == 0
    assert not asked and file.read_text() == first


@pytest.mark.slow
def test_a_search_that_was_cut_off_goes_on_as_if_it_had_not(here: Path) -> None:
    def study(words: list[str]) -> Any:
        return tuning.Tuner(*tuning.tuning(words), tuning.Console(quiet=True)).study()

    whole, cut = ([*WORDS, "task.count=2", f"output={output}"] for output in ("one", "two"))
    assert tuning.main(whole) == tuning.main([*cut, "tune.trials=1"]) == 0
    with study(cut) as begun:
        begun.ask()  # a process that was ended in the middle of a trial
    assert tuning.main(cut) == 0
    with study(whole) as first, study(cut) as second:
        one, two = (
            [trial.user_attrs["words"] for trial in found.get_trials() if trial.value is not None]
            for found in (first, second)
        )
    assert one == two and len(one) == 2


@pytest.mark.slow
def test_one_search_at_a_time(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another process would take the trials of this one for lost."""
    words = [*WORDS, "task.count=2"]
    tuner = tuning.Tuner(*tuning.tuning(words), tuning.Console(quiet=True))
    with tuner.study() as study:
        study.ask()
        assert tuning.main(words) == 2
        (trial,) = study.get_trials()
        assert trial.state.name == "RUNNING", "it was left alone"
    assert f"Another dllm-tune runs this search in {tuner.output}. Wait until it ends" in capsys.readouterr().err


@pytest.mark.slow
def test_a_database_that_was_half_made_is_none(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optuna goes on with one that lacks an index, and then finds a study twice."""
    tuner = tuning.Tuner(*tuning.tuning(WORDS), tuning.Console(quiet=True))

    def killed(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files, "move", killed)
        with pytest.raises(KeyboardInterrupt), tuner.study():
            pass
    assert not (tuner.output / "study.db").exists()
    (tuner.output / ".study.db.part").write_text("half of it")
    (tuner.output / ".study.db.part-journal").write_text("half of it")
    for trials in (0, 1):
        with tuner.study() as study:
            assert len(study.get_trials()) == trials
            study.tell(study.ask(), 1.0)
    assert [file.name for file in tuner.output.iterdir()] == ["study.db"]


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: Any, **rest: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning.Tuner, "trial", interrupted)
    assert tuning.main(WORDS) == 130
    assert capsys.readouterr().err.endswith("dllm-tune: interrupted. Rerun the command to resume.\n")


def test_a_search_on_a_full_disk(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with full_after(30_000):  # less than an empty study takes
        assert tuning.main([*WORDS, "task.count=2"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0 and "study.db cannot be used (d" in said
    assert said.endswith("then rerun the command to resume.")


@each(
    ("words", "sentence"),
    [
        (["tune=fats"], "unknown tune 'fats'. Did you mean 'fast'"),
        (["tune.seed=4294967296"], "tune.seed=4294967296 is invalid. Set a whole number from 0 to 4294967256."),
        (["tune.trials=1" + 9 * "0"], "tune.trials=1000000000 is invalid. Set a whole number from 1 to 10000."),
        (["tune.trails=3"], "tune=fast has no field 'trails'. Did you mean 'trials'"),
        (["tune.measure=speed"], "unknown tune.measure 'speed'"),
        (["tune.measure=nfe"], "unknown tune.measure 'nfe'"),
        (["tune.space.scheduler=threshold"], "tune.space.scheduler is 'threshold'. Write scheduler: {NAME: {}, ...}"),
        (["device=cuda:99"], "device=cuda:99"),
        (["tune.name=a/b"], "Use letters, digits, - and _"),
        (["scheduler=wino"], "tune.space also searches scheduler"),
        (["workers=2"], "workers=2 does not work in a search"),
        (["++workers=2"], "++workers=2 does not work in a search"),
        (["temperature=0,1"], "temperature=0,1 has several values"),
        (["max_new_tokens=16,24"], "max_new_tokens=16,24 has several values"),
        (["seed=range(5,1)"], "seed=range(5,1) lists no values"),
        (["tune.trials=x"], "tune.trials='x' is invalid. Set a whole number."),
        (["tune.space.nope=3"], "unknown group of tune.space 'nope'. The choices are scheduler, blocks, stop"),
        (["output=conf/tune/tiny.yaml"], "output=conf/tune/tiny.yaml: conf/tune/tiny.yaml is a file, but must"),
        (["tune.name=fast-dllm"], "tune.name=fast-dllm is the name of a packaged experiment"),
        (["foo"], "'foo' is not NAME=VALUE"),
    ],
)
def test_mistakes_are_sentences(
    here: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tuning.main(words) == 2
    assert sentence in capsys.readouterr().err


@each(
    ("space", "sentence"),
    [
        ("", "tune.space is empty"),
        ("space: {}", "tune.space is empty"),
        ("space: 3", "space=3 is invalid. Set a mapping as {a: b}"),
        ("space: {sheduler: {wino: {}}}", "unknown group of tune.space 'sheduler'. Did you mean 'scheduler'"),
        ("space: {scheduler: {}}", "tune.space.scheduler is {}. Write scheduler: {NAME: {}, ...}"),
        ("space: {scheduler: [threshold, wino]}", "tune.space.scheduler is ["),
        ("space: {scheduler: {threshold: 3}}", "tune.space.scheduler.threshold is 3"),
        ("space: {scheduler: {tresh: {}}}", "unknown scheduler 'tresh'"),
        ("space: {scheduler: {threshold: {tresh: [1]}}}", "scheduler=threshold has no field 'tresh'"),
        ("space: {scheduler: {threshold: {threshold: 3}}}", "threshold is 3"),
        ("space: {scheduler: {threshold: {threshold: []}}}", "threshold is []"),
        ("space: {scheduler: {threshold: {threshold: [a]}}}", "threshold='a' is invalid. Set a number"),
        ("space: {scheduler: {threshold: {threshold: {low: .9, high: .1}}}}", "low=0.9 is above high=0.1"),
        ("space: {scheduler: {threshold: {threshold: {low: a, high: b}}}}", "low and high are 'a' and 'b'"),
        ("space: {scheduler: {threshold: {threshold: {low: 0, high: 1, log: true}}}}", "log=true needs more than 0"),
        ("space: {scheduler: {threshold: {threshold: {low: 0.1, high: 1, log: 2}}}}", "log is 2. Set true or false"),
        (
            "space: {scheduler: {threshold: {threshold: {low: 0.1, high: 1, log: true, step: 0.1}}}}",
            "excludes step=0.1",
        ),
        ("space: {scheduler: {threshold: {threshold: {low: 0, high: 1, step: 0}}}}", "step is 0"),
        ("space: {scheduler: {threshold: {threshold: {low: 0, high: 1, step: .inf}}}}", "step is inf"),
        ("space: {scheduler: {fixed: {steps: {low: 1, high: 3, step: 0.5}}}}", "step is 0.5 for whole numbers"),
        ("space: {scheduler: {fixed: {steps: {low: 1.5, high: 3}}}}", "steps=1.5 is invalid. Set a whole number"),
        ("space: {options: {block_lenth: [8]}}", "unknown option of tune.space.options 'block_lenth'"),
        ("space: {options: {output: [a]}}", "unknown option of tune.space.options 'output'"),
        ("space: {options: {block_length: [-1]}}", "tune.space.options.block_length=-1 is invalid. Set a whole number"),
        ("space: {options: {modle.cfg_scale: [1]}}", "tune.space.options.modle.cfg_scale: unknown option 'modle'"),
        ("space: {scheduler: {threshold: {threshold: {low: 0, high: .inf}}}}", "are 0 and inf. Give finite numbers"),
    ],
)
def test_spaces_are_checked_before_anything_runs(
    here: Path, space: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "conf" / "tune" / "mine.yaml").write_text(f"# Mine.\nname: mine\n{space}\n")
    assert tuning.main(["tune=mine"]) == 2
    assert sentence in capsys.readouterr().err
    assert not (here / "outputs").exists()


def test_an_empty_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "conf" / "tune" / "mine.yaml").write_text("")
    assert tuning.main(["tune=mine"]) == 2
    assert "Use letters, digits, - and _" in capsys.readouterr().err


class Asked:
    """An Optuna trial that takes the low end of what it is asked for, and writes down which kind it was."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}

    def suggest_categorical(self, name: str, values: Sequence[Any]) -> Any:
        return values[0]

    def suggest_int(self, name: str, low: int, high: int, **_: object) -> int:
        self.kinds[name] = "int"
        return low

    def suggest_float(self, name: str, low: float, high: float, **_: object) -> float:
        self.kinds[name] = "float"
        return low


def test_a_number_is_whole_where_its_field_is() -> None:
    asked = Asked()
    space = Space.of(
        {
            "scheduler": {"localleap": {"threshold": {"low": 0, "high": 1}, "radius": {"low": 1, "high": 8}}},
            "guide": {"temperature": {"value": {"low": 1, "high": 2}}},
            "options": {"top_p": {"low": 0.5, "high": 1}, "top_k": {"low": 1, "high": 9}, "block_length": [None, 8]},
        }
    )
    words = space.choose(cast(Any, asked))
    assert words == [
        "scheduler=localleap", "scheduler.threshold=0.0", "scheduler.radius=1", "guide=temperature",
        "guide.temperature.value=1.0", "top_p=0.5", "top_k=1", "block_length=null",
    ]  # fmt: skip
    assert {name.rpartition(".")[2]: kind for name, kind in asked.kinds.items()} == {
        "threshold": "float", "radius": "int", "value": "float", "top_p": "float", "top_k": "int",
    }  # fmt: skip
    assert job(words).plugins["guide"] == [{**job(["guide=temperature"]).plugins["guide"][0], "value": 1.0}]


def tuner(*words: str) -> tuning.Tuner:
    return tuning.Tuner(*tuning.tuning([*WORDS, *words]), tuning.Console(quiet=True))


@pytest.mark.slow
def test_it_is_confirmed_on_samples_of_another_seed(here: Path) -> None:
    one = tuner("task.seed=1,2", "tune.trials=1")
    one.search()
    seeds = {json.loads(file.read_text())["config"]["task"]["seed"] for file in here.rglob("run.json")}
    assert seeds == {1, 2, 3}


@pytest.mark.slow
def test_samples_that_are_no_new_ones_are_not_called_so(here: Path) -> None:
    """A task whose samples do not depend on its seed, and two seeds, one of which the search has not seen."""
    given = tuner("task=ideal", "task.items=3", "temperature=1")
    assert given.unseen(given.reference(given.words)) == "4 samples with the prompts of the search, under another seed"
    mini = tuner()
    other, both = (
        replace(mini.reference(mini.words), jobs=jobs([*WORDS[:-1], f"task.seed={n}"])) for n in ("5", "0,5")
    )
    assert mini.unseen(other) == "4 samples that the search did not see"
    assert mini.unseen(both) == "8 samples (4 with prompts of the search)"


NAMES = ["wino", "threshold", "klass", "slowfast", "factor", "localleap"]
FEW = "# A space for tests.\nname: quick\ntrials: 6\nloss: 1\nspace: {scheduler: {" + ": {}, ".join(NAMES) + ": {}}}\n"


@few("holds", [True, False])
def test_every_trial_is_shown_with_the_reason(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], holds: bool
) -> None:
    """Score and speed of each scheduler on the search's samples, and scores on the samples that confirm."""
    (here / "conf/tune/tiny.yaml").write_text(FEW)
    known = {"fixed": (0.9, 1.0), "wino": (0.5, 9.0), "threshold": (0.9, 3.0), "klass": (1.0, 0.5)}
    known |= {"factor": (0.81, 4.0), "localleap": (0.9, 2.0)}
    fresh: dict[str, float] = {"factor": 0.5} if holds else dict.fromkeys(("factor", "threshold", "localleap"), 0.5)

    def measure(self: tuning.Tuner, words: Sequence[str], chosen: Sequence[str]) -> Any:
        name = next(word for word in chosen if word.startswith("scheduler=")).partition("=")[2]
        if name == "slowfast":
            return "there is no room"
        score, speed = known[name]
        score = fresh.get(name, score) if "task.seed=1" in words else score
        return tuning.Found(self.base, chosen, score, speed)

    monkeypatch.setattr(tuning.Tuner, "measure", measure)
    words = [*WORDS, "tune.loss=10"]
    with tuning.Tuner(*tuning.tuning(words), tuning.Console(quiet=True)).study() as study:
        for name in NAMES:
            study.enqueue_trial({"scheduler": name})
    assert tuning.main(words) == 0
    said = capsys.readouterr()
    rows = re.findall(r"^ ?scheduler=(\w+)(?: cache=none)? +([\d.]*) +([\d.]*) +(.+?) *$", said.out, re.MULTILINE)
    lost = "loses 40.0 points, 10 allowed"
    assert rows == [
        ("factor", "81.0", "4.00", f"{lost}, on the samples that confirm"),
        ("threshold", "90.0", "3.00", "chosen" if holds else f"{lost}, on the samples that confirm"),
        (
            "localleap",
            "90.0",
            "2.00",
            "qualifies, slower than the chosen one" if holds else f"{lost}, on the samples that confirm",
        ),
        ("fixed", "90.0", "1.00", "one token per step"),
        ("klass", "100.0", "0.50", "no faster than one token per step"),
        ("wino", "50.0", "9.00", lost),
        ("slowfast", "", "", "cannot run: there is no room"),
    ]
    file = (here / "conf/experiment/quick.yaml").read_text()
    none = "No configuration of 6 qualified: each loses more than tune.loss=10 allows, is no faster, or cannot run. One"
    assert (none in said.out) is not holds and ("no configuration of 6 qualified" in file) is not holds
    # 4 samples: a wrong answer costs 25 points
    warned = "tune.loss=10 allows no additional wrong answer: with 4 samples one costs at least 25.00 points."
    assert f"{warned} Set tune.loss=25, or task.count=10 to allow one." in said.err


def test_the_loss_that_one_answer_costs(here: Path) -> None:
    allowed = tuning.tuning([*WORDS])[0]
    assert "60 samples one costs at least 1.67 points. Set tune.loss=1.67, or task.count=100" in too_few([60], allowed)
    assert "60 samples one costs at least 1.67 points. Set tune.loss=1.67, or task.count=50" in too_few(
        [30, 30], allowed
    )
    assert too_few([100], allowed) == too_few([50, 50], allowed) == ""


def test_a_reference_that_scores_nothing_or_cannot_run_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tuning.main([*WORDS, "max_new_tokens=1"]) == 2
    assert "mini copy" in capsys.readouterr().err
    monkeypatch.setattr(tuning.Tuner, "measure", lambda *given: "there is no room")
    assert tuning.main([*WORDS, "max_new_tokens=2"]) == 2
    assert "cannot run: there is no room" in capsys.readouterr().err


def test_a_damaged_database_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "runs").mkdir()
    (here / "runs/study.db").write_text("no database" * 99)
    assert tuning.main([*WORDS, "output=runs"]) == 2
    assert "study.db is damaged (file is not a database). Remove it" in capsys.readouterr().err


def test_a_file_of_the_user_is_not_overwritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = here / "conf" / "experiment" / "quick.yaml"
    for content in (b"# @package _global_\n# Mine.\n", b"\xff\xfe", None):
        file.unlink(missing_ok=True)
        file.parent.mkdir(exist_ok=True)
        file.mkdir() if content is None else file.write_bytes(content)
        assert tuning.main(WORDS) == 2
        assert "Set another tune.name" in capsys.readouterr().err
