"""What a scheduler says of itself is true, and a scheduler around it hands it on."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler import Canvas, Context, Query, Scheduler, Traits, UserError, config, published, schedulers
from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.store_pass import StorePass
from dllm_sampler.check.promises import Aged, Asked, Scrambled
from dllm_sampler.core.around import Around, AroundWithState
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.packing import ForwardRequest
from dllm_sampler.core.protocols import Carry, Guide, Paced, Planner, Tempered
from dllm_sampler.core.spec import (
    BlocksOpenedAhead,
    ChangingLength,
    PlannedCommits,
    RareTrait,
    SoftInputs,
    UniformNoise,
)
from dllm_sampler.core.values import Edit, Readout
from dllm_sampler.engine import layout
from dllm_sampler.guides import Temperature
from dllm_sampler.particles.steering import Predicting
from dllm_sampler.published import (
    FirstFromRefresh,
    ForcedFirst,
    HidesPads,
    LeavesAtEnd,
    PublishedFreeDave,
    PublishedRhoEos,
    SeededBlocks,
    SeededContext,
    StaleMasks,
    Unrolled,
)
from dllm_sampler.published.particles import MaskChoices
from dllm_sampler.schedulers.daedal import Daedal
from dllm_sampler.schedulers.drafting.scheduler import Drafting
from dllm_sampler.schedulers.eoser import Eoser
from dllm_sampler.schedulers.freedave import FreeDave
from dllm_sampler.schedulers.lengthening import Lengthening
from dllm_sampler.schedulers.lopa import LoPA
from dllm_sampler.schedulers.random_order import RandomOrder
from dllm_sampler.schedulers.rho_eos import RhoEos
from dllm_sampler.schedulers.ssd import SelfSpeculative
from dllm_sampler.schedulers.svdd import SoftValueGuided
from dllm_sampler.schedulers.threshold import Threshold
from tests import conformance, toys
from tests.conformance.freedave import Noted, PublishedEager
from tests.conformance.lopa import Rounds
from tests.conformance.particles import NotedCommits
from tests.conformance.unmasking import AmongTop
from tests.contract.cases import Settings, one_each, toy_for


class Filling(SoftValueGuided):
    """SVDD with `value=fill`, which looks ahead."""


WRAPPERS: dict[type[Around], Callable[[Scheduler], Around]] = {
    AmongTop: AmongTop,
    Daedal: Daedal,
    Eoser: Eoser,
    FirstFromRefresh: FirstFromRefresh,
    ForcedFirst: ForcedFirst,
    FreeDave: FreeDave,
    Lengthening: Lengthening,
    PublishedFreeDave: PublishedFreeDave,
    HidesPads: HidesPads,
    LoPA: LoPA,
    LeavesAtEnd: LeavesAtEnd,
    MaskChoices: MaskChoices,
    Noted: Noted,
    NotedCommits: NotedCommits,
    Predicting: Predicting,
    Rounds: Rounds,
    PublishedEager: lambda inner: PublishedEager(
        inner, draft=2, block=6, threshold=None, mask_id=toys.MASK, forced=False
    ),
    RhoEos: RhoEos,
    PublishedRhoEos: PublishedRhoEos,
    SelfSpeculative: SelfSpeculative,
    SoftValueGuided: lambda inner: SoftValueGuided(inner, reward=toys.reward, value="masked"),
    Filling: lambda inner: Filling(inner, reward=toys.reward),
    SeededBlocks: SeededBlocks,
    SeededContext: SeededContext,
    StaleMasks: StaleMasks,
    StorePass: StorePass,
    Unrolled: Unrolled,
    Drafting: Drafting,
}

OWN: dict[type[Around], dict[str, object]] = {
    Eoser: {"scope": "answer"},  # a factor by the progress of the answer, unless the scheduler inside needs even more
    Lengthening: {
        "asks_block": False,  # it asks about the whole answer
        "scope": "model",  # the end of the answer stands outside of the block
    },
    ForcedFirst: {"needs_every_position": True},  # the block's first position must be predicted
    SeededBlocks: {"needs_every_position": True, "asks_block": False},  # a block's first position is a step by itself
    StorePass: {"asks_block": False},  # forwards that only store ask nothing
    Drafting: {
        "asks_block": False,  # it asks about drafts, and over the end of the block
        "drafts": True,
        "scheduled": True,  # it counts steps in the block
        "scope": "model",  # several states in one forward
    },
    SoftValueGuided: {
        "graph_safe": False,  # a reward reads the device
        "asks_block": False,  # steps that are only looked at would be judged
        "draws_order": True,  # it draws several steps, and takes one of them
        "scope": "model",  # a reward judges whole answers
    },
    LoPA: {
        "asks_block": False,  # it asks about forks
        "drafts": True,
        "own_tokens": True,  # a fork's token comes from the step before
        "scope": "model",  # several canvases in one forward
    },
    Filling: {"drafts": True, "scheduled": True},  # it asks about candidates, and commits them a forward later
    PublishedEager: {"asks_block": False},  # it decodes by a rule of its own
}

# Rare traits that a wrapper adds, and those that it does not hand on.
ADDED: dict[type[Around], RareTrait] = {Lengthening: ChangingLength(64)}
DROPPED: dict[type[Around], type[RareTrait]] = {
    Lengthening: PlannedCommits,  # the forward says what is inserted
    SeededBlocks: PlannedCommits,  # a block's first position is a step by itself
    Drafting: PlannedCommits,  # a forward may commit more than the inner scheduler's next step
    SoftValueGuided: UniformNoise,  # masks are told apart by their token
    LoPA: PlannedCommits,  # which one goes on is not known
    Filling: PlannedCommits,  # it commits candidates a forward later
    PublishedEager: PlannedCommits,  # it decodes by a rule of its own
}

OWN_INPUTS = {"OwnInputs", "ShadowRows", "SoftInputs"}
REFUSED: dict[type[Around], set[str]] = {
    # It scales confidences, which must count, before anybody drafts by them or measures an answer's length.
    Eoser: {"drafts", "ranks_by_confidence", "ChangingLength"},
    # Columns move under what it knows of them; counts over an answer have no meaning before its end is known.
    Lengthening: {"drafts", "revises", "ChangingLength", "HiddenMasks", "scope"},
    Drafting: OWN_INPUTS | {"drafts", "revises", "asks_block", "ChangingLength"},  # it looks ahead at fewer masks
    LoPA: OWN_INPUTS | {"drafts", "revises", "asks_block", "ChangingLength"},  # it asks about forks of its own
    SoftValueGuided: {"drafts", "graph_safe"},  # each step is taken several times
    Filling: OWN_INPUTS | {"revises", "asks_block"},  # candidates fill a block further and further
}

# One asks and commits without the inner scheduler, the others are no methods.
ALONE = {PublishedEager, Drafting, Lengthening}
CLOCKS = {FreeDave, Noted, PublishedFreeDave}  # they bound their own drafts

wrappers = pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda one: one.__name__)


def inherited(table: Mapping[type[Around], Any], wrapper: type[Around]) -> Iterator[Any]:
    """The entries for a wrapper and for the classes it extends, these first."""
    return (table[one] for one in reversed(wrapper.__mro__) if one in table)


def subclasses(kind: type) -> Iterator[type]:
    for one in kind.__subclasses__():
        yield one
        yield from subclasses(one)


def other(field: Any) -> Any:
    """Another value than the default."""
    if isinstance(field.default, bool):
        return not field.default
    return {"asks": "window", "scope": "model"}.get(field.name, 6)


@dataclass(frozen=True)
class Facts(Scheduler):
    """Says of itself what it is told to."""

    given: Traits

    @property
    def traits(self) -> Traits:
        return self.given


def test_every_wrapper_is_checked() -> None:
    packages = {package.__name__: package for package in (schedulers, conformance, published)}
    for package in packages.values():
        for module in pkgutil.iter_modules(package.__path__):
            if module.name != "__main__" and not module.name.startswith("test_"):
                importlib.import_module(f"{package.__name__}.{module.name}")
    found = {one for one in subclasses(Around) if one.__module__.startswith(("dllm_sampler", *packages))}
    # By these the check looks at traits.
    assert found - {AroundWithState, Aged, Asked, Scrambled} == set(WRAPPERS) - {Filling}


@wrappers
def test_every_trait_is_handed_on_unless_the_wrapper_has_its_own(
    wrapper: type[Around], subtests: pytest.Subtests
) -> None:
    common = {one.name: replace(Traits(), **{one.name: other(one)}) for one in fields(Traits) if one.name != "rare"}
    rare = {kind.__name__: Traits(rare=(kind(*[6] * len(fields(kind))),)) for kind in subclasses(RareTrait)}
    for name, given in {**common, **rare}.items():
        with subtests.test(name):
            inner = Facts(given)
            if any(name in names for names in inherited(REFUSED, wrapper)):
                with pytest.raises(UserError):
                    WRAPPERS[wrapper](inner)
                continue
            own = {name: value for entry in inherited(OWN, wrapper) for name, value in entry.items()}
            if name == "scope":
                own["scope"] = "model"
            wanted = replace(inner.traits, **own).without(*inherited(DROPPED, wrapper))
            assert WRAPPERS[wrapper](inner).traits == wanted.adding(*inherited(ADDED, wrapper))


def test_only_eager_drafts_open_a_block_ahead() -> None:
    assert FreeDave(Threshold(), eager=True).traits.has(BlocksOpenedAhead)
    assert not FreeDave(Threshold()).traits.has(BlocksOpenedAhead)


@dataclass(frozen=True)
class Able(Threshold):
    """Can do all that a scheduler may, and answers by its carry."""

    def init(self, canvas: Canvas) -> Carry:
        return torch.full_like(canvas.start, 7)

    def ask(self, canvas: Canvas, carry: Tensor) -> Query:
        assert carry.tolist() == [7] * len(canvas.ids)
        return super().ask(canvas, carry)

    def ahead(self, canvas: Canvas, carry: Tensor) -> Tensor:
        return canvas.masked * carry[:, None]

    def with_candidates(self, most: int) -> Scheduler:
        return self

    def pace(self, made: ForwardRequest, seconds: float) -> int:
        return 3

    def guides(self, given: tuple[Guide, ...]) -> tuple[Guide, ...]:
        return (*given, Temperature(0.5))


def begun(scheduler: Scheduler, draws: bool = False) -> tuple[Any, Canvas, Carry]:
    """A bound scheduler, a canvas of a block-causal model before the first step, and the carry."""
    spec, blocks = toys.denoiser("causal").spec, FixedBlocks(6)
    context = Context(spec, blocks.bind(Context(spec, blocks)), (Temperature(),) if draws else ())
    bound = scheduler.bind(context)
    canvas = layout.canvas(toys.PROMPTS, 17, toys.SEEDS, spec, context.blocks, CounterNoise(), False)
    return bound, canvas, bound.init(canvas)


@wrappers
def test_what_few_schedulers_can_do_is_handed_on(wrapper: type[Around]) -> None:
    bound, canvas, carry = begun(WRAPPERS[wrapper](Able()))
    if wrapper not in ALONE:
        bound.ask(canvas, carry)
    if PlannedCommits not in inherited(DROPPED, wrapper):
        idle = (canvas.layout.first >= 6) & (wrapper is StorePass)  # first a forward that stores the prompt
        assert torch.equal(bound.ahead(canvas, carry), 7 * (canvas.masked & ~idle[:, None]))
    query = Query.masks(canvas)
    made = ForwardRequest.of(query, canvas.masked, canvas.masked)
    assert bound.pace(made, 1.0) == (None if wrapper in CLOCKS else 3)
    assert bound.guides((Temperature(2.0),)) == (Temperature(2.0), Temperature(0.5))


@wrappers
def test_what_the_inner_scheduler_cannot_do_a_wrapper_does_not_make_up(wrapper: type[Around]) -> None:
    bound, canvas, carry = begun(
        WRAPPERS[wrapper](Threshold()), draws=issubclass(wrapper, SoftValueGuided)
    )  # without, it refuses
    made = ForwardRequest.of(Query.masks(canvas), canvas.masked, canvas.masked)
    assert isinstance(bound, Planner) and bound.ahead(canvas, carry) is None
    assert isinstance(bound, Paced) and bound.pace(made, 1.0) is None
    assert isinstance(bound, Tempered) and bound.guides((Temperature(2.0),)) == (Temperature(2.0),)


def test_branches_get_noise_of_their_own_where_the_inner_scheduler_draws() -> None:
    assert begun(FreeDave(Able()))[0].draws and not begun(FreeDave(Threshold()))[0].draws


@pytest.mark.parametrize("kind", ["llada", "dream"])
def test_a_wrapper_with_a_carry_of_its_own_plans(kind: str) -> None:
    unrolled = Unrolled(RandomOrder(7), tpf=2)
    caches: list[Any] = ["none", {"name": "dkv_greedy", "refresh_every": 1}, "dkv_greedy"]
    none, exact, greedy = (
        toys.sampler(kind, scheduler=unrolled, cache=cache).generate(toys.PROMPTS, max_new_tokens=17, seed=toys.SEEDS)
        for cache in caches
    )
    assert torch.equal(none.trace.generated, exact.trace.generated) and torch.equal(none.tokens, exact.tokens)
    # The order is drawn: tokens of an approximate cache may differ, the step of each position does not.
    assert torch.equal(none.trace.step_map, greedy.trace.step_map)
    assert bool((greedy.trace.rows < none.trace.rows).all())


@dataclass(frozen=True)
class Watched(Around):
    """Compares what is asked with the default query."""

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        default = Query.masks(canvas) if self.traits.asks == "masks" else Query.window(canvas)
        asked, wanted = (torch.zeros_like(canvas.masked).scatter(1, at.positions, True) for at in (query, default))
        assert torch.equal(asked[:, :-1] & ~canvas.done[:, None], wanted[:, :-1] & ~canvas.done[:, None])
        assert query.ids.shape[1] == 1 and query.limit is None and not (query.keeps_positions or query.leave_one_out)
        assert (query.mixture is None) != self.traits.has(SoftInputs)
        return self.inner.tell(canvas, query, readout, carry)


@pytest.mark.parametrize("scheduler", one_each("scheduler"))
def test_a_scheduler_that_says_so_asks_for_the_block(scheduler: Settings) -> None:
    inner = config.build("scheduler", scheduler)
    if not inner.traits.asks_block:
        with pytest.raises(UserError):
            FreeDave(inner)
        return
    toys.sampler(toy_for(scheduler), scheduler=Watched(inner)).generate(toys.PROMPTS, max_new_tokens=17, seed=3)
