"""Context-free rules in a normal form.

Bodies of the normal form are empty, one terminal, one variable, or two variables. Sets of variables and of terminals
are integers, one bit each.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from typing import TypeVar

from dllm_sampler.errors import UserError

RULES = 10_000  # most rules of a normal form
Body = tuple[str | int, ...]  # names of variables, numbers of terminals
Symbol = TypeVar("Symbol", bound=Hashable)


@dataclass(frozen=True)
class Grammar:
    """Rules in normal form. Each variable derives some word and occurs in a derivation."""

    names: tuple[str, ...]  # of the variables. Variables that the normal form adds have "" or a name in <>
    start: int
    empties: frozenset[int]  # A -> nothing
    leaves: tuple[tuple[int, int], ...]  # A -> terminal
    units: tuple[tuple[int, int], ...]  # A -> B
    pairs: tuple[tuple[int, int, int], ...]  # A -> B C
    bodies: Mapping[str, Sequence[Body]]  # of the same variables, before long bodies were split

    @cached_property
    def number(self) -> dict[str, int]:
        """The number of each variable that has a name."""
        return {name: at for at, name in enumerate(self.names) if name}

    @cached_property
    def nullable(self) -> int:
        """The variables that derive the empty word."""
        rules = [*((head, ()) for head in self.empties), *((head, (body,)) for head, body in self.units)]
        return bits(derived([*rules, *((head, (left, right)) for head, left, right in self.pairs)]))

    @cached_property
    def first(self) -> list[int]:
        """The terminals that a word of each variable may begin with."""
        return self._ends(self.pairs)

    @cached_property
    def last(self) -> list[int]:
        """The terminals that a word of each variable may end with."""
        return self._ends([(head, right, left) for head, left, right in self.pairs])

    @cached_property
    def follow(self) -> dict[int, int]:
        """The terminals that may follow each terminal."""
        found: dict[int, int] = {}
        for _, left, right in self.pairs:
            for terminal in members(self.last[left]):
                found[terminal] = found.get(terminal, 0) | self.first[right]
        return found

    def _ends(self, pairs: Sequence[tuple[int, int, int]]) -> list[int]:
        edges: list[list[int]] = [[] for _ in self.names]
        for head, body in self.units:
            edges[head].append(body)
        for head, near, far in pairs:
            edges[head].append(near)
            if self.nullable >> near & 1:
                edges[head].append(far)
        own = [0] * len(self.names)
        for head, terminal in self.leaves:
            own[head] |= 1 << terminal
        return gathered(edges, own)


def bits(numbers: Iterable[int]) -> int:
    """Return a set of numbers as an integer with one bit each."""
    return union(1 << one for one in numbers)


def union(sets: Iterable[int]) -> int:
    """Return the union of sets that are integers, see `bits`."""
    return reduce(or_, sets, 0)


def members(mask: int) -> Iterator[int]:
    """Yield the numbers of a set that is an integer, in order."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def derived(rules: Iterable[tuple[Symbol, Collection[Symbol]]]) -> set[Symbol]:
    """Return the heads of rules whose body is empty or has only such heads."""
    users: dict[Symbol, list[tuple[Symbol, set[Symbol]]]] = defaultdict(list)
    ready, found = [], set[Symbol]()
    for head, body in rules:
        missing = set(body)
        for one in body:
            users[one].append((head, missing))
        ready += [] if missing else [head]
    while ready:
        head = ready.pop()
        if head in found:
            continue
        found.add(head)
        for user, missing in users[head]:
            missing.discard(head)
            ready += [] if missing else [user]
    return found


