"""How `dllm-sample` ends before its time: Ctrl-C, logits that are not finite, a reader that leaves."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dllm_sampler import sampler
from dllm_sampler.cli import compose
from dllm_sampler.cli.main import main
from dllm_sampler.cli.terminal import ending
from dllm_sampler.errors import NotFiniteError, UserError

pytestmark = pytest.mark.usefixtures("at_a_terminal")


def test_ctrl_c_prints_what_is_done(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sampler.Sampler.stream

    def interrupted(*args: Any, **rest: Any) -> Any:
        for commits in whole(*args, **rest):
            yield commits
            if commits.step == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(sampler.Sampler, "stream", interrupted)
    assert main([*words, "copy: Ben", "scheduler=fixed", "stop=none"]) == 130
    out, err = capsys.readouterr()
    assert out.count("░░") == 4
    assert "stopped in step 2" in err


def test_ctrl_c_in_flight_prints_answers_that_waited_for_their_turn(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prompts, whole = ["copy: Ada", "copy: Ben", "copy: Cal", "Dan"], sampler.Sampler.generate_many
    assert main([*words, *prompts, "batch_size=2", "batching=static"]) == 0
    expected = capsys.readouterr().out.splitlines()
    assert main([*words, *prompts, "batch_size=2"]) == 0
    assert capsys.readouterr().out.splitlines() == expected

    def interrupted(*args: Any, **rest: Any) -> Any:
        answers = {answer.index: answer for answer in whole(*args, **rest)}
        yield from (answers[0], answers[2], answers[3])
        raise KeyboardInterrupt

    monkeypatch.setattr(sampler.Sampler, "generate_many", interrupted)
    assert main([*words, *prompts, "batch_size=2", "output=o.jsonl"]) == 130
    out, err = capsys.readouterr()
    assert out.splitlines() == [expected[index] for index in (0, 2, 3)]
    assert "stopped: no answer to prompt 2" in err
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [(line["index"], line["text"]) for line in lines] == [(index, expected[index]) for index in (0, 2, 3)]


def test_nan_in_flight_costs_no_other_answer(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prompts, whole = ["copy: Ada", "copy: Ben", "copy: Cal"], sampler.Sampler.generate_many

    def broken(*args: Any, **rest: Any) -> Any:
        for answer in whole(*args, **rest):
            yield replace(answer, finish_reason="not_finite", length=0) if answer.index == 1 else answer

    monkeypatch.setattr(sampler.Sampler, "generate_many", broken)
    assert main([*words, *prompts, "output=o.jsonl"]) == 2
    out, said = capsys.readouterr()
    assert "NaN or infinite logits at step" in said and "prompt 2" in said
    assert len(out.splitlines()) == 2, "what failed is no answer"
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [line["complete"] for line in lines] == [True, False, True]


def test_nan_keeps_what_was_done(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = sampler.Sampler.stream

    def broken(*args: Any, **rest: Any) -> Any:
        for commits in whole(*args, **rest):
            if commits.result is not None:
                error = NotFiniteError(commits.step, [1])
                error.result = commits.result
                raise error
            yield commits

    monkeypatch.setattr(sampler.Sampler, "stream", broken)
    assert main([*words, "copy: Ada", "output=o.jsonl"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "NaN" in err
    assert len((tmp_path / "o.jsonl").read_text().splitlines()) == 1
    assert main([*words, "copy: Ada", "max_new_tokens=8"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "not written yet" in err
    assert "NaN" in err


def test_a_failing_run_leaves_an_earlier_output_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old.jsonl"
    old.write_text("keep\n")
    assert main(["copy: Ada", f"output={old}", "blocks=full", "block_length=8"]) == 2
    assert old.read_text() == "keep\n"
    assert main(["copy: Ada", f"output={old}"]) == 0
    assert old.read_text().startswith("{") and len(old.read_text().splitlines()) == 1
    capsys.readouterr()


def test_a_reader_that_leaves_is_no_error() -> None:
    """As in `dllm-train --help | head -1`, of any command: they end in one place."""
    code = "from dllm_sampler.cli.terminal import ending; raise SystemExit(ending('it', lambda: print('x\\n' * 10**6)))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 141


def test_a_long_word_is_not_quoted_whole(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise UserError("made-up", f"there is no file {'x' * 5000}end: name one")

    assert ending("it", run) == 2
    said = capsys.readouterr().err
    assert len(said) < 200 and said.startswith("it: there is no file xxx") and said.endswith("xend: name one\n")


def test_ctrl_c_while_settings_are_composed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """OmegaConf cleans up after an exception, and fails there where the exception came at the wrong moment."""
    plain = compose._compose

    def cleans(*given: Any, **options: Any) -> Any:
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException:
            raise AttributeError("'NoneType' object has no attribute") from None
        return plain(*given, **options)

    monkeypatch.setattr(compose, "_compose", cleans)
    assert main(["copy: Ada"]) == 130
    assert capsys.readouterr().err == "dllm-sample: interrupted\n"
