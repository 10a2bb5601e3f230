"""The normal form and the emptiness search, against textbook algorithms; automata; the file format."""

import itertools
import random
import re
import time
from pathlib import Path

import pytest

from dllm_sampler.errors import UserError
from dllm_sampler.guides.grammar import Language, regular, rules, terminals
from dllm_sampler.guides.grammar.emptiness import Emptiness, Graph
from dllm_sampler.guides.grammar.rules import Body, Grammar, components, members, normal
from dllm_sampler.guides.grammar.terminals import marked
from tests.refusals import refused
from tests.sampling import each

LETTERS = 3  # terminals of random grammars


def random_rules(rng: random.Random) -> dict[str, list[Body]]:
    names = ["S", "A", "B", "C"][: rng.randint(1, 4)]
    return {
        name: [
            tuple(rng.choice([*names, *range(LETTERS)]) for _ in range(rng.randint(0, 4)))
            for _ in range(rng.randint(1, 3))
        ]
        for name in names
    }


def words_of(given: dict[str, list[Body]], most: int) -> dict[str, set[tuple[int, ...]]]:
    """All words of each variable with at most `most` terminals, by adding until nothing is added."""
    found: dict[str, set[tuple[int, ...]]] = {head: set() for head in given}
    while True:
        before = sum(map(len, found.values()))
        for head, bodies in given.items():
            for body in bodies:
                made: set[tuple[int, ...]] = {()}
                for one in body:
                    parts = {(one,)} if isinstance(one, int) else found[one]
                    made = {a + b for a, b in itertools.product(made, parts) if len(a) + len(b) <= most}
                found[head] |= made
        if sum(map(len, found.values())) == before:
            return found


def spelt(grammar: Grammar) -> dict[str, list[Body]]:
    """The normal form as rules."""
    found: dict[str, list[Body]] = {str(at): [] for at in range(len(grammar.names))}
    for head in grammar.empties:
        found[str(head)].append(())
    for head, terminal in grammar.leaves:
        found[str(head)].append((terminal,))
    for head, *body in (*grammar.units, *grammar.pairs):
        found[str(head)].append(tuple(map(str, body)))
    return found


def test_normal_form_has_the_same_words() -> None:
    rng, empty = random.Random(1), 0
    for _ in range(100):
        given, possible, nullable = random_rules(rng), rng.choice([7, 7, 6]), rng.choice([0, 0, 2])
        full = {
            head: [
                tuple(one for one, left in zip(body, mask, strict=True) if not left)
                for body in bodies
                for mask in itertools.product(*([0, 1] if one == 1 and nullable else [0] for one in body))
            ]
            for head, bodies in given.items()
        }
        expected = {word for word in words_of(full, 3)["S"] if possible & 1 or 0 not in word}
        try:
            grammar = normal(given, "S", possible, nullable)
        except UserError:
            assert not expected
            empty += 1
            continue
        derived = words_of(spelt(grammar), 3)
        assert derived[str(grammar.start)] == expected, given
        for number in range(len(grammar.names)):
            texts = derived[str(number)]
            assert bool(grammar.nullable >> number & 1) == (() in texts), given
            firsts, lasts = ({word[end] for word in texts if word} for end in (0, -1))
            assert firsts <= {*members(grammar.first[number])}
            assert lasts <= {*members(grammar.last[number])}
        for word in expected:
            for one, other in itertools.pairwise(word):
                assert grammar.follow[one] >> other & 1, given
    assert 0 < empty < 70


def derives(grammar: Grammar, graph: Graph) -> bool:
    """Facts (begin, variable, end) from facts, until there are no more: rules and edges one by one."""
    nodes = range(len(graph.gaps))
    edges = {(a, t, b) for a in nodes for b, which in graph.edges[a].items() for t in members(which)}
    edges |= {(a, t, a) for a in nodes if graph.gaps[a] for t in range(LETTERS)}
    facts = {(a, head, a) for a in nodes for head in grammar.empties}
    facts |= {(a, head, b) for head, terminal in grammar.leaves for a, t, b in edges if t == terminal}
    while True:
        more = {(a, head, b) for head, body in grammar.units for a, one, b in facts if one == body}
        more |= {
            (a, head, d)
            for head, left, right in grammar.pairs
            for a, one, b in facts
            if one == left
            for c, other, d in facts
            if other == right and b == c
        }
        if more <= facts:
            return any((begin, grammar.start, graph.final) in facts for begin in graph.starts)
        facts |= more


