"""Chat messages as a text, by the template that came with the checkpoint.

A template is a program in Jinja that anybody may have written. transformers runs it in Jinja's sandbox, in which it can
open and import nothing, and which limits `range`. There it could still run forever, or use up the memory: here it runs
in a process of its own, with a time, a size and a memory limit, and whatever it raises is one sentence. Only a
tokenizer with a method of its own for this, code that was trusted, is asked itself.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from transformers import PreTrainedTokenizerBase

from dllm_sampler import rendering
from dllm_sampler.core import files
from dllm_sampler.errors import UserError, short

Message = Mapping[str, str]

SECONDS = 10.0  # of processor time: a template takes a millisecond, and waits for nothing
CHARACTERS = 4_000_000  # of a prompt: no model's context has room for more
MEMORY = 2 << 30  # bytes that a template may add to those of the process
ENDING = 5.0  # seconds that this process has to exit after it has closed its output
IDLE = 60.0  # seconds that the process of templates waits for another prompt


def text(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, name: str, begin: bool | None = True) -> str:
    """Chat messages as the model's prompt.

    Args:
        messages: each with a `role` and a `content`.
        tokenizer: has the template.
        name: what errors call the messages, `prompt 1` say.
        begin: with the beginning of the model's answer; False: the last message is that, to be continued; None: the
            last message is a whole one, and nothing follows.

    Raises:
        UserError: there is no template, or it raises an error, takes too long, or gets too large.
    """
    template: Any = tokenizer.chat_template
    if template is None:
        raise UserError(f"{name} has chat messages, but this model's tokenizer has no chat template")
    chat = [dict(message) for message in messages]
    options: dict[str, Any] = {"add_generation_prompt": bool(begin), "continue_final_message": begin is False}
    why, made = _limited(tokenizer, chat, options)
    if why == "time":
        raise UserError(f"the chat template of this model takes more than {SECONDS:g} s for {name}")
    if why == "memory":
        raise UserError(f"the chat template of this model takes more than {MEMORY >> 20} MB for {name}")
    if why:
        raise UserError(f"{name} does not fit this model's chat template: {short(' '.join(made.split()))}")
    if len(made) > CHARACTERS:
        raise UserError(
            f"the chat template of this model makes more than the {CHARACTERS} characters of {name} that are allowed"
        )
    return made


_ONE = Lock()
_renderer: _Renderer | None = None  # of all tokenizers


class _Renderer:
    """A process that renders templates (`rendering.py`), and that the system can end at any moment.

    No thread can do this: a single operation, the comparison of two lists say, may take forever, and lets no other
    thread run. Nor can a copy of this process (fork): a lock that another thread holds stays locked there. Starting
    takes the better part of a second, so that the process stays for the next prompt, and ends by itself when there is
    none for a while, or when this process has ended.

    Raises:
        UserError: it does not start.
    """

    def __init__(self) -> None:
        program = Path(rendering.__file__)
        wrong = "chat templates are rendered in a process of their own, which does not start here:"
        try:
            # -P: without the program's folder, whose modules would hide others. Ctrl-C is for this process.
            self._process = subprocess.Popen(
                [sys.executable or "python", "-P", str(program), str(IDLE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"{wrong} {error}") from None
        try:
            begun = self._line()
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if begun != rendering.READY:
            self.close()
            raise UserError(f"{wrong} `{sys.executable} -P {program} 1` says why")

    def __call__(self, question: bytes) -> bytes:
        """Send a line, and return the line that answers it; empty: the process has ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            files.put(self._process.stdin.fileno(), question)
        return self._line()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        if sys.platform != "win32":
            import select

            # A signal that comes just before a wait does not end it: Ctrl-C is seen after this one at the latest.
            while not select.select([self._process.stdout], [], [], 0.2)[0]:
                pass
        return self._process.stdout.readline()

    def close(self, seconds: float = 0) -> int:
        """Wait up to `seconds` for the process to exit, then kill it. Returns the signal that ended it; 0: none did."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._process.kill()
        with self._process:  # closes the pipes, and waits
            pass
        return max(-self._process.returncode, 0)

    def leave(self) -> None:
        """Close the pipes of a copy of this process (fork). The process belongs to the original."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.returncode = 0  # so that Popen does not wait for it


def _limited(
    tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, str]], options: dict[str, Any]
) -> tuple[str, str]:
    """What the template makes of messages, or why it makes nothing.

    Returns:
        Nothing and the text; or `time`, `memory` or `error`, and what the error says.
    """
    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        # Code of the tokenizer's own, which its user trusts: another process does not have it.
        return rendering.said(lambda: tokenizer.apply_chat_template(chat, tokenize=False, **options), CHARACTERS + 1)
    try:
        tokens = {name: _plain(token) for name, token in tokenizer.special_tokens_map.items()}
        arguments = {"conversation": chat, "chat_template": tokenizer.get_chat_template(), **options, **tokens}
        question = (json.dumps([SECONDS, MEMORY, CHARACTERS + 1, arguments]) + "\n").encode()
    except (TypeError, ValueError, RecursionError) as error:  # fields of messages that JSON does not have
        return "error", f"{type(error).__name__}: {error}"
    global _renderer
    with _ONE:
        try:
            said, ended = _asked(question) if _renderer is not None else (b"", 0)
            if not said and not ended:  # there was none, or it had just gone for want of work
                _end()
                _renderer = _Renderer()
                said, ended = _asked(question)
        except BaseException:  # Ctrl-C
            _end()
            raise
    if not said:
        return "time" if ended == getattr(signal, "SIGPROF", None) else "memory", ""
    why, text = json.loads(said)
    return why, text


def _plain(token: Any) -> Any:
    """A special token, or several, as JSON has them."""
    return [str(one) for one in token] if isinstance(token, (list, tuple)) else str(token)


def _asked(question: bytes) -> tuple[bytes, int]:
    """What the process answers; else nothing, and the signal that has ended it."""
    assert _renderer is not None
    said = _renderer(question)
    return said, 0 if said else _end(ENDING)


def _end(seconds: float = 0) -> int:
    """End the process; see `_Renderer.close`."""
    global _renderer
    ended, _renderer = _renderer, None
    return ended.close(seconds) if ended is not None else 0


def _forget() -> None:
    """After a fork, in the child: drop the parent's process, and its lock, which another thread may hold."""
    global _renderer, _ONE
    if _renderer is not None:
        _renderer.leave()
    _renderer, _ONE = None, Lock()


atexit.register(_end)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)
