"""Answers as text: decoded tokens, cut at stop strings."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from dllm_sampler.core.checks import check_text
from dllm_sampler.errors import UserError


def stop_strings(given: str | Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> tuple[str, ...]:
    """Return the checked stop strings of a call, and those of the tokenizer.

    Raises:
        UserError: a stop string is empty, not a text or has a lone surrogate, or there is no tokenizer.
    """
    stops = (given,) if isinstance(given, str) else given
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) and stop for stop in stops):
        raise UserError(
            "option-type", f"stop_strings is {given!r}. Give a text that is not empty, or a list of such texts."
        )
    for stop in stops:
        check_text("stop_strings", stop)
    if stops and tokenizer is None:
        raise UserError(
            "tokenizer-missing",
            "stop_strings need a tokenizer, and there is none. Add tokenizer.json to the checkpoint, pass tokenizer= to"
            " Sampler() or Sampler.from_callable, or remove stop_strings.",
        )
    own = () if tokenizer is None else tokenizer.init_kwargs.get("stop_strings") or ()
    return tuple(dict.fromkeys((*stops, *own)))


def decode(rows: list[list[int]], tokenizer: PreTrainedTokenizerBase | None, stop_strings: Sequence[str]) -> list[str]:
    """Return the text of each row of ids, cut before the first stop string and without special tokens."""
    return [one.text for one in cut(rows, tokenizer, stop_strings)]


class Kept(NamedTuple):
    """The part of an answer before its first stop string."""

    text: str  # without special tokens
    tokens: int  # number of the answer's tokens in it
    stopped: bool  # there is a stop string


def cut(
    rows: list[list[int]],
    tokenizer: PreTrainedTokenizerBase | None,
    stop_strings: Sequence[str],
    heads: Sequence[int] | None = None,
) -> list[Kept]:
    """Return the part of each row of ids before its first stop string.

    The first `heads[i]` tokens of row i are not searched. The search is in the text with its special tokens, so that
    these may be stop strings. The returned text has no special tokens.
    """
    assert tokenizer is not None
    return [_cut(row, tokenizer, stop_strings, head) for row, head in zip(rows, heads or [0] * len(rows), strict=True)]


def stopped(
    rows: list[list[int]],
    tokenizer: PreTrainedTokenizerBase | None,
    stop_strings: Sequence[str],
    heads: Sequence[int] | None = None,
) -> list[bool]:
    """Return True for each row of ids with a stop string after its first `heads[i]` tokens, as `cut` finds it."""
    assert tokenizer is not None
    pairs = zip(rows, heads or [0] * len(rows), strict=True)
    return [_before(row, tokenizer, stop_strings, head) is not None for row, head in pairs]


def _before(row: list[int], tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str], head: int) -> str | None:
    """Return the text, with special tokens, before the first stop string of a row, or None without a stop string."""
    if not stop_strings:
        return None
    whole = _said(row, tokenizer)
    start = len(_said(row[:head], tokenizer)) if head else 0
    places = [at for stop in stop_strings if (at := whole.find(stop, start)) >= 0]
    return whole[: min(places)] if places else None


def _cut(row: list[int], tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str], head: int) -> Kept:
    before = _before(row, tokenizer, stop_strings, head)
    if before is None:
        return Kept(_shown(row, tokenizer), len(row), False)
    # The fewest tokens whose text contains all of it. The last one may contain the stop string's first characters.
    covers = bisect_left(range(len(row)), True, key=lambda size: _said(row[:size], tokenizer).startswith(before))
    whole = next(size for size in range(covers, -1, -1) if before.startswith(_said(row[:size], tokenizer)))
    rest = before[len(_said(row[:whole], tokenizer)) :]
    text = _shown(row[:covers], tokenizer)[: len(_shown(row[:whole], tokenizer)) + len(rest)]
    return Kept(text, covers if rest.strip() else whole, True)


def _said(row: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(row, skip_special_tokens=False))


def _shown(row: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(row, skip_special_tokens=True))
