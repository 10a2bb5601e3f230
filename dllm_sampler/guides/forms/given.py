"""Forms of answers with given tokens: a check that an answer can contain them, and classes of tokens."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dllm_sampler.core.values import FREE
from dllm_sampler.guides.forms.automaton import Automaton
from dllm_sampler.guides.forms.edges import Edges


def completable(automaton: Automaton, given: Sequence[int], end_ids: tuple[int, ...]) -> bool:
    """Return True if the automaton accepts some answer with the given tokens. `FREE` stands for any token.

    An end-of-text token never comes before a given token, unless it is given itself.
    """
    last = max((at for at, token in enumerate(given) if token != FREE), default=-1)
    states = torch.zeros(len(automaton.moves), dtype=torch.bool)
    states[automaton.start] = True
    for at, token in enumerate(given):
        if token == FREE:
            source, target = _pairs(automaton, () if at > last else end_ids)
            reached = target[states[source]]
        else:
            reached = automaton.moves[states, automaton.classes[token]]
        states = torch.zeros_like(states).index_fill(0, reached, True)
    return bool((states & automaton.accepts).any())


@lru_cache(maxsize=8)
def _pairs(automaton: Automaton, without: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return pairs of states: some token leads from the first to the second. Tokens in `without` do not count."""
    moves, classes = automaton.moves, automaton.classes
    if without:
        own = classes[without[0]]  # end-of-text tokens are of one class
        if int((classes == own).sum()) == len(without):
            moves = moves[:, torch.arange(moves.shape[1]) != own]
    size = len(moves)
    found = (torch.arange(size)[:, None] * size + moves).unique()
    return found // size, found % size


def inner_sizes(edges: Edges, end_ids: tuple[int, ...]) -> Tensor:
    """Return `Edges.sizes [C+2]` without the end-of-text tokens."""
    own = torch.arange(len(edges.sizes), device=edges.sizes.device) == edges.classes[end_ids[0]]
    return torch.where(own, (edges.sizes.exp().round() - len(end_ids)).clamp(min=0).log(), edges.sizes)
