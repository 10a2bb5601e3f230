"""The trainer of `mini`: masked-diffusion training from scratch, small enough for one CPU core."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor

from dllm_sampler.config import check
from dllm_sampler.errors import UserError
from dllm_sampler.host import files
from dllm_sampler.host.paths import expanded
from dllm_sampler.models.loading import as_device
from dllm_sampler.models.mini_export import export
from dllm_sampler.models.mini_tokenizer import MASK, build_tokenizer
from dllm_sampler.models.transformer import Transformer, TransformerConfig
from dllm_sampler.training import checkpoint, journal, sharding
from dllm_sampler.training.data import Batch, Pools, corrupt
from dllm_sampler.training.progress import bar, interrupts
from dllm_sampler.training.settings import check_settings, check_shape

# A resumed run may change these; anything else would make it another run.
_FREE = ("output", "device", "checkpoint_every", "tracker", "steps")


@dataclass
class MiniTrainer:
    """Trains a LLaDA-style denoiser (arXiv 2502.09992) on the tasks of `models/mini_tasks.py` and exports it.

    output: folder of the run; ends up a complete checkpoint that `model=FOLDER` loads
    device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`
    seed: of weights, data and masks
    steps: optimizer steps in all
    checkpoint_every: steps between two saved states, and two lines of the log
    tracker: where the log goes besides: null, `tensorboard` or `trackio`, whose package must be there
    model: fields of `TransformerConfig` other than the vocabulary's size
    init_std, embedding_std: deviations of the initial weights
    data: fields of `Pools`
    learning_rate, warmup, decay: peak, steps to reach it, and the last share of all steps in which it falls to 0
    betas, weight_decay, clip: of AdamW, and the gradient norm's limit
    """

    output: str
    device: str
    seed: int
    steps: int
    checkpoint_every: int
    tracker: str | None
    model: dict[str, Any]
    init_std: float
    embedding_std: float
    data: dict[str, Any]
    learning_rate: float
    warmup: int
    decay: float
    betas: tuple[float, float]
    weight_decay: float
    clip: float

    def __post_init__(self) -> None:
        for name in ("steps", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise UserError("option-range", f"train.{name} must be at least 1, not {getattr(self, name)}")
        check_settings(vars(self))
        journal.check(self.tracker)

    def run(self) -> Path:
        """Train from scratch or from the last saved state, export the result, and return its folder.

        Raises:
            UserError: the folder holds a finished model, or a run of another configuration
            KeyboardInterrupt: after Ctrl-C, with the state saved
        """
        sharding.check_alone("mini")
        folder = expanded("train.output", self.output)
        if (folder / "model.safetensors").exists():
            raise UserError("run-finished", f"{folder} has a finished model. Choose another train.output.")
        files.make_folder(folder)
        self._build()
        state = self._resume(folder)
        log = journal.Journal(folder / journal.FILE, state["step"], self.tracker, asdict(self))
        with self._progress(state) as progress, interrupts() as interrupted:
            for batch in self._batches(state):
                self._step(batch, state)
                if state["step"] % 20 == 0:
                    self._report(progress, state)
                if state["step"] % self.checkpoint_every == 0 or state["step"] == self.steps or interrupted.is_set():
                    log.note(state["step"], _figures(state))  # first: the state vouches for the lines before it
                    checkpoint.save(folder, self.network, self.optimizer, state)
                    progress.console.print(_line(state, self.steps))
                    state |= {"loss_sum": 0.0, "loss_steps": 0}
                if interrupted.is_set():
                    raise KeyboardInterrupt
        log.close()
        export(self.network, self.tokenizer, folder)
        (folder / checkpoint.FILE).unlink()
        return folder

    def _build(self) -> None:
        """Tokenizer, network and optimizer as they are before the first step."""
        self._device = as_device(self.device)
        self.tokenizer = build_tokenizer(self.model["max_positions"])
        self._mask_id = self.tokenizer.get_vocab()[MASK]
        self.pools = Pools(**check("train.data", Pools, {"seed": self.seed, **self.data}))
        shape = check("train.model", TransformerConfig, {"vocab_size": len(self.tokenizer), **self.model})
        check_shape(shape)
        self.network = Transformer(TransformerConfig(**shape))
        generator = torch.Generator().manual_seed(self.seed)
        self.network.init_weights(std=self.init_std, embedding_std=self.embedding_std, generator=generator)
        self.network.to(self._device)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), betas=self.betas, weight_decay=self.weight_decay, fused=True
        )

    def _resume(self, folder: Path) -> dict[str, Any]:
        """The state to go on from: the saved one, or that of a fresh run."""
        mine = {key: value for key, value in asdict(self).items() if key not in _FREE}
        fresh = {"step": 0, "pool": 0, "place": 0, "tokens": 0, "seconds": 0.0, "loss_sum": 0.0, "loss_steps": 0}
        if not (folder / checkpoint.FILE).exists():
            return {**fresh, "config": mine}
        checkpoint.check_same(folder, checkpoint.settings(folder), mine)
        state = checkpoint.load(folder, self.network, self.optimizer)
        return {**state, "loss_sum": 0.0, "loss_steps": 0}

    def _batches(self, state: dict[str, Any]) -> Iterator[Batch]:
        """The batches that are left, from the place in `state` on, which moves along."""
        while state["step"] < self.steps:
            for batch in self.pools.batches(self.tokenizer, state["pool"])[state["place"] :]:
                if state["step"] >= self.steps:
                    return
                state["place"] += 1
                yield batch
            state |= {"pool": state["pool"] + 1, "place": 0}

    def _step(self, batch: Batch, state: dict[str, Any]) -> None:
        """One optimizer step on one batch."""
        started = time.perf_counter()
        generator = torch.Generator().manual_seed(self.seed * 2**32 + state["step"])
        loss = self._loss(batch, *corrupt(batch, generator))
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * schedule(state["step"], self.steps, self.warmup, self.decay)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.clip)
        self.optimizer.step()
        state["step"] += 1
        state["tokens"] += batch.ids.numel()
        state["loss_steps"] += 1
        state["loss_sum"] += loss.item()
        state["seconds"] += time.perf_counter() - started

    def _loss(self, batch: Batch, masked: Tensor, weight: Tensor) -> Tensor:
        """Nats per response token: the likelihood bound's estimate from one corruption of the batch."""
        noisy = batch.ids.masked_fill(masked, self._mask_id).to(self._device)  # [B, L]
        logits = self.network(noisy)[masked.to(self._device)]  # [masked tokens, V]
        losses = F.cross_entropy(logits, batch.ids[masked].to(self._device), reduction="none")
        weights = weight.expand_as(masked)[masked].to(self._device)
        return (losses * weights).sum() / (batch.ids.shape[1] - batch.prompts).sum()

    def _progress(self, state: Mapping[str, Any]) -> Progress:
        return bar("mini", self.steps, state["step"])

    @staticmethod
    def _report(progress: Progress, state: Mapping[str, Any]) -> None:
        rate = state["tokens"] / max(state["seconds"], 1e-9)
        loss = state["loss_sum"] / max(state["loss_steps"], 1)
        text = f"mini  loss {loss:.4f}  {rate:,.0f} tokens/s"
        progress.update(progress.task_ids[0], completed=state["step"], description=text)


def schedule(step: int, steps: int, warmup: int, decay: float) -> float:
    """Share of the learning rate at a step: linear warm-up, a plateau, then linear to 0 over the last `decay`."""
    return min((step + 1) / max(warmup, 1), (1 - step / steps) / max(decay, 1e-9), 1.0)


def _figures(state: Mapping[str, Any]) -> dict[str, float]:
    """Mean loss since the last saved state, and what is done in all."""
    loss = state["loss_sum"] / state["loss_steps"] if state["loss_steps"] else math.nan
    return {"loss": loss, "tokens": state["tokens"], "seconds": state["seconds"]}


def _line(state: Mapping[str, Any], steps: int) -> str:
    loss, tokens, seconds = _figures(state).values()
    return f"step {state['step']}/{steps}  loss {loss:.4f}  tokens {tokens:,}  seconds {seconds:.0f}"
