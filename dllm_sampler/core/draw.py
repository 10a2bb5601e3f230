"""The choice of tokens from logits, by guides and noise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_sampler.core.naming import named
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Guide, is_random
from dllm_sampler.core.statistics import argmax
from dllm_sampler.core.values import Canvas, at_candidate
from dllm_sampler.errors import UserError, short


class Barred(NamedTuple):
    """Tokens that no answer may have: the mask token, and end-of-text tokens before the last given token."""

    mask_id: int | None  # None if the model has no mask token, or if it may be chosen
    ends: tuple[int, ...] = ()

    def exclude(self, logits: Tensor, canvas: Canvas, head_rows: HeadRows) -> Tensor:
        """Set these tokens' logits in `[R, V]` to minus infinity, in place, and return the logits."""
        if self.mask_id is not None:
            logits[..., self.mask_id].fill_(-torch.inf)
        if canvas.layout.given is not None and self.ends:
            inner = head_rows.position < canvas.layout.given[head_rows.row]  # [R]
            for end in self.ends:
                logits[..., end] = logits[..., end].masked_fill(inner, -torch.inf)
        return logits


def rewritten(guide: Guide, logits: Tensor, canvas: Canvas, head_rows: HeadRows, barred: Barred) -> Tensor:
    """Return logits `[R, V]` rewritten by a guide, with the barred tokens excluded.

    Raises:
        UserError: the guide did not return floating-point logits of the same shape on the same device.
    """
    found: Any = guide(logits, canvas, head_rows)
    if found is logits:
        return found if guide.keeps_excluded else barred.exclude(logits, canvas, head_rows)
    if not isinstance(found, Tensor) or not found.is_floating_point():
        raise UserError(
            "plugin-result", f"guide={named(guide)} returned {_kind(found)}. Return a floating-point tensor."
        )
    if found.shape != logits.shape or found.device != logits.device:
        was, now = (f"{list(one.shape)} on {one.device}" for one in (logits, found))
        raise UserError("plugin-result", f"guide={named(guide)} returned logits {now}. Return logits {was}.")
    return found if guide.keeps_excluded else barred.exclude(found.clone(), canvas, head_rows)


def _kind(found: object) -> str:
    return f"{list(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else short(repr(found))


