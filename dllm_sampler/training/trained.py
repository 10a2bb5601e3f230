"""The model that is trained: any that `dllm-sample` samples from; one without a mask token by `train=sft` alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from dllm_sampler import config
from dllm_sampler.errors import UserError
from dllm_sampler.models import loading, saving, weights
from dllm_sampler.models.adapter import has_adapter
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.diffusion_gemma import MODEL_TYPE, DiffusionGemmaDenoiser
from dllm_sampler.models.huggingface import MaskedLM, MaskedLMDenoiser
from dllm_sampler.models.transformer import Transformer
from dllm_sampler.training import adapters, sharding
from dllm_sampler.training.uniform import UniformLM

T = TypeVar("T")
ADAPTER = "adapter"  # folder of the adapters, inside that of the run
FROZEN = (".router.", "vision")  # of DiffusionGemma: as its public recipe has it, and texts alone are learned
SHARED = "model.decoder.layers", "model.encoder.language_model.layers"  # its layers, which have the same weights
UNTRAINABLE = ("quantize", "device_map", "cfg_scale", "adapter")  # settings of a model that is only sampled from


@dataclass
class Trained:
    """A model with its tokenizer, in training and ready to sample from at any moment.

    network: called as a `Transformer` is: `(ids, positions=, keys=, rows=)` to logits
    denoiser: samples from it as it is now
    tokenizer: of the checkpoint
    named: what the user called the model
    source: the checkpoint's folder
    hub: its hub id, where it comes from there
    adapter: peft's model around the network; None: all weights learn
    wrapped: what a forward with a gradient calls: the network, or DDP around it
    sharded: whether the weights are spread over processes (FSDP2), so that these must make the same forwards
    """

    network: nn.Module
    denoiser: TransformerDenoiser | MaskedLMDenoiser | DiffusionGemmaDenoiser
    tokenizer: PreTrainedTokenizerBase
    named: str
    source: Path
    hub: str | None
    adapter: Any = None

    def __post_init__(self) -> None:
        self.wrapped, self.sharded = self.network, False

    @classmethod
    def load(
        cls,
        model: str | Mapping[str, Any],
        device: torch.device,
        dtype: str,
        lora: Mapping[str, float] | None,
        seed: int,
        *,
        uniform: bool = False,
    ) -> Self:
        """Load a model to train it.

        Args:
            model: as `Sampler.from_pretrained` takes it: a name, folder or hub id, or a dict with more settings.
            dtype: of the weights.
            lora: `r`, `alpha` and `dropout` of adapters; None: all weights learn.
            seed: of the adapters.
            uniform: take a model without a mask token, too.

        Raises:
            UserError: nothing to load there, or a model that cannot be trained.
        """
        named = called(model)
        settings = config.model(model)
        for name in UNTRAINABLE:
            if settings.pop(name):
                raise UserError("option-not-applicable", f"train.model has {name}, for sampling only. Remove it.")
        if settings["causal_context"] is False:
            raise UserError("option-not-applicable", "train.model has causal_context=false. Remove it.")
        if has_adapter(loading.find(*(settings[name] for name in ("path", "revision", "trust_remote_code")))):
            raise UserError(
                "adapter-unsupported",
                f"train.model={named} has an adapter. Merge it first, by merge_and_unload of peft.",
            )
        if not uniform:
            check_masks(model)
        denoiser, tokenizer = loading.load(**settings, dtype=dtype, device=device)
        assert isinstance(denoiser, TransformerDenoiser | MaskedLMDenoiser | DiffusionGemmaDenoiser)
        if tokenizer is None:
            raise UserError("tokenizer-missing", f"train.model={named} has no tokenizer. Add its files.")
        path = str(settings["path"])
        assert denoiser.folder is not None
        hub = None if Path(path).expanduser().is_dir() else path
        inner: Any = denoiser.transformer if isinstance(denoiser, TransformerDenoiser) else denoiser.model
        gemma = isinstance(denoiser, DiffusionGemmaDenoiser)
        for name, weight in inner.named_parameters():
            # Routers' biases balance the experts in pre-training, by counts and not by gradients.
            if name.endswith("router.bias") or (gemma and any(part in name for part in FROZEN)):
                weight.requires_grad_(False)
        adapter = None if lora is None else adapters.attach(inner, lora, seed, SHARED if gemma else None)
        network = inner if isinstance(inner, Transformer) else UniformLM(inner) if gemma else MaskedLM(inner)
        return cls(network.eval(), denoiser, tokenizer, named, denoiser.folder, hub, adapter)

    @property
    def inner(self) -> nn.Module:
        """The network as its checkpoint has it."""
        return self.network.model if isinstance(self.network, MaskedLM | UniformLM) else self.network

    def learning(self) -> list[nn.Parameter]:
        """What an optimizer moves."""
        return [weight for weight in self.network.parameters() if weight.requires_grad]

    def wrap(self, accelerator: Accelerator, shard: bool) -> None:
        """Average gradients over processes, where there are several, and `shard` the weights over them.

        Before there is an optimizer: sharding replaces the weights.
        """
        self.sharded = shard and accelerator.num_processes > 1
        if self.sharded:
            units = self.network.units() if isinstance(self.network, UniformLM) else None
            whole = self.inner if units is None else self.network
            sharding.shard(whole, accelerator.device, accelerator.num_processes, units)
        elif accelerator.num_processes > 1:
            self.wrapped = accelerator.prepare_model(self.network, device_placement=False)
        if isinstance(self.denoiser, TransformerDenoiser) and isinstance(self.network, Transformer):
            self.denoiser = replace(self.denoiser, model=self.wrapped)

    def together(self, items: Iterator[T]) -> Iterator[tuple[T, bool]]:
        """Each item that takes a forward, with True. Processes that share the weights must make as many forwards: one
        that is through gets its last item again, with False, until all are."""
        last = next(items)
        yield last, True
        while True:
            item = next(items, None)
            more = item is not None
            if not (sharding.anyone(more, self.denoiser.spec.device) if self.sharded else more):
                return
            last = last if item is None else item
            yield last, more

    def whole(self) -> dict[str, Tensor]:
        """All weights in main memory; where they are sharded every process must ask."""
        return {name: sharding.whole(tensor) for name, tensor in self.network.state_dict().items()}

    def recompute(self) -> None:
        """Keep the layers' inputs alone for the backward pass and compute the rest twice: less memory, more time."""
        if isinstance(self.network, UniformLM):
            self.network.recompute()
        elif isinstance(self.network, Transformer):
            self.network.recompute = True
        else:
            network: Any = self.inner
            network.config.use_cache = False  # of no use here, and transformers would say so
            name = "activation" if hasattr(network, "activation_checkpointing_enable") else "gradient"
            enable = getattr(network, f"{name}_checkpointing_enable")
            enable(**{f"{name}_checkpointing_kwargs": {"use_reentrant": False}})

    def sampling(self) -> AbstractContextManager[None]:
        """The context in which to sample from the model.

        It gives each process all weights of a sharded DiffusionGemma, whose prompts are answered batch by batch: the
        processes make different numbers of forwards.
        """
        uniform = self.sharded and isinstance(self.network, UniformLM)
        return sharding.gathered(self.network) if uniform else nullcontext()

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """The model before training, where adapters learn."""
        assert self.adapter is not None
        self.adapter.disable_adapter_layers()
        try:
            yield
        finally:
            self.adapter.enable_adapter_layers()

    def save(self, folder: Path) -> None:
        """Write the checkpoint in its family's format, adapters merged; before it, apart, the adapters alone.

        After that the network has no adapters any more.

        Raises:
            NotWrittenError: a file cannot be written.
        """
        network = self.inner
        if self.adapter is not None:
            base = self.hub or str(self.source.resolve())
            adapters.save(self.adapter, self._place, base, folder / ADAPTER)
            network = adapters.merged(self.adapter)
        saving.save(network, self.source, folder, self.hub)

    def _place(self, name: str) -> adapters.Place:
        """Where the checkpoint has the linear layer `name` of the network."""
        if not isinstance(self.network, Transformer):
            return name, 0
        (part,) = saving.family_of(self.source).parts(f"{name}.weight", self.network.config)
        return part.name.removesuffix(".weight"), part.rows.start if part.rows else 0


def check_masks(model: str | Mapping[str, Any]) -> None:
    """Refuse a model for a task that masks tokens, before it is loaded.

    Raises:
        UserError: it has no mask token, or there is nothing to load.
    """
    settings = config.model(model)
    folder = loading.find(*(settings[name] for name in ("path", "revision", "trust_remote_code")))
    path = folder / "config.json"
    if path.is_file() and weights.read_json(path).get("model_type") == MODEL_TYPE:
        raise UserError("mask-token-missing", f"train.model={called(model)} has no mask token. Use train=sft.")


def called(model: str | Mapping[str, Any]) -> str:
    """What the user called a model."""
    return str(model.get("path", model.get("name"))) if isinstance(model, Mapping) else str(model)
