"""Prompts in every shape a caller may have, as token ids; answers back as text."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dllm_sampler.core.checks import check_count, check_text
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.errors import UserError, short
from dllm_sampler.inputs import chat

Message = chat.Message


@dataclass(frozen=True)
class Infill:
    """An answer of which a part is given, in place of a prompt; see docs/infilling.md.

    Args:
        answer: text in which `{gap:8}` stands for 8 tokens to be generated, or token ids with -1 (or the mask token)
            for each of these.
        prompt: what it answers: text, token ids or chat messages; None: the text stands alone.
    """

    answer: str | Sequence[int] | Tensor
    prompt: str | Sequence[int] | Tensor | Sequence[Message] | None = None


BYTES = bytes | bytearray | memoryview

Prompt = str | Sequence[int] | Tensor | Sequence[Message] | Infill


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """One prompt or several, as a list of prompts.

    A string, a 1-D tensor, a list of ids and a list of chat messages are one prompt; a 2-D tensor is one per row.
    """
    if isinstance(prompts, Tensor):
        return list(prompts) if prompts.dim() == 2 else [prompts]
    if isinstance(prompts, str | BYTES) or not isinstance(prompts, Sequence):
        return [prompts]
    found = list(prompts)
    return [found] if found and isinstance(found[0], int | Mapping) else found


def check_new_tokens(max_new_tokens: int, spec: ModelSpec, name: str = "max_new_tokens") -> None:
    """Refuse what is no number of tokens, or leaves no room for a prompt."""
    check_count(name, max_new_tokens)
    if max_new_tokens >= spec.max_positions:
        raise UserError(
            f"{name}={max_new_tokens} leaves no room for a prompt: the model's context is"
            f" {spec.max_positions} positions"
        )


def encode(
    prompts: Prompt | Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase | None,
    spec: ModelSpec,
    max_new_tokens: int,
    first: int = 1,
) -> list[list[int]]:
    """Token ids of each prompt, checked; `first` is the number of the first.

    Raises:
        UserError: naming the prompt by its number and what is wrong with it.
    """
    given = as_list(prompts)
    if not given:
        raise UserError("there is no prompt: give at least one")
    return [encode_one(prompt, tokenizer, spec, max_new_tokens, number) for number, prompt in enumerate(given, first)]


def encode_one(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, spec: ModelSpec, max_new_tokens: int, number: int
) -> list[int]:
    """Token ids of one prompt, checked; `number` is what errors call it.

    Raises:
        UserError: naming the prompt by its number and what is wrong with it.
    """
    check_new_tokens(max_new_tokens, spec)
    ids = _ids(prompt, tokenizer, number)
    if not ids:
        raise UserError(f"prompt {number} is empty: give it at least one token")
    bad = [token for token in ids if not 0 <= token < spec.vocab_size]
    if bad:
        raise UserError(f"prompt {number} has the token id {bad[0]}, outside the vocabulary of {spec.vocab_size}")
    if spec.mask_id in ids:
        raise UserError(
            f"prompt {number} contains the mask token (id {spec.mask_id}) at position {ids.index(spec.mask_id)}:"
            " a prompt must not have masks"
        )
    if len(ids) + max_new_tokens > spec.max_positions:
        raise UserError(
            f"prompt {number} has {len(ids)} tokens and max_new_tokens is {max_new_tokens}, together more than the"
            f" model's context of {spec.max_positions} positions"
        )
    return ids


def seeds(given: int | Sequence[int], count: int) -> list[int]:
    """The seed of each of `count` rows: row i has `given + i`, or its own number of a sequence.

    Raises:
        UserError: something that is no whole number of 64 bits, or not one per row.
    """
    found = numbers("seed", given)
    found = [found + i for i in range(count)] if isinstance(found, int) else found
    if not all(abs(one) < 2**63 for one in found):
        raise UserError(f"seed must be a whole number of 64 bits, or one per prompt, not {given!r}")
    if len(found) != count:
        raise UserError(f"there are {len(found)} seeds for {count} prompts: give one number, or one per prompt")
    return found


def numbers(name: str, given: Any) -> int | list[int]:
    """A whole number, or a list of them; numpy's and those of a tensor too."""
    values = given.tolist() if hasattr(given, "tolist") else given
    several = isinstance(values, list | tuple | range)
    try:
        if any(isinstance(one, bool) for one in (values if several else [values])):
            raise TypeError
        return [operator.index(one) for one in values] if several else operator.index(values)
    except TypeError:
        raise UserError(f"{name} must be a whole number, or a list of whole numbers, not {given!r}") from None


