"""Finite automata of grammars: exact for regular grammars, else of texts that are nested at most to a depth.

Variables that derive each other are a *group*. The group is regular if all of them are only at the right end of each
other's bodies, or only at the left end. Any other group nests.

The depth of a derivation is the highest count on any of its paths from the top. A path counts while it stays in a
group, and begins again at 0 when it leaves the group. A step from a variable to one inside its body counts one if there
is text on both sides of it, such as brackets. If the group is regular without such steps, nothing else
counts, and lists may be of any length. Otherwise its other variables derive each other by steps with text on one side,
left or right. A path through these remembers the sides. A step that makes them both counts one and forgets them.

Derivations up to a depth are those of a grammar whose variables carry the depth and the sides. All its groups are
regular. So automata over terminals are built from the inside out and inserted into each other (a recursive transition
network with bounded recursion).
"""

import time
from collections.abc import Callable, Iterator, Sequence

from dllm_sampler.errors import UserError
from dllm_sampler.guides.forms.automaton import STATES, ByteAutomaton
from dllm_sampler.guides.forms.library import SECONDS
from dllm_sampler.guides.grammar.regular import Dfa, Nfa, minimal, trimmed
from dllm_sampler.guides.grammar.rules import Body, Grammar, components
from dllm_sampler.guides.grammar.terminals import Terminals, unmarked

LEFT, RIGHT, BOTH = 1, 2, 3  # the sides of a variable on which there is text
Level = tuple[str, int, int]  # a variable, its depth, and the remembered sides


class Nesting:
    """Groups of variables that derive each other, and variables that nest.

    Attributes:
        bodies: the bodies of each variable, without elements that derive only the empty text.
        group: the number of each variable's group.
        part: the number of each variable's group once steps with text on both sides are left out.
        variable: a variable that nests. None if the grammar is regular.
    """

    def __init__(self, grammar: Grammar):
        self.bodies = {head: [_solid(grammar, body) for body in bodies] for head, bodies in grammar.bodies.items()}
        steps = [
            (head, one, _sides(body, at))
            for head, bodies in self.bodies.items()
            for body in bodies
            for at, one in enumerate(body)
            if isinstance(one, str)
        ]
        self.group = self._groups(steps)
        inner = [step for step in steps if self.group[step[0]] == self.group[step[1]]]
        self.part = self._groups([step for step in inner if step[2] != BOTH])
        seen: dict[int, int] = {}
        deep = [head for head, _, sides in inner if sides == BOTH]
        for head, one, sides in inner:
            if self.part[head] == self.part[one]:
                seen[self.part[head]] = seen.get(self.part[head], 0) | sides
        deep += [head for head in self.bodies if seen.get(self.part[head]) == BOTH]
        self.variable = deep[0].strip("<>") if deep else None

    def _groups(self, steps: Sequence[tuple[str, str, int]]) -> dict[str, int]:
        number = {head: at for at, head in enumerate(self.bodies)}
        edges: list[list[int]] = [[] for _ in number]
        for head, one, _ in steps:
            edges[number[head]].append(number[one])
        found = {one: group for group, members in enumerate(components(edges)) for one in members}
        return {head: found[at] for head, at in number.items()}

    def inside(self, level: Level) -> Iterator[list[Level | int]]:
        """Yield the bodies of a variable at a depth, with the depths of their elements."""
        head, depth, kept = level
        for body in self.bodies[head]:
            found: list[Level | int] = []
            for at, one in enumerate(body):
                sides = _sides(body, at)
                if isinstance(one, int):
                    found.append(one)
                elif self.group[one] != self.group[head]:
                    found.append((one, 0, 0))
                elif sides != BOTH and self.part[one] != self.part[head]:
                    found.append((one, depth, 0))
                else:
                    both = sides | kept == BOTH
                    found.append((one, depth + both, 0 if both else sides | kept))
            yield found


def _solid(grammar: Grammar, body: Body) -> Body:
    return tuple(one for one in body if isinstance(one, int) or grammar.first[grammar.number[one]])


def _sides(body: Body, at: int) -> int:
    """Return the sides of an element of a body on which there is text."""
    return (LEFT if at else 0) | (RIGHT if at < len(body) - 1 else 0)


