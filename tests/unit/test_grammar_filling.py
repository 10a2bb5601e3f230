"""Completions in exactly the masks that are left, against every string of tokens."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Mapping
from typing import Any

import pytest

from dllm_sampler.guides import Grammar
from dllm_sampler.guides.grammar import END, Language, filling
from dllm_sampler.guides.grammar.filling import Filling
from tests import toys
from tests.grammars import TERMINALS, Small, sampled
from tests.sampling import each

TEXTS = [*'[]{}:," 0123456789-ab', "ab", "true", "null", '": ', '{"', "[1", ", "]
IDS = {text.encode(): token for token, text in enumerate(TEXTS)}
EOS = len(TEXTS)
DOCUMENTS = ['{"a": 12, "b": [true, null, {"ab": [1]}]}', "[1, 2, [], {}]", '"ab"', "-12"]

LISTS = 'Item -> [ ] | [ Items ] | "x"\nItems -> Item | Item , Items'
MARKED = '%prelex < >\n%skip space newline\nname = <[ab]+> without <ba>\nS -> name | name + S | "ba" S | ( S )'
SPLIT = 'text = "[^"a]*"|[^"a\\- ]+\nS -> text | text - S'
BARE = "%skip nothing\nword = a+b?|ba\nS -> word | word S 'c'"
SMALL: dict[str, tuple[str, list[bytes]]] = {  # a packaged grammar, or the text of one, and tokens
    "json": ("", [b"[", b"]", b'{"', b'":', b"1", b", ", b"}", b'"', b'a":[1', b"]}"]),
    "lists": (LISTS, [b"[", b"]", b"x", b",", b" ", b"[]", b",[", b"]]", b" ] "]),
    "arithmetic": ("", [b"1", b".", b"+", b"(", b")", b"f(", b"-x", b" * ", b"2.", b",1)"]),
    "marked": (MARKED, [b"a", b"b", b" ", b"ba", b"+", b"(b", b")", b"a+ b", b"\n", b"<"]),
    "split": (SPLIT, [b'"', *(bytes([one]) for one in "é".encode()), "日".encode()[1:], b"\xa9-", b"b", b'b"-"', b" "]),
    "bare": (BARE, [b"a", b"b", b"c", b"ab", b"bac", b"cc", b"abab"]),
}  # fmt: skip


@functools.cache  # each takes a while to compile
def language_of(name: str) -> Language:
    """Return the language of a grammar in `SMALL`."""
    text, _ = SMALL[name]
    return Language.parse(text, name) if text else Language.load(name)


def filler(language: Language, texts: Mapping[bytes, int] | list[bytes]) -> Filling:
    ids = texts if isinstance(texts, Mapping) else {text: token for token, text in enumerate(texts)}
    return Filling(language, ids, len(ids))


def text(words: list[Any], tokens: list[int] | tuple[int, ...], texts: list[bytes]) -> bytes:
    """What the words say once the masks are filled."""
    rest, found = iter(tokens), b""
    for word in words:
        said = word
        if word is None:
            token = next(rest)
            said = END if token == len(texts) else texts[token]
        if not isinstance(said, bytes):
            break
        found += said
    return found


def holes(rng: random.Random, texts: list[bytes], gaps: int, most: int) -> list[Any]:
    """Runs of masks, `most` in all, tokens between them, now and then an end token."""
    words: list[Any] = [rng.choice(texts) for _ in range(rng.randint(0, 2))]
    left = most
    for gap in range(gaps):
        count = rng.randint(1, left - gaps + gap + 1)
        left -= count
        words += [None] * count + [rng.choice(texts) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.3:
        words += [END, *rng.choices([None, texts[0]], k=rng.randint(0, 2))]
    elif rng.random() < 0.5:
        words += [None] * left
    return words


def every(words: list[Any], texts: list[bytes], early: bool = True) -> set[bytes]:
    """The texts of all ways to fill the masks, with end tokens too; `early`: also before tokens that stand."""
    masks = [at for at, word in enumerate(words) if word is None]
    end = next((at for at, word in enumerate(words) if word is END), len(words))
    last = max((at for at in range(end) if words[at] is not None), default=-1)
    choices = [range(len(texts) + (early or at > last)) for at in masks]
    return {text(words, tokens, texts) for tokens in itertools.product(*choices)}


def check(fill: Filling, texts: list[bytes], words: list[Any], short: bool = False) -> bool:
    """Compare with all ways to fill the masks, also by size if `short`; returns whether there is one."""
    tokens = fill(words)
    if tokens is None:
        assert not any(map(fill.language.accepts, every(words, texts))), words
        return False
    found = text(words, tokens, texts)
    assert len(tokens) == sum(word is None for word in words)
    assert fill.language.accepts(found), (words, tokens)
    if short:
        sizes = [len(one) for one in every(words, texts, early=False) if fill.language.accepts(one)]
        assert not sizes or len(found) == min(sizes), (words, tokens)
    return True


def compared(name: str, seed: int, count: int, most: int) -> list[bool]:
    language, texts = language_of(name), SMALL[name][1]
    rng, fill = random.Random(seed), filler(language, texts)
    return [check(fill, texts, holes(rng, texts, rng.randint(1, most), most), most == 2) for _ in range(count)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "lists" else pytest.mark.slow) for name in SMALL]
)
def test_tokens_are_found_if_there_are_any(name: str) -> None:
    found = compared(name, 1, 30, 2) + compared(name, 3, 4, 3)
    assert 6 < sum(found) < 30


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_tokens_are_found_if_there_are_any_at_length(name: str) -> None:
    assert 10 < sum(compared(name, 2, 120, 3)) < 110


def random_grammars(seed: int, grammars: int, count: int) -> None:
    rng = random.Random(seed)
    signs, found = "ab ", []
    for _ in range(grammars):
        small = Small(sampled(rng), TERMINALS, rng.choice([b"", b" ", b"b"]))
        texts = [*{"".join(rng.choices(signs, k=rng.randint(1, 4))).encode(): None for _ in range(5)}]
        fill = filler(small.language(), texts)
        found += [check(fill, texts, holes(rng, texts, rng.choice([1, 2]), 4), True) for _ in range(count)]
    assert 0.1 < sum(found) / len(found) < 0.9


@pytest.mark.slow
def test_random_grammars() -> None:
    random_grammars(0, 6, 6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_random_grammars(seed: int) -> None:
    random_grammars(seed, 20, 30)


@each("short", [0, filling.SHORT])
def test_documents_with_holes(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that were taken out fit, so some are found; also where the shortest text takes too long to find."""
    monkeypatch.setattr(filling, "SHORT", short)
    rng, fill = random.Random(0), filler(Language.load("json"), IDS)
    for _ in range(40):
        document, words = rng.choice(DOCUMENTS), list[Any]()
        while document:
            words.append(rng.choice([piece for piece in TEXTS if document.startswith(piece)]))
            document = document[len(words[-1]) :]
        words = [None if rng.random() < 0.4 else word.encode() for word in words] + [None] * rng.randint(0, 3)
        words += [END, None] * rng.randint(0, 1)
        tokens = fill(words)
        assert tokens is not None and len(tokens) == words.count(None)
        assert fill.language.accepts(text(words, tokens, [*IDS])), words
        rest = iter(tokens)
        filled = [next(rest) if word is None else word for word in words[: words.index(END) if END in words else None]]
        assert EOS not in filled or not any(isinstance(one, bytes) for one in filled[filled.index(EOS) :]), words