def check_forms(given: Any, known: int) -> int | list[int] | None:
    """The number of each prompt's form, or of all: whole numbers below `known`; None: no guide has a list of forms.

    Raises:
        UserError: no such numbers, or numbers without a list of forms, or a list without numbers.
    """
    if given is None and not known:
        return None
    if given is None:
        if known == 1:
            raise UserError("the guide has a list of one form: give the form alone, without brackets, or forms=0")
        raise UserError(
            f"the guide has a list of forms: say which each prompt wants, forms=[0, ...], numbers from 0 to {known - 1}"
        )
    if not known:
        raise UserError("forms says which form of a guide's list each prompt wants, and no guide has a list of forms")
    found = numbers("forms", given)
    for number, one in enumerate([found] if isinstance(found, int) else found, 1):
        if not 0 <= one < known:
            where = "forms" if isinstance(found, int) else f"forms of prompt {number}"
            raise UserError(f"{where} must be a number from 0 to {known - 1}, as the guide's list has them, not {one}")
    return found


def forms(given: Any, known: int, rows: int, samples: int) -> list[int] | None:
    """The form of each row, `samples` consecutive ones of a prompt; None: no guide has a list of forms.

    Raises:
        UserError: as `check_forms`, or not one number per prompt.
    """
    found, prompts = check_forms(given, known), rows // samples
    if isinstance(found, list) and len(found) != prompts:
        raise UserError(f"there are {len(found)} forms for {prompts} prompts: give one number, or one per prompt")
    if found is None:
        return None
    return [found] * rows if isinstance(found, int) else [one for one in found for _ in range(samples)]


def uneven(
    new_tokens: int | Sequence[int],
    forms: int | Sequence[int] | None,
    seed: int | Sequence[int],
    prompts: int,
    samples: int,
    more: bool = False,
) -> UserError | None:
    """What is wrong with lists of numbers for a number of `prompts`, of which there may be `more`."""
    for name, given, each, wanted in (
        ("max_new_tokens", new_tokens, "prompt", prompts),
        ("forms", forms, "prompt", prompts),
        ("seed", seed, "answer", prompts * samples),
    ):
        if isinstance(given, Sequence) and (len(given) < wanted or (len(given) > wanted and not more)):
            there = f"and there is {each} {wanted}" if more else f"and there are {wanted} {each}s"
            numbers = "1 number" if len(given) == 1 else f"{len(given)} numbers"
            return UserError(f"{name} has {numbers}, {there}: give one for each {each}, or one for all")
    return None


def stop_strings(given: str | Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> tuple[str, ...]:
    """Texts that end an answer, checked.

    Raises:
        UserError: one that is empty or no text, or no tokenizer to find them with.
    """
    stops = (given,) if isinstance(given, str) else given
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) and stop for stop in stops):
        raise UserError(f"stop_strings must be texts that are not empty, not {given!r}")
    if stops and tokenizer is None:
        raise UserError("stop_strings need a tokenizer, and this checkpoint has none")
    return tuple(stops)


