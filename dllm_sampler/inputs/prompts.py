"""Conversion of prompts (text, token ids, tensors, chat messages) to token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dllm_sampler.core.checks import check_count, check_text
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.errors import UserError, counted, short

Message = Mapping[str, str]


@dataclass(frozen=True)
class Infill:
    """A partly given answer, in place of a prompt. See docs/infilling.md.

    Args:
        answer: text in which `{gap:8}` stands for 8 tokens to generate, or token ids with -1 (or the mask token) at
            each position to generate.
        prompt: text, token ids or chat messages before the answer. None means no prompt.
    """

    answer: str | Sequence[int] | Tensor
    prompt: str | Sequence[int] | Tensor | Sequence[Message] | None = None


BYTES = bytes | bytearray | memoryview

Prompt = str | Sequence[int] | Tensor | Sequence[Message] | Infill


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """Return one prompt or several as a list of prompts.

    A string, a 1-D tensor, a list of ids and a list of chat messages are one prompt. A 2-D tensor has one per row.
    """
    if isinstance(prompts, Tensor):
        return list(prompts) if prompts.dim() == 2 else [prompts]
    if isinstance(prompts, str | BYTES) or not isinstance(prompts, Sequence):
        return [prompts]
    found = list(prompts)
    return [found] if found and isinstance(found[0], int | Mapping) else found


def check_new_tokens(max_new_tokens: int, spec: ModelSpec, name: str = "max_new_tokens") -> None:
    """Refuse a value that is not a positive whole number, or that leaves no position for a prompt."""
    check_count(name, max_new_tokens)
    if max_new_tokens >= spec.max_positions:
        raise UserError(
            "context-exceeded",
            f"{name}={max_new_tokens} leaves no position for a prompt in a context of {spec.max_positions}. Lower it.",
        )


def encode(
    prompts: Prompt | Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase | None,
    spec: ModelSpec,
    max_new_tokens: int,
) -> list[list[int]]:
    """Return the checked token ids of each prompt.

    Raises:
        UserError: a prompt is wrong. The message has its number.
    """
    given = as_list(prompts)
    if not given:
        raise UserError("prompt-missing", "The prompt is missing. Give at least one.")
    return [
        encode_one(prompt, tokenizer, spec, max_new_tokens, f"prompt {number}")
        for number, prompt in enumerate(given, 1)
    ]


def encode_one(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase | None,
    spec: ModelSpec,
    max_new_tokens: int,
    name: str,
    answer: str | None = None,
) -> list[int]:
    """Return the checked token ids of one prompt. Errors call it `name`, for example `prompt 1`.

    Args:
        max_new_tokens: number of tokens of the answer.
        answer: name of the answer in errors, if the option `max_new_tokens` does not set its length.

    Raises:
        UserError: the prompt has a wrong type, is empty or too long, or has a token that it must not have.
    """
    if answer is None:
        check_new_tokens(max_new_tokens, spec)
    ids = _ids(prompt, tokenizer, name)
    if not ids:
        raise UserError("prompt-empty", f"{name} has no tokens. Give it at least one.")
    bad = [token for token in ids if not 0 <= token < spec.vocab_size]
    if bad:
        raise UserError(
            "token-outside-vocabulary", f"{name} has token id {bad[0]}. Give ids from 0 to {spec.vocab_size - 1}."
        )
    if spec.mask_id in ids:
        where = f"at position {ids.index(spec.mask_id)}"
        raise UserError("mask-token-given", f"{name} has the mask token (id {spec.mask_id}) {where}. Remove it.")
    if len(ids) + max_new_tokens > spec.max_positions:
        beside = f"max_new_tokens={max_new_tokens}" if answer is None else f"the {max_new_tokens} of {answer}"
        raise UserError(
            "context-exceeded",
            f"{name} has {counted(len(ids), 'token')}, too many with {beside} for a context of"
            f" {spec.max_positions}. Shorten the prompt, the answer or both.",
        )
    return ids


def _ids(prompt: Any, tokenizer: PreTrainedTokenizerBase | None, name: str) -> list[int]:
    if isinstance(prompt, Tensor):
        if prompt.dim() != 1 or prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool:
            said = f"{name} is a {prompt.dim()}-D tensor of {prompt.dtype}"
            raise UserError("prompt-type", f"{said}. Give a 1-D tensor of token ids, which are whole numbers.")
        return prompt.tolist()
    if isinstance(prompt, BYTES):
        raise UserError("prompt-type", f"{name} is bytes. Give text, for example by bytes.decode().")
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and all(isinstance(t, int) for t in prompt):
        if any(isinstance(t, bool) for t in prompt):
            raise UserError("prompt-type", f"{name} has true or false among its token ids. Give numbers.")
        return list(prompt)
    text = isinstance(prompt, str)
    if not text and not isinstance(prompt, Sequence):
        raise UserError(
            "prompt-type",
            f"{name} is of type {type(prompt).__name__}. Give text, a list of token ids (ids.tolist()) or chat"
            " messages.",
        )
    entries = [] if text else list(prompt)
    wrong = [at for at, one in enumerate(entries, 1) if not isinstance(one, Mapping)]
    if wrong:
        at = next((at for at in wrong if not isinstance(entries[at - 1], int)), wrong[0])
        raise UserError(
            "prompt-type",
            f"{name}: entry {at} is of type {type(entries[at - 1]).__name__}. Give only token ids as Python integers"
            " (ids.tolist()), or only messages with 'role' and 'content'.",
        )
    for at, message in enumerate(entries, 1):
        if not {"role", "content"} <= message.keys():
            raise UserError("messages-invalid", f"{name}: message {at} lacks 'role' or 'content'. Give both.")
        if odd := [key for key in ("role", "content") if not isinstance(message[key], str)]:
            said = f"{name}: the {odd[0]} of message {at} is {short(repr(message[odd[0]]))}. Give it as text."
            raise UserError("messages-invalid", said)
    if tokenizer is None:
        raise UserError(
            "tokenizer-missing", f"{name} is {'text' if text else 'a chat'}, but there is no tokenizer. Give token ids."
        )
    if not text:
        rendered = chat_text(prompt, tokenizer, name)
        return text_ids(rendered, tokenizer, name, special=False)  # the template writes special tokens itself
    if not prompt.strip():
        raise UserError("prompt-empty", f"{name} is {'only white space' if prompt else 'empty'}. Write a text.")
    return text_ids(prompt, tokenizer, name)


def chat_text(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, name: str, begin: bool | None = True
) -> str:
    """Return chat messages as the text of a prompt, rendered by the tokenizer's chat template.

    A template is a Jinja program. transformers runs it in Jinja's sandbox, so it cannot open files or import modules.
    Its running time is not limited.

    Args:
        messages: messages, each with a `role` and a `content`.
        tokenizer: has the template, and further variables for it (`chat_options`).
        name: name of the messages in errors, for example `prompt 1`.
        begin: True adds the beginning of the model's answer. False continues the last message, which is that beginning.
            None adds nothing after the last message.

    Raises:
        UserError: there is no template, or the template raises an error.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            "chat-template-missing",
            f"{name} is a chat, but the tokenizer has no chat template. Give plain text, and remove chat=true if it is"
            " set.",
        )
    chat = [dict(message) for message in messages]
    options: dict[str, Any] = dict(tokenizer.init_kwargs.get("chat_options") or {})
    options |= {"add_generation_prompt": bool(begin), "continue_final_message": begin is False}
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, **options))
    except Exception as error:  # a template can raise whatever Python can
        message = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise UserError(
            "chat-template-failed",
            f"{name}: the chat template fails ({short(' '.join(message.split()))}). Change the messages or the"
            " template.",
        ) from None


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase, name: str, special: bool = True) -> list[int]:
    """Return the token ids of a text, with or without the tokenizer's `special` tokens. Errors call it `name`.

    Raises:
        UserError: `text` has a lone surrogate, or a part of it is not in the vocabulary.
    """
    check_text(name, text)
    fast = bool(tokenizer.is_fast)
    # Without `verbose=False` transformers warns of long texts, which are refused or cut later.
    encoded: Any = tokenizer(text, return_offsets_mapping=fast, add_special_tokens=special, verbose=False)
    ids = list(encoded["input_ids"])
    unknown, others = tokenizer.unk_token, (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    if not fast or unknown is None or tokenizer.unk_token_id not in ids:
        return ids
    for token, (start, stop) in zip(ids, encoded["offset_mapping"], strict=True):
        word = text[start:stop]
        # The unknown token may be another special token, too, which a template writes.
        if token == tokenizer.unk_token_id and not (word == unknown and unknown in others):
            said = f"{name} has {word!r}, which is not in the model's vocabulary. {_known(tokenizer)}"
            raise UserError("text-outside-vocabulary", said)
    return ids


def _known(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the advice for a word outside of the vocabulary. A toy model's tokenizer lists its kinds of prompts."""
    operations = tokenizer.init_kwargs.get("operations")
    if not operations:
        return "Remove it."
    card = Path(str(tokenizer.name_or_path), "README.md")
    examples = f" (examples: {card})" if card.is_file() else ""
    return (
        f'Remove it, or ask for {", ".join(operations)}, as in "sort: Dan, Ada"{examples}, or use a model'
        " for plain text, as in model=llada-8b chat=true."
    )
