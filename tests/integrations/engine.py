"""A small engine around `BlockRule`: it runs the network, and keeps tokens and states of requests by itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dllm_sampler.core.visibility import block_causal
from dllm_sampler.integrations.block import BlockRule, BlockState
from dllm_sampler.integrations.serving import stacked, taken
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.schedulers.fixed import ROUNDED
from tests import toys
from tests.contract.cases import Settings

LENGTH = toys.FILTER_BLOCK
PER_BLOCK = 4  # forwards, where a setting fixes their number


def whole_steps(scheduler: Settings, prompt: int, tokens: int) -> int:
    """The `steps` under which `Sampler` makes `PER_BLOCK` forwards in a whole block of `LENGTH`."""
    if scheduler["name"] in {"block_refine", "dynamic"}:  # as published, by the block
        return PER_BLOCK
    if scheduler.get("schedule") in ROUNDED:  # the same number for a part of a block
        return PER_BLOCK * (-(-(prompt + tokens) // LENGTH) - prompt // LENGTH)
    return PER_BLOCK * tokens // LENGTH


@dataclass
class Request:
    """An answer in the making."""

    prompt: list[int]
    tokens: int
    seed: int = 0
    ids: list[int] = field(default_factory=list)  # the prompt and all whole blocks so far
    state: BlockState | None = None
    block: list[int] = field(default_factory=list)  # the active one
    forwards: int = 0

    @property
    def over(self) -> bool:
        return len(self.ids) >= len(self.prompt) + self.tokens

    @property
    def answer(self) -> list[int]:
        return self.ids[len(self.prompt) : len(self.prompt) + self.tokens]


def serve(rule: BlockRule, model: TransformerDenoiser, requests: list[Request], arrivals: list[int]) -> None:
    """Answer all requests; each joins the batch at the round that `arrivals` says."""
    for one in requests:
        one.ids = one.prompt[: len(one.prompt) // rule.length * rule.length]
    clock = 0
    while not all(one.over for one in requests):
        batch = [one for one, at in zip(requests, arrivals, strict=True) if at <= clock and not one.over]
        clock += 1
        if batch:
            round_(rule, model, batch)


def round_(rule: BlockRule, model: TransformerDenoiser, batch: list[Request]) -> None:
    """One forward of some requests."""
    for one in batch:
        if one.state is None:
            inside = one.prompt[len(one.ids) :]
            frozen = torch.arange(rule.length)[None] < len(inside)
            mask = model.mask_id if model.mask_id is not None else 0
            one.block = [*inside, *[mask] * (rule.length - len(inside))]
            one.state = rule.open(torch.tensor([one.block]), ~frozen, frozen, [one.ids[len(one.prompt) :]])
    logits = torch.cat([block_logits(model, [*one.ids, *one.block], rule.length) for one in batch])
    decision, states = rule.decide(
        stacked([one.state for one in batch if one.state is not None]),
        torch.tensor([one.block for one in batch]),
        logits,
        torch.tensor([len(one.ids) for one in batch]),
        torch.tensor([one.forwards for one in batch]),
        torch.tensor([one.seed for one in batch]),
    )
    for row, one in enumerate(batch):
        one.block, one.forwards = decision.ids[row].tolist(), one.forwards + 1
        one.state = taken(states, torch.tensor([row]))
        if decision.over[row]:
            one.ids, one.state = [*one.ids, *one.block], None


@torch.no_grad()
def block_logits(model: TransformerDenoiser, ids: list[int], length: int) -> Tensor:
    """`[1, W, V]` logits of the last block of a row."""
    at = torch.arange(len(ids))[None]
    return model.transformer(torch.tensor([ids]), keys=block_causal(at, at, length))[:, -length:]
