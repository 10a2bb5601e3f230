"""The search: resumed, confirmed, and its winner usable by name."""

from pathlib import Path

import pytest
import yaml

from dllm_sampler.cli.compose import settings
from dllm_sampler.eval import tuning
from dllm_sampler.eval.jobs import job

pytest.importorskip("optuna")

WORDS = ["task.operation=copy", "task.count=4", "max_new_tokens=24", "threads=1", "device=cpu", "tune=tiny"]
SPACE = """\
# A space for tests.
name: quick
trials: 3
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
    assert tuning.main(WORDS) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "one token per step" in said and "experiment=quick" in said
    file = here / "conf" / "experiment" / "quick.yaml"
    first = file.read_text()
    written = yaml.safe_load(first)
    assert {"override /model": "mini"} in written["defaults"] and written["max_new_tokens"] == 24
    chosen, evaluated = settings(["experiment=quick"]), job(["experiment=quick"])
    assert chosen.options.block_length == 24 == evaluated.options.block_length
    assert chosen.plugins == evaluated.plugins

    # the same command does nothing again, and ends up in the same file
    asked: list[int] = []
    monkeypatch.setattr(tuning.Tuner, "trial", lambda *given: asked.append(1))
    assert tuning.main(WORDS) == 0
    assert not asked and file.read_text() == first


def test_a_search_that_was_cut_off_goes_on_as_if_it_had_not(here: Path) -> None:
    def words(output: str, trials: int) -> list[str]:
        return [*WORDS, f"output={output}", f"tune.trials={trials}"]

    assert tuning.main(words("one", 4)) == 0
    assert tuning.main(words("two", 2)) == 0
    given = tuning.Tuner(*tuning.tuning(words("two", 2)), tuning.Console(quiet=True))
    given.study().ask()  # a process that was ended in the middle of a trial
    assert tuning.main(words("two", 4)) == 0
    one, two = (
        tuning.Tuner(*tuning.tuning(words(output, 4)), tuning.Console(quiet=True)).study() for output in ("one", "two")
    )
    found = [
        [trial.user_attrs["words"] for trial in study.get_trials() if trial.value is not None] for study in (one, two)
    ]
    assert found[0] == found[1] and len(found[0]) == 4


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["tune=fats"], "unknown tune 'fats', did you mean 'fast'"),
        (["tune.trails=3"], "unknown field of tune=fast 'trails', did you mean 'trials'"),
        (["tune.measure=speed"], "unknown measure 'speed'"),
        (["tune.name=a/b"], "tune.name should be letters"),
        (["scheduler=wino"], "scheduler is what tune.space lets the search choose"),
        (["workers=2"], "is for dllm-eval"),
        (["foo"], "cannot make sense of 'foo'"),
    ],
)
def test_mistakes_are_sentences(
    here: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tuning.main(words) == 2
    assert sentence in capsys.readouterr().err


def test_a_file_of_the_user_is_not_overwritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "conf" / "experiment").mkdir()
    (here / "conf" / "experiment" / "quick.yaml").write_text("# @package _global_\n# Mine.\n")
    assert tuning.main(WORDS) == 2
    assert "another tune.name" in capsys.readouterr().err
