"""Deterministic finite automata over any labels (bytes, classes of bytes, terminals)."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Dfa:
    """A deterministic automaton that starts in state 0.

    A label without a move leads nowhere. Functions of this module return automata in which every state can be reached
    and leads to a final one. Only the start of the empty language leads nowhere.
    """

    moves: tuple[dict[int, int], ...]  # by state: next state by label
    finals: frozenset[int]

    def accepts(self, word: Iterable[int]) -> bool:
        """Return True if the word is in the language."""
        state: int | None = 0
        for label in word:
            state = self.moves[state].get(label)
            if state is None:
                return False
        return state in self.finals


def literal(word: Iterable[int]) -> Dfa:
    """Return the automaton of one word."""
    labels = list(word)
    return Dfa((*({label: at + 1} for at, label in enumerate(labels)), {}), frozenset([len(labels)]))


def trimmed(start: int, finals: Iterable[int], moves: Mapping[int, Mapping[int, int]]) -> Dfa:
    """Return an automaton without the states that cannot be reached or lead to no final one."""
    backwards: dict[int, list[int]] = defaultdict(list)
    for state, there in moves.items():
        for to in there.values():
            backwards[to].append(state)
    alive, stack = set(finals), list(finals)
    while stack:
        for state in backwards[stack.pop()]:
            if state not in alive:
                alive.add(state)
                stack.append(state)
    number, order = {start: 0}, [start]
    for state in order:
        for _, to in sorted(moves.get(state, {}).items()):
            if to in alive and to not in number:
                number[to] = len(number)
                order.append(to)
    kept = tuple({label: number[to] for label, to in moves.get(state, {}).items() if to in alive} for state in order)
    return Dfa(kept, frozenset(number[state] for state in finals if state in number))


def minimal(dfa: Dfa) -> Dfa:
    """Return the automaton of the same language with the fewest states (Hopcroft's algorithm)."""
    sources: list[list[tuple[int, int]]] = [[] for _ in dfa.moves]
    for state, there in enumerate(dfa.moves):
        for label, to in there.items():
            sources[to].append((label, state))
    parts = [set(dfa.finals), set(range(len(dfa.moves))) - dfa.finals]
    part = [0 if state in dfa.finals else 1 for state in range(len(dfa.moves))]
    waiting = {0, 1}
    while waiting:
        before: dict[int, list[int]] = defaultdict(list)
        for to in parts[waiting.pop()]:
            for label, state in sources[to]:
                before[label].append(state)
        for states in before.values():
            hit: dict[int, list[int]] = defaultdict(list)
            for state in states:
                hit[part[state]].append(state)
            for one, members in hit.items():
                if len(members) == len(parts[one]):
                    continue
                fresh = len(parts)
                parts.append(set(members))
                parts[one].difference_update(members)
                for state in members:
                    part[state] = fresh
                waiting.add(fresh if one in waiting or len(members) <= len(parts[one]) else one)
    moves = {part[state]: {label: part[to] for label, to in there.items()} for state, there in enumerate(dfa.moves)}
    return trimmed(part[0], {part[state] for state in dfa.finals}, moves)


def filtered(one: Dfa, other: Dfa, inside: bool) -> Dfa:
    """Return the minimal automaton of the words of `one` that are in `other`, or of those that are not in it."""
    number: dict[tuple[int, int | None], int] = {(0, 0): 0}
    order: list[tuple[int, int | None]] = [(0, 0)]
    moves, finals = {}, []
    for at, (left, right) in enumerate(order):
        if left in one.finals and (right in other.finals) == inside:
            finals.append(at)
        row = moves[at] = {}
        for label, to in one.moves[left].items():
            pair = (to, None if right is None else other.moves[right].get(label))
            if pair not in number:
                number[pair] = len(number)
                order.append(pair)
            row[label] = number[pair]
    return minimal(trimmed(0, finals, moves))


def without_empty(dfa: Dfa) -> Dfa:
    """Return the automaton of the same language without the empty word."""
    if 0 not in dfa.finals:
        return dfa
    moves = {state + 1: {label: to + 1 for label, to in there.items()} for state, there in enumerate(dfa.moves)}
    return minimal(trimmed(0, {state + 1 for state in dfa.finals}, {0: moves[1], **moves}))


class Nfa:
    """A nondeterministic automaton that is put together piece by piece.

    Args:
        check: called with the number of states so far. It may raise an error.
    """

    def __init__(self, check: Callable[[int], None]):
        self.check = check
        self.moves: list[dict[int, list[int]]] = []
        self.silent: list[list[int]] = []  # moves that read nothing

    def state(self) -> int:
        """Add a state and return its number."""
        self.moves.append({})
        self.silent.append([])
        if len(self.moves) % 256 == 0:
            self.check(len(self.moves) // 16)  # most of them are merged with others
        return len(self.moves) - 1

    def edge(self, source: int, label: int | None, to: int) -> None:
        """Add a move. Without a label it reads nothing."""
        if label is None:
            self.silent[source].append(to)
        else:
            self.moves[source].setdefault(label, []).append(to)

    def inline(self, dfa: Dfa, source: int, to: int) -> None:
        """Add a copy of an automaton between two states."""
        states = [self.state() for _ in dfa.moves]
        self.silent[source].append(states[0])
        for state, there in zip(states, dfa.moves, strict=True):
            self.moves[state] = {label: [states[other]] for label, other in there.items()}
        for state in dfa.finals:
            self.silent[states[state]].append(to)

    def determinised(self, start: int, final: int) -> Dfa:
        """Return the minimal deterministic automaton of the same language."""
        number = {self._closed([start]): 0}
        order, moves, finals = [*number], {}, []
        for at, states in enumerate(order):
            if final in states:
                finals.append(at)
            reached: dict[int, list[int]] = defaultdict(list)
            for state in states:
                for label, there in self.moves[state].items():
                    reached[label] += there
            row = moves[at] = {}
            closed: dict[tuple[int, ...], int] = {}  # many labels lead to the same states
            for label, there in reached.items():
                key = tuple(there)
                if key not in closed:
                    together = self._closed(there)
                    if together not in number:
                        number[together] = len(number)
                        order.append(together)
                        self.check(len(number) // 4)
                    closed[key] = number[together]
                row[label] = closed[key]
        return minimal(trimmed(0, finals, moves))

    def _closed(self, states: Iterable[int]) -> frozenset[int]:
        """Return `states`, and the states that are reached from them by moves that read nothing."""
        found, todo = set(states), list(states)
        while todo:
            for to in self.silent[todo.pop()]:
                if to not in found:
                    found.add(to)
                    todo.append(to)
        return frozenset(found)
