"""The passes of `tops.py` over logits on a CPU, compiled by numba. They run on one thread and keep no gradients.

They work on a block of a row while it is in the cache, so that memory is read about once, where torch needs several
operations. Nothing here checks bounds: `tops.py` checks the logits' shape. Letters: see `edges.py`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from dllm_sampler.guides.forms.edges import Edges

BLOCK = 2048  # logits that are worked on at once: a CPU's fastest cache has room for them
NOTHING = np.int32(-0x7F800001)  # the `_rank` of -inf
SUMS = {"reassoc", "contract"}  # sums may be added in any order, so that a CPU's vectors can add them


@njit
def _rank(value: Any) -> Any:
    """An int32 that orders float32 numbers: the compiler finds the highest int32, but not float32, with vectors."""
    bits = np.float32(value + np.float32(0)).view(np.int32)  # -0.0 becomes 0.0, which it equals
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@njit
def _value(rank: Any) -> Any:
    """The float32 number of a `_rank`."""
    return np.int32(rank ^ ((rank >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@njit
def _best(values: Any, more: Any) -> Any:
    """The highest sum of two float32 numbers; -inf if there is none."""
    top = NOTHING
    for index in range(len(values)):
        top = max(top, _rank(values[index] + more[index]))
    return _value(top)


@njit
def _first(values: Any, more: Any, wanted: Any) -> Any:
    """The index of the first sum of two numbers that is the wanted one; 0 if none is."""
    for index in range(len(values)):
        if values[index] + more[index] == wanted:
            return index
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


@njit(nogil=True)
def _tops(
    logits: Any, best: Any, tokens: Any, free: Any, outside: Any, main: Any, first: Any, listed: Any, bounds: Any
):
    """Fill `best [R, C+2]`, `tokens [R, C+2]` and `free [R]` from `logits [R, V]`; the rest is of `Edges`."""
    nothing, values = np.zeros_like(outside), np.empty(len(listed), np.float32)
    begins = range(0, logits.shape[1], BLOCK)
    tops = np.empty(len(begins), np.float32)
    for number in range(len(logits)):
        row = logits[number]
        for block, begin in enumerate(begins):
            tops[block] = _best(row[begin : begin + BLOCK], nothing)
        at = tops.argmax() * BLOCK
        free[number] = at + _first(row[at : at + BLOCK], nothing, tops.max())
        # Of the other blocks, few have a token as good as the best one of the class `main` in this block.
        own_at, own = at, _best(row[at : at + BLOCK], outside[at : at + BLOCK])
        for block, begin in enumerate(begins):
            if main >= 0 and (tops[block] > own or (tops[block] == own and begin < own_at)):
                high = _best(row[begin : begin + BLOCK], outside[begin : begin + BLOCK])
                if high > own or (high == own and begin < own_at):
                    own, own_at = high, begin
        for index in range(len(listed)):
            values[index] = row[listed[index]]
        for kind in range(len(bounds) - 1):
            begin, end = bounds[kind], bounds[kind + 1]
            top = best[number, kind] = _best(values[begin:end], nothing)
            tokens[number, kind] = listed[begin + _first(values[begin:end], nothing, top)] if end > begin else 0
        if main >= 0:
            found = own_at + _first(row[own_at : own_at + BLOCK], outside[own_at : own_at + BLOCK], own)
            best[number, main], tokens[number, main] = own, found if own > -np.inf else first


@njit(nogil=True)
def _masses(logits: Any, best: Any, sums: Any, outside: Any, main: Any, listed: Any, bounds: Any):
    """Fill `best [R, C+2]` and `sums [R, C+2]` from `logits [R, V]`; the rest is of `Edges`."""
    nothing, values = np.zeros_like(outside), np.empty(len(listed), np.float32)
    for number in range(len(logits)):
        row, top, total = logits[number], np.float32(-np.inf), 0.0
        for begin in range(0, len(row) if main >= 0 else 0, BLOCK):
            part, more = row[begin : begin + BLOCK], outside[begin : begin + BLOCK]
            high = _best(part, more)
            if high > top:
                total *= math.exp(top - high)
                top = high
            if top > -np.inf:
                total += _sum(part, more, top)
        for index in range(len(listed)):
            values[index] = row[listed[index]]
        for kind in range(len(bounds) - 1):
            own = values[bounds[kind] : bounds[kind + 1]]
            high = best[number, kind] = _best(own, nothing)
            sums[number, kind] = _logarithm(_sum(own, nothing, high), high)
        if main >= 0:
            best[number, main], sums[number, main] = top, _logarithm(total, top)


@njit
def _logarithm(total: Any, top: Any) -> Any:
    """The float64 logarithm of `total * exp(top)`; -inf where nothing has been added."""
    return np.float64(top) + math.log(np.float64(total)) if top > -np.inf else -np.inf


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
    tokens, free = (logits.new_empty(size, dtype=torch.long) for size in (shape, shape[:1]))
    lists = edges.listed.numpy(), edges.bounds.numpy()
    outputs = best.numpy(), tokens.numpy(), free.numpy()
    _tops(_array(logits), *outputs, _array(edges.outside), edges.main, edges.first, *lists)
    return best, tokens, free


def masses(edges: Edges, logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `tops.masses`."""
    shape = len(logits), len(edges.sizes)
    best, sums = (logits.new_empty(shape, dtype=dtype) for dtype in (torch.float32, torch.float64))
    lists = edges.listed.numpy(), edges.bounds.numpy()
    _masses(_array(logits), best.numpy(), sums.numpy(), _array(edges.outside), edges.main, *lists)
    return best, sums


def weighted(edges: Edges, logits: Tensor, least: Tensor, factors: Tensor) -> Tensor:
    """See `tops.weighted`."""
    found = torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)
    _weighted(_array(logits), _array(least), _array(factors), found.numpy(), edges.classes.numpy())
    return found


def _array(values: Tensor) -> Any:
    """The same as a float32 array in order, which numba takes."""
    return values.detach().float().contiguous().numpy()
