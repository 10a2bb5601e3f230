"""Partial texts: from tokens and masks to pieces and gaps, and from these to a graph over terminals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from dllm_sampler.guides.grammar.emptiness import Graph
from dllm_sampler.guides.grammar.lexing import DEAD, Scanner
from dllm_sampler.guides.grammar.terminals import marked


class End(Enum):
    """The type of `END`."""

    END = "end"


END = End.END  # an end-of-text token
Word = bytes | None | End  # of a position: the bytes of its token, None for a mask, or `END`


@dataclass(frozen=True)
class Partial:
    """Known pieces of a text, with any text between two of them.

    Attributes:
        pieces: the pieces. None of them is empty.
        open: any text may come before the first piece.
        closed: the text ends after the last piece. Otherwise any text may follow.
    """

    pieces: tuple[bytes, ...]
    open: bool
    closed: bool

    @staticmethod
    def of(words: Sequence[Word]) -> Partial:
        """Return the text before the first end-of-text token. A run of masks is one gap, whatever its length.

        Without an end-of-text token any text may follow.
        """
        pieces: list[bytes] = []
        part: list[bytes] = []
        gap = first = False
        closed = False
        for word in words:
            if isinstance(word, End):
                closed = True
                break
            if word is None:
                if part:
                    pieces.append(b"".join(part))
                    part = []
                first = first or not pieces
                gap = True
            elif word:
                part.append(word)
                gap = False
        if part:
            pieces.append(b"".join(part))
        return Partial(tuple(pieces), first, closed and not gap)


def graph(partial: Partial, scanner: Scanner) -> Graph | None:
    """Build the graph of a partial text. Return None if some piece fits nowhere."""
    gaps: list[bool] = []
    edges: list[dict[int, int]] = []

    def node(gap: bool) -> int:
        gaps.append(gap)
        edges.append({})
        return len(gaps) - 1

    marks, last = scanner.terminals.marks, len(partial.pieces) - 1
    behind = node(True) if partial.open or not (partial.pieces or partial.closed) else None
    starts = [] if behind is None else [behind]
    if not partial.pieces:
        here = node(False) if behind is None else behind
        return Graph(gaps, edges, [here], here)
    carried: list[tuple[int, int]] = []  # lexemes that no piece has ended yet: first node, and states
    for number, text in enumerate(partial.pieces):
        closing, first = partial.closed and number == last, behind is None
        if marks is not None:
            if marks[0] in text or marks[1] in text:
                return None
            text = marked(text, marks, begins=first, ends=closing)
        lexing = scanner.lex(text, first)
        if lexing.blank:
            # The gap before the piece could contain every lexeme that contains the piece, so both gaps are one node.
            crossed = [(at, scanner.cross(lexing, states)[1]) for at, states in carried]
            carried = [(at, scanner.widen(states)) for at, states in crossed if states != DEAD]
            continue
        nodes = {at: node(False) for at in lexing.inner}
        nodes[len(lexing.text)] = there = node(not closing)
        if behind is None:
            starts = [nodes[at] for at in lexing.starts if at in nodes]
        found = [(at, *scanner.cross(lexing, states)) for at, states in carried]
        if behind is not None:
            found.append((behind, lexing.enter, lexing.leaving))
        found += [(nodes[at], *ends) for at, ends in lexing.inner.items()]
        carried = []
        for at, ends, leaving in found:
            row = edges[at]
            for offset, which in ends.items():
                if offset in nodes:
                    row[nodes[offset]] = row.get(nodes[offset], 0) | which
            if leaving != DEAD and not closing:
                row[there] = row.get(there, 0) | scanner.owners[leaving]
                carried.append((at, scanner.widen(leaving)))
        behind = there
    assert behind is not None
    return Graph(gaps, edges, starts, behind)