def paths(graph: Graph, most: int) -> set[tuple[int, ...]]:
    """The words with at most `most` terminals on the way to the final node."""
    found = set()
    todo: list[tuple[int, tuple[int, ...]]] = [(begin, ()) for begin in graph.starts]
    while todo:
        node, word = todo.pop()
        if node == graph.final:
            found.add(word)
        if len(word) < most:
            loops = {node: (1 << LETTERS) - 1} if graph.gaps[node] else {}
            for to, which in (*graph.edges[node].items(), *loops.items()):
                todo += [(to, (*word, terminal)) for terminal in members(which)]
    return found


def test_emptiness() -> None:
    """Against all words, and against facts one by one."""
    rng = random.Random(2)
    counts = {True: 0, False: 0}
    while sum(counts.values()) < 250:
        given = random_rules(rng)
        try:
            grammar = normal(given, "S", 7, 0)
        except UserError:
            continue
        search = Emptiness(grammar, 10**6)
        for _ in range(3):
            size = rng.randint(1, 5)
            edges = [{to: rng.randint(1, 7) for to in range(at + 1, size) if rng.random() < 0.5} for at in range(size)]
            gaps = [rng.random() < 0.25 for _ in range(size)]
            graph = Graph(gaps, edges, sorted({0, rng.randrange(size)}), size - 1)
            verdict = search(graph)
            assert verdict == derives(grammar, graph), (given, graph)
            if words_of(given, 3)["S"] & paths(graph, 3):
                assert verdict, (given, graph)
            counts[verdict] += 1
    assert min(counts.values()) > 50


def test_components() -> None:
    assert sorted(map(sorted, components([[1], [2], [0, 3], [], [4, 3]]))) == [[0, 1, 2], [3], [4]]
    chain = [[at + 1] for at in range(50_000)] + [[]]
    assert components(chain) == [[at] for at in range(50_000, -1, -1)]


def automaton(pattern: str) -> regular.Dfa:
    return terminals._one(pattern)


PATTERNS = ["a(ba)*", "[ab]*", "(a|b)*a(a|b)", "b?", "a{2,3}|b", "(ab|ba)+"]


@each("one", PATTERNS)
def test_operations_on_automata(one: str) -> None:
    texts = ["".join(text) for size in range(6) for text in itertools.product("ab", repeat=size)]
    for other in PATTERNS:
        left, right = automaton(one), automaton(other)
        cases = [
            (regular.filtered(left, right, False), lambda a, b: a and not b),
            (regular.filtered(left, right, True), lambda a, b: a and b),
            (regular.without_empty(left), None),
        ]
        for found, rule in cases:
            for text in texts:
                a, b = bool(re.fullmatch(one, text)), bool(re.fullmatch(other, text))
                assert found.accepts(text.encode()) == (rule(a, b) if rule else a and text != ""), (one, other, text)
            assert len(regular.minimal(found).moves) == len(found.moves)
    states = {tuple(bool(re.fullmatch(one, start + end)) for end in texts) for start in texts}
    dead = tuple(False for _ in texts)
    assert len(automaton(one).moves) == len(states - {dead})  # as many as there are different ways to go on


def test_marks() -> None:
    def text(piece: bytes, begins: bool, ends: bool) -> str:
        return marked(piece, (ord("<"), ord(">")), begins, ends).decode()

    assert text(b"int x=1;", True, True) == "<int> <x>=<1>;"
    assert text(b"int x", False, False) == "int> <x"
    assert text(b"int x", True, False) == "<int> <x"
    assert text(b"int x", False, True) == "int> <x>"
    assert text(b" x ", False, False) == " <x> "
    assert text("é_1".encode(), True, True) == "<é_1>"
    # The rest of a character that was cut may go on, too.
    assert marked(b"\xa9 ", (60, 62), False, True) == b"\xa9> "


