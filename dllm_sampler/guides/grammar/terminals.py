"""The terminals of a grammar: finite automata over classes of bytes."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from dllm_sampler.errors import UserError
from dllm_sampler.guides.forms.automaton import byte_automaton, quoted
from dllm_sampler.guides.forms.library import SECONDS
from dllm_sampler.guides.grammar.regular import Dfa, filtered, literal, minimal, trimmed, without_empty
from dllm_sampler.guides.grammar.rules import bits

STATES = 20_000  # most states of all terminals
KEPT = 256  # most automata of expressions that are remembered
# Bytes of words, for `prelex`. Every byte of a character beyond ASCII counts, so that a cut through a character is not
# ambiguous.
WORD = frozenset(byte for byte in range(256) if byte >= 128 or chr(byte).isalnum() or byte == ord("_"))


@dataclass(frozen=True)
class Terminals:
    """The terminals of a grammar, with an automaton for the non-empty texts of each."""

    names: tuple[str, ...]
    dfas: tuple[Dfa, ...]  # over classes of bytes that all automata treat alike
    possible: int  # the set of terminals that have a text that is not empty
    nullable: int  # the set of terminals that have the empty text
    table: bytes  # [256] the class of each byte
    classes: tuple[tuple[int, ...], ...]  # the bytes of each class
    skip: frozenset[int]  # classes of bytes that are allowed between lexemes
    marks: tuple[int, int] | None  # bytes put around each word
    words: frozenset[int]  # classes of bytes of words


def compiled(
    expressions: Mapping[str, str | bytes],
    skip: Iterable[int],
    prelex: tuple[bytes, bytes] | None,
    places: Mapping[str, str],
    name: str,
) -> Terminals:
    """Build the automata of terminals.

    Args:
        expressions: a regular expression for each terminal, `A without B and C` for a difference. Bytes are a literal
            text, and get their marks.
        skip: bytes that are allowed between lexemes.
        prelex: a byte before each word of a text, and another one after it. Both are outside of `WORD`.
        places: names of the terminals in errors.
        name: the grammar's name, for errors.

    Raises:
        UserError: a terminal's expression is wrong, matches no text or cannot be built within the limits, or the signs
            to skip do not go with `prelex`.
    """
    deadline, ignored = time.monotonic() + SECONDS, frozenset(skip)
    balanced = None
    if prelex is not None:
        _check_marks(prelex, ignored, name)
        balanced = _balanced(prelex)
    found, nullable = [], 0
    for number, (terminal, expression) in enumerate(expressions.items()):
        try:
            if isinstance(expression, str):
                dfa = _expression(expression)
            elif prelex is None:
                dfa = literal(expression)
            else:
                dfa = literal(marked(expression, (prelex[0][0], prelex[1][0]), begins=True, ends=True))
        except UserError as error:
            raise UserError("grammar-invalid", f"{places[terminal]}: {error}") from None
        if time.monotonic() > deadline:
            said = f"{name}: the terminals take more than {SECONDS} s to build. Make them fewer or simpler."
            raise UserError("grammar-invalid", said)
        if not dfa.finals:
            raise UserError("grammar-invalid", f"{places[terminal]} matches no text. Correct it.")
        nullable |= (0 in dfa.finals) << number
        dfa = without_empty(dfa)
        whole = dfa if balanced is None else filtered(dfa, balanced, True)
        if dfa.finals and not whole.finals:
            raise UserError(
                "grammar-invalid",
                f"{places[terminal]} has no text of whole words with their marks. With %prelex, write the first mark"
                " before each word and the second after it.",
            )
        found.append(whole)
    if sum(len(dfa.moves) for dfa in found) > STATES:
        raise UserError("form-too-large", f"{name}: the terminals have more than {STATES} states. Simplify them.")
    table, classes = _classes(found, [ignored, WORD, *([frozenset(mark) for mark in prelex] if prelex else [])])
    moves = [tuple({table[byte]: to for byte, to in there.items()} for there in dfa.moves) for dfa in found]
    return Terminals(
        names=tuple(expressions),
        dfas=tuple(Dfa(rows, dfa.finals) for rows, dfa in zip(moves, found, strict=True)),
        possible=bits(number for number, dfa in enumerate(found) if dfa.finals),
        nullable=nullable,
        table=table,
        classes=classes,
        skip=frozenset(table[byte] for byte in ignored),
        marks=None if prelex is None else (prelex[0][0], prelex[1][0]),
        words=frozenset(table[byte] for byte in WORD),
    )


def _expression(text: str) -> Dfa:
    words = text.split()
    if len(words) > 1 and ("without" in (words[0], words[-1]) or ("without" in words and words[-1] == "and")):
        raise UserError("grammar-invalid", f"{quoted(text)} is incomplete. Write A without B, or A without B and C.")
    first, _, rest = text.partition(" without ")
    found = _one(first.strip())
    for taken in rest.split(" and ") if rest else []:
        found = filtered(found, _one(taken.strip()), False)
    return found


@lru_cache(maxsize=KEPT)
def _one(pattern: str) -> Dfa:
    if not pattern:
        raise UserError("grammar-invalid", "the regular expression is missing. Write name = expression.")
    start, finals, moves = byte_automaton(pattern)
    return minimal(trimmed(start, finals, moves))


def _check_marks(prelex: tuple[bytes, bytes], skip: frozenset[int], name: str) -> None:
    if not skip:
        raise UserError("grammar-invalid", f"{name}: %prelex needs signs to skip. Set at least one, as in %skip space.")
    if wrong := [byte for byte in skip if byte in WORD or bytes([byte]) in prelex]:
        raise UserError(
            "grammar-invalid",
            f"{name}: %skip has {chr(min(wrong))!r}, which %prelex takes for a part of a word or a mark. Set other"
            " ASCII signs than the two marks, letters, digits and _.",
        )


def _balanced(prelex: tuple[bytes, bytes]) -> Dfa:
    """Return the automaton of texts with marks around each word and nowhere else. They begin and end outside words."""
    opens, closes = prelex[0][0], prelex[1][0]
    other = {byte: 0 for byte in range(256) if byte not in WORD and byte not in (opens, closes)}
    word = dict.fromkeys(WORD, 2)
    return Dfa(({**other, opens: 1}, word, {**word, closes: 3}, other), frozenset([0, 3]))


def _classes(dfas: Iterable[Dfa], sets: Iterable[frozenset[int]]) -> tuple[bytes, tuple[tuple[int, ...], ...]]:
    """Return the class of each byte, and the bytes of each class. No automaton or set tells bytes of a class apart."""
    kinds = [0] * 256
    rows = [*(dict.fromkeys(one, 0) for one in sets), *(there for dfa in dfas for there in dfa.moves)]
    for row in rows:
        names: dict[tuple[int, int | None], int] = {}
        kinds = [names.setdefault((kind, row.get(byte)), len(names)) for byte, kind in enumerate(kinds)]
    members = [tuple(byte for byte in range(256) if kinds[byte] == kind) for kind in range(max(kinds) + 1)]
    return bytes(kinds), tuple(members)


def unmarked(dfa: Dfa, terminals: Terminals) -> list[tuple[dict[int, int], bool, bool]]:
    """Return the states of the texts that an automaton accepts after marks are put around their words.

    Each has its moves, True if it is final, and True inside a word. The first state is the start.
    """
    opens, closes = (-1, -1) if terminals.marks is None else (terminals.table[mark] for mark in terminals.marks)
    words = frozenset() if terminals.marks is None else terminals.words
    order, number = [(0, False)], {(0, False): 0}
    found = []
    for state, inside in order:
        row: dict[int, int] = {}
        # At the beginning or end of a word its mark is read first.
        changed = dfa.moves[state].get(closes if inside else opens, -1)
        for within in (False, True):
            source = state if within == inside else changed
            for label, to in dfa.moves[source].items() if source >= 0 else ():
                if label in (opens, closes) or within != (label in words):
                    continue
                if (to, within) not in number:
                    number[to, within] = len(order)
                    order.append((to, within))
                row[label] = number[to, within]
        found.append((row, (changed if inside else state) in dfa.finals, inside))
    return found


def marked(text: bytes, marks: tuple[int, int], begins: bool, ends: bool) -> bytes:
    """Return a piece with one mark before each of its words and one after it.

    A word at the piece's edge gets its mark there only if nothing else can continue it.

    Args:
        begins: the piece is the first of its text.
        ends: the piece is the last of its text.
    """
    found, inside = bytearray(), not begins
    for at, byte in enumerate(text):
        word = byte in WORD
        if word != inside and (at or begins):
            found.append(marks[0] if word else marks[1])
        inside = word
        found.append(byte)
    if ends and inside and text:
        found.append(marks[1])
    return bytes(found)