def components(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the strongly connected components of a graph (Tarjan). Each comes before those that lead to it."""
    index, low, found = [-1] * len(edges), [0] * len(edges), []
    on, stack, count = [False] * len(edges), [], 0
    for root in range(len(edges)):
        if index[root] >= 0:
            continue
        work = [(root, 0)]
        while work:
            node, at = work.pop()
            if at == 0:
                index[node] = low[node] = count
                count += 1
                stack.append(node)
                on[node] = True
            for to in edges[node][at:]:
                at += 1
                if index[to] < 0:
                    work += [(node, at), (to, 0)]
                    break
                if on[to]:
                    low[node] = min(low[node], low[to])
            else:
                if low[node] == index[node]:
                    group = [stack.pop()]
                    while group[-1] != node:
                        group.append(stack.pop())
                    for one in group:
                        on[one] = False
                    found.append(group)
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
    return found


def gathered(edges: Sequence[Sequence[int]], own: Sequence[int]) -> list[int]:
    """Return for each node the union of its `own` set and those of all nodes to which it leads."""
    found = [0] * len(edges)
    for group in components(edges):
        mask = union(own[node] | union(found[to] for to in edges[node]) for node in group)
        for node in group:
            found[node] = mask
    return found


def normal(rules: Mapping[str, Sequence[Body]], start: str, possible: int, nullable: int) -> Grammar:
    """Return the normal form of rules.

    A rule `A -> A x A` makes lists of A's other bodies. It becomes `A -> B | B x A`, where B has the other bodies.

    Args:
        rules: the bodies of each variable.
        start: the variable of whole texts.
        possible: the terminals with a text that is not empty.
        nullable: the terminals with the empty text.

    Raises:
        UserError: no word can be derived, or there are too many rules.
    """
    given = {head: [*bodies] for head, bodies in rules.items()}
    for terminal in members(nullable):
        name = f"<{terminal}>"
        given = {head: [tuple(name if s == terminal else s for s in b) for b in given[head]] for head in given}
        given[name] = [(), (terminal,)] if possible >> terminal & 1 else [()]
    given = _lists(_generating(given, possible))
    if start not in given:
        raise UserError("grammar-invalid", f"the rules of {start} derive no text. Add a body without variables.")
    order, seen = [start], {start}
    for head in order:
        reached = dict.fromkeys(s for body in given[head] for s in body if isinstance(s, str) and s not in seen)
        order += reached
        seen.update(reached)
    return _short({head: given[head] for head in order}, start)


def _generating(rules: dict[str, list[Body]], possible: int) -> dict[str, list[Body]]:
    """Return the rules from which words can be derived."""
    usable = {
        head: [body for body in bodies if all(isinstance(s, str) or possible >> s & 1 for s in body)]
        for head, bodies in rules.items()
    }
    variables = [(head, [s for s in body if isinstance(s, str)]) for head, bodies in usable.items() for body in bodies]
    found = derived(variables)
    return {
        head: [body for body in usable[head] if all(isinstance(s, int) or s in found for s in body)]
        for head in rules
        if head in found
    }


def _lists(rules: dict[str, list[Body]]) -> dict[str, list[Body]]:
    """Return the rules with `A -> A x A` as a list. Both are the least solution of A = X (x X)*, for all X and x."""
    found = {}
    for head, bodies in rules.items():
        joins = [body for body in bodies if len(body) > 1 and body[0] == body[-1] == head]
        if joins:
            item = f"<{head}>"
            found[item] = [body for body in bodies if body not in joins]
            bodies = [(item,), *((item, *body[1:]) for body in joins)]
        found[head] = bodies
    return found


def _short(rules: dict[str, list[Body]], start: str) -> Grammar:
    """Return the grammar with long bodies split from the right. Equal ends share a variable."""
    number = {head: at for at, head in enumerate(rules)}
    names = [*rules]
    ends: dict[Body, int] = {}
    empties: set[int] = set()
    leaves, units, pairs = {}, {}, {}

    def of(body: Body) -> int:
        """Return the variable of a part of a body."""
        if len(body) == 1 and isinstance(body[0], str):
            return number[body[0]]
        if body not in ends:
            ends[body] = len(names)
            names.append("")
            todo.append((ends[body], body))
        return ends[body]

    todo = [(number[head], body) for head, bodies in rules.items() for body in bodies]
    for head, body in todo:
        if not body:
            empties.add(head)
        elif len(body) == 1 and isinstance(body[0], int):
            leaves[head, body[0]] = None
        elif len(body) == 1:
            if of(body) != head:
                units[head, of(body)] = None
        else:
            pairs[head, of(body[:1]), of(body[1:])] = None
        if len(empties) + len(leaves) + len(units) + len(pairs) > RULES:
            said = f"there are more than {RULES} rules, once long bodies are split into pairs of symbols."
            raise UserError("form-too-large", f"{said} Shorten or remove rules.")
    return Grammar(tuple(names), number[start], frozenset(empties), (*leaves,), (*units,), (*pairs,), rules)
