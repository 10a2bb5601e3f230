"""A toy, a scripted model and a history: what the tests of KLASS, WINO, SlowFast, RCR, ReMDM and DUS share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dllm_sampler import Canvas, Denoiser, ModelSpec, Query, Sampler
from dllm_sampler.blocks import FixedBlocks, FullBlock
from dllm_sampler.models.cfg import guided
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.transformer import Transformer, TransformerConfig
from dllm_sampler.protocols import Plan, Scheduler, Spent
from dllm_sampler.result import Result
from dllm_sampler.stops import Prophet

VOCAB, MASK, EOS = 40, 39, 34
PROMPTS = [[5, 11, 3], [7, 1, 30, 22, 9, 14, 2], [16], [4, 4, 28, 13, 33]]
TOKENS, BLOCK = 18, 6
INF = float("inf")
NEVER = Prophet(None, early=INF, mid=INF, late=INF)  # asks for every mask, never fires
Steps = list[list[int]]


@cache
def toy(kind: str = "llada", layers: int = 2) -> Denoiser:
    """A random float64 transformer whose confidences are anything from 0.1 to 1."""
    config = TransformerConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        max_positions=64,
    )
    model = Transformer(config).to(torch.float64)
    model.init_weights(std=0.8, embedding_std=1.0, generator=torch.Generator().manual_seed(2))
    denoiser = TransformerDenoiser(model, MASK, EOS, shift=kind == "dream")
    return guided(denoiser, 1.5) if kind == "cfg" else denoiser


def sampler(scheduler: Scheduler, kind: str = "llada", **plugins: Any) -> Sampler:
    return Sampler(toy(kind), scheduler=scheduler, **{"blocks": FixedBlocks(BLOCK), "stop": "none", **plugins})


def run(scheduler: Scheduler, prompts: list[list[int]] = PROMPTS, kind: str = "llada", **plugins: Any) -> Result:
    return sampler(scheduler, kind, **plugins).generate(prompts, max_new_tokens=TOKENS)


def same(one: Result, other: Result) -> bool:
    return torch.equal(one.tokens, other.tokens) and torch.equal(one.trace.generated, other.trace.generated)


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


@dataclass
class Script:
    """A model that says what is written down: the confidence of each position at each forward (the last one repeats).

    `shadows` is the same for what a `leave_one_out` query gets to hear at committed positions. Prompts have one token.
    """

    says: list[list[float]]
    shadows: list[list[float]] = field(default_factory=list)
    cacheable: bool = True
    limits: list[int | None] = field(default_factory=list)
    vocab: int = 8

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
        assert canvas.ids.shape[0] == 1
        at, step = query.positions, int(canvas.step)
        self.limits.append(None if query.limit is None else int(query.limit))
        logits = self._row(self.says[min(step, len(self.says) - 1)]).gather(1, self._wide(at))
        if query.leave_one_out:
            shadows = self._row(self.shadows[min(step, len(self.shadows) - 1)]).gather(1, self._wide(at))
            logits = torch.where(canvas.masked.gather(1, at)[..., None], logits, shadows)
        one = torch.ones_like(canvas.nfe)
        return logits[:, None], Spent(one, one)

    def head(self, hidden: Tensor) -> Tensor:
        return hidden.clone()

    def play(self, scheduler: Scheduler, **plugins: Any) -> tuple[Steps, Steps]:
        given = {"blocks": FullBlock(), "stop": "none", **plugins}
        return history(Sampler(self, scheduler=scheduler, **given), [0], tokens=len(self.says[0]))

    def _wide(self, at: Tensor) -> Tensor:
        return at[..., None].expand(-1, -1, self.vocab)

    def _row(self, confidence: list[float]) -> Tensor:
        """`[1, L+1, V]`: token 1 has the position's confidence, the rest is spread evenly."""
        sure = torch.tensor([0.5, *confidence, 0.5], dtype=torch.float64)
        table = ((1 - sure) / (self.vocab - 2))[:, None].repeat(1, self.vocab)
        table[:, 1], table[:, -1] = sure, 0
        return table.log()[None]


def probabilities(ids: list[int]) -> Tensor:
    """`[L, V]` what the toy thinks of every position of one row, the mask token excluded."""
    denoiser = toy()
    assert isinstance(denoiser, TransformerDenoiser)
    with torch.no_grad():
        logits = denoiser.transformer(torch.tensor([ids]))[0]
    logits[:, MASK] = -torch.inf
    return logits.softmax(-1)
