"""The automata of some forms as lists of edges, for a step's passes over the positions of an answer.

A state of an automaton leads to few others, and most tokens fit nowhere. So the cost of a step grows with the edges,
not with states times classes of tokens. Letters: P forms, S states, E edges, M moves, C classes of tokens that fit
somewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from dllm_sampler.guides.forms.automaton import Automaton

TILE = 64  # tokens of one class in a tile


@dataclass(frozen=True, eq=False)
class Edges:
    """Automata as edges: pairs of a state and its successor. A move is a class of tokens along an edge.

    Forms share their C classes. Two more follow. The first is that of a position that a row does not have, which leaves
    each state as it is (`stays`). The second is that of tokens that fit nowhere, the mask among them. A form with fewer
    edges or moves than another is padded with edges without moves and moves of the last class.
    """

    source: Tensor  # [P, E]
    target: Tensor  # [P, E]
    edge: Tensor  # [P, M] the edge of each move
    kind: Tensor  # [P, M] the class of each move
    accepts: Tensor  # [P, S] bool
    start: Tensor  # [P] the first state of each form
    after: Tensor  # [P, C+2, S+1] int32: the state after a token of each class. S means that the string is lost
    classes: Tensor  # [V] the class of each token
    sizes: Tensor  # [C+2] float64: logarithm of the number of tokens. The last two are -inf
    tiles: Tensor  # [G, TILE] int32 tokens of one class, in order. The last one of a class is repeated
    padding: Tensor  # [G, TILE] float32: -inf for repeated tokens and an empty tile, 0 for others
    tile_kind: Tensor  # [G] the class of each tile
    main: int  # the class of more than half of the tokens, or -1. No tile contains it
    outside: Tensor  # [V] float32: 0 for tokens of that class, -inf for the others
    first: int  # the first token of that class
    tails: dict[tuple[bool, int], Tensor] = field(default_factory=dict, init=False)  # see `window.py`

    @property
    def stays(self) -> int:
        """C, the class of a position that a row does not have."""
        return len(self.sizes) - 2

    def to(self, device: torch.device) -> Edges:
        """Return the edges on a device."""
        tensors = {name: one.to(device) for name, one in vars(self).items() if isinstance(one, Tensor)}
        return replace(self, **tensors)


@lru_cache(maxsize=8)
def joined(automata: tuple[Automaton, ...]) -> Edges:
    """Return the edges of several automata over the same tokens, one form for each automaton."""
    classes, first = _shared([one.classes for one in automata])
    moves = [one.moves[:, one.classes[first]] for one in automata]  # [S+1, C'], the dead state is the last one
    fits = torch.stack([(one != len(one) - 1).any(0) for one in moves]).any(0)  # [C']
    count = int(fits.sum())
    classes = torch.where(fits, fits.cumsum(0) - 1, count + 1)[classes]
    source, target, edge, kind = zip(*(_listed(one[:, fits]) for one in moves), strict=True)
    sizes = torch.zeros(count + 2, dtype=torch.float64)
    sizes.index_add_(0, classes, torch.ones(len(classes), dtype=torch.float64))
    sizes[count:] = 0
    largest = int(sizes.argmax())
    main = largest if 2 * sizes[largest] > len(classes) else -1
    return Edges(
        source=_stacked(source),
        target=_stacked(target),
        edge=_stacked(edge),
        kind=_stacked(kind, count + 1),
        accepts=_stacked([one.accepts[:-1] for one in automata]),
        start=torch.tensor([one.start for one in automata]),
        after=torch.stack([_after(one[:, fits], max(map(len, moves))) for one in moves]),
        classes=classes,
        sizes=sizes.log(),
        **_tiled(torch.where(classes == main, count, classes), count),
        main=main,
        outside=torch.zeros(len(classes)).masked_fill(classes != main, -torch.inf),
        first=int((classes == main).byte().argmax()),
    )


def _shared(classes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return `[V]` classes of tokens that no automaton distinguishes, and `[C']` a token of each."""
    joint = classes[0]
    for one in classes[1:]:
        joint = (joint * (int(one.max()) + 1) + one).unique(return_inverse=True)[1]
    return joint, torch.zeros(int(joint.max()) + 1, dtype=torch.long).scatter_(0, joint, torch.arange(len(joint)))


def _listed(moves: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return source and target of each edge, and edge and class of each move, of moves `[S+1, C]`."""
    dead = len(moves) - 1
    states = torch.arange(dead)
    to = torch.cat([moves[:-1], states[:, None]], 1)  # [S, C+1]: a missing position moves nothing
    source, kind = (to != dead).nonzero().unbind(1)
    found, edge = (source * dead + to[source, kind]).unique(return_inverse=True)
    return found // dead, found % dead, edge, kind


def _after(moves: Tensor, size: int) -> Tensor:
    """Return `[C+2, size] int32` the state after a token, of moves `[S+1, C]`. The dead state becomes the last one."""
    dead = len(moves) - 1
    to = torch.where(moves == dead, size - 1, moves)[:-1]
    stay = torch.arange(dead)[:, None]
    to = torch.cat([to, stay, torch.full_like(stay, size - 1)], 1)
    return pad(to, (0, 0, 0, size - dead), value=size - 1).int().T.contiguous()


def _stacked(values: Sequence[Tensor], filler: int = 0) -> Tensor:
    """Return `[P, ...]` lists of different lengths, padded."""
    most = max(map(len, values))
    return torch.stack([pad(one, (0, most - len(one)), value=filler) for one in values])


def _tiled(classes: Tensor, count: int) -> dict[str, Tensor]:
    """Return the tiles of tokens with classes below `count`. If there are none, return a tile of the last class."""
    order = classes.argsort(stable=True)
    order = order[classes[order] < count]
    kind, sizes = classes[order], classes.bincount(minlength=count)[:count]
    tiles = -(-sizes // TILE)
    first, begins = sizes.cumsum(0) - sizes, tiles.cumsum(0) - tiles
    own = torch.arange(count).repeat_interleave(tiles)
    table = order[(first + sizes - 1)[own], None].repeat(1, TILE)
    place = torch.arange(len(order)) - first[kind] + begins[kind] * TILE
    table.view(-1)[place] = order
    padding = torch.full(table.shape, -torch.inf)
    padding.view(-1)[place] = 0
    if not len(own):
        table, own = table.new_zeros(1, TILE), own.new_tensor([count + 1])
        padding = padding.new_full((1, TILE), -torch.inf)
    return {"tiles": table.int(), "padding": padding, "tile_kind": own}
