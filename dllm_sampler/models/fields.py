"""Reading a `config.json`: typed fields, and an error for each field that our networks do not implement."""

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from sys import float_info
from typing import Any

from dllm_sampler.core.checks import is_real, is_whole
from dllm_sampler.errors import NoEffectWarning, UserError, counted

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
# A field with one of these words in its name is about the network: if it is not read, a value that matters is refused.
COMPUTES = re.compile(
    r"scal|cap|window|rope|rotary|alibi|clip|norm|bias|expert|router|moe|group|hidden|activation|(^|_)act(_|$)|attention"
    r"|attn|q_?k|lora|quant|multipl|mup|logit|head|layer|(^|_)(tie|tying)|position|block|embed|mask|causal|conv|residual|chunk"
    r"|recur|loop|gate|memory|sparse|factor|latent|ssm|mixer|mlp|ffn|feed_?forward|linear|glu|(^|_)dims?(_|$)"
)
# Parts of all networks. A switch that turns one off asks for another network.
BUILT_IN = re.compile(r"(use_)?(rope|rotary(_(pos_)?emb(edding)?s?)?|rms_?norm|swiglu)")
ROPE = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})  # keys in a field of rotary positions
LONGEST = 2**30  # tokens of a context
HIGHEST_BASE = 1e15  # of rotary positions; published ones end at 1e8
SHARED = 1000  # layers that may share their tensors
BOTH = ("rope_parameters", "rope_scaling")  # transformers 5 and 4


def config_error(source: object, reason: str) -> UserError:
    """Return the error for a configuration file that is invalid for `reason`."""
    return UserError("checkpoint-config-invalid", f"{source}: {reason}. Correct the file, or download it again.")


def unsupported_error(source: object, what: str) -> UserError:
    """Return the error for a checkpoint whose network needs `what`, which is not implemented."""
    return UserError("checkpoint-unsupported", f"{source}: {what} is not implemented. Use another checkpoint.")


def end_tokens(places: Mapping[str, object]) -> dict[int, str]:
    """Return the end-of-text tokens of several files, those of the first file first, each with the field that names it.

    Args:
        places: `eos_token_id` of each file, by the file's name: a token id, a list of token ids, or None.

    Raises:
        UserError: a value is not a token id.
    """
    found: dict[int, str] = {}
    for place, value in places.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None and not is_whole(one):
                raise config_error(place, f"eos_token_id must be a token id or a list of them, not {shown(value)}")
            if one is not None:
                found.setdefault(one, f"{place}: eos_token_id")
    return found


