"""A program that renders chat templates, started by `chat.py`: the system can end it at any moment.

It reads lines from its input and answers each with a line, both JSON. It imports nothing of this package, which would
take seconds, and ends when its input does, or when there is nothing to do for a while.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

READY = b"ready\n"  # its first line


def said(render: Callable[[], Any], most: int) -> tuple[str, str]:
    """Render: `("", text)`, `("memory", "")` or `("error", message)`, text and message cut to `most` characters."""
    try:
        return "", str(render())[:most]
    except MemoryError:
        return "memory", ""
    except Exception as error:  # a template can raise whatever Python can
        from jinja2 import TemplateError

        return "error", (str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}")[:most]


def limit_memory(more: int) -> None:
    """Limit the bytes that this process may allocate from now on, where the system can say how many it has (Linux)."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + more
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(
            resource.RLIMIT_AS, (most if hard in (resource.RLIM_INFINITY, -1) else min(most, hard), hard)
        )


def serve(asks: int, answers: int, idle: float) -> None:
    """Answer the lines of one file by lines in another.

    Args:
        asks: the file of questions: seconds of processor time, bytes of memory and characters that the text may take,
            and the arguments of `apply_chat_template`.
        answers: the file of what `said` returns.
        idle: seconds to wait for a question.
    """
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    tokenizer = PreTrainedTokenizerBase()  # its template and tokens come with each question
    os.write(answers, READY)
    with os.fdopen(asks, "rb") as file, os.fdopen(answers, "wb") as out:
        while _asked(asks, idle) and (line := file.readline()):
            seconds, memory, most, arguments = json.loads(line)
            _limit_time(seconds)
            limit_memory(memory)
            made = said(lambda: tokenizer.apply_chat_template(**arguments, tokenize=False), most)  # noqa: B023
            out.write((json.dumps(made) + "\n").encode())
            out.flush()
            _limit_time(0)


def _asked(asks: int, idle: float) -> bool:
    """Wait for a question; False: none has come in `idle` seconds."""
    if sys.platform == "win32":  # pipes have no timeout there: reading waits
        return True
    import select

    return bool(select.select([asks], [], [], idle)[0])


def _limit_time(seconds: float) -> None:
    """End this process after so much processor time, whatever Python is doing; 0: no more."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    if sys.platform != "win32":  # both could be inherited
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    own = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    serve(0, own, float(sys.argv[1]))
    os._exit(0)  # at once, so that nobody asks a process that is about to end
