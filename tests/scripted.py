"""A model that says what a test wrote down, runs that start with one token, and what the tests of schedulers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dllm_sampler import Canvas, Denoiser, ModelSpec, Query, Result, Sampler
from dllm_sampler.blocks.fixed import FullBlock
from dllm_sampler.core.protocols import Plan, Scheduler
from dllm_sampler.core.values import Spent
from tests import toys

PROMPTS = toys.PROMPTS[:4]
TOKENS, BLOCK = 18, 6
INF = float("inf")
Says = Callable[[Canvas], Tensor]
Steps = list[list[int]]


@dataclass
class Script:
    """A model whose logits `[B, L+1, V]` are a function of the canvas; `shadows` answer blind queries of tokens."""

    says: Says
    shadows: Says | None = None
    vocab: int = 8
    cacheable: bool = False
    length: int = 0  # of the answer that it was written for
    limits: list[int | None] = field(default_factory=list)  # of each query, of the first row

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            vocab_size=self.vocab,
            mask_id=self.vocab - 1,
            eos_id=self.vocab - 2,
            pad_id=self.vocab - 2,
            max_positions=256,
            num_layers=0,
            num_kv_heads=0,
            head_dim=0,
            dtype=torch.float64,
            device=torch.device("cpu"),
            cacheable=self.cacheable,
        )

    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        at = query.positions
        self.limits.append(None if query.limit is None else int(query.limit[0]))
        wide = at[..., None].expand(-1, -1, self.vocab)
        logits = self.says(canvas).gather(1, wide)
        if query.leave_one_out:
            assert self.shadows is not None
            shadows = self.shadows(canvas).gather(1, wide)
            logits = torch.where(canvas.masked.gather(1, at)[..., None], logits, shadows)
        one = torch.ones_like(canvas.step)
        return plan.head_rows.pick(logits[:, None]), Spent(one, one)

    def head(self, hidden: Tensor) -> Tensor:
        return hidden.clone()

    def history(self, scheduler: Scheduler, **plugins: Any) -> tuple[Steps, Steps]:
        """See `history`, of a prompt of one token."""
        plugins = {"blocks": FullBlock(), "stop": "none", **plugins}
        return history(Sampler(self, scheduler=scheduler, **plugins), [0], tokens=self.length)


def certainties(confidence: Sequence[float], tokens: Sequence[int] | None = None, vocab: int = 8) -> Tensor:
    """`[1, L+1, V]` logits behind a prompt of one token: `confidence` on `tokens` (1), the rest spread, no mask."""
    at = torch.ones(len(confidence), dtype=torch.long) if tokens is None else torch.tensor(tokens)
    sure = torch.tensor(confidence, dtype=torch.float64)
    table = ((1 - sure) / (vocab - 2))[:, None].repeat(1, vocab).scatter(1, at[:, None], sure[:, None])
    table[:, -1] = 0
    return torch.cat([table[:1], table, table[:1]]).log()[None]  # prompt, generation, empty slot


def constant(confidence: list[float], tokens: list[int] | None = None, vocab: int = 8) -> Script:
    """The same predictions whatever stands elsewhere, by default of tokens that take turns."""
    table = certainties(confidence, tokens or [i % (vocab - 2) for i in range(len(confidence))], vocab)
    return Script(lambda canvas: table.expand(canvas.ids.shape[0], -1, -1), vocab=vocab)


def written(says: list[list[float]], shadows: list[list[float]] | None = None, cacheable: bool = True) -> Script:
    """The confidence of each position at each forward of one row (the last one repeats)."""

    def by_step(lines: list[list[float]]) -> Says:
        return lambda canvas: certainties(lines[min(int(canvas.step), len(lines) - 1)])

    return Script(by_step(says), by_step(shadows) if shadows else None, cacheable=cacheable, length=len(says[0]))


def play(model: Denoiser, scheduler: Scheduler, tokens: int, blocks: Any = None, **plugins: Any) -> Steps:
    """Positions each forward of a one-token prompt committed for good."""
    plugins = {"blocks": blocks or FullBlock(), "stop": "none", **plugins}
    result = Sampler(model, scheduler=scheduler, **plugins).generate([[0]], max_new_tokens=tokens)
    return result.trace.steps(0)


def history(
    scheduler: Scheduler | Sampler, prompt: list[int], kind: str = "llada", tokens: int = TOKENS, **plugins: Any
) -> tuple[Steps, Steps]:
    """Positions that each forward turned from noise into tokens, and from tokens into noise."""
    sampling = scheduler if isinstance(scheduler, Sampler) else sampler(scheduler, kind, **plugins)
    before, opened, taken = torch.ones(tokens, dtype=torch.bool), [], []
    for commits in sampling.stream([prompt], max_new_tokens=tokens):
        masked = commits.masked[0]
        opened.append((before & ~masked).nonzero()[:, 0].tolist())
        taken.append((~before & masked).nonzero()[:, 0].tolist())
        before = masked
    assert not before.any()
    return opened, taken


def sampler(scheduler: Scheduler, kind: str = "llada", **plugins: Any) -> Sampler:
    return toys.sampler(kind, scheduler=scheduler, **plugins)


def run(scheduler: Scheduler, prompts: list[list[int]] = PROMPTS, kind: str = "llada", **plugins: Any) -> Result:
    return sampler(scheduler, kind, **plugins).generate(prompts, max_new_tokens=TOKENS)


def same(one: Result, other: Result) -> bool:
    """Tokens, step maps and costs."""
    fields = ("ids", "step_map", "nfe", "rows", "end")
    return all(torch.equal(getattr(one.trace, name), getattr(other.trace, name)) for name in fields)


def same_answers(one: Result, other: Result) -> bool:
    """Tokens and the forwards that committed them."""
    return torch.equal(one.tokens, other.tokens) and torch.equal(one.trace.generated, other.trace.generated)
