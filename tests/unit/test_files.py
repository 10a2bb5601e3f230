"""What the project writes is whole or an error: full disks, streams, links, two processes at once, Ctrl-C."""

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dllm_sampler.errors import NotWrittenError
from dllm_sampler.host import files
from tests.disks import fail, full_after
from tests.refusals import refused
from tests.sampling import each

ROOT = Path(__file__).parents[2]
FULL = os.strerror(errno.EFBIG)


def test_a_file_is_replaced_at_once_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / ("n" * 250)  # a name that leaves no room for a longer one
    files.write(file, "old")
    file.chmod(0o640)
    with full_after(1000), pytest.raises(NotWrittenError, match=rf"{file} cannot be written \({FULL}"):
        files.write(file, "x" * 2000)
    assert file.read_text() == "old" and os.listdir(tmp_path) == [file.name], "nothing half written is left"
    files.write(file, b"new")
    assert file.read_text() == "new" and stat.S_IMODE(file.stat().st_mode) == 0o640


@each("name", ["write", "fsync", "replace", "open"])
def test_whatever_fails_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file = tmp_path / "f"
    file.write_text("old")
    with monkeypatch.context() as patch:
        fail(patch, name)
        with refused("file-not-written"):
            files.write(file, "new")
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["f"]


def test_a_short_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.write
    monkeypatch.setattr(os, "write", lambda file, data: plain(file, data[:3]))
    files.write(tmp_path / "f", "0123456789")
    files.append(tmp_path / "f", "\nabcdefgh\n")
    assert (tmp_path / "f").read_text() == "0123456789\n\nabcdefgh\n", "the line before was closed first"


def test_a_folder_that_is_a_file_is_no_full_disk(tmp_path: Path) -> None:
    """What a command adds to the latter, that the same command goes on, would not be true."""
    (tmp_path / "f").touch()
    with refused("folder-invalid") as caught:
        files.make_folder(tmp_path / "f")
    assert not isinstance(caught.value, NotWrittenError)
    with refused("file-not-written"):
        files.make_folder(tmp_path / "f/g")


def test_appended_lines_are_all_there_or_none(tmp_path: Path) -> None:
    file = tmp_path / "f"
    files.append(file, "one\n")
    with full_after(10), pytest.raises(NotWrittenError, match=FULL):
        files.append(file, "two\nthree\nfour\n")
    assert file.read_text() == "one\n"
    file.write_text("one\ntw")  # cut by a kill
    files.append(file, "three\n")
    assert file.read_text() == "one\ntw\nthree\n"


def test_an_append_waits_for_its_turn(tmp_path: Path) -> None:
    """What is cut off after an error could otherwise be the line of another process."""
    file = tmp_path / "f"
    other = os.open(file, os.O_RDWR | os.O_CREAT)
    assert files.lock(other, wait=False)
    thread = threading.Thread(target=files.append, args=(file, "one\n"))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and file.read_text() == ""
    os.close(other)
    thread.join(20)
    assert file.read_text() == "one\n"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "f", tmp_path / "link"
    link.symlink_to(target)
    for content in ("one", "two"):
        files.write(link, content)
        assert link.is_symlink() and target.read_text() == content


