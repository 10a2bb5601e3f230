"""Elastic-Cache: against a decoder written again from the paper, its invariants, its ends, and how often it waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache as once
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_sampler import Result, Sampler
from dllm_sampler.cache.elastic import ElasticCache, ElasticPlan
from dllm_sampler.core.protocols import Cache, Denoiser, Plan
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.transformer import Layer
from dllm_sampler.schedulers.threshold import Threshold
from tests import toys
from tests.refusals import refused
from tests.sampling import crossed, each, few

TOKENS, BAR, LAYERS = 17, 0.7, 4


@once
def network(layers: int = LAYERS, shift: bool = False) -> TransformerDenoiser:
    return toys.wrapped(toys.transformer(kv_heads=2, layers=layers), shift)


def run(
    cache: Any, model: Denoiser | None = None, rows: slice = slice(None), watch: toys.Spy | None = None, **plugins: Any
) -> Result:
    given = {"scheduler": Threshold(BAR), "blocks": "full", "stop": "none", **plugins}
    sampler = Sampler(watch or model or network(), cache=cache, **given)
    return sampler.generate(toys.PROMPTS[rows], max_new_tokens=TOKENS, seed=toys.SEEDS[rows])


def same(one: Result, other: Result, *more: str) -> bool:
    return all(torch.equal(getattr(one.trace, name), getattr(other.trace, name)) for name in ("ids", "step_map", *more))


@dataclass
class Memory:
    """What one layer remembers of each column, of one row."""

    hidden: Tensor  # [L, D]
    q: Tensor  # [H, L, Dh]
    k: Tensor  # [Hkv, L, Dh]
    v: Tensor


@dataclass
class Paper:
    """One row, as the paper's procedure has it: sets of positions in Python, a layer is wide or it is not."""

    model: TransformerDenoiser
    gamma: float
    window: int
    track: int = 1
    block_caching: bool = True
    full_every: int | None = None
    layers: list[Memory] = field(default_factory=list)
    refreshed: list[int] = field(default_factory=list)  # layers per step
    windows: list[list[int]] = field(default_factory=list)
    tracks: list[set[int]] = field(default_factory=list)

    def decode(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        length, back = len(prompt) + TOKENS, int(self.model.shift)
        ids, steps = [*prompt, *[toys.MASK] * TOKENS], [-1] * TOKENS
        fresh: list[int] = []
        tracked: set[int] = set()
        step = 0
        while masks := [i for i in range(len(prompt), length) if steps[i - len(prompt)] < 0]:
            ends = [i for i in range(len(prompt), length) if ids[i] == toys.EOS]
            window = ([i for i in masks if not ends or i < ends[0]] or masks)[: self.window]
            rows = [i - back for i in (window if self.block_caching else masks)]
            whole = step == 0 or (self.full_every is not None and step % self.full_every == 0)
            columns = list(range(length)) if whole else sorted({*tracked, *fresh, *rows})
            with torch.no_grad():
                logits, tracked = self.forward(ids, columns, whole, sorted(tracked), rows, masks)
            logits[:, toys.MASK] = -torch.inf
            p = {i: logits[columns.index(i - back)].softmax(-1) for i in window}
            surest = max(window, key=lambda i: (float(p[i].max()), -i))
            fresh = [i for i in window if i == surest or p[i].max() >= BAR]
            for i in fresh:
                ids[i], steps[i - len(prompt)] = int(p[i].argmax()), step
            self.windows.append(window)
            self.tracks.append(tracked)
            step += 1
        return ids[len(prompt) :], steps

    def forward(
        self, ids: list[int], columns: list[int], whole: bool, tracked: list[int], rows: list[int], masks: list[int]
    ) -> tuple[Tensor, set[int]]:
        net, length = self.model.transformer, len(ids)
        hidden = net.embed(torch.tensor(ids))[columns]
        if not self.layers:
            c = net.config
            shapes = [(length, c.hidden_size), *[(h, length, 8) for h in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]]
            self.layers = [Memory(*(torch.zeros(s, dtype=torch.float64) for s in shapes)) for _ in net.layers]
        here, following = columns, set()
        refresh_from = 0 if whole else len(net.layers)
        for index, layer in enumerate(net.layers):
            assert isinstance(layer, Layer)
            kept = self.layers[index]
            if not whole and index == refresh_from:
                everything = kept.hidden.clone()
                everything[columns] = hidden
                hidden, here = everything, list(range(length))
            kept.hidden[here] = hidden
            before = self.attention(layer, kept, tracked)
            rope = net.rope(torch.tensor([here]), hidden.dtype)
            q, k, v = (part[0] for part in layer.qkv(hidden[None], rope))
            kept.q[:, here], kept.k[:, here], kept.v[:, here] = q, k, v
            hidden = hidden + layer.attend(q[None], kept.k[None], kept.v[None])[0]
            hidden = hidden + layer.mlp(hidden)
            if index < min(refresh_from, len(net.layers) - 1):
                now = self.attention(layer, kept, tracked)
                if self.similarity(before, now) < self.gamma:
                    refresh_from = index + 1
            mass = self.attention(layer, kept, rows).sum((0, 1))
            known = [i for i in range(length) if i not in masks]
            following |= set(sorted(known, key=lambda i: (-float(mass[i]), i))[: self.track])
        self.refreshed.append(len(net.layers) - refresh_from)
        out = net.head(net.norm(hidden))
        return (out if here == columns else out[columns]), following

    def similarity(self, before: Tensor, now: Tensor) -> Tensor:
        """Of two attention maps `[H, T, L]`: the cosine over keys."""
        return F.cosine_similarity(before, now, dim=2).mean()

    def attention(self, layer: Layer, kept: Memory, rows: list[int]) -> Tensor:
        """`[H, R, L]` by what is stored."""
        k = kept.k.repeat_interleave(kept.q.shape[0] // kept.k.shape[0], 0)
        return (kept.q[:, rows] @ k.mT * layer.head_dim**-0.5).softmax(-1)


CASES: list[dict[str, Any]] = [
    {"gamma": 0.9, "window": 4},
    {"gamma": 0.99, "window": 6},
    {"gamma": 0.6, "window": 16, "track": 3},
    {"gamma": 0.97, "window": 3, "block_caching": False},
    {"gamma": 0.9, "window": 5, "full_every": 4},
]


@pytest.mark.parametrize(("case", "shift"), crossed(CASES, [False, True], together=0))
def test_it_is_its_paper(case: dict[str, Any], shift: bool) -> None:
    decodes_as(Paper, ElasticCache(**case), case, shift)


def decodes_as(kind: type[Paper], cache: ElasticCache, case: dict[str, Any], shift: bool) -> None:
    """Each row under the cache is decoded as by the procedure in plain Python."""
    model = network(shift=shift)
    result, some = run(cache, model), set()
    for row, prompt in enumerate(toys.PROMPTS):
        paper = kind(model, **case)
        tokens, steps = paper.decode(prompt)
        assert result.trace.decoded[row].tolist() == tokens
        assert result.trace.generated[row].tolist() == steps
        some |= set(paper.refreshed[1:])
        known = set(range(len(prompt)))
        for step, tracked in enumerate(paper.tracks):
            assert tracked <= known, "a mask is tracked"
            known |= {len(prompt) + i for i, at in enumerate(steps) if at == step}
    assert len(some) > 1, "refreshes always begin at the same layer"


@dataclass
class Witness(ElasticCache):
    """Notes what each forward did."""

    notes: list[Any] = field(default_factory=list)

    def cost(self, plan: Any) -> Tensor:
        self.notes.append((self.refresh_from.clone(), plan, self.tracked.clone()))
        return super().cost(plan)


@few("gamma", [-1.0, 0.9, 2.0])
def test_what_a_forward_refreshes(gamma: float) -> None:
    """Layer 0 never refreshes, what was computed is counted, only the window is committed, masks are not tracked."""
    spy, witness = toys.Spy(network()), Witness(gamma=gamma, window=4)
    result = run(witness, watch=spy)
    total = torch.zeros(len(toys.PROMPTS), dtype=torch.long)
    for (canvas, query, _), (first, plan, tracked) in zip(spy.calls, witness.notes, strict=True):
        assert isinstance(plan, ElasticPlan)
        live = ~canvas.done
        size, seen = plan.chosen.sum(1), canvas.end
        if plan.contiguous:
            assert (first == -1).all()
            total += seen * live
        else:
            assert ((first >= 1) & (first <= LAYERS)).all()
            assert torch.equal(size[live], plan.entries[live])
            total += (-(-(size * first + seen * (LAYERS - first)) // LAYERS)) * live
            never = gamma < 0
            assert (first[live] == (LAYERS if never else 1)).all() or gamma == 0.9
        leftmost = canvas.masked & (canvas.masked.cumsum(1) <= 4)
        asked = torch.zeros_like(canvas.masked).scatter(1, query.positions, query.positions < canvas.length)
        ended = ((canvas.ids == toys.EOS) & ~canvas.masked & ~canvas.layout.frozen).any(1)
        assert torch.equal(asked[live & ~ended], leftmost[live & ~ended])
        assert (asked.sum(1)[live] <= 4).all() and query.positions.shape[1] <= 4
        assert not (tracked & canvas.masked).any() and (tracked.sum(1)[live] >= 1).all()
    assert torch.equal(result.trace.rows, total)
    spread = {tuple(first.tolist()) for first, plan, _ in witness.notes[1:]}
    assert gamma != 0.9 or len(spread) > 2


def chosen(plan: Plan) -> Tensor:
    assert isinstance(plan, ElasticPlan)
    return plan.chosen


def windowed(window: int, shift: bool, layers: int) -> list[tuple[list[int], list[int]]]:
    """No cache, the same commits: the paper's procedure with a whole forward in each step."""
    return [Paper(network(layers, shift), 0.9, window, full_every=1).decode(prompt) for prompt in toys.PROMPTS]


@pytest.mark.slow
@few("shift", [False, True])
def test_a_whole_forward_in_each_step_is_no_cache(shift: bool) -> None:
    """With a window over everything and no end of text it is the decoder without cache, token for token."""
    model = network(shift=shift)
    full = run(ElasticCache(window=99, full_every=1), model)
    for row, (tokens, steps) in enumerate(windowed(99, shift, LAYERS)):
        assert (full.trace.decoded[row].tolist(), full.trace.generated[row].tolist()) == (tokens, steps)
    none = run("none", model)
    unended = [row for row in range(len(toys.PROMPTS)) if toys.EOS not in none.trace.decoded[row].tolist()]
    assert unended
    for row in unended:
        assert torch.equal(full.trace.ids[row], none.trace.ids[row])
        assert torch.equal(full.trace.step_map[row], none.trace.step_map[row])
        assert full.trace.rows[row] == none.trace.rows[row]


@pytest.mark.slow
@few("shift", [False, True])
@few("gamma", [-1.0, 0.9, 2.0])
def test_one_layer_is_exact_whatever_gamma_is(gamma: float, shift: bool) -> None:
    result = run(ElasticCache(gamma=gamma, window=4), network(1, shift))
    for row, (tokens, steps) in enumerate(windowed(4, shift, 1)):
        assert (result.trace.decoded[row].tolist(), result.trace.generated[row].tolist()) == (tokens, steps)


@pytest.mark.slow
def test_the_window_is_inside_shorter_blocks() -> None:
    spy = toys.Spy(network())
    run(ElasticCache(window=4), watch=spy, blocks={"name": "fixed", "length": 6})
    for canvas, query, _ in spy.calls:
        inside = canvas.eligible(query.positions) | (query.positions == canvas.length)
        assert inside[~canvas.done].all()


def test_tokens_taken_back_are_computed_again() -> None:
    spy = toys.Spy(network())
    scheduler = {"name": "editing", "threshold": 0.4, "edit": 0.2, "extra": 3}
    result = run(ElasticCache(window=4), watch=spy, scheduler=scheduler)
    assert result.complete.all()
    before = spy.calls[0][0]
    for canvas, _, plan in spy.calls[1:]:
        wrote = (canvas.ids != before.ids) & ~canvas.done[:, None]
        assert not (wrote & ~chosen(plan)).any()
        before = canvas


def test_it_waits_once_per_layer_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """The declared exception to steps that never read: one truth value per layer, none once a row refreshes."""
    reads = 0
    truth = Tensor.__bool__

    def counted(self: Tensor) -> bool:
        nonlocal reads
        reads += 1
        return truth(self)

    assert ElasticCache.syncs and not Cache.syncs
    monkeypatch.setattr(Tensor, "__bool__", counted)
    for gamma, least in ((-1.0, LAYERS - 1), (2.0, 1)):
        reads = 0
        result = run(ElasticCache(gamma=gamma, window=4), rows=slice(1))
        assert reads == least * (int(result.nfe) - 1)


@each(
    ("fields", "says"),
    [
        ({"gamma": float("nan")}, "option-range: cache.gamma"),
        ({"gamma": True}, "option-range: cache.gamma"),
        ({"window": 0}, "option-range: cache.window"),
        ({"track": 1.5}, "option-range: cache.track"),
        ({"full_every": 0}, "option-range: cache.full_every"),
    ],
)
def test_bad_fields(fields: dict[str, Any], says: str) -> None:
    with refused(says):
        ElasticCache(**fields)


@each("cache", ["elastic", "d2"])
@each("scheduler", ["origin", "rcr", "remdm"])
def test_who_must_hear_of_every_mask_is_refused(scheduler: str, cache: str) -> None:
    with refused(f"cache-incompatible: scheduler={scheduler}, cache={cache}, cache=dual"):
        run(cache, scheduler=scheduler)


@pytest.mark.slow
@few(("shift", "window", "seed"), [(False, 2, 9), (True, 4, 6), (True, 2, 1)])
def test_unmoved_attention_is_no_reason_whatever_else_is_in_the_batch(shift: bool, window: int, seed: int) -> None:
    """The cosine of a map with itself is 1 or the number before it: at gamma 1 that decided which layers to refresh."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(34, (size,), generator=generator).tolist() for size in (19, 3, 11)]
    cache = {"name": "elastic", "gamma": 1.0, "window": window, "block_caching": False}
    made = Sampler(network(2, shift), cache=cache, scheduler="fixed", blocks="full", stop="none")
    batch = made.generate(prompts, max_new_tokens=12)
    for row, prompt in enumerate(prompts):
        alone = made.generate([prompt], max_new_tokens=12, seed=row)
        assert torch.equal(alone.trace.rows[0], batch.trace.rows[row])
        torch.testing.assert_close(
            alone.trace.logprob[0][alone.trace.origin :], batch.trace.logprob[row][batch.trace.origin :]
        )


@each("columns", [21, 42, 61])
@each("dtype", [torch.float64, torch.float32])
def test_columns_that_are_looked_at_alike_are_tracked_in_their_order(columns: int, dtype: torch.dtype) -> None:
    """torch sums the last columns in another order, and how many those are depends on the batch.

    End tokens are looked at alike in the first layer where their embedding is 0, as that of padding is.
    """
    cache, rows = ElasticCache(track=2), 7
    cache.refresh_from = torch.zeros(1, dtype=torch.long)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        weights = torch.rand(1, 4, rows, 1, generator=generator, dtype=dtype).repeat(1, 1, 1, columns)
        plan: Any = SimpleNamespace(
            chosen=torch.ones(1, columns + 1, dtype=torch.bool),
            known=torch.ones(1, columns + 1, dtype=torch.bool).index_fill(1, torch.tensor([0, 3, columns]), False),
            watched=torch.arange(rows)[None],
        )
        assert cache.most_attended(weights, plan).nonzero()[:, 1].tolist() == [1, 2]
