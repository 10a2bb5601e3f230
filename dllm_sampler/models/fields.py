"""Reading a `config.json`: typed fields, and one sentence for each that asks for what no network of ours computes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from sys import float_info
from typing import Any

from dllm_sampler.core.checks import is_real, is_whole
from dllm_sampler.errors import NoEffectWarning, UserError

# Fields that no network depends on: special tokens, how text is generated, training, how a checkpoint was saved. Those
# of `PreTrainedConfig` in transformers 4 and 5, and what training scripts and hubs add.
IGNORED = re.compile(
    r"_.*|.*_token_ids?|.*(dropout|pdrop|_loss|_coef|_coeff|_version|_implementation)|(init|unsloth)_.*|.*_loss_.*"
    r"|output_(attentions|hidden_states|scores|logits|router_logits|past)"
    r"|architectures|model_type|auto_map|torch_dtype|dtype|name_or_path|initializer_(range|factor)|use_cache|return_dict"
    r"|is_decoder|is_encoder_decoder|chunk_size_feed_forward|torchscript|use_bfloat16|tf_legacy_loss|pretraining_tp"
    r"|tie_encoder_decoder|id2label|label2id|num_labels|problem_type|finetuning_task|task_specific_params|tokenizer_class"
    r"|prefix|(max|min)_(length|new_tokens)|do_sample|early_stopping|num_beams|num_beam_groups|diversity_penalty"
    r"|temperature|top_k|top_p|typical_p|repetition_penalty|length_penalty|(encoder_)?no_repeat_ngram_size"
    r"|bad_words_ids|num_return_sequences|(begin_)?suppress_tokens|exponential_decay_length_penalty"
    r"|remove_invalid_values|gradient_checkpointing|keys_to_ignore_at_inference|base_model_[a-z]+_plan"
)
# A field with one of these words in its name says something of the network: unread, a value of it is refused.
COMPUTES = re.compile(
    r"scal|cap|window|rope|rotary|alibi|clip|norm|bias|expert|router|moe|group|hidden|activation|(^|_)act(_|$)|attention"
    r"|attn|q_?k|lora|quant|multipl|mup|logit|head|layer|(^|_)(tie|tying)|position|block|embed|mask|causal|conv|residual|chunk"
    r"|recur|loop|gate|memory|sparse|factor|latent|ssm|mixer|mlp|ffn|feed_?forward|linear|glu|(^|_)dims?(_|$)"
)
# What the networks of all families have: a switch of these that is off asks for another network.
BUILT_IN = re.compile(r"(use_)?(rope|rotary(_(pos_)?emb(edding)?s?)?|rms_?norm|swiglu)")
ROPE = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})  # what a field of rotary positions says
LONGEST = 2**30  # tokens of a context
HIGHEST_BASE = 1e15  # of rotary positions; published ones end at 1e8
SHARED = 1000  # layers that may share their tensors
BOTH = ("rope_parameters", "rope_scaling")  # transformers 5 and 4


def config_error(source: object, reason: str) -> UserError:
    """Return the error for a file that describes no network."""
    return UserError("checkpoint-config-invalid", f"{source}: {reason}. Correct the file, or download it again.")


def unsupported_error(source: object, what: str) -> UserError:
    """Return the error for a network that is not implemented."""
    return UserError("checkpoint-unsupported", f"{source}: {what} is not implemented. Use another checkpoint.")


def end_tokens(places: Mapping[str, object]) -> dict[int, str]:
    """Return the end tokens that several files name, those of the first file first, and what an error calls each.

    Args:
        places: `eos_token_id` of each file: a token id, a list of them, or None.

    Raises:
        UserError: one is not a token id.
    """
    found: dict[int, str] = {}
    for place, value in places.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None and not is_whole(one):
                raise config_error(place, f"eos_token_id must be token ids, not {shown(value)}")
            if one is not None:
                found.setdefault(one, f"{place}: eos_token_id")
    return found


@dataclass(frozen=True)
class Fields:
    """Typed reading of a parsed `config.json`. What is wrong in it raises `UserError`.

    raw: the parsed file
    source: its name, for errors
    largest: numbers in the checkpoint's largest tensor, if known. No size may exceed it
    layers: layers in the checkpoint's tensors, if known
    read: the fields that were asked for, in any way
    """

    raw: Mapping[str, Any]
    source: str
    largest: int | None = None
    layers: int | None = None
    read: set[str] = field(default_factory=set, compare=False)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field as it stands; `default` where it is absent or null."""
        self.read.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def size(self, *keys: str, default: int | None = None) -> int:
        """Return the first of `keys` that is set: a positive whole number, bounded by the checkpoint's tensors."""
        key, value = self._first(keys, default)
        if not is_whole(value) or value < 1:
            raise config_error(self.source, f"{key} must be a whole number above 0, not {shown(value)}")
        return self._held(key, value)

    def depth(self, key: str) -> int:
        """Return the number of layers, at most those that the checkpoint's tensors make."""
        value = self.size(key)
        if self.layers is not None and value > self.layers:
            raise config_error(self.source, f"{key}={value}, but the tensors have {self.layers} layers")
        return value

    def length(self, key: str, default: int) -> int:
        """Return a positive whole number of tokens: no tensor bounds it, but `LONGEST`."""
        value = Fields(self.raw, self.source, read=self.read).size(key, default=default)
        if value > LONGEST:
            raise config_error(self.source, f"{key} must be at most {LONGEST}, not {shown(value)}")
        return value

    def head_dim(self, width: int, heads: int) -> int:
        """Width of a head where the stream is cut into heads evenly: an even number, since rotary turns pairs."""
        if width % (2 * heads):
            raise config_error(self.source, f"{heads} heads do not divide the width {width} evenly")
        return width // heads

    def number(self, key: str, default: float, most: float = float_info.max) -> float:
        """Return a positive finite number, at most `most`."""
        return self._number(key, self.get(key, default), most)

    def eps(self, default: float) -> float:
        """Return what the norms add to a mean square. More than 1 would be most of it."""
        return self.number("rms_norm_eps", default, most=1)

    def count(self, key: str, default: int = 0) -> int:
        """Return a whole number from 0 on that the checkpoint's tensors have room for."""
        value = self.get(key, default)
        if not is_whole(value) or value < 0:
            raise config_error(self.source, f"{key} must be a whole number, not {shown(value)}")
        return self._held(key, value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise config_error(self.source, f"{key} must be true or false, not {shown(value)}")
        return value

    def rope(self, theta: float = 10_000.0, partial: float = 1.0) -> tuple[float, float]:
        """Return the base of rotary positions, and the part of a head that they turn; by default `theta` and `partial`.

        transformers 4 writes fields of their own and `rope_scaling`, transformers 5 all of it into `rope_parameters`.

        Raises:
            UserError: the checkpoint scales positions (for example YaRN), gives one of the two values twice with
                different numbers, or has a value out of range.
        """
        said: dict[str, dict[str, float]] = {"rope_theta": {}, "partial_rotary_factor": {}}
        for name in said:
            if self.get(name) is not None:
                said[name][name] = self.number(name, 1.0)
        for where in BOTH:
            inside = self.get(where) or {}  # RND1 writes false for null
            if not isinstance(inside, dict) or any(
                inside.get(kind) not in (None, "default") for kind in ("rope_type", "type")
            ):
                raise unsupported_error(self.source, f"scaling of positions by {where}")
            for key, value in inside.items():
                if key not in ROPE and not neutral(key, value):
                    raise unsupported_error(self.source, f"{where} with {key} = {shown(value)}")
                if key in said and value is not None:
                    said[key][f"{where}.{key}"] = self._number(f"{where}.{key}", value)
        for found in said.values():
            if len(set(found.values())) > 1:
                listing = " and ".join(f"{name} = {value:g}" for name, value in found.items())
                raise config_error(self.source, f"{listing} contradict each other")
        theta, partial = (
            next(iter(said[name].values()), default) for name, default in zip(said, (theta, partial), strict=True)
        )
        if not 1 < theta <= HIGHEST_BASE:
            raise config_error(self.source, f"rope_theta must be in (1, {HIGHEST_BASE:g}], not {theta:g}")
        return theta, partial

    def refuse_rest(self, family: str, ignored: Iterable[str]) -> None:
        """Refuse every field that says something of the network and that was not `read`; warn of what is unknown.

        Args:
            family: what errors call the checkpoint's kind.
            ignored: further fields without effect on the network.

        Raises:
            UserError: a field has a value that the network would have to depend on.
        """
        unknown = []
        for key, value in self.raw.items():
            if key in self.read or key in ignored or IGNORED.fullmatch(key) or neutral(key, value):
                continue
            if COMPUTES.search(key.lower()):
                raise UserError(
                    "checkpoint-unsupported",
                    f"{self.source}: {family} with {key} = {shown(value)} is not implemented. Remove it if unused.",
                )
            unknown.append(key)
        if unknown:
            warnings.warn(
                f"{self.source}: unknown fields have no effect: {', '.join(unknown[:5])}"
                + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""),
                NoEffectWarning,
                stacklevel=2,
            )

    def _first(self, keys: tuple[str, ...], default: Any) -> tuple[str, Any]:
        found = [(key, value) for key in keys if (value := self.get(key)) is not None]
        if not found and default is None:
            raise config_error(self.source, f"the field {keys[0]!r} is missing")
        return found[0] if found else (keys[0], default)

    def _held(self, key: str, value: int) -> int:
        if self.largest is not None and value > self.largest:
            raise config_error(self.source, f"{key}={shown(value)} exceeds all tensors ({self.largest})")
        return value

    def _number(self, key: str, value: Any, most: float = float_info.max) -> float:
        if not is_real(value) or not 0 < value <= most:
            limit = "" if most == float_info.max else f" of at most {most:g}"
            raise config_error(self.source, f"{key} must be above 0{limit}, not {shown(value)}")
        return float(value)


