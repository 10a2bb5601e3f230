"""Forms over a handful of tokens, of which every string can be counted."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.values import Canvas, Query
from dllm_sampler.engine.readout import Rule, read
from dllm_sampler.guides import Regex, Temperature
from dllm_sampler.guides.forms import automaton
from dllm_sampler.guides.forms.edges import joined
from tests import toys

TOKENS = [b"a", b"b", b"ab", b"c", b"", b"", b""]  # a special token, the end, the mask
END, MASK, VOCAB, LENGTH = 5, 6, 7, 4
PATTERNS = ["(ab|c)*", "a?b{2}c?", "(a|b|c){3,}", "abab|cc"]


def built(pattern: str) -> automaton.Automaton:
    return automaton.build_all([pattern], TOKENS, VOCAB, (END,), MASK)[0]


@cache
def strings(pattern: str, ids: Sequence[int] = range(MASK)) -> list[tuple[int, ...]]:
    """Every string of tokens whose text up to an end token matches; ids beyond the tokenizer's add nothing."""
    found, words = [], [*TOKENS, b"", b""]
    for tokens in itertools.product(ids, repeat=LENGTH):
        text = b"".join(words[token] for token in tokens[: tokens.index(END) if END in tokens else None])
        if re.fullmatch(pattern, text.decode()):
            found.append(tokens)
    return found


def chosen(pattern: str, logits: Tensor, canvas: Canvas, query: Query, draws: bool = False) -> Tensor:
    """`[B, K, Q]` tokens that the guide makes a step choose from logits `[R, V]`."""
    return read(logits.clone(), canvas, HeadRows.every(query), ruled(pattern, draws)).token


def ruled(pattern: str | tuple[str, ...], draws: bool = False, posterior: bool = False, vocab: int = VOCAB) -> Rule:
    guide = Regex(pattern, posterior=posterior)
    made = tuple(automaton.build_all([one], TOKENS, vocab, (END,), MASK)[0] for one in guide.expressions())
    vars(guide).update(edges=joined(made), mask_id=MASK)
    spec = replace(toys.denoiser().spec, vocab_size=vocab, mask_id=MASK, eos_id=END)
    return Rule(spec, (*[Temperature(1.0)] * draws, guide), frozenset())


def laid_out(free: Sequence[Sequence[bool]], tokens: Sequence[Sequence[int]]) -> Canvas:
    canvas = toys.canvas(torch.tensor(free))
    ids = torch.cat([torch.tensor(tokens), canvas.ids[:, -1:]], 1)
    return toys.changed(canvas, ids=torch.where(canvas.masked, MASK, ids), seeds=torch.arange(len(tokens)))


def law(pattern: str, ids: Tensor, logits: Tensor, asked: Sequence[int], size: int) -> Tensor:
    """`[Q, V]` probabilities at each asked place by counting all strings.

    Args:
        ids: `[L]` what stands, or masks.
        logits: `[Q, V]` of the places `asked`.
        size: positions that exist.
    """
    vocab, found = logits.shape[1], torch.zeros_like(logits)
    free = ids == MASK
    legal = torch.tensor(strings(pattern, (*range(MASK), *range(MASK + 1, vocab))))
    legal = legal[(legal[:, size:] == 4).all(1), :size]  # a token without a text behind the end
    weights = logits.log_softmax(1).exp()
    for row, place in enumerate(asked):
        others = [at for at in range(size) if at != place and not free[at]]
        fitting = legal[(legal[:, others] == ids[others]).all(1)]
        weight = torch.ones(len(fitting), dtype=logits.dtype)
        for one, at in enumerate(asked):
            if free[at] or at == place:
                weight = weight * weights[one, fitting[:, at]]
        found[row].index_add_(0, fitting[:, place], weight)
    return found / found.sum(1, keepdim=True)
