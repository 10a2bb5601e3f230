"""A causal LM of transformers that verifies drafts: one forward over the drafted columns of every row."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel, PreTrainedTokenizerBase

from dllm_sampler.core.protocols import Guide
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Canvas
from dllm_sampler.errors import RowError, UserError, invalid
from dllm_sampler.models import adapter as adapters
from dllm_sampler.models import huggingface, loading
from dllm_sampler.models.mixture import KnownTokens

PADDING = 512  # vocabularies of one tokenizer differ by the padding to a multiple of at most this


@dataclass(frozen=True, eq=False)
class Verifier:
    """A causal LM that shares its tokenizer with a diffusion model. Its weights and its mode stay as they are.

    Args:
        model: a causal LM in which every token attends to all earlier ones.
        spec: the spec of the diffusion model.
        folder: the verifier's checkpoint, whose tokenizer is compared. None for a live model.
        name: the option that named the verifier, for errors.
    """

    model: PreTrainedModel
    spec: ModelSpec
    folder: Path | None = None
    name: str = "scheduler.verifier"

    @property
    def vocab_size(self) -> int:
        """Number of the verifier's tokens, padding of its embedding included."""
        embedding: Any = self.model.get_input_embeddings()
        return embedding.weight.shape[0]

    @property
    def guides(self) -> tuple[Guide, ...]:
        """Guides that exclude tokens unknown to the verifier. Empty if it knows all of the model's tokens."""
        return (KnownTokens(self.vocab_size),) if self.vocab_size < self.spec.vocab_size else ()

    @property
    def longest(self) -> int:
        """Number of tokens that the verifier can read. It is 2**31 if its config has no limit."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 2**31

    def begin(self, canvas: Canvas) -> Reading:
        """Return the empty keys and values for a batch.

        Raises:
            UserError: the verifier cannot read the whole canvas, or does not attend to all of it.
        """
        config: Any = self.model.config.get_text_config()
        if canvas.length > self.longest:
            raise RowError(
                "context-exceeded",
                f"{{prompts}}: {self.name} can read {self.longest} tokens, and prompt and answer have more. Shorten the"
                " prompt, the answer or both.",
                (canvas.end > self.longest).nonzero().flatten().tolist(),
            )
        kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])  # Mistral names none, and slides
        window = getattr(config, "sliding_window", None)
        narrow = "sliding_attention" in kinds and window is not None and window < canvas.length
        if narrow or kinds - {"full_attention", "sliding_attention"} or getattr(self.model, "_is_stateful", False):
            raise UserError(
                "verifier-unsupported",
                f"{self.name}: this {type(self.model).__name__} does not attend to all {canvas.length} tokens."
                f" Set {self.name} to a model with full attention.",
            )
        return Reading(self, canvas.ids.shape[1])

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuse a tokenizer in which a token of the verifier has another id. Added tokens may differ.

        A live model comes without a tokenizer, so nothing is checked.

        Raises:
            UserError: the tokenizers differ, or the verifier's checkpoint has none.
        """
        if self.folder is None:
            return
        advice = f"Set {self.name} to a model whose tokenizer does not."
        own: Any = loading.load_tokenizer(self.folder, advice=advice)
        if own is None:
            said = f"{self.name}: {self.folder} has no tokenizer"
            raise UserError("tokenizer-missing", f"{said}. Copy the tokenizer's files there.")
        added, theirs = own.get_added_vocab(), tokenizer.get_vocab()
        for token, index in sorted(own.get_vocab().items(), key=lambda item: item[1]):
            if token not in added and theirs.get(token) != index:
                raise UserError(
                    "tokenizer-differs",
                    f"{self.name} has another tokenizer than the model: its token {index} is {token!r}, which is"
                    f" {theirs.get(token, 'no token')} there. Set {self.name} to a model with the same tokenizer.",
                )


