"""Soft inputs: mixtures of embeddings, the schedulers that ask for them, and which caches serve these."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dllm_sampler import Canvas, Edit, Query, Readout, Sampler, UserError
from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import Mixture
from dllm_sampler.integrations.block import unsupported_trait
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.soft import TINY, mixed
from dllm_sampler.models.transformer import Transformer
from dllm_sampler.result import Result
from dllm_sampler.schedulers.dmax import SURE, SoftParallel
from dllm_sampler.schedulers.remix import RejectionMixing
from dllm_sampler.schedulers.wino import Wino
from tests import toys
from tests.refusals import refused
from tests.sampling import each, few
from tests.scripted import BLOCK, PROMPTS, TOKENS, history, run, same, same_answers

DMAX, REMIX = SoftParallel(0.3), RejectionMixing(0.4, divergence=0.2)
RULES = pytest.mark.parametrize("rule", [DMAX, REMIX], ids=["dmax", "remix"])


class Resting(SoftParallel):
    """Leaves a block after a forward that saw it full, with soft tokens, and changed nothing."""

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, carry = super().tell(canvas, query, readout, carry)
        open_ = canvas.eligible(query.positions).any(1)
        return replace(edit, commit=edit.commit & open_[:, None], keep_block=open_), carry


def watched(rule: Any, kind: str = "llada", **plugins: Any) -> tuple[toys.Spy, Result]:
    """The calls of a run, and what it gave."""
    spy = toys.Spy(toys.denoiser(kind))
    given = {"blocks": FixedBlocks(BLOCK), "stop": "none", **plugins}
    return spy, Sampler(spy, scheduler=rule, **given).generate(PROMPTS, max_new_tokens=TOKENS)


def soft(query: Query, columns: int) -> Tensor:
    """`[B, L+1] bool` columns that were mixtures."""
    assert query.mixture is not None
    found = torch.zeros(len(query.positions), columns, dtype=torch.bool)
    return found.scatter(1, query.positions, query.mixture.where & (query.positions < columns - 1))


def laws(logits: Tensor) -> Tensor:
    """`[B, Q, V]` probabilities of logits `[B, 1, Q, V]`, in which no answer has the mask token."""
    return logits[:, 0].index_fill(-1, torch.tensor([toys.MASK]), -torch.inf).softmax(-1)


# Mixtures

WEIGHT = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.6, 0.8], [1.0, 1.0]], dtype=torch.float64)
MASK = 2


def blend(ids: list[int], weights: list[float], keep_norm: bool) -> Tensor:
    mixture = Mixture(torch.tensor([[ids]]), torch.tensor([[weights]]), torch.tensor([[True]]), keep_norm)
    embed = nn.Embedding.from_pretrained(WEIGHT)
    hidden = embed(torch.tensor([[3, 3]]))
    made = mixed(mixture, torch.tensor([1, 0]), MASK, hidden, embed)[0]
    assert torch.equal(made[0], WEIGHT[3]), "a token stays what it is"
    return made[1].detach()


def test_the_mask_has_the_rest() -> None:
    plain = blend([0, 1], [0.5, 0.25], False)
    torch.testing.assert_close(plain, 0.5 * WEIGHT[0] + 0.25 * WEIGHT[1] + 0.25 * WEIGHT[MASK])
    norm = 0.5 * 3 + 0.25 * 4 + 0.25 * 1
    torch.testing.assert_close(blend([0, 1], [0.5, 0.25], True), plain * norm / (plain.norm() + TINY))


@each("keep_norm", [True, False])
def test_a_mixture_of_one_is_that_one(keep_norm: bool) -> None:
    shrunk = [norm / (norm + TINY) if keep_norm else 1.0 for norm in (4.0, 1.0)]
    torch.testing.assert_close(blend([1], [1.0], keep_norm), WEIGHT[1] * shrunk[0])
    torch.testing.assert_close(blend([1], [0.0], keep_norm), WEIGHT[MASK] * shrunk[1])


def test_a_query_takes_its_mixture_along() -> None:
    spy, _ = watched(DMAX)
    canvas, query, _ = spy.calls[2]
    mixture = query.mixture
    assert mixture is not None and mixture.where.any()
    kept = torch.zeros_like(canvas.masked).scatter(1, query.positions[:, 1::2], True)
    fewer = query.drop(canvas, kept)
    more = fewer.join(canvas, canvas.in_block(), query.positions.shape[1] + 2).trim(query.positions.shape[1])
    columns = canvas.length + 1
    assert torch.equal(soft(fewer, columns), soft(query, columns) & kept)
    assert torch.equal(soft(more, columns), soft(query, columns) & kept)
    at, found = torch.searchsorted(more.positions, query.positions), more.mixture
    assert found is not None
    chosen = found.where.gather(1, at) & mixture.where
    assert torch.equal(found.ids.gather(1, at[..., None])[chosen], mixture.ids[chosen])
    assert torch.equal(found.weights.gather(1, at[..., None])[chosen], mixture.weights[chosen])


# What a forward sees

CACHES = ["none", "dual", "prefix", "block_causal", {"name": "block_causal", "store_pass": "separate"}, "d2f"]
CACHES += [{"name": "dpad", "inner": "dual", "window": 6}, {"name": "periodic_dual", "every": None}]


@few("kind", ["llada", "fast", "in_blocks", "dream", "causal", "context"], 3)
@few("rule", [DMAX, REMIX, Resting(0.3)])
def test_no_forward_sees_keys_of_soft_inputs_that_it_did_not_make(rule: Any, kind: str) -> None:
    """A column that was soft when it was last computed is computed again as long as anything sees it."""
    tried = 0
    for cache in CACHES:
        try:
            spy, _ = watched(rule, kind, cache=cache)
        except UserError:
            continue
        tried, stale = tried + 1, None
        for canvas, query, plan in spy.calls:
            computed, columns = plan.wanted.computed, canvas.ids.shape[1]
            stale = torch.zeros_like(computed) if stale is None else stale
            seen = canvas.seen() & ~canvas.done[:, None]
            assert not (stale & seen & ~computed).any(), cache
            stale = torch.where(computed, soft(query, columns), stale)
            assert not (soft(query, columns) & ~canvas.in_block()).any()
            assert not soft(query, columns)[canvas.age == 0].any(), "a block opens with tokens and masks"
    assert tried >= (2 if kind in ("context", "in_blocks") else 3)


@each("rule", [Resting(0.3), REMIX])
def test_the_exact_cache_changes_nothing(rule: Any) -> None:
    _, plain = watched(rule, "causal", cache="none")
    for store_pass in ("ride", "separate"):
        _, cached = watched(rule, "causal", cache={"name": "block_causal", "store_pass": store_pass})
        assert same_answers(plain, cached) or store_pass == "separate"
        assert torch.equal(plain.tokens, cached.tokens)


# DMax


@each("threshold", [0.0, 0.3, 0.9])
def test_dmax_commits_a_run_from_the_left(threshold: float) -> None:
    for prompt in PROMPTS[:2]:
        opened, taken = history(SoftParallel(threshold), prompt, "causal")
        assert not any(taken)
        masks = list(range(TOKENS))
        for step in opened:
            assert step == masks[: len(step)]
            masks = masks[len(step) :]


def test_dmax_leaves_a_block_that_no_longer_changes_or_is_sure() -> None:
    """Or after as many forwards as the block has columns, the prompt's included; it revises until then."""
    spy, result = watched(SoftParallel(0.0), "causal")
    revised = ends = 0
    for (canvas, query, _), (after, *_), logits in zip(spy.calls, spy.calls[1:], spy.logits, strict=False):
        best, token = laws(logits).max(-1)
        for row in (~canvas.done).nonzero()[:, 0].tolist():
            block = canvas.inside(query.positions)[row]
            old, new = canvas.ids[row, query.positions[row][block]], token[row, block]
            left = bool(after.done[row]) or bool(after.start[row] > canvas.start[row])
            length = int(canvas.stop[row] - canvas.grid_start()[row])
            stays = canvas.masked[row, query.positions[row][block]].any() or bool((old != new).any())
            unsure = bool((best[row, block] < SURE).any())
            assert left == (not (stays and unsure) or int(canvas.age[row]) + 1 == length)
            assert int(canvas.age[row]) < length
            revised, ends = revised + int(canvas.age[row] > 0 and stays), ends + left
    assert revised and ends and result.complete.all()


