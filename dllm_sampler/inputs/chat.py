"""Chat messages as a text, by the template that came with the checkpoint.

A template is a program in Jinja. transformers runs it in Jinja's sandbox, where it can open and import nothing. A
template may still take long: it is as much the user's choice as the checkpoint that brings it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from dllm_sampler.errors import UserError, short

Message = Mapping[str, str]


def text(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, name: str, begin: bool | None = True) -> str:
    """Return chat messages as the model's prompt.

    Args:
        messages: each with a `role` and a `content`.
        tokenizer: has the template.
        name: what errors call the messages, for example `prompt 1`.
        begin: True adds the beginning of the model's answer. False continues the last message, which is that beginning.
            None adds nothing after the last message.

    Raises:
        UserError: there is no template, or it raises an error.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"{name} has chat messages, but this model's tokenizer has no chat template. Give plain text instead."
        )
    chat = [dict(message) for message in messages]
    options: dict[str, Any] = {"add_generation_prompt": bool(begin), "continue_final_message": begin is False}
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, **options))
    except Exception as error:  # a template can raise whatever Python can
        message = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{name} does not fit this model's chat template: {short(' '.join(message.split()))}") from None
