"""`BlockRule` for an engine whose batch of requests may change in every forward.

A round is one forward and its decision. Letters: B rows of a round, W positions of a block, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, groupby
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dllm_sampler import config
from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.core.protocols import Carry, Context, Guide
from dllm_sampler.engine.tree import map_leaves
from dllm_sampler.errors import UserError
from dllm_sampler.guides.forms.regular import Form
from dllm_sampler.integrations.block import BlockRule, BlockState, check_text
from dllm_sampler.integrations.block import model as spec_of
from dllm_sampler.integrations.forms import of_text
from dllm_sampler.integrations.settings import CPU, Sampling, Settings
from dllm_sampler.kernels.backend import select

State = TypeVar("State")

RULES = 256  # most cached rules, one for each combination of sampling settings
DEVICES = 4  # most devices with bound guides


@dataclass
class Rows:
    """The state of rows that were in one round, or that opened their blocks together."""

    frozen: Tensor  # [B, W] bool
    seed: Tensor  # [B]
    step: Tensor  # [B] forwards in earlier blocks
    before: list[Sequence[int]]  # tokens of each answer in earlier blocks, if a guide judges its form
    state: BlockState | None = None  # None: before the first forward

    def of(self, places: Sequence[int], ids: Tensor, rule: BlockRule) -> BlockState:
        """Return the state of the rows number `places`, whose blocks are `ids [n, W]`."""
        every = range(len(self.seed))
        at = None if list(places) == list(every) else torch.tensor(places, device=ids.device)
        if self.state is not None:
            return self.state if at is None else taken(self.state, at)
        frozen, seed, step = (one if at is None else one[at] for one in (self.frozen, self.seed, self.step))
        before = [self.before[place] for place in places]
        state = rule.open(ids, (ids == rule.spec.mask_id) & ~frozen, frozen, before)
        return replace(state, canvas=replace(state.canvas, step=step).with_layout(seeds=seed))


@dataclass
class Row:
    """A request while one of its blocks is decoded."""

    rows: Rows
    place: int  # number in `rows`
    sampling: Sampling
    over: bool  # its block is complete
    lost: bool = False  # its block cannot be completed


class Model(NamedTuple):
    """Facts about the model, taken from a request."""

    vocab_size: int
    ends: tuple[int, ...] = ()  # end-of-text tokens of the engine, the model's own first
    tokenizer: Any = None


class Answer(NamedTuple):
    """The state of an answer when one of its blocks opens."""

    seed: int
    sampling: Sampling = Sampling()
    made: int = 0  # forwards in earlier blocks
    before: Sequence[int] = ()  # tokens in earlier blocks, if a guide judges the form
    known: bool = True  # the engine has validated the request


class Verdict(NamedTuple):
    """The outcome of a round."""

    ids: Tensor  # [B, W]
    settled: list[bool]  # the forward saw the final tokens of the block, or the row is lost
    failed: list[int]  # rows with NaN or infinite logits in this round
    endless: list[int]  # rows with masks after the most forwards of a block. These are lost
    made: dict[int, int]  # forwards of each row whose block is now complete, in earlier blocks, too


@dataclass
class Serving:
    """A decider over the blocks of requests.

    Args:
        settings: the engine's settings.
        length: W, positions of a block.
        mask_id: the mask token.
    """

    settings: Settings
    length: int
    mask_id: int
    steps: int = field(init=False)  # most forwards of a block, with the one that sees its final tokens
    fixed: bool = field(init=False)  # the settings choose how tokens are drawn, not the requests
    formed: bool = field(init=False)  # a guide judges the form of answers
    asks: bool = field(init=False)  # a request must be validated before its blocks open
    model: Model = field(init=False, default=Model(1))

    def __post_init__(self) -> None:
        rule = self.settings.checked(self.length)
        self.steps = rule.plugins.bound(self.length) + 1
        self.fixed = self.settings.fixes(rule)
        self.formed, self.asks = rule.form is not None, rule.form is not None or rule.ends
        self._rule, self._guides = lru_cache(RULES)(self._make), lru_cache(DEVICES)(self._bound)

    def obstacle(self, sampling: Sampling, model: Model) -> str | None:
        """Return the reason that a request cannot be served. Returns None if it can, and stores `model`."""
        try:
            self._rule(sampling, model, model.vocab_size, CPU, torch.float32)
            self.model = model
        except UserError as error:
            return str(error)
        return None

    def open(self, ids: Tensor, frozen: Tensor, answers: Sequence[Answer]) -> list[Row]:
        """Return the rows of new blocks, before their first forward.

        Args:
            ids: `[B, W] int64` tokens of the blocks.
            frozen: `[B, W] bool` positions of the prompt.
            answers: the answer so far of each row.
        """
        seed = torch.tensor([one.seed for one in answers], device=ids.device)
        step = torch.tensor([one.made for one in answers], device=ids.device)
        rows = Rows(frozen, seed, step, [one.before for one in answers])
        over = ((ids != self.mask_id) | frozen).all(1).tolist()
        lost = [self.asks and not (done or one.known) for done, one in zip(over, answers, strict=True)]
        return [
            Row(rows, place, one.sampling, done or gone, gone)
            for place, (one, done, gone) in enumerate(zip(answers, over, lost, strict=True))
        ]

    @torch.inference_mode()
    def step(self, rows: Sequence[Row], ids: Tensor, logits: Tensor, first: Tensor) -> Verdict:
        """Decide over the blocks of a round, and store the new state in `rows`. The device is read once.

        Args:
            rows: requests in the order of the batch.
            ids: `[B, W] int64` tokens that the forward saw.
            logits: `[B, W, V]` logits, which are overwritten.
            first: `[B] int64` column at which each block begins.
        """
        groups: dict[Sampling, list[int]] = {}
        for place, row in enumerate(rows):
            if not row.over:
                groups.setdefault(row.sampling, []).append(place)
        found = []
        for sampling, places in groups.items():
            at = None if len(places) == len(rows) else torch.tensor(places, device=ids.device)
            mine, seen, start = (one if at is None else one.index_select(0, at) for one in (ids, logits, first))
            rule = self._rule(sampling, self.model, logits.shape[2], logits.device, logits.dtype)
            state = self._state([rows[place] for place in places], mine, rule)
            decision, after = rule.decide(state, mine, seen, start, state.canvas.step, state.canvas.layout.seeds)
            after = replace(after, carry=_apart(after.carry, logits))
            together = Rows(state.canvas.layout.frozen[:, :-1], state.canvas.layout.seeds, after.canvas.step, [], after)
            for number, place in enumerate(places):
                rows[place].rows, rows[place].place = together, number
            ids = decision.ids if at is None else ids.index_copy(0, at, decision.ids)
            endless = (state.canvas.age + 1 >= self.steps) & ~decision.settled
            found.append(torch.stack([decision.settled, decision.failed, endless, after.canvas.step]))
        verdict = Verdict(ids, [row.over for row in rows], [], [], {})
        read = torch.cat(found, 1).tolist() if found else [[]] * 4
        for place, over, failed, endless, made in zip(chain(*groups.values()), *read, strict=True):
            rows[place].lost = failed or endless
            rows[place].over = verdict.settled[place] = over or rows[place].lost
            verdict.failed.extend([place] * failed)
            verdict.endless.extend([place] * (endless and not failed))
            verdict.made.update({place: made} if over else {})
        return verdict._replace(ids=ids)

    def marked(self, rows: Sequence[Row], ids: Tensor, token: int) -> Tensor:
        """Return `ids [B, W]` with `token` at the masks of lost rows."""
        for place, row in enumerate(rows):
            if row.lost:
                left = (ids[place] == self.mask_id) & ~row.rows.frozen[row.place]
                ids = torch.cat([ids[:place], ids[place].masked_fill(left, token)[None], ids[place + 1 :]])
        return ids

    def _state(self, rows: Sequence[Row], ids: Tensor, rule: BlockRule) -> BlockState:
        """Return the state of some rows together. It is not copied if these are the rows of the last round in order."""
        parts, begin = [], 0
        for _, run in groupby(rows, lambda row: id(row.rows)):
            some = list(run)
            places = [row.place for row in some]
            parts.append(some[0].rows.of(places, ids[begin : begin + len(some)], rule))
            begin += len(some)
        return stacked(parts)

    def _make(
        self, sampling: Sampling, model: Model, vocab_size: int, device: torch.device, dtype: torch.dtype
    ) -> BlockRule:
        chosen = self.settings.sampling if self.fixed else sampling
        guides = self._guides(model, vocab_size, device)
        # A request that is too short for the form gets the beginning of a longer answer, which the engine cuts.
        least = max((one.automata[0].shortest for one in guides if isinstance(one, Form)), default=None)
        return self.settings.rule(
            self.length,
            self.mask_id,
            chosen._replace(length=None if least is None else max(least, sampling.length or 0)),
            vocab_size=vocab_size,
            ends=_within(model.ends, vocab_size),
            device=device,
            kernels=select("auto", device, dtype),
            guides=guides,
            tokenizer=model.tokenizer,
        )

    def _bound(self, model: Model, vocab_size: int, device: torch.device) -> tuple[Guide, ...]:
        """Return the guides. One that judges forms is bound here, since that is slow and rules share it."""
        guides = config.build("guide", self.settings.guide)
        if not self.formed:
            return guides
        spec = spec_of(vocab_size, self.mask_id, _within(model.ends, vocab_size), self.length, device)
        context = Context(spec, FixedBlocks(self.length), tokenizer=model.tokenizer)
        check_text(spec, guides, model.tokenizer)
        return tuple(one.bind(context) if of_text(one) else one for one in guides)


def _within(ends: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Return the end-of-text tokens within the vocabulary of the logits. A tokenizer may have more tokens."""
    return tuple(end for end in ends if end < vocab_size)


