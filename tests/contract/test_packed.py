"""Packed steps: what a forward computes, whose answers are whose, and that neighbours in a pack do not matter."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dllm_sampler import Canvas, Query, Result, Sampler, config
from dllm_sampler.check.promises import check_row
from dllm_sampler.core.packing import ForwardRequest, HeadRows
from dllm_sampler.core.protocols import Guide, Plan
from dllm_sampler.core.values import Sizes, Spent
from dllm_sampler.engine.graphs import rounded
from dllm_sampler.models.denoiser import TransformerDenoiser
from tests import toys
from tests.contract import cases
from tests.sampling import sampled, sampled_rows

TOKENS = 14
RULE = {"name": "threshold", "threshold": 0.6}
DRAFTS = {"name": "freedave", "inner": RULE, "draft": 3}
SHADOWS = {"name": "wino", "threshold": 0.3, "back": 0.7, "least": 2}


# What is computed


@dataclass
class Counted(toys.Spy):
    """Counts the rows that reach the embedding and the head of the network itself, in each forward."""

    embedded: list[int] = field(default_factory=list)
    judged: list[int] = field(default_factory=list)
    charged: list[int] = field(default_factory=list)

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        self.embedded.append(0)
        hidden, spent = super().__call__(canvas, query, plan)
        self.charged.append(int(spent.computed.sum()))
        return hidden, spent

    def watch(self, network: Any) -> list[Any]:
        def embeds(module: nn.Module, given: tuple[Tensor]) -> None:
            self.embedded[-1] += given[0].numel()

        def judges(module: nn.Module, given: tuple[Tensor]) -> None:
            self.judged.append(given[0].shape[:-1].numel())

        return [network.embed.register_forward_pre_hook(embeds), network.lm_head.register_forward_pre_hook(judges)]


PAID: list[dict[str, Any]] = [
    {"cache": "none"},
    {"cache": "none", "kind": "dream"},
    {"cache": "prefix", "kind": "gqa"},
    {"cache": "dual"},
    {"cache": "dual", "kind": "dream", "stop": "truncate"},
    {"cache": "dual", "kind": "cfg"},
    {"cache": {"name": "dkv", "refresh_every": 4}},
    {"cache": {"name": "vicinity", "before": 2, "after": 3, "warmup": 1}},
    {"cache": "block_causal", "kind": "causal"},
    {"cache": "dual", "scheduler": DRAFTS},
    {"cache": "none", "scheduler": SHADOWS},
]


@pytest.mark.parametrize("plugins", PAID, ids=str)
def test_a_forward_computes_what_its_rows_need_and_no_more(plugins: dict[str, Any]) -> None:
    """The embedding sees the sum of what rows are charged for, the head what was asked; finished rows cost nothing.

    What each cache charges for is tested with that cache.
    """
    kind, plugins = plugins.get("kind", "llada"), {name: it for name, it in plugins.items() if name != "kind"}
    spy = Counted(toys.denoiser(kind))
    inner = getattr(spy.inner, "denoiser", spy.inner)
    assert isinstance(inner, TransformerDenoiser)
    hooks = spy.watch(inner.transformer)
    try:
        options = {"scheduler": RULE, "blocks": {"name": "fixed", "length": 5}, "stop": "none"} | plugins
        result = Sampler(spy, **options).generate(toys.PROMPTS, max_new_tokens=TOKENS)
    finally:
        for hook in hooks:
            hook.remove()
    assert spy.embedded == spy.charged and sum(spy.charged) == int(result.trace.rows.sum())
    for (canvas, _, plan), judged in zip(spy.calls, spy.judged, strict=True):
        assert not plan.entries[canvas.done].any()
        masks = (canvas.masked & canvas.in_block() & ~canvas.done[:, None]).sum()
        assert judged == (int(masks) if "scheduler" not in plugins else int(plan.wanted.answered.sum()))
    resting = sum(int(canvas.done.sum()) for canvas, _, _ in spy.calls)
    assert resting > 0, "rows should have ended at different times"


# Rows of a batch


def ragged(count: int) -> list[list[int]]:
    """Prompts of one to twenty tokens."""
    random = Random(0)
    return [[random.randrange(toys.EOT) for _ in range(random.randint(1, 20))] for _ in range(count)]


def drawn(name: str) -> cases.Case:
    """A case of a scheduler, which has one of the caches that serve it."""
    return Random(name).choice([case for case in cases.CASES if case.scheduler["name"] == name])


FACTS = ("causal", "chooses", "keeps_noise", "shared", "steady", "stores")  # of caches; a wrapper lacks some


def facts(name: str) -> list[tuple[str, object]]:
    """Return what the cache declares that `drawn` gives a scheduler."""
    cache = config.build("cache", drawn(name).cache)
    return [(fact, getattr(cache, fact, None)) for fact in FACTS]


@pytest.mark.parametrize("name", sampled(config.names("scheduler"), facts))
def test_a_row_among_many_is_the_row_alone(name: str) -> None:
    """Tokens, forwards, step map and positions computed, of rows that open blocks and end at different times."""
    case = drawn(name)
    prompts, seeds = ragged(32), [3 * row for row in range(32)]
    sampler = toys.sampler(case.toy, scheduler=case.scheduler, cache=case.cache, stop="prefix", temperature=0.5)
    batch = sampler.generate(prompts, max_new_tokens=TOKENS, seed=seeds)
    row = (5, 22)[len(name) % 2]
    check_row(batch, row, sampler.generate([prompts[row]], max_new_tokens=TOKENS, seed=[seeds[row]]))


# The padded form of attention, and fillers


@dataclass
class Twice(toys.Spy):
    """Computes each forward again in other sizes, of which the host knows less, and compares."""

    fillers: int = 0

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        hidden, spent = super().__call__(canvas, query, plan)
        for sizes in self.sizes(canvas, plan.wanted.sizes):
            again = plan.cache.plan(canvas, replace(plan.wanted, sizes=sizes))
            assert again.pack is not None and again.pack.sizes.rows is None
            self.fillers += len(again.pack.row) - int(plan.entries.sum())
            found, cost = self.inner(canvas, query, again)
            one, two = plan.head_rows.spread(hidden), again.head_rows.spread(found)
            torch.testing.assert_close(one, two, rtol=0, atol=1e-11)
            assert torch.equal(spent.computed, cost.computed) and torch.equal(spent.nfe, cost.nfe)
        return hidden, spent

    @staticmethod
    def sizes(canvas: Canvas, own: Sizes) -> list[Sizes]:
        """As large as the step needs, as recorded steps have them, and much too large."""
        up = rounded(canvas, own)
        more = {"computed": 2 * own.computed + 3, "head_rows": 2 * own.head_rows + 1, "longest": own.longest + 7}
        return [own._replace(rows=None), up._replace(queries=own.queries), own._replace(rows=None, **more)]


TWICE: list[tuple[str, str, Any]] = [
    ("llada", "none", RULE),
    ("gqa", "dual", RULE),
    ("dream", "prefix", RULE),
    ("dream", "trailing", {"name": "leftright", "max_lookahead": 4}),  # hides columns
    ("cfg", "dual", RULE),
    ("causal", "none", RULE),
    ("causal", "block_causal", RULE),
    ("llada", "none", DRAFTS),
    ("gqa", "dual", DRAFTS),
    ("cfg", "prefix", DRAFTS),
    ("causal", "block_causal", DRAFTS),
    ("llada", "none", SHADOWS),
    ("dream", "none", SHADOWS),
    ("cfg", "none", SHADOWS),
    ("causal", "none", SHADOWS),
]


@pytest.mark.parametrize(("kind", "cache", "scheduler"), sampled_rows(TWICE))
def test_padded_attention_and_fillers_change_nothing(kind: str, cache: str, scheduler: Any) -> None:
    spy = Twice(toys.denoiser(kind))
    options: dict[str, Any] = {"scheduler": scheduler, "cache": cache, "stop": "prefix"}
    Sampler(spy, blocks={"name": "fixed", "length": 5}, **options).generate(toys.PROMPTS, max_new_tokens=12)
    assert spy.fillers > 100


# Whose answers are whose


@pytest.mark.parametrize("seed", range(6))
def test_answers_know_row_candidate_and_position(seed: int) -> None:
    """In exact sizes, in larger ones, and where there seem to be as many answers as places."""
    draw = torch.Generator().manual_seed(seed)
    batch, many, width, length = 3, 1 + seed % 3, 4, 9
    canvas = toys.canvas(torch.ones(batch, length, dtype=torch.bool))
    positions = torch.rand(batch, length, generator=draw).argsort(1)[:, :width].sort(1).values
    ids = torch.randint(9, (batch, many, width), generator=draw)
    asked = torch.rand(ids.shape, generator=draw) < (1.0 if seed == 5 else 0.6)
    request = ForwardRequest(Query(positions, ids), canvas.masked, asked)
    values = torch.randn(*ids.shape, 2, generator=draw)
    exact = int(asked.sum())
    known = ((length, length),) * batch
    for size, rows in ((exact, known), (exact, None), (exact + 2, None), (ids.numel(), None)):
        head_rows = HeadRows.of(replace(request, sizes=request.sizes._replace(head_rows=size, rows=rows)))
        assert torch.equal(head_rows.spread(head_rows.pick(values)), values * asked[..., None])
        places = asked.nonzero()
        for place, of in enumerate((head_rows.row, head_rows.candidate)):
            assert torch.equal(of[:exact], places[:, place])
        assert torch.equal(head_rows.position[:exact], positions[places[:, 0], places[:, 2]])
        assert len(head_rows.row) == size


@dataclass(frozen=True)
class Wish(Guide):
    """Wants a token for each position of each row, whatever the model says."""

    shapes: list[tuple[int, int]] = field(default_factory=list)

    def __call__(self, logits: Tensor, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        self.shapes.append(tuple(logits.shape))  # pyright: ignore[reportArgumentType]
        token = wished(head_rows.row, head_rows.position)
        return logits.scatter(1, token[:, None], 99.0)


def wished(row: Tensor, place: Tensor) -> Tensor:
    return (5 * row + 7 * place) % toys.EOT


@pytest.mark.parametrize(("kind", "cache", "scheduler"), sampled_rows(TWICE[::2]))
def test_guides_know_whose_logits_they_get(kind: str, cache: str, scheduler: Any) -> None:
    spy, wish = toys.Spy(toys.denoiser(kind)), Wish()
    sampler = Sampler(spy, scheduler=scheduler, cache=cache, stop="none", guide=[wish])
    result: Result = sampler.generate(toys.PROMPTS, max_new_tokens=12)
    lengths = torch.tensor([len(prompt) for prompt in toys.PROMPTS])[:, None]
    row = torch.arange(len(lengths))[:, None]
    assert torch.equal(result.tokens, wished(row, lengths + torch.arange(12)))
    assert wish.shapes == [(int(plan.wanted.answered.sum()), toys.VOCAB) for _, _, plan in spy.calls]
