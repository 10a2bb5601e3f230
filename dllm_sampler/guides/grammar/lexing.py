"""Pieces of a text as lexemes: every way to split them, with the lexemes that are cut off at both ends.

A *piece* is known text between two gaps. All terminals are followed at once, by one automaton whose states are sets of
the terminals' states. It is determinised as far as texts need it.
"""

from dataclasses import dataclass, field
from functools import cache

from dllm_sampler.guides.grammar.rules import Grammar, bits, members, union
from dllm_sampler.guides.grammar.terminals import Terminals

DEAD = 0  # the number of the empty set of states


@dataclass
class Lexing:
    """All lexings of one piece. Offsets are ends of lexemes, after skipped bytes.

    The first piece of a text begins with a lexeme. Any other one may begin with the rest of a lexeme.
    """

    text: bytes  # classes
    starts: tuple[int, ...] = ()  # offsets at which the first lexeme of a text may begin
    blank: bool = False  # after a gap: the piece may be skipped as a whole
    enter: dict[int, int] = field(
        default_factory=dict
    )  # after a gap: terminals begun there, by the offset of their end
    leaving: int = DEAD  # after a gap: the states at the end of lexemes that contain the whole piece
    inner: dict[int, tuple[dict[int, int], int]] = field(default_factory=dict)
    # by offset at which a lexeme may begin: terminals by the offset of their end, and the states at the piece's end
    crossings: dict[int, tuple[dict[int, int], int]] = field(default_factory=dict)  # memo of `Scanner.cross`


