"""Chat messages as token ids, by the template that came with the checkpoint.

A template is a program in Jinja that anybody may have written. transformers runs it in Jinja's sandbox, in which it can
open and import nothing, and which limits `range`. There it could still run forever, or use up the memory: here it has a
time, a size and a memory limit, and whatever it raises is one sentence.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from threading import Lock, Thread
from typing import Any

from jinja2 import Environment, TemplateError
from transformers import PreTrainedTokenizerBase

from dllm_sampler.errors import UserError, short

Message = Mapping[str, str]

SECONDS = 10.0  # a template takes a millisecond
CHARACTERS = 4_000_000  # of a prompt: no model's context has room for more
MEMORY = 2 << 30  # bytes that a template may add to those of the process
_alone = Lock()  # the memory limit is the process's: two templates at once would mix theirs up


def ids(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, name: str) -> list[int]:
    """Token ids of chat messages, with the beginning of the model's answer; arguments and errors as `text`."""
    encoded: Any = tokenizer(text(messages, tokenizer, name), add_special_tokens=False)
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
    if any(map(_powers, template.values() if isinstance(template, Mapping) else [template])):
        raise UserError("the chat template of this model uses **, an operator that can take forever: it is not run")
    chat = [dict(message) for message in messages]
    options: dict[str, bool] = {"add_generation_prompt": bool(begin), "continue_final_message": begin is False}
    try:
        made = _limited(partial(tokenizer.apply_chat_template, chat, tokenize=False, **options))
    except _OutOfTime:
        raise UserError(f"the chat template of this model takes more than {SECONDS:g} s for {name}") from None
    except MemoryError:
        raise UserError(f"the chat template of this model takes more than {MEMORY >> 20} MB for {name}") from None
    except Exception as error:  # a template can raise whatever Python can
        said = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{name} does not fit this model's chat template: {short(' '.join(said.split()))}") from error
    if len(made) > CHARACTERS:
        raise UserError(
            f"the chat template of this model makes {len(made)} characters of {name}, more than the {CHARACTERS}"
            " that are allowed"
        )
    return made


class _OutOfTime(BaseException):
    """Raised inside a template that takes too long; no `except Exception` on its way holds it up."""


@lru_cache(maxsize=16)
def _powers(template: str) -> bool:
    """Whether a template raises numbers to a power: a computation of Python's that nothing can interrupt."""
    try:
        return any(kind == "operator" and value == "**" for _, kind, value in Environment().lex(template))
    except TemplateError:  # to be said when it is run
        return False


def _limited(render: Callable[[], Any]) -> str:
    """What `render` returns, computed in a thread of its own, which is stopped when its time is over.

    Raises:
        _OutOfTime: it was stopped. Whatever else `render` raises.
    """
    found: list[str] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(str(render()))
        except BaseException as error:
            raised.append(error)

    thread = Thread(target=run, daemon=True)
    with _alone, _memory():
        thread.start()
        try:
            thread.join(SECONDS)
        finally:  # after Ctrl-C too
            if thread.is_alive():
                # Python raises it between two instructions of the thread, which ends loops of every kind.
                ident = ctypes.c_ulong(thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_OutOfTime))
                thread.join(SECONDS)
    if raised:
        raise raised[0]
    if not found:
        raise _OutOfTime
    return found[0]


@contextmanager
def _memory() -> Iterator[None]:
    """Limit what the process may allocate, where the system can say how much it has and can limit it (Linux)."""
    try:
        import resource  # not on Windows

        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
    except (ImportError, OSError):
        yield
        return
    unlimited = resource.RLIM_INFINITY
    if any(limit not in (unlimited, -1) and limit <= now + MEMORY for limit in before):
        yield  # a lower limit is in force
        return
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
