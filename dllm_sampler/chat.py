"""Chat messages as token ids, by the template that came with the checkpoint.

A template is a program in Jinja that anybody may have written. transformers runs it in Jinja's sandbox, in which it can
open and import nothing, and which limits `range`. There it could still run forever, or use up the memory: here it runs
in a process of its own, with a time, a size and a memory limit, and whatever it raises is one sentence.
"""

from __future__ import annotations

import copy
import json
import os
import select
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any, NoReturn

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from dllm_sampler.core import files
from dllm_sampler.core.checks import check_text
from dllm_sampler.errors import UserError, short

Message = Mapping[str, str]

SECONDS = 10.0  # of processor time: a template takes a millisecond, and waits for nothing
CHARACTERS = 4_000_000  # of a prompt: no model's context has room for more
MEMORY = 2 << 30  # bytes that a template may add to those of the process
IDLE = 5.0  # seconds that the process of templates waits for another prompt


def ids(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, name: str) -> list[int]:
    """Token ids of chat messages, with the beginning of the model's answer; arguments and errors as `text`."""
    made = text(messages, tokenizer, name)
    check_text(name, made)
    encoded: Any = tokenizer(made, add_special_tokens=False)
    return list(encoded["input_ids"])


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
    options: dict[str, bool] = {"add_generation_prompt": bool(begin), "continue_final_message": begin is False}
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
_renderer: _Renderer | None = None  # of the tokenizer that was asked last


class _Renderer:
    """A copy of this process that renders the templates of one tokenizer, and that the system can end at any moment.

    No thread can do this: a single operation, the comparison of two lists say, may take forever, and lets no other
    thread run. Copying a large process takes some 10 ms, so that the copy stays for the next prompt, and ends by
    itself when there is none for a while, or when this process has ended.

    Args:
        tokenizer: has the template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer, self.state = tokenizer, _state(tokenizer)
        asks, self._ask = os.pipe()
        self._answer, answers = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads: the copy has this one only, and needs no lock of theirs
            self._process = os.fork()
        if not self._process:
            os.close(self._ask)  # so that this process sees the end of the other one
            _serve(tokenizer, asks, answers)
        os.close(asks)
        os.close(answers)

    def serves(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether it is a copy with this tokenizer as it is now."""
        return self.tokenizer is tokenizer and self.state == _state(tokenizer)

    def __call__(self, question: bytes) -> bytes:
        """Its answer to a line, a line; nothing: it has ended."""
        with suppress(BrokenPipeError):
            files.put(self._ask, question)
        while not select.select([self._answer], [], [], 0.2)[0]:
            pass  # a signal that comes just before a wait does not end it: Ctrl-C is seen after this one at the latest
        with open(self._answer, "rb", closefd=False) as file:
            return file.readline()

    def close(self) -> int:
        """End it; returns the signal that had ended it before."""
        os.close(self._ask)
        os.close(self._answer)
        with suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)
        with suppress(ChildProcessError):  # somebody else has waited for it
            _, status = os.waitpid(self._process, 0)
            return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        return 0


def _state(tokenizer: PreTrainedTokenizerBase) -> Any:
    """All that a template sees of a tokenizer, and the template."""
    return copy.deepcopy((tokenizer.chat_template, tokenizer.special_tokens_map))


def _limited(
    tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, str]], options: dict[str, bool]
) -> tuple[str, str]:
    """What the template makes of messages, or why it makes nothing.

    Returns:
        Nothing and the text; or `time`, `memory` or `error`, and what the error says.
    """
    global _renderer
    if not hasattr(os, "fork"):  # Windows
        return _said(partial(tokenizer.apply_chat_template, chat, tokenize=False, **options))
    try:
        question = (json.dumps([SECONDS, MEMORY, chat, options]) + "\n").encode()
    except (TypeError, ValueError, RecursionError) as error:  # fields of messages that JSON does not have
        return "error", f"{type(error).__name__}: {error}"
    with _ONE:
        try:
            said, ended = b"", 0
            if _renderer is not None and _renderer.serves(tokenizer):
                said, ended = _asked(question)
            if not said and not ended:  # there was none, or it had just gone for want of work
                _end()
                _renderer = _Renderer(tokenizer)
                said, ended = _asked(question)
        except BaseException:  # Ctrl-C
            _end()
            raise
    if not said:
        return "time" if ended == signal.SIGPROF else "memory", ""
    why, text = json.loads(said)
    return why, text


def _asked(question: bytes) -> tuple[bytes, int]:
    """What the copy answers; else nothing, and the signal that has ended it."""
    assert _renderer is not None
    said = _renderer(question)
    return said, 0 if said else _end()


def _end() -> int:
    """End the copy; returns the signal that had ended it."""
    global _renderer
    ended, _renderer = _renderer, None
    return ended.close() if ended is not None else 0


def _serve(tokenizer: PreTrainedTokenizerBase, asks: int, answers: int) -> NoReturn:
    """Answer lines until there are no more, and end this process, or be ended by the system when a time is over."""
    try:
        for number in (signal.SIGPROF, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)  # it ends the process, whatever Python is doing
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other process
        with open(asks, "rb") as file:
            while select.select([asks], [], [], IDLE)[0] and (line := file.readline()):
                seconds, memory, chat, options = json.loads(line)
                signal.setitimer(signal.ITIMER_PROF, seconds)
                _limit_memory(memory)
                said = _said(partial(tokenizer.apply_chat_template, chat, tokenize=False, **options))
                files.put(answers, (json.dumps(said) + "\n").encode())
                signal.setitimer(signal.ITIMER_PROF, 0)
    finally:
        os._exit(0)


def _said(render: Callable[[], Any]) -> tuple[str, str]:
    try:
        made = str(render())
        return "", made[: CHARACTERS + 1]
    except MemoryError:
        return "memory", ""
    except Exception as error:  # a template can raise whatever Python can
        return "error", str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"


def _limit_memory(memory: int) -> None:
    """Limit the bytes that this process may allocate from now on, where the system can say how much it has (Linux)."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + memory
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(
            resource.RLIMIT_AS, (most if hard in (resource.RLIM_INFINITY, -1) else min(most, hard), hard)
        )
