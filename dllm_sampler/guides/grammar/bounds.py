"""Lower bounds on the bytes of the rest of a completion from each place on, by lexemes alone."""

from collections.abc import Sequence

import numpy as np

from dllm_sampler.guides.grammar.lattice import APART, BEHIND, TAIL, WHOLE, Lattice

NEVER = 1 << 40  # the cost of a text that cannot be completed


def bounds(places: Sequence[int], tail: int, stops: Sequence[bool], lattice: Lattice) -> list[list[int]]:
    """Return for each place the fewest bytes of the rest, by state and then by kind. Any lexeme may follow any other.

    Each token for a mask before `tail` costs a byte less than it has.

    Args:
        places: classes of bytes. -1 is a mask.
        tail: end of the bytes. Only masks and gaps follow.
        stops: True if the text may end before a place. The last value is for the end of all places.
    """
    count, (ends, word) = len(lattice.rows), lattice.arrays
    (sources, targets, sizes), (kinds, rests) = (one.T for one in lattice.edges)
    first, kind_first = (np.flatnonzero(np.diff(one, prepend=-1)) for one in (sources, kinds))
    open_ends, word_ends = np.flatnonzero(ends & ~word), np.flatnonzero(ends & word)
    behind, found = np.zeros(0, np.int64), list[list[int]]()
    for place in range(len(places), -1, -1):
        row = np.full(count + len(lattice.kinds), NEVER)
        if place < len(places) and places[place] >= 0:
            row[:count] = behind[lattice.step[:, places[place]]]
        elif place < len(places) and len(first):
            cost = np.minimum.reduceat(behind[targets] + sizes - (place < tail), first)
            row[sources[first]] = np.minimum(cost, NEVER)
        done = 0 if stops[place] else NEVER
        row[count + WHOLE] = row[lattice.starts].min(initial=done)
        row[count + APART] = row[lattice.apart].min(initial=done)
        row[TAIL] = min(row[TAIL], row[count + WHOLE])
        row[BEHIND] = min(row[BEHIND], row[count + APART])
        row[open_ends] = np.minimum(row[open_ends], row[TAIL])
        row[word_ends] = np.minimum(row[word_ends], row[BEHIND])
        while len(kinds):  # a kind may lead to others of the same place
            cost = np.minimum.reduceat(row[rests], kind_first)
            if (cost == row[kinds[kind_first]]).all():
                break
            row[kinds[kind_first]] = cost
        found.append(row.tolist())
        behind = row
    return found[::-1]
