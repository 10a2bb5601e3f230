"""`output=` of `dllm-sample`: nothing lost on a full disk, streams, two runs at once, how to go on after Ctrl-C."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dllm_sampler import sampler
from dllm_sampler.cli import run
from dllm_sampler.cli.main import main
from dllm_sampler.host import files
from tests.disks import full_after
from tests.sampling import each, few

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
    assert "dllm-sample: cannot write output o.jsonl: File too large" in err and "samples," not in err


def test_a_disk_that_is_full_at_the_end(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some systems say only then that what they took does not fit."""

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main([*words, "copy: Ada", "output=o.jsonl"]) == 2
    assert "cannot write output o.jsonl: No space left on device" in capsys.readouterr().err


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
    assert done.stderr == "dllm-sample: standard output cannot be written: No space left on device\n"


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
    assert "cannot write output /dev/full: No space left on device" in capfd.readouterr().err


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
    assert "cannot write output fifo: Broken pipe" in capsys.readouterr().err


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
        assert f"output={name} would overwrite another file" in capsys.readouterr().err
        assert Path(name).read_text() == held
    for name, held in (("o.json", ""), ("new.txt", '{"sch'), ("o.jsonl", "of another run\n")):
        Path(name).write_text(held)
        for _ in range(2):
            assert main([*words, *PROMPTS, f"output={name}"]) == 0
            assert len(records(name)) == len(PROMPTS)


def test_one_run_at_a_time(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("o.jsonl").write_text("of another run\n")
    os.link("o.jsonl", "hard.jsonl")
    first = files.Lines("o.jsonl", "output o.jsonl")  # as another process holds it
    for name in ("o.jsonl", "hard.jsonl"):
        assert main([*words, "copy: Ada", f"output={name}"]) == 2
        assert f"another process is writing output {name}" in capsys.readouterr().err
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
    assert out == "" and err == "o.jsonl has all 8 samples\n"


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
        assert f"o.jsonl has all {len(whole)} samples" in capsys.readouterr().err or cut < 2


def test_more_prompts_are_answered_and_others_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, *PROMPTS, "output=whole.jsonl"]) == 0
    again = [*words, "output=o.jsonl", "resume=true"]
    assert main([*again, *PROMPTS[:2]]) == 0 and main([*again, *PROMPTS]) == 0
    assert records("o.jsonl") == records("whole.jsonl")
    held = Path("o.jsonl").read_text()
    capsys.readouterr()
    for changed, said in (
        (["copy: Eve", *PROMPTS[1:]], "o.jsonl line 1 answers another prompt than number 1"),
        (PROMPTS[:3], "o.jsonl line 4 answers another prompt than number 4"),
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
    assert "resume=true cannot read output=/dev/stdout" in capsys.readouterr().err
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
