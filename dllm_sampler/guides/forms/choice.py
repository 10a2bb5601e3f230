"""The joint choice: the candidates of a step are tokens of one string that the automaton accepts.

So whatever part of them a scheduler commits, the string is a witness that the rest can be completed. Letters: N = B*K
strings, one for each row and candidate; L positions of an answer; C classes of tokens; S states, the last one dead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_sampler.core import select
from dllm_sampler.core.noise import FORMS, CounterNoise, hashed, token_noise
from dllm_sampler.core.packing import Answers
from dllm_sampler.core.statistics import argmax
from dllm_sampler.core.values import Canvas, Query
from dllm_sampler.errors import UserError
from dllm_sampler.guides.forms.automaton import Automaton

LEAST = -1e6  # of a token that another guide forbids: worse than all others, better than a string that ends nowhere


@dataclass(frozen=True)
class Strings:
    """What is known of each string, and what is asked about it."""

    exists: Tensor  # [N, L] bool: the position belongs to the row
    token: Tensor  # [N, L] what stands there
    free: Tensor  # [N, L] bool: nothing stands there
    place: Tensor  # [N, Q] position of each queried column in the answer; L: none

    @staticmethod
    def of(canvas: Canvas, query: Query, mask_id: int) -> Strings:
        """One string for each candidate of each row."""
        answer = canvas.answer()  # [B, L]
        candidates, length = query.ids.shape[1], answer.shape[1]
        token, free = canvas.ids.gather(1, answer), canvas.masked.gather(1, answer)
        place = query.positions - canvas.first[:, None]
        place = torch.where((place >= 0) & (query.positions < canvas.length), place, length).clamp(max=length)

        def each(values: Tensor) -> Tensor:  # [N, ...]
            return values.repeat_interleave(candidates, 0) if candidates > 1 else values

        place, asked = each(place), query.ids.flatten(0, 1)
        token = _put(each(token), place, asked)
        return Strings(each(answer < canvas.end[:, None]), token, _put(each(free), place, asked == mask_id), place)


def _put(values: Tensor, place: Tensor, new: Tensor) -> Tensor:
    """Values `[N, L]` with `new [N, Q]` at `place [N, Q]`; L: nowhere."""
    room = torch.cat([values, values[:, :1]], 1)
    return room.scatter(1, place, new)[:, :-1]


def by_class(logits: Tensor, classes: Tensor, count: int) -> Tensor:
    """`[R, C]` the best of logits `[R, V]` in each class."""
    best = logits.new_full((len(logits), count), -torch.inf)
    return best.scatter_reduce_(1, classes.expand_as(logits), logits, "amax")


def weight_by_class(logits: Tensor, classes: Tensor, count: int) -> Tensor:
    """`[R, C] float64` the logarithm of each class's sum of exp(logits) `[R, V]`."""
    top = logits.amax(1, keepdim=True)
    weight = torch.exp(logits - top)
    total = weight.new_zeros(len(logits), count).scatter_add_(1, classes.expand_as(weight), weight)
    return (total.double().log() + top.double()).clamp(min=LEAST)


