"""`output=` of `dllm-sample`, what it shows while it runs, and how it ends before its time."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from dllm_sampler import Sampler, sampler
from dllm_sampler.cli import compose, run
from dllm_sampler.cli.live import Screen, figures, render
from dllm_sampler.cli.main import main
from dllm_sampler.cli.output import Totals
from dllm_sampler.cli.terminal import ending
from dllm_sampler.errors import NotFiniteError, UserError
from dllm_sampler.host import files
from dllm_sampler.result import Commits
from tests.disks import full_after
from tests.sampling import each, few

# `output=` of `dllm-sample`: nothing lost on a full disk, streams, two runs at once, how to go on after Ctrl-C


pytestmark = pytest.mark.usefixtures("at_a_terminal")
PROMPTS = ["copy: Ada", "copy: Ben", "copy: Cal", "Dan"]


def records(file: Path | str) -> list[dict[str, Any]]:
    """The lines of a file, each of them whole, but for their times."""
    text = Path(file).read_text()
    assert text.endswith("\n") or not text
    found = [json.loads(line) for line in text.splitlines()]
    return [{name: value for name, value in one.items() if name != "time"} for one in found]


@each("batching", ["in_flight", "static"])
def test_a_disk_that_is_full_at_the_last_record(
    words: list[str], capsys: pytest.CaptureFixture[str], batching: str
) -> None:
    words = [*words, *PROMPTS, f"batching={batching}", "output=o.jsonl"]
    assert main(words) == 0
    whole, answers, size = records("o.jsonl"), capsys.readouterr().out, os.path.getsize("o.jsonl")
    with full_after(size - 60):  # in the middle of the last line, whatever the times of the others
        assert main(words) == 2
    out, err = capsys.readouterr()
    assert records("o.jsonl") == whole[:-1]
    assert out == answers, "what cannot be kept is shown"
    assert "dllm-sample: output=o.jsonl cannot be written (File too large)" in err and "samples," not in err


def test_a_disk_that_is_full_at_the_end(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some systems say only then that what they took does not fit."""

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main([*words, "copy: Ada", "output=o.jsonl"]) == 2
    assert "output=o.jsonl cannot be written (No space left on device)" in capsys.readouterr().err


def test_standard_output_on_a_full_disk() -> None:
    """Also of what is printed without a flush, which would be told only at exit."""
    code = "import sys; from dllm_sampler.cli.main import main; sys.exit(main(['--version']))"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    root = Path(__file__).parents[2]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, cwd=root, env=buffered
        )
    assert done.returncode == 2
    said = "dllm-sample: standard output cannot be written (No space left on device). Check"
    assert done.stderr.startswith(said) and done.stderr.count("\n") == 1


def test_streams(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    words = [*words, *PROMPTS]
    assert main([*words, "output=o.jsonl"]) == 0
    whole, answers = records("o.jsonl"), capfd.readouterr().out
    assert main([*words, "output=/dev/null"]) == 0 and capfd.readouterr().out == answers
    os.mkfifo("fifo")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(Path("fifo").read_text()))
    reader.start()
    assert main([*words, "output=fifo"]) == 0 and capfd.readouterr().out == answers
    reader.join(20)
    Path("read").write_text(read[0])
    assert records("read") == whole
    for name in ("/dev/stdout", "/dev/fd/1"):
        assert main([*words, f"output={name}"]) == 0
        Path("read").write_text(capfd.readouterr().out)
        assert records("read") == whole, "and no answers between the lines"
    assert main([*words, "output=/dev/full"]) == 2
    assert "output=/dev/full cannot be written (No space left on device)" in capfd.readouterr().err


