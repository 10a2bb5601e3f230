"""Passes over an answer's positions, along the moves of an automaton. Letters as in `choice.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from dllm_sampler.guides.forms.edges import Edges


@njit(nogil=True)
def _pass(several: bool, values: Any, found: Any, form: Any, begins: Any, ends: Any, kinds: Any):
    """Fill `found[n, :-1]`, from `found[n, -1]` on, with the best or the sum of the moves that begin in each state.

    Args:
        values: `[N, L, C+2]` of the classes.
        found: `[N, L+1, S]`.
        form: `[N]`.
        begins, ends, kinds: `[P, M]` the two states, and the class, of each move.
    """
    for number in range(len(values)):
        begin, end, kind = begins[form[number]], ends[form[number]], kinds[form[number]]
        score, total = np.empty(len(kind)), np.empty(found.shape[2])
        for at in range(values.shape[1] - 1, -1, -1):
            top, after, value = found[number, at], found[number, at + 1], values[number, at]
            top[:] = -np.inf
            here, best = begin[0], -np.inf  # moves from one state mostly stand together
            for move in range(len(kind)):
                if begin[move] != here:
                    top[here], here, best = max(top[here], best), begin[move], -np.inf
                score[move] = value[kind[move]] + after[end[move]]
                best = max(best, score[move])
            top[here] = max(top[here], best)
            if several:
                total[:] = 0
                for move in range(len(kind)):
                    if score[move] > -np.inf:
                        total[begin[move]] += np.exp(score[move] - top[begin[move]])
                for state in range(len(total)):
                    if total[state] > 0:
                        top[state] += np.log(total[state])


@njit(nogil=True)
def _walk(
    values: Any, goals: Any, state: Any, unasked: Any, even: Any, noise: Any,
    form: Any, begins: Any, ends: Any, edges: Any, kinds: Any, taken: Any
):  # fmt: skip
    """Fill `taken [N, L]` with the class of each position of the best way from `state [N]`; `edges [P, M]` of moves.

    Args:
        unasked, even, noise: as for `walk`.
    """
    firsts = np.empty(goals.shape[2] + 1, np.int64)  # the first move of each state; the others follow it
    for number in range(len(values)):
        own = form[number]
        begin, end, edge, kind, here = begins[own], ends[own], edges[own], kinds[own], state[number]
        firsts[:] = len(kind)
        for move in range(len(kind) - 1, -1, -1):
            firsts[begin[move]] = move
        for at in range(values.shape[1]):
            value, goal, free = values[number, at], goals[number, at + 1], unasked[number, at]
            weight, extra = even[number, min(at, even.shape[1] - 1)], noise[number, min(at, noise.shape[1] - 1)]
            # The first edge among the best ones, and the first among the best classes along it, as with torch.
            best, top, chosen, move = -np.inf, -np.inf, 0, firsts[here]
            while move < len(kind) and begin[move] == here:
                worth = weight[edge[move]] if free else value[kind[move]]
                score = worth + (goal[end[move]] + extra[end[move]] if free else goal[end[move]])
                before = edge[move] < edge[chosen] or (edge[move] == edge[chosen] and worth > top)
                if score > best or (score == best and best > -np.inf and before):
                    best, top, chosen = score, worth, move
                move += 1
            taken[number, at], here = kind[chosen], end[chosen]


def ahead(edges: Edges, form: Tensor, values: Tensor, goal: Tensor, several: bool) -> Tensor:
    """See `Lattice.ahead`; `goal [N, S]` is what may follow behind the last position."""
    return _passed(values, goal, form, *_moves(edges), several)


def around(edges: Edges, form: Tensor, values: Tensor, start: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """See `Lattice.around`; `start` and `goal [N, S]` are what leads to the first position and follows the last."""
    begins, ends, kinds = _moves(edges)
    before = _passed(values.flip(1), start, form, ends, begins, kinds, True).flip(1)
    return before[:, :-1], _passed(values, goal, form, begins, ends, kinds, True)[:, 1:]


def walk(
    edges: Edges,
    form: Tensor,
    values: Tensor,
    goals: Tensor,
    state: Tensor,
    drawn: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """`[N, L]` the class at each position of the best string, or of a drawn one; see `Lattice.kinds`.

    Args:
        state: `[N]` before the first position.
        drawn: in a draw, `unasked [N, L]` the masks that are not asked about, `even [N, 1, E]` or `[N, L, E]` the
            logarithm of the number of tokens along each edge, and `noise [N, L, S]` of what follows these masks.
    """
    if drawn is None:
        unasked = torch.zeros(values.shape[:2], dtype=torch.bool)
        drawn = unasked, values[:, :1], values[:, :1]  # not looked at
    begins, ends, kinds = _moves(edges)
    taken = torch.empty(values.shape[:2], dtype=torch.long)
    _walk(*map(_array, (values, goals, state, *drawn, form, begins, ends, edges.edge, kinds, taken)))
    return taken


def _passed(
    values: Tensor, last: Tensor, form: Tensor, begins: Tensor, ends: Tensor, kinds: Tensor, several: bool
) -> Tensor:
    """`[N, L+1, S]` of `_pass`, from `last [N, S]` on."""
    found = last.new_empty(len(values), values.shape[1] + 1, last.shape[1])
    found[:, -1] = last
    _pass(several, *map(_array, (values, found, form, begins, ends, kinds)))
    return found


def _moves(edges: Edges) -> tuple[Tensor, Tensor, Tensor]:
    """`[P, M]` the states in which each move begins and ends, and its class."""
    return edges.source.gather(1, edges.edge), edges.target.gather(1, edges.edge), edges.kind


def _array(values: Tensor) -> Any:
    """The same as an array in order, which numba takes."""
    return values.detach().contiguous().numpy()
