"""DEER: a diffusion model drafts a block, an autoregressive model verifies it (arXiv 2512.15176)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dllm_sampler.blocks.fixed import FullBlock
from dllm_sampler.cache.none import once
from dllm_sampler.core.checks import check_count
from dllm_sampler.core.draw import Barred, rewritten
from dllm_sampler.core.ends import end_ids, is_end
from dllm_sampler.core.naming import named
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import is_random
from dllm_sampler.core.spec import ChangingLength, ModelSpec
from dllm_sampler.core.statistics import argmax
from dllm_sampler.core.values import Canvas, Edit, Query
from dllm_sampler.engine import layout
from dllm_sampler.errors import NotFiniteError, UserError
from dllm_sampler.generation import requests
from dllm_sampler.generation.runtime import HasRuntime
from dllm_sampler.inputs import prompts
from dllm_sampler.inputs.prompts import Prompt
from dllm_sampler.inputs.texts import cut, stop_strings, stopped
from dllm_sampler.models import autoregressive
from dllm_sampler.models.autoregressive import Reading, Verifier
from dllm_sampler.result import Speculation

Progress = Callable[[int, int, int], None]


@dataclass
class _Run:
    """One batch between two rounds."""

    text: Canvas  # `start`: the first column that is not decided yet
    reading: Reading
    seeds: Sequence[int]
    drafting: Tensor  # [B]
    step_map: Tensor  # [B, L+1]
    round: int = 0
    accepted: list[Tensor] = field(default_factory=list)  # [B] each


class SpeculativeSampler:
    """A sampler of an autoregressive target whose tokens a diffusion model drafts. The law is the target's.

    Source: DEER, arXiv 2512.15176. A round is one forward of the drafter over the text and k masks, which proposes
    every position by itself, `y_i ~ q_i`; one pass of the target over the k proposals gives `p_1 .. p_{k+1}`. The
    leading proposals are accepted with probability `min(1, p_i(y_i) / q_i(y_i))`; at the first that is not, a token
    of `max(0, p_i - q_i)` is emitted and the block is over; if all are, one of `p_{k+1}`. Without a temperature a
    proposal counts where it is the target's best token, so that the text is greedy decoding's. Temperature, top-k and
    top-p rewrite `p` and `q` alike, and the ratio is that of the rewritten ones.

    The published algorithm continues after a rejection with the next proposal, whose `p_i` was computed for another
    prefix. This one stops there. Its text samples "from p" in one place: the residual keeps the law.

    Args:
        drafter: a `Sampler`; its denoiser drafts, its guides and its noise are those of both models.
        target: a causal LM of transformers with the drafter's tokenizer: a folder, a hub id or a live model.
        draft_length: k; 0 is plain autoregressive decoding, the drafter rests. The end of the answer and of the
            drafter's context shorten it.
        scheduled: draft with the sampler's own scheduler, blocks, stop and cache, in as many forwards as they take.
            Greedy only: the joint distribution of such a draft is unknown.
        separator: id or text of a token that the drafter sees after the masks, as in its training.

    Raises:
        UserError: a drafter without masks or with a guide on the form, another vocabulary, or a bad argument.
    """

    def __init__(
        self,
        drafter: HasRuntime,
        target: Any,
        *,
        draft_length: int = 32,
        scheduled: bool = False,
        separator: int | str | None = None,
    ):
        self.drafter = drafter.runtime
        spec, plugins = self.drafter.denoiser.spec, self.drafter.plugins
        check_count("draft_length", draft_length, 0)
        if spec.mask_id is None:
            raise UserError(
                "mask-token-missing", "A drafter needs masks, and this model has none (uniform diffusion). Use another."
            )
        forms = [named(guide) for guide in plugins.guides if guide.joint or guide.vetoes]
        if forms:
            raise UserError("options-conflict", f"guide={forms[0]} and a target exclude each other. Remove one.")
        if plugins.scheduler.traits.has(ChangingLength):
            raise UserError(
                "scheduler-incompatible",
                f"scheduler={named(plugins.scheduler)} changes the answer's length, but a draft's length is fixed."
                " Use another scheduler.",
            )
        self.draft_length, self.scheduled = draft_length, scheduled
        self.stop_token_ids = drafter.stop_token_ids
        self.guides = tuple(guide for guide in plugins.guides if guide.chooses)
        self.draws = is_random(self.guides)
        if scheduled and self.draws:
            raise UserError("options-conflict", "draft_scheduled and temperature exclude each other. Remove one.")
        self.separator = self._token(separator)
        self.target: Verifier = autoregressive.fit(target, spec, "target")
        if self.drafter.tokenizer is not None:
            self.target.check_tokenizer(self.drafter.tokenizer)
        self.vocab = max(spec.vocab_size, self.target.vocab_size)
        self.ends = self._end_tokens()

    @property
    def spec(self) -> ModelSpec:
        """The drafter's spec with the target's context. After the drafter's context the target continues alone."""
        return replace(self.drafter.denoiser.spec, max_positions=self.target.longest)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 128,
        seed: int | Sequence[int] = 0,
        stop_strings: str | Sequence[str] = (),
        progress: Progress | None = None,
    ) -> Speculation:
        """Answer a batch of prompts; each row comes out as if it were alone.

        Args:
            prompts: strings, token lists, tensors or chat messages; one or several, of any lengths.
            max_new_tokens: longest answer; a row ends earlier with an end token of the target.
            seed: row i samples with seed + i, or with its own number of a sequence.
            stop_strings: text at which an answer ends, or several; not part of it.
            progress: called after each round with (round, tokens emitted, tokens wanted).

        Raises:
            UserError: a bad prompt or argument.
            NotFiniteError: a model returned NaN; its `result` holds what was done.
        """
        run, stops = self._begin(prompts, max_new_tokens, seed, stop_strings)
        with torch.no_grad():
            done = False
            while not done:
                done = self._round(run, stops)
                if progress is not None:
                    canvas = run.text
                    progress(
                        run.round, int((canvas.start - canvas.layout.first).sum()), max_new_tokens * len(run.seeds)
                    )
        return self._result(run, stops)

    def _begin(
        self, given: Prompt | Sequence[Prompt], new_tokens: int, seed: int | Sequence[int], stop: str | Sequence[str]
    ) -> tuple[_Run, tuple[str, ...]]:
        tokenizer, spec = self.drafter.tokenizer, self.drafter.denoiser.spec
        stops = stop_strings(stop, tokenizer)
        rows = prompts.encode(given, tokenizer, self.spec, new_tokens)
        seeds = requests.seeds(seed, len(rows))
        text = layout.canvas(rows, new_tokens, seeds, spec, FullBlock(), self.drafter.noise, cuts=False)
        none = torch.full_like(text.ids, -1)
        return _Run(text, self.target.begin(text), seeds, torch.zeros_like(text.step), none), stops

    def _round(self, run: _Run, stops: Sequence[str]) -> bool:
        """Draft, verify, emit; returns whether every row is done."""
        run.round += 1
        # Draws of the two models at one position must not be the same: the steps that key them alternate.
        text = replace(run.text, step=torch.full_like(run.text.step, 2 * run.round))
        widths = self._widths(text)
        k = max(widths)
        draft = self._draft(text, widths, run) if k else Draft(text.ids[:, :0], None)
        column = text.start[:, None] + torch.arange(k + 1, device=text.ids.device)  # [B, k+1]
        at = torch.where(column < text.end[:, None], column, text.length)
        logits = run.reading.logits(text, text.ids.scatter(1, at[:, :k], draft.ids), text.start, k + 1)
        logits = pad(logits, (0, self.vocab - logits.shape[-1]), value=-torch.inf)  # [B, k+1, V]
        target = self._law(logits, replace(text, step=text.step + 1), at)
        width = torch.tensor(widths, device=at.device)
        place = torch.arange(k + 1, device=at.device)
        asked = (place <= width[:, None]) & ~text.done[:, None]
        bad = (~target.amax(-1).isfinite() & asked).any(1)
        if draft.logits is not None:  # a proposal with no law at all is as bad
            bad |= (draft.logits.amax(-1).isnan() & asked[:, :k]).any(1)
        if bool(bad.any()):
            error = NotFiniteError(run.round, [row for row, one in enumerate(bad.tolist(), 1) if one])
            error.result = self._result(run, stops)
            raise error
        taken, emitted = verify(replace(text, step=text.step + 1), at, draft, target, width, draws=self.draws)

        ends = is_end(emitted, self.ends) & (place <= taken[:, None])
        count = torch.where(ends, place, taken[:, None]).amin(1) + 1  # up to and with the first end token
        write = (place < count[:, None]) & ~text.done[:, None]
        run.accepted.append(torch.where(text.done, -1, torch.minimum(taken, count)).cpu())
        run.step_map = run.step_map.scatter(1, at, torch.where(write, run.round - 1, run.step_map.gather(1, at)))
        text = text.apply(at, Edit(emitted, write))
        start = torch.where(text.done, text.start, text.start + count)
        done = text.done | ends.any(1) | (start >= text.end)
        run.text = replace(text, start=start, done=done)
        if stops:
            hit = stopped(self._answers(run.text), self.drafter.tokenizer, stops)
            run.text = replace(run.text, done=done | torch.tensor(hit, device=done.device))
        return bool(run.text.done.all())

    def _law(self, logits: Tensor, canvas: Canvas, at: Tensor) -> Tensor:
        """Return `[B, N, V]` logits as the guides rewrite them."""
        head_rows, flat = HeadRows.every(Query.at(canvas, at)), logits.flatten(0, 1)
        barred = Barred(self.drafter.denoiser.spec.mask_id)
        for guide in self.guides:
            flat = rewritten(guide, flat, canvas, head_rows, barred)
        return flat.view_as(logits)

    def _widths(self, text: Canvas) -> list[int]:
        """Return the number of proposals for each row. The target adds one, and the drafter must see the text."""
        room = self.drafter.denoiser.spec.max_positions - (self.separator is not None)
        start, end, done = text.start.tolist(), text.end.tolist(), text.done.tolist()
        free = [min(e - s - 1, room - s) for s, e in zip(start, end, strict=True)]
        return [0 if over else max(0, min(self.draft_length, one)) for one, over in zip(free, done, strict=True)]

    def _draft(self, text: Canvas, widths: list[int], run: _Run) -> Draft:
        """Return proposals of every row, as answers to its text on a canvas of their own."""
        spec, k = self.drafter.denoiser.spec, max(widths)
        width = torch.tensor(widths, device=text.ids.device)
        known = [[t if t < spec.vocab_size else spec.pad_id for t in row] for row in self._rows(text)]
        rows = [row if one else row[:1] for row, one in zip(known, widths, strict=True)]  # the others only fill in
        behind = int(self.separator is not None)
        canvas = layout.canvas(
            rows, k + behind, run.seeds, spec, self.drafter.plugins.blocks, self.drafter.noise, cuts=False
        )
        last, column = canvas.layout.first + width, canvas.columns()
        masked = canvas.masked & (column < last[:, None])
        ids = canvas.ids if self.separator is None else canvas.ids.masked_fill(column == last[:, None], self.separator)
        canvas = replace(
            canvas,
            ids=ids,
            masked=masked,
            end=last + behind,
            stop=torch.minimum(canvas.stop, last + behind),
            done=width == 0,
            layout=replace(canvas.layout, frozen=~masked, padded=canvas.layout.padded or min(widths) < k),
        )
        at = canvas.layout.first[:, None] + torch.arange(k, device=ids.device)
        at = torch.where(at < last[:, None], at, canvas.length)  # [B, k]
        if self.scheduled:  # a generation of its own: schedulers and caches count from step 0
            *_, state = self.drafter.engine().run(canvas, self.drafter.bound(k + behind))  # one object for all steps
            run.drafting = run.drafting + state.recorder.nfe
            return Draft(state.canvas.ids.gather(1, at), None)
        query = Query.at(canvas, at)
        canvas = replace(canvas, step=text.step)
        plan = once(canvas, query, spec)
        hidden, spent = self.drafter.denoiser(canvas, query, plan)
        run.drafting = run.drafting + spent.nfe
        logits = plan.head_rows.spread(self.drafter.denoiser.head(hidden))[:, 0]  # [B, k, V]
        logits[..., spec.mask_id] = -torch.inf
        logits = self._law(pad(logits, (0, self.vocab - logits.shape[-1]), value=-torch.inf), canvas, at)
        if not self.draws:
            return Draft(argmax(logits), None)
        noise = canvas.layout.noise.tokens(canvas, HeadRows.every(query), self.vocab).view_as(logits)
        precise = torch.promote_types(logits.dtype, torch.float32)  # in half precision the sums would tie
        return Draft(argmax(logits.to(precise) + noise.to(precise)), logits)

    @staticmethod
    def _rows(text: Canvas) -> list[list[int]]:
        """Prompt and decided tokens of each row."""
        return [ids[:start] for ids, start in zip(text.ids.tolist(), text.start.tolist(), strict=True)]

    def _answers(self, text: Canvas) -> list[list[int]]:
        """Return the decided tokens of each answer."""
        return [row[first:] for row, first in zip(self._rows(text), text.layout.first.tolist(), strict=True)]

    def _result(self, run: _Run, stops: Sequence[str]) -> Speculation:
        text, spec = run.text, self.drafter.denoiser.spec
        lengths, texts = text.start - text.layout.first, None
        if self.drafter.tokenizer is not None:
            rows = self._answers(text)
            ended = [row[:-1] if row and row[-1] in self.ends else row for row in rows]
            found = cut(ended, self.drafter.tokenizer, stops)
            texts = [one.text for one in found]
            sizes = [one.tokens if one.stopped else len(row) for one, row in zip(found, rows, strict=True)]
            lengths = torch.tensor(sizes, device=lengths.device)
        decided = text.columns() < (text.layout.first + lengths)[:, None]
        answer = text.requested()
        accepted = torch.stack(run.accepted, 1) if run.accepted else torch.empty(len(run.seeds), 0, dtype=torch.long)
        return Speculation(
            tokens=torch.where(decided, text.ids, spec.pad_id).gather(1, answer).cpu(),
            lengths=lengths.cpu(),
            texts=texts,
            accepted=accepted,
            step_map=run.step_map.gather(1, answer).cpu(),
            drafter_nfe=run.drafting.cpu(),
            complete=text.done.cpu(),
        )

    def _token(self, separator: int | str | None) -> int | None:
        """Return the separator's id."""
        tokenizer, size = self.drafter.tokenizer, self.drafter.denoiser.spec.vocab_size
        if isinstance(separator, str):
            found = None if tokenizer is None else tokenizer.get_vocab().get(separator)
            if found is None:
                raise UserError("token-outside-vocabulary", f"separator={separator!r} is not one token. Use another.")
            return found
        if separator is not None and (isinstance(separator, bool) or not 0 <= separator < size):
            raise UserError("token-outside-vocabulary", f"separator={separator!r} is not below {size}. Use another.")
        return separator

    def _end_tokens(self) -> tuple[int, ...]:
        """Return the end tokens: those of the target, or else of the drafter, and the user's."""
        config = getattr(self.target.model, "generation_config", None)
        named = getattr(config, "eos_token_id", None)
        if named is None:
            named = self.target.model.config.get_text_config().eos_token_id
        if named is None:
            named = self.drafter.denoiser.spec.eos_ids
        return end_ids((*end_ids(named), *self.stop_token_ids))


