"""Passes over an answer's positions, along the moves of an automaton. Letters as in `choice.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from dllm_sampler.guides.forms.compiled import kept
from dllm_sampler.guides.forms.edges import Edges


class Moves(NamedTuple):
    """The moves of each form's automaton, each `[P, M]`; those from one state stand together."""

    begin: Any  # the state that a move leaves
    end: Any  # the state that it enters
    kind: Any  # its class
    edge: Any  # its edge

    @staticmethod
    def of(edges: Edges) -> Moves:
        """Those of the edges."""
        ends = (edges.source.gather(1, edges.edge), edges.target.gather(1, edges.edge))
        return Moves(*(one.numpy() for one in (*ends, edges.kind, edges.edge)))


@njit(nogil=True)
def _fill(several: bool, begins: Any, ends: Any, kinds: Any, found: Any, values: Any, form: Any):
    """Fill `found[n, :-1]`, from `found[n, -1]` backwards, with the best or the sum of each state's moves.

    Args:
        begins, ends, kinds: `[P, M]` of the moves.
        found: `[N, L+1, S]`.
        values: `[N, L, C+2]` of the classes; `[N, 1, C+2]` where they are the same at each position.
        form: `[N]`.
    """
    for number in range(len(found)):
        begin, end, kind = begins[form[number]], ends[form[number]], kinds[form[number]]
        score, total = np.empty(len(kind)), np.empty(found.shape[2])
        for at in range(found.shape[1] - 2, -1, -1):
            top, after, value = found[number, at], found[number, at + 1], values[number, min(at, values.shape[1] - 1)]
            top[:] = -np.inf
            here, best = begin[0], -np.inf  # of moves that stand together, one comparison with `top` is enough
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
def _walk(moves: Any, taken: Any, values: Any, goals: Any, state: Any, form: Any, unasked: Any, sizes: Any, noise: Any):
    """Fill `taken [N, L]` with the class of each position of the best way from `state [N]`.

    A string that nothing can complete takes any move.

    Args:
        values, goals, noise: as for `Lattice.kinds`.
        unasked: `[N, L]` in a draw, the masks that are not asked about: every token is as likely there.
        sizes: `[N or 1, L or 1, C+2]` the logarithm of the number of tokens of each class.
    """
    begins, ends, kinds, edges = moves
    firsts = np.empty(goals.shape[2] + 1, np.int64)  # the first move of each state
    score, top, total = np.empty(kinds.shape[1]), np.empty(kinds.shape[1]), np.empty(kinds.shape[1])
    for number in range(len(values)):
        own = form[number]
        begin, end, edge, kind, here = begins[own], ends[own], edges[own], kinds[own], state[number]
        firsts[:] = len(kind)
        for move in range(len(kind) - 1, -1, -1):
            firsts[begin[move]] = move
        for at in range(values.shape[1]):
            value, goal = values[number, at], goals[number, at + 1]
            last = firsts[here]
            while last < len(kind) and begin[last] == here:
                last += 1
            if unasked[number, at]:
                value = sizes[min(number, len(sizes) - 1), min(at, sizes.shape[1] - 1)]
                for move in range(firsts[here], last):
                    top[edge[move]], total[edge[move]] = -np.inf, 0
                for move in range(firsts[here], last):
                    top[edge[move]] = max(top[edge[move]], value[kind[move]])
                for move in range(firsts[here], last):
                    if value[kind[move]] > -np.inf:
                        total[edge[move]] += np.exp(value[kind[move]] - top[edge[move]])
                for move in range(firsts[here], last):
                    weight = top[edge[move]] + np.log(total[edge[move]]) if total[edge[move]] > 0 else -np.inf
                    score[move] = weight + (goal[end[move]] + noise[number, at, end[move]])
            else:
                for move in range(firsts[here], last):
                    score[move] = value[kind[move]] + goal[end[move]]
            # The first edge among the best ones, and the first among the best classes along it, as with torch.
            best, chosen = -np.inf, 0
            for move in range(firsts[here], last):
                before = edge[move] < edge[chosen] or (
                    edge[move] == edge[chosen] and value[kind[move]] > value[kind[chosen]]
                )
                if score[move] > best or (score[move] == best and best > -np.inf and before):
                    best, chosen = score[move], move
            taken[number, at], here = kind[chosen], end[chosen]


def ahead(edges: Edges, form: Tensor, values: Tensor, goal: Tensor, several: bool, length: int) -> Tensor:
    """`[N, L+1, S]`, see `Lattice.ahead`, over `length` positions.

    Args:
        values: `[N, L, C+2]`; `[N, 1, C+2]` where they are the same at each position.
        goal: `[N, S]` what may follow behind the last position.
    """
    moves = kept(edges, Moves.of)
    return _filled(values, goal, form, moves.begin, moves.end, moves.kind, several, length)


def around(edges: Edges, form: Tensor, values: Tensor, start: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """See `Lattice.around`; `start` and `goal [N, S]` are what leads to the first position and follows the last."""
    moves, length = kept(edges, Moves.of), values.shape[1]
    before = _filled(values.flip(1), start, form, moves.end, moves.begin, moves.kind, True, length).flip(1)
    return before[:, :-1], ahead(edges, form, values, goal, True, length)[:, 1:]


def walk(
    edges: Edges,
    form: Tensor,
    values: Tensor,
    goals: Tensor,
    state: Tensor,
    unasked: Tensor,
    sizes: Tensor,
    noise: Tensor | None,
) -> Tensor:
    """`[N, L]` the class at each position of the best string, or of a drawn one; see `Lattice.kinds`.

    Args:
        state: `[N]` before the first position.
        unasked, sizes: as in `Lattice`.
    """
    taken = torch.empty(values.shape[:2], dtype=torch.long)
    if noise is None:
        unasked, noise = torch.zeros_like(unasked), values  # it is not looked at
    sizes = sizes.view(1, 1, -1) if sizes.dim() == 1 else sizes
    _walk(kept(edges, Moves.of), *map(_array, (taken, values, goals, state, form, unasked, sizes, noise)))
    return taken


def _filled(
    values: Tensor, last: Tensor, form: Tensor, begins: Any, ends: Any, kinds: Any, several: bool, length: int
) -> Tensor:
    """`[N, length + 1, S]` of `_fill`, from `last [N, S]` backwards."""
    found = last.new_empty(len(last), length + 1, last.shape[1])
    found[:, -1] = last
    _fill(several, begins, ends, kinds, *map(_array, (found, values, form)))
    return found


def _array(values: Tensor) -> Any:
    """The same as an array in order, which numba takes."""
    return values.detach().contiguous().numpy()