def test_dmax_reads_what_it_was_how_sure_of() -> None:
    spy, _ = watched(DMAX)
    for (_, query, _), (after, later, _), logits in zip(spy.calls, spy.calls[1:], spy.logits, strict=False):
        assert later.mixture is not None and later.mixture.keep_norm
        found = laws(logits).max(-1)
        for row, q in later.mixture.where.nonzero().tolist():
            before = query.positions[row].tolist().index(int(later.positions[row, q]))
            assert int(later.mixture.ids[row, q]) == int(found.indices[row, before])
            assert float(later.mixture.weights[row, q]) == pytest.approx(float(found.values[row, before]), abs=1e-6)
        tokens = after.inside(later.positions) & ~after.masked.gather(1, later.positions)
        assert torch.equal(later.mixture.where, tokens & (after.age > 0)[:, None] & ~after.done[:, None])


# ReMix


def test_remix_without_a_share_is_the_wide_half_of_wino() -> None:
    plain, wide = run(RejectionMixing(0.3, share=0.0)), run(Wino(0.3, back=0.0))
    assert torch.equal(plain.tokens, wide.tokens) and torch.equal(plain.nfe, wide.nfe)
    assert not same(plain, run(RejectionMixing(0.3)))


def test_remix_rejects_what_jumps() -> None:
    """From ln 2 on nothing is rejected; at 0 everything is; and a rejected mask is mixed again later."""
    share = {}
    for bound in (0.0, 0.2, log(2)):
        spy, _ = watched(RejectionMixing(0.9, bound))
        inside = [(canvas, query) for canvas, query, _ in spy.calls if (canvas.age > 1).any()]
        masks = sum(int(canvas.eligible(query.positions)[canvas.age > 1].sum()) for canvas, query in inside)
        share[bound] = sum(int(query.mixture.where[canvas.age > 1].sum()) for canvas, query in inside) / masks  # pyright: ignore
    assert share[0.0] == 0 < share[0.2] < share[log(2)] == 1
    spy, _ = watched(RejectionMixing(0.9, 0.2))
    seen = torch.stack([soft(query, canvas.ids.shape[1]) for canvas, query, _ in spy.calls])
    back = seen[2:] & ~seen[1:-1] & seen[:-2]
    assert back.any()


