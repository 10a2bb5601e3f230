"""Completions in exactly the masks that are left."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dllm_sampler.guides.grammar import END, Language
from dllm_sampler.guides.grammar.filling import filled
from tests import toys

TEXTS = [*'[]{}:," 0123456789-ab', "ab", "true", "null", '": ', '{"', "[1", ", "]
IDS = {text.encode(): token for token, text in enumerate(TEXTS)}
EOS = len(TEXTS)
DOCUMENTS = ['{"a": 12, "b": [true, null, {"ab": [1]}]}', "[1, 2, [], {}]", '"ab"', "-12"]


@pytest.fixture(scope="module")
def language() -> Language:
    return Language.load("json")


def text(words: list[Any], tokens: list[int]) -> bytes:
    """What the words say once the masks are filled."""
    rest, found = iter(tokens), b""
    for word in words:
        said = word
        if word is None:
            token = next(rest)
            said = END if token == EOS else TEXTS[token].encode()
        if not isinstance(said, bytes):
            break
        found += said
    return found


def test_documents_with_holes(language: Language) -> None:
    rng, found = random.Random(0), 0
    for _ in range(100):
        document, words = rng.choice(DOCUMENTS), list[Any]()
        while document:
            words.append(rng.choice([piece for piece in TEXTS if document.startswith(piece)]))
            document = document[len(words[-1]) :]
        words = [None if rng.random() < 0.4 else word.encode() for word in words] + [None] * rng.randint(0, 3)
        words += [END, None] * rng.randint(0, 1)
        tokens = filled(language, words, IDS, EOS)
        if tokens is not None:
            found += 1
            assert len(tokens) == words.count(None)
            assert language.accepts(text(words, tokens)), words
    assert found > 60


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([None, None], b"0"),  # shorter than there is room: an end token
        ([b"[", None, None, None, b"]"], b"[   ]"),  # padded where blanks may stand
        ([b'{"', None, None, None, None], b'{"":0}'),
        ([b"-", None, END, None], b"-0"),
        ([b'"', None, b'"'], b'" "'),  # inside a string a blank is text
        ([b"[", None, END], b"[]"),
        ([b"[", b"[", None, END], None),  # no token closes both
    ],
)
def test_how_many_masks_there_are_counts(language: Language, words: list[Any], wanted: bytes | None) -> None:
    tokens = filled(language, words, IDS, EOS)
    assert (None if tokens is None else text(words, tokens)) == wanted


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
    for row in range(len(prompts)):
        if ended.complete[row]:
            assert completed.tokens[row].tolist() == ended.tokens[row].tolist()