def automaton(grammar: Grammar, terminals: Terminals, depth: int | None, name: str) -> ByteAutomaton:
    """Build the automaton over bytes of texts nested at most `depth` deep: first state, final ones, and moves.

    Args:
        depth: greatest depth, at least 0. A regular grammar needs none.
        name: the grammar's name in errors, for example `The grammar json`.

    Raises:
        UserError: the depth is missing, negative, or below that of every text, or the automaton is too large.
    """
    nesting = Nesting(grammar)
    deep = nesting.variable
    if depth is None and deep is not None:
        raise UserError(
            "form-not-regular",
            f"{name} nests {deep} in {deep}, which an automaton cannot follow. Set a depth, for example 3.",
        )
    if depth is not None and depth < 0:
        raise UserError("option-range", f"The depth {depth} is negative. Set at least 0.")
    until = time.monotonic() + SECONDS
    where = f" at depth {depth}" if deep else ""
    way = "Choose a smaller depth" if deep and depth else "Make the grammar simpler"

    def check(states: int) -> None:
        if states > STATES:
            raise UserError("form-too-large", f"{name} has more than {STATES} states as an automaton{where}. {way}.")
        if time.monotonic() > until:
            raise UserError("form-too-large", f"{name} takes more than {SECONDS} s to build{where}. {way}.")

    words = _Levels(nesting, depth, check).of(grammar.names[grammar.start])
    if not words.finals:
        raise UserError("form-impossible", f"{name} has no text at depth {depth}. Raise the depth.")
    found = _bytes(words, terminals, check)
    check(len(found.moves))
    moves = {
        state: {byte: to for label, to in there.items() for byte in terminals.classes[label]}
        for state, there in enumerate(found.moves)
    }
    return 0, sorted(found.finals), moves


class _Levels:
    """Automata over terminals, one for each variable at each depth."""

    def __init__(self, nesting: Nesting, depth: int | None, check: Callable[[int], None]):
        self.nesting, self.depth, self.check = nesting, depth, check
        self.dfas: dict[Level, Dfa] = {}

    def of(self, start: str) -> Dfa:
        """Return the automaton of the start variable."""
        order, number = [(start, 0, 0)], {(start, 0, 0): 0}
        edges: list[list[int]] = []
        for level in order:
            reached = [one for body in self._bodies(level) for one in body if not isinstance(one, int)]
            for one in reached:
                if one not in number:
                    number[one] = len(number)
                    order.append(one)
                    self.check(len(number) // 16)
            edges.append([number[one] for one in reached])
        for members in components(edges):
            self._build([order[one] for one in members])
        return self.dfas[order[0]]

    def _bodies(self, level: Level) -> list[list[Level | int]]:
        """Return the bodies of a variable at a depth that are not nested too deep."""
        return [
            body
            for body in self.nesting.inside(level)
            if self.depth is None or all(isinstance(one, int) or one[1] <= self.depth for one in body)
        ]

    def _build(self, members: list[Level]) -> None:
        """Build the automata of levels that lead to each other. Those of other levels they lead to exist already."""
        nfa = Nfa(self.check)
        states: dict[Level | int, int] = {level: nfa.state() for level in members}
        end = nfa.state()  # end of all texts, or their beginning if the group is at the left ends of bodies
        backwards = members[0][2] == RIGHT
        for level in members:
            state = states[level]
            for body in self._bodies(level):
                here, stop = (end, state) if backwards else (state, end)
                if body and backwards and body[0] in states:
                    here = states[body.pop(0)]
                elif body and not backwards and body[-1] in states:
                    stop = states[body.pop()]
                for one in body:
                    there = nfa.state()
                    if isinstance(one, int):
                        nfa.edge(here, one, there)
                    else:
                        nfa.inline(self.dfas[one], here, there)
                    here = there
                nfa.edge(here, None, stop)
        for level in members:
            self.dfas[level] = nfa.determinised(*((end, states[level]) if backwards else (states[level], end)))


def _bytes(words: Dfa, terminals: Terminals, check: Callable[[int], None]) -> Dfa:
    """Return the automaton over classes of bytes of an automaton over terminals."""
    nfa = Nfa(check)
    nodes = [nfa.state() for _ in words.moves]
    end = nfa.state()
    lexemes: dict[tuple[int, int], int] = {}
    for at, there in zip(nodes, words.moves, strict=True):
        for label in terminals.skip:
            nfa.edge(at, label, at)
        for terminal, to in there.items():
            if (terminal, to) not in lexemes:
                lexemes[terminal, to] = nfa.state()
                nfa.inline(terminals.dfas[terminal], lexemes[terminal, to], nodes[to])
            nfa.edge(at, None, lexemes[terminal, to])
    for state in words.finals:
        nfa.edge(nodes[state], None, end)
    found = nfa.determinised(nodes[0], end)
    if terminals.marks is None:
        return found
    states = unmarked(found, terminals)
    finals = [at for at, (_, final, _) in enumerate(states) if final]
    return minimal(trimmed(0, finals, {at: row for at, (row, _, _) in enumerate(states)}))