@each(
    ("words", "wanted"),
    [
        ([None, None], b"1"),  # shorter than there is room: an end token
        ([b"[", None, None, None, b"]"], b"[   ]"),  # padded where blanks may stand
        ([b'{"', None, None, None, None], b'{"":1}'),
        ([b"-", None, END, None], b"-1"),
        ([b'"', None, b'"'], b'"0"'),
        ([b"[", None, END], b"[]"),
        ([b"[", b"[", None, END], None),  # no token closes both
        ([b"[", None, b"", b"]"], b"[ ]"),
        ([b"1", None, b"[", b"["], b"1"),  # what stands behind an end token does not count
        ([b"[", None, None, b"[", END], b"[]"),
        ([b"[", None, None, b",", None, b"[", None, b"]"], b"[ 1, []]"),
        ([b"1"], b"1"),
        ([b"[", END, None], None),
    ],
)
def test_how_many_masks_there_are_counts(words: list[Any], wanted: bytes | None) -> None:
    tokens = filler(Language.load("json"), IDS)(words)
    assert (None if tokens is None else text(words, tokens, [*IDS])) == wanted


@each(
    ("rules", "texts", "words", "wanted"),
    [
        ("S -> [ ]", [b"[", b" ]"], [None, None], [0, 1]),  # a token that begins with what is skipped
        ("S -> [ ]", [b"[", b"] "], [None, None], [0, 1]),  # or ends with it
        ("S -> [ ]", [b"[", b"] "], [None, None, b" ", None], [0, 1, 2]),
        ("S -> x | x + x", [b"x+"], [None], None),  # the text does not end inside a token
        ("S -> x | x + x", [b"x+"], [None, b"x"], [0]),
        ("%prelex < >\nn = <[ab]+>\nS -> n n", [b"ab"], [None], None),  # one word
        ("%prelex < >\nn = <[ab]+>\nS -> n n", [b"ab", b"a "], [None, None], [1, 0]),
        ("%prelex < >\nn = <[ab]+>\nS -> + n n", [b"+ab"], [None], None),
        ("%prelex < >\nn = <[ab]+>\nS -> + n n", [b"+ab", b" b"], [None, None], [0, 1]),
    ],
)
def test_what_tokens_hold(rules: str, texts: list[bytes], words: list[Any], wanted: list[int] | None) -> None:
    rules = rules.replace(" x", " 'x'")
    assert filler(Language.parse(rules, "test"), texts)(words) == wanted