def largest(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of values in the largest of a checkpoint's tensors."""
    return max((prod(shape) for shape in shapes.values()), default=0)


def ignorable(key: str, value: Any) -> bool:
    """Return True if a network does not depend on a field with this value."""
    return bool(IGNORED.fullmatch(key)) or neutral(key, value) or not COMPUTES.search(key.lower())


def neutral(key: str, value: Any) -> bool:
    """Return True if a value changes nothing: unset, off, a factor of 1, full attention everywhere."""
    if isinstance(value, list) and key == "layer_types":
        return all(one == "full_attention" for one in value)
    if value is False and BUILT_IN.fullmatch(key):
        return False
    factor = bool(re.search(r"scal|factor|multipl", key)) and not isinstance(value, bool)
    return value is None or value in (False, "", [], {}) or (factor and value == 1)


def shown(value: Any) -> str:
    """Return a value for an error: numbers and texts that fill the screen are cut."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_numbers(raw: Any, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Refuse sizes in a parsed `config.json`, at any depth, that the checkpoint's tensors have no room for.

    For networks that transformers builds: it would build for hours, or fill the memory, before it compares anything.

    Args:
        shapes: of the checkpoint's tensors.

    Raises:
        UserError: the first such size, by name.
    """
    most = largest(shapes)
    nodes: list[Any] = [raw]
    for node in nodes:  # which grows: JSON may be nested deeper than calls
        items: Iterable[Any] = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            if isinstance(value, dict | list):
                nodes.append(value)
            if not isinstance(key, str) or not is_whole(value):
                continue
            # Layers may share their tensors (ALBERT), so that there can be more than tensors; never thousands.
            if re.search(r"layers$|depth$", key) and value > max(SHARED, len(shapes)):
                raise config_error(source, f"{key}={shown(value)} exceeds the {len(shapes)} tensors")
            if re.search(r"(^|_)(num|n)_|(size|dim|width|heads|experts)$", key):
                Fields({key: value}, source, most).count(key)