@each(
    ("text", "message"),
    [
        ("", "grammar-invalid"),
        ("# only\n a = b", "grammar-invalid"),
        ("S => a", "grammar-invalid: line 1, =>"),
        ("s -> a", "grammar-invalid: line 1, 's'"),
        ("\n\nx = [\nS -> x", "grammar-invalid: line 3, '['"),
        ("x = a\nx = b\nS -> x", "grammar-invalid: line 2"),
        ("Value = a\nS -> x", "grammar-invalid: line 1, 'Value'"),
        ("x = \nS -> x", "grammar-invalid: line 1"),
        ("Foo-bar = a\nS -> Foo-bar", "grammar-invalid: line 1, 'Foo-bar' begins with a capital letter"),
        ('S -> "a"|"b"', "grammar-invalid: line 1, no blanks around |"),
        ('S -> ""', "grammar-invalid: line 1, empty text"),
        ('S -> "a b"', "grammar-invalid: line 1, Close its quotes"),
        ("x = a without b and\nS -> x", "grammar-invalid: line 1, is incomplete"),
        ("%skip space\n%skip tab\nS -> (", "grammar-invalid: line 2, given twice"),
        ("%skip nothing space\nS -> (", "grammar-invalid: line 1"),
        ('S -> "\ud800"', "text-invalid"),
        ("number = 1\nS -> numbr", "grammar-invalid: line 2, 'numbr', 'number'"),
        ("S -> Vaule\nValue -> $", "grammar-invalid: line 1, 'Vaule', 'Value'"),
        ("S -> ( |", "grammar-invalid: line 1"),
        ("S -> ( $ )", "grammar-invalid: line 1"),
        ("| a", "grammar-invalid: line 1"),
        ("S -> ( S )", "grammar-invalid"),
        ("x = a without a\nS -> x", "grammar-invalid"),
        ("%skip spaces\nS -> (", "grammar-invalid: line 1"),
        ("%skip\nS -> (", "grammar-invalid: line 1"),
        ("%words < >\nS -> (", "grammar-invalid: line 1, '%words'"),
        ("%prelex <\nS -> (", "grammar-invalid: line 1"),
        ("%prelex a b\nS -> (", "grammar-invalid"),
        ("%prelex é >\nS -> (", "grammar-invalid"),
        ("%prelex < >\n%skip nothing\nS -> (", "grammar-invalid"),
        ("%prelex < >\nx = a\nS -> x", "grammar-invalid: line 2"),
        ("\n".join(f"x{at} = a{{100}}\nS -> x{at}" for at in range(6)), "form-too-large: 500"),
        ("x = (a|b)*a(a|b){14}\nS -> x", "grammar-invalid: line 1, 32772"),
        ("S -> " + " ".join(['"a"'] * 101), "form-too-large: 100"),
        ("#" * 1_000_001, "form-too-large: 1000001, 1000000"),
    ],
)
def test_what_cannot_be_read(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "RULES", 100)
    monkeypatch.setattr(terminals, "STATES", 500)
    begun = time.monotonic()
    with refused(message) as caught:
        Language.parse(text, "g")
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begun < 20


def test_format() -> None:
    found = Language.parse(
        """
        # a comment
        key = [a-z]+ without if and else
        bar = \\|
        %skip _ tab
        S -> "if" key 'x|y' Tail
          | bar $x
          | { }
        Tail -> $ | ε | # Tail
        $x = end
        """,
        "test",
    )
    for text in ("if_axx|y", "ifelsex|y", "{}", "|end", "if\tax|y##"):
        assert found.accepts(text.encode()) == (text != "ifelsex|y"), text
    for text in ("if a x|y", "ififx|y", "elseax|y", ""):
        assert not found.accepts(text.encode()), text


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "pairs.grammar"
    path.write_text("Start -> ( Start ) | $\n", encoding="utf-8")
    assert Language.load(str(path)).accepts(b"(( ))")
    path.write_text("Start -> ( Strt )\n", encoding="utf-8")
    with refused("grammar-invalid: pairs.grammar, line 1, 'Strt'"):
        Language.load(str(path))
    with refused("file-unreadable: guide.grammar.grammar=jsn"):
        Language.load("jsn")
    for name in (str(tmp_path), "", "~nobody-of-that-name/x", "a\0b"):
        with refused("file-unreadable"):
            Language.load(name)
    path.write_bytes(b"\xff\xfe\x00")
    with refused("file-unreadable"):
        Language.load(str(path))
