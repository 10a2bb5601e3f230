"""Mixture-of-experts feed-forward: every token goes to a few experts, whose outputs are summed by weight.

Shapes do not depend on the choice of experts, and our code does not read the device. torch does if its grouped product
is a loop over the experts (`Experts.reads_device`). Letters: T tokens, E experts, k chosen per token, D width of the
stream, F width of an expert.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class MoeConfig:
    """Shape and switches of the expert layers."""

    num_experts: int
    top_k: int
    expert_size: int
    layers: frozenset[int]  # numbers of the layers with experts. The others are dense
    shared_size: int = 0  # width of the expert that serves every token. 0: there is none
    score: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1  # number of groups. A group is a run of consecutive experts
    top_groups: int = 1  # number of groups that a token chooses experts from
    normalise: bool = False  # weights of the chosen experts sum to one
    scale: float = 1.0  # factor of the weights, after the normalisation
    bias: bool = False  # a number per expert is added to its score for the choice
    weigh_bias: bool = False  # that number is also added to the expert's weight
    pool: int = 0  # number of experts that the tokens of a block choose from. 0: each token chooses from all
    block: int = 0  # length of these blocks, counted from the row's first token


class Router(nn.Module):
    """The choice of each token's experts, in float32 (float64 for float64)."""

    def __init__(self, config: MoeConfig, width: int):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, width).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(config.num_experts)) if config.bias else None

    def forward(self, hidden: Tensor, together: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights and numbers of the experts `[T, k]` for tokens `[T, D]`.

        Args:
            together: `[T] int64` number of each token's block, see `Transformer.together`. Required with a pool.
        """
        config = self.config
        precise = torch.promote_types(hidden.dtype, torch.float32)
        logits = F.linear(hidden.to(precise), self.weight.to(precise))  # [T, E]
        score = logits.sigmoid() if config.score == "sigmoid" else logits.softmax(-1)
        ranked = score if self.bias is None else score + self.bias.to(precise)
        if config.groups > 1:
            grouped = ranked.unflatten(-1, (config.groups, -1))  # [T, G, E/G]
            merit = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(
                -1
            )  # [T, G]: a group's score is that of its two best
            groups = merit.topk(config.top_groups, -1).indices
            kept = torch.zeros_like(merit, dtype=torch.bool).scatter(-1, groups, True)
            ranked = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
        if config.pool:
            assert together is not None
            # The tokens of a block share a pool, the best experts of any of them. Source: LLaDA2.2's block routing.
            at = together[:, None].expand_as(ranked)
            merit = torch.full_like(ranked, -torch.inf).scatter_reduce(0, at, ranked, "amax")  # [T, E] by block
            kept = torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, best(merit, config.pool), True)
            chosen = best(ranked.masked_fill(~kept[together], -torch.inf), config.top_k)  # [T, k]
        else:
            chosen = ranked.topk(config.top_k, -1).indices  # [T, k]
        weight = (ranked if config.weigh_bias else score).gather(-1, chosen)
        if config.normalise and config.top_k > 1:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        return weight * config.scale, chosen


class Experts(nn.Module):
    """The gated feed-forwards of all experts, in stacked weights."""

    def __init__(self, config: MoeConfig, width: int):
        super().__init__()
        inner, outer = (config.num_experts, config.expert_size, width), (config.num_experts, width, config.expert_size)
        self.gate_proj = nn.Parameter(torch.empty(inner).normal_(std=0.02))
        self.up_proj = nn.Parameter(torch.empty(inner).normal_(std=0.02))
        self.down_proj = nn.Parameter(torch.empty(outer).normal_(std=0.02))

    def forward(self, hidden: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        """Return `[T, D]` the sum by `weight [T, k]` of the outputs of experts `chosen [T, k]` for tokens `[T, D]`."""
        assigned = chosen.flatten()  # [T*k]
        order = assigned.argsort(stable=True)  # tokens of one expert are adjacent
        sorted_ = assigned[order]
        rows = hidden[order // chosen.shape[1]]  # [T*k, D]
        inner = F.silu(_per_expert(rows, self.gate_proj, sorted_)) * _per_expert(rows, self.up_proj, sorted_)
        outer = _per_expert(inner, self.down_proj, sorted_)
        # Back into each token's order before the sum: adding up in place would depend on what else is in the batch.
        outer = torch.empty_like(outer).index_copy(0, order, outer).unflatten(0, chosen.shape)  # [T, k, D]
        return (outer * weight[..., None]).sum(1).to(hidden.dtype)

    def reads_device(self, device: torch.device) -> bool:
        """Return True if the product waits for a GPU, since torch reads the end of each expert's rows."""
        dtype = self.gate_proj.dtype
        if device.type != "cuda" or not _grouped(self.gate_proj, dtype):
            return False
        major = torch.cuda.get_device_capability(device)[0]
        return dtype != torch.bfloat16 or torch.version.hip is not None or major not in GROUPED


class MoE(nn.Module):
    """Router, experts, and a shared expert if the model has one."""

    def __init__(self, config: MoeConfig, width: int, shared: nn.Module | None):
        super().__init__()
        self.router = Router(config, width)
        self.experts = Experts(config, width)
        self.shared = shared

    def forward(self, hidden: Tensor, together: Tensor | None = None) -> Tensor:
        """Return the feed-forward `[N, M, D]` of `hidden [N, M, D]`. `together [N M]` is as in `Router.forward`."""
        tokens = hidden.flatten(0, -2)  # [T, D]
        out = self.experts(tokens, *self.router(tokens, together)).view_as(hidden)
        return out if self.shared is None else out + self.shared(hidden)


def feed(ffn: nn.Module, hidden: Tensor, together: Tensor | None) -> Tensor:
    """Return the feed-forward `[N, M, D]` of the normed stream. `together` is as in `Router.forward`, or None."""
    return ffn(hidden) if together is None or not isinstance(ffn, MoE) else ffn(hidden, together)


def best(score: Tensor, count: int) -> Tensor:
    """Return indices `[..., count]` of the largest of `score [..., E]`. Unlike `topk` it takes the first of equals."""
    return score.argsort(dim=-1, descending=True, stable=True)[..., :count]


GROUPED = (9, 10)  # major compute capabilities with a grouped product in one launch, in bfloat16: H100, B200


def _grouped(weight: Tensor, dtype: torch.dtype) -> bool:
    """Return True if torch has a grouped product for this weight: aligned, not float64, from torch 2.10 on."""
    aligned = not any(size * dtype.itemsize % 16 for size in weight.shape[1:])
    return hasattr(F, "grouped_mm") and dtype != torch.float64 and aligned


def _per_expert(rows: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    """Return `[R, out]`: each of `rows [R, in]` times the matrix of its expert in `weight [E, out, in]`.

    The experts `expert [R]` are in ascending order.
    """
    if _grouped(weight, rows.dtype) and rows.device.type in ("cpu", "cuda"):
        number = torch.arange(weight.shape[0], device=expert.device)
        ends = torch.searchsorted(expert, number, right=True).int()  # [E] where each expert's rows end
        return F.grouped_mm(rows, weight.to(rows.dtype).mT, offs=ends)
    # One matrix per row: expensive in memory, but exact whatever else is in the batch.
    return (weight[expert] @ rows[..., None])[..., 0]
