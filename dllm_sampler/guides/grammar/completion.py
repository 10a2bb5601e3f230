"""Completions of partial texts, made of tokens.

It shares nothing with the search for verdicts but the terminals' automata and the normal form. A partial text is a line
of places: a byte, a mask that one token fills, or a gap of any number of tokens. Lexemes are found by walking a
terminal's automaton along the places. Facts "this variable derives the text between these two nodes" are processed in
the order of their cost (Knuth's generalisation of Dijkstra's algorithm, 1977). As in Earley's algorithm, the text
before them must ask for the variable.
"""

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush

from dllm_sampler.guides.grammar.bounds import NEVER, bounds
from dllm_sampler.guides.grammar.lattice import APART, BEHIND, TAIL, WHOLE, Lattice

MASK, GAP = -1, -2  # places that are not bytes
# A node is a number: a place, and in its low bits the kind of the rest there of the token before that place.
BITS = 32
LEFT = (1 << BITS) - 1
# A variable or, if negative, a terminal; its state, or 0 if the derived text has ended; its first node; its last node.
Item = tuple[int, int, int, int]
Said = tuple[int, int]  # a place, and the number of a token's text that fills it
LOOKED = 200  # tokens or bounds that count as one step


class Spent(Exception):
    """The search has used up its steps."""


def completion(
    places: Sequence[int], lattice: Lattice, limit: int, ahead: int = 0, early: bool = False
) -> list[Said] | None:
    """Return the tokens of a completion, or None if there is none.

    The text may end before masks and gaps that no byte follows. Without `ahead` it has the fewest bytes.

    Args:
        places: classes of bytes, `MASK` or `GAP`.
        limit: most steps of the search. If it needs more, the result is None.
        ahead: bonus in bytes for each place that a text has reached, so that longer texts are tried first. The result
            is then the first text that is found, much sooner.
        early: the text may end before any mask.
    """
    try:
        return _Search(places, lattice, limit, ahead, early).run()
    except Spent:
        return None


