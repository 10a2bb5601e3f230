"""How every command ends: a user's mistake prints one sentence on stderr, not a stack trace."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from dllm_sampler.errors import UserError

LONGEST = 400  # letters of a word that an error quotes whole
USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def ending(command: str, run: Callable[[], int], interrupted: str = "interrupted") -> int:
    """The exit status of `run()`, its errors said in the name of `command`.

    Args:
        command: as it is called.
        run: all that the command does; returns its exit status.
        interrupted: what Ctrl-C leaves behind.
    """
    try:
        return run()
    except UserError as error:
        said = (word if len(word) <= LONGEST else f"{word[:60]}...{word[-20:]}" for word in str(error).split())
        print(f"{command}: {' '.join(said)}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"{command}: {interrupted}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # as in `dllm-sample ... | head -1`; the flush at exit has no reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
