"""DiffusionGemma through transformers' own class: a causal encoder reads the text so far, a decoder denoises a canvas.

Uniform diffusion: noise is a random token, not a mask token. Encoder and decoder share their weights. The decoder
sees the encoder's keys and values of everything before the active block, and the block itself in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dllm_sampler.core.checks import is_whole
from dllm_sampler.core.ends import end_ids
from dllm_sampler.core.protocols import Plan
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Canvas, Query, Spent
from dllm_sampler.core.visibility import visible
from dllm_sampler.errors import UserError
from dllm_sampler.models import huggingface, weights
from dllm_sampler.models.denoiser import check_tokens, checked_ends
from dllm_sampler.models.fields import Fields, config_error, end_tokens, unsupported_error

if TYPE_CHECKING:
    from transformers import DiffusionGemmaForBlockDiffusion, PreTrainedTokenizerBase

MODEL_TYPE = "diffusion_gemma"
END_OF_TURN = "<turn|>"


class Memory:
    """The encoder's keys and values of the text before each row's block, at the text's columns.

    transformers' attention layers use it as their cache. Rows may be in different blocks, so each is encoded up to a
    column of its own. Keys and values that are not needed are written to the empty slot.
    """

    is_compileable = False

    def __init__(self, layers: int, canvas: Canvas):
        self.layers = [SimpleNamespace(keys=None, values=None) for _ in range(layers)]
        self.upto = torch.zeros_like(canvas.layout.first)  # [B] columns before this are encoded
        self.width = canvas.length - canvas.layout.shortest  # most columns that a row may have to encode
        self.size = canvas.ids.shape[1]
        self.columns = canvas.ids[:, :0]  # [B, W] where the pass that runs writes

    def update(self, keys: Tensor, values: Tensor, index: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store `[B, H, W, D]` of layer `index` at `columns`. Return those of every column, `[B, H, L+1, D]`."""
        layer = self.layers[index]
        where = self.columns[:, None, :, None].expand_as(keys)
        for name, fresh in (("keys", keys), ("values", values)):
            stored = getattr(layer, name)
            if stored is None:
                stored = fresh.new_zeros(*fresh.shape[:2], self.size, fresh.shape[3])
            setattr(layer, name, stored.scatter_(2, where, fresh))
        return layer.keys, layer.values

    def repeated(self, candidates: int) -> Memory | SimpleNamespace:
        """Return the memory with each row K times, for its K candidates. It can only be read."""
        if candidates == 1:
            return self
        layers = [
            SimpleNamespace(keys=_each(layer.keys, candidates), values=_each(layer.values, candidates))
            for layer in self.layers
        ]
        return SimpleNamespace(layers=layers, is_compileable=False)


