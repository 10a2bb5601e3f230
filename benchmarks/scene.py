"""Logits and a canvas on which `scheduler_overhead.py` has each scheduler judge."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.core import files
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.packing import Answers
from dllm_sampler.core.protocols import Context
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Canvas, Query, Readout
from dllm_sampler.engine import layout, readout

PROMPT, BLOCKS = 64, 4  # prompt tokens, blocks on the canvas


@dataclass
class Scene:
    """Logits and a canvas to judge them on."""

    batch: int
    block: int
    vocab: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.spec = ModelSpec(
            vocab_size=self.vocab,
            mask_id=self.vocab - 128 if self.vocab > 1000 else self.vocab - 1,
            eos_id=self.vocab - 383 if self.vocab > 1000 else self.vocab - 2,
            pad_id=0,
            max_positions=4096,
            num_layers=1,
            num_kv_heads=1,
            head_dim=8,
            dtype=self.dtype,
            device=torch.device("cpu"),
        )
        # Confidences as a trained model has them: some positions near 1, most anywhere, some near none.
        generator = torch.Generator().manual_seed(0)
        size = (self.batch, 1, self.block)
        self.logits = torch.randn(*size, self.vocab, generator=generator).mul_(2)
        best = torch.randint(self.vocab // 2, (*size, 3), generator=generator)
        lift = torch.rand(*size, 3, generator=generator) * 16 + 6
        self.logits.scatter_(-1, best, lift)
        self.scratch = torch.empty_like(self.logits)

    def fresh(self, query: Query) -> Tensor:
        """Logits `[B*K*Q, V]` to be overwritten, the same for the same place in a block."""
        logits, candidates = self._first(query), query.ids.shape[1]
        return logits.repeat_interleave(candidates, 1).flatten(0, 2) if candidates > 1 else logits.flatten(0, 2)

    def _first(self, query: Query) -> Tensor:
        """Those `[B, 1, Q, V]` of one candidate."""
        at = (query.positions - PROMPT).clamp(min=0) % self.block
        if query.positions.shape[1] == self.block and bool((at[:, 1:] > at[:, :-1]).all()):
            return self.scratch.copy_(self.logits)
        # Places that are not asked do not change what the answer to a query of this width costs.
        index = (torch.arange(self.batch)[:, None] * self.block + at).flatten()
        size = (*query.positions.shape, self.vocab)
        if at.shape[1] != self.block:
            return self.logits.flatten(0, 2).index_select(0, index).view(size)[:, None]
        torch.index_select(self.logits.flatten(0, 2), 0, index, out=self.scratch.view(-1, self.vocab))
        return self.scratch

    def read(self, logits: Tensor, canvas: Canvas, query: Query, needs: frozenset[str]) -> Readout:
        """The readout without guides."""
        return readout.read(logits, logits[:, :1], canvas, Answers.every(query), readout.Rule(self.spec, (), needs))

    def canvas(self) -> Canvas:
        """Noise behind prompts of different lengths, before the first step."""
        prompts = [[1] * (PROMPT - row) for row in range(self.batch)]
        blocks, noise = FixedBlocks(self.block), CounterNoise()
        return layout.canvas(prompts, BLOCKS * self.block, range(self.batch), self.spec, blocks, noise, True)

    @property
    def context(self) -> Context:
        """What plug-ins are bound to."""
        blocks = FixedBlocks(self.block)
        return Context(self.spec, blocks.bind(Context(self.spec, blocks)))

    def filter(self) -> str:
        """A file with an untrained Learn2PD filter of the published size."""
        generator, width = torch.Generator().manual_seed(0), 2 * self.block
        tensors = {"fc1.bias": torch.zeros(width), "fc2.bias": torch.zeros(self.block)}
        for name, shape in {"fc1": (width, self.block), "fc2": (self.block, width)}.items():
            tensors[f"{name}.weight"] = torch.randn(shape, generator=generator) / 8
        path = Path(tempfile.mkdtemp()) / "filter.safetensors"
        files.write(path, save(tensors))
        return str(path)
