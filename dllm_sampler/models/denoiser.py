"""A `Transformer`, freshly loaded or in training, as the denoiser of the sampling loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized

from dllm_sampler.cache.base import PaddedPlan
from dllm_sampler.core.checks import check_choice, check_count, is_whole
from dllm_sampler.core.ends import end_ids
from dllm_sampler.core.naming import named
from dllm_sampler.core.packing import Pack
from dllm_sampler.core.protocols import Plan
from dllm_sampler.core.spec import Attention, BlocksFrom, ModelSpec
from dllm_sampler.core.values import Canvas, Query, Spent
from dllm_sampler.core.visibility import Visible, predictors
from dllm_sampler.errors import UserError, as_typed, invalid
from dllm_sampler.kernels.backend import Backend, LayerKernels, has_hooks
from dllm_sampler.models import fused
from dllm_sampler.models.attention_means import Watching
from dllm_sampler.models.compiled import Parts
from dllm_sampler.models.packed import PackedAttention
from dllm_sampler.models.soft import soft_inputs
from dllm_sampler.models.transformer import Layer, Rope, Transformer, pick_rows


@dataclass(frozen=True)
class TransformerDenoiser:
    """A denoiser that runs a `Transformer` on the rows that a cache planned, and answers the queried positions.

    The module is used as it is: its weights are not copied, its mode and `requires_grad` stay, autocast applies as
    around any other forward. It may be sharded in place (FSDP2) or wrapped in `DistributedDataParallel`. Every rank of
    a sharded model must sample the same number of steps, as `Sampler.generate_many` does.

    Args:
        model: the module.
        mask_id: the mask token. None means uniform diffusion, whose noise is random tokens.
        eos_id: the end-of-text token, or several. Each of them ends an answer, and the first one is written.
        pad_id: the padding token. By default the first end-of-text token.
        eot_id: the token that ends a chat turn.
        shift: raw row i predicts the token at i + 1 (Dream).
        seeds: the row before a block predicts the block's first token (Nemotron-Labs-Diffusion).
        attention: the columns that a token sees, see `core.spec.Attention`.
        blocks_from: column that blocks are counted from, under block-causal attention.
        block_length: length of the blocks that the model was trained on, if there is one.
        device: device of the inputs. By default the embedding's (accelerate's offloading hides that).
        folder: folder of the checkpoint that the model was loaded from.
        kernels: kernels that run the layers if they can (`models.fused`). By default the layers' modules run.
        compile: `torch.compile` the parts of the layers, in place of kernels.

    Raises:
        UserError: the module is not a `Transformer`, a token is outside its vocabulary, or another argument is invalid.
    """

    model: nn.Module
    mask_id: int | None
    eos_id: int | Sequence[int]
    pad_id: int | None = None
    eot_id: int | None = None
    shift: bool = False
    seeds: bool = False
    attention: Attention = "bidirectional"
    blocks_from: BlocksFrom = "text"
    block_length: int | None = None
    device: torch.device | None = None
    folder: Path | None = None
    kernels: LayerKernels | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        check_choice("attention", self.attention, Attention)
        check_choice("blocks_from", self.blocks_from, BlocksFrom)
        check_count("block_length", self.block_length, optional=True)
        if self.device is not None and not isinstance(self.device, torch.device):
            raise invalid("device", self.device, "Give a torch.device, or None", "option-type")
        size = self.transformer.config.vocab_size
        vars(self)["eos_id"] = checked_ends(self.eos_id, size)
        check_tokens(size, mask_id=self.mask_id, pad_id=self.pad_id, eot_id=self.eot_id)

    @property
    def transformer(self) -> Transformer:
        """The network inside its wrappers. They do not run: DDP's forward, for example, would synchronise buffers."""
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        model = getattr(model, "_orig_mod", model)  # torch.compile cannot trace through a cache
        if not isinstance(model, Transformer):
            raise UserError(
                "model-invalid",
                f"The model is {type(model).__name__}, not a Transformer of dllm_sampler. Use"
                " dllm_sampler.models.huggingface.wrap for a masked LM of transformers, or Sampler.from_callable.",
            )
        return model

    @property
    def spec(self) -> ModelSpec:
        """Facts about the model. The dtype and the device are the module's at this moment."""
        model = self.transformer
        config, weight = model.config, model.embed.weight
        device, dtype = self.device or weight.device, weight.dtype
        eos_id, *others = end_ids(self.eos_id)
        if dtype != torch.float64 and torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)  # keys and values come in it
        return ModelSpec(
            vocab_size=config.vocab_size,
            mask_id=self.mask_id,
            eos_id=eos_id,
            other_eos_ids=tuple(others),
            pad_id=eos_id if self.pad_id is None else self.pad_id,
            eot_id=self.eot_id,
            max_positions=config.max_positions,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=device,
            attention=self.attention,
            blocks_from=self.blocks_from,
            block_length=self.block_length,
            shift=self.shift,
            seeds=self.seeds,
            routing=config.moe.block if config.moe is not None and config.moe.pool else None,
            folder=self.folder,
        )

    @property
    def inference_mode(self) -> bool:
        """True if steps may run in `torch.inference_mode`, whose tensors autograd cannot use later.

        It is False if tensors of a forward may outlive it. Examples are buffers of a sharded, wrapped or offloaded
        module, tensors stored by a hook or a parametrisation, and autocast's copies of weights.
        """
        model, layers = self.model, self.transformer.layers
        ours = type(model) is Transformer and all(type(layer) is Layer for layer in layers)
        more = any(has_hooks(one) or is_parametrized(one) for one in model.modules())
        return ours and not more and not torch.is_autocast_enabled(self.spec.device.type)

    @torch.no_grad()
    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        """Return hidden states `[R, D]` after the final norm, one for each of `plan.head_rows`, and the cost."""
        if isinstance(plan, PaddedPlan):
            return self._padded(canvas, query, plan), spent(canvas, plan)
        pack, model = plan.pack, self.transformer
        assert pack is not None
        kernels = None if self.compile else self.kernels
        moe = model.config.moe
        together = pack.together(moe.block) if moe is not None and moe.pool else None
        drive = fused.drive(kernels, model, canvas, query, plan, together)
        if drive is None:
            plan = replace(plan, attention=plan.attention or PackedAttention(pack))
            drive = partial(_drive, plan, self.compile, together)
        if plan.means is not None:
            sees = Visible.of(canvas, query, self.attention)
            drive = Watching(drive, plan, canvas, query, sees, len(model.layers))
        hidden = model(
            pack.ids(canvas, query, self.mask_id)[None],
            positions=self.positions(query, pack)[None],
            drive=drive,
            rows=pack.head_entries[None],
            inputs=soft_inputs(pack, canvas, query, self.mask_id),
        )
        return hidden[0], spent(canvas, plan)

    def positions(self, query: Query, pack: Pack) -> Tensor:
        """Return `[T]` the rotary positions of the entries of a pack: their columns."""
        return pack.column

    def _padded(self, canvas: Canvas, query: Query, plan: PaddedPlan) -> Tensor:
        """Return hidden states `[R, D]` for a cache that runs the layers on a padded plan."""
        if query.ids.shape[1] > 1 or query.leave_one_out or query.mixture is not None:
            several, shadows = query.ids.shape[1] > 1, query.leave_one_out
            what = "several candidates" if several else "shadow rows" if shadows else "mixtures of embeddings as inputs"
            said = f"cache={named(plan.cache)} does not support {what}, which the scheduler needs. Use cache=none."
            raise UserError("cache-incompatible", said)
        columns = predictors(canvas, query.positions, self.shift, self.seeds)  # [B, Q]
        at = columns if plan.contiguous else torch.searchsorted(plan.positions.contiguous(), columns.contiguous())
        hidden = self.transformer(
            canvas.ids.scatter(1, query.positions, query.ids[:, 0]).gather(1, plan.positions),
            positions=plan.positions,
            drive=partial(_drive, plan, self.compile, None),
            rows=at.clamp(max=plan.positions.shape[1] - 1),  # what is not computed has no answer: any row will do
        )  # [B, Q, D]
        return plan.head_rows.pick(hidden[:, None])

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., V]` of hidden states `[..., D]`."""
        return self.transformer.head(hidden)

    def in_blocks(self, blocks_from: BlocksFrom, length: int | None = None) -> TransformerDenoiser:
        """Return the same model with block-causal attention: each block sees itself whole, and the blocks before it.

        Args:
            blocks_from: column that blocks are counted from.
            length: length of the blocks that the model was trained on. None keeps `block_length`.
        """
        length = self.block_length if length is None else length
        return replace(self, attention="block_causal", blocks_from=blocks_from, block_length=length, seeds=False)

    def using(self, backend: Backend) -> TransformerDenoiser:
        """Return the same model on the kernels of `backend`."""
        return replace(self, kernels=backend.layer)

    def head_weight(self) -> Tensor | None:
        """Return the head's weight `[V, D]`, or None if the head does more than multiply by it."""
        head = self.transformer.lm_head
        weight, device = head.weight.detach(), head.weight.device.type
        alone = type(head) is nn.Linear and head.bias is None and not has_hooks(head)
        return weight if alone and type(weight) is Tensor and not torch.is_autocast_enabled(device) else None


def check_tokens(size: int, **tokens: object) -> None:
    """Refuse special tokens outside a vocabulary of `size` tokens. None stands for no token."""
    for name, token in tokens.items():
        if token is not None and not (is_whole(token) and 0 <= token < size):
            raise invalid(name, token, f"Set a token id from 0 to {size - 1}", "token-outside-vocabulary")


def checked_ends(eos_id: int | Sequence[int], size: int) -> int | tuple[int, ...]:
    """Return the end-of-text tokens of a model as its denoiser stores them: one number, or several in a tuple.

    Raises:
        UserError: `eos_id` is None or empty, or a token is outside a vocabulary of `size` tokens.
    """
    listed: Any = [*eos_id] if isinstance(eos_id, Iterable) and not isinstance(eos_id, str) else [eos_id]
    if not listed or None in listed:
        raise UserError("end-token-missing", f"eos_id={as_typed(eos_id)} is invalid. Give at least one token id.")
    for end in listed:
        check_tokens(size, eos_id=end)
    ends = end_ids(listed)
    return ends[0] if len(ends) == 1 else ends


def spent(canvas: Canvas, plan: Plan) -> Spent:
    """Return the cost of one pass. Finished rows cost nothing."""
    return Spent((~canvas.done).long(), plan.cache.cost(plan))


def _drive(
    plan: Plan,
    compile: bool,
    together: Tensor | None,
    index: int,
    layer: Layer,
    hidden: Tensor,
    rope: Rope,
    rows: Tensor | None,
) -> Tensor:
    """Run a layer by the plan's cache. Its last five arguments are those of a `Drive`."""
    parts = Parts(layer, together, compile) if compile or together is not None else layer
    if rows is not None and plan.pack is not None and together is None:
        return plan.cache.layer(index, parts, hidden, rope, replace(plan, last=True))
    return pick_rows(plan.cache.layer(index, parts, hidden, rope, plan), rows)
