"""A `Transformer`, freshly loaded or alive inside a training loop, as the denoiser of the sampling loop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dllm_sampler.canvas import Canvas, Query
from dllm_sampler.errors import UserError
from dllm_sampler.kernels.backend import Backend, LayerKernels
from dllm_sampler.models import fused
from dllm_sampler.models.compiled import CompiledParts
from dllm_sampler.models.transformer import Layer, Rope, Transformer
from dllm_sampler.protocols import ModelSpec, Plan, Spent


@dataclass(frozen=True)
class TransformerDenoiser:
    """Runs a `Transformer` on the rows that a cache planned, and answers for the positions that were asked about.

    The module is used as it is: its weights are not copied, its mode and `requires_grad` stay, autocast applies as
    around any other forward. It may be sharded in place (FSDP2) or sit in `DistributedDataParallel`; every rank of a
    sharded model must then sample the same number of steps.

    model: the module
    mask_id, eos_id, pad_id, eot_id: its special tokens; `pad_id` is `eos_id` by default
    shift: raw row i predicts the token at i + 1 (Dream)
    attention: what a token sees
    block_length: blocks the model was trained on, where that is one length
    device: where inputs go; by default where the embedding is (accelerate's offloading hides that)
    folder: of the checkpoint it was loaded from
    kernels: run the layers wherever they can (`models.fused`); None: the layers' modules. The sampler sets it
    compile: `torch.compile` the parts of the layers, in place of kernels

    Raises:
        UserError: the module is no `Transformer`, or a token lies outside its vocabulary.
    """

    model: nn.Module
    mask_id: int
    eos_id: int
    pad_id: int | None = None
    eot_id: int | None = None
    shift: bool = False
    attention: Literal["bidirectional", "block_causal"] = "bidirectional"
    block_length: int | None = None
    device: torch.device | None = None
    folder: Path | None = None
    kernels: LayerKernels | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        size = self.transformer.config.vocab_size
        for name in ("mask_id", "eos_id", "pad_id", "eot_id"):
            token = getattr(self, name)
            if token is not None and not 0 <= token < size:
                raise UserError(f"{name} {token} lies outside the model's vocabulary of {size} tokens")

    @property
    def transformer(self) -> Transformer:
        """The network inside its wrappers. DDP's own forward would synchronise buffers, so it is left out too."""
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        model = getattr(model, "_orig_mod", model)  # torch.compile cannot trace through a cache
        if not isinstance(model, Transformer):
            raise UserError(
                f"a {type(model).__name__} is no dllm_sampler Transformer; wrap it in a Denoiser of its own"
            )
        return model

    @property
    def spec(self) -> ModelSpec:
        """What the loop must know; dtype and device are the module's at this moment."""
        model = self.transformer
        config, weight = model.config, model.embed.weight
        device, dtype = self.device or weight.device, weight.dtype
        if dtype != torch.float64 and torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)  # keys and values come in it
        return ModelSpec(
            vocab_size=config.vocab_size,
            mask_id=self.mask_id,
            eos_id=self.eos_id,
            pad_id=self.eos_id if self.pad_id is None else self.pad_id,
            eot_id=self.eot_id,
            max_positions=config.max_positions,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=device,
            attention=self.attention,
            block_length=self.block_length,
            shift=self.shift,
            folder=self.folder,
        )

    # Not inference_mode: its tensors could not enter a later backward pass of the training loop around us.
    @torch.no_grad()
    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        """Hidden states `[B, K, Q, D]` after the final norm: row i predicts `query.positions[:, i]`."""
        batch, candidates, width = query.ids.shape
        # Hypotheses are written onto whole rows first: fillers land in the empty slot, whatever is computed.
        rows = canvas.ids[:, None].expand(-1, candidates, -1)  # [B, K, L+1]
        rows = rows.scatter(2, query.positions[:, None].expand_as(query.ids), query.ids)
        ids = rows.gather(2, _repeat(plan.positions, candidates))  # [B, K, M]
        predictors = self._predictors(canvas, query.positions)
        answers, columns = _index(predictors, plan), plan.positions
        if query.blind:
            answers, plan = _shadows(canvas, query, plan, answers)
            ids = torch.cat([ids, torch.full_like(query.ids, self.mask_id)], 2)  # [B, K, M+Q]
            columns = torch.cat([columns, predictors], 1)
        plan = plan.cache.fork(plan, canvas, candidates, query.tree)
        model = self.transformer
        kernels = None if self.compile else self.kernels
        drive = fused.drive(kernels, model, canvas, query, plan) or partial(_drive, plan, self.compile)
        # Rotary positions count from the row's first token, so that padding changes nothing.
        positions = _repeat(columns - canvas.begin[:, None], candidates)
        hidden = model(
            ids.flatten(0, 1),
            positions=positions.flatten(0, 1),
            soft=None if query.soft is None else _soft(query, plan),
            drive=drive,
            rows=_repeat(answers, candidates).flatten(0, 1),
        )
        return hidden.view(batch, candidates, width, -1), spent(canvas, query, plan)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., V]` of hidden states `[..., D]`."""
        return self.transformer.head(hidden)

    def using(self, backend: Backend) -> TransformerDenoiser:
        """The same model on other kernels."""
        return replace(self, kernels=backend.layer)

    def head_weight(self) -> Tensor | None:
        """`[V, D]` if the head is a product with a weight and nothing else, which a kernel may take over; else None."""
        head = self.transformer.lm_head
        weight, device = head.weight.detach(), head.weight.device.type
        alone = type(head) is nn.Linear and head.bias is None and not fused.hooked(head)
        return weight if alone and type(weight) is Tensor and not torch.is_autocast_enabled(device) else None

    def _predictors(self, canvas: Canvas, columns: Tensor) -> Tensor:
        """`[B, Q]` column of the row that predicts each of `columns [B, Q]`."""
        if not self.shift:
            return columns
        # The row's very first position has no row before it and reads its own.
        return torch.where(columns > canvas.begin[:, None], columns - 1, columns)


def spent(canvas: Canvas, query: Query, plan: Plan) -> Spent:
    """The cost of one pass: rows of finished generations and filler candidates are free."""
    live = (~canvas.done).long()  # [B]
    candidates = query.ids.shape[1] if query.live is None else query.live
    return Spent(live, plan.cache.rows(plan) * candidates * live)


def _drive(plan: Plan, compile: bool, index: int, layer: Layer, hidden: Tensor, rope: Rope) -> Tensor:
    return plan.cache.layer(index, CompiledParts(layer) if compile else layer, hidden, rope, plan)


def _index(columns: Tensor, plan: Plan) -> Tensor:
    """`[B, Q]` index of each of `columns [B, Q]` among the planned ones; any valid index for those not planned."""
    index = columns if plan.contiguous else torch.searchsorted(plan.positions.contiguous(), columns.contiguous())
    return index.clamp(max=plan.positions.shape[1] - 1)


def _shadows(canvas: Canvas, query: Query, plan: Plan, answers: Tensor) -> tuple[Tensor, Plan]:
    """Answers and plan with one more row per queried position: a mask token that does not see that position's token.

    Shadows stand where their position's prediction is made. Each sees the canvas but for its own position, and the
    other shadows; the canvas sees none of them. Only the block has shadows, and they answer for what is committed.
    """
    batch, width = plan.positions.shape
    asked = query.positions
    there = (asked >= canvas.start[:, None]) & (asked < canvas.stop[:, None])  # [B, Q]
    seen = torch.ones_like(plan.positions, dtype=torch.bool) if plan.keys is None else plan.keys  # [B, M]
    if seen.dim() == 2:
        seen = seen[:, None].expand(-1, width, -1)  # [B, M, M]
    own = seen.gather(1, answers[..., None].expand(-1, -1, width))  # [B, Q, M]: what the row sees that it shadows
    others = own & (plan.positions[:, None] != asked[..., None])
    shadows = there[:, None]  # [B, 1, Q]: shadows that are seen
    real = torch.cat([seen, torch.zeros_like(shadows).expand(-1, width, -1)], 2)
    keys = torch.cat([real, torch.cat([others, shadows.expand(-1, asked.shape[1], -1)], 2)], 1)  # [B, M+Q, M+Q]
    row = torch.arange(width, width + asked.shape[1], device=asked.device).expand(batch, -1)
    answers = torch.where(there & ~canvas.masked.gather(1, asked), row, answers)
    return answers, replace(plan, keys=keys, computed=plan.computed + there.sum(1))


def _soft(query: Query, plan: Plan) -> tuple[Tensor, Tensor]:
    """The query's embeddings `[B*K, M, D]` laid over the computed rows, and the bool `[B*K, M]` where there are any."""
    assert query.soft is not None
    candidates, width, size = query.soft.shape[1:]
    source = torch.searchsorted(query.positions.contiguous(), plan.positions.contiguous())  # [B, M]
    source = source.clamp(max=width - 1)
    where = query.positions.gather(1, source) == plan.positions
    values = query.soft.gather(2, _repeat(source, candidates)[..., None].expand(-1, -1, -1, size))  # [B, K, M, D]
    return values.flatten(0, 1), _repeat(where, candidates).flatten(0, 1)


def _repeat(rows: Tensor, candidates: int) -> Tensor:
    """`[B, M]` to `[B, K, M]`."""
    return rows[:, None].expand(-1, candidates, -1)