def test_remix_mixes_the_likeliest_tokens() -> None:
    """Their probabilities add up to twice the largest at most, and to 0.9; the best one counts in any case."""
    spy, _ = watched(replace(REMIX, share=0.8))
    most, some = 0, 0
    for (_, query, _), (_, later, _), logits in zip(spy.calls, spy.calls[1:], spy.logits, strict=False):
        assert later.mixture is not None
        law = laws(logits)
        for row, q in later.mixture.where.nonzero().tolist():
            before = query.positions[row].tolist().index(int(later.positions[row, q]))
            order = law[row, before].argsort(descending=True)
            best, total, wanted = float(law[row, before, order[0]]), 0.0, {}
            for token in order.tolist()[:50]:
                total += float(law[row, before, token])
                if wanted and total > min(max(2 * best, 0.2), 0.9):
                    break
                wanted[token] = 0.8 * float(law[row, before, token])
            weights = dict(zip(later.mixture.ids[row, q].tolist(), later.mixture.weights[row, q].tolist(), strict=True))
            assert {token: weight for token, weight in weights.items() if weight} == pytest.approx(wanted, abs=1e-6)
            most, some = max(most, len(wanted)), some + 1
    assert most > 1 and some > 10


# Models and plug-ins


@RULES
def test_a_table_of_integers_is_embedded_by_itself(rule: Any) -> None:
    """Nothing reads the table's weight: its own module embeds what is mixed."""

    class Integers(nn.Module):
        def __init__(self, table: Tensor):
            super().__init__()
            self.scale = table.abs().amax(1, keepdim=True) / 127
            self.numbers, self.calls = (table / self.scale).round().to(torch.int8), 0
            self.weight = torch.empty(0, dtype=table.dtype)  # its dtype alone is asked for

        def forward(self, ids: Tensor) -> Tensor:
            self.calls += 1
            return self.numbers[ids].to(self.scale.dtype) * self.scale[ids]

    model, plain = toys.transformer(), toys.transformer()
    model.embed = table = Integers(model.embed.weight.detach())  # pyright: ignore
    with torch.no_grad():
        plain.embed.weight.copy_(table.numbers * table.scale)
    made = [
        Sampler(toys.wrapped(one), scheduler=rule, blocks=FixedBlocks(BLOCK), stop="none").generate(
            PROMPTS, max_new_tokens=TOKENS
        )
        for one in (model, plain)
    ]
    assert same(*made) and table.calls > int(made[0].nfe.max())