@dataclass(frozen=True)
class Draft:
    """Proposals of the drafter: tokens `[B, k]`, and the logits `[B, k, V]` that they were drawn from."""

    ids: Tensor
    logits: Tensor | None  # None: greedy, or drafted in several forwards, whose joint distribution is unknown


def verify(
    canvas: Canvas, at: Tensor, draft: Draft, target: Tensor, width: Tensor, *, draws: bool
) -> tuple[Tensor, Tensor]:
    """Judge proposals by the law of the model that verifies them (arXiv 2211.17192).

    Returns:
        `[B]` how many are taken, and `[B, k+1]` the tokens that follow from that.

    Args:
        canvas: keys the draws.
        at: `[B, k+1]` columns of the proposals and of the token after them.
        target: `[B, k+1, V]` logits of the target after each proposal, as the guides rewrite them.
        width: `[B]` proposals that count.
        draws: whether tokens are drawn; else a proposal counts where it is the target's best token.
    """
    k = draft.ids.shape[1]
    within = torch.arange(k, device=at.device) < width[:, None]

    def leading(accept: Tensor) -> Tensor:
        return (accept & within).long().cumprod(1).sum(1)

    if not draws:
        best = argmax(target)
        taken = leading(draft.ids == best[:, :k])
        own = best.gather(1, taken[:, None])
    else:
        p = target.softmax(-1, dtype=torch.promote_types(target.dtype, torch.float32))
        q = torch.zeros_like(p)  # the token after the draft has no proposal: its residual is p itself
        if draft.logits is not None:
            q[:, :k] = draft.logits.softmax(-1, dtype=p.dtype)
        chosen = draft.ids[..., None]
        uniform = canvas.uniform(at[:, :k])
        taken = leading(uniform * q[:, :k].gather(2, chosen)[..., 0] < p[:, :k].gather(2, chosen)[..., 0])
        there = taken[:, None, None].expand(-1, 1, target.shape[-1])
        p, q = p.gather(1, there), q.gather(1, there) * (taken < width)[:, None, None]
        rest = (p - q).clamp(min=0)
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)  # equal laws, told apart by rounding
        head_rows = HeadRows.every(Query.at(canvas, at.gather(1, taken[:, None])))
        noise = head_rows.spread(canvas.layout.noise.tokens(canvas, head_rows, target.shape[-1]))[:, 0]
        own = argmax(rest.log() + noise.to(rest.dtype))
    return taken, pad(draft.ids, (0, 1)).scatter(1, taken[:, None], own)
