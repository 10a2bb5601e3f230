"""Shortest texts of a grammar that fit a partial text.

It shares nothing with the search for verdicts but the terminals' automata and the normal form: lexemes are found by
walking a terminal's automaton over the known bytes and through gaps, and facts "this variable derives that span" are
taken in the order of their costs (Knuth's generalisation of Dijkstra's algorithm, 1977).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from heapq import heappop, heappush

from dllm_sampler.guides.grammar.partial import Partial
from dllm_sampler.guides.grammar.rules import Grammar
from dllm_sampler.guides.grammar.terminals import Terminals

# Where a text stands with respect to words, where these have marks; without marks always OUT.
OUT, BEGUN, WORD, OVER = range(4)
TAIL = -1  # behind a lexeme, in what is skipped
Node = tuple[int, int]  # a position in the partial text, and one of the above
Step = tuple[int, int, int]  # a state of a terminal or TAIL, and a node
Fact = tuple[Node, int, Node]  # a variable derives a text between two nodes


class Spent(Exception):
    """The search has taken all the steps that it may take."""


@dataclass
class Lexemes:
    """The lexemes of one terminal that begin at one node: what each end costs, and how it is reached."""

    ends: dict[Node, int] = field(default_factory=dict)
    came: dict[Step, tuple[Step | None, bytes]] = field(default_factory=dict)

    def text(self, end: Node) -> bytes:
        """The lexeme and what is skipped behind it."""
        parts, step = [], (TAIL, *end)
        while step is not None:
            step, part = self.came[step]
            parts.append(part)
        return b"".join(reversed(parts))


class Walk:
    """The lexemes of one partial text, in at most `limit` steps."""

    def __init__(self, partial: Partial, terminals: Terminals, limit: int):
        self.left = limit
        self.terminals, self.dfas = terminals, terminals.dfas
        self.known: list[bytes] = []  # of each position one byte, or nothing: a gap
        for number, piece in enumerate(partial.pieces):
            if number or partial.open:
                self.known.append(b"")
            self.known += [bytes([byte]) for byte in piece]
        if not partial.closed:
            self.known.append(b"")
        self.size = len(self.known)
        self.labels = [terminals.table[one[0]] if one else -1 for one in self.known]
        named = [max(members, key=_plain) for members in terminals.classes]
        self.shown = [bytes([byte]) for byte in named]  # the byte that a gap gets for each class
        self.kinds = [OUT] * len(named)
        if terminals.marks is not None:
            kinds = dict.fromkeys(terminals.words, WORD)
            kinds |= {terminals.table[mark]: kind for mark, kind in zip(terminals.marks, (BEGUN, OVER), strict=True)}
            self.kinds = [kinds.get(number, OUT) for number in range(len(named))]
        self.options: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def spend(self) -> None:
        """Count a step.

        Raises:
            Spent: there are none left.
        """
        self.left -= 1
        if self.left < 0:
            raise Spent

    def ends(self, node: Node) -> bool:
        """Whether the text may end at a node."""
        return node[1] in (OUT, OVER) and not any(self.known[node[0] :])

    def starts(self) -> Lexemes:
        """The nodes where the first lexeme may begin."""
        return self._walk((TAIL, 0, OUT), -1)

    def lexemes(self, terminal: int, node: Node) -> Lexemes:
        """The lexemes of a terminal from a node on."""
        return self._walk((0, *node), terminal)

    def _walk(self, start: Step, terminal: int) -> Lexemes:
        found = Lexemes(came={start: (None, b"")})
        costs: dict[Step, int] = {}
        # Steps by cost, and how each was reached.
        queue: list[tuple[int, Step, Step | None, bytes]] = [(0, start, None, b"")]
        while queue:
            cost, step, before, part = heappop(queue)
            if step in costs:
                continue
            self.spend()
            costs[step], found.came[step] = cost, (before, part)
            state, at, word = step
            gap = at < self.size and not self.known[at]
            if gap:
                heappush(queue, (cost, (state, at + 1, word), step, b""))
            if state == TAIL:
                if at == 0 or self.known[at - 1]:  # right behind a gap is as good as inside it
                    found.ends[at, word] = cost
                if at < self.size and self.labels[at] in self.terminals.skip and word in (OUT, OVER):
                    heappush(queue, (cost, (TAIL, at + 1, OUT), step, self.known[at]))
                elif gap and word == OVER:  # the next word must not touch this one
                    sign = min(self.terminals.skip)
                    heappush(queue, (cost + 1, (TAIL, at, OUT), step, self.shown[sign]))
                continue
            if state in self.dfas[terminal].finals:
                heappush(queue, (cost, (TAIL, at, word), step, b""))
            if gap:
                for label, to in self._options(terminal, state):
                    self._push(queue, step, cost, label, to, True)
            elif at < self.size or self.terminals.marks is not None:
                for label, to in self.dfas[terminal].moves[state].items():
                    self._push(queue, step, cost, label, to, False)
        return found

    def _push(
        self, queue: list[tuple[int, Step, Step | None, bytes]], step: Step, cost: int, label: int, to: int, gap: bool
    ) -> None:
        """The step that one label of a terminal makes."""
        _, at, word = step
        kind = self.kinds[label]
        if kind in (BEGUN, OVER):  # a mark takes no byte
            if word == (OUT if kind == BEGUN else WORD):
                heappush(queue, (cost, (to, at, kind), step, b""))
        elif gap:
            heappush(queue, (cost + 1, (to, at, kind), step, self.shown[label]))
        elif at < self.size and self.labels[at] == label:
            heappush(queue, (cost, (to, at + 1, kind), step, self.known[at]))

    def _options(self, terminal: int, state: int) -> list[tuple[int, int]]:
        """One label for each kind and each state that it leads to."""
        if (terminal, state) not in self.options:
            best: dict[tuple[int, int], int] = {}
            for label, to in self.dfas[terminal].moves[state].items():
                key = (to, self.kinds[label])
                if key not in best or _plain(self.shown[label][0]) > _plain(self.shown[best[key]][0]):
                    best[key] = label
            self.options[terminal, state] = [(label, to) for (to, _), label in best.items()]
        return self.options[terminal, state]


def shortest(partial: Partial, terminals: Terminals, grammar: Grammar, limit: int) -> bytes | None:
    """A text of the grammar that fits the partial text, with the fewest bytes; None: there is none.

    Args:
        limit: most steps of the search. Where it would take more the answer is None.
    """
    if terminals.marks is not None and any(mark in piece for piece in partial.pieces for mark in terminals.marks):
        return None
    try:
        return _shortest(Walk(partial, terminals, limit), grammar)
    except Spent:
        return None


def _shortest(walk: Walk, grammar: Grammar) -> bytes | None:
    units, lefts, rights = defaultdict(list), defaultdict(list), defaultdict(list)
    for head, body in grammar.units:
        units[body].append(head)
    for head, left, right in grammar.pairs:
        lefts[left].append((head, right))
        rights[right].append((head, left))
    queue: list[tuple[int, Fact]] = []
    best: dict[Fact, int] = {}
    how: dict[Fact, tuple] = {}

    def found(cost: int, fact: Fact, why: tuple) -> None:
        walk.spend()
        if cost < best.get(fact, cost + 1):
            best[fact], how[fact] = cost, why
            heappush(queue, (cost, fact))

    starts = walk.starts()
    lexemes: dict[tuple[int, Node], Lexemes] = {}
    leaves: dict[int, list[int]] = defaultdict(list)
    for head, terminal in grammar.leaves:
        leaves[terminal].append(head)
    nodes, seen = [*starts.ends], {*starts.ends}
    for node in nodes:
        for head in grammar.empties:
            found(0, (node, head, node), ())
        for terminal, heads in leaves.items():
            lexemes[terminal, node] = there = walk.lexemes(terminal, node)
            nodes += [end for end in there.ends if end not in seen]
            seen.update(there.ends)
            for end, cost in there.ends.items():
                for head in heads:
                    found(cost, (node, head, end), (terminal,))
    after: dict[tuple[Node, int], list[tuple[Node, int]]] = defaultdict(list)
    before: dict[tuple[Node, int], list[tuple[Node, int]]] = defaultdict(list)
    done: set[Fact] = set()
    while queue:
        cost, fact = heappop(queue)
        if fact in done:
            continue
        done.add(fact)
        begin, variable, end = fact
        if variable == grammar.start and begin in starts.ends and walk.ends(end):
            return starts.text(begin) + _text(fact, how, lexemes)
        for head in units[variable]:
            found(cost, (begin, head, end), (variable, end, -1))
        after[begin, variable].append((end, cost))
        before[end, variable].append((begin, cost))
        for head, right in lefts[variable]:
            for far, more in after[end, right]:
                found(cost + more, (begin, head, far), (variable, end, right))
        for head, left in rights[variable]:
            for far, more in before[begin, left]:
                found(cost + more, (far, head, end), (left, begin, variable))
    return None


def _text(fact: Fact, how: dict[Fact, tuple], lexemes: dict[tuple[int, Node], Lexemes]) -> bytes:
    """The text of a fact."""
    parts, todo = [], [fact]
    while todo:
        begin, _, end = one = todo.pop()
        why = how[one]
        if len(why) == 1:
            parts.append(lexemes[why[0], begin].text(end))
        elif why:
            left, middle, right = why
            if right >= 0:
                todo.append((middle, right, end))
            todo.append((begin, left, middle))
    return b"".join(parts)


def _plain(byte: int) -> tuple[bool, bool, int]:
    """Which byte to show rather: letters and digits, then other printable signs, small ones first."""
    sign = chr(byte)
    return byte < 128 and sign.isalnum(), 32 <= byte < 127, -byte
