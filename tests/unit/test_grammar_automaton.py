"""Finite automata of grammars, against every text of small languages and against the depth of sampled derivations."""

import itertools
import json
import random
from collections.abc import Iterator

import pytest

from dllm_sampler.errors import UserError
from dllm_sampler.guides.forms import automaton as forms
from dllm_sampler.guides.grammar import Language, bounded
from tests.grammars import TERMINALS, Rules, Small, sampled
from tests.refusals import refused
from tests.sampling import each, few


def accepts(automaton: forms.ByteAutomaton, text: bytes) -> bool:
    state, finals, moves = automaton
    for byte in text:
        if byte not in moves[state]:
            return False
        state = moves[state][byte]
    return state in finals


def texts(signs: str, most: int) -> Iterator[bytes]:
    for size in range(most + 1):
        yield from ("".join(one).encode() for one in itertools.product(signs, repeat=size))


def depth_of(document: object) -> int:
    inner = document.values() if isinstance(document, dict) else document if isinstance(document, list) else None
    return 0 if inner is None else max([0, *(1 + depth_of(one) for one in inner)]) or bool(inner)


def test_depth_of_json() -> None:
    """Each pair of brackets that holds something counts one, wherever it stands; lists may be of any length."""
    found, rng = Language.load("json"), random.Random(1)
    automata = [found.automaton(depth) for depth in range(4)]

    def document(depth: int) -> object:
        kind = rng.randrange(4 if depth else 2)
        if kind == 2:
            return [document(depth - 1) for _ in range(rng.randint(0, 3))]
        if kind == 3:
            return {f"k{at}": document(depth - 1) for at in range(rng.randint(0, 3))}
        return rng.choice([1, -2.5, "é\n", None, True, [], {}])

    seen = set()
    for _ in range(150):
        one = document(4)
        text = json.dumps(one, ensure_ascii=False, indent=rng.choice([None, 1])).encode()
        depth = depth_of(one)
        seen.add(depth)
        for bound, automaton in enumerate(automata):
            assert accepts(automaton, text) == (depth <= bound), (text, depth, bound)
        assert not accepts(automata[3], text + b",")
    assert seen == {0, 1, 2, 3, 4}
    assert accepts(automata[1], json.dumps([*range(300)]).encode())


def test_depth_of_brackets() -> None:
    found = Language.parse("S -> $ | ( S ) S | [ S ] S\n%skip nothing", "brackets")
    automata = [found.automaton(bound) for bound in range(4)]
    for text in texts("()[]", 6):
        level = deepest = 0
        for byte in text:
            level += 1 if byte in b"([" else -1
            deepest = max(deepest, level)
        valid = found.accepts(text)
        for bound, automaton in enumerate(automata):
            assert accepts(automaton, text) == (valid and deepest <= bound), (text, bound)


def test_lists_of_any_style_are_regular() -> None:
    """To the left, to the right, on both sides; groups one after the other; empty bodies."""
    for text, sample in [
        ('S -> S , "a" | "a"', b"a,a,a"),
        ('S -> "a" , S | "a"', b"a,a,a"),
        ('S -> S , S | "a"', b"a,a,a"),
        ('S -> S S | "a" | $', b"aaa"),
        ('S -> Left Right\nLeft -> Left "a" | $\nRight -> "b" Right | $', b"aab"),
        ('S -> A ; S | A\nA -> A , "a" | $', b",a,a;,a"),
        ('S -> A\nA -> B | A "a"\nB -> A | "b"', b"baa"),
    ]:
        found = Language.parse(text + "\n%skip nothing", "lists")
        assert found.regular, text
        automaton = found.automaton()
        for one in texts("ab,;", 4):
            assert accepts(automaton, one) == found.accepts(one), (text, one)
        assert accepts(automaton, sample)


@each("text", ["S -> ( S ) | $", 'S -> A "b" | $\nA -> "a" S', 'S -> "a" S | S "b" | "c"', 'S -> "-" S | S , S | "a"'])
def test_what_is_not_shown_to_be_regular(text: str) -> None:
    found = Language.parse(text, "test")
    assert not found.regular
    with refused("form-not-regular"):
        found.automaton()


def small_enough(found: Language, depth: int) -> forms.ByteAutomaton | None:
    try:
        return found.automaton(depth)
    except UserError as error:
        if "no text at depth" in str(error) or "states" in str(error):
            return None
        raise


