"""Verdicts, completions and the recogniser, against every text of small languages and against each other."""

import json
import random
import re
from pathlib import Path

import pytest

from dllm_sampler.guides.grammar import END, Language, Word, emptiness, language
from dllm_sampler.guides.grammar.partial import Partial
from dllm_sampler.guides.grammar.rules import members
from tests import grammars
from tests.grammars import TERMINALS, Small, fits, partial, sampled
from tests.recogniser import recognised
from tests.sampling import each, few

TRACES = Path(__file__).parents[1] / "conformance" / "data" / "traces"
NAMES = ["json", "schema", "arithmetic", "brackets", "cpp"]
MARKS = (b"<", b">")
MARKED = {"one": "<a>", "word": "<[ab]+>", "other": "<a>\\+<b>", "quoted": "\\+[^+]*\\+", "sign": "\\+"}


def published(name: str) -> Language:
    about = json.loads((TRACES / "languages.json").read_text())[name]
    skip = b" \t\n\r" if about["strip_chars"] is None else about["strip_chars"].encode()
    prelex = about["prelex"] and (about["prelex"][0].encode(), about["prelex"][1].encode())
    return grammars.language(about["grammar"], about["lex"], skip, prelex)


def check(small: Small, rng: random.Random, signs: str, most: int, count: int) -> tuple[int, int]:
    """Compare with all texts up to a size; returns how many partial outputs fit one, and how many do not."""
    found, texts = small.language(), small.texts(signs, most)
    yes = no = 0
    for _ in range(count):
        words = partial(rng, signs, 5)
        best = next((text for text in texts if fits(words, text)), None)
        full = found.complete(words)
        assert found.feasible(words) == (full is not None), (small, words)
        if full is None:
            assert best is None, (small, words)
            no += 1
        else:
            assert fits(words, full), (small, words, full)
            assert small.has(full), (small, words, full)
            assert len(full) <= most or best is None, (small, words, full)
            assert best is None or len(full) == len(best), (small, words, full)
            yes += 1
    for _ in range(count):
        text = "".join(rng.choice(signs) for _ in range(rng.randint(0, most))).encode()
        assert recognised(found, text) == small.has(text) == found.accepts(text), (small, text)
    return yes, no


@few("skip", [b"", b" ", b"b"])
def test_random_grammars(skip: bytes) -> None:
    """Splits of every length count, empty lexemes too, and what is skipped may also begin a lexeme."""
    rng = random.Random(sum(skip))
    counts = [check(Small(sampled(rng), TERMINALS, skip), rng, "ab ", 4, 25) for _ in range(15)]
    assert min(map(sum, zip(*counts, strict=True))) > 20


@pytest.mark.slow
def test_random_grammars_with_marks_around_words() -> None:
    rng = random.Random(4)
    counts = []
    for _ in range(12):
        rules = sampled(rng, MARKED)
        rules = {head: [["one" if s == "b" else s for s in body] for body in rules[head]] for head in rules}
        counts.append(check(Small(rules, MARKED, b" ", MARKS), rng, "ab+ ", 4, 25))
    assert min(map(sum, zip(*counts, strict=True))) > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_many_random_grammars(seed: int) -> None:
    rng = random.Random(100 + seed)
    for _ in range(15):
        check(Small(sampled(rng), TERMINALS, rng.choice([b"", b" ", b"a"])), rng, "ab ", 5, 60)
        rules = sampled(rng, MARKED)
        rules = {head: [["one" if s == "b" else s for s in body] for body in rules[head]] for head in rules}
        check(Small(rules, MARKED, b" ", MARKS), rng, "ab+ ", 4, 60)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "arithmetic" else pytest.mark.slow) for name in NAMES]
)
def test_verdicts_of_real_languages(name: str) -> None:
    """Texts of the language with holes, some of them spoilt, against the search byte by byte."""
    rng, found = random.Random(name), published(name)
    signs = sorted({byte for text in found.terminals.names for byte in text.encode()} | {*b'" 1ax'})
    counts = {True: 0, False: 0}
    text = found.complete([None]) or b""
    for _ in range(40 if name == "cpp" else 80):
        at = rng.randrange(len(text) + 1)
        words: list[Word] = [text[:at], None, bytes([rng.choice(signs)]), None, text[at:]]
        if rng.random() < 0.4:
            words[rng.choice([1, 3])] = b""
        if rng.random() < 0.5:
            words.append(END)
        full = found.complete(words)
        assert found.feasible(words) == (full is not None), words
        counts[full is not None] += 1
        if full is not None:
            assert recognised(found, full)
            assert fits(words, full)
            assert found.accepts(full)
            text = full if len(full) < 40 else text[:0]
    assert min(counts.values()) > 5