def chosen(automaton: Automaton, strings: Strings, best: Tensor, plain: Tensor, weight: Tensor | None = None) -> Tensor:
    """`[N, L]` the class at each position of the best string, or with `weight` of a drawn one.

    Args:
        best: `[N, L, C]` the best logit of each class, with the noise of the step in a draw; of no interest where a
            token stands.
        plain: `[N, L]` the class of the token that would be chosen freely, which wins a tie.
        weight: `[N, L, C]` logarithm of each class's weight in a draw; None: the best string is wanted.
    """
    count = automaton.moves.shape[1]
    stands = automaton.classes[strings.token]  # [N, L]
    other = strings.exists & ~strings.free
    fixed = other[..., None] & (stands[..., None] != select.numbers(count, best.device))  # [N, L, C]
    best = best.masked_fill(fixed, -torch.inf)
    value = best if weight is None else weight.masked_fill(fixed, -torch.inf)
    (number, length), flat = strings.exists.shape, automaton.moves.flatten()
    goal = torch.zeros(number, len(automaton.moves), dtype=best.dtype, device=best.device)
    goal = goal.masked_fill(~automaton.accepts, -torch.inf)
    ahead = [goal]  # the best, or the sum, of what may follow each state, from the back
    for at in reversed(range(length)):
        paths = value[:, at, None] + goal.index_select(1, flat).view(number, *automaton.moves.shape)  # [N, S, C]
        before = paths.amax(2) if weight is None else paths.logsumexp(2)
        before = before - before.amax(1, keepdim=True)  # where all are alike this adds 0, so that no bit changes
        goal = torch.where(strings.exists[:, at, None], before, goal)
        ahead.append(goal)
    state = torch.full((number,), automaton.start, device=best.device)
    walk = []
    for at, following in zip(range(length), ahead[-2::-1], strict=True):
        moves = automaton.moves.index_select(0, state)  # [N, C]
        score = best[:, at] + following.gather(1, moves)
        free = plain[:, at, None]
        wins = score.gather(1, free) >= score.amax(1, keepdim=True)
        pick = torch.where(wins, free, score.argmax(1, keepdim=True))
        walk.append(pick)
        state = torch.where(strings.exists[:, at], moves.gather(1, pick)[:, 0], state)
    return torch.cat(walk, 1)


def choose(
    automaton: Automaton,
    logits: Tensor,
    noisy: Tensor,
    canvas: Canvas,
    answers: Answers,
    mask_id: int,
    draws: bool,
) -> Tensor:
    """`[R]` tokens of logits `[R, V]`, in a draw with noise: those of one string for each row and candidate."""
    query, count = answers.query, automaton.moves.shape[1]
    strings = Strings.of(canvas, query, mask_id)
    shape = (*strings.token.shape, count)

    def spread(values: Tensor, rest: Tensor) -> Tensor:
        """`[N, L, ...]` values of the answers `[R, ...]`, and `rest [N, L, ...]` where none is asked."""
        there = answers.spread(torch.ones_like(answers.row))  # [B, K, Q]
        place = strings.place.masked_fill(there.flatten(0, 1) == 0, shape[1])
        index = place.view(*place.shape, *[1] * (values.dim() - 1)).expand(*place.shape, *values.shape[1:])
        room = torch.cat([rest, rest[:, :1]], 1)
        return room.scatter(1, index, answers.spread(values).flatten(0, 1))[:, :-1]

    nothing = torch.zeros(shape, dtype=torch.float64, device=logits.device)
    weight = None
    if draws:
        sizes = automaton.sizes.expand(shape)
        weight = spread(weight_by_class(logits, automaton.classes, count), sizes)
        nothing = sizes + unasked(canvas, query, count)
    tops = by_class(noisy, automaton.classes, count)  # [R, C]
    best = spread(tops.double().clamp(min=LEAST), nothing)
    free = automaton.classes[argmax(noisy)]  # [R]
    pick = chosen(automaton, strings, best, spread(free, nothing.argmax(2)), weight)
    at = torch.cat([pick, pick[:, :1]], 1).gather(1, strings.place)  # [N, Q]
    own = answers.pick(at.view(query.ids.shape))  # [R]
    # The first of the class with its best logit, also if another guide forbids them all.
    found = (noisy == tops.gather(1, own[:, None])) & (automaton.short == own.to(automaton.short.dtype)[:, None])
    return argmax(found.view(torch.uint8))


def unasked(canvas: Canvas, query: Query, count: int) -> Tensor:
    """`[N, L, C]` noise for classes at positions that no forward was asked about, where every token is as likely."""
    if not isinstance(canvas.noise, CounterNoise):
        raise UserError(f"a drawn answer of a form needs noise by position, and {type(canvas.noise).__name__} has none")
    candidates = query.ids.shape[1]
    step = canvas.step[:, None] if query.step is None else query.step
    step = step.expand(-1, candidates).flatten()  # [N]
    seeds, answer = (one.repeat_interleave(candidates, 0) for one in (canvas.row_seed, canvas.answer()))
    return token_noise(hashed(seeds, step, answer, FORMS), count).double()