@pytest.mark.slow
@few("count", [4, 12])
def test_random_grammars(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regular ones exactly; of others only texts of the language, more of them the deeper, in the end all."""
    monkeypatch.setattr(bounded, "STATES", 300)
    rng = random.Random(7)
    regular = nested = complete = 0
    while regular < count or nested < count:
        small = Small(sampled(rng), TERMINALS, rng.choice([b"", b" "]))
        found = small.language()
        if (regular if found.regular else nested) >= count:
            continue
        every = [text for text in texts("ab ", 4) if small.has(text)]
        if found.regular:
            regular += 1
            assert [text for text in texts("ab ", 4) if accepts(found.automaton(), text)] == every, small
            continue
        nested += 1
        before: set[bytes] = set()
        for depth in (0, 1, 2, 4):
            automaton = small_enough(found, depth)
            if automaton is None:
                continue
            now = {text for text in texts("ab ", 4) if accepts(automaton, text)}
            assert before <= now <= {*every}, (small, depth)
            before = now
            if depth == 4:
                assert now == {*every}, small
                complete += 1
    assert complete > count // 3


def reaches(rules: Rules, banned: set[tuple[str, str]], one: str) -> set[str]:
    """The variables that one leads to, itself only if it does."""
    found: set[str] = set()
    todo = [one]
    while todo:
        head = todo.pop()
        more = {s for body in rules[head] for s in body if s in rules and (head, s) not in banned} - found
        found |= more
        todo += more
    return found


@pytest.mark.slow
def test_depth_of_derivations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled derivations are within the depth that the definition gives them."""
    monkeypatch.setattr(bounded, "STATES", 100)
    rng = random.Random(11)
    seen: dict[int, int] = {}
    grammars = 0
    while grammars < 25:
        names = ["S", "A", "B"]
        rules: Rules = {
            name: [["a"], *([rng.choice([*names, "a", "b"]) for _ in range(rng.randint(1, 3))] for _ in range(2))]
            for name in names
        }
        if any(len(body) > 1 and body[0] == body[-1] == head for head in rules for body in rules[head]):
            continue  # read as lists
        if reaches(rules, set(), "S") | {"S"} != {*names}:
            continue
        whole = {name: reaches(rules, set(), name) for name in names}
        both = {
            (head, one)
            for head, bodies in rules.items()
            for body in bodies
            for one in body[1:-1]
            if one in names and head in whole[one]
        }
        # A step may stand in one body with text on both sides and in another without.
        loose = {(h, s) for h, bs in rules.items() for b in bs for at, s in enumerate(b) if at in (0, len(b) - 1)}
        part = {name: reaches(rules, both - loose, name) for name in names}
        found = Small(rules, {}, b"").language()
        grammars += 1

        def derive(
            head: str, size: int, depth: int, kept: int, about: tuple[Rules, dict, dict] = (rules, whole, part)
        ) -> tuple[str, int]:
            """A random derivation: its text, and the highest count on its paths."""
            given, group, near = about
            body = rng.choice(given[head]) if size > 0 else given[head][0]
            text, most = "", depth
            for at, one in enumerate(body):
                if one not in given:
                    text += one
                    continue
                sides = (1 if at else 0) | (2 if at < len(body) - 1 else 0)
                inside = one in group[head] and head in group[one]
                if not inside:
                    below, seen = 0, 0
                elif sides == 3:
                    below, seen = depth + 1, 0
                elif not (one in near[head] and head in near[one]):
                    below, seen = depth, 0
                else:
                    both = sides | kept == 3
                    below, seen = depth + both, 0 if both else sides | kept
                part, deepest = derive(one, size - 1, below, seen)
                text, most = text + part, max(most, deepest)
            return text, most

        automata: dict[int, forms.ByteAutomaton | None] = {}
        for _ in range(20):
            text, depth = derive("S", 5, 0, 0)
            if depth > 2:
                continue
            if depth not in automata:
                automata[depth] = small_enough(found, depth)
            automaton = automata[depth]
            if automaton is None:
                continue
            assert accepts(automaton, text.encode()), (rules, text, depth)
            seen[depth] = seen.get(depth, 0) + 1
    assert {0, 1, 2} <= {*seen}


def test_marks_are_not_part_of_texts() -> None:
    found = Language.parse(
        """
        %prelex < >
        %skip space
        int = <int>
        name = <[a-z]+> without <int>
        text = '[^']*'
        S -> int name | name + S | text
        """,
        "test",
    )
    automaton = found.automaton()
    for text in (
        "int a",
        "inta",
        "a+inta + 'b c'",
        "a + int",
        "'a'",
        "int  int",
        "inta+int b",
        "a+",
        "<int> a",
        "a +a",
    ):
        assert accepts(automaton, text.encode()) == found.accepts(text.encode()), text
    assert accepts(automaton, b"a+ab +int b")
    for text in texts("aint+' ", 4):
        assert accepts(automaton, text) == found.accepts(text), text


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Language.load("json")
    with monkeypatch.context() as patch:
        patch.setattr(bounded, "STATES", 300)
        with refused("form-too-large: The grammar json, 300"):
            found.automaton(8)
    with refused("option-range: -1"):
        found.automaton(-1)
    with refused("form-impossible"):
        Language.parse('S -> ( S ) | ( "a" S ) | [ A ]\nA -> { S } | ( B )\nB -> < S > | ( "b" )', "test").automaton(0)
    monkeypatch.setattr(bounded, "SECONDS", -1)
    with refused("form-too-large: The grammar json, -1"):
        found.automaton(3)


def test_form_is_that_of_regular_expressions() -> None:
    """The same automaton as that of an expression, in the same form."""
    start, finals, moves = Language.parse('S -> "ab" S | c\nc = [0-9é]\n%skip nothing', "test").automaton()
    other = forms.byte_automaton("(ab)*[0-9é]")
    for text in ["1", "ab1", "abé", "abab", "a1", "ab12"]:
        assert accepts((start, finals, moves), text.encode()) == accepts(other, text.encode())
    assert all(state in moves for state in (start, *finals))