def _apart(carry: Carry, logits: Tensor) -> Carry:
    """Return a scheduler's state without memory of `logits`, which the engine's next forward overwrites."""
    return map_leaves(carry, lambda _, leaf: leaf.clone() if _memory(leaf) == _memory(logits) else leaf, "")


def _memory(leaf: Any) -> int | None:
    """Return the address of a tensor's memory, or None for other values."""
    return leaf.untyped_storage().data_ptr() if isinstance(leaf, Tensor) else None


def taken(state: State, rows: Tensor) -> State:
    """Return the state of only the rows `rows [n]`."""
    return map_leaves(state, lambda _, leaf: leaf.index_select(0, rows) if isinstance(leaf, Tensor) else leaf, "")


def stacked(states: Sequence[State]) -> State:
    """Return the state of all rows of `states`, which may differ in age.

    Before the first forward of a block a scheduler's tensors may have fewer columns than later. They are then expanded,
    since their values do not matter yet.
    """
    if len(states) == 1:
        return states[0]
    found: list[dict[str, Any]] = [{} for _ in states]
    for state, leaves in zip(states, found, strict=True):
        map_leaves(state, leaves.__setitem__, "")

    def visit(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaves = [own for one in found if isinstance(own := one.get(path), Tensor)]
        if len(leaves) < len(found):
            return None
        shape = [max(sizes) for sizes in zip(*(one.shape[1:] for one in leaves), strict=True)]
        return torch.cat([one.expand(-1, *shape) for one in leaves])

    return map_leaves(states[0], visit, "")
