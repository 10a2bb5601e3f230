"""Moves of tokens through lexemes: the states to which tokens lead, and the rests that lexemes leave of them.

Tokens that no terminal distinguishes are followed as one, so that a search over 100,000 tokens has few branches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from dllm_sampler.guides.grammar.rules import Grammar, bits, members
from dllm_sampler.guides.grammar.terminals import Terminals, unmarked

DEAD, TAIL, BEHIND = range(3)  # states: in no lexeme; in skipped bytes after one; right after a word
WHOLE, APART = range(2)  # kinds of an empty rest of a token. After `APART` no word may begin
DEPTH = 64  # bytes of a token for each recursion of `Lattice._kind`


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The texts that tokens have: short ones first, and letters and digits before other signs."""

    texts: tuple[bytes, ...]
    ids: tuple[int, ...]  # a token for each text
    signs: np.ndarray  # [N] uint8: all texts, one after the other
    begins: np.ndarray  # [V + 1] int64: the index at which each begins

    @staticmethod
    def of(ids: Mapping[bytes, int]) -> Vocabulary:
        """Return the vocabulary of a token for each text. No text may be empty."""
        texts = sorted(ids, key=_plain)
        begins = np.cumsum([0, *map(len, texts)])
        return Vocabulary(
            tuple(texts), tuple(ids[text] for text in texts), np.frombuffer(b"".join(texts), np.uint8), begins
        )


@dataclass(frozen=True)
class Moves:
    """Moves of tokens from a state: the best token for each next state, and for each kind of rest."""

    whole: tuple[tuple[int, int, int], ...]  # state, number of the token's text, its bytes
    parts: tuple[tuple[int, int, int], ...]  # kind, number of the token's text, its bytes


@dataclass(frozen=True)
class Kind:
    """Rests of tokens that lexemes treat alike.

    Attributes:
        whole: by terminal that may begin there, the states at the token's end.
        parts: by terminal that may begin there, the kinds of the rest after its lexeme.
        terminals: the set of both.
    """

    whole: Mapping[int, tuple[int, ...]]
    parts: Mapping[int, tuple[int, ...]]
    terminals: int