def _ids(prompt: Any, tokenizer: PreTrainedTokenizerBase | None, number: int) -> list[int]:
    if isinstance(prompt, Tensor):
        if prompt.dim() != 1 or prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool:
            raise UserError(f"prompt {number} must be a 1-D tensor of token ids, not {prompt.dim()}-D {prompt.dtype}")
        return prompt.tolist()
    if isinstance(prompt, BYTES):
        raise UserError(f"prompt {number} is bytes: give text, as by bytes.decode(), or a list of token ids")
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and all(isinstance(t, int) for t in prompt):
        if any(isinstance(t, bool) for t in prompt):
            raise UserError(f"prompt {number} has true or false among its token ids, which should be whole numbers")
        return list(prompt)
    text = isinstance(prompt, str)
    if not text and not isinstance(prompt, Sequence):
        raise UserError(f"prompt {number} must be a string, token ids or chat messages, not {type(prompt).__name__}")
    for at, message in () if text else enumerate(prompt, 1):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise UserError(f"prompt {number} must be a string, token ids, or chat messages with 'role' and 'content'")
        if not isinstance(message["content"], str):
            raise UserError(
                f"prompt {number}: the content of message {at} should be a text, not {short(repr(message['content']))}"
            )
    if tokenizer is None:
        raise UserError(
            f"prompt {number} is text, but this checkpoint has no tokenizer: give token ids, or add its files"
        )
    if not text:
        name = f"prompt {number}"
        return text_ids(chat.text(prompt, tokenizer, name), tokenizer, name, special=False)  # the template has its own
    if not prompt.strip():
        raise UserError(f"prompt {number} is empty: give it at least one token")
    return text_ids(prompt, tokenizer, f"prompt {number}")


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase, name: str, special: bool = True) -> list[int]:
    """Token ids of a text, which errors call `name`; with the tokenizer's `special` tokens around it, or without.

    Raises:
        UserError: it is no text, or something in it is not in the vocabulary.
    """
    check_text(name, text)
    fast = bool(tokenizer.is_fast)
    encoded: Any = tokenizer(text, return_offsets_mapping=fast, add_special_tokens=special)
    ids = list(encoded["input_ids"])
    unknown, others = tokenizer.unk_token, (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    if not fast or unknown is None or tokenizer.unk_token_id not in ids:
        return ids
    for token, (start, stop) in zip(ids, encoded["offset_mapping"], strict=True):
        word = text[start:stop]
        # One token may stand for the end of a text, too, and a template write it.
        if token == tokenizer.unk_token_id and not (word == unknown and unknown in others):
            raise UserError(f"{name} has {word!r}, which is not in this model's vocabulary{_known(tokenizer)}")
    return ids


def _known(tokenizer: PreTrainedTokenizerBase) -> str:
    """What prompts a toy model knows, where its tokenizer's configuration lists them, and where to look further."""
    operations = tokenizer.init_kwargs.get("operations")
    if not operations:
        return ""
    card = Path(str(tokenizer.name_or_path), "README.md")
    examples = f" (examples: {card})" if card.is_file() else ""
    return (
        f': it knows {", ".join(operations)}, as in "sort: Dan, Ada"{examples}; plain text needs another model, as in'
        " model=llada-8b chat=true"
    )


def decode(rows: list[list[int]], tokenizer: PreTrainedTokenizerBase | None, stop_strings: Sequence[str]) -> list[str]:
    """Text of each row of ids, cut before the first stop string; without end and other special tokens."""
    return [one.text for one in cut(rows, tokenizer, stop_strings)]


class Kept(NamedTuple):
    """The part of an answer before its first stop string."""

    text: str  # without special tokens
    tokens: int  # how many of the answer's tokens it is made of
    stopped: bool  # there is a stop string


def cut(
    rows: list[list[int]],
    tokenizer: PreTrainedTokenizerBase | None,
    stop_strings: Sequence[str],
    heads: Sequence[int] | None = None,
) -> list[Kept]:
    """Cut each row of ids before its first stop string after the first `heads` tokens.

    Stop strings are looked for in what was generated, with its special tokens, so that one may be spelled like these;
    the text that is left is shown without them.
    """
    assert tokenizer is not None
    return [_cut(row, tokenizer, stop_strings, head) for row, head in zip(rows, heads or [0] * len(rows), strict=True)]


def stopped(
    rows: list[list[int]],
    tokenizer: PreTrainedTokenizerBase | None,
    stop_strings: Sequence[str],
    heads: Sequence[int] | None = None,
) -> list[bool]:
    """Return for each row of ids whether it has a stop string after its first `heads` tokens, as `cut` sees it."""
    assert tokenizer is not None
    pairs = zip(rows, heads or [0] * len(rows), strict=True)
    return [_before(row, tokenizer, stop_strings, head) is not None for row, head in pairs]


def _before(row: list[int], tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str], head: int) -> str | None:
    """Return the text of a row, special tokens included, before its first stop string. Returns None without one."""
    if not stop_strings:
        return None
    whole = _said(row, tokenizer)
    start = len(_said(row[:head], tokenizer)) if head else 0
    places = [at for stop in stop_strings if (at := whole.find(stop, start)) >= 0]
    return whole[: min(places)] if places else None


def _cut(row: list[int], tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str], head: int) -> Kept:
    before = _before(row, tokenizer, stop_strings, head)
    if before is None:
        return Kept(_shown(row, tokenizer), len(row), False)
    # The fewest tokens whose text has all of it. The last may be the stop string's first, and have some of its signs.
    covers = bisect_left(range(len(row)), True, key=lambda size: _said(row[:size], tokenizer).startswith(before))
    whole = next(size for size in range(covers, -1, -1) if before.startswith(_said(row[:size], tokenizer)))
    rest = before[len(_said(row[:whole], tokenizer)) :]
    text = _shown(row[:covers], tokenizer)[: len(_shown(row[:whole], tokenizer)) + len(rest)]
    return Kept(text, covers if rest.strip() else whole, True)


def _said(row: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(row, skip_special_tokens=False))


def _shown(row: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(row, skip_special_tokens=True))