def test_long_tokens() -> None:
    """A token of 600 brackets is 600 lexemes."""
    texts = [b"[" * 600, b"]" * 599, b"]", b"x"]
    tokens = filler(language_of("lists"), texts)([None, None, None, None])
    assert tokens == [0, 1, 2, 4] or tokens == [3, 4, 4, 4]
    assert filler(language_of("lists"), texts)([b"[", None, b"x", None, b"]]", END]) == [0, 1]


def test_languages_with_no_more_than_the_empty_text() -> None:
    fill = filler(Language.parse("S -> $", "empty"), [b"a", b" "])
    assert fill([None, None]) == [2, 2] and fill([b" ", None, b" "]) == [1] and fill([b"a", None]) is None
    assert filler(language_of("lists"), [])([b"[", None, b"]"]) is None
    assert filler(language_of("lists"), [])([b"[]", None]) == [0]


def test_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that takes too long finds nothing."""
    fill = filler(Language.load("json"), IDS)
    words = [b"[", *[None] * 6, b"true", *[None] * 6, b"]", END]
    assert fill(words) is not None
    monkeypatch.setattr(filling, "SHORT", 20)
    assert fill(words) is not None
    monkeypatch.setattr(filling, "STEPS", 20)
    assert fill(words) is None


def test_rows_that_would_end_are_completed(tmp_path: Any) -> None:
    path = tmp_path / "lists.grammar"
    path.write_text(
        "word = [a-j]+|[0-9]+\nList -> [ ] | [ Items ]\nItems -> Item | Item , Items\nItem -> word | List\n"
    )
    given: dict[str, Any] = {"name": "grammar", "grammar": str(path), "tries": 2}
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [2, 2], [7], [11, 3], [20]]
    options: dict[str, Any] = {"scheduler": {"name": "fixed", "steps": 4}, "stop": "prefix", "blocks": "full"}
    ended = toys.sampler(guide=given, **options).generate(prompts, max_new_tokens=10)
    completed = toys.sampler(guide=given | {"complete": True}, **options).generate(prompts, max_new_tokens=10)
    assert int(completed.complete.sum()) > int(ended.complete.sum())
    assert completed.valid is not None and (completed.valid == completed.complete).all()
    bound = next(
        one for one in toys.sampler(guide=given | {"complete": True}).plugins.guides if isinstance(one, Grammar)
    )
    assert bound.filling is not None and not {toys.MASK, toys.EOS} & {*bound.filling.ids.values()}
    for row in range(len(prompts)):
        if ended.complete[row]:
            assert completed.tokens[row].tolist() == ended.tokens[row].tolist()
