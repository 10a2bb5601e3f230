"""Recognise a full text of a language, byte by byte.

It shares only the terminals' automata and the normal form with the search for verdicts, so that tests can compare them.
"""

from __future__ import annotations

import re
from collections import defaultdict

from dllm_sampler.guides.grammar import Language
from dllm_sampler.guides.grammar.rules import members


def recognised(language: Language, text: bytes) -> bool:
    """Return True if the language's grammar derives a text.

    For each offset, from the last one down, it collects the ends of each variable's texts from there on, one bit for
    each end. Time grows with the square of the text's length, or with its third power for very ambiguous grammars.
    """
    terminals, grammar = language.terminals, language.grammar
    if terminals.marks is not None:
        opens, closes = (bytes([mark]) for mark in terminals.marks)
        if opens in text or closes in text:
            return False
        text = re.sub(rb"[\w\x80-\xff]+", lambda word: opens + word[0] + closes, text)
    labels = text.translate(terminals.table)
    units, lefts, rights = defaultdict(list), defaultdict(list), defaultdict(list)
    leaves: dict[int, list[int]] = defaultdict(list)
    for head, terminal in grammar.leaves:
        leaves[terminal].append(head)
    for head, body in grammar.units:
        units[body].append(head)
    for head, left, right in grammar.pairs:
        lefts[left].append((head, right))
        rights[right].append((head, left))
    size = len(labels)
    skipped = [1 << size]  # by offset, from the last one down: the offsets after bytes that may be skipped there
    reached: list[dict[int, int]] = [{} for _ in range(size + 1)]  # by offset and variable: the ends
    for at in range(size, -1, -1):
        if at < size:
            more = skipped[-1] if labels[at] in terminals.skip else 0
            skipped.append(1 << at | more)
        here = reached[at]
        fresh: list[tuple[int, int]] = [(head, 1 << at) for head in grammar.empties]
        for terminal, heads in leaves.items():
            ends, state = 0, 0
            for to in range(at, size):
                state = terminals.dfas[terminal].moves[state].get(labels[to], -1)
                if state < 0:
                    break
                if state in terminals.dfas[terminal].finals:
                    ends |= skipped[size - to - 1]
            if ends:
                fresh += [(head, ends) for head in heads]
        while fresh:
            variable, ends = fresh.pop()
            ends &= ~here.get(variable, 0)
            if not ends:
                continue
            here[variable] = here.get(variable, 0) | ends
            fresh += [(head, ends) for head in units[variable]]
            for head, right in lefts[variable]:
                far = 0
                for end in members(ends):
                    far |= reached[end].get(right, 0)
                fresh.append((head, far))
            for head, left in rights[variable]:
                if here.get(left, 0) >> at & 1:
                    fresh.append((head, ends))
    return any(reached[at].get(grammar.start, 0) >> size & 1 for at in members(skipped[-1]))
