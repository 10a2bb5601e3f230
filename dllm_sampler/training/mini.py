"""The trainer of `mini`: masked-diffusion training from scratch, small enough for one CPU core."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerFast

from dllm_sampler import config
from dllm_sampler.core.checks import check_count
from dllm_sampler.errors import UserError, invalid
from dllm_sampler.models import saving
from dllm_sampler.models.mini_export import export
from dllm_sampler.models.mini_pools import Batch, Pools
from dllm_sampler.models.mini_tokenizer import MASK, build_tokenizer
from dllm_sampler.models.transformer import Transformer, TransformerConfig
from dllm_sampler.training.cli import Command, last_checkpoint
from dllm_sampler.training.trainer import Arguments, CommandTrainer, Number

SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_positions")


def corrupt(batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return `[B, L] bool` masked tokens, and `[B, 1]` their weight in each row. The prompt is never masked.

    Of R response tokens k are masked at weight R/k. k is uniform on 1..R, stratified over rows (arXiv 2502.09992).
    """
    rows, total = batch.ids.shape
    responses = total - batch.prompts  # [B]
    strata = torch.randperm(rows, generator=generator) + torch.rand(rows, generator=generator)  # [B]
    number = (strata / rows * responses).floor().clamp(max=responses - 1) + 1  # [B]
    order = torch.rand(rows, total, generator=generator)  # [B, L]
    order.masked_fill_(torch.arange(total) < batch.prompts[:, None], 2)  # prompts come last and are never reached
    masked = order.argsort(1).argsort(1) < number[:, None]  # [B, L]
    return masked, (responses / number)[:, None]


class _Stream(IterableDataset[Batch]):
    """The batches of all pools, one after the other."""

    def __init__(self, pools: Pools, tokenizer: PreTrainedTokenizerFast):
        self.pools, self.tokenizer = pools, tokenizer

    def __iter__(self) -> Iterator[Batch]:
        for pool in count():
            yield from self.pools.batches(self.tokenizer, pool)


@dataclass
class MiniConfig(Arguments):
    """Settings of `MiniTrainer`.

    model: fields of `TransformerConfig` other than the vocabulary's size
    init_std, embedding_std: deviations of the initial weights
    data: fields of `Pools`
    """

    model: dict[str, Any] = field(default_factory=dict)
    init_std: Number = 0.05
    embedding_std: Number = 1.0
    data: dict[str, Any] = field(default_factory=dict)
    per_device_train_batch_size: Literal[1] = 1  # pyright: ignore[reportIncompatibleVariableOverride] (of whole batches)


class MiniTrainer(CommandTrainer):
    """Trains a LLaDA-style denoiser (arXiv 2502.09992) on the tasks of `models/mini_tasks.py`, in one process."""

    config: ClassVar[type[MiniConfig]] = MiniConfig

    def __init__(self, args: MiniConfig, **options: Any):
        shape = config.check("train.model", TransformerConfig, {"vocab_size": 1, **args.model}, whole=True)
        for name in SIZES:
            check_count(f"train.model.{name}", shape[name])
        for name, of, why in ("num_heads", shape["num_kv_heads"], " (num_kv_heads)"), ("head_dim", 2, ""):
            if shape[name] % of:
                raise invalid(f"train.model.{name}", shape[name], f"Set a multiple of {of}{why}")
        self.tokenizer = build_tokenizer(shape["max_positions"])
        pools = Pools(**config.check("train.data", Pools, {"seed": args.seed, **args.data}, whole=True))
        network = Transformer(TransformerConfig(**{**shape, "vocab_size": len(self.tokenizer)}))
        generator = torch.Generator().manual_seed(args.seed)
        network.init_weights(std=args.init_std, embedding_std=args.embedding_std, generator=generator)
        self.network, self._mask_id = network, self.tokenizer.get_vocab()[MASK]
        stream = _Stream(pools, self.tokenizer)
        # In a Sequential the network's configuration, which is not one of transformers, is hidden from the Trainer.
        super().__init__(nn.Sequential(network), args, lambda rows: vars(rows[0]), train_dataset=stream, **options)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        """Return nats per response token: the likelihood bound's estimate from one corruption of the batch."""
        clean, device = Batch(inputs["ids"].cpu(), inputs["prompts"].cpu()), self.args.device
        generator = torch.Generator().manual_seed(self.args.seed * 2**32 + self.state.global_step)
        masked, weight = corrupt(clean, generator)
        logits = model(clean.ids.masked_fill(masked, self._mask_id).to(device))[masked.to(device)]  # [masked tokens, V]
        losses = F.cross_entropy(logits, clean.ids[masked].to(device), reduction="none")
        weights = weight.expand_as(masked)[masked].to(device)
        return (losses * weights).sum() / (clean.ids.shape[1] - clean.prompts).sum()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the checkpoint in LLaDA's format; one on the way has the weights in full precision."""
        if _internal_call:
            super().save_model(output_dir, _internal_call)
        else:
            export(self.network.cpu(), self.tokenizer, Path(output_dir or self.args.output_dir))

    @classmethod
    def command(cls, line: Command) -> Path:
        """Train from scratch or from the last checkpoint, and return the folder of the result."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            said = "train=mini runs in one process. Run it without torchrun, or unset WORLD_SIZE."
            raise UserError("processes-unsupported", said)
        args = line.arguments(MiniConfig, model=line.model, data=line.data)
        folder, last = Path(args.output_dir), last_checkpoint(args.output_dir)
        line.begin(folder, saving.has_weights(folder), last)
        trainer = cls(args)
        line.choose_threads([trainer.network], args.device)
        trainer.train(resume_from_checkpoint=last if line.resume else None)
        trainer.save_model()
        trainer.save_state()
        return folder