class Lattice:
    """The terminals of a grammar over the tokens of a vocabulary. Results are remembered.

    The terminals' automata are joined here, without marks around words. Instead, a state is inside a word or outside.
    """

    def __init__(self, terminals: Terminals, grammar: Grammar, vocabulary: Vocabulary):
        self.terminals, self.grammar, self.vocabulary = terminals, grammar, vocabulary
        self.sizes = np.diff(vocabulary.begins)
        self.labels = np.frombuffer(terminals.table, np.uint8)[vocabulary.signs]
        self.said = self.labels.tobytes()
        skips = dict.fromkeys(terminals.skip, TAIL)
        self.rows: list[dict[int, int]] = [{}, skips, skips]  # by state: the next state of each class
        self.ends = [False, True, True]  # by state: a lexeme may end there
        self.word = [False, False, True]  # by state: its last byte belongs to a word
        self.owner = [-1, -1, -1]  # by state: the terminal
        self.starts: list[int] = []  # by terminal: its first state
        self.apart: list[int] = []  # by terminal: its first state right after a word, when no word may begin
        self.starting = [0] * len(terminals.classes)  # by class: the terminals that begin with it
        for number in range(len(terminals.dfas)):
            self._terminal(number)
        self.arrays = np.array(self.ends), np.array(self.word)
        self.step = np.zeros((len(self.rows), len(terminals.classes)), np.int32)
        for state, row in enumerate(self.rows):
            self.step[state, [*row]] = [*row.values()]
        # [T + 1, C] a lexeme or skipped bytes may begin with a class after a terminal. The last row is for all.
        self.opens = np.zeros((len(terminals.dfas) + 1, len(terminals.classes)), bool)
        for number in range(-1, len(terminals.dfas)):
            for label, begun in enumerate(self.starting):
                self.opens[number, label] = label in terminals.skip or bool(begun & self._follow(number))
        self.worded = np.isin(np.arange(len(terminals.classes)), [*terminals.words] if terminals.marks else [])
        first = self.labels[vocabulary.begins[:-1]]
        self.begun = [np.flatnonzero(first == label) for label in range(len(terminals.classes))]  # tokens by class
        self.moves = cache(self._followed)
        self._kinds: dict[bytes, int] = {}  # by the rest of a token. DEAD if no lexeme begins with it
        self._numbers: dict[tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]]], int] = {}
        self.kinds: list[Kind | None] = [None, None]

    @cached_property
    def work(self) -> int:
        """Number of tokens to look at for the moves of all states."""
        return sum(len(self.begun[label]) for row in self.rows for label in row)

    @cached_property
    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Moves `[E, 3]` of all states by tokens (from, to, bytes), and moves `[F, 2]` of kinds (from, to).

        Numbers of kinds follow those of states.
        """
        count = len(self.rows)
        tokens = []
        for state in range(count):
            moves = self.moves(state)
            tokens += [(state, to, size) for to, _, size in moves.whole]
            tokens += [(state, count + kind, size) for kind, _, size in moves.parts]
        rests = []
        for number, kind in enumerate(self.kinds):
            if kind is not None:
                rests += [(count + number, to) for states in kind.whole.values() for to in states]
                rests += [(count + number, count + part) for parts in kind.parts.values() for part in parts]
        return np.array(tokens, np.int64).reshape(-1, 3), np.array(rests, np.int64).reshape(-1, 2)

    def _terminal(self, number: int) -> None:
        """Append the states of a terminal, inside words and outside."""
        base, states = len(self.rows), unmarked(self.terminals.dfas[number], self.terminals)
        first = states[0][0]
        self.starts.append(base)
        self.apart.append(base)
        if self.terminals.marks is not None:
            self.apart[-1] = base + len(states)
            apart = {label: to for label, to in first.items() if label not in self.terminals.words}
            states.append((apart, False, False))
        for row, end, inside in states:
            self.rows.append({label: base + to for label, to in row.items()})
            self.ends.append(end)
            self.word.append(inside)
            self.owner.append(number)
        for label in first:
            self.starting[label] |= 1 << number

    def _follow(self, number: int) -> int:
        """Return the terminals that may follow a terminal, or any of them (-1)."""
        return self.terminals.possible if number < 0 else self.grammar.follow.get(number, 0)

    def _followed(self, state: int) -> Moves:
        """Return the moves of tokens from a state, followed byte by byte. Tokens with smaller numbers are better."""
        begins, sizes = self.vocabulary.begins, self.sizes
        whole: dict[int, int] = {}
        parts: dict[int, int] = {}
        tokens = np.sort(np.concatenate([self.begun[0][:0], *(self.begun[label] for label in self.rows[state])]))
        states = np.full(len(tokens), state)
        opens, at = self.opens[self.owner[state]], 0
        ends, word = self.arrays
        while len(tokens):
            states = self.step[states, self.labels[begins[tokens] + at]]
            at += 1
            alive = states != DEAD
            tokens, states = tokens[alive], states[alive]
            over = sizes[tokens] == at
            for to, first in zip(*np.unique(states[over], return_index=True), strict=True):
                _least(whole, int(to), int(tokens[over][first]))
            tokens, states = tokens[~over], states[~over]
            label = self.labels[begins[tokens] + at]
            for token in tokens[ends[states] & opens[label] & ~(word[states] & self.worded[label])].tolist():
                kinds, skipped = self._behind(self.said[begins[token] + at : begins[token + 1]], self.owner[state])
                for kind in kinds:
                    _least(parts, kind, token)
                if skipped:
                    _least(whole, TAIL, token)
        return Moves(
            tuple((to, token, int(sizes[token])) for to, token in whole.items()),
            tuple((kind, token, int(sizes[token])) for kind, token in parts.items()),
        )

    def _behind(self, rest: bytes, number: int) -> tuple[list[int], bool]:
        """Return the kinds of a token's rest after a lexeme of a terminal, and True if all of it may be skipped."""
        kinds, follow = [], self._follow(number)
        while rest:
            kind = self._kind(rest)
            known = self.kinds[kind] if kind else None
            if known is not None and known.terminals & follow:
                kinds.append(kind)
            if rest[0] not in self.terminals.skip:
                return kinds, False
            rest = rest[1:]
        return kinds, True

    def _kind(self, rest: bytes) -> int:
        """Return the kind of a token's rest, or `DEAD` if no lexeme begins with it."""
        if rest in self._kinds:
            return self._kinds[rest]
        for at in range(len(rest) - DEPTH, 0, -DEPTH):  # short rests first, which bounds the recursion
            self._kind(rest[at:])
        whole: set[tuple[int, int]] = set()
        parts: set[tuple[int, int]] = set()
        for number in members(self.starting[rest[0]]):
            state = self.starts[number]
            for at, label in enumerate(rest, 1):
                state = self.rows[state].get(label, DEAD)
                if not state:
                    break
                if at == len(rest):
                    whole.add((number, state))
                elif self.ends[state] and not (self.word[state] and self.worded[rest[at]]):
                    kinds, skipped = self._behind(rest[at:], number)
                    parts.update((number, kind) for kind in kinds)
                    if skipped:
                        whole.add((number, TAIL))
        found = DEAD
        if whole or parts:
            key = (frozenset(whole), frozenset(parts))
            found = self._numbers.get(key, DEAD)
            if not found:
                found = self._numbers[key] = len(self.kinds)
                self.kinds.append(Kind(_by_terminal(whole), _by_terminal(parts), bits(n for n, _ in whole | parts)))
        self._kinds[rest] = found
        return found


def _plain(text: bytes) -> tuple[int, bool, bool, bytes]:
    """Return a key by which short texts come first, then letters and digits, then printable signs."""
    return len(text), not text.isalnum(), not (text.isascii() and text.decode().isprintable()), text


def _least(best: dict[int, int], key: int, token: int) -> None:
    if token < best.get(key, token + 1):
        best[key] = token


def _by_terminal(pairs: set[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for number, one in sorted(pairs):
        found[number] = (*found.get(number, ()), one)
    return found
