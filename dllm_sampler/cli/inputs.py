"""The request of a command line: its settings, and its prompts from the words, a file or a pipe.

Everything is read and checked before torch is imported, so that mistakes are reported at once.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from dllm_sampler.cli.compose import Settings, settings
from dllm_sampler.cli.options import Options
from dllm_sampler.cli.words import Arguments
from dllm_sampler.core.checks import is_whole
from dllm_sampler.errors import UserError, as_typed, short
from dllm_sampler.host.paths import expanded

Prompt = str | list[int] | list[dict[str, str]]  # text (in which there may be gaps), token ids, or chat messages


@dataclass(frozen=True)
class Request:
    """A run of `dllm-sample`: its settings, its prompts, and the forms that these name, if any."""

    settings: Settings
    prompts: list[Prompt]
    forms: Forms | None = None
    session: Sequence[str] | None = None  # the overrides of an interactive session, in which prompts are typed


def request(arguments: Arguments) -> Request:
    """Return the settings and the prompts of a command line that `split` has sorted.

    Raises:
        UserError: a name is unknown, a value has the wrong type, or a prompt cannot be read.
    """
    chosen = settings(arguments.overrides)
    options = chosen.options
    check_target(options, arguments.overrides)
    check_length(arguments.overrides)
    terminal = sys.stdin is None or sys.stdin.isatty()
    alone = not arguments.prompts and options.prompts_file is None
    if alone and terminal and options.infill is None and options.target is None and sys.stderr.isatty():
        return Request(chosen, [], session=arguments.overrides)
    # With infill= a prompt is not needed, so standard input may be a pipe without prompts.
    pipe = None if terminal else sys.stdin
    given, forms = read(arguments.prompts, options.prompts_file, pipe, options.infill is None)
    if forms is not None and options.forms is not None:
        both = f"forms={as_typed(options.forms)} and prompts_file={options.prompts_file}"
        raise UserError("options-conflict", f"{both} both name forms. Remove one of them.")
    return Request(chosen, given, forms)


def check_length(overrides: Sequence[str]) -> None:
    """Refuse `max_new_tokens` together with `infill`, whose gaps set the length.

    Raises:
        UserError: both are set.
    """
    given = {name for name, _, value in (word.lstrip("+~").partition("=") for word in overrides) if value != "null"}
    if {"infill", "max_new_tokens"} <= given:
        raise UserError("options-conflict", "max_new_tokens= and infill= exclude each other. Write lengths as {gap:8}.")


def check_target(options: Options, overrides: Sequence[str]) -> None:
    """Refuse settings that have no effect with `target=` (speculative decoding), and settings that need it.

    Raises:
        UserError: such a setting is in `overrides`.
    """
    given = {re.split(r"[.=@]", word.lstrip("+~"))[0]: short(word) for word in overrides}

    def idle(*names: str) -> str | None:
        return next((given[name] for name in names if name in given), None)

    if options.target is None:
        if word := idle("draft_length", "draft_scheduled", "separator"):
            raise UserError("option-not-applicable", f"{word} has no effect without a verifier. Add target=MODEL.")
        return
    if options.stream:
        raise UserError("options-conflict", "stream=true and target= exclude each other. Remove one.")
    if word := idle("prefix", "suffix", "infill", "samples"):
        raise UserError("option-not-applicable", f"{word} has no effect with target=. Remove it.")
    if options.block_length is not None:
        text = f"block_length={options.block_length} has no effect with target=. Set draft_length=N instead."
        raise UserError("option-not-applicable", text)
    if not options.draft_scheduled and (word := idle("scheduler", "blocks", "stop", "cache", "experiment")):
        raise UserError(
            "option-not-applicable",
            f"{word} has no effect with target= unless drafts are scheduled. Add draft_scheduled=true.",
        )


class Forms(NamedTuple):
    """Values of the field `form` in the lines of a file. Only a guide that judges the form of answers uses them."""

    values: list[object]  # of each prompt, None if it names no form
    places: list[str]  # of each prompt: FILE line N, or the prompt's number
    file: str

    def numbers(self, known: int) -> list[int] | None:
        """Return the number of each prompt's form. Returns None if no line names one.

        Args:
            known: number of forms of the guides, 1 if a guide has no list. 0 if no guide judges forms.

        Raises:
            UserError: a value is not a form's number, or only some prompts have a value.
        """
        if not known or all(value is None for value in self.values):
            return None
        right = "0, the guide's only one"
        if known > 1:
            right = f"a number from 0 to {known - 1}, since the guide has {known} forms"
        found: list[int] = []
        for value, place in zip(self.values, self.places, strict=True):
            if value is None:
                way = f'Give "form" for all prompts, in {self.file}, or for none.'
                raise UserError("form-number", f"{place} names no form, but other prompts do. {way}")
            if not is_whole(value) or not 0 <= value < known:
                raise UserError("form-number", f'{place}: "form" is {json.dumps(value)}. Give {right}.')
            found.append(value)
        return found


class Given(NamedTuple):
    """Prompts of a run, and the forms that they name, if any."""

    prompts: list[Prompt]
    forms: Forms | None


def read(words: Sequence[str], file: str | None, stdin: IO[str] | None, wanted: bool = True) -> Given:
    """Read all prompts of a run: those on the command line, then those in the file. Without either, read the pipe.

    A file has one prompt per line, in UTF-8. Blank lines are skipped. In a file that ends in `.jsonl` or `.json` a line
    is a JSON value: a text, or an object with exactly one of the first two fields. Other fields are ignored.

    - `prompt`: a text, or a list of token ids
    - `messages`: a list of `{"role": ..., "content": ...}`, rendered with the model's chat template
    - `form`: the number of the form in the list of a guide that judges answers by their form alone, from 0

    Args:
        words: the prompts on the command line.
        file: path of text lines, or of JSONL if it ends in `.jsonl` or `.json`. `-` is the pipe.
        stdin: the pipe, or None if standard input is a terminal.
        wanted: a prompt is required. Otherwise the pipe is read only for `-`.

    Raises:
        UserError: a required prompt is missing, the file cannot be read, or a line is malformed.
    """
    prompts: list[Prompt] = list(words)
    forms: Forms | None = None
    if file == "-" or (file is None and not prompts and stdin is not None and wanted):
        if stdin is None:
            raise UserError("prompt-missing", "prompts_file=- reads a pipe, and none is open. Name a file.")
        prompts += _lines(stdin, "standard input")
    elif file is not None:
        path = expanded("prompts_file", file)
        try:
            with path.open(encoding="utf-8") as lines:
                if path.suffix in (".jsonl", ".json"):
                    found = records(lines, file)
                    prompts += [prompt(record, place) for place, record in found]
                    said = [record.get("form") if isinstance(record, dict) else None for _, record in found]
                    if any(form is not None for form in said):
                        before = [f"prompt {number}" for number, _ in enumerate(words, 1)]
                        forms = Forms([*[None] * len(words), *said], [*before, *[place for place, _ in found]], file)
                else:
                    prompts += _lines(lines, file)
        except OSError as error:
            text = f"prompts_file={file} cannot be read ({error.strerror}). Name another file."
            raise UserError("file-unreadable", text) from None
    if not prompts and wanted:
        source = "Standard input" if file == "-" else f"prompts_file={file}"
        way = (
            f"{source} has no text. Add a line" if file else 'Write dllm-sample "copy: Ada", or see dllm-sample --help'
        )
        raise UserError("prompt-missing", f"The prompt is missing. {way}.")
    for number, one in enumerate(prompts, 1):
        try:
            json.dumps(one, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # a surrogate replaces a byte that is not UTF-8
            raise UserError("text-invalid", f"prompt {number} is not valid Unicode. Encode it as UTF-8.") from None
    return Given(prompts, forms)


def as_chat(prompt: Prompt) -> Prompt:
    """Return a text prompt as a user's message, and others as they are."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _lines(lines: Iterable[str], name: str) -> list[Prompt]:
    """Return one prompt per line that is not blank."""
    try:
        return [line.rstrip("\r\n") for line in _unmarked(lines) if line.strip()]
    except UnicodeDecodeError as error:
        raise UserError("text-invalid", f"{name} is not UTF-8 at byte {error.start}. Save it as UTF-8.") from None


