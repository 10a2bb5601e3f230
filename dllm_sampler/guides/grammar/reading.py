"""The file format of grammars.

    # JSON, without escapes in strings
    number = -?(0|[1-9][0-9]*)
    string = "[^"\\n]*"
    %skip space newline
    Value -> Object | Array | string | number | "null"
    Object -> { } | { Members }
    Members -> Pair | Pair , Members
    ...

- `name = expression` is a terminal: a regular expression in Rust's syntax, without look-around. The name does not begin
  with a capital letter. `A without B and C` are the texts of A that are in neither B nor C.
- `Head -> body | body` is a rule, also over several lines that begin with `|`. Blanks separate symbols. A symbol is a
  terminal that is defined, a variable (it begins with a capital letter), a text in quotes without blanks, or literal
  signs. `$` alone is the empty body. Texts are derived from the first rule's head.
- `%skip` names bytes that are allowed between lexemes, as single signs or by the words space, tab, newline, return.
  `%skip nothing` allows none. The default is space, tab, newline, return.
- `%prelex A B` are two ASCII signs that are not letters, digits or `_`, also written as `\\x02`. A text is read as if
  the first came before each word (a longest run of letters, digits, `_` and characters beyond ASCII) and the second
  after it, and expressions contain them. A lexeme has whole words, so no identifier can be cut into a keyword and a
  rest.
- A line that begins with `#` is a comment.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dllm_sampler.core.checks import check_text
from dllm_sampler.errors import UserError, short, unknown
from dllm_sampler.guides.grammar.rules import Body
from dllm_sampler.guides.grammar.terminals import WORD

BYTES = 1_000_000  # longest text
SKIPS = {"space": b" ", "tab": b"\t", "newline": b"\n", "return": b"\r"}
VARIABLE = re.compile(r"[A-Z]\w*")
BAR = re.compile(r"(?<!\S)\|(?!\S)")  # between the bodies of a rule


@dataclass
class Source:
    """A grammar as it was written.

    Attributes:
        name: the file's name, for errors.
        expressions: the expressions of the terminals, in order of their numbers. Bytes are a literal text.
        rules: the bodies of each variable.
        start: the variable from which texts are derived.
        skip: bytes that are allowed between lexemes.
        prelex: the bytes before and after each word.
        places: names of the terminals in errors.
    """

    name: str
    expressions: dict[str, str | bytes] = field(default_factory=dict)
    rules: dict[str, list[Body]] = field(default_factory=dict)
    start: str = ""
    skip: bytes = b"".join(SKIPS.values())
    prelex: tuple[bytes, bytes] | None = None
    places: dict[str, str] = field(default_factory=dict)


def read(text: str, name: str) -> Source:
    """Read a grammar in the format above. Errors call its file `name`.

    Raises:
        UserError: a line is wrong. The message has the file's name and the line.
    """
    if len(text) > BYTES:
        raise UserError("form-too-large", f"{name} has {len(text)} characters, more than {BYTES}. Make it smaller.")
    check_text(name, text)
    found = Source(name)
    defined: dict[str, str] = {}
    bodies: list[tuple[int, str, str]] = []
    directives: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split(None, 2)
        if not words or words[0].startswith("#"):
            continue
        where, rest = f"{name}, line {number}", words[2] if len(words) > 2 else ""
        if words[0].startswith("%"):
            if words[0] in directives:
                raise UserError("grammar-invalid", f"{where}: {words[0]} is given twice. Merge the two lines.")
            directives.add(words[0])
            _directive(found, words, where)
        elif words[0].startswith("|"):
            if not bodies:
                raise UserError("grammar-invalid", f"{where}: '|' follows no rule. Write Head -> body first.")
            bodies.append((number, bodies[-1][1], line.strip()[1:]))
        elif words[1:2] == ["->"]:
            if not VARIABLE.fullmatch(words[0]):
                said = f"{where}: the head {words[0]!r} is not a variable's name."
                way = "Write a capital letter from A to Z, then letters, digits or _."
                raise UserError("grammar-invalid", f"{said} {way}")
            bodies.append((number, words[0], rest))
        elif words[1:2] == ["="]:
            if words[0][0].isupper():
                said = f"{where}: {words[0]!r} begins with a capital letter, as variables do."
                raise UserError("grammar-invalid", f"{said} Write -> for a rule, or rename the terminal.")
            if words[0] in ("$", "ε"):
                said = f"{where}: {words[0]!r} stands for the empty body. Rename the terminal."
                raise UserError("grammar-invalid", said)
            if words[0] in defined:
                raise UserError("grammar-invalid", f"{where}: the terminal {words[0]} is defined twice. Remove one.")
            defined[words[0]], found.places[words[0]] = rest.strip(), f"{where}: terminal {words[0]}"
        else:
            raise UserError(
                "grammar-invalid",
                f"{where}: {short(repr(line.strip()))} cannot be read. Write a rule (Head -> body), a terminal (name ="
                " expression), with blanks around -> and =, a directive (%skip, %prelex) or a comment (#).",
            )
    if not bodies:
        raise UserError("grammar-invalid", f"{name} has no rule. Write Head -> body.")
    found.start = bodies[0][1]
    heads = {head for _, head, _ in bodies}
    numbers: dict[str, int] = {}
    for number, head, body in bodies:
        for part in map(str.split, BAR.split(body)):
            symbols = [] if part in (["$"], ["ε"]) else part
            where = f"{name}, line {number}"
            if not part:
                way = "Write it after -> or |, remove a | that is too many, or write $ for the empty text"
                raise UserError("grammar-invalid", f"{where}: a body of {head} is missing. {way}.")
            found.rules.setdefault(head, []).append(
                tuple(_symbol(found, one, where, defined, heads, numbers) for one in symbols)
            )
    return found


def _symbol(
    found: Source, word: str, where: str, defined: Mapping[str, str], heads: set[str], numbers: dict[str, int]
) -> str | int:
    """Return the variable, or the number of the terminal, that a word of a body means."""
    if word not in defined and VARIABLE.fullmatch(word):
        if word not in heads:
            said = f"{where}: {unknown('variable', word, heads)}"
            raise UserError("grammar-invalid", f'{said} Add a rule {word} -> body, or write "{word}" for literal text.')
        return word
    if word not in numbers:
        expression: str | bytes
        if word in defined:
            expression = defined[word]
        elif re.search("[\"']\\|[\"']", word):
            raise UserError("grammar-invalid", f"{where}: {word} has no blanks around |. Add them.")
        elif len(word) > 2 and word[0] == word[-1] and word[0] in "\"'":
            expression = word[1:-1].encode()
        elif word in ("$", "ε", '""', "''"):
            said = f"{where}: {word} is an empty text. Remove it, or write $ alone for the empty body."
            raise UserError("grammar-invalid", said)
        elif word[0] in "\"'" and len(word) > 1:
            raise UserError(
                "grammar-invalid",
                f"{where}: {word} is not a text in quotes without blanks. Close its quotes, or write a text with blanks"
                " as a terminal (name = expression).",
            )
        elif any(sign.isalnum() for sign in word):
            said = str(unknown("terminal", word, defined)) if defined else f"unknown terminal '{word}'."
            way = f'Define it ({word} = expression), or write "{word}" for literal text.'
            raise UserError("grammar-invalid", f"{where}: {said} {way}")
        else:
            expression = word.encode()
        found.places.setdefault(word, f"{where}: {word}")
        numbers[word] = len(numbers)
        found.expressions[word] = expression
    return numbers[word]


def _directive(found: Source, words: list[str], where: str) -> None:
    given = " ".join(words[1:]).split()
    if words[0] == "%skip":
        skip = [] if given == ["nothing"] else [SKIPS.get(one, one.encode()) for one in given]
        wrong = [one for one, byte in zip(given, skip, strict=False) if len(byte) != 1]
        if not given or wrong:
            said = f"%skip has {wrong[0]!r}, which is not a single ASCII sign" if given else "%skip names no sign"
            way = f"Set single signs, {', '.join(SKIPS)}, or only nothing."
            raise UserError("grammar-invalid", f"{where}: {said}. {way}")
        found.skip = b"".join(skip)
    elif words[0] == "%prelex":
        marks = [bytes.fromhex(one[2:]) if re.fullmatch(r"\\x[0-9a-fA-F]{2}", one) else one.encode() for one in given]
        if len({*marks}) != 2 or len(marks) != 2 or any(len(one) != 1 or one[0] in WORD for one in marks):
            raise UserError(
                "grammar-invalid",
                f"{where}: %prelex has {' '.join(given)!r}. Set two different ASCII signs that are not letters, digits"
                " or _, as in %prelex \\x02 \\x03.",
            )
        found.prelex = (marks[0], marks[1])
    else:
        raise UserError("grammar-invalid", f"{where}: {unknown('directive', words[0], ['%skip', '%prelex'])}")