@dataclass(frozen=True)
class Fields:
    """Typed reading of a parsed `config.json`. An invalid field raises `UserError`.

    Args:
        raw: the parsed file.
        source: the file's name, for errors.
        largest: numbers in the checkpoint's largest tensor, if known. No size may exceed it.
        layers: layers in the checkpoint's tensors, if known.
        read: names of the fields that were read so far.
    """

    raw: Mapping[str, Any]
    source: str
    largest: int | None = None
    layers: int | None = None
    read: set[str] = field(default_factory=set, compare=False)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field of any type. Returns `default` if it is absent or null."""
        self.read.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def size(self, *keys: str, default: int | None = None) -> int:
        """Return the first of `keys` that is set: a positive whole number, bounded by the checkpoint's tensors.

        Returns `default` if none is set. Without a default that is an error.
        """
        found = [(key, value) for key in keys if (value := self.get(key)) is not None]
        if not found and default is not None:
            return default
        if not found:
            raise config_error(self.source, f"the field {keys[0]} is missing")
        key, value = found[0]
        if not is_whole(value) or value < 1:
            raise config_error(self.source, f"{key} must be a whole number above 0, not {shown(value)}")
        return self._held(key, value)

    def depth(self, key: str) -> int:
        """Return a number of layers that is not larger than that of the checkpoint's tensors."""
        value = self.size(key)
        if self.layers is not None and value > self.layers:
            enough = counted(self.layers, "layer")
            raise config_error(self.source, f"{key} is {shown(value)}, but the tensors are enough for {enough}")
        return value

    def length(self, key: str, default: int) -> int:
        """Return a positive whole number of tokens, at most `LONGEST`. Tensors do not bound it."""
        value = Fields(self.raw, self.source, read=self.read).size(key, default=default)
        if value > LONGEST:
            raise config_error(self.source, f"{key} must be at most {LONGEST}, not {shown(value)}")
        return value

    def head_dim(self, width: str, heads: str) -> int:
        """Return field `width` divided by field `heads`: the width of a head.

        It must be even, since rotary positions rotate pairs.
        """
        size, count = self.size(width), self.size(heads)
        if size % (2 * count):
            raise config_error(self.source, f"{width}={size} is not a multiple of twice {heads}={count}")
        return size // count

    def number(self, key: str, default: float, most: float = float_info.max) -> float:
        """Return a positive finite number, at most `most`."""
        return self._number(key, self.get(key, default), most)

    def eps(self, default: float) -> float:
        """Return `rms_norm_eps`, which the norms add to a mean square. It is at most 1."""
        return self.number("rms_norm_eps", default, most=1)

    def count(self, key: str, default: int = 0) -> int:
        """Return a whole number of at least 0, bounded by the checkpoint's tensors."""
        value = self.get(key, default)
        if not is_whole(value) or value < 0:
            raise config_error(self.source, f"{key} must be a whole number of at least 0, not {shown(value)}")
        return self._held(key, value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a field that is true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise config_error(self.source, f"{key} must be true or false, not {shown(value)}")
        return value

    def rope(self, theta: float = 10_000.0, partial: float = 1.0) -> tuple[float, float]:
        """Return the base of rotary positions, and the share of a head that rotates.

        transformers 4 writes `rope_theta`, `partial_rotary_factor` and `rope_scaling`, transformers 5 writes all of
        them into `rope_parameters`. The defaults are `theta` and `partial`.

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
                raise unsupported_error(self.source, f"{where} = {shown(inside)}")
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
        return self.checked_base(theta), partial

    def checked_base(self, theta: float) -> float:
        """Return the base of rotary positions. Refuses one outside 1 to `HIGHEST_BASE`, and 1 itself."""
        if not 1 < theta <= HIGHEST_BASE:
            limit = f"above 1 and at most {HIGHEST_BASE:g}"
            raise config_error(self.source, f"rope_theta must be {limit}, not {theta:g}")
        return theta

    def refuse_rest(self, family: str, ignored: Iterable[str]) -> None:
        """Refuse every field about the network that was not `read`, and warn of other unknown fields.

        Args:
            family: the family's name, for errors.
            ignored: further fields without effect on the network.

        Raises:
            UserError: a field about the network was not read, and its value is not neutral.
        """
        unknown = []
        for key, value in self.raw.items():
            if key in self.read or key in ignored or IGNORED.fullmatch(key) or neutral(key, value):
                continue
            if COMPUTES.search(key.lower()):
                raise UserError(
                    "checkpoint-unsupported",
                    f"{self.source}: {family} with {key} = {shown(value)} is not implemented. Use another checkpoint,"
                    " or remove the field if the network's own code ignores it.",
                )
            unknown.append(key)
        if unknown:
            warnings.warn(
                f"{self.source} has {counted(len(unknown), 'unknown field')} without effect: {', '.join(unknown[:5])}"
                + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
                + ". If the network depends on such a field, its answers are wrong.",
                NoEffectWarning,
                stacklevel=2,
            )

    def _held(self, key: str, value: int) -> int:
        if self.largest is not None and value > self.largest:
            raise config_error(
                self.source, f"{key} is {shown(value)}, but the largest tensor has {counted(self.largest, 'number')}"
            )
        return value

    def _number(self, key: str, value: Any, most: float = float_info.max) -> float:
        if not is_real(value) or not 0 < value <= most:
            limit = "" if most == float_info.max else f" and at most {most:g}"
            raise config_error(self.source, f"{key} must be a number above 0{limit}, not {shown(value)}")
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
    """Return a value of a JSON file as the file spells it, for an error. Long numbers and texts are shortened."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_numbers(raw: Any, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Refuse sizes in a parsed `config.json`, at any depth, that are too large for the checkpoint's tensors.

    transformers would build such a network for hours, or fill the memory, before it compares any shape.

    Args:
        raw: the parsed file.
        shapes: shapes of the checkpoint's tensors.
        source: the file's name, for errors.

    Raises:
        UserError: a size is too large. The message names its field.
    """
    most = largest(shapes)
    nodes: list[Any] = [raw]
    for node in nodes:  # the list grows: JSON may be nested deeper than calls
        items: Iterable[Any] = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            if isinstance(value, dict | list):
                nodes.append(value)
            if not isinstance(key, str) or not is_whole(value):
                continue
            # Layers may share their tensors (ALBERT), so that there can be more than tensors; never thousands.
            if re.search(r"layers$|depth$", key) and value > max(SHARED, len(shapes)):
                raise config_error(source, f"{key} is {shown(value)}, but there are only {len(shapes)} tensors")
            if re.search(r"(^|_)(num|n)_|(size|dim|width|heads|experts)$", key):
                Fields({key: value}, source, most).count(key)
