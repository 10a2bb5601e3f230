"""The published loops of dKV-Cache and dLLM-Cache once more, one row each; see `reference`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conformance.reference import Net, Record, Recorder, best, budgets
from tests.conformance.reference_dream import filtered, scored

Stored = list[tuple[Tensor, Tensor]]  # per layer, keys and values of the whole row


@torch.no_grad()
def partial(net: Net, x: Tensor, computed: Tensor, stored: Stored) -> tuple[Tensor, Stored]:
    """Raw logits of the row (-inf where not `computed [L]`) and all keys and values, the other rows' as `stored`."""
    at = computed.nonzero()[:, 0]
    every: Stored = []

    def drive(index, layer, hidden, rope):
        q, k, v = layer.qkv(hidden, rope)
        if len(at) < x.shape[1]:
            k, v = (old.index_copy(2, at, new) for old, new in zip(stored[index], (k, v), strict=True))
        every.append((k, v))
        hidden = hidden + layer.attend(q, k, v, None)
        return hidden + layer.mlp(hidden)

    hidden = net.model(x[:, at], positions=at[None], drive=drive)
    logits = net.model.head(hidden)
    if net.jitter:
        logits = logits * (1 + net.jitter * torch.randn_like(logits))
    row = logits.new_full((1, x.shape[1], logits.shape[-1]), -torch.inf)
    return row.index_copy(1, at, logits), every


def keep(old: Stored, new: Stored, rows: Tensor) -> Stored:
    """`new` at `rows [L]`, `old` elsewhere."""
    if not old:
        return new
    return [
        (torch.where(rows[:, None], nk, ok), torch.where(rows[:, None], nv, ov))
        for (ok, ov), (nk, nv) in zip(old, new, strict=True)
    ]


