"""`dllm-sample` with given text, gaps and several samples, and its interactive session."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dllm_sampler.cli import interactive, run
from dllm_sampler.cli.interactive import merged, typed
from dllm_sampler.cli.main import main
from dllm_sampler.kernels import backend
from tests.refusals import refused
from tests.sampling import each


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def at_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def words(checkpoint: Path) -> list[str]:
    return [f"model={checkpoint}", "max_new_tokens=6", "device=cpu", "stop=none"]


def fitting(words: list[str], said: Sequence[str]) -> list[str]:
    """All words of a command line; the length of an answer is not given where its gaps say it."""
    gaps = any(word.startswith("infill=") for word in said)
    return [*(word for word in words if not (gaps and word.startswith("max_new_tokens="))), *said]


def test_a_beginning_an_end_and_gaps(words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for said, begins, ends in (
        (["copy: Ada", "prefix=Ben, Ada", "suffix=, Cal"], "Ben,Ada", ",Cal"),
        (["copy: Ada", "infill=Ben{gap:2}, Cal"], "Ben", ",Cal"),
        (["Ben, {gap:2}, Cal"], "Ben,", ",Cal"),
        (["infill='Ben, {gap:2}, Cal'"], "Ben,", ",Cal"),
        (["--", "Ben, {gap:2}, Cal"], "Ben,", ",Cal"),
    ):
        assert main(fitting([*words, "output=o.jsonl"], said)) == 0
        out, err = capsys.readouterr()
        record = json.loads((tmp_path / "o.jsonl").read_text())
        whole = begins + "".join(record["gaps"]) + ends  # the tokenizer puts spaces between tokens
        assert whole.replace(" ", "") == record["text"].replace(" ", "") == out.rstrip().replace(" ", "")
        assert record["finish_reason"] == "end"
        assert sum(step >= 0 for step in record["step_map"]) == record["tokens_per_forward"] * record["nfe"]
        assert "cut at max_new_tokens" not in err
    assert main([*words, "Ben{gap:2}"]) == 0 and "cut" not in capsys.readouterr().err, "it is as long as it says"
    said = ["copy: Ada", "infill={gap:3}"]
    assert main(fitting(words, said)) == 0 and "cut" not in capsys.readouterr().err, "nor is an answer that is a gap"
    assert main([*words, "copy: Ada", "prefix=Ben"]) == 0 and "cut at max_new_tokens" in capsys.readouterr().err


@each(
    ("more", "biased"),
    [
        (["scheduler=threshold"], True),
        (["scheduler=fixed", "stream=true", "stream_delay=0"], True),
        (["scheduler=random_order"], False),
        (["scheduler=leftright"], False),
        (["scheduler=fixed", "scheduler.score=random"], False),
        (["temperature=0"], False),
        (["temperature=null"], False),
        (["samples=1"], False),
    ],
)
def test_samples_that_differ_too_little_are_warned_of_once(
    words: list[str], capsys: pytest.CaptureFixture[str], more: list[str], biased: bool
) -> None:
    backend.forget()
    assert main([*words, "temperature=1", "samples=2", *more, "copy: Ada", "copy: Ben"]) == 0
    said = capsys.readouterr().err
    assert said.count("by the confidence of the tokens that it drew") == biased
    assert said.count("Use scheduler=leftright") == biased


def test_samples(words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """All of a prompt's, then of the next; as streamed, and each as alone under its own seed."""
    drawn = [*words, "temperature=2", "samples=3", "copy: Ada", "copy: Ben, Cal"]
    assert main([*drawn, "output=o.jsonl"]) == 0
    rows = capsys.readouterr().out.splitlines()
    records = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [(one["index"], one["sample"]) for one in records] == [(prompt, at) for prompt in (0, 1) for at in range(3)]
    assert [one["text"] for one in records] == rows and len(set(rows)) > 3
    same = [*words, "samples=2", "copy: Ada"]
    assert main(same) == 0 and "samples=2: the answers to each prompt are the same" in capsys.readouterr().err
    assert main([*drawn, "stream=true", "batch_size=4", "stream_delay=0"]) == 0
    assert capsys.readouterr().out.splitlines() == rows
    assert main([*words, "temperature=2", "copy: Ben, Cal", "seed=4"]) == 0
    assert capsys.readouterr().out.splitlines() == rows[4:5]


