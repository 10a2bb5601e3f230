"""Writing files: whole or not at all. A full disk is an error of one sentence."""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from dllm_sampler.errors import NotWrittenError, UserError

# Names of this process's open streams. Opened by such a name, a file would be written from its start.
_OPEN = re.compile(r"/dev/std(?P<name>out|err)|/(?:dev|proc/self)/fd/(?P<number>\d+)")
_OS_ERROR = re.compile(r"(?:\(os error|\bOs \{ code:) (\d+)")  # in what libraries written in Rust say
STDOUT = 1


def write(path: str | Path, content: str | bytes) -> None:
    """Replace a file atomically. A link stays a link; a pipe or a device is written to.

    Raises:
        NotWrittenError: it cannot be written; what it had before is still there.
    """
    data = content.encode() if isinstance(content, str) else content
    with reported(path):
        if is_stream(path):
            with _opened(path, os.O_WRONLY) as file:
                put(file, data)
            return
        target = Path(os.path.realpath(path))
        partial = target.with_name(f".{uuid4().hex}.part")  # of no other process, and short whatever the target's name
        try:
            with _opened(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                put(file, data)
                os.fchmod(file, _mode(target, stat.S_IMODE(os.fstat(file).st_mode)))
                os.fsync(file)
            os.replace(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)


def move(path: Path, target: Path) -> None:
    """Rename a complete file in its folder, in place of the file that has the new name, if any.

    Raises:
        NotWrittenError: it cannot be renamed.
    """
    with reported(target):
        os.replace(path, target)
    _sync_folder(target.parent)


def make_folder(path: str | Path) -> None:
    """Make a folder and its parents where they do not exist.

    Raises:
        UserError: it is a file.
        NotWrittenError: it cannot be made.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # no `NotWrittenError`: the same command would fail again
        raise UserError("folder-invalid", f"{path} is not a folder. Name another.") from None
    except OSError as error:
        raise NotWrittenError(f"Cannot store results in {path}: {error.strerror}. Name another folder.") from error


def append(path: str | Path, lines: str) -> None:
    """Append whole lines to a file: all of them, or none and an error.

    An incomplete last line, which a killed process left, is ended first.

    Args:
        path: the file, which several processes may append to.
        lines: each with its end. They are on the disk when this returns.

    Raises:
        NotWrittenError: they cannot be written.
    """
    with reported(path), _opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) as file:
        lock(file, wait=True)  # after an error only lines of this process are cut off
        size = os.fstat(file).st_size
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        _extend(file, size, ("\n" * torn + lines).encode())
        os.fsync(file)


def write_folder(folder: Path, save: Callable[[str], object]) -> None:
    """Let a library write files into a folder. The files get their names there when all of them are on the disk.

    A file that is replaced keeps its mode. A new one gets the mode that the umask gives, whatever the library set:
    safetensors writes files that only their owner can read.

    Args:
        folder: made where it does not exist.
        save: writes the files to the folder that it is given; a subfolder is an error.

    Raises:
        NotWrittenError: they cannot be written.
    """
    with reported(folder):
        make_folder(folder)
        with TemporaryDirectory(dir=folder, prefix=".", suffix=".part") as made:
            save(made)
            found = sorted(Path(made).iterdir())
            usual = _usual_mode(Path(made))
            for one in found:
                with _opened(one, os.O_RDWR) as file:
                    os.fchmod(file, _mode(folder / one.name, usual))
                    os.fsync(file)
            for one in found:
                os.replace(one, folder / one.name)
        _sync_folder(folder)


@contextmanager
def locked(path: Path, busy: str | None = None, *, keep: bool = False) -> Iterator[None]:
    """Hold the lock of a file that exists for nothing else. The lock ends with the process.

    Args:
        path: the file.
        busy: the error if another process holds the lock. With None it is waited for.
        keep: leave the file there, which is quicker if processes take turns.

    Raises:
        NotWrittenError: the file cannot be made.
        UserError: another process holds the lock.
    """
    from filelock import FileLock, Timeout  # imports asyncio: a mistake does not wait for it

    lock = FileLock(path)
    with reported(path):
        try:
            lock.acquire(blocking=busy is None)
        except Timeout:
            raise UserError("file-locked", busy or "") from None
    try:
        yield
    finally:
        if not keep:  # a process that has opened the file notices, and makes a new one
            path.unlink(missing_ok=True)
        lock.release()


class Lines:
    """Writes lines to a file or a stream. The first line replaces what the file had after the bytes to be kept.

    Until then the file is as it was: a mistake found before costs nothing. It is locked while it is open; the lock ends
    with the process.

    Args:
        path: a file, or a stream: a pipe, a device, `/dev/stdout`.
        named: the file in the words of the user, for messages.

    Attributes:
        count: the whole lines written.
        kept: bytes at the beginning of a file that the first line leaves there; 0 unless set.
        regular: whether it is a file, and no stream.
        stdout: whether the lines go to standard output.

    Raises:
        NotWrittenError: it cannot be opened.
        UserError: another process writes to it.
    """

    def __init__(self, path: str | Path, named: str):
        self.path, self.named, self.count, self.kept = Path(path), named, 0, 0
        number = _descriptor(path)
        self.stdout = number == STDOUT
        with reported(path, named):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self.file = os.open(path, flags, 0o666) if number is None else os.dup(number)
            self.regular = number is None and stat.S_ISREG(os.fstat(self.file).st_mode)
        if self.regular and not lock(self.file, wait=False):
            os.close(self.file)
            raise UserError("file-locked", f"Another process is writing {named}. Wait, or name another file.")

    def add(self, line: str) -> None:
        """Write a line, given without its end. After an error a regular file has the lines before and no part of it.

        Raises:
            NotWrittenError: it cannot be written.
            BrokenPipeError: the reader of standard output has left.
        """
        data = (line + "\n").encode()
        with reported(self.path, self.named, broken=self.stdout):
            if not self.regular:
                put(self.file, data)
                self.count += 1
                return
            with uninterrupted():  # Ctrl-C comes when the line is counted
                if not self.count:
                    os.ftruncate(self.file, self.kept)
                _extend(self.file, os.fstat(self.file).st_size, data)
                self.count += 1

    def close(self) -> None:
        """Wait until the lines are on the disk, and close the file.

        Raises:
            NotWrittenError: they cannot be written, which some systems tell only here.
        """
        with reported(self.path, self.named):
            try:
                if self.regular:
                    os.fsync(self.file)
            finally:
                os.close(self.file)


@contextmanager
def reported(path: str | Path, named: str | None = None, broken: bool = False) -> Iterator[None]:
    """Turn an error of the operating system, or one that a library reports as text, into one sentence.

    Args:
        path: of the file, for the sentence.
        named: what to call it instead.
        broken: whether a reader that has left stays a `BrokenPipeError`.

    Raises:
        NotWrittenError: in place of the error.
    """
    try:
        yield
    except Exception as error:
        told = _OS_ERROR.search(str(error))
        if (broken and isinstance(error, BrokenPipeError)) or (told is None and not isinstance(error, OSError)):
            raise
        reason = os.strerror(int(told[1])) if told else getattr(error, "strerror", None) or error
        raise NotWrittenError(
            f"{named or path} cannot be written ({reason}). Check the path, the disk and the permissions."
        ) from error


def is_stream(path: str | Path) -> bool:
    """Return True if a path names a pipe, a device or an open stream: what was written there cannot be replaced."""
    if _descriptor(path) is not None:
        return True
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def same(one: str | Path, other: str | Path) -> bool:
    """Return True if two paths lead to one regular file, by `..` or through links."""
    with suppress(OSError):
        return os.path.samefile(one, other) and not is_stream(one)
    return os.path.realpath(one) == os.path.realpath(other)


def under(folder: str | Path, *patterns: str) -> Iterator[Path]:
    """Files at any depth whose names fit one of the patterns; skip folders that cannot be listed (some of /proc)."""
    for where, _, names in os.walk(folder):
        for pattern in patterns:
            yield from (Path(where, name) for name in fnmatch.filter(names, pattern))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until this block ends; in the main thread, where Python raises it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A handler of our own and no mask: another thread would take the signal, and Python interrupts the main one.
    before, met = signal.getsignal(signal.SIGINT), list[int]()
    signal.signal(signal.SIGINT, lambda number, _: met.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if met:
            signal.raise_signal(signal.SIGINT)


def _mode(path: Path, default: int) -> int:
    """Return the mode of a file, or `default` if it does not exist."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return default


def _usual_mode(folder: Path) -> int:
    """Return the mode of a new file in a folder. `os.umask` cannot be read without setting it for all threads."""
    probe = folder / uuid4().hex
    with _opened(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        mode = stat.S_IMODE(os.fstat(file).st_mode)
    probe.unlink()
    return mode


def _descriptor(path: str | Path) -> int | None:
    """The number of the open stream that a path names."""
    found = _OPEN.fullmatch(str(path))
    if found is None:
        return None
    return int(found["number"]) if found["number"] else {"out": STDOUT, "err": 2}[found["name"]]


@contextmanager
def _opened(path: str | Path, flags: int) -> Iterator[int]:
    number = _descriptor(path)
    file = os.open(path, flags, 0o666) if number is None else os.dup(number)
    try:
        yield file
    except BaseException:
        with suppress(OSError):
            os.close(file)
        raise
    os.close(file)  # some file systems say only here that the disk is full


def put(file: int, data: bytes) -> None:
    """Write all of it to an open file: one call to the system may write less, and say nothing."""
    rest = memoryview(data)
    while rest:
        wrote = os.write(file, rest)
        if wrote == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest = rest[wrote:]


def lock(file: int, wait: bool) -> bool:
    """Take the lock of an open file, which ends when it is closed; False: another process has it.

    File systems without locks, and systems without `flock`, have none: the answer is True there.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        pass
    return True


def _extend(file: int, size: int, data: bytes) -> None:
    """Append to a file of `size` bytes; after an error it has that size again."""
    try:
        put(file, data)
    except BaseException:
        with suppress(OSError):
            os.ftruncate(file, size)
        raise


def _sync_folder(folder: Path) -> None:
    """Write the names of a folder to the disk, where the system can."""
    with suppress(OSError):
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