@dataclass(frozen=True)
class Draw:
    """The choice of a step's tokens. It can be repeated with other logits or other noise.

    A call takes logits `[B, K, Q, V]` and returns tokens `[B, K, Q]`. They are 0 where the forward answered nothing.
    """

    guides: tuple[Guide, ...]  # in the order of application
    canvas: Canvas
    head_rows: HeadRows
    vocab: int
    barred: Barred
    raw: Tensor | None = None  # [B, K, Q, V] the step's logits before any guide
    noise: Tensor | None = None  # [R, V] of the step. By default drawn with the canvas's row seeds when needed
    draws: bool = True  # False: the best token is taken

    @staticmethod
    def of(guides: tuple[Guide, ...], canvas: Canvas, head_rows: HeadRows, vocab: int, barred: Barred) -> Draw:
        """Return the step's own choice. Its noise is drawn here, so that repeated choices share it."""
        draws = is_random(guides)
        noise = canvas.layout.noise.tokens(canvas, head_rows, vocab) if draws else None
        return Draw(guides, canvas, head_rows, vocab, barred, None, noise, draws)

    @property
    def logits(self) -> Tensor:
        """`[B, K, Q, V]` the step's logits before any guide."""
        assert self.raw is not None
        return self.raw

    def __call__(self, logits: Tensor) -> Tensor:
        """Return `[B, K, Q]` tokens chosen from `logits [B, K, Q, V]`."""
        return self.head_rows.spread(self.chosen(self.head_rows.pick(logits))[0])

    def chosen(self, choice: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return tokens `[R]` chosen from `choice [R, V]`, and `[R] bool` rows in which a token could be chosen.

        No token can be chosen if the guides left a NaN, a +inf or no finite logit. Without guides the second is None.

        Raises:
            UserError: a guide returned something other than logits, or a joint guide something other than tokens.
        """
        if not self.guides:
            return argmax(choice), None
        joint, noise = next((guide for guide in self.guides if guide.joint), None), self._noise()
        choice, whole = self._rewritten(choice)
        noised = _noised(choice, noise)
        if joint is None:
            token = argmax(noised[1])
            # NaN and +inf are each the highest: the score of the choice alone tells whether the whole row is sound.
            return token, noised[1].gather(-1, token[..., None])[..., 0].isfinite()
        rest = None if whole is choice else _noised(whole, noise)
        token: Any = joint.choose(*noised, rest, self.canvas, self.head_rows)
        if not isinstance(token, Tensor) or (token.shape, token.dtype) != (choice.shape[:-1], torch.int64):
            raise UserError(
                "plugin-result",
                f"guide={named(joint)}: choose returned {_kind(token)}. Return [{len(choice)}] of torch.int64.",
            )
        # Where nothing is left of `choice`, the joint guide chooses by `whole`.
        return token, (choice.amax(-1) < torch.inf) & whole.amax(-1).isfinite()

    def scores(self, logits: Tensor) -> Tensor:
        """Return `[B, K, Q, V]` scores: rewritten logits plus noise. The highest is chosen, unless a guide is joint."""
        choice, _ = self._rewritten(self.head_rows.pick(logits))
        return self.head_rows.spread(_noised(choice, self._noise())[1])

    def law(self, logits: Tensor) -> Tensor:
        """Return `[B, K, Q, V]` the softmax of the rewritten logits, in float32 or float64.

        A joint guide is not taken into account, and neither is that a choice without noise always takes the best token.
        """
        choice, _ = self._rewritten(self.head_rows.pick(logits))
        precise = torch.promote_types(choice.dtype, torch.float32)
        return self.head_rows.spread(torch.softmax(choice, -1, dtype=precise))

    def log_law(self, logits: Tensor, token: Tensor) -> Tensor:
        """Return `[B, K, Q] float64` log-probabilities of drawing `token [B, K, Q]` from `logits [B, K, Q, V]`.

        A choice without noise draws the best token with probability 1. A joint guide is not taken into account.
        """
        choice, _ = self._rewritten(self.head_rows.pick(logits))
        wanted = self.head_rows.pick(token)  # [R]
        if not self.draws:
            return self.head_rows.spread(torch.where(argmax(choice) == wanted, 0.0, -torch.inf).double())
        found = choice.double().log_softmax(-1).gather(-1, wanted[:, None])[:, 0]
        return self.head_rows.spread(found)

    def drawn(self, weight: Tensor) -> Tensor:
        """Return `[B, K, Q]` tokens drawn in proportion to `weight [B, K, Q, V]`. Guides are not applied."""
        choice = self.head_rows.pick(weight).log()
        return self.head_rows.spread(argmax(_noised(choice, self._noise())[1]))

    def _rewritten(self, choice: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits `[R, V]` after all guides but a joint one, and after those that exclude no token.

        Only a joint guide uses the second. Without one it has no meaning.
        """
        whole, joint = choice, any(guide.joint for guide in self.guides)
        for guide in self.guides:
            if guide.joint or not guide.chooses:
                continue
            before, choice = choice, rewritten(guide, choice, self.canvas, self.head_rows, self.barred)
            if joint and not (guide.truncates or guide.excludes):
                same = whole is before
                whole = choice if same else rewritten(guide, whole, self.canvas, self.head_rows, self.barred)
        return choice, whole

    def _noise(self) -> Tensor | None:
        """Return the noise `[R, V]`, or None if the choice is greedy."""
        if not self.draws or self.noise is not None:
            return self.noise
        return self.canvas.layout.noise.tokens(self.canvas, self.head_rows, self.vocab)

    def seeded(self, seeds: Tensor) -> Draw:
        """Return the same choice with the noise of other row `seeds [B] int64`."""
        return replace(self, canvas=self.canvas.with_layout(seeds=seeds), noise=None)

    def greedy(self) -> Draw:
        """Return the same choice without noise: the best tokens."""
        return replace(self, noise=None, draws=False)

    def under(self, candidate: Tensor) -> Draw:
        """Return the choice under one candidate per row, `candidate [B]`, for logits and tokens with K = 1."""
        raw = None if self.raw is None else at_candidate(self.raw, candidate)
        return replace(self, head_rows=self.head_rows.under(candidate), raw=raw, noise=None)


def _noised(choice: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the logits and the noisy logits, both `[R, V]`. They are equal if `noise` is None."""
    if noise is None:
        return choice, choice
    # In half precision the sums would tie, and ties go to the lower id.
    choice = choice.to(torch.promote_types(choice.dtype, torch.float32))
    return choice, choice + noise.to(choice.dtype)