class Reading(Cache):
    """The verifier's keys and values of a batch's tokens, at fixed slots, one per column of the canvas.

    A column's keys are written again whenever it is read again, and no token sees columns after its own. So nothing has
    to be cropped when a draft is rejected.
    """

    def __init__(self, verifier: Verifier, columns: int):
        super().__init__(layers=[])
        self.verifier, self.columns = verifier, columns
        self.tail = "logits_to_keep" in inspect.signature(verifier.model.forward).parameters  # it can skip other rows
        self.slots: list[tuple[Tensor, Tensor]] = []  # per layer, keys and values [B, Hkv, L+1, Dh]
        self.at: Tensor | None = None  # [B, N] the columns that are being read

    def logits(self, canvas: Canvas, ids: Tensor, first: Tensor, width: int) -> Tensor:
        """Return the verifier's logits at `width` columns of each row.

        Args:
            canvas: the state before the step.
            ids: `[B, L+1]` the text with its draft.
            first: `[B]` the first column to predict. The first call also reads everything before it.
            width: number of columns to predict.

        Returns:
            `[B, width, V]` for the verifier's V tokens. They mean nothing after the end of the canvas.
        """
        # The row that predicts a column is the one before it. The first call also reads everything before the drafts:
        # the prompt, and the given tokens at the beginning of an answer.
        before = canvas.length if canvas.layout.given is not None else canvas.length - canvas.layout.shortest
        back = 1 if self.slots else before
        last = self.columns - 1
        at = (first - back)[:, None] + torch.arange(back - 1 + width, device=ids.device)
        at = torch.where((at >= 0) & (at < last), at, last)  # [B, N]; the rest: the empty slot
        column = torch.arange(self.columns, device=ids.device)
        seen = column <= at[..., None]  # [B, N, L+1]
        model, self.at = self.verifier.model, at
        hidden = torch.zeros((), dtype=model.dtype, device=ids.device)
        out = model(
            input_ids=ids.gather(1, at).clamp(max=self.verifier.vocab_size - 1),
            position_ids=at.clamp(max=last - 1),
            attention_mask=torch.where(seen, hidden, torch.finfo(model.dtype).min)[:, None],
            use_cache=True,
            **{huggingface.cache_keyword(type(model)): self},
            **({"logits_to_keep": width} if self.tail else {}),
        )
        return out.logits[:, -width:]

    def logits_at(self, positions: Tensor, canvas: Canvas, ids: Tensor, first: Tensor, width: int) -> Tensor:
        """Return `logits` at `positions [B, Q]`, as `[B, Q, V]`. They mean nothing outside the `width` columns."""
        expected = self.logits(canvas, ids, first, width)
        place = (positions - first[:, None]).clamp(0, width - 1)
        return expected.gather(1, place[..., None].expand(-1, -1, expected.shape[-1]))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store keys and values `[B, Hkv, N, Dh]` of a layer. Return those of every column, as transformers expects."""
        assert self.at is not None
        fresh = (key_states, value_states)
        if layer_idx == len(self.slots):
            shape = (key_states.shape[0], key_states.shape[1], self.columns)
            self.slots.append(tuple(x.new_zeros(*shape, x.shape[-1]) for x in fresh))  # pyright: ignore
        for stored, new in zip(self.slots[layer_idx], fresh, strict=True):
            stored.scatter_(2, self.at[:, None, :, None].expand_as(new), new)
        return self.slots[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0. transformers does not use this number, since it gets positions and mask."""
        return 0


def load(path: str, spec: ModelSpec, name: str = "scheduler.verifier") -> Verifier:
    """Load a causal LM from a folder or the hub, in the diffusion model's dtype and on its device.

    Raises:
        UserError: the checkpoint is missing or cannot be loaded.
    """
    folder, adapter = loading.with_adapter(loading.find(path, option=name))
    model = huggingface.pretrained(AutoModelForCausalLM, folder, "a causal language model", spec.dtype)
    model = model.eval().to(spec.device)
    if adapter is not None:
        adapters.merge(model, adapter)
    return Verifier(model, spec, folder, name)


def fit(verifier: object, spec: ModelSpec, name: str = "scheduler.verifier") -> Verifier:
    """Return a `Verifier` from a path, a hub id or a live model, if its vocabulary is the diffusion model's.

    Raises:
        UserError: the verifier is missing or of another type, cannot be loaded, or has another vocabulary.
    """
    if verifier is None:
        raise UserError("option-missing", f"{name} is missing. Set it to a causal LM with the model's tokenizer.")
    if isinstance(verifier, str | Path):
        found = load(str(verifier), spec, name)
    elif isinstance(verifier, PreTrainedModel):
        huggingface.multiply_experts(verifier)
        found = Verifier(verifier, spec, name=name)
    else:
        raise invalid(name, verifier, "Give a folder, a hub id or a causal LM of transformers", "option-type")
    if abs(found.vocab_size - spec.vocab_size) >= PADDING or found.vocab_size <= max(spec.eos_ids):
        raise UserError(
            "vocabulary-differs",
            f"{name} has {found.vocab_size} tokens, and the model has {spec.vocab_size}. Set {name} to a model with the"
            " same tokenizer.",
        )
    return found