def _unmarked(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines without the byte order mark that some editors begin a file with."""
    for number, line in enumerate(lines):
        yield line if number else line.removeprefix("\ufeff")


def records(lines: Iterable[str], name: str) -> list[tuple[str, Any]]:
    """Return the JSON value of each line that is not blank, after its place `FILE line N`.

    Args:
        lines: an open text file.
        name: name of the file, for errors.

    Raises:
        UserError: a line is not JSON, or the file is not UTF-8.
    """
    return [(f"{name} line {number}", _json(line, f"{name} line {number}")) for number, line in _numbered(lines, name)]


def file_records(option: str, file: str) -> list[tuple[str, Any]]:
    """Return the `records` of a file that the setting `option` names.

    Raises:
        UserError: the file cannot be read, or a line is not JSON.
    """
    try:
        with expanded(option, file).open(encoding="utf-8") as lines:
            return records(lines, file)
    except OSError as error:
        text = f"Cannot read {option}={file} ({error.strerror}). Correct the path."
        raise UserError("file-unreadable", text) from None


def _numbered(lines: Iterable[str], name: str) -> list[tuple[int, str]]:
    try:
        return [(number, line) for number, line in enumerate(_unmarked(lines), 1) if line.strip()]
    except UnicodeDecodeError as error:
        raise UserError("text-invalid", f"{name} is not UTF-8 at byte {error.start}. Save it as UTF-8.") from None


def _json(line: str, where: str) -> Any:
    try:
        record = json.loads(line.rstrip("\r\n"))
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        said = f"{where} has half of a character, an escape from \\ud800 to \\udfff"
        raise UserError("text-invalid", f"{said}. Write the whole character.") from None
    except RecursionError:
        raise UserError("json-invalid", f"{where} is nested too deeply. Use fewer brackets.") from None
    except ValueError as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg}, column {error.colno}"
        raise UserError("json-invalid", f"{where} is not JSON ({reason}). Write a whole value on each line.") from None
    return record


def prompt(record: Any, where: str) -> Prompt:
    """Return the prompt of a JSON value: a text, or an object with `prompt` or `messages`, see `read`.

    Raises:
        UserError: the value has no prompt, or a malformed one. The message begins with `where`.
    """
    if isinstance(record, str):
        return record
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        way = 'Write one of them, for example {"prompt": "copy: Ada"}'
        raise UserError("prompt-missing", f'{where} does not have exactly one of "prompt" and "messages". {way}.')
    if "messages" in record:
        return _messages(record["messages"], where)
    given = record["prompt"]
    if isinstance(given, str) or (isinstance(given, list) and all(map(is_whole, given))):
        return given
    raise UserError("prompt-type", f'{where}: "prompt" is neither text nor token ids. Give one of them.')


def _messages(messages: object, where: str) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise UserError(
            "messages-invalid",
            f'{where}: "messages" is not a list of messages. Give [{{"role": ..., "content": ...}}].',
        )
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise UserError("messages-invalid", f'{where}: a message lacks the text "role" or "content". Give both.')
    return messages