class Scanner:
    """A lexer of pieces that remembers its results.

    Args:
        terminals: the terminals of the language.
        grammar: the rules. A split with a terminal after another one that it never follows is left out.
    """

    def __init__(self, terminals: Terminals, grammar: Grammar):
        self.terminals, self.grammar = terminals, grammar
        self.moves: list[dict[int, int]] = []  # of all terminals' automata, with consecutive states
        self.owner: list[int] = []
        self.begins: list[int] = []
        finals = []
        for number, dfa in enumerate(terminals.dfas):
            base = len(self.moves)
            self.begins.append(base)
            self.moves += [{label: base + to for label, to in there.items()} for there in dfa.moves]
            self.owner += [number] * len(dfa.moves)
            finals += [base + state for state in dfa.finals]
        self.finals = bits(finals)
        first = {label for number in members(terminals.possible) for label in terminals.dfas[number].moves[0]}
        self.solid = terminals.skip - first  # classes that are skipped and begin no lexeme
        self.sets: list[int] = []
        self.number: dict[int, int] = {}
        self.steps: list[list[int]] = []  # by set and class. -1 if not computed yet
        self.accepted: list[int] = []  # by set: the terminals that it accepts
        self.owners: list[int] = []  # by set: the terminals of its states
        self.going: list[bool] = []  # by set: a lexeme in it may continue
        self.widen, self._start, self._follow = cache(self._widened), cache(self._begun), cache(self._followed)
        self.lexings: dict[tuple[bytes, bool], Lexing] = {}
        self.held = 0  # size of the remembered results, in bytes of text
        self._set(0)
        self.every = self._set((1 << len(self.moves)) - 1)  # the states of a lexeme after a gap

    def lex(self, text: bytes, first: bool) -> Lexing:
        """Return all lexings of a piece, which may be the `first` of its text."""
        key = (text, first)
        if key not in self.lexings:
            self.held += len(text)
            self.lexings[key] = self._lex(text.translate(self.terminals.table), first)
        return self.lexings[key]

    def cross(self, lexing: Lexing, states: int) -> tuple[dict[int, int], int]:
        """Return terminals of lexemes begun before the piece, by the offset of their end, and the states at its end."""
        found = lexing.crossings.get(states)
        if found is None:
            self.held += 1
            ends, leaving = self._run(states, lexing.text, 0)
            found = lexing.crossings[states] = (self._behind(lexing.text, ends), leaving)
        return found

    def _widened(self, states: int) -> int:
        """Return the states after any text."""
        reached, todo = self.sets[states], [*members(self.sets[states])]
        for state in todo:
            for to in self.moves[state].values():
                if not reached >> to & 1:
                    reached |= 1 << to
                    todo.append(to)
        return self._set(reached)

    def _lex(self, text: bytes, first: bool) -> Lexing:
        size = len(text)
        found = Lexing(text)
        allowed: dict[int, int] = {}  # by offset: the terminals that may begin there
        if first:
            found.starts = self._stops(text, 0)
            allowed = dict.fromkeys(found.starts, self.grammar.first[self.grammar.start])
        else:
            ends, found.leaving = self._run(self.every, text, 0)
            found.enter = self._behind(text, ends)
            for at in self._stops(text, 0):
                if at == size:
                    found.blank = True
                elif at:
                    ends, leaving = self._run(self._start(self.terminals.possible), text, at)
                    found.leaving = self._set(self.sets[found.leaving] | self.sets[leaving])
                    for to, which in self._behind(text, ends).items():
                        found.enter[to] = found.enter.get(to, 0) | which
            allowed = {at: self._follow(which) for at, which in found.enter.items()}
        for at in range(size):
            if not allowed.get(at):
                continue
            ends, leaving = self._run(self._start(allowed[at]), text, at)
            if not ends and not leaving:
                continue
            behind = self._behind(text, ends)
            found.inner[at] = (behind, leaving)
            for to, which in behind.items():
                allowed[to] = allowed.get(to, 0) | self._follow(which)
        for at in sorted(found.inner, reverse=True):
            behind, leaving = found.inner[at]
            kept = {to: which for to, which in behind.items() if to == size or to in found.inner}
            if kept or leaving:
                found.inner[at] = (kept, leaving)
            else:
                del found.inner[at]
        found.enter = {to: which for to, which in found.enter.items() if to == size or to in found.inner}
        return found

    def _run(self, states: int, text: bytes, at: int) -> tuple[list[tuple[int, int]], int]:
        """Return ends and their terminals, and the states at the text's end, if a lexeme may continue from there."""
        ends, steps, accepted = [], self.steps, self.accepted
        for end, label in enumerate(text[at:] if at else text, at + 1):
            to = steps[states][label]
            if to < 0:
                to = self._step(states, label)
            if not to:
                return ends, DEAD
            states = to
            if accepted[states]:
                ends.append((end, accepted[states]))
        return ends, states if self.going[states] else DEAD

    def _behind(self, text: bytes, ends: list[tuple[int, int]]) -> dict[int, int]:
        """Return the terminals of `ends` by the offsets at which bytes skipped after them may end."""
        found: dict[int, int] = {}
        for end, which in ends:
            for at in self._stops(text, end):
                found[at] = found.get(at, 0) | which
        return found

    def _stops(self, text: bytes, at: int) -> tuple[int, ...]:
        """Return offsets at which a lexeme may begin, or the text end, after bytes from an offset on are skipped."""
        size = len(text)
        while at < size and text[at] in self.solid:
            at += 1
        if at == size or text[at] not in self.terminals.skip:
            return (at,)
        return (at, *self._stops(text, at + 1))  # the byte there may be skipped, or begin a lexeme

    def _begun(self, which: int) -> int:
        return self._set(bits(self.begins[number] for number in members(which)))

    def _followed(self, which: int) -> int:
        """Return the terminals that may follow one of some terminals."""
        return union(self.grammar.follow.get(number, 0) for number in members(which))

    def _step(self, states: int, label: int) -> int:
        moves = self.moves
        reached = bits(moves[state][label] for state in members(self.sets[states]) if label in moves[state])
        to = self.steps[states][label] = self._set(reached)
        return to

    def _set(self, states: int) -> int:
        """Return the number of a set of states. A new set is added."""
        if states not in self.number:
            self.held += len(self.terminals.classes)
            self.number[states] = len(self.sets)
            self.sets.append(states)
            self.steps.append([-1] * len(self.terminals.classes))
            self.accepted.append(bits(self.owner[state] for state in members(states & self.finals)))
            self.owners.append(bits(self.owner[state] for state in members(states)))
            self.going.append(any(self.moves[state] for state in members(states)))
        return self.number[states]
