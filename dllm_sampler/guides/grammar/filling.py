"""Tokens for the masks of a partial text: its shortest completion, in exactly the masks that are left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product

from dllm_sampler.guides.grammar.language import Language
from dllm_sampler.guides.grammar.partial import END, End, Word

PLACES = 100  # most ways in which a completion is laid over the pieces
LONGEST = 32  # bytes of a token that is looked up
Cuts = dict[int, list[int]]  # tokens of a text by their number


def filled(language: Language, words: Sequence[Word], ids: Mapping[bytes, int], end_id: int) -> list[int] | None:
    """Tokens for the masks among `words`, in their order, so that the whole is a text of the language.

    The shortest completion is cut into as many tokens as each gap has masks. Where a gap has more, it is padded with a
    byte that may stand between lexemes, the last gap with end tokens. Completions of other texts are not looked for.

    Args:
        words: of each position the bytes of its token, None for a mask, or `END`.
        ids: a token for each text that a token has.
        end_id: the end token.

    Returns:
        None where this finds none.
    """
    end = next((at for at, word in enumerate(words) if isinstance(word, End)), len(words))
    behind = sum(word is None for word in words[end:])
    gaps, pieces = _parts(words[:end])
    text = language.complete([*words[:end], END])
    if text is None:
        return None
    for between in islice(_laid(text, gaps, pieces), PLACES):
        found: list[list[int] | None] = []
        for at, (gap, part) in enumerate(zip(gaps, between, strict=True)):
            cuts = _cuts(part, ids, gap)
            if at == len(pieces) and cuts:
                most = max(cuts)
                found.append(cuts[most] + [end_id] * (gap - most))
            elif gap in cuts:
                found.append(cuts[gap])
            else:
                found.append(_padded(language, between, pieces, at, gap, ids))
        if None not in found:
            return [token for tokens in found for token in tokens or ()] + [end_id] * behind
    return None


def _parts(words: Sequence[Word]) -> tuple[list[int], list[bytes]]:
    """The masks before each piece of text and, last, behind them all; and the pieces."""
    gaps, pieces = [0], list[bytes]()
    for word in words:
        if word is None:
            gaps[-1] += 1
        elif isinstance(word, bytes):
            if gaps[-1] or not pieces:
                pieces.append(b"")
                gaps.append(0)
            pieces[-1] += word
    return gaps, pieces


def _laid(text: bytes, gaps: Sequence[int], pieces: Sequence[bytes]) -> Iterator[list[bytes]]:
    """The texts of the gaps, for each way in which the pieces stand in a text."""
    if not pieces:
        if gaps[0] or not text:
            yield [text]
        return
    at = text.find(pieces[0])
    while at >= 0 and (gaps[0] or at == 0):
        for rest in _laid(text[at + len(pieces[0]) :], gaps[1:], pieces[1:]):
            yield [text[:at], *rest]
        at = text.find(pieces[0], at + 1)


def _cuts(text: bytes, ids: Mapping[bytes, int], most: int) -> Cuts:
    """A text as tokens: one way for each number of them, up to `most`."""
    ways: list[Cuts] = [{0: []}, *({} for _ in text)]
    for end in range(1, len(text) + 1):
        for begin in range(max(0, end - LONGEST), end):
            token = ids.get(text[begin:end])
            if token is not None:
                for count, tokens in ways[begin].items():
                    if count < most:
                        ways[end].setdefault(count + 1, [*tokens, token])
    return ways[-1]


def _padded(
    language: Language, between: Sequence[bytes], pieces: Sequence[bytes], at: int, gap: int, ids: Mapping[bytes, int]
) -> list[int] | None:
    """Tokens of gap number `at` with one kind of padding at one place, so that the language still has the whole."""
    part = between[at]
    for sign in (bytes([byte]) for byte in language.skip):
        if sign not in ids:
            continue
        for place in range(len(part) + 1):
            left, right = _cuts(part[:place], ids, gap), _cuts(part[place:], ids, gap)
            for one, two in product(left, right):
                more = gap - one - two
                padded = part[:place] + sign * more + part[place:]
                if more > 0 and language.accepts(_whole([*between[:at], padded, *between[at + 1 :]], pieces)):
                    return left[one] + [ids[sign]] * more + right[two]
    return None


def _whole(between: Sequence[bytes], pieces: Sequence[bytes]) -> bytes:
    """The text of gaps and of the pieces behind each."""
    return b"".join(gap + piece for gap, piece in zip(between, [*pieces, b""], strict=True))
