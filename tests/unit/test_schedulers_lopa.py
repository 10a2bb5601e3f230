"""LoPA (arXiv 2512.16229) and D2F's pipeline under it (arXiv 2508.09192)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler import Result, Sampler
from dllm_sampler.cache.base import BaseCache
from dllm_sampler.core.protocols import Carry
from dllm_sampler.core.values import FREE, Canvas, Edit, Query, Readout
from dllm_sampler.inputs.prompts import Infill
from dllm_sampler.schedulers.d2f import D2F
from dllm_sampler.schedulers.lopa import LoPA
from tests import toys
from tests.refusals import refused
from tests.sampling import crossed, each

TOKENS = 17
PIPELINE: dict[str, Any] = {"name": "pipeline", "length": 4, "add_threshold": 0.25, "full_threshold": 0.5}
BLOCKS: dict[str, Any] = {"pipeline": PIPELINE, "multi_block": PIPELINE | {"name": "multi_block"}, "fixed": "fixed"}
CACHES: dict[str, Any] = {
    "none": "none", "d2f": "d2f", "causal": {"name": "d2f", "attention": "block_causal"}, "prefix": "prefix"
}  # fmt: skip


def run(scheduler: Any, toy: str = "llada", **plugins: Any) -> Result:
    sampler = toys.sampler(toy, scheduler=scheduler, **{"blocks": PIPELINE, **plugins})
    return sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS)


def same(one: Result, two: Result) -> bool:
    """Equal tokens, each committed by the same forward."""
    return torch.equal(one.tokens, two.tokens) and torch.equal(one.trace.generated, two.trace.generated)


@dataclass(frozen=True)
class Rounds(LoPA):
    """`LoPA` that remembers its rounds of one row: the canvas, what was asked, committed and predicted."""

    made: list[Any] = field(default_factory=list)

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        edit, after = super().tell(canvas, query, readout, carry)
        self.made.append((canvas, query, edit, readout))
        return edit, after


@dataclass
class Branch:
    """A branch of the published loop, with the table of blocks that it carries."""

    ids: list[int]
    blocks: list[dict[str, Any]]
    at: int | None = None
    creation: float = 1.0

    def left(self, block: dict[str, Any]) -> int:
        return self.ids[block["start"] : block["end"]].count(toys.MASK)

    def share(self, block: dict[str, Any]) -> float:
        return 1 - self.left(block) / (block["end"] - block["start"])

    def open(self, prompt: int, tokens: int, rule: dict[str, Any]) -> bool:
        """Steps 1 to 3 of a round; whether the branch is done."""
        shares = [self.share(block) for block in self.blocks]
        if shares[-1] >= rule["add"] and len(self.ids) < prompt + tokens and toys.EOS not in self.ids[prompt:]:
            start = self.blocks[-1]["end"]
            self.blocks.append({"start": start, "end": min(start + rule["length"], prompt + tokens), "full": False})
            self.blocks[-1]["active"] = True
            self.ids += [toys.MASK] * (self.blocks[-1]["end"] - start)
        for before, after in zip(shares, self.blocks[1:], strict=False):
            after["full"] = after["full"] or before >= rule["full"]
        return toys.MASK not in self.ids and not any(block["active"] for block in self.blocks)

    def twin(self) -> Branch:
        return Branch([*self.ids], [dict(block) for block in self.blocks])


def published(toy: str, prompt: list[int], tokens: int, causal: bool, rule: dict[str, Any]) -> tuple[list[int], int]:
    """The answer and the rounds of the published loop without a cache, written from its description."""
    denoiser: Any = toys.denoiser(toy)
    first = Branch([*prompt], [{"start": 0, "end": len(prompt), "full": True, "active": False}])
    branches, rounds = [first], 0
    while True:
        done = [branch.open(len(prompt), tokens, rule) for branch in branches]
        if all(done):
            return branches[-1].ids[len(prompt) :], rounds
        rounds += 1
        found = []
        for branch in branches:
            number = torch.tensor([n for n, b in enumerate(branch.blocks) for _ in range(b["start"], b["end"])])
            keys = (number[None] <= number[:, None])[None] if causal else None
            logits = denoiser.transformer(torch.tensor([branch.ids]), keys=keys)[0].detach()
            logits[:, toys.MASK] = -torch.inf
            law = torch.softmax(logits.roll(1, 0) if denoiser.spec.shift else logits, -1)
            top = law.topk(2, -1).values
            entropy = torch.special.entr(law).sum(-1)
            score: Tensor = {"entropy": -entropy, "margin": top[:, 0] - top[:, 1], "confidence": top[:, 0]}[
                rule["score"]
            ]
            masks = [at for at, token in enumerate(branch.ids) if token == toys.MASK]
            lowest = sorted(float(score[at]) for at in masks)[: max(1, int(rule["share"] * len(masks)))]
            future = sum(lowest) / len(lowest) if masks else 1.0
            total = rule["alpha"] * branch.creation + (1 - rule["alpha"]) * future
            found.append((total, branch, law.argmax(-1).tolist(), top[:, 0].tolist(), score.tolist()))
        _, winner, token, sure, score_of = max(found, key=lambda one: one[0])  # the first of equals: forks, anchor last
        anchor = winner.twin()
        for block in anchor.blocks:
            masks = [at for at in range(block["start"], block["end"]) if winner.ids[at] == toys.MASK]
            chosen = [at for at in masks if sure[at] > rule["threshold"]]
            if not chosen and masks and block["full"]:
                chosen = [max(masks, key=lambda at: score_of[at])]
            for at in chosen:
                anchor.ids[at] = token[at]
        for block in anchor.blocks:  # in order: the first one that is not full keeps the others active
            if anchor.left(block):
                break
            block["active"] = False
        masks = [at for at, one in enumerate(anchor.ids) if one == toys.MASK]
        branches = []
        for at in sorted(masks, key=lambda at: (-score_of[at], at))[: rule["forks"]]:
            fork = anchor.twin()
            fork.ids[at], fork.at, fork.creation = token[at], at, score_of[at]
            branches.append(fork)
        branches.append(anchor)


@pytest.mark.parametrize(("toy", "causal", "seed"), crossed(["llada", "dream"], [False, True], range(6), together=0))
def test_the_published_loop(toy: str, causal: bool, seed: int) -> None:
    """Without a cache, and with the one that is exact where attention is block-causal; blocks of any length."""
    random = Random(seed)
    rule = {
        "length": random.choice([3, 4, 5]),
        "add": random.choice([0.1, 0.3, 0.5, 1.0]),
        "full": random.choice([0.25, 0.5, 0.95]),
        "threshold": random.choice([0.5, 0.7, 0.9]),
        "forks": random.choice([0, 1, 2, 3]) if seed else 3,
        "score": random.choice(["entropy", "margin", "confidence"]),
        "share": random.choice([1.0, 0.5]),
        "alpha": random.choice([0.0, 0.0, 0.4]) if seed else 0.0,
    }
    sampler = toys.sampler(
        toy,
        scheduler=LoPA(
            D2F(rule["threshold"], rule["score"]), rule["forks"], rule["score"], rule["share"], rule["alpha"]
        ),
        blocks={
            "name": "pipeline",
            "length": rule["length"],
            "add_threshold": rule["add"],
            "full_threshold": rule["full"],
        },
        cache=CACHES["causal" if causal else "none"],
    )
    result = sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS)
    for row, prompt in enumerate(toys.PROMPTS):
        wanted, rounds = published(toy, prompt, TOKENS, causal, rule)
        written = result.trace.generated[row] >= 0
        assert result.trace.ids[row, result.trace.origin :][written].tolist() == wanted, rule
        assert int(result.nfe[row]) == rounds, rule


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "cache", "toy"), crossed(BLOCKS, CACHES, ["llada", "dream", "cfg"], together=0))
def test_without_forks_or_where_none_wins_it_is_the_scheduler_inside(blocks: Any, cache: Any, toy: str) -> None:
    """Invariants 1 and 2: at `alpha=1` a fork has less than the canvas, whose score is 1."""
    plugins = {"toy": toy, "blocks": blocks, "cache": cache}
    inner = {"name": "d2f", "threshold": 0.8}
    alone = run(inner, **plugins)
    none = run({"name": "lopa", "inner": inner, "forks": 0}, **plugins)
    assert same(none, alone)
    assert torch.equal(none.nfe, alone.nfe) and torch.equal(none.trace.rows, alone.trace.rows)
    idle = run({"name": "lopa", "inner": inner, "alpha": 1.0, "score": "confidence"}, **plugins)
    assert same(idle, alone)
    assert torch.equal(idle.nfe, alone.nfe) and int(idle.trace.rows.sum()) > int(alone.trace.rows.sum())


def test_rounds() -> None:
    """Invariants 3 and 4, and that forks win whose blocks end elsewhere."""
    scheduler = Rounds(D2F(0.9), forks=3)
    won, apart = 0, 0
    for prompt in toys.PROMPTS:
        scheduler.made.clear()
        sampler = toys.sampler(scheduler=scheduler, blocks=PIPELINE | {"add_threshold": 0.5}, cache="d2f")
        result = sampler.generate([prompt], max_new_tokens=TOKENS)
        said: dict[int, float] = {}  # by the forward before, of each column
        for (canvas, query, edit, readout), (later, *_) in zip(scheduler.made, scheduler.made[1:], strict=False):
            assert (
                query.candidates.live is not None and query.candidates.stops is not None and edit.candidate is not None
            )
            differ = (query.ids != query.ids[:, :1]).sum(2)[0]  # [K]
            assert differ[0] == 0 and torch.equal(differ[1:], query.candidates.live[0, 1:].long())
            assert query.candidates.live[0, edit.candidate].all() and edit.commit.any()
            kept = ~canvas.masked & (canvas.columns() < canvas.length)
            assert torch.equal(later.ids[kept], canvas.ids[kept])
            winner = query.ids[0, int(edit.candidate)]
            filled = winner != query.ids[0, 0]
            assert edit.commit[0][filled].all() and torch.equal(edit.ids[0][filled], winner[filled])
            assert edit.confidence is not None
            places = zip(query.positions[0][filled].tolist(), edit.confidence[0][filled].tolist(), strict=True)
            for column, sure in places:
                assert sure == said[column], "the forward that predicted the token"
            chosen = readout.confidence[0, int(edit.candidate)].tolist()
            said = dict(zip(query.positions[0].tolist(), chosen, strict=True))
            won += bool(filled.any())
            apart += int(query.candidates.stops[0, edit.candidate]) != int(canvas.stop)
        assert torch.isfinite(result.trace.logprob).all()
    assert won > 3 and apart


@pytest.mark.slow
def test_what_the_winner_has_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a token sees what comes later, other candidates have other keys."""
    lopa = {"name": "lopa", "inner": {"name": "d2f", "threshold": 0.9}}

    def keep(self: BaseCache, candidate: Tensor) -> None:
        self.forked = None

    both = []
    for cache in ("d2f", "causal"):
        right = run(lopa, cache=CACHES[cache])
        with monkeypatch.context() as patch:
            patch.setattr(BaseCache, "adopt", keep)
            both.append(torch.allclose(right.trace.logprob, run(lopa, cache=CACHES[cache]).trace.logprob))
    assert both == [False, True]


