"""Logits and a canvas on which each scheduler decides, and a count of the tensor operations of a decision."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_sampler import config
from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.check.reads import no_host_reads
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Carry, Context, Scheduler
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Canvas, Query, Readout
from dllm_sampler.engine import layout, readout
from dllm_sampler.host import files

PROMPT, BLOCKS = 64, 4  # prompt tokens, blocks on the canvas
WARM = 2  # steps played before the counted one


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
        return readout.read(logits, canvas, HeadRows.every(query), readout.Rule(self.spec, (), needs))

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


class Operations(TorchDispatchMode):
    """Counts tensor operations other than views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def operations(run: Callable[[], object]) -> int:
    """Count the tensor operations of a call."""
    with torch.no_grad(), Operations() as seen:
        run()
    return seen.count


def scheduler(scene: Scene, name: str) -> Scheduler:
    """Build a scheduler of `conf/` with its defaults."""
    settings = {"name": name} | ({"filter": scene.filter()} if name == "learn2pd" else {})
    return config.build("scheduler", settings)


def decision(scene: Scene, scheduler: Scheduler) -> int:
    """Count the tensor operations of a scheduler's decision in the middle of a block.

    Raises:
        HostRead: a decision reads the device.
    """
    scheduler = scheduler.bind(scene.context)
    canvas = scene.canvas()
    carry: Carry = scheduler.init(canvas)
    for _ in range(WARM):
        with no_host_reads():
            query = scheduler.ask(canvas, carry)
        seen = scene.read(scene.fresh(query), canvas, query, scheduler.needs)
        with no_host_reads():
            edit, carry = scheduler.tell(canvas, query, seen, carry)
        edit = replace(edit, commit=edit.commit)  # makes a choice that the scheduler left open
        after = canvas.apply(query.positions, edit)
        canvas = after.advance(after.block_over(edit), scene.block, edit.finish)
    query = scheduler.ask(canvas, carry)
    seen = scene.read(scene.fresh(query), canvas, query, scheduler.needs)

    def tell() -> None:
        edit, _ = scheduler.tell(canvas, query, seen, carry)
        replace(edit, commit=edit.commit)

    return operations(tell)