def test_a_reader_that_leaves(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo("fifo")
    reader, plain = os.open("fifo", os.O_RDONLY | os.O_NONBLOCK), os.open

    def leaving(path: Any, *rest: Any) -> int:
        opened = plain(path, *rest)
        if str(path) == "fifo":
            os.close(reader)
        return opened

    monkeypatch.setattr(os, "open", leaving)
    assert main([*words, *PROMPTS, "output=fifo"]) == 2
    assert "output=fifo cannot be written (Broken pipe)" in capsys.readouterr().err


def test_prompts_are_not_overwritten(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    prompts = Path("prompts.txt")
    prompts.write_text("copy: Ada\n")
    os.link(prompts, "hard")
    os.symlink(prompts, "soft")
    Path("sub").mkdir()
    for name in ("prompts.txt", "hard", "soft", "sub/../prompts.txt"):
        assert main([*words, f"prompts_file={prompts}", f"output={name}"]) == 2
        assert f"output={name} would overwrite prompts_file" in capsys.readouterr().err
        assert prompts.read_text() == "copy: Ada\n"


def test_only_samples_are_overwritten(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A model's config, a schema, notes: what has another ending, and is no file of samples."""
    for name, held in (("config.json", '{"d_model": 16}'), ("schema.json", '{\n "type": "boolean"}'), ("a.txt", "a\n")):
        Path(name).write_text(held)
        assert main([*words, *PROMPTS, f"output={name}"]) == 2
        assert f"output={name} exists and contains no samples" in capsys.readouterr().err
        assert Path(name).read_text() == held
    for name, held in (("o.json", ""), ("new.txt", '{"sch'), ("o.jsonl", "of another run\n")):
        Path(name).write_text(held)
        for _ in range(2):
            assert main([*words, *PROMPTS, f"output={name}"]) == 0
            assert len(records(name)) == len(PROMPTS)


def test_one_run_at_a_time(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("o.jsonl").write_text("of another run\n")
    os.link("o.jsonl", "hard.jsonl")
    first = files.Lines("o.jsonl", "output=o.jsonl")  # as another process holds it
    for name in ("o.jsonl", "hard.jsonl"):
        assert main([*words, "copy: Ada", f"output={name}"]) == 2
        assert f"output={name}" in capsys.readouterr().err
    assert Path("o.jsonl").read_text() == "of another run\n"
    first.close()
    assert main([*words, "copy: Ada", "output=o.jsonl"]) == 0


def interrupt(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Ctrl-C comes before the first answer to a prompt, when all others are done."""
    plain = sampler.Sampler.generate_many

    def interrupted(*args: Any, **rest: Any) -> Any:
        for answer in sorted(plain(*args, **rest), key=lambda one: (one.index == at, one.index, one.sample)):
            if answer.index == at:
                raise KeyboardInterrupt
            yield answer

    monkeypatch.setattr(sampler.Sampler, "generate_many", interrupted)


def test_ctrl_c_says_how_to_go_on(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it says is true: with the rest the file has the samples of a whole run, in their order."""
    words = [*words, *PROMPTS, "temperature=1", "samples=2", "dtype=float64", "batch_size=2", "seed=5"]
    assert main([*words, "output=whole.jsonl"]) == 0
    answers = capsys.readouterr().out.splitlines()
    with monkeypatch.context() as patch:
        interrupt(patch, 1)
        assert main([*words, "output=o.jsonl"]) == 130
    said = "o.jsonl has 6 of 8 samples: the same command with resume=true makes the rest\n"
    assert said in capsys.readouterr().err
    assert [one["index"] for one in records("o.jsonl")] == [0, 0, 2, 2, 3, 3]
    assert main([*words, "output=o.jsonl", "resume=true"]) == 0
    assert capsys.readouterr().out.splitlines() == answers[2:4]
    assert records("o.jsonl") == records("whole.jsonl")
    assert main([*words, "output=o.jsonl", "resume=true"]) == 0
    out, err = capsys.readouterr()
    assert out == "" and err == "o.jsonl is complete (8 samples)\n"


@few("more", [["samples=2"], ["samples=2", "stream=true"]])
def test_a_killed_run_is_resumed_after_any_byte(
    words: list[str], capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    """A line that was cut in the middle is made again; other numbers of rows at once change nothing."""
    words = [*words, *PROMPTS, "temperature=1", "dtype=float64", "batch_size=3", *more]
    assert main([*words, "output=whole.jsonl"]) == 0
    whole, data = records("whole.jsonl"), Path("whole.jsonl").read_bytes()
    for cut in (1, len(data) // 2, len(data) - 1):
        Path("o.jsonl").write_bytes(data[:cut])
        assert main([*words, "output=o.jsonl", "resume=true", "batch_size=2"]) == 0
        assert records("o.jsonl") == whole
        assert f"o.jsonl is complete ({len(whole)} samples)" in capsys.readouterr().err or cut < 2


def test_more_prompts_are_answered_and_others_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, *PROMPTS, "output=whole.jsonl"]) == 0
    again = [*words, "output=o.jsonl", "resume=true"]
    assert main([*again, *PROMPTS[:2]]) == 0 and main([*again, *PROMPTS]) == 0
    assert records("o.jsonl") == records("whole.jsonl")
    held = Path("o.jsonl").read_text()
    capsys.readouterr()
    for changed, said in (
        (["copy: Eve", *PROMPTS[1:]], "o.jsonl line 1 holds another prompt than prompt 1 of this run"),
        (PROMPTS[:3], "o.jsonl line 4 holds prompt 4, which is not in this run"),
        ([*PROMPTS, "seed=1"], "o.jsonl line 1 was made with other settings"),
        ([*PROMPTS, "scheduler=fixed"], "o.jsonl line 1 was made with other settings"),
        ([*PROMPTS, "samples=2", "temperature=1"], "o.jsonl line 1 was made with other settings"),
    ):
        assert main([*again, *changed]) == 2
        assert f"dllm-sample: {said}" in capsys.readouterr().err
        assert Path("o.jsonl").read_text() == held
    Path("o.jsonl").write_text("notes\n" + held)
    assert main([*again, *PROMPTS]) == 2 and "o.jsonl line 1 is not a sample" in capsys.readouterr().err
    assert Path("o.jsonl").read_text() == "notes\n" + held
    assert main([*words, *PROMPTS, "output=/dev/stdout", "resume=true"]) == 2
    assert "resume=true cannot continue output=/dev/stdout" in capsys.readouterr().err
    assert main([*words, *PROMPTS, "resume=true"]) == 2
    assert "resume=true continues a file of samples. Name it as output=FILE.jsonl" in capsys.readouterr().err


def test_ctrl_c_before_the_first_record(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **rest: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(sampler.Sampler, "stream", interrupted)
    Path("o.jsonl").write_text("of an earlier run\n")
    assert main([*words, "copy: Ada", "output=o.jsonl"]) == 130
    said = "no sample was done yet, and o.jsonl is as it was: the same command starts over\ndllm-sample: interrupted\n"
    assert capsys.readouterr().err.endswith(said)
    assert Path("o.jsonl").read_text() == "of an earlier run\n"


def test_ctrl_c_behind_a_record_does_not_double_it(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []

    def show(result: Any) -> None:
        shown.append(1)
        if len(shown) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(run, "show", show)
    assert main([*words, *PROMPTS, "output=o.jsonl"]) == 130
    indices = [one["index"] for one in records("o.jsonl")]
    assert indices == sorted(set(indices)) and indices[:2] == [0, 1]


# The canvas in the terminal


@each("stop", ["prefix", "none", "truncate", "block"])
def test_the_streams_figures_are_those_of_the_last_line(stop: str) -> None:
    """What stands behind an end token is counted by neither."""
    mini = Sampler.from_pretrained("mini", device="cpu", stop=stop)
    totals = Totals()
    *_, last = mini.stream(["copy: Ada, Ben", "reverse: Ada, Ben, Cal, Dan"], max_new_tokens=32, block_length=8)
    assert last.result is not None
    totals.add(0, last.result, 1.0)
    shown = figures(last, mini.denoiser.spec.eos_ids)
    assert re.search(r"[\d.]+ tokens per forward", shown)[0] in totals.line("cpu")  # type: ignore[index]
    assert "12/12 tokens" in shown and "12 tokens in" in totals.line("cpu")


class Words:
    """A tokenizer of digits."""

    all_special_ids = (9,)

    def decode(self, ids: list[int]) -> str:
        return "".join(map(str, ids))


def test_noise_that_is_not_open_is_counted() -> None:
    tokenizer = cast(PreTrainedTokenizerBase, Words())
    ids, masked, steps = [1, 0, 2, 0, 0, 3, 0], [False, True, False, True, True, False, True], [0] * 7
    assert render(ids, masked, steps, tokenizer, open_end=3).plain == "1 ░░ 2 ... 2 more 3 ... 1 more"
    assert render(ids, masked, steps, tokenizer).plain == "1 ░░ 2 ░░ ░░ 3 ░░"
    assert render([0] * 64, [True] * 64, [0] * 64, tokenizer, open_end=2).plain == "░░ ░░ ... 62 more"


def test_a_stream_shows_what_is_open_and_nothing_behind_the_end() -> None:
    out = io.StringIO()
    mini = Sampler.from_pretrained("mini", device="cpu")
    screen = Screen(Console(file=out, width=400), ["1"], mini.tokenizer, 0, mini.denoiser.spec.eos_ids)
    for commits in mini.stream("copy: Ada, Ben", max_new_tokens=128, block_length=8, scheduler="fixed"):
        screen.show(commits)
    first, *_, last = out.getvalue().splitlines()
    assert first.count("░") <= 16 and "... 120 more" in first
    assert "░" not in last and "more" not in last and "Ada, Ben" in last


@each(("behind", "rate"), [(0, "0.50"), (6, "2.00")])
def test_tokens_behind_an_end_token_count_while_they_are_committed(behind: int, rate: str) -> None:
    """As with `stop=none`, which commits one a step: the rate does not fall."""
    tokens = torch.full((1, 8), 1)
    masked = torch.ones(1, 8, dtype=torch.bool)
    tokens[0, 1] = 9  # the end token
    masked[0, : 2 + behind] = False
    commits = Commits(4, tokens, masked, torch.zeros(1, 8, dtype=torch.long), torch.tensor([4]))
    assert figures(commits, (9,)) == f"step 4 · NFE 4 · {2 + behind}/{2 + behind} tokens · {rate} tokens per forward"


# How `dllm-sample` ends before its time: Ctrl-C, logits that are not finite, a reader that leaves


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
    assert "not committed yet" in err
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