def test_a_block_has_no_more_forks_than_positions() -> None:
    most = Rounds(D2F(0.6), forks=4)
    found = run(most, blocks={"name": "fixed", "length": 4})
    every = Rounds(D2F(0.6), forks=10**6)
    assert same(found, run(every, blocks={"name": "fixed", "length": 4}))
    assert all(query.ids.shape[1] == 5 for _, query, *_ in every.made)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "cache", "toy"), crossed(list(BLOCKS), list(CACHES), ["llada", "dream"], together=0)
)
def test_given_tokens_are_seen_and_the_masks_before_them_are_not(blocks: str, cache: str, toy: str) -> None:
    """A canvas that always wins is D2F's, so forks and the canvas alone see the same; and a mask behind the open blocks
    changes nothing, wherever a given token stands."""
    random = Random(3)
    rows = [[random.randrange(toys.EOT) if random.random() < 0.3 else FREE for _ in range(TOKENS)] for _ in range(4)]
    asked = [Infill([*prompt, *row]) for prompt, row in zip(toys.PROMPTS, rows, strict=False)]

    def answer(scheduler: Any, denoiser: Any) -> Result:
        options: dict[str, Any] = {"blocks": BLOCKS[blocks], "cache": CACHES[cache], "stop": "none"}
        return Sampler(denoiser, scheduler=scheduler, **options).generate(asked)

    class Garbled(toys.Spy):
        def __call__(self, canvas: Canvas, query: Query, plan: Any) -> Any:
            behind = canvas.masked & (canvas.columns() >= canvas.stop[:, None])
            if blocks == "pipeline" and query.candidates.stops is None:
                canvas = replace(canvas, ids=torch.where(behind, 3, canvas.ids))
            return super().__call__(canvas, query, plan)

    alone = D2F(0.6, "confidence")
    plain = answer(alone, toys.denoiser(toy))
    assert same(plain, answer(LoPA(alone, 2, "confidence", alpha=1.0), toys.denoiser(toy)))
    assert same(plain, answer(alone, Garbled(toys.denoiser(toy))))