class _Search:
    def __init__(self, places: Sequence[int], lattice: Lattice, limit: int, ahead: int, early: bool):
        self.places, self.lattice, self.left = [*places], lattice, limit
        self.grammar = grammar = lattice.grammar
        self.tail = len(places)  # only masks and gaps follow
        while self.tail and places[self.tail - 1] < 0:
            self.tail -= 1
        self.stops = [at >= self.tail or (early and label == MASK) for at, label in enumerate([*places, GAP])]
        self.ahead = ahead
        self.origin, self.goal = ~len(lattice.starts), len(grammar.names)  # symbols of their own
        self.heads: dict[int, list[int]] = defaultdict(list)  # A -> B, by B
        self.lefts: dict[int, list[tuple[int, int]]] = defaultdict(list)  # A -> B C, by B
        self.corners: dict[int, list[int]] = defaultdict(list)  # symbols with which a symbol may begin
        for head, body in [*grammar.units, *((head, ~terminal) for head, terminal in grammar.leaves)]:
            self.heads[body].append(head)
            self.corners[head].append(body)
        for head, left, right in grammar.pairs:
            self.lefts[left].append((head, right))
            self.corners[head].append(left)
        self.queue: list[tuple[int, int, int, Item]] = []
        self.cost: dict[Item, int] = {}
        self.how: dict[Item, tuple[tuple[Item, ...], Said | None]] = {}
        self.done: set[Item] = set()
        # By node and symbol that is asked for there: the cost of the text before it when it was first asked for.
        self.asked: dict[tuple[int, int], int] = {}
        self.after: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)  # ends of derived texts, with costs
        self.waiting: dict[tuple[int, int], dict[tuple[int, int, int], None]] = defaultdict(dict)
        self.first: dict[int, int] = {}  # nodes where the first lexeme may begin, with costs
        # By place: the least cost of the rest, by state, then by kind. Texts with gaps have no such bound.
        self.bounds: list[list[int]] = []
        if GAP not in places:
            self._spend((lattice.work + len(places) * len(lattice.rows)) // LOOKED)
            self.bounds = bounds(places, self.tail, self.stops, lattice)

    def run(self) -> list[Said] | None:
        self.asked[0, self.origin] = self.asked[0, self.goal] = 0
        self._push((self.origin, TAIL, 0, 0), 0, (), None)
        while self.queue:
            priority, _, cost, item = heappop(self.queue)
            if item in self.done:
                continue
            self.done.add(item)
            symbol, state, _, _ = item
            if symbol == self.goal:
                return self._said(item)
            if state:
                self._walk(item, cost)
            else:
                self._derived(item, cost, priority - self._rest(item))
        return None

    def _push(self, item: Item, cost: int, parts: tuple[Item, ...], said: Said | None) -> None:
        self._spend(1)
        if cost < self.cost.get(item, cost + 1):
            rest = self._rest(item)
            if rest < NEVER // 2:
                self.cost[item], self.how[item] = cost, (parts, said)
                heappush(self.queue, (self.asked[item[2], item[0]] + cost + rest, -item[3], cost, item))

    def _rest(self, item: Item) -> int:
        """Return the least cost of the text after an item, minus the bonus for its progress."""
        symbol, state, _, at = item
        if symbol == self.goal:
            return -NEVER if self.ahead else 0
        place = at >> BITS
        bound = self.bounds[place][state or len(self.lattice.rows) + (at & LEFT)] if self.bounds else 0
        return bound - self.ahead * min(place, self.tail)

    def _spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise Spent

    def _ask(self, node: int, symbol: int, base: int) -> None:
        """Look for texts of a symbol from a node on. `base` is the cost of the text before the node."""
        todo, begun = [symbol], -1
        while todo:
            one = todo.pop()
            if (node, one) in self.asked:
                continue
            begun = self._begun(node) if begun < 0 else begun
            if one < 0:
                if begun >> ~one & 1:
                    self.asked[node, one] = base
                    self._begin(node, ~one)
                continue
            if not self.grammar.first[one] & begun and not self.grammar.nullable >> one & 1:
                continue
            self.asked[node, one] = base
            if one in self.grammar.empties:
                self._push((one, 0, node, node), 0, (), None)
            for corner in self.corners[one]:
                todo.append(corner)
                for end, cost in self.after.get((node, corner), {}).items():  # once more, for this symbol
                    item = (corner, 0, node, end)
                    self._spend(1)
                    self.done.discard(item)
                    heappush(self.queue, (base + cost + self._rest(item), -end, cost, item))

    def _begun(self, node: int) -> int:
        place, kind = node >> BITS, self.lattice.kinds[node & LEFT]
        if kind is not None:
            return kind.terminals
        if place == len(self.places):
            return 0
        label = self.places[place]
        return self.lattice.terminals.possible if label < 0 else self.lattice.starting[label]

    def _begin(self, node: int, number: int) -> None:
        here, lattice = node & ~LEFT, self.lattice
        kind = lattice.kinds[node & LEFT]
        if kind is None:
            start = (lattice.apart if node & LEFT == APART else lattice.starts)[number]
            self._push((~number, start, node, here), 0, (), None)
            return
        for state in kind.whole.get(number, ()):
            self._push((~number, state, node, here), 0, (), None)
        for part in kind.parts.get(number, ()):
            self._push((~number, 0, node, here | part), 0, (), None)

    def _walk(self, item: Item, cost: int) -> None:
        """Continue a lexeme, or the skipped bytes after it."""
        symbol, state, begin, at = item
        place, lattice = at >> BITS, self.lattice
        label = self.places[place] if place < len(self.places) else None
        if state in (TAIL, BEHIND):
            if place == 0 or self.places[place - 1] != GAP:  # after a gap is the same as inside it
                self._push((symbol, 0, begin, at | (APART if state == BEHIND else WHOLE)), cost, (item,), None)
        elif lattice.ends[state]:
            self._push((symbol, BEHIND if lattice.word[state] else TAIL, begin, at), cost, (item,), None)
        if label is None:
            return
        if label >= 0:
            to = lattice.rows[state].get(label)
            if to:
                self._push((symbol, to, begin, at + (1 << BITS)), cost, (item,), None)
            return
        to, less = at, 0
        if label == GAP:
            self._push((symbol, state, begin, at + (1 << BITS)), cost, (item,), None)
        else:
            # All texts have a token there. Only bytes beyond one count, so the search continues to the end of the gap.
            to, less = at + (1 << BITS), int(place < self.tail)
        moves = lattice.moves(state)
        for behind, token, size in moves.whole:
            self._push((symbol, behind, begin, to), cost + size - less, (item,), (place, token))
        for kind, token, size in moves.parts:
            self._push((symbol, 0, begin, to | kind), cost + size - less, (item,), (place, token))

    def _derived(self, item: Item, cost: int, base: int) -> None:
        symbol, _, begin, end = item
        self.after[begin, symbol][end] = cost
        if symbol == self.origin:
            self.first[end] = cost
            self._ask(end, self.grammar.start, base)
            for far, more in self.after.get((end, self.grammar.start), {}).items():
                self._whole((self.grammar.start, 0, end, far), more)
            return
        if symbol == self.grammar.start and begin in self.first:
            self._whole(item, cost)
        for head in self.heads[symbol]:
            if (begin, head) in self.asked:
                self._push((head, 0, begin, end), cost, (item,), None)
        for head, right in self.lefts[symbol]:
            if (begin, head) in self.asked:
                self.waiting[end, right][head, begin, symbol] = None
                self._ask(end, right, base)
                for far, more in self.after.get((end, right), {}).items():
                    self._push((head, 0, begin, far), cost + more, (item, (right, 0, end, far)), None)
        for head, start, left in self.waiting.get((begin, symbol), ()):
            other = (left, 0, start, begin)
            self._push((head, 0, start, end), self.cost[other] + cost, (other, item), None)

    def _whole(self, item: Item, cost: int) -> None:
        """Push a full text, if it may end there."""
        begin, end = item[2:]
        if self.stops[end >> BITS] and end & LEFT in (WHOLE, APART):
            first = (self.origin, 0, 0, begin)
            self._push((self.goal, 0, 0, end), self.first[begin] + cost, (first, item), None)

    def _said(self, item: Item) -> list[Said]:
        found, todo = [], [item]
        while todo:
            parts, said = self.how[todo.pop()]
            if said is not None:
                found.append(said)
            todo += parts
        return found[::-1]
