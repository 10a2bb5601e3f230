"""A family of checkpoints: how a `config.json` and its tensor names become a `Transformer`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dllm_sampler.core.spec import Attention
from dllm_sampler.models.fields import Fields, config_error, largest, shown, unsupported_error
from dllm_sampler.models.transformer import TransformerConfig

# Buffers that published checkpoints carry along and that no network needs: rotary frequencies follow from the config.
HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint.

    name: what errors call it
    model_type: `model_type` in `config.json`, compared without regard to case
    read: config fields to a `TransformerConfig`
    supported: config fields with the only value we implement; an absent or null field counts as supported
    ignored: further config fields that its network does not depend on (besides `fields.IGNORED`). What `read` asks for,
        `supported` and these are all: a value of any other field that says something of the network is refused
    names: our module to the checkpoint's, without `.weight` and `.bias`; `*` is the layer. `#` is the expert: a tensor
        of ours stacks those of the experts. `[q]`, `[k]`, `[v]` is the rows of these heads in a fused tensor.
        A parameter named in full goes before its module
    marker: config field that tells it from another family of the same `model_type`
    architecture: what `architectures` must name, where the `model_type` is that of other models too
    shift: raw row i predicts the token at i + 1
    seeds: the row before a block predicts the block's first token
    attention: what a token sees
    block_length: length of the blocks it was trained on, by its config, if there is one length
    may_see_blocks: its checkpoints may be block-causal, and none says so: the user does when one is loaded
    end_of_turn: text of the token that ends a chat turn, where that is not the EOS token
    mask_token: text of the mask token, where neither config nor tokenizer names it as such
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
            source: the file's name, for errors.
            shapes: of the checkpoint's tensors, if known. They bound the sizes in the file.

        Raises:
            UserError: a field is missing, of the wrong type, larger than the tensors, or asks for something we do not
                implement.
        """
        fields = Fields(raw, source) if shapes is None else self._bounded(raw, source, shapes)
        for key, allowed in self.supported.items():
            value = fields.get(key)
            if value is not None and (value != allowed or isinstance(value, bool) != isinstance(allowed, bool)):
                reason = f"{self.name} with {key} = {shown(raw[key])}, other than {allowed!r},"
                raise unsupported_error(source, reason)
        config = self.read(fields)
        if self.block_length is not None:
            length = self.block_length(fields)
            if length > config.max_positions:
                raise config_error(source, f"blocks of {length} exceed the context of {config.max_positions}")
        fields.refuse_rest(self.name, self.ignored)
        if config.num_heads % config.num_kv_heads:
            raise config_error(source, f"{config.num_heads} heads do not share {config.num_kv_heads} key heads evenly")
        return config

    def _bounded(self, raw: Mapping[str, Any], source: str, shapes: Mapping[str, tuple[int, ...]]) -> Fields:
        """Return the fields with the bounds that the checkpoint's tensors set."""
        pattern = re.compile(re.escape(self.names["layers.*.attn_norm"]).replace(r"\*", r"(\d+)", 1) + r"\.")
        found = [int(match[1]) for name in shapes if (match := pattern.match(name)) and len(match[1]) < 10]
        # Without a tensor of any layer, the complaint about missing tensors is the better one.
        return Fields(raw, source, largest(shapes), max(found) + 1 if found else len(shapes))

    def parts(self, name: str, config: TransformerConfig) -> list[Part]:
        """Where our parameter `name` lies in a checkpoint: one tensor or rows of it, or a tensor for each expert."""
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


@dataclass(frozen=True)
class Part:
    """A tensor of a checkpoint that holds a parameter of ours, or a part of one, or more than one."""

    name: str
    expert: int | None = None  # it is this member of our stack
    rows: slice | None = None  # ours are these rows of it
