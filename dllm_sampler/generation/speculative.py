"""DEER: a diffusion model drafts blocks that an autoregressive model verifies (arXiv 2512.15176)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dllm_sampler.blocks.fixed import FullBlock
from dllm_sampler.cache.none import once
from dllm_sampler.core.checks import check_count, is_whole
from dllm_sampler.core.draw import Barred, rewritten
from dllm_sampler.core.ends import end_ids, is_end
from dllm_sampler.core.naming import named
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import is_random
from dllm_sampler.core.spec import ChangingLength, ModelSpec
from dllm_sampler.core.statistics import argmax
from dllm_sampler.core.values import Canvas, Edit, Query
from dllm_sampler.engine import layout
from dllm_sampler.errors import NotFiniteError, UserError, invalid
from dllm_sampler.generation import requests
from dllm_sampler.generation.runtime import HasRuntime
from dllm_sampler.inputs import prompts
from dllm_sampler.inputs.prompts import Prompt
from dllm_sampler.inputs.texts import cut, stop_strings, stopped
from dllm_sampler.models import autoregressive
from dllm_sampler.models.autoregressive import Reading, Verifier
from dllm_sampler.options import Progress
from dllm_sampler.result import Speculation


@dataclass
class _Run:
    """The state of one batch between two rounds."""

    text: Canvas  # its `start` is the first column that is not decided yet
    reading: Reading
    seeds: Sequence[int]
    drafting: Tensor  # [B] forwards of the drafter
    step_map: Tensor  # [B, L+1] round that emitted each token, -1 without one
    round: int = 0
    accepted: list[Tensor] = field(default_factory=list)  # [B] accepted proposals of each round


class SpeculativeSampler:
    """A sampler of an autoregressive target whose tokens a diffusion model drafts. Answers follow the target's law.

    Source: DEER, arXiv 2512.15176. In a round, one forward of the drafter over the text and k masks proposes each token
    independently, `y_i ~ q_i`. One pass of the target over the k proposals gives `p_1 .. p_{k+1}`. Proposals are
    accepted from left to right with probability `min(1, p_i(y_i) / q_i(y_i))`. At the first rejection a token is drawn
    from the normalised `max(0, p_i - q_i)`, and the round ends. If all are accepted, a token is drawn from `p_{k+1}`.
    Without a temperature a proposal is accepted if it is the target's likeliest token, so the text is that of greedy
    decoding. Temperature, top-k and top-p change both `p` and `q`.

    Deviation: after a rejection the published algorithm continues with the next proposal, whose `p_i` was computed for
    another prefix. This one ends the round, which keeps the target's law.

    Args:
        drafter: a `Sampler` whose denoiser drafts. Its guides and noise serve both models.
        target: a causal LM of transformers with the drafter's tokenizer: a folder, a hub id or a live model.
        draft_length: k. With 0 the target decodes alone. A round drafts less at the end of the answer and at the end of
            the drafter's context.
        scheduled: draft with the sampler's own scheduler, blocks, stop and cache, in as many forwards as they take.
            This needs greedy decoding, since the joint distribution of such a draft is unknown.
        separator: id or text of a token that the drafter sees after the masks, as in its training.

    Raises:
        UserError: the drafter has no mask token, its guides or scheduler are not supported, the vocabularies or
            tokenizers differ, or an argument is wrong.
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
                "mask-token-missing",
                "The model that drafts for target= needs a mask token, and this one has none. Use a masked-diffusion"
                " model.",
            )
        forms = [named(guide) for guide in plugins.guides if guide.joint or guide.vetoes]
        if forms:
            raise UserError("options-conflict", f"guide={forms[0]} does not work with target=. Remove one of them.")
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
            raise UserError(
                "options-conflict",
                "draft_scheduled=true (in Python scheduled=True) needs greedy decoding. Remove it, or the temperature.",
            )
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
        """Answer a batch of prompts. Each answer is the same as if its prompt were alone.

        Args:
            prompts: one or several strings, token lists, tensors or lists of chat messages, of any lengths.
            max_new_tokens: longest answer. A row ends earlier with an end-of-text token of the target.
            seed: row i samples with seed + i, or with entry i of a sequence.
            stop_strings: a text, or several, before which an answer ends.
            progress: called after each round with (round, tokens emitted, tokens wanted).

        Raises:
            UserError: a prompt or an argument is wrong.
            NotFiniteError: a model returned NaN. The error's `result` has the answers so far.
        """
        requests.check_progress(progress)
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
        """Make one round: draft, verify and commit. Returns True if every row is done."""
        run.round += 1
        # The two models must draw different noise at one position, so they use alternate step numbers.
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
        if draft.logits is not None:  # the drafter returned NaN
            bad |= (draft.logits.amax(-1).isnan() & asked[:, :k]).any(1)
        if bool(bad.any()):
            error = NotFiniteError(run.round, [row for row, one in enumerate(bad.tolist(), 1) if one])
            error.result = self._result(run, stops)
            raise error
        taken, emitted = verify(replace(text, step=text.step + 1), at, draft, target, width, draws=self.draws)

        ends = is_end(emitted, self.ends) & (place <= taken[:, None])
        count = torch.where(ends, place, taken[:, None]).amin(1) + 1  # up to and with the first end-of-text token
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
        """Return the logits `[B, N, V]` after the guides."""
        head_rows, flat = HeadRows.every(Query.at(canvas, at)), logits.flatten(0, 1)
        barred = Barred(self.drafter.denoiser.spec.mask_id)
        for guide in self.guides:
            flat = rewritten(guide, flat, canvas, head_rows, barred)
        return flat.view_as(logits)

    def _widths(self, text: Canvas) -> list[int]:
        """Return the number of proposals for each row. The answer's end and the drafter's context limit this."""
        room = self.drafter.denoiser.spec.max_positions - (self.separator is not None)
        start, end, done = text.start.tolist(), text.end.tolist(), text.done.tolist()
        free = [min(e - s - 1, room - s) for s, e in zip(start, end, strict=True)]
        return [0 if over else max(0, min(self.draft_length, one)) for one, over in zip(free, done, strict=True)]

    def _draft(self, text: Canvas, widths: list[int], run: _Run) -> Draft:
        """Return the proposals of every row. They are decoded on a new canvas whose prompt is the row's text."""
        spec, k = self.drafter.denoiser.spec, max(widths)
        width = torch.tensor(widths, device=text.ids.device)
        known = [[t if t < spec.vocab_size else spec.pad_id for t in row] for row in self._rows(text)]
        rows = [
            row if one else row[:1] for row, one in zip(known, widths, strict=True)
        ]  # rows without a draft are placeholders
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
        """Return the prompt and the decided tokens of each row."""
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
        """Return the separator's token id, or None without a separator."""
        tokenizer, size = self.drafter.tokenizer, self.drafter.denoiser.spec.vocab_size
        if isinstance(separator, str):
            if tokenizer is None:
                said = f"separator={separator!r} is a text, and the drafter has no tokenizer"
                raise UserError("tokenizer-missing", f"{said}. Add one to its folder, or give a token id in Python.")
            found = tokenizer.get_vocab().get(separator)
            if found is None:
                said = f"separator={separator!r} is not a token of the vocabulary"
                spelled = "Use one as the tokenizer's vocabulary spells it, for example 'Ċ' for a newline"
                raise UserError("token-outside-vocabulary", f"{said}. {spelled}.")
            return found
        if separator is not None and (not is_whole(separator) or not 0 <= separator < size):
            raise invalid("separator", separator, f"Give an id from 0 to {size - 1}", "token-outside-vocabulary")
        return separator

    def _end_tokens(self) -> tuple[int, ...]:
        """Return the end-of-text tokens: those of the target, or else of the drafter, and `stop_token_ids`."""
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
    logits: Tensor | None  # None if greedy, or if drafted in several forwards


def verify(
    canvas: Canvas, at: Tensor, draft: Draft, target: Tensor, width: Tensor, *, draws: bool
) -> tuple[Tensor, Tensor]:
    """Accept or reject proposals by the target's law (arXiv 2211.17192).

    Returns:
        `[B]` number of accepted proposals, and `[B, k+1]` the proposals with the token after the accepted ones.

    Args:
        canvas: has the seeds and the step of the draws.
        at: `[B, k+1]` columns of the proposals and of the token after them.
        target: `[B, k+1, V]` logits of the target at these columns, after the guides.
        width: `[B]` number of proposals of each row.
        draws: draw tokens. Otherwise a proposal is accepted if it is the target's likeliest token.
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
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)  # the laws are equal up to rounding
        head_rows = HeadRows.every(Query.at(canvas, at.gather(1, taken[:, None])))
        noise = head_rows.spread(canvas.layout.noise.tokens(canvas, head_rows, target.shape[-1]))[:, 0]
        own = argmax(rest.log() + noise.to(rest.dtype))
    return taken, pad(draft.ids, (0, 1)).scatter(1, taken[:, None], own)