@each(
    ("given", "said"),
    [
        (["Ben{gap}"], "answer 1 has {gap}, a gap without a length"),
        (["infill=Ben"], "dllm-sample: infill has no gap"),
        (["copy: Ada", "infill={gap:0}Ada"], "dllm-sample: infill has {gap:0}"),
        (["copy: Ada", "infill={gap:99999999}"], "infill has gaps of 99999999 tokens"),
        (["Ben{gap:2}", "prefix=Ada"], "prompt 1 has a gap, which conflicts with prefix="),
        (["Ben", "infill=Ben{gap:2}", "suffix=Ada"], "infill= excludes suffix=."),
        (["Ben{gap:2}", "infill=Ada{gap:1}"], "prompt 1 has a gap, which conflicts with infill="),
        (["Ben{gap:2}", "chat=true"], "prompt 1 has a gap, which conflicts with chat=true"),
        (["copy: Ben", "suffix=Ada, Ada, Ada, Ada"], "max_new_tokens=6"),
        (["copy: Ben", "prefix=nobody"], "prefix has 'nobody'"),
        (["copy: Ben", "prefix=Ada", "target=some"], "prefix=Ada has no effect with target="),
        (["copy: Ben", "samples=0"], "samples=0 is invalid. Set a whole number from 1 to 1048576."),
        ([], "dllm-sample --help"),
    ],
)  # fmt: skip
def test_what_is_refused(words: list[str], given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(fitting(words, given)) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("dllm-sample: ") and said in err and len(err.splitlines()) == 1


def test_a_length_and_gaps_that_have_theirs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "copy: Ada", "infill={gap:9}"]) == 2
    assert "max_new_tokens= and infill=" in capsys.readouterr().err
    assert main([*words, "copy: Ada", "infill=null"]) == 0


def lines(*given: str | type[BaseException]) -> Callable[[], str]:
    rest = iter(given)

    def ask() -> str:
        line = next(rest, EOFError)
        if not isinstance(line, str):
            raise line
        return line

    return ask