@each(
    ("plugins", "sentence"),
    [
        ({"scheduler": {"name": "lopa", "inner": "wino"}}, "scheduler-incompatible: scheduler.inner"),
        ({"scheduler": {"name": "lopa", "inner": "freedave"}}, "scheduler-incompatible: scheduler=lopa"),
        ({"scheduler": {"name": "freedave", "inner": "lopa"}}, "scheduler-incompatible: scheduler=freedave"),
        ({"scheduler": {"name": "lopa", "inner": "fixed"}}, "plugins-incompatible: scheduler=lopa"),
        ({"scheduler": "freedave"}, "plugins-incompatible: scheduler=freedave, blocks=pipeline"),
        ({"scheduler": "lopa", "guide": {"name": "regex", "pattern": "a+"}}, "plugins-incompatible: guide=regex"),
        ({"scheduler": "lopa", "stop": "truncate"}, "plugins-incompatible: scheduler=lopa, stop=truncate"),
        ({"scheduler": {"name": "lopa", "forks": -1}}, "option-range: scheduler.forks"),
        ({"scheduler": {"name": "lopa", "alpha": 2}}, "option-range: scheduler.alpha"),
        ({"cache": {"name": "d2f", "attention": "causal"}}, "choice-unknown: cache.attention='causal', block_causal"),
        ({"cache": CACHES["causal"], "blocks": "adablock"}, "cache-incompatible: blocks=adablock"),
        ({"cache": "dual"}, "cache-incompatible: blocks=pipeline, cache=dual, cache=d2f"),
        ({"kind": "causal"}, "blocks-incompatible: blocks=pipeline, blocks=fixed"),
    ],
)  # fmt: skip
def test_refusals(plugins: dict[str, Any], sentence: str) -> None:
    with refused(sentence):
        toys.sampler(**{"scheduler": "d2f", "blocks": PIPELINE, **plugins})


@pytest.mark.slow
def test_a_fork_is_drawn_too() -> None:
    """At a temperature rows of a batch draw what they draw alone."""
    lopa = {"name": "lopa", "inner": {"name": "d2f", "threshold": 0.6}}
    drawn = run(lopa, cache="d2f", temperature=1.0)
    assert not torch.equal(drawn.tokens, run(lopa, cache="d2f").tokens)
    sampler = toys.sampler(scheduler=lopa, blocks=PIPELINE, cache="d2f", temperature=1.0)
    for row, (prompt, seed) in enumerate(zip(toys.PROMPTS, toys.SEEDS, strict=True)):
        alone = sampler.generate([prompt], max_new_tokens=TOKENS, seed=seed)
        assert torch.equal(alone.tokens[0], drawn.tokens[row]) and int(alone.nfe) == int(drawn.nfe[row])