@few("name", sorted(NAMES))
def test_recorded_verdicts(name: str) -> None:
    """Every decision that the authors' decoder made."""
    found, seen = published(name), 0
    for line in (TRACES / f"constrained-{name}.jsonl").read_text().splitlines():
        run = json.loads(line)
        ends, length, known = run["params"]["eos_ids"], run["params"]["gen_length"], run["params"]["mask_id"]
        ids = [known] * length
        count = run["params"]["constrained_prompt_tokens"]
        before = run["prompt_ids"][len(run["prompt_ids"]) - count :]

        texts = [END if token in ends else text.encode() for token, text in enumerate(run["texts"])]
        for _, position, token, committed in run["decisions"]:
            words = [None if one == known else texts[one] for one in before + ids]
            words[count + position] = texts[token]
            assert found.feasible(words) == committed, (run["id"], position, token)
            seen += 1
            if committed:
                ids = [*ids[:position], token, *(ids[position + 1 :] if token not in ends else [])]
                ids += [token] * (length - len(ids))
        assert ids == run["output_ids"]
    assert seen > 100


def test_what_is_remembered_changes_nothing() -> None:
    found, rng = published("json"), random.Random(3)
    many = [partial(rng, '{"a1,: ', 6) for _ in range(200)]
    first = [found.feasible(words) for words in many]
    assert first == [found.feasible(words) for words in many]
    for words, verdict in zip(many, first, strict=True):
        found.forget()
        assert found.feasible(words) == verdict


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "HELD", 3000)
    found = published("json")
    held = []
    for size in range(200):
        assert found.feasible([b'["' + b"x" * size, None])
        held.append(found._scanner.held)
    assert max(held) < 5000
    assert min(held[50:]) < 1500


def test_lexings_of_a_number() -> None:
    """`123` behind a gap: the end of a number, whole or not; a number or a string that goes on; nothing else.

    At the beginning of a text it begins there, and so is no part of a string. It is never two numbers, since no two
    stand side by side.
    """
    scanner = published("json")._scanner
    names = scanner.terminals.names
    number, string = names.index("lexNumber"), names.index("lexString")
    inside = scanner.lex(b"123", first=False)
    assert inside.enter == {3: 1 << number}
    assert {*members(scanner.owners[inside.leaving])} == {number, string}
    assert inside.inner == {}
    assert not inside.blank
    begun = scanner.lex(b"123", first=True)
    assert begun.starts == (0,)
    ((at, (ends, leaving)),) = begun.inner.items()
    assert (at, ends, {*members(scanner.owners[leaving])}) == (0, {3: 1 << number}, {number})
    # A sign that is a whole lexeme is no part of one that goes on.
    (ends, leaving) = scanner.lex(b"{", first=True).inner[0]
    assert ends == {1: 1 << names.index("{")}
    assert leaving == 0


@each(
    ("words", "feasible"),
    [
        ([b"[-", None, b"123", b",0]", END], True),  # the end of a number that began in the gap
        ([b"[0", b"123", b",0]", END], False),  # no number begins so
        ([b"[1", b"123", None, b"4]", END], True),  # a number cut at both ends
        ([b'["', None, b"123", None, b'"]', END], True),  # inside a string
        ([b'["', None, b"123]", END], True),  # the string ends in the gap
        ([b'["', b"123]", END], False),  # or does not
        ([None, b"123", b"]", END], True),
        ([b"123", b"]", None, END], False),  # nothing stands before it
        ([b"[1", None, b" ", None, b"2]", END], True),  # numbers do not go across blanks
        ([b'"', None, b" ", None, b'"', END], True),  # strings do
        ([b"tr", None, b"e", END], True),
        ([b"tr", None, b"x", None, b"e", END], False),
        ([b"{", END], False),
        ([b"{", None, END], True),
        ([b"{"], True),  # without an end token any text may follow
        ([b"{}", END, b"x", None], True),  # what stands behind the end does not count
        ([END], False),
        ([None, END], True),
        ([b"", None, b""], True),
        ([b"  "], True),
        ([b"  ", END], False),
        ([], False),
    ],
)
def test_pieces_and_gaps(words: list[Word], feasible: bool) -> None:
    found = published("json")
    assert found.feasible(words) == feasible
    assert (found.complete(words) is not None) == feasible


@each(
    ("words", "expected"),
    [
        ([b"a", b"b", None, None, b"c"], Partial((b"ab", b"c"), False, False)),
        ([None, b"a", END, b"b"], Partial((b"a",), True, True)),
        ([b"", None, b"a", None, END], Partial((b"a",), True, False)),
        ([b"a", b"", END], Partial((b"a",), False, True)),
        ([None, b"", None], Partial((), True, False)),
        ([END], Partial((), False, True)),
        ([b""], Partial((), False, False)),
    ],
)
def test_words_to_pieces(words: list[Word], expected: Partial) -> None:
    assert Partial.of(words) == expected


def test_terminals_that_contain_others() -> None:
    """A key is a string, too; where both may stand each is tried."""
    found = published("schema")
    assert found.feasible([b'{"name": "name", "age', None])
    assert found.feasible([b'{"name": "red", "age": 1, "tags": ["red", "age"]}', END])
    assert not found.feasible([b'{"age', None])
    assert not found.feasible([b'{"name": "x", "name', None])
    equal = grammars.language("S -> x y", {"x": "a+", "y": "aa*"})
    assert equal.feasible([b"aa", END])
    assert not equal.feasible([b"a", END])


