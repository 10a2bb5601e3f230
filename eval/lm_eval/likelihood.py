"""The likelihood of a text under a masked-diffusion model, by Monte Carlo (as LLaDA's evaluation, arXiv 2502.09992)."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dllm_sampler.blocks.fixed import FullBlock
from dllm_sampler.cache.none import once
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Query
from dllm_sampler.engine import layout
from dllm_sampler.errors import UserError


def check(spec: ModelSpec) -> None:
    """Check that the estimate holds for a model.

    Raises:
        UserError: the model has no mask token, or its attention is not bidirectional.
    """
    if spec.mask_id is None:
        raise UserError(
            "mask-token-missing",
            "The task asks for likelihoods, and a model without a mask token has none. Name tasks that generate.",
        )
    if spec.attention != "bidirectional":
        kind = "block-causal" if spec.attention == "block_causal" else "causal up to its active block"
        raise UserError(
            "model-not-scorable",
            f"likelihood=bound needs attention to the whole text, and this model's is {kind}. Set"
            " likelihood=exact,stop=none,temperature=1,scheduler=fixed,score=margin instead.",
        )


def masks(length: int, count: int, seed: int) -> Tensor:
    """Draw masks `[count, length] bool`. Their sizes are spread evenly over 1 ... length from a random start."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.rand((), generator=generator, dtype=torch.float64) * length
    size = ((start + torch.arange(count) * length / count).floor().long() % length) + 1  # [count]
    order = torch.rand(count, length, generator=generator).argsort(1).argsort(1)
    return order < size[:, None]


@torch.no_grad()
def log_likelihood(
    denoiser: Denoiser, prompt: Sequence[int], answer: Sequence[int], count: int = 128, batch: int = 16, seed: int = 0
) -> float:
    """Estimate a lower bound of log p(answer | prompt) in nats with `count` masks.

    With masks of every size equally often, each masked token has the weight length / size. A model whose conditionals
    are those of one joint law meets the bound: then the mean over all masks is log p itself.

    The prompt has at least one token. `batch` masks are in a forward, which changes the result only by rounding.
    """
    spec, length = denoiser.spec, len(answer)
    if not length:
        return 0.0
    hidden = masks(length, count, seed).to(spec.device)
    target = torch.tensor(answer, device=spec.device)
    total = 0.0
    for part in hidden.split(batch):
        rows = len(part)
        canvas = layout.canvas([list(prompt)] * rows, length, [0] * rows, spec, FullBlock(), CounterNoise(), cuts=False)
        area = slice(len(prompt), len(prompt) + length)
        ids, masked = canvas.ids.clone(), canvas.masked.clone()
        ids[:, area], masked[:, area] = torch.where(part, ids[:, area], target), part
        canvas = replace(canvas, ids=ids, masked=masked)
        positions = torch.arange(area.start, area.stop, device=spec.device).expand(rows, -1)
        query = Query.at(canvas, positions, keeps_positions=True)
        plan = once(canvas, query, spec)
        hidden_states, _ = denoiser(canvas, query, plan)
        logits = plan.head_rows.spread(denoiser.head(hidden_states))[:, 0]  # [rows, length, V]
        said = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        own = said.gather(-1, target.expand(rows, -1)[..., None])[..., 0].double()
        weight = part.double() / part.sum(1, keepdim=True) * length
        total += float(torch.where(part, own * weight, 0.0).sum())
    return total / count
