"""The model that is trained: any that `dllm-sample` samples from, as transformers' `Trainer` takes a model."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import PreTrainedModel

from dllm_sampler import config
from dllm_sampler.errors import UserError
from dllm_sampler.host import files
from dllm_sampler.models import loading, saving
from dllm_sampler.models import lora as adapters
from dllm_sampler.models.adapter import has_adapter
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.diffusion_gemma import DiffusionGemmaDenoiser
from dllm_sampler.models.huggingface import MaskedLMDenoiser
from dllm_sampler.models.transformer import Transformer
from dllm_sampler.models.uniform import UniformLM
from dllm_sampler.sampler import Sampler

Model = str | Path | Mapping[str, Any] | Sampler
Settings = Mapping[str, Any] | None
ADAPTER = "adapter"  # folder of the adapters, inside that of the run
SHARED = "model.decoder.layers", "model.encoder.language_model.layers"  # of DiffusionGemma, with the same weights
FROZEN = (".router.", "vision")  # of DiffusionGemma: as its public recipe has it, and texts alone are learned
UNTRAINABLE = ("quantize", "device_map", "cfg_scale", "adapter")  # settings of a model that is only sampled from


class Trainable(nn.Module):
    """A network in training, called as a `Transformer` is: `(ids, positions=, keys=, rows=)` to logits.

    `inner` is the network as its checkpoint has it, and `adapter` the model of peft around it, or None. `settings` are
    those of `config.model`, or None for the model of a `Sampler`.
    """

    inner: Any
    adapter: Any

    def __init__(
        self, denoiser: Any, tokenizer: Any, named: str, settings: Settings = None, lora: Any = None, seed: int = 0
    ):
        super().__init__()
        if not isinstance(denoiser, TransformerDenoiser | MaskedLMDenoiser | DiffusionGemmaDenoiser):
            raise UserError("model-not-trainable", f"{type(denoiser).__name__} cannot be trained. Give a checkpoint.")
        gemma = isinstance(denoiser, DiffusionGemmaDenoiser)
        inner: Any = denoiser.transformer if isinstance(denoiser, TransformerDenoiser) else denoiser.model
        for name, weight in inner.named_parameters():
            # Routers' biases balance the experts in pre-training, by counts and not by gradients.
            if name.endswith("router.bias") or (gemma and any(part in name for part in FROZEN)):
                weight.requires_grad_(False)
        adapter = None if lora is None else adapters.attach(inner, lora, seed, SHARED if gemma else None)
        vars(self).update(inner=inner, adapter=adapter)  # parts of the network, and no modules beside it
        plain = UniformLM(inner) if gemma else inner
        self.network: nn.Module = denoiser.module() if isinstance(denoiser, MaskedLMDenoiser) else plain
        self.denoiser, self.tokenizer, self.named = denoiser, tokenizer, named
        self._settings, self._lora, self._seed = settings, lora, seed
        self._keys_to_ignore_on_save = sorted(self.state_dict().keys() - self.learned().keys())

    @classmethod
    def load(
        cls, model: Model, dtype: str | None = "float32", lora: Any = None, seed: int = 0, uniform: bool = False
    ) -> Self:
        """Load a model. With `dtype=None` weights are as stored. `uniform` accepts a model without a mask token."""
        settings = None
        if isinstance(model, Sampler):
            named, denoiser, tokenizer = type(model.denoiser).__name__, model.denoiser, model.tokenizer
        else:
            named = str(model.get("path", model.get("name"))) if isinstance(model, Mapping) else str(model)
            settings = config.model({} if model is None else model)
            folder = loading.find(*(settings[name] for name in ("path", "revision", "trust_remote_code")))
            unfit = [name for name in UNTRAINABLE if settings[name]]
            unfit += ["causal_context=false"] if settings["causal_context"] is False else []
            if unfit or has_adapter(folder):
                said = f"{unfit[0]}, which is for sampling only. Remove it." if unfit else "an adapter. Merge it first."
                raise UserError("option-not-applicable", f"train.model={named} has {said}")
            settings["dtype"] = dtype
            denoiser, tokenizer = loading.load(**settings, device=torch.device("cpu"))
        if tokenizer is None:
            said = f"train.model={named} has no tokenizer. Add its files, or give Sampler(..., tokenizer=TOKENIZER)."
            raise UserError("tokenizer-missing", said)
        if not uniform and denoiser.spec.mask_id is None:
            raise UserError("mask-token-missing", f"train.model={named} has no mask token. Use train=sft.")
        return cls(denoiser, tokenizer, named, settings, lora, seed)

    def forward(self, *args: Any, **options: Any) -> Any:
        """Return the logits of the network."""
        return self.network(*args, **options)

    @property
    def spec(self) -> Any:
        """The `ModelSpec` of the model."""
        return self.denoiser.spec

    def learned(self) -> dict[str, nn.Parameter]:
        """Return the parameters that an optimizer moves, each under one name."""
        return {name: weight for name, weight in self.named_parameters() if weight.requires_grad}

    def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """Store only the inputs of layers for the backward pass, and compute the rest twice."""
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

    activation_checkpointing_enable = gradient_checkpointing_enable  # from transformers 5.20 on

    @property
    def _no_split_modules(self) -> list[str]:
        if isinstance(self.network, UniformLM):
            return list(self.network.join_layers())
        lists = (part for part in self.network.modules() if isinstance(part, nn.ModuleList))
        return sorted({type(layer).__name__ for part in lists for layer in part})

    def tie_weights(self) -> None:
        """Share the weights that the model's configuration ties."""
        self.inner.tie_weights()

    def sampling(self, run: Callable[[], Any]) -> Any:
        """Return `run()`, which may sample: the model is in eval mode, and a sharded one has all its weights."""
        training = self.training
        self.eval()
        register_fsdp_forward_method(self, "_gathered")  # does nothing for others
        try:
            return self._gathered(run)
        finally:
            self.train(training)

    def _gathered(self, run: Callable[[], Any]) -> Any:
        # Whole layers in each process: numbers of forwards may differ.
        layers: list[Any] = [one for one in self.modules() if isinstance(one, FSDPModule) and one is not self]
        for layer in layers:
            layer.set_reshard_after_forward(False, recurse=False)
            layer.unshard()
        try:
            return run()
        finally:
            for layer in layers:
                layer.set_reshard_after_forward(True, recurse=False)
                layer.reshard()

    def save(self, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
        """Write the checkpoint in its family's format, adapters merged. `state` has all weights of sharded ones."""
        source, network = self.denoiser.folder, self.inner
        if source is None:
            if not isinstance(network, PreTrainedModel) or state is not None:
                said = "the model is from no checkpoint, so it has no format. Save it yourself."
                raise UserError("model-not-found", said)
            network = network if self.adapter is None else adapters.merged(deepcopy(self.adapter))
            for part in (network, self.tokenizer):
                files.write_folder(folder, part.save_pretrained)  # pyright: ignore
            return
        weight = str(self.spec.dtype).removeprefix("torch.")
        settings = self._settings or {"path": str(source), "mask_id": self.spec.mask_id, "dtype": weight}
        hub = None if Path(str(settings["path"])).expanduser().is_dir() else str(settings["path"])
        if self.adapter is not None or state is not None:  # another one, in main memory
            denoiser, _ = loading.load(**settings, device=torch.device("cpu"))
            made = Trainable(denoiser, self.tokenizer, self.named, settings, self._lora, self._seed)
            made.load_state_dict(self.state_dict() if state is None else state)
            network = made.inner
            if made.adapter is not None:
                adapters.save(made.adapter, source, hub or str(source.resolve()), folder / ADAPTER)
                network = adapters.merged(made.adapter)
        saving.save(network, source, folder, hub)
