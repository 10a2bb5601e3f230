"""The joint choice: the predicted tokens of a step are those of one string that the automaton accepts.

Whatever part of them a scheduler commits, the string shows that the rest can be completed. Letters: N = B*K strings,
one for each row and candidate, L positions of an answer, S states, E edges, M moves and C classes of tokens (see
`edges.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from dllm_sampler.core import select
from dllm_sampler.core.noise import FORMS, CounterNoise, hashed, token_noise
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Whole
from dllm_sampler.core.values import Canvas, Query
from dllm_sampler.errors import UserError
from dllm_sampler.guides.forms.edges import Edges
from dllm_sampler.guides.forms.given import inner_sizes
from dllm_sampler.guides.forms.tops import Tops, best, floor, masses, total, weighted
from dllm_sampler.guides.forms.window import ROOM, Window

LEAST = -1e6  # value of a token that another guide forbids: below all others, above a string that cannot be completed
TIE = 1e-9  # value that a class loses to another one with the same best logit


@dataclass(frozen=True)
class Strings:
    """The known positions of each string, and those that a step asks about."""

    exists: Tensor  # [N, L] bool: the position belongs to the row
    token: Tensor  # [N, L] the token there
    free: Tensor  # [N, L] bool: the position is undecided
    place: Tensor  # [N, Q] position of each queried column in the answer, L if it is outside

    @staticmethod
    def of(canvas: Canvas, query: Query, mask_id: int | None) -> Strings:
        """Return one string for each candidate of each row.

        Args:
            mask_id: a candidate's position with this token is free. If None, candidates are as free as the canvas.
        """
        answer = canvas.answer()  # [B, L]
        candidates, length = query.ids.shape[1], answer.shape[1]
        token, free = canvas.ids.gather(1, answer), canvas.masked.gather(1, answer)
        place = query.positions - canvas.layout.first[:, None]
        place = torch.where((place >= 0) & (query.positions < canvas.length), place, length).clamp(max=length)

        def each(values: Tensor) -> Tensor:  # [N, ...]
            return values.repeat_interleave(candidates, 0) if candidates > 1 else values

        place, asked = each(place), query.ids.flatten(0, 1)
        token, free = _put(each(token), place, asked), each(free)
        free = free if mask_id is None else _put(free, place, asked == mask_id)
        return Strings(each(answer < canvas.end[:, None]), token, free, place)


def _put(values: Tensor, place: Tensor, new: Tensor) -> Tensor:
    """Return `values [N, L]` with `new [N, Q]` at `place [N, Q]`. A place L is dropped."""
    room = torch.cat([values, values[:, :1]], 1)
    return room.scatter(1, place, new)[:, :-1]


@dataclass(frozen=True)
class Lattice:
    """The strings of a step as paths through an automaton's edges, one edge for each position."""

    edges: Edges
    head_rows: HeadRows
    strings: Strings
    form: Tensor  # [N] number of each string's form
    window: Window
    state: Tensor  # [N] at the window's first position
    unasked: Tensor  # [N, L] bool: a mask that the query does not contain
    sizes: Tensor  # [C+2] `Edges.sizes`, or [N, L+1, C+2] if given tokens exclude end-of-text tokens at some positions

    @staticmethod
    def of(edges: Edges, canvas: Canvas, head_rows: HeadRows, mask_id: int | None, end_ids: tuple[int, ...]) -> Lattice:
        """Return the lattice of a query's strings."""
        strings = Strings.of(canvas, head_rows.query, mask_id)
        there = head_rows.spread(torch.ones_like(head_rows.row)).flatten(0, 1)  # [N, Q]
        place = strings.place.masked_fill(there == 0, strings.token.shape[1])
        asked = _put(torch.zeros_like(strings.free), place, torch.ones_like(place, dtype=torch.bool))
        form = torch.zeros_like(canvas.layout.first) if canvas.layout.form is None else canvas.layout.form
        form = form.repeat_interleave(len(place) // len(form), 0)
        window = Window.of(edges, canvas, head_rows)
        state = window.entered(edges, form, strings.token)
        unasked = window.cut(strings.exists & strings.free & ~asked)
        sizes = edges.sizes
        if canvas.layout.given is not None and end_ids:
            inner = pad(canvas.answer() < canvas.layout.given[:, None], (0, 1))[..., None]  # [B, L+1, 1]
            sizes = torch.where(inner, inner_sizes(edges, end_ids), sizes)
            sizes = sizes.repeat_interleave(len(place) // len(sizes), 0)
            sizes = torch.cat([window.cut(sizes), sizes[:, -1:]], 1)
        exists, token, free = (window.cut(one) for one in (strings.exists, strings.token, strings.free))
        strings = Strings(exists, token, free, window.places(place))
        return Lattice(edges, head_rows, strings, form, window, state, unasked, sizes)

    @cached_property
    def lists(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Source and target `[N, E]` of each string's edges, edge and class `[N, M]` of its moves."""
        it, own = self.edges, self.form
        source, target, edge, kind = (one.index_select(0, own) for one in (it.source, it.target, it.edge, it.kind))
        return source, target, edge, kind

    def values(self, found: Tensor, rest: Tensor) -> Tensor:
        """Return `[N, L, C+2]` the value of each class at each position.

        Args:
            found: `[R, C+2]` values of the head rows.
            rest: values of masks that the query does not contain, shaped as `sizes`.
        """
        (number, length), count = self.strings.token.shape, rest.shape[-1]
        room = rest.expand(number, length + 1, count)
        index = self.strings.place[..., None].expand(-1, -1, count)
        room = room.scatter(1, index, self.head_rows.spread(found).flatten(0, 1))
        room = (room if rest.dim() == 1 else room.masked_fill(self.sizes == -torch.inf, -torch.inf))[:, :-1]
        # Decided tokens are certain, and positions after the row's end are, too.
        only = torch.where(self.strings.exists, self.edges.classes[self.strings.token], self.edges.stays)[..., None]
        free = (self.strings.exists & self.strings.free)[..., None]
        values = room.where(free, -torch.inf)
        return values.scatter_(2, only, values.gather(2, only).where(free, 0.0))

    def at(self, values: Tensor) -> Tensor:
        """Return `[N, Q, ...]` values `[N, L, ...]` at the queried positions, or any values at unanswered ones."""
        place = self.strings.place.clamp(max=values.shape[1] - 1)[..., None]
        return values.gather(1, place.expand(-1, -1, values.shape[2]))

    def moves(self, values: Tensor) -> Tensor:
        """Return `[N, T, M]` values of moves, from values `[N, T, C+2]` of classes."""
        return values.gather(2, self.lists[3][:, None].expand(-1, values.shape[1], -1))

    def weights(self, values: Tensor, several: bool) -> Tensor:
        """Return `[N, T, E]` the best, or the sum, of each edge's moves, from values `[N, T, C+2]` of classes."""
        source, _, edge, _ = self.lists
        each = self.moves(values)
        edge = edge[:, None].expand_as(each)
        return (total if several else best)(each, edge, floor(each, source.shape[1], several))

    def parts(self, length: int) -> list[tuple[int, int]]:
        """Return the stretches of `length` positions whose moves are computed at once."""
        size = max(1, ROOM // (len(self.form) * self.edges.kind.shape[1]))
        return [(begin, min(begin + size, length)) for begin in range(0, length, size)]

    def ahead(self, values: Tensor, several: bool) -> Tensor:
        """Return `[N, L+1, S]` the best value, or the sum, of strings that may follow each state at each position."""
        goal = self.window.left(self.edges, self.form, several)
        (source, target, _, _), found = self.lists, [goal]
        reduce, least = total if several else best, floor(found[0], found[0].shape[1], several)
        for begin, end in reversed(self.parts(values.shape[1])):
            for weight in reversed(self.weights(values[:, begin:end], several).unbind(1)):
                found.append(reduce(weight + found[-1].gather(1, target), source, least))
        return torch.stack(found[::-1], 1)

    def around(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums `[N, L, S]` of strings that lead to each state before each position, and of those that follow it.

        Both passes run side by side. Sizes are small, so this takes hardly longer than one pass.
        """
        goal = self.window.left(self.edges, self.form, True)
        start = torch.where(self.state[:, None] == select.arange(goal.shape[1], goal.device), 0.0, -torch.inf).double()
        source, target, _, _ = self.lists
        found, back = [torch.cat([start, goal])], values.flip(1)
        least = floor(found[0], goal.shape[1], True)
        source, target = torch.cat([source, target]), torch.cat([target, source])  # [2 N, E]
        for begin, end in self.parts(values.shape[1]):
            both = torch.cat([self.weights(one[:, begin:end], True) for one in (values, back)])
            for weight in both.unbind(1):
                found.append(total(weight + found[-1].gather(1, source), target, least))
        before, after = torch.stack(found[:-1], 1).chunk(2)
        return before, after.flip(1)

    def factors(self, before: Tensor, after: Tensor) -> Tensor:
        """Return `[N, Q, C+2]` the sum over strings with a token of each class at the queried positions.

        Args:
            before: `[N, L, S]` sums of the states before each position.
            after: `[N, L, S]` sums of the states after each position.
        """
        source, target, edge, kind = (one[:, None] for one in self.lists)
        before, after, found = self.at(before), self.at(after), []
        for begin, end in self.parts(before.shape[1]):
            both = before[:, begin:end].gather(2, source.expand(-1, end - begin, -1))
            both = both + after[:, begin:end].gather(2, target.expand_as(both))  # [N, T, E]
            each = both.gather(2, edge.expand(-1, end - begin, -1))  # [N, T, M]
            found.append(total(each, kind.expand_as(each), floor(each, len(self.edges.sizes), True)))
        return torch.cat(found, 1)

    def kinds(self, values: Tensor, goals: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return `[N, Q]` the class at each queried position of the best string, or of a drawn one.

        Args:
            values: `[N, L, C+2]` the best of each class. In a draw it includes the step's noise.
            goals: `[N, L+1, S]` as `ahead` returns it.
            noise: `[N, L, S]` noise of the state after a mask that the query does not contain. None without a draw.
        """
        taken = self._walk(values, goals, noise)
        return self._kinds(self.at(values), self.at(taken[..., None])[..., 0])

    def _walk(self, values: Tensor, goals: Tensor, noise: Tensor | None) -> Tensor:
        """Return `[N, L]` the edge at each position. See `kinds`."""
        source, target, _, _ = self.lists
        state, taken = self.state[:, None], []  # [N, 1]
        for begin, end in self.parts(values.shape[1]):
            weight = self.weights(values[:, begin:end], False)  # [N, T, E]
            follows = goals[:, begin + 1 : end + 1]
            if noise is not None:
                sizes = self.sizes.expand(len(state), 1, -1) if self.sizes.dim() == 1 else self.sizes[:, begin:end]
                unasked, even = self.unasked[:, begin:end, None], self.weights(sizes, True)  # every token is as likely
                weight = torch.where(unasked, even, weight)
                follows = follows + noise[:, begin:end] * unasked
            score = weight + follows.gather(2, target[:, None].expand(weight.shape))
            for one in score.unbind(1):
                taken.append(one.masked_fill(source != state, -torch.inf).argmax(1, keepdim=True))
                state = target.gather(1, taken[-1])
        return torch.cat(taken, 1)

    def _kinds(self, values: Tensor, taken: Tensor) -> Tensor:
        """Return `[N, Q]` the best class of the edges `taken [N, Q]` by `values [N, Q, C+2]`."""
        edge, kind = (one[:, None] for one in self.lists[2:])
        found = []
        for begin, end in self.parts(taken.shape[1]):
            each = self.moves(values[:, begin:end])
            move = each.masked_fill(edge != taken[:, begin:end, None], -torch.inf).argmax(2, keepdim=True)
            found.append(kind.expand(each.shape).gather(2, move)[..., 0])
        return torch.cat(found, 1)


def posterior(
    edges: Edges,
    logits: Tensor,
    canvas: Canvas,
    head_rows: HeadRows,
    mask_id: int | None,
    end_ids: tuple[int, ...] = (),
) -> Tensor:
    """Return `[R, V]` logits. Their softmax is the law of each token, given the decided ones and a valid string.

    The model's logits `[R, V]` get the logarithm of the weight of all strings with that token. A decided token is
    certain, a queried one has the model's law, and others are uniform. Tokens that do not fit get -inf.
    """
    lattice, (classes, weight) = Lattice.of(edges, canvas, head_rows, mask_id, end_ids), masses(edges, logits)
    mass = lattice.values(_relative(weight, weight.amax(1, keepdim=True)), lattice.sizes)
    factor = head_rows.pick(lattice.factors(*lattice.around(mass)).view(*head_rows.query.ids.shape, -1))  # [R, C+2]
    factor[:, -2:] = -torch.inf
    factor = factor - factor.amax(1, keepdim=True).clamp(min=torch.finfo(factor.dtype).min)
    # If another guide forbids all tokens that fit, tokens of a class are alike: their -inf becomes 0.
    barred = (classes + factor).amax(1, keepdim=True) == -torch.inf
    least = torch.zeros_like(barred, dtype=logits.dtype).masked_fill(~barred, -torch.inf)
    return weighted(edges, logits, least, factor.to(torch.promote_types(logits.dtype, torch.float32)))


def choose(
    edges: Edges,
    logits: Tensor,
    noisy: Tensor,
    canvas: Canvas,
    head_rows: HeadRows,
    mask_id: int | None,
    whole: Whole | None = None,
    end_ids: tuple[int, ...] = (),
) -> Tensor:
    """Return `[R]` tokens of one string for each row and candidate: the best string, or a drawn one.

    Args:
        logits: `[R, V]`.
        noisy: the same with noise. The same object if nothing is drawn.
        whole: logits and noisy logits before any guide forbade tokens. They decide if no allowed token fits.
        end_ids: the end-of-text tokens that must not come before given tokens (`Layout.given`).
    """
    lattice, tops = Lattice.of(edges, canvas, head_rows, mask_id, end_ids), Tops.of(edges, noisy)
    score = _relative(tops.classes, noisy.gather(1, tops.free[:, None]))
    full = None if whole is None else Tops.of(edges, whole[1])
    if full is not None:
        score = _instead(score, full.classes)
    # The class of the token that would be chosen freely wins a tie.
    own = edges.classes[tops.free][:, None]
    score = score.clamp(max=-TIE).scatter_(1, own, score.gather(1, own))
    values = lattice.values(score, lattice.sizes.clamp(max=0))  # 0 outside the query
    if noisy is not logits:
        _, weight = masses(edges, logits)
        chance = _relative(weight, weight.amax(1, keepdim=True))
        if whole is not None:
            chance = _instead(chance, masses(edges, whole[0])[1])
        mass = lattice.values(chance, lattice.sizes)
        own = lattice.kinds(values, lattice.ahead(mass, True), unasked(canvas, head_rows.query, lattice))
    else:
        own = lattice.kinds(values, lattice.ahead(values, False))  # [N, Q]
    kind = head_rows.pick(own.view(head_rows.query.ids.shape))
    found = tops.tokens.gather(1, kind[:, None])[:, 0]
    if full is None:
        return found
    left = tops.classes.gather(1, kind[:, None])[:, 0] > -torch.inf
    return torch.where(left, found, full.tokens.gather(1, kind[:, None])[:, 0])


def _instead(found: Tensor, full: Tensor) -> Tensor:
    """Return `[R, C+2]` values of classes. Classes that another guide excludes are ranked by `full [R, C+2]`."""
    return torch.where(found == LEAST, LEAST + _relative(full, full.amax(1, keepdim=True)), found)


def _relative(values: Tensor, top: Tensor) -> Tensor:
    """Return `[R, C+2] float64` values of classes minus the top `[R, 1]`, at least `LEAST`."""
    found = (values.double() - top.double().clamp(min=torch.finfo(torch.float64).min)).clamp(min=LEAST)
    found[:, -2:] = -torch.inf
    return found


def unasked(canvas: Canvas, query: Query, lattice: Lattice) -> Tensor:
    """Return `[N, L, S]` noise for the states after positions that the query does not contain."""
    if not isinstance(canvas.layout.noise, CounterNoise):
        raise UserError(
            "guide-incompatible",
            f"noise={type(canvas.layout.noise).__name__} does not support guides such as regex or json_schema"
            " when tokens are drawn. Remove noise or the guide.",
        )
    candidates = query.ids.shape[1]
    step = canvas.step[:, None] if query.candidates.step is None else query.candidates.step
    step = step.expand(-1, candidates).flatten()  # [N]
    seeds, answer = (one.repeat_interleave(candidates, 0) for one in (canvas.layout.seeds, canvas.answer()))
    answer = lattice.window.cut(answer)
    begin = canvas.layout.noise.begin
    answer = answer if begin is None else answer + begin.repeat_interleave(candidates, 0)[:, None]
    return token_noise(hashed(seeds, step, answer, FORMS), lattice.edges.accepts.shape[1]).double()