def test_a_session(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, settings, mistakes; one load of the model."""
    loaded, real = [], run.Sampler.from_pretrained

    def load(*given: object, **options: object) -> object:
        loaded.append(given)
        return real(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(run.Sampler, "from_pretrained", load)
    said = lines(
        "copy: Ada", "", "--", "scheduler.threshold=0.3 cache=dual", "scheduler.treshold=1", "copy: Ada", "no word",
        KeyboardInterrupt, "prefix=Ben, Ada", "-- copy: Ada", "scheduler=fixed", "scheduler.steps=2 stream=false",
        "prefix=null", "Ben{gap:2}, Cal", "target=some", "copy: Ada",
    )  # fmt: skip
    assert interactive.session([*words, "stream_delay=0"], said) == 0
    out, err = capsys.readouterr()
    answers = out.splitlines()
    assert len(answers) == 5 and len(loaded) == 1
    assert answers[2].startswith("Ben , Ada") and answers[3].startswith("Ben") and answers[3].endswith(", Cal")
    complaints = [line for line in err.splitlines() if line.startswith("dllm-sample: ")]
    assert len(complaints) == 3 and "Traceback" not in err
    assert "Did you mean 'threshold'?" in complaints[0] and "vocabulary" in complaints[1]
    assert (
        complaints[2]
        == "dllm-sample: target=some does not work in a session. Leave it, and add target=some to a command."
    )
    assert "NFE 2, " in err.splitlines()[-2] and not err.endswith("step 2")
    assert [line for line in err.splitlines() if "scheduler.threshold" in line and "scheduler=fixed" in line] == []
    shown = [line for line in err.splitlines() if line.startswith("step 1")]
    assert len(shown) == 3, "watched, until stream=false"
    # What it says is what a command line says.
    assert main([*words, "scheduler=fixed", "scheduler.steps=2", "cache=dual", "copy: Ada"]) == 0
    assert capsys.readouterr().out.splitlines() == answers[-1:]


def test_settings_that_no_prompt_could_have_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """When they are typed: those before stay in force."""
    wrong = {
        "infill={gap:0}Ada": "infill has {gap:0}",
        "max_new_tokens=100000": "max_new_tokens=100000",
        "prefix=nobody": "prefix has 'nobody'",
        "prefix=Ada infill=Ben{gap:2}": "infill= excludes prefix=.",
        "blocks=full block_length=4": "Or set block_length=null.",
        "infill={gap:2} max_new_tokens=4": "max_new_tokens= and infill=",
        "--inof": "unknown flag '--inof'. Did you mean '--info'",
        "--info gide": "unknown group, option or plug-in 'gide'. Did you mean 'guide'",
    }
    assert interactive.session(words, lines(*wrong)) == 0
    out, err = capsys.readouterr()
    complaints = [line for line in err.splitlines() if line.startswith("dllm-sample: ")]
    assert len(complaints) == len(wrong) and not out and "\nsettings: " not in err
    for complaint, said in zip(complaints, wrong.values(), strict=True):
        assert said in complaint


def test_pages_and_endings_of_a_session(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for ending in ("quit", "exit"):
        assert interactive.session(words, lines("--info stop", "help", "--version", ending, "copy: Ada")) == 0
        out, err = capsys.readouterr()
        assert not out and "Ctrl-D ends" in err and "dllm-sample 0." in err and "stop=NAME" in err


def test_settings_that_are_taken_back(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = lines("prefix=Ben seed=3", "prefix=null", "temperature=1", "experiment=fast-dllm", "temperature=null")
    assert interactive.session(words, said) == 0
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("settings: ")]
    assert shown[0].endswith("stop=none prefix=Ben seed=3") and shown[1].endswith("stop=none seed=3")
    assert shown[-1].endswith("seed=3 experiment=fast-dllm")


def test_a_mistake_on_the_command_line_ends_it(words: list[str]) -> None:
    with refused("choice-unknown: 'fix'"):
        interactive.session([*words, "scheduler=fix"], lines())


@each(("terminal", "given", "begins"), [(True, [], True), (False, [], False), (True, ["copy: Ada"], False)])
def test_when_a_session_begins(
    terminal: bool, given: list[str], begins: bool, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Sequence[str]] = []
    monkeypatch.setattr(interactive, "session", lambda overrides: begun.append(overrides) or 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    assert main([*words, *given]) == (0 if begins or given else 2)
    assert begun == ([words] if begins else [])


def test_a_line_from_a_terminal_or_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("copy: Ada\n"))
    assert interactive.ask() == "copy: Ada" and capsys.readouterr() == ("", "> ")
    with pytest.raises(EOFError):
        interactive.ask()


@each(
    ("line", "words"),
    [
        ("copy: Ada", []),
        ("seed=1 cache=dual", ["seed=1", "cache=dual"]),
        ("seed=1 copy: Ada", []),
        ("don't", []),
        ("infill=a b {gap:2} c", ["infill=a b {gap:2} c"]),
        ("suffix=', Ada' seed=1", ["suffix=, Ada", "seed=1"]),
        ("infill=null prefix=null", ["infill=null", "prefix=null"]),
        ("prefix=Dan, Cal scheduler=fixed seed=1", ["prefix=Dan, Cal", "scheduler=fixed", "seed=1"]),
        ("prefix=a b  guide.regex.pattern='x y' suffix=c d", ["prefix=a b", "guide.regex.pattern=x y", "suffix=c d"]),
        ("seed=1 suffix=, Ada", ["seed=1", "suffix=, Ada"]),
        ("copy: Ada suffix=, Ada", []),
        ("infill=f(a, seed=1, b={gap:1})", ["infill=f(a, seed=1, b={gap:1})"]),
        ("infill=a other=1 {gap:1}", ["infill=a other=1 {gap:1}"]),
        ("x = 3", []),
        ("", []),
    ],
)
def test_what_a_line_is(line: str, words: list[str]) -> None:
    assert typed(line) == words


def test_later_settings_count() -> None:
    old = ["scheduler=threshold", "scheduler.threshold=0.5", "guide=regex", "guide.regex.pattern=a", "seed=1"]
    assert merged(old, ["scheduler=fixed", "seed=2"]) == [
        "guide=regex", "guide.regex.pattern=a", "scheduler=fixed", "seed=2",
    ]  # fmt: skip
    assert merged(old, ["guide=none"]) == ["scheduler=threshold", "scheduler.threshold=0.5", "seed=1", "guide=none"]
    assert merged(old, ["guide=[regex,top_k]"])[2:] == ["guide.regex.pattern=a", "seed=1", "guide=[regex,top_k]"]
    assert merged(old, ["guide.pattern=b"])[3:] == ["seed=1", "guide.regex.pattern=b"]
    assert merged([], ["scheduler.steps=3", "scheduler=fixed"]) == ["scheduler.steps=3", "scheduler=fixed"]
    assert merged(old, ["scheduler.threshold=0.7"])[-1] == "scheduler.threshold=0.7" and len(merged(old, ["a=1"])) == 6