def dkv_decode(
    net: Net,
    prompt: Tensor,
    *,
    steps: int,
    gen_length: int,
    block_length: int,
    enable_cache: bool,
    cache_reloading_step: int,
    **_: Any,
) -> Record:
    origin = prompt.shape[1]
    x = torch.cat((prompt, torch.full((1, gen_length), net.mask_id)), 1)
    record, blocks, lengths = Recorder(net.mask_id, origin), gen_length // block_length, []
    for block in range(blocks):
        start, stop = origin + block * block_length, origin + (block + 1) * block_length
        plan = budgets(block_length, steps // blocks)
        kept, stored = torch.zeros(x.shape[1], dtype=torch.bool), []
        for i, budget in enumerate(plan):
            record.forward(x)
            text = x[0] != net.mask_id
            full = not enable_cache or i < 2 or i % cache_reloading_step == 0
            computed = torch.ones_like(text) if full else ~kept
            lengths.append(int(computed.sum()))
            logits, every = partial(net, x, computed, stored)
            stored, kept = every, text
            p, token = logits[0].double().softmax(-1).max(-1)
            p = net.shaken(p).masked_fill(text, -torch.inf)
            p[:start] = p[stop:] = -torch.inf
            x = x.clone()
            chosen = best(p, budget) & ~text
            x[0, chosen] = token[chosen]
    return record.line(x, rows_first=False) | {"forward_shapes": [[1, n] for n in lengths]}


def dkv_greedy(
    net: Net,
    prompt: Tensor,
    *,
    steps: int,
    gen_length: int,
    block_length: int,
    cache_reloading_step: int,
    window_size: int,
    seed: int,
    **_: Any,
) -> Record:
    generator = torch.Generator().manual_seed(seed)
    origin = prompt.shape[1]
    x = torch.cat((prompt, torch.full((1, gen_length), net.mask_id)), 1)
    record, blocks, lengths, orders = Recorder(net.mask_id, origin), gen_length // block_length, [], []
    for block in range(blocks):
        start = origin + block * block_length
        order = (torch.randperm(block_length, generator=generator) + start).tolist()
        orders.append([p - origin for p in order])
        stored: Stored = []
        before: list[int] = []
        for i, budget in enumerate(budgets(block_length, steps // blocks)):
            record.forward(x)
            now, order = order[:budget], order[budget:]
            if i % cache_reloading_step == 0:
                computed = torch.ones(x.shape[1], dtype=torch.bool)
            else:
                computed = torch.zeros(x.shape[1], dtype=torch.bool)
                computed[before + now] = True
                masks = x[0] == net.mask_id
                for p in now:
                    added = 0
                    for away in range(1, x.shape[1]):
                        for q in (p - away, p + away):
                            if 0 <= q < x.shape[1] and masks[q] and not computed[q] and added < window_size:
                                computed[q] = True
                                added += 1
            lengths.append(int(computed.sum()))
            logits, stored = partial(net, x, computed, stored)
            x = x.clone()
            x[0, now] = logits[0, now].argmax(-1)
            before = now
    line = record.line(x, rows_first=False)
    return line | {"forward_shapes": [[1, n] for n in lengths], "orders": orders}


def dkv_dream(
    net: Net,
    prompt: Tensor,
    *,
    steps: int,
    max_new_tokens: int,
    alg: str,
    cache_type: str,
    cache_steps: int,
    shift_type: str,
    eps: float = 1e-3,
    top_k: int | None = 50,
    **_: Any,
) -> Record:
    origin = prompt.shape[1]
    x = torch.cat((prompt, torch.full((1, max_new_tokens), net.mask_id)), 1)
    length = x.shape[1]
    times = torch.linspace(1, eps, steps + 1)
    record, lengths = Recorder(net.mask_id, origin), []
    lead = torch.arange(length) < origin - 1
    nothing = torch.zeros(length, dtype=torch.bool)
    prev, cur, stored = nothing, lead, []
    for step in range(steps):
        record.forward(x)
        if cache_type == "decoded":
            skipped = nothing if step % cache_steps == 0 else prev
        elif cache_type == "prefill":
            skipped = lead if step else nothing
        else:
            skipped = nothing if step == 0 else lead if step % cache_steps == 0 else lead | prev
        lengths.append(int((~skipped).sum()))
        logits, stored = partial(net, x, ~skipped, stored)
        logits = torch.cat((logits[:, :1], logits[:, :-1]), 1)
        masks = (x[0] == net.mask_id).nonzero()[:, 0]
        share = 1 - times[step + 1] / times[step] if step < steps - 1 else 1
        x = x.clone()
        if len(masks):
            probabilities = filtered(logits[0, masks], 0.0, None, top_k)
            token = probabilities.argmax(-1)
            chosen = best(net.shaken(scored(probabilities, token, alg)), int(len(masks) * share))
            x[0, masks[chosen]] = token[chosen]
        text = x[0] != net.mask_id
        following = text.roll(-1)  # the last row looks at the row's first token
        prev, cur = cur, following
        if shift_type == "un_right":
            both = text & following
            both[-1] = both[-2]
            cur = both
    return record.line(x, rows_first=True) | {"query_lengths": lengths}


@dataclass
class Features:
    """What dLLM-Cache keeps of one branch of guidance."""

    net: Net
    origin: int
    prompt_every: int
    gen_every: int
    ratio: float
    made: int = 0
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    attended: dict[int, Tensor] = field(default_factory=dict)
    fed: dict[int, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        due = self.made % self.prompt_every == 0, self.made % self.gen_every == 0
        self.made += 1

        def drive(index: int, layer: Any, hidden: Tensor, rope: Any) -> Tensor:
            q, k, v = layer.qkv(hidden, rope)
            prompt, gen = due if index else (True, True)
            rows = torch.zeros(x.shape[1], dtype=torch.bool)
            rows[: self.origin], rows[self.origin :] = prompt, gen
            renewed = rows.clone()
            if not gen and self.ratio:
                old, new = (t[0, :, self.origin :].transpose(0, 1).flatten(1) for t in (self.values[index], v))
                like = F.cosine_similarity(new, old, dim=-1)
                rows[self.origin :] = best(-like, int(self.ratio * len(like)))
                renewed[self.origin :] = True
            if index not in self.keys:
                self.keys[index], self.values[index] = k, v
            self.keys[index] = torch.where(rows[:, None], k, self.keys[index])
            self.values[index] = torch.where(renewed[:, None], v, self.values[index])
            out: Tensor = layer.attend(q, self.keys[index], self.values[index], None)
            before: Tensor = self.attended.get(index, out)
            self.attended[index] = torch.where(rows[:, None], out, before)
            hidden = hidden + self.attended[index]
            out = layer.mlp(hidden)
            before = self.fed.get(index, out)
            self.fed[index] = torch.where(rows[:, None], out, before)
            return hidden + self.fed[index]

        logits = self.net.model.head(self.net.model(x, drive=drive))
        jitter = self.net.jitter
        return logits * (1 + jitter * torch.randn_like(logits)) if jitter else logits


def dllm_cache(
    net: Net,
    prompt: Tensor,
    *,
    steps: int,
    gen_length: int,
    block_length: int,
    prompt_interval_steps: int,
    gen_interval_steps: int,
    transfer_ratio: float,
    cfg_scale: float,
    cfg_interval_steps: int,
    **_: Any,
) -> Record:
    origin = prompt.shape[1]
    x = torch.cat((prompt, torch.full((1, gen_length), net.mask_id)), 1)
    record, blocks = Recorder(net.mask_id, origin), gen_length // block_length
    every = (prompt_interval_steps, gen_interval_steps, transfer_ratio)
    plain, blind = (Features(net, origin, *every) for _ in range(2))
    difference, step = torch.zeros(()), 0
    for block in range(blocks):
        start, stop = origin + block * block_length, origin + (block + 1) * block_length
        for budget in budgets(block_length, steps // blocks):
            step += 1
            record.forward(x)
            logits = plain.logits(x)
            if cfg_scale > 0:
                if (step - 1) % cfg_interval_steps == 0 or step <= 5:
                    record.forward(x)
                    bare = x.clone()
                    bare[:, :origin] = net.mask_id
                    difference = logits - blind.logits(bare)
                logits = logits + cfg_scale * difference
            p, token = logits[0].softmax(-1).max(-1)
            text = x[0] != net.mask_id
            p = net.shaken(p).masked_fill(text, -torch.inf)
            p[:start] = p[stop:] = -torch.inf
            x = x.clone()
            chosen = best(p, budget) & ~text
            x[0, chosen] = token[chosen]
    return record.line(x, rows_first=False)
