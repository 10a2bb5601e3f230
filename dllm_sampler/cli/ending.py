"""How every command ends: a user's mistake prints one sentence on stderr, not a stack trace."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from dllm_sampler.cli.terminal import show
from dllm_sampler.errors import UserError

# Errors of a system that cannot take what is written: it is full, has a limit, is broken or read-only.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def ending(command: str, run: Callable[[], int], interrupted: str = "interrupted") -> int:
    """The exit status of `run()`, its errors said in the name of `command`.

    Args:
        command: as it is called.
        run: all that the command does; returns its exit status.
        interrupted: what Ctrl-C leaves behind.
    """
    try:
        status = run()
        if sys.stdout is not None:
            sys.stdout.flush()  # at exit it would be too late to say that the disk is full
        return status
    except UserError as error:
        show(f"{command}: {' '.join(str(error).split())}", sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"{command}: {interrupted}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # as in `dllm-sample ... | head -1`; the flush at exit has no reader
        _mute()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in FULL:
            raise
        _mute()
        where = "standard output" if error.filename is None else error.filename
        show(f"{command}: {where} cannot be written: {error.strerror}", sys.stderr)
        return USER_ERROR


def _mute() -> None:
    """What is left to write at exit goes nowhere: standard output takes no more."""
    with suppress(OSError, ValueError):  # a test's has no number
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
