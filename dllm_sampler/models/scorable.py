"""Any model as a module with the call of a `Transformer`, to score texts."""

from inspect import signature
from typing import Any, cast

from torch import nn

from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.errors import UserError
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.rows import RowsDenoiser, RowsModule
from dllm_sampler.models.transformer import Transformer


def scorable(model: nn.Module | Denoiser) -> nn.Module:
    """Return a model as a module with the call of a `Transformer`. No weight is copied, and no mode is changed.

    Args:
        model: a `Transformer`, a masked LM of transformers, a wrapper of one (DDP, peft, `torch.compile`), the denoiser
            of a sampler, or a function with the call of a `Transformer`, which is returned as it is.

    Raises:
        UserError: the model cannot be scored, for example a denoiser under guidance.
    """
    if isinstance(model, TransformerDenoiser):
        return model.model
    if isinstance(model, RowsDenoiser):
        return model.module()
    if not isinstance(model, nn.Module):
        if hasattr(model, "spec") or not callable(model):
            raise UserError(
                "model-not-scorable",
                f"A model of type {type(model).__name__} cannot be scored. Pass a Transformer, a masked LM of"
                " transformers, or the denoiser of a sampler without guidance.",
            )
        return cast(Any, model)  # a function with that call
    ours = any(isinstance(one, Transformer | RowsModule) for one in model.modules())
    if ours or "rows" in signature(model.forward).parameters:
        return model
    # Only here: they take seconds to import, which scoring a network of ours should not cost.
    from transformers import PreTrainedModel

    from dllm_sampler.models.huggingface import MaskedLM

    return MaskedLM(model) if any(isinstance(one, PreTrainedModel) for one in model.modules()) else model