@few("kind", ["cfg", "causal", "llada", "dream"])
def test_what_a_mixture_does(kind: str) -> None:
    """Answers differ from those of the same rules on tokens and masks alone."""

    class Hard(Transformer):
        def forward(self, ids: Tensor, **given: Any) -> Tensor:
            return super().forward(ids, **given | {"inputs": None})

    for rule in (SoftParallel(0.0), RejectionMixing(0.9, share=0.9)):
        hard = toys.denoiser(kind)
        inner: Any = hard.denoiser if kind == "cfg" else hard  # pyright: ignore
        assert isinstance(inner, TransformerDenoiser)
        model = Hard(inner.transformer.config).double()
        model.load_state_dict(inner.transformer.state_dict())
        inner = replace(inner, model=model)
        hard = replace(hard, denoiser=inner) if kind == "cfg" else inner  # pyright: ignore
        given: dict[str, Any] = {"scheduler": rule, "blocks": FixedBlocks(BLOCK), "stop": "none"}
        one = Sampler(hard, **given).generate(PROMPTS, max_new_tokens=TOKENS)
        assert not same(one, Sampler(toys.denoiser(kind), **given).generate(PROMPTS, max_new_tokens=TOKENS))


@RULES
@each(
    "cache",
    ["elastic", "d2", "dllm", "sparse", "dkv", "vicinity", "delayed_prefix", "periodic_prefix", "streaming:dllm"],
)
def test_caches_that_would_serve_their_keys_are_refused(rule: Any, cache: str) -> None:
    name, _, inner = cache.partition(":")
    with refused(f"cache-incompatible: {inner or cache}"):
        toys.sampler(scheduler=rule, cache={"name": name, "inner": inner} if inner else name)


def test_what_else_is_refused() -> None:
    for outer in ("freedave", "ssd", "lopa", "daedal", "rho_eos"):
        with refused("scheduler-incompatible: remix"):
            toys.sampler(scheduler={"name": outer, "inner": "remix"})
    with refused("plugins-incompatible: remix"):
        Sampler.from_callable(lambda ids, mask: ids, scheduler="remix", vocab_size=9, mask_id=8, eos_id=7)
    with refused("plugins-incompatible: multi_block"):
        toys.sampler(scheduler="dmax", blocks="multi_block")
    for rule in (DMAX, REMIX):
        assert "inputs of its own" in (unsupported_trait(rule) or "")


@each(
    ("made", "name"),
    [
        (lambda: SoftParallel(-0.1), "scheduler.threshold"),
        (lambda: RejectionMixing(threshold=float("nan")), "scheduler.threshold"),
        (lambda: RejectionMixing(divergence=-1.0), "scheduler.divergence"),
        (lambda: RejectionMixing(share=1.5), "scheduler.share"),
    ],
)
def test_bad_values(made: Any, name: str) -> None:
    with refused(f"option-range: {name}"):
        made()
