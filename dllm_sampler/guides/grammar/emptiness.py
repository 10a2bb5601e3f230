"""Decide if a grammar derives a word of a partial text.

The partial text is a graph. Its edges carry terminals and lead from lower to higher nodes. A *gap* node also has an
edge of every terminal to itself. For each pair of nodes the set of variables that derive a word between them is one
integer. Sets of a pair come from those of shorter spans, by products that are remembered.
"""

from dataclasses import dataclass
from functools import cache

from dllm_sampler.guides.grammar.rules import Grammar, bits, gathered, members, union


@dataclass
class Graph:
    """The words over terminals that a partial text may be.

    Attributes:
        gaps: True for nodes that are gaps.
        edges: the set of terminals from each node to later nodes.
        starts: nodes at which a word may begin.
        final: the node at which it ends.
    """

    gaps: list[bool]
    edges: list[dict[int, int]]
    starts: list[int]
    final: int


class Emptiness:
    """A search for words of one grammar in graphs of partial texts.

    Args:
        grammar: in normal form.
        limit: most products of sets for one graph. A graph that needs more counts as one without a word.
    """

    def __init__(self, grammar: Grammar, limit: int):
        self.grammar, self.limit = grammar, limit
        count = len(grammar.names)
        self.upwards = {(near, far): self._upwards(near, far) for near in (False, True) for far in (False, True)}
        self.lefts = bits(left for _, left, _ in grammar.pairs)
        self.rights = bits(right for _, _, right in grammar.pairs)
        self.kept = self.lefts | self.rights | 1 << grammar.start
        self.by_left: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        for head, left, right in grammar.pairs:
            self.by_left[left].append((1 << right, 1 << head))
        self.of_terminal: dict[int, int] = {}
        for head, terminal in grammar.leaves:
            self.of_terminal[terminal] = self.of_terminal.get(terminal, 0) | 1 << head
        self.seed, self.close, self.product = cache(self._seeded), cache(self._closed), cache(self._multiplied)

    def __call__(self, graph: Graph) -> bool:
        """Return True if the grammar derives a word of the graph."""
        gaps, final, start = graph.gaps, graph.final, self.grammar.start
        begins = set(graph.starts)
        if final in begins and (gaps[final] or self.grammar.nullable >> start & 1):
            return True
        lefts, rights, left = self.lefts, self.rights, self.limit
        behind: list[dict[int, int]] = [
            {} for _ in gaps
        ]  # by node: right parts of bodies, and the nodes at which they end
        for node in range(final - 1, -1, -1):
            found: dict[int, int] = {}  # sets of variables, and the nodes up to which they derive a word
            for to, which in graph.edges[node].items():
                if to == final or behind[to]:
                    seed = self.seed(which)
                    found[seed] = found.get(seed, 0) | 1 << to
            waiting, here = union(found.values()), behind[node]
            while waiting:
                end = waiting & -waiting  # the nearest one: words that end further away may be made of it
                waiting ^= end
                to, mask = end.bit_length() - 1, 0
                for some, ends in found.items():
                    if ends & end:
                        mask |= some
                mask = self.close(mask, gaps[node], gaps[to])
                if to == final and node in begins and mask >> start & 1:
                    return True
                if mask & rights:
                    here[mask & rights] = here.get(mask & rights, 0) | end
                part = mask & lefts
                if part:
                    left -= len(behind[to]) + len(found)
                    if left < 0:
                        return False
                    for other, ends in behind[to].items():
                        made = self.product(part, other)
                        if made:
                            found[made] = found.get(made, 0) | ends
                            waiting |= ends
        return False

    def _upwards(self, near: bool, far: bool) -> list[int]:
        """Return for each variable the variables that derive its texts, with any text from a gap at either end."""
        grammar = self.grammar
        edges: list[list[int]] = [[] for _ in grammar.names]
        for head, body in grammar.units:
            edges[body].append(head)
        for head, left, right in grammar.pairs:
            if near or grammar.nullable >> left & 1:
                edges[right].append(head)
            if far or grammar.nullable >> right & 1:
                edges[left].append(head)
        return gathered(edges, [1 << number for number in range(len(edges))])

    def _seeded(self, which: int) -> int:
        """Return the variables with a rule for one of some terminals."""
        return union(self.of_terminal.get(terminal, 0) for terminal in members(which))

    def _closed(self, mask: int, near: bool, far: bool) -> int:
        """Return the variables that are in bodies of two, or the start, and derive texts of those in `mask`."""
        up = self.upwards[near, far]
        return union(up[number] for number in members(mask)) & self.kept

    def _multiplied(self, left: int, right: int) -> int:
        """Return the heads of bodies of two with a variable of each set."""
        return union(head for number in members(left) for one, head in self.by_left[number] if right & one)

    def size(self) -> int:
        """Return the number of remembered results."""
        return sum(one.cache_info().currsize for one in (self.product, self.seed, self.close))
