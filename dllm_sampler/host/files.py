"""Atomic writing of files. System errors become a `NotWrittenError` with a short message."""

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

# Names of this process's open streams. Opening one again could overwrite a file from its start.
_OPEN = re.compile(r"/dev/std(?P<name>out|err)|/(?:dev|proc/self)/fd/(?P<number>\d+)")
_OS_ERROR = re.compile(r"(?:\(os error|\bOs \{ code:) (\d+)")  # in messages of libraries written in Rust
STDOUT = 1


def write(path: str | Path, content: str | bytes) -> None:
    """Replace a file atomically, or write to a pipe or a device. The target of a link is replaced, not the link.

    Raises:
        NotWrittenError: the file cannot be written. Its old content is still there.
    """
    data = content.encode() if isinstance(content, str) else content
    with reported(path):
        if is_stream(path):
            with _opened(path, os.O_WRONLY) as file:
                put(file, data)
            return
        target = Path(os.path.realpath(path))
        partial = target.with_name(f".{uuid4().hex}.part")  # unique, and short even if the target's name is long
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
    """Rename a complete file to `target` in the same folder. An existing target is replaced.

    Raises:
        NotWrittenError: the file cannot be renamed.
    """
    with reported(target):
        os.replace(path, target)
    _sync_folder(target.parent)


def make_folder(path: str | Path) -> None:
    """Create a folder and its parents if they do not exist.

    Raises:
        UserError: the path is a file.
        NotWrittenError: the folder cannot be created.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # not a `NotWrittenError`, since the same command would fail again
        raise UserError("folder-invalid", f"{path} is not a folder. Name another.") from None
    except OSError as error:
        raise NotWrittenError(
            f"Cannot store results in {path}: {error.strerror}. Check the path, the disk and the permissions."
        ) from error


def append(path: str | Path, lines: str) -> None:
    """Append lines to a file, either all of them or none. They are on the disk when this returns.

    If a killed process left an incomplete last line, a line end is written first.

    Args:
        path: the file, to which several processes may append.
        lines: the lines, each with its line end.

    Raises:
        NotWrittenError: the lines cannot be written.
    """
    with reported(path), _opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) as file:
        lock(file, wait=True)  # after an error only lines of this process are cut off
        size = os.fstat(file).st_size
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        _extend(file, size, ("\n" * torn + lines).encode())
        os.fsync(file)


def write_folder(folder: Path, save: Callable[[str], object]) -> None:
    """Let a library write files into a folder. They are moved there once all of them are on the disk.

    A replaced file keeps its mode. A new file gets the usual mode of the umask, although safetensors makes its files
    readable for their owner only.

    Args:
        folder: the folder, which is created if it does not exist.
        save: writes files, but no subfolders, to the folder whose path it gets.

    Raises:
        NotWrittenError: the files cannot be written.
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
    """Hold a lock file's lock. The lock ends with the process at the latest.

    Args:
        path: path of the lock file.
        busy: message of the error if another process holds the lock. With None, wait for the lock.
        keep: do not delete the file afterwards, which is faster if processes take turns.

    Raises:
        NotWrittenError: the lock file cannot be created.
        UserError: another process holds the lock.
    """
    from filelock import FileLock, Timeout  # imports asyncio, which is slow

    lock = FileLock(path)
    with reported(path):
        try:
            lock.acquire(blocking=busy is None)
        except Timeout:
            raise UserError("file-locked", busy or "") from None
    try:
        yield
    finally:
        if not keep:  # a process that waits for the file notices, and creates a new one
            path.unlink(missing_ok=True)
        lock.release()


class Lines:
    """A writer of lines to a file or a stream. The first line removes the old content after the first `kept` bytes.

    Before the first line the file is unchanged. The file is locked until it is closed or the process ends.

    Args:
        path: a file or a stream (a pipe, a device or `/dev/stdout`).
        named: name of the file in messages.

    Attributes:
        count: number of complete lines written.
        kept: bytes at the beginning of the file that the first line does not remove, by default 0.
        regular: true for a regular file, false for a stream.
        stdout: true if the lines go to standard output.

    Raises:
        NotWrittenError: the file cannot be opened.
        UserError: another process is writing the file.
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
        """Write a line and a newline. After an error a regular file contains no part of the line.

        Raises:
            NotWrittenError: the line cannot be written.
            BrokenPipeError: the reader of standard output has closed it.
        """
        data = (line + "\n").encode()
        with reported(self.path, self.named, broken=self.stdout):
            if not self.regular:
                put(self.file, data)
                self.count += 1
                return
            with uninterrupted():  # Ctrl-C waits until the line is counted
                if not self.count:
                    os.ftruncate(self.file, self.kept)
                _extend(self.file, os.fstat(self.file).st_size, data)
                self.count += 1

    def close(self) -> None:
        """Wait until the lines are on the disk, and close the file.

        Raises:
            NotWrittenError: the lines cannot be written, which some systems report only now.
        """
        with reported(self.path, self.named):
            try:
                if self.regular:
                    os.fsync(self.file)
            finally:
                os.close(self.file)


@contextmanager
def reported(path: str | Path, named: str | None = None, broken: bool = False) -> Iterator[None]:
    """Turn an error of the operating system into a `NotWrittenError`, also one that a library reports as text.

    Args:
        path: path of the file, for the message.
        named: name of the file in the message, instead of its path.
        broken: raise a `BrokenPipeError` unchanged.

    Raises:
        NotWrittenError: the block raised such an error.
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
    """Return True if a path names a pipe, a device or an open stream, which cannot be replaced by a file."""
    if _descriptor(path) is not None:
        return True
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def same(one: str | Path, other: str | Path) -> bool:
    """Return True if both paths lead to the same file or folder, and neither names a stream.

    If either does not exist, their resolved paths are compared.
    """
    with suppress(OSError):
        return os.path.samefile(one, other) and not is_stream(one) and not is_stream(other)
    return os.path.realpath(one) == os.path.realpath(other)


def under(folder: str | Path, *patterns: str) -> Iterator[Path]:
    """Yield files at any depth whose names match one of the patterns. Folders that cannot be listed are skipped."""
    for where, _, names in os.walk(folder):
        for pattern in patterns:
            yield from (Path(where, name) for name in fnmatch.filter(names, pattern))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until this block ends. Outside of the main thread nothing is delayed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A signal mask would not help: another thread would take the signal, and Python would interrupt this one.
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
    """Return the descriptor of the open stream that a path names, or None for other paths."""
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
    os.close(file)  # some file systems report a full disk only here


def put(file: int, data: bytes) -> None:
    """Write all of `data` to an open file. A single `os.write` may write less."""
    rest = memoryview(data)
    while rest:
        wrote = os.write(file, rest)
        if wrote == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest = rest[wrote:]


def lock(file: int, wait: bool) -> bool:
    """Lock an open file until it is closed. Returns False if another process has locked it.

    Returns True without a lock if the file system or the platform does not support `flock`.
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
    """Append to a file of `size` bytes. After an error the file is cut to that size again."""
    try:
        put(file, data)
    except BaseException:
        with suppress(OSError):
            os.ftruncate(file, size)
        raise


def _sync_folder(folder: Path) -> None:
    """Write the entries of a folder to the disk, if the system supports this."""
    with suppress(OSError):
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
