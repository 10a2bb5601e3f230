"""A family of checkpoints: how a `config.json` and its tensor names become a `Transformer`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dllm_sampler.core.spec import Attention
from dllm_sampler.models.fields import Fields, config_error, largest, shown, unsupported_error
from dllm_sampler.models.transformer import TransformerConfig

# Buffers in published checkpoints that no network needs: rotary frequencies follow from the config.
HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint.

    Args:
        name: the family's name in errors.
        model_type: `model_type` in `config.json`, compared without regard to case.
        read: returns the `TransformerConfig` of config fields.
        supported: config fields with the only value that is implemented. An absent or null field is supported, too.
        ignored: further config fields that the network does not depend on, besides `fields.IGNORED`. Any other field
            about the network that `read` does not use is refused, unless its value is neutral.
        names: our module to the checkpoint's, without `.weight` and `.bias`. `*` is the layer, `#` the expert (our
            parameter stacks all experts), `[q]`, `[k]`, `[v]` the rows of these heads in a fused tensor. The full name
            of a parameter takes precedence over its module's.
        marker: config field that another family of the same `model_type` does not have.
        architecture: name that `architectures` must contain, if other models have the same `model_type`.
        shift: raw row i predicts the token at i + 1.
        seeds: the row before a block predicts the block's first token.
        attention: the columns that a token sees, see `core.spec.Attention`.
        block_length: returns the length of the blocks that the checkpoint was trained on, from its config.
        may_see_blocks: checkpoints may be block-causal without a field that says so. The user sets `block_length`.
        end_of_turn: text of the token that ends a chat turn, if it is not the end-of-text token.
        mask_token: text of the mask token, if neither config nor tokenizer names its id.
    """

    name: str
    model_type: str
    read: Callable[[Fields], TransformerConfig]
    supported: Mapping[str, Any]
    names: Mapping[str, str]
    ignored: Collection[str] = ()
    marker: str | None = None
    architecture: str | None = None
    shift: bool = False
    seeds: bool = False
    attention: Attention = "bidirectional"
    block_length: Callable[[Fields], int] | None = None
    may_see_blocks: bool = False
    end_of_turn: str | None = None
    mask_token: str | None = None

    def knows(self, kind: str, raw: Mapping[str, Any]) -> bool:
        """Return True if a parsed `config.json` of the model type `kind`, in lower case, belongs to the family."""
        named = raw.get("architectures")
        return (
            self.model_type == kind
            and self.marker in (None, *raw)
            and self.architecture in (None, *(named if isinstance(named, list) else []))
        )

    def config(
        self, raw: Mapping[str, Any], source: str = "config.json", shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> TransformerConfig:
        """Return the network's shape by a parsed `config.json`.

        Args:
            raw: the parsed file.
            source: the file's name, for errors.
            shapes: shapes of the checkpoint's tensors, if known. They bound the sizes in the file.

        Raises:
            UserError: a field is missing, of the wrong type, too large for the tensors, or not implemented.
        """
        fields = Fields(raw, source)
        if shapes is not None:
            pattern = re.compile(re.escape(self.names["layers.*.attn_norm"]).replace(r"\*", r"(\d+)", 1) + r"\.")
            found = [int(match[1]) for name in shapes if (match := pattern.match(name)) and len(match[1]) < 10]
            # Without a tensor of any layer, `weights.complain` has a better message.
            fields = Fields(raw, source, largest(shapes), max(found) + 1 if found else len(shapes))
        for key, allowed in self.supported.items():
            value = fields.get(key)
            if value is not None and (value != allowed or isinstance(value, bool) != isinstance(allowed, bool)):
                reason = f"{self.name} with {key} = {shown(value)} instead of {shown(allowed)}"
                raise unsupported_error(source, reason)
        config = self.read(fields)
        if self.block_length is not None:
            length = self.block_length(fields)
            if length > config.max_positions:
                raise config_error(source, f"blocks of {length} exceed the context of {config.max_positions} tokens")
        fields.refuse_rest(self.name, self.ignored)
        if config.num_heads % config.num_kv_heads:
            reason = f"{config.num_heads} attention heads are not a multiple of {config.num_kv_heads} key-value heads"
            raise config_error(source, reason)
        return config

    def parts(self, name: str, config: TransformerConfig) -> list[Part]:
        """Return the parts of a checkpoint that make our parameter `name`: a tensor, rows of one, or one per expert."""
        layer = re.match(r"layers\.(\d+)\.", name)
        own = name if layer is None else name.replace(layer[0], "layers.*.", 1)
        module, _, kind = own.rpartition(".")
        pattern = self.names[own] if own in self.names else f"{self.names[module]}.{kind}"
        if layer is not None:
            pattern = pattern.replace("*", layer[1], 1)
        if "#" in pattern:
            assert config.moe is not None
            return [Part(pattern.replace("#", str(i), 1), expert=i) for i in range(config.moe.num_experts)]
        heads = re.search(r"\[([qkv])\]", pattern)
        if heads is None:
            return [Part(pattern)]
        q, kv = (count * config.head_dim for count in (config.num_heads, config.num_kv_heads))
        rows = {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}[heads[1]]
        return [Part(pattern.replace(heads[0], "", 1), rows=rows)]

    def held(self, names: Iterable[str], config: TransformerConfig) -> Held:
        """Return the tensors of a checkpoint, each with the parameters among `names` that it contains."""
        found: Held = {}
        for name in names:
            for part in self.parts(name, config):
                found.setdefault(part.name, []).append((name, part))
        return found


@dataclass(frozen=True)
class Part:
    """A tensor of a checkpoint, or rows of one, that contains a parameter of ours or one expert of it."""

    name: str
    expert: int | None = None  # the tensor is this expert of our stacked parameter. None: it is not an expert
    rows: slice | None = None  # rows of the tensor that are our parameter. None: all


Held = dict[str, list[tuple[str, Part]]]  # a checkpoint's tensor to the parameters of ours that it contains


def assembled(own: Mapping[str, Tensor], held: list[tuple[str, Part]]) -> Tensor:
    """Return a tensor of a checkpoint from our parameters, on their memory if it contains a single one."""
    (name, part), *more = held
    if not more:
        return own[name] if part.expert is None else own[name][part.expert]
    ordered = sorted(held, key=lambda one: one[1].rows.start if one[1].rows else 0)
    return torch.cat([own[one].to(own[name].device) for one, _ in ordered])
