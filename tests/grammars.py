"""Small grammars, and what their languages are by trying everything. None of the package's own searches is used."""

import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dllm_sampler.guides.grammar import END, Language, Word

Rules = Mapping[str, Sequence[Sequence[str]]]
SKIP = b" \t\n\r"


def language(
    rules: str, terminals: Mapping[str, str], skip: bytes = SKIP, prelex: tuple[bytes, bytes] | None = None
) -> Language:
    """The language of lines of rules and of expressions, by a text in the format of files."""
    words = {b" ": "space", b"\t": "tab", b"\n": "newline", b"\r": "return"}
    signs = [bytes([byte]) for byte in skip]
    lines = [f"%skip {' '.join(words.get(sign) or sign.decode() for sign in signs) or 'nothing'}"]
    lines += ["%prelex " + " ".join(rf"\x{mark.hex()}" for mark in prelex)] if prelex else []
    lines += [f"{name} = {expression}" for name, expression in terminals.items()]
    return Language.parse("\n".join([*lines, rules]), "grammar")


@dataclass(frozen=True)
class Small:
    """A grammar as mappings; a symbol that is neither a rule nor a terminal stands for itself."""

    rules: Rules
    terminals: Mapping[str, str]  # Python's syntax, over ASCII
    skip: bytes = b" "
    prelex: tuple[bytes, bytes] | None = None

    def language(self) -> Language:
        known = {*self.rules, *self.terminals}
        shown = {
            head: [" ".join(s if s in known else f'"{s}"' for s in body) or "$" for body in bodies]
            for head, bodies in self.rules.items()
        }
        lines = [f"{head} -> {' | '.join(bodies)}" for head, bodies in shown.items()]
        return language("\n".join(lines), self.terminals, self.skip, self.prelex)

    def has(self, text: bytes) -> bool:
        """Spans that each variable derives, until no more are found."""
        if self.prelex is not None:
            opens, closes = self.prelex
            text = re.sub(rb"\w+", lambda word: opens + word[0] + closes, text)
        size = len(text)

        def skipped(at: int) -> Iterator[int]:
            yield at
            while at < size and text[at] in self.skip:
                at += 1
                yield at

        spans: dict[str, set[tuple[int, int]]] = {head: set() for head in self.rules}
        symbols = {s for bodies in self.rules.values() for body in bodies for s in body} - {*self.rules}
        for symbol in symbols:
            expression = self.terminals.get(symbol, re.escape(symbol))
            spans[symbol] = {
                (begin, to)
                for begin in range(size + 1)
                for end in range(begin, size + 1)
                if lexeme(expression, text[begin:end], self.prelex)
                for to in (skipped(end) if end > begin else [end])
            }
        while True:
            before = sum(map(len, spans.values()))
            for head, bodies in self.rules.items():
                for body in bodies:
                    reached = {(at, at) for at in range(size + 1)}
                    for symbol in body:
                        reached = {(a, d) for a, b in reached for c, d in spans[symbol] if b == c}
                    spans[head] |= reached
            if sum(map(len, spans.values())) == before:
                break
        start = next(iter(self.rules))
        return any((at, size) in spans[start] for at in skipped(0))

    def texts(self, signs: str, most: int) -> list[bytes]:
        """All texts of at most `most` signs, the shortest first."""
        every = ("".join(one).encode() for size in range(most + 1) for one in itertools.product(signs, repeat=size))
        return [text for text in every if self.has(text)]


@lru_cache(maxsize=100_000)
def lexeme(expression: str, text: bytes, prelex: tuple[bytes, bytes] | None) -> bool:
    """Whether a terminal has a text; with marks, only if it is made of whole words."""
    if prelex is not None:
        opens, closes = map(re.escape, prelex)
        if not re.fullmatch(rb"([^\w%b%b]|%b\w+%b(?!%b))*" % (opens, closes, opens, closes, opens), text):
            return False
    return re.fullmatch(expression.encode(), text) is not None


def fits(words: Sequence[Word], text: bytes) -> bool:
    """Whether a text is a completion of a partial output."""
    parts = []
    for word in words:
        if word is END:
            break
        parts.append(b"(?s:.*)" if word is None else re.escape(word))  # type: ignore[type-var]
    else:
        parts.append(b"(?s:.*)")
    return re.fullmatch(b"".join(parts), text) is not None


TERMINALS = {"one": "a", "two": "ab", "some": "a+", "any": "[ab]*", "odd": "a(ba)*", "may": "b?a", "gap": "b b"}


def sampled(rng: random.Random, terminals: Mapping[str, str] = TERMINALS) -> Rules:
    """Random rules, from which some text can be derived."""
    names = ["S", "A", "B"][: rng.randint(1, 3)]
    symbols = [*names, *rng.sample([*terminals], min(2, len(terminals))), "b"]
    rules = {}
    for name in names:
        rules[name] = [[rng.choice(symbols) for _ in range(rng.randint(0, 3))] for _ in range(rng.randint(1, 3))]
        rules[name].append([rng.choice(symbols[len(names) :])])
    return rules


def partial(rng: random.Random, signs: str, most: int) -> list[Word]:
    """A random partial output."""
    words: list[Word] = []
    for _ in range(rng.randint(1, most)):
        size = rng.randint(0, 2)
        words.append(None if rng.random() < 0.4 else "".join(rng.choice(signs) for _ in range(size)).encode())
    return [*words, END] if rng.random() < 0.6 else words
