"""Prompts from the command line, from a file of text lines or JSONL, or from a pipe."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from dllm_sampler.errors import UserError

Prompt = str | list[int] | list[dict[str, str]]  # text (in which there may be gaps), token ids, or chat messages


class Given(NamedTuple):
    """The prompts of a run, and the number of each one's form; None: none names one."""

    prompts: list[Prompt]
    forms: list[int] | None


def read(words: Sequence[str], file: str | None, stdin: IO[str] | None, wanted: bool = True) -> Given:
    """All prompts of a run: those on the command line, then those in the file; with neither, those in the pipe.

    Args:
        words: the prompts on the command line.
        file: path of text lines, or of JSONL where it ends in `.jsonl`; `-` is the pipe.
        stdin: the pipe; None where there is a terminal instead.
        wanted: there must be a prompt.

    Raises:
        UserError: no prompt that is wanted, an unreadable file, or a malformed line, which is named by its number.
    """
    prompts: list[Prompt] = list(words)
    forms: list[int | None] = []
    if file == "-" or (file is None and not prompts and stdin is not None and wanted):
        if stdin is None:
            raise UserError("prompts_file=- reads a pipe, and there is none")
        prompts += _lines(stdin, "standard input")
    elif file is not None:
        path = Path(file).expanduser()
        try:
            with path.open(encoding="utf-8") as lines:
                if path.suffix in (".jsonl", ".json"):
                    found, forms = _records(lines, file)
                    prompts += found
                else:
                    prompts += _lines(lines, file)
        except OSError as error:
            raise UserError(f"cannot read prompts_file {file}: {error.strerror}") from None
    if not prompts and wanted:
        where = f" in {file}" if file else ': dllm-sample "reverse: Ada, Ben, Cal, Dan", or see dllm-sample --help'
        raise UserError(f"there is no prompt{where}")
    for number, prompt in enumerate(prompts, 1):
        try:
            json.dumps(prompt, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # a surrogate stands for a byte that was no UTF-8
            raise UserError(f"prompt {number} is not valid Unicode text") from None
    named = [form for form in forms if form is not None]
    if named and len(named) < len(prompts):
        place = len(words) + 1 + forms.index(None) if None in forms else 1
        where = f'"form" should be in each line of {file}, or in none'
        raise UserError(f"prompt {place} names no form, and others do: {where}")
    return Given(prompts, named or None)


def as_chat(prompt: Prompt) -> Prompt:
    """A text prompt as a user's message; others as they are."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _lines(lines: Iterable[str], name: str) -> list[Prompt]:
    """One prompt per line that is not blank."""
    try:
        return [line.rstrip("\r\n") for line in lines if line.strip()]
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _records(lines: Iterable[str], name: str) -> tuple[list[Prompt], list[int | None]]:
    """One JSON record per line that is not blank: its prompt, and its form where it names one."""
    found = [_record(line, f"{name} line {number}") for number, line in _numbered(lines, name)]
    return [prompt for prompt, _ in found], [form for _, form in found]


def _numbered(lines: Iterable[str], name: str) -> list[tuple[int, str]]:
    try:
        return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _record(line: str, where: str) -> tuple[Prompt, int | None]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {str(error).partition(':')[0]}") from None
    if isinstance(record, str):
        return record, None
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise UserError(f'{where} needs either "prompt" or "messages"')
    form = record.get("form")
    if form is not None and type(form) is not int:
        raise UserError(f'{where}: "form" should be the number of a guide\'s form, not {form!r}')
    if "messages" in record:
        return _messages(record["messages"], where), form
    prompt = record["prompt"]
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(type(token) is int for token in prompt)):
        return prompt, form
    raise UserError(f'{where}: "prompt" should be text or a list of token ids')


def _messages(messages: object, where: str) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{where}: "messages" should be a list of {{"role": ..., "content": ...}}')
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise UserError(f'{where}: each of "messages" needs the texts "role" and "content"')
    return messages
