"""Guides that judge the form of answers, in an engine that shows one block at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from dllm_sampler.core import select
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Guide, Whole
from dllm_sampler.core.values import Canvas

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OF_BYTES = 258, 257, 256  # the vocabulary, the mask and the end-of-text token of a model whose tokens are bytes


@dataclass(frozen=True)
class OfAnswer(Guide):
    """A joint guide that sees the whole answer: earlier blocks, the active block, and masks up to the end.

    Args:
        guide: a bound guide.
        before: `[B, N]` tokens of the answer in earlier blocks, then arbitrary ids. N is the length of an answer.
        count: `[B]` number of tokens of the answer in earlier blocks.
        mask_id: the model's mask token.
    """

    joint: ClassVar[bool] = True

    guide: Guide
    before: Tensor
    count: Tensor
    mask_id: int

    @property
    @override
    def measures(self) -> bool:
        return self.guide.measures

    @property
    @override
    def draws(self) -> bool:
        return self.guide.draws

    @override
    def __call__(self, logits: Tensor, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        return self.guide(logits, *self.whole(canvas, head_rows))

    @override
    def choose(self, logits: Tensor, noisy: Tensor, whole: Whole | None, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        return self.guide.choose(logits, noisy, whole, *self.whole(canvas, head_rows))

    def whole(self, canvas: Canvas, head_rows: HeadRows) -> tuple[Canvas, HeadRows]:
        """Return a canvas `[B, N+1]` of whole answers, and `head_rows` with positions on that canvas."""
        length, column = self.before.shape[1], select.arange(self.before.shape[1] + 1, canvas.ids.device)  # [N+1]
        shift = (canvas.start - self.count)[:, None]  # from a column of the answer to one of the block
        inside = column + shift
        there = (inside >= canvas.start[:, None]) & (inside < canvas.length) & (column < length)
        inside = inside.clamp(0, canvas.length)
        earlier = column < self.count[:, None]
        rest = torch.full_like(inside, self.mask_id).where(~earlier, pad(self.before, (0, 1), value=self.mask_id))
        ids = canvas.ids.gather(1, inside).where(there, rest)
        masked = canvas.masked.gather(1, inside).where(there, ~earlier) & (column < length)
        zero, end = torch.zeros_like(canvas.start), torch.full_like(canvas.start, length)
        assert isinstance(canvas.layout.noise, CounterNoise) and canvas.layout.noise.begin is not None
        answer = replace(
            canvas,
            ids=ids,
            masked=masked,
            start=zero,
            stop=end,
            end=end,
            layout=replace(
                canvas.layout,
                frozen=~masked,
                first=zero,
                new_tokens=end,
                shortest=length,
                longest=length,
                width=length,
                noise=CounterNoise(begin=shift[:, 0] + canvas.layout.noise.begin),
            ),
        )
        at = head_rows.query.positions
        place = at - shift
        place = place.where((at >= canvas.start[:, None]) & (at < canvas.length) & (place < length), length)
        return answer, replace(head_rows, query=replace(head_rows.query, positions=place))


def of_text(plugin: object) -> bool:
    """Return True if a plug-in judges the form of whole answers. It then reads the text of tokens."""
    return getattr(plugin, "joint", False) or getattr(plugin, "vetoes", False)


def of_bytes() -> PreTrainedTokenizerBase:
    """Return a tokenizer whose tokens are bytes, to check forms before a model is loaded."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    backend = Tokenizer(models.BPE(vocab={sign: byte for byte, sign in bytes_to_unicode().items()}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)
