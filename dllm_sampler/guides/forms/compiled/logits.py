"""Passes over logits.

A row is read from memory once, a block at a time, and a block is worked on while it is in a CPU's fastest cache.
Letters: R logits' rows, V tokens, C classes of tokens (see `edges.py`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from dllm_sampler.guides.forms.compiled import kept
from dllm_sampler.guides.forms.edges import Edges

BLOCK = 1024  # logits
NOTHING, LEAST = np.int32(-0x7F800001), np.int32(-0x80000000)  # the `_rank` of -inf, and less than any
SUMS = {"reassoc", "contract"}  # sums may be added in any order, so that a CPU's vectors can add them


class Places(NamedTuple):
    """Where the tokens of each class are, but for those of `Edges.main`.

    A large class, of eight tokens per block or more, is looked at block by block, the others when a row has been read.
    """

    large: Any  # [J] large classes
    near: Any  # [K] uint16 their tokens, counted from the beginning of the block: by block, then by class
    cuts: Any  # [blocks * J + 1] where each block's tokens of each large class begin in `near`
    starts: Any  # [J+1] how many tokens the large classes before have
    small: Any  # [I] the other classes
    few: Any  # [F] uint32 their tokens, class by class
    bounds: Any  # [I+1] where each begins in `few`

    @staticmethod
    def of(edges: Edges) -> Places:
        """Those of an automaton's edges."""
        classes, blocks = edges.classes.numpy(), -(-len(edges.classes) // BLOCK)
        sizes = np.bincount(classes, minlength=len(edges.sizes))
        sizes[edges.stays :] = 0
        if edges.main >= 0:
            sizes[edges.main] = 0
        large, small = np.flatnonzero(sizes >= 8 * blocks), np.flatnonzero((sizes > 0) & (sizes < 8 * blocks))
        number = np.full(len(sizes), len(large))
        number[large] = np.arange(len(large))
        near = np.flatnonzero(number[classes] < len(large))
        places = near // BLOCK * len(large) + number[classes[near]]
        order = places.argsort(kind="stable")
        few = np.flatnonzero(np.isin(classes, small))
        return Places(
            large,
            (near[order] % BLOCK).astype(np.uint16),
            np.searchsorted(places[order], np.arange(blocks * len(large) + 1)),
            np.concatenate([[0], sizes[large].cumsum()]),
            small,
            few[classes[few].argsort(kind="stable")].astype(np.uint32),
            np.concatenate([[0], sizes[small].cumsum()]),
        )


@njit
def _rank(value: Any) -> Any:
    """An int32 that orders float32 numbers: the compiler finds the highest int32, but not float32, with vectors."""
    bits = np.float32(value + np.float32(0)).view(np.int32)  # -0.0 becomes 0.0, which it equals
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@njit
def _value(rank: Any) -> Any:
    """The float32 number of a `_rank`; -inf for one that is less."""
    rank = max(rank, NOTHING)
    return np.int32(rank ^ ((rank >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@njit
def _best(values: Any, more: Any) -> Any:
    """The rank of the highest sum of two float32 numbers."""
    top = LEAST
    for index in range(len(values)):
        top = max(top, _rank(values[index] + more[index]))
    return top


@njit
def _first(values: Any, more: Any, rank: Any) -> Any:
    """The index of the first sum of two numbers that has the rank; 0 if none has."""
    for index in range(len(values)):
        if _rank(values[index] + more[index]) == rank:
            return index
    return 0


@njit
def _best_of(values: Any, near: Any) -> Any:
    """The highest rank of the values `near`."""
    top = LEAST
    for index in range(len(near)):
        top = max(top, _rank(values[near[index]]))
    return top


@njit
def _first_of(values: Any, near: Any, rank: Any) -> Any:
    """The first of the values `near` that has the rank; 0 if none has."""
    for index in range(len(near)):
        if _rank(values[near[index]]) == rank:
            return np.int64(near[index])
    return 0


@njit(fastmath={"contract"})
def _exponential(value: Any) -> Any:
    """exp of a float32 number of at most 0, within two units in the last place; 0 below -87.

    It is a polynomial, so that the compiler can use vectors.
    """
    bounded = max(value, np.float32(-87))
    power = np.floor(bounded * np.float32(1.44269504) + np.float32(0.5))
    rest = bounded - power * np.float32(0.693359375) + power * np.float32(2.12194440e-4)  # ln 2 in two parts
    found = np.float32(1.9875691500e-4)
    found = found * rest + np.float32(1.3981999507e-3)
    found = found * rest + np.float32(8.3334519073e-3)
    found = found * rest + np.float32(4.1665795894e-2)
    found = found * rest + np.float32(1.6666665459e-1)
    found = found * rest + np.float32(5.0000001201e-1)
    found = found * rest * rest + rest + np.float32(1)
    scale = np.int32((np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32)  # 2 ** power
    return found * scale if value >= np.float32(-87) else np.float32(0)


@njit(fastmath=SUMS)
def _sum(values: Any, more: Any, top: Any) -> Any:
    """Sum of exp(value + more - top)."""
    total = np.float32(0)
    for index in range(len(values)):
        total += _exponential(values[index] + more[index] - top)
    return total


@njit
def _best_of_both(values: Any, others: Any) -> Any:
    """The highest ranks of two arrays of one length. Memory feeds two streams faster than one."""
    top = other = LEAST
    for index in range(len(values)):
        top, other = max(top, _rank(values[index])), max(other, _rank(others[index]))
    return top, other


@njit
def _highest(ranks: Any) -> Any:
    """The index of the first of the highest ranks. numpy's functions take half a second longer to compile."""
    at = 0
    for index in range(len(ranks)):
        if ranks[index] > ranks[at]:
            at = index
    return at


@njit
def _improve(part: Any, block: Any, high: Any, ranks: Any, homes: Any, large: Any, near: Any, cuts: Any):
    """Look in a block, of which `high` is the highest rank, for better tokens of the large classes."""
    for index in range(len(large)):
        if high > ranks[large[index]]:
            cut = block * len(large) + index
            own = _best_of(part, near[cuts[cut] : cuts[cut + 1]])
            if own > ranks[large[index]]:
                ranks[large[index]], homes[index] = own, block


@njit
def _best_outside(row: Any, tops: Any, at: Any, outside: Any) -> Any:
    """Where the first block with the best token of the class `Edges.main` begins, and its rank.

    Of the blocks, few have a token as good as the best one of the class in the block with the best token, `at`.
    """
    high = _best(row[at : at + BLOCK], outside[at : at + BLOCK])
    for block in range(len(tops)):
        begin = block * BLOCK
        if tops[block] > high or (tops[block] == high and begin < at):
            other = _best(row[begin : begin + BLOCK], outside[begin : begin + BLOCK])
            if other > high or (other == high and begin < at):
                high, at = other, begin
    return at, high


@njit
def _complete(
    row: Any, tops: Any, ranks: Any, homes: Any, tokens: Any, outside: Any, main: Any, first: Any, places: Any
) -> Any:
    """Fill what is left of `ranks [C+2]` and `tokens [C+2]` once a row has been read; returns the best token of all."""
    large, near, cuts, _, small, few, bounds = places
    for index in range(len(large)):
        begin, cut = homes[index] * BLOCK, homes[index] * len(large) + index
        own = near[cuts[cut] : cuts[cut + 1]]
        tokens[large[index]] = begin + _first_of(row[begin : begin + BLOCK], own, ranks[large[index]])
    for index in range(len(small)):
        own = few[bounds[index] : bounds[index + 1]]
        ranks[small[index]] = rank = _best_of(row, own)
        tokens[small[index]] = _first_of(row, own, rank)
    block = _highest(tops)
    if main >= 0:
        at, high = _best_outside(row, tops, block * BLOCK, outside)
        place = at + _first(row[at : at + BLOCK], outside[at : at + BLOCK], high)
        ranks[main], tokens[main] = high, place if high > NOTHING else first
    at = block * BLOCK
    return at + _first(row[at : at + BLOCK], np.zeros(BLOCK, np.float32), tops[block])


@njit(nogil=True)
def _tops(logits: Any, best: Any, tokens: Any, free: Any, outside: Any, main: Any, first: Any, places: Any):
    """Fill `best [R, C+2]`, `tokens [R, C+2]` and `free [R]` from `logits [R, V]`; the rest is of `Edges`."""
    large, near, cuts, _, _, _, _ = places
    begins = range(0, logits.shape[1], BLOCK)
    tops, ranks = np.empty((2, len(begins)), np.int32), np.empty((2, best.shape[1]), np.int32)  # of two rows
    homes = np.empty((2, len(large)), np.int64)
    for number in range(0, len(logits), 2):
        sides = min(2, len(logits) - number)
        row, other = logits[number], logits[number + sides - 1]
        ranks[:] = LEAST
        homes[:] = 0
        for block, begin in enumerate(begins):
            tops[0, block], tops[1, block] = _best_of_both(row[begin : begin + BLOCK], other[begin : begin + BLOCK])
            for side in range(sides):
                part = logits[number + side, begin : begin + BLOCK]
                _improve(part, block, tops[side, block], ranks[side], homes[side], large, near, cuts)
        for side in range(sides):
            at = number + side
            free[at] = _complete(
                logits[at], tops[side], ranks[side], homes[side], tokens[at], outside, main, first, places
            )
            for kind in range(best.shape[1]):
                best[at, kind] = _value(ranks[side, kind])


@njit
def _add(tops: Any, totals: Any, kind: Any, values: Any, more: Any):
    """Add exp(value + more - top) to a class's total, after the top has become the highest of all so far."""
    high = _value(_best(values, more))
    if high > tops[kind]:
        totals[kind] *= math.exp(tops[kind] - high)
        tops[kind] = high
    if tops[kind] > -np.inf:
        totals[kind] += _sum(values, more, tops[kind])


@njit(nogil=True)
def _masses(logits: Any, best: Any, sums: Any, outside: Any, main: Any, places: Any):
    """Fill `best [R, C+2]` and `sums [R, C+2]` from `logits [R, V]`; the rest is of `Edges`."""
    large, near, cuts, starts, small, few, bounds = places
    values, gathered = np.empty(len(few), np.float32), np.empty(len(near), np.float32)
    nothing = np.zeros(max(BLOCK, len(few)), np.float32)
    totals, ends = np.empty(best.shape[1]), np.empty(len(large), np.int64)
    for number in range(len(logits)):
        row, tops = logits[number], best[number]
        tops[:] = -np.inf
        totals[:] = 0
        for index in range(len(large)):  # a slice would take a second longer to compile
            ends[index] = starts[index]
        for block, begin in enumerate(range(0, len(row), BLOCK)):
            part = row[begin : begin + BLOCK]
            if main >= 0:
                _add(tops, totals, main, part, outside[begin : begin + BLOCK])
            for index in range(len(large)):
                own = near[cuts[block * len(large) + index] : cuts[block * len(large) + index + 1]]
                into = gathered[ends[index] : ends[index] + len(own)]
                for place in range(len(own)):
                    into[place] = part[own[place]]
                ends[index] += len(own)
        for index in range(len(large)):
            for begin in range(starts[index], ends[index], BLOCK):
                _add(tops, totals, large[index], gathered[begin : min(begin + BLOCK, ends[index])], nothing)
        for index in range(len(few)):
            values[index] = row[few[index]]
        for index in range(len(small)):
            _add(tops, totals, small[index], values[bounds[index] : bounds[index + 1]], nothing)
        for kind in range(len(totals)):
            sums[number, kind] = tops[kind] + math.log(totals[kind]) if tops[kind] > -np.inf else -np.inf


@njit(nogil=True)
def _weighted(logits: Any, least: Any, factors: Any, found: Any, classes: Any):
    """Fill `found [R, V]` from `logits [R, V]`, `least [R, 1]`, `factors [R, C+2]` and the classes `[V]` of tokens."""
    for number in range(len(logits)):
        row, factor, into, low = logits[number], factors[number], found[number], least[number, 0]
        for token in range(len(row)):
            into[token] = factor[classes[token]] + (row[token] if row[token] > low else low)


def tops(edges: Edges, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `tops.Tops.of`."""
    shape = len(logits), len(edges.sizes)
    best = logits.new_empty(shape, dtype=torch.float32)
    tokens, free = (logits.new_zeros(size, dtype=torch.long) for size in (shape, shape[:1]))
    outputs = best.numpy(), tokens.numpy(), free.numpy()
    _tops(_floats(logits), *outputs, edges.outside.numpy(), edges.main, edges.first, kept(edges, Places.of))
    return best, tokens, free


def masses(edges: Edges, logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `tops.masses`."""
    shape = len(logits), len(edges.sizes)
    best, sums = (logits.new_empty(shape, dtype=dtype) for dtype in (torch.float32, torch.float64))
    _masses(_floats(logits), best.numpy(), sums.numpy(), edges.outside.numpy(), edges.main, kept(edges, Places.of))
    return best, sums


def weighted(edges: Edges, logits: Tensor, least: Tensor, factors: Tensor) -> Tensor:
    """See `tops.weighted`."""
    found = torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)
    _weighted(_floats(logits), _floats(least), _floats(factors), found.numpy(), edges.classes.numpy())
    return found


def _floats(values: Tensor) -> Any:
    """The same as a float32 array in order, which numba takes."""
    return values.detach().float().contiguous().numpy()