@dataclass(frozen=True)
class DiffusionGemmaDenoiser:
    """A denoiser whose decoder runs on the active block, and whose encoder reads what finished blocks add.

    The module is used as it is (weights, mode and `requires_grad` untouched). The encoder's memory is stored in the
    generation's live cache object. It is exact and a part of the model, whatever the cache. `nfe` counts the decoder's
    passes, `computed` the positions of both.

    Args:
        model: the module.
        eos_id, pad_id, eot_id: the special tokens, as in `TransformerDenoiser`.
        folder: folder of the checkpoint that the model was loaded from.
    """

    model: DiffusionGemmaForBlockDiffusion
    eos_id: int | Sequence[int]
    pad_id: int
    eot_id: int | None = None
    folder: Path | None = None

    def __post_init__(self) -> None:
        vars(self)["eos_id"] = checked_ends(self.eos_id, self.text.vocab_size)
        check_tokens(self.text.vocab_size, pad_id=self.pad_id, eot_id=self.eot_id)

    @property
    def text(self) -> Any:
        """The config of the network's text part."""
        return self.model.config.text_config

    @property
    def spec(self) -> ModelSpec:
        """Facts about the model. Layers differ in their heads, so caches that store cannot serve the model."""
        text, first = self.text, self.text.per_layer_config[0]
        eos_id, *others = end_ids(self.eos_id)
        return ModelSpec(
            vocab_size=text.vocab_size,
            mask_id=None,
            eos_id=eos_id,
            other_eos_ids=tuple(others),
            pad_id=self.pad_id,
            eot_id=self.eot_id,
            max_positions=text.max_position_embeddings,
            num_layers=text.num_hidden_layers,
            num_kv_heads=first.num_key_value_heads,
            head_dim=first.head_dim,
            dtype=self.model.dtype,
            device=self.model.lm_head.weight.device,
            cacheable=False,
            block_length=self.model.config.canvas_length,
            encoder=True,
            self_conditioning=True,
            folder=self.folder,
        )

    @torch.no_grad()
    def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[Tensor, Spent]:
        """Return hidden states `[R, D]`, one for each of `plan.head_rows`, all in the block, and the cost."""
        batch, candidates, width = query.ids.shape
        memory, encoded = self._encode(canvas, plan)
        columns = canvas.window(plan.wanted.sizes.block)  # [B, W]
        memory.width = columns.shape[1]
        ids = query.rows(canvas).gather(2, columns[:, None].expand(-1, candidates, -1)).flatten(0, 1)  # [B*K, W]
        before = plan.wanted.previous
        if before is not None:  # the widest block of the batch may be another one now
            before = _each(nn.functional.pad(before, (0, 0, 0, columns.shape[1] - before.shape[1])), candidates)
        decoder = self.model.model.decoder
        hidden = decoder(
            decoder_input_ids=ids,
            **{huggingface.cache_keyword(type(decoder)): memory.repeated(candidates)},
            self_conditioning_logits=before,
            self_conditioning_mask=_each(canvas.age > 0, candidates),
            decoder_attention_mask={
                kind: _each(mask, candidates) for kind, mask in self._reads(canvas, query, columns)
            },
            decoder_position_ids=_each(columns, candidates),
        ).last_hidden_state  # [B*K, W, D]
        place = (query.positions - canvas.start[:, None]).clamp(0, columns.shape[1] - 1)  # [B, Q]
        hidden = hidden.gather(1, _each(place, candidates)[..., None].expand(-1, -1, hidden.shape[-1]))
        live = (~canvas.done).long()  # [B]
        live_candidates = query.candidates.live
        count = candidates if live_candidates is None else live_candidates.sum(1)
        computed = (canvas.stop - canvas.start) * count + encoded
        return plan.head_rows.pick(hidden.view(batch, candidates, width, -1)), Spent(live, computed * live)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., V]` of hidden states `[..., D]`, in float32 and softly capped."""
        return capped(self.model, hidden)

    def _encode(self, canvas: Canvas, plan: Plan) -> tuple[Memory, Tensor]:
        """Encode the text before the active blocks. Return the memory, and the number of positions encoded `[B]`."""
        memory = plan.cache.memory
        if memory is None:
            memory = plan.cache.memory = Memory(self.spec.num_layers, canvas)
        elif not plan.wanted.sizes.opens:
            return memory, torch.zeros_like(canvas.start)
        columns = canvas.start[:, None] + torch.arange(-memory.width, 0, device=canvas.ids.device)  # [B, W]
        fresh = (columns >= memory.upto[:, None]) & ~canvas.done[:, None]
        # Columns that are known already may be computed along with those that are not, but are not written again.
        memory.columns = torch.where(fresh, columns, canvas.length)
        at = columns.clamp(min=0)
        key = canvas.columns()[:, None]  # [1, 1, L+1]
        causal = key <= at[..., None]  # [B, W, L+1]
        near = causal & (at[..., None] - key < self.text.sliding_window)
        kinds = (("full_attention", causal), ("sliding_attention", near))
        encoder = self.model.model.encoder.language_model
        encoder(
            input_ids=canvas.ids.gather(1, at),
            attention_mask={kind: additive(seen, self.model.dtype) for kind, seen in kinds},
            position_ids=at,
            **{huggingface.cache_keyword(type(encoder)): memory},
        )
        memory.upto = torch.where(canvas.done, memory.upto, canvas.start)
        return memory, fresh.sum(1)

    def _reads(self, canvas: Canvas, query: Query, columns: Tensor) -> list[tuple[str, Tensor]]:
        """Return the masks of the decoder by kind of layer. Layers with a sliding window see only the text's end."""
        key, start, seen = canvas.columns(), canvas.start[:, None], visible(canvas, query)
        text = seen & (key < start)  # [B, L+1]
        near = text & (key > start - self.text.sliding_window)
        block = seen.gather(1, columns)  # [B, W]
        kinds = (("full_attention", text), ("sliding_attention", near))
        dtype = self.model.dtype
        return [(kind, additive(torch.cat([seen, block], 1)[:, None], dtype)) for kind, seen in kinds]


def capped(model: DiffusionGemmaForBlockDiffusion, hidden: Tensor) -> Tensor:
    """Return logits `[..., V]` of hidden states `[..., D]`, in float32 at least and softly capped."""
    cap, logits = model.final_logit_softcapping, model.lm_head(hidden)
    found = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / cap).tanh_()
    return found * cap if torch.is_grad_enabled() else found.mul_(cap)  # logits are large, and a gradient needs both


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask `[B, 1, Q, S]` of `seen [B, Q, S] bool` that transformers adds to attention scores."""
    hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=seen.device)
    return torch.where(seen, torch.zeros_like(hidden), hidden)[:, None]


def _each(rows: Tensor, candidates: int) -> Tensor:
    """Repeat `[B, ...]` to `[B*K, ...]`."""
    return rows if candidates == 1 else rows.repeat_interleave(candidates, 0)


def load(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype | None,
    device: torch.device,
    device_map: Any = None,
) -> DiffusionGemmaDenoiser:
    """Load DiffusionGemma from a checkpoint folder, safetensors only.

    Args:
        device_map: as transformers takes it. `device` is then ignored.

    Raises:
        UserError: the checkpoint does not fit its config, or as `model_class` and `wrap`.
    """
    _check_numbers(folder / "config.json")
    model = huggingface.pretrained(
        model_class(folder),
        folder,
        "DiffusionGemma",
        dtype,
        attn_implementation="sdpa",
        device_map=device_map,
    )
    return replace(wrap(model.eval() if device_map is not None else model.eval().to(device), tokenizer), folder=folder)


def model_class(folder: Path) -> Any:
    """Return transformers' class of the model.

    Raises:
        UserError: the installed transformers has no such class.
    """
    try:
        from transformers import DiffusionGemmaForBlockDiffusion
    except ImportError:
        said = f"{folder} is a DiffusionGemma, which the installed transformers does not have"
        raise UserError("package-missing", f"{said}. Install transformers>=5.23.") from None
    return DiffusionGemmaForBlockDiffusion


def _check_numbers(source: Path) -> None:
    """Refuse numbers that transformers does not check, with which a step would fail or compute something else."""
    raw = weights.read_json(source) if source.is_file() else {}
    if not isinstance(text := raw.get("text_config"), dict):
        return  # transformers says what is wrong
    whole, own = Fields(raw, str(source)), Fields(text, f"{source}: text_config")
    for fields, key in ((own, "final_logit_softcapping"), (own, "sliding_window"), (whole, "canvas_length")):
        if key in fields.raw and fields.raw[key] is None:
            raise config_error(fields.source, f"{key} must be a number above 0, not null")
    own.number("final_logit_softcapping", 30.0, most=1e6)
    own.length("sliding_window", default=512)
    context, canvas = own.length("max_position_embeddings", default=131_072), whole.length("canvas_length", default=256)
    if canvas > context:
        raise config_error(source, f"canvas_length={canvas} exceeds max_position_embeddings={context} of text_config")
    experts = own.get("num_experts")
    if experts is not None and own.size("top_k_experts") > own.size("num_experts"):
        raise config_error(own.source, f"top_k_experts={own.size('top_k_experts')} exceeds num_experts={experts}")
    rope, kinds = text.get("rope_parameters"), {"full_attention", "sliding_attention"}
    if isinstance(rope, dict) and kinds & rope.keys():  # else transformers puts them there
        for kind in sorted(kinds):
            given = rope.get(kind)
            if not isinstance(given, dict) or not isinstance(given.get("rope_type"), str):
                raise config_error(own.source, f"rope_parameters.{kind}.rope_type must be a text")
            if given["rope_type"] != "proportional" and given.get("partial_rotary_factor", 1) != 1:
                reason = f"{kind}.partial_rotary_factor needs the rope_type proportional, not {given['rope_type']}"
                raise config_error(own.source, f"rope_parameters.{reason}")


def wrap(
    model: DiffusionGemmaForBlockDiffusion, tokenizer: PreTrainedTokenizerBase | None = None
) -> DiffusionGemmaDenoiser:
    """Return a live DiffusionGemma as a denoiser.

    All end-of-text tokens of the generation config, the config and the tokenizer end an answer. If the end of a turn is
    one of them (as in instruction-tuned checkpoints), it is the token that is written. Otherwise that is the first one.

    Raises:
        UserError: the model has no end-of-text token, one is not a token of the model, or the encoder is not causal.
    """
    text: Any = model.config.text_config
    if text.use_bidirectional_attention == "all":
        raise unsupported_error("config.json", "use_bidirectional_attention=all in text_config")
    sources = {
        "generation_config.json": model.generation_config,
        "config.json": model.config,
        "text_config of config.json": text,
        "the tokenizer": tokenizer,
    }
    listed = tuple(end_tokens({place: getattr(one, "eos_token_id", None) for place, one in sources.items()}))
    if not listed:
        raise UserError("end-token-missing", "The model has no end-of-text token. Set eos_token_id in config.json.")
    turn = None if tokenizer is None else tokenizer.get_vocab().get(END_OF_TURN)
    ends = end_ids((turn, *listed)) if turn is not None and turn in listed else listed
    pad_id = text.pad_token_id if is_whole(text.pad_token_id) else ends[0]
    huggingface.multiply_experts(model)
    return DiffusionGemmaDenoiser(model, ends, pad_id)