def test_characters_that_tokens_cut() -> None:
    found, whole = Language.parse('text = "[^"a]*"\nS -> text', "test"), "é日".encode()
    for at in range(len(whole) + 1):
        for words in ([b'"', whole[:at], None, whole[at:], b'"', END], [b'"', whole[:at], whole[at:], b'"', END]):
            assert found.feasible(words)
            assert found.complete(words) is not None
    assert found.feasible([b'"', whole[:1], None, b'"', END])
    assert not found.feasible([b'"', whole[:1], b'"', END])
    assert not found.feasible([None, b"\xff", None])
    assert (found.complete([b'"', whole[:1], None]) or b"").decode()


def test_words_are_not_cut() -> None:
    """With marks, a word that a gap goes on is one word; a keyword begins no identifier."""
    found = published("cpp")
    assert not found.accepts(b"intf(){}")
    assert not recognised(found, b"intf(){}")
    assert not found.feasible([b"intf", b"(", None])
    assert found.feasible([b"int", None, b"f", b"(", None])
    assert found.feasible([b"re", None, b"turn", b" x", b"(", None])
    assert not found.feasible([b"int", b"f(){}", END])
    assert found.feasible([b"int", b" f(){}", END])
    assert not found.feasible([b"int \x02f\x03", None])  # the marks are not part of any text
    assert not found.feasible([None, b"\x02", None])
    assert not found.accepts(b"\x02int\x03 f(){}")
    assert not found.accepts(b"int 1f(){}")
    loose = Language.parse("%prelex < >\nname = <[a-z]+>\nS -> name name", "test")
    assert loose.complete([b"ab", None, END]) == b"ab a"
    quoted = Language.parse('%prelex < >\nS -> "if-then" ( | "if"', "test")
    assert quoted.accepts(b"if-then(")
    assert quoted.feasible([b"i", None, b"n", b"(", END])
    assert not quoted.feasible([b"if", None, b"if", END])
    assert not loose.feasible([b"ab", END])


def test_empty_bodies_in_any_order() -> None:
    found = Language.parse('S -> D ; | B C\nB -> $ | "b"\nC -> D "x"\nD -> $ | "d"\n%skip nothing', "test")
    for text in (b"x", b"bx", b"dx", b"bdx", b";", b"d;"):
        assert found.accepts(text), text
        assert recognised(found, text), text
        assert found.complete([text[:-1], None, END]) is not None
    assert not found.accepts(b"b;")


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that takes too long says no."""
    monkeypatch.setattr(language, "STEPS", 20)
    found = published("json")
    words = [b"[1,[2,3],[", None, b'"a', None, b"4"]
    assert found.feasible(words)
    assert found.complete(words) is None
    search = emptiness.Emptiness(found.grammar, 5)
    monkeypatch.setattr(found, "_search", search)
    assert not found.feasible(words)
    assert found.feasible([None])


@each(
    ("name", "texts", "others"),
    [
        (
            "json",
            ['{"a": [1, -2.5e3, "x\\n\\u00e9"], "é": {"c": null}}', " true ", "[]"],
            ["[1,]", "01", "'a'", '"\\x"', "[", '{"a"}'],
        ),
        ("arithmetic", ["1+2*(x - f(y,3))/-4", "f()", "1.5 * --x"], ["1+", "(", "1 2", "f(,)", "*1", "xY"]),
        (
            "smiles",
            ["CC(=O)Oc1ccccc1C(=O)O", "[Na+].[Cl-]", "F/C=C/F", "C(C)(C)C", "N[C@@H](C)C(=O)O", "C%12CC%12"],
            ["C(", "(C)", "C((C))", "C==C", "C C", "[Na", "C.", "Q"],
        ),
    ],
)
def test_shipped_grammars(name: str, texts: list[str], others: list[str]) -> None:
    found = Language.load(name)
    for text in texts:
        assert found.accepts(text.encode()), text
        assert recognised(found, text.encode()), text
        if name == "json":
            json.loads(text)
    for text in others:
        assert not found.accepts(text.encode()), text
        assert not recognised(found, text.encode()), text
    full = found.complete([texts[0][: len(texts[0]) // 2].encode(), None, END])
    assert full is not None
    assert found.accepts(full)


def test_json_is_what_python_reads() -> None:
    """Near misses: documents with a sign taken out, put in or doubled."""
    found, rng = Language.load("json"), random.Random(5)
    document = json.dumps({"a": [1, -2.5, {"b\n": "é\\"}], "c": [True, None, []], "d": 1e5}, ensure_ascii=False)
    seen = {True: 0, False: 0}
    for _ in range(150):
        at = rng.randrange(len(document))
        spoilt = document[:at] + rng.choice(["", document[at] * 2, rng.choice('{}[],:"0 e-')]) + document[at + 1 :]
        try:
            json.loads(spoilt)
            valid = True
        except ValueError:
            valid = False
        assert found.accepts(spoilt.encode()) == valid, spoilt
        assert recognised(found, spoilt.encode()) == valid, spoilt
        seen[valid] += 1
    assert min(seen.values()) > 20
    assert re.fullmatch(rb"\{.*\}", found.complete([b"{", None, b"}", END]) or b"")