def test_libraries_write_whole_folders(tmp_path: Path) -> None:
    def save(folder: str) -> None:
        (Path(folder) / "a.json").write_text("new")
        save_file({"a": torch.zeros(1000)}, f"{folder}/b.safetensors")

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.json").write_text("old")
    with full_after(2000), pytest.raises(NotWrittenError, match=rf"{folder} cannot be written \({FULL}"):
        files.write_folder(folder, save)  # the error of a library in Rust is no OSError
    assert os.listdir(folder) == ["a.json"] and (folder / "a.json").read_text() == "old"
    files.write_folder(folder, save)
    assert sorted(os.listdir(folder)) == ["a.json", "b.safetensors"] and (folder / "a.json").read_text() == "new"
    with pytest.raises(ZeroDivisionError):
        files.write_folder(folder, lambda given: 1 // 0)


def test_files_get_the_mode_of_the_umask(tmp_path: Path) -> None:
    """safetensors makes files that only their owner can read. A file that is replaced keeps its mode."""
    old = tmp_path / "old.safetensors"
    old.touch()
    old.chmod(0o640)

    def save(folder: str) -> None:
        for name in ("new.safetensors", old.name):
            save_file({"one": torch.ones(2)}, f"{folder}/{name}")
            os.chmod(f"{folder}/{name}", 0o600)

    before = os.umask(0o022)
    try:
        files.write_folder(tmp_path, save)
        files.write(tmp_path / "plain", "text")
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == {"new.safetensors": 0o644, old.name: 0o640, "plain": 0o644}


def test_streams_are_written_to(tmp_path: Path) -> None:
    """A FIFO gets the bytes and stays one; neither it nor a device is ever replaced by a file."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = subprocess.Popen(["cat", str(fifo)], stdout=subprocess.PIPE)
    files.write(fifo, "one\n")
    assert reader.communicate(timeout=20)[0] == b"one\n"
    assert stat.S_ISFIFO(fifo.stat().st_mode) and os.listdir(tmp_path) == ["fifo"]
    with refused("file-not-written"):
        files.write("/dev/full", "one")
    assert files.is_stream("/dev/null") and files.is_stream("/dev/stdout") and not files.is_stream(tmp_path / "no")


def test_standard_output_is_not_written_from_its_start(tmp_path: Path) -> None:
    """Where it leads to a file, what was printed before stays, and comes first."""
    code = "import os; from dllm_sampler.host import files; print('a', flush=True); files.write('/dev/stdout', 'b\\n')"
    code += "; lines = files.Lines('/dev/fd/1', 'it'); lines.add('c'); lines.close(); print('d', lines.stdout)"
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True, cwd=ROOT)
    assert (tmp_path / "out").read_text() == "a\nb\nc\nd True\n"


def test_lines_are_whole_and_replace_what_was_there_with_the_first(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("of an earlier run\n")
    lines = files.Lines(file, "output f")
    assert file.read_text() == "of an earlier run\n"
    with full_after(25):
        lines.add("0123456789")
        lines.add("é123456789")
        with pytest.raises(NotWrittenError, match=rf"^output f cannot be written \({FULL}"):
            lines.add("0123456789")
    assert file.read_text() == "0123456789\né123456789\n" and lines.count == 2
    lines.add("end")
    lines.close()
    assert file.read_text().splitlines()[2:] == ["end"]


@each("name", ["fsync", "close"])
def test_an_error_at_the_end_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    lines = files.Lines(tmp_path / "f", "output f")
    lines.add("one")
    with monkeypatch.context() as patch:
        fail(patch, name)
        with refused("file-not-written"):
            lines.close()


def test_ctrl_c_neither_cuts_a_line_nor_leaves_it_uncounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, plain = files.Lines(tmp_path / "f", "output f"), os.write

    def interrupted(file: int, data: memoryview) -> int:
        os.kill(os.getpid(), 2)
        return plain(file, data[:3])

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lines.add("0123456789")
    assert (tmp_path / "f").read_text() == "0123456789\n" and lines.count == 1


def test_a_lock_keeps_others_out_and_ends_with_its_process(tmp_path: Path) -> None:
    file, other = tmp_path / "lock", tmp_path / "f"
    code = f"""
import os, pathlib, sys
from dllm_sampler.host import files
lines = files.Lines({str(other)!r}, "output f")
with files.locked(pathlib.Path({str(file)!r})):
    print("ready", flush=True)
    sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    with refused("file-locked"), files.locked(file, "busy"):
        pass
    with refused("file-locked"):
        files.Lines(other, "output f")
    process.kill()
    process.wait()
    assert file.exists(), "it locks nothing by itself"
    with files.locked(file, "busy"), refused("file-locked"), files.locked(file, "busy"):
        pass
    assert not file.exists()
    files.Lines(other, "output f").close()


def test_processes_take_turns(tmp_path: Path) -> None:
    """Also where each removes the lock's file: a lock of a file that is gone is none."""
    (tmp_path / "n").write_text("0")
    code = """
from pathlib import Path
from dllm_sampler.host import files
for _ in range(30):
    with files.locked(Path("lock")):
        Path("n").write_text(str(int(Path("n").read_text()) + 1))
    files.append("lines", "a line\\n")
"""
    paths = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=paths) for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4
    assert (tmp_path / "n").read_text() == "120"
    assert (tmp_path / "lines").read_text() == "a line\n" * 120
