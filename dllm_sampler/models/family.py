"""What a family of checkpoints is: how a `config.json` and its tensor names become a `Transformer`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dllm_sampler.errors import UserError
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
    names: our module to the checkpoint's, without `.weight` and `.bias`; `*` is the layer. `#` is the expert: a tensor
        of ours stacks those of the experts. `[q]`, `[k]`, `[v]` is the rows of these heads in a fused tensor.
        A parameter named in full goes before its module
    marker: config field that tells it from another family of the same `model_type`
    shift: raw row i predicts the token at i + 1
    attention: what a token sees
    block_length: blocks it was trained on, by its config; None: no one length
    end_of_turn: text of the token that ends a chat turn, where that is not the EOS token
    mask_token: text of the mask token, where neither config nor tokenizer names it as such
    """

    name: str
    model_type: str
    read: Callable[[Fields], TransformerConfig]
    supported: Mapping[str, Any]
    names: Mapping[str, str]
    marker: str | None = None
    shift: bool = False
    attention: Literal["bidirectional", "block_causal"] = "bidirectional"
    block_length: Callable[[Fields], int] | None = None
    end_of_turn: str | None = None
    mask_token: str | None = None

    def config(self, raw: Mapping[str, Any], source: str = "config.json") -> TransformerConfig:
        """The network's shape from a parsed `config.json`.

        Raises:
            UserError: a field is missing, of the wrong type, or asks for something we do not implement.
        """
        for key, allowed in self.supported.items():
            if raw.get(key) not in (None, allowed):
                raise UserError(f"{source}: {self.name} with {key} = {raw[key]!r} is not implemented, only {allowed!r}")
        config = self.read(Fields(raw, source))
        if config.num_heads % config.num_kv_heads:
            raise UserError(f"{source}: {config.num_heads} heads do not share {config.num_kv_heads} key heads evenly")
        return config

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


@dataclass(frozen=True)
class Fields:
    """Typed reading of a parsed `config.json`, with one sentence for what is wrong in it."""

    raw: Mapping[str, Any]
    source: str

    def size(self, *keys: str, default: int | None = None) -> int:
        """The first of `keys` that is set, a positive whole number."""
        value = self._first(keys, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{self.source}: {keys[0]} should be a positive whole number, not {value!r}")
        return value

    def head_dim(self, width: int, heads: int) -> int:
        """Width of a head where the stream is cut into heads evenly: an even number, since rotary turns pairs."""
        if width % (2 * heads):
            raise UserError(f"{self.source}: a width of {width} cannot be cut into {heads} heads of even width")
        return width // heads

    def number(self, key: str, default: float) -> float:
        """A positive number."""
        value = self._first((key,), default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise UserError(f"{self.source}: {key} should be a positive number, not {value!r}")
        return float(value)

    def count(self, *keys: str, default: int = 0) -> int:
        """The first of `keys` that is set, a whole number from 0 on."""
        value = self._first(keys, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UserError(f"{self.source}: {keys[0]} should be a whole number from 0 on, not {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A switch."""
        value = self._first((key,), default)
        if not isinstance(value, bool):
            raise UserError(f"{self.source}: {key} should be true or false, not {value!r}")
        return value

    def _first(self, keys: Iterable[str], default: Any) -> Any:
        found = [self.raw[key] for key in keys if self.raw.get(key) is not None]
        if not found and default is None:
            raise UserError(f"{self.source}: the field {next(iter(keys))!r} is missing")
        return found[0] if found else default
