"""What a generation returns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dllm_sampler.core.ends import first_end, is_end
from dllm_sampler.core.protocols import Guide
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.trace import Trace
from dllm_sampler.errors import UserError, counted
from dllm_sampler.inputs.texts import cut, decode

ROWS, SHOWN = 8, 80  # answers that a `repr` has, and signs of each

FinishReason = Literal["end", "stop_string", "length", "max_steps", "constraint", "not_finite", "refused"]


@dataclass(frozen=True, repr=False)
class Result:
    """Answers of a batch, on the CPU."""

    # [B, max_new_tokens] int64. Padding follows the first end token, or what a stop string has left; it also fills the
    # positions that were never decoded. `trace.decoded` has all that was decoded.
    tokens: Tensor
    # [B] tokens up to and with the first end token, or to the first hole of an unfinished row. Where a stop string
    # ended the text: the tokens before it. A token that has both the text's end and the stop string's beginning counts,
    # unless the text has nothing but white space of it.
    lengths: Tensor
    texts: list[str] | None  # cut at the first end token and stop string; None without a tokenizer
    nfe: Tensor  # [B] int64 forwards the row took part in
    complete: Tensor  # [B] bool: False where max_steps or a guide ended the row before its time
    trace: Trace
    finish_reason: list[FinishReason]  # of each row
    rejections: Tensor  # [B] int64 commits that a guide refused
    valid: Tensor | None = None  # [B] bool: the answer is what a guide wants; None: no guide says
    gaps: list[list[str] | None] | None = None  # text of each gap of each row; None: nothing was given, or no tokenizer

    def __repr__(self) -> str:
        return _shown("Result", self, self.finish_reason)

    def _repr_html_(self) -> str:
        """For a notebook: see `Trace`."""
        return self.trace._repr_html_()

    @staticmethod
    def stack(answers: Iterable[Answer]) -> Result:
        """Answers of `Sampler.generate_many`, in the order of prompts and samples, as one batch.

        Raises:
            UserError: there is none, or a prompt was refused.
        """
        given = sorted(answers, key=lambda answer: (answer.index, answer.sample))
        if not given:
            raise UserError("answers-missing", "there are no answers to stack")
        refused = next((answer for answer in given if answer.trace is None), None)
        if refused is not None:
            raise UserError("answer-refused", f"cannot stack an answer whose prompt was refused: {refused.error}")
        trace = Trace.stack([answer.trace for answer in given if answer.trace is not None])
        width = trace.generated.shape[1]
        texts = [answer.text for answer in given if answer.text is not None]
        return Result(
            torch.stack([F.pad(one.tokens, (0, width - len(one.tokens)), value=trace.pad_id) for one in given]),
            torch.tensor([answer.length for answer in given]),
            texts if len(texts) == len(given) else None,
            trace.nfe,
            torch.tensor([answer.complete for answer in given]),
            trace,
            [answer.finish_reason for answer in given],
            torch.tensor([answer.rejections for answer in given]),
            None if any(answer.valid is None for answer in given) else torch.tensor([one.valid for one in given]),
            None if all(answer.gaps is None for answer in given) else [one.gaps for one in given],
        )

    def answer(self, row: int, index: int, sample: int = 0, *, max_new_tokens: int) -> Answer:
        """Return one row as the answer to prompt `index`."""
        return Answer(
            index,
            sample,
            self.finish_reason[row],
            self.tokens[row, :max_new_tokens],
            int(self.lengths[row]),
            None if self.texts is None else self.texts[row],
            int(self.nfe[row]),
            self.trace.row(row).unpadded(max_new_tokens),
            int(self.rejections[row]),
            None if self.valid is None else bool(self.valid[row]),
            None if self.gaps is None else self.gaps[row],
        )

    def token_rows(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens of each prompt, and those of each answer up to its end token."""
        trace = self.trace
        prompts = [
            ids[begin : trace.origin] for ids, begin in zip(trace.ids.tolist(), trace.begin.tolist(), strict=True)
        ]
        answers = [row[:length] for row, length in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)]
        return prompts, answers

    @property
    def step_map(self) -> Tensor:
        """`[B, max_new_tokens]` the forward that committed each token, -1: none."""
        return self.trace.generated

    @property
    def generated(self) -> Tensor:
        """`[B] int64` tokens of `lengths` that were generated: all but those that were given."""
        column = torch.arange(self.tokens.shape[1])
        return ((self.step_map >= 0) & (column < self.lengths[:, None])).sum(1)

    @property
    def tokens_per_forward(self) -> Tensor:
        """`[B] float32`: `generated / nfe`, so tokens after the end token do not count."""
        return self.generated / self.nfe.clamp(min=1)


@dataclass(frozen=True, repr=False)
class Commits:
    """One step of a stream, on the CPU. The last one carries the result."""

    step: int  # forwards made so far
    tokens: Tensor  # [B, max_new_tokens]
    masked: Tensor  # [B, max_new_tokens] bool: still noise
    step_map: Tensor  # [B, max_new_tokens] forward that committed each token, -1: none yet
    nfe: Tensor  # [B]
    result: Result | None = None
    given: Tensor | None = None  # [B, max_new_tokens] bool: tokens that were given; None: no row has one
    sizes: Tensor | None = None  # [B] columns of each canvas, which change; None: `max_new_tokens`, for good
    open_end: Tensor | None = None  # [B] column of the answer at which the open blocks end. None if unknown

    @property
    def there(self) -> Tensor:
        """`[B, max_new_tokens] bool` the columns that each canvas has now."""
        if self.sizes is None:
            return torch.ones_like(self.masked)
        return torch.arange(self.masked.shape[1]) < self.sizes[:, None]

    def rows(self) -> Iterator[tuple[list[int], list[bool], list[int]]]:
        """Tokens, noise and step map of each canvas, as long as it is now."""
        sizes = self.there.sum(1).tolist()
        tables = (self.tokens.tolist(), self.masked.tolist(), self.step_map.tolist())
        for tokens, masked, steps, size in zip(*tables, sizes, strict=True):
            yield tokens[:size], masked[:size], steps[:size]

    def __repr__(self) -> str:
        left = int(self.masked.sum())
        return f"Commits(step {self.step}, {counted(left, 'mask')} left in {counted(len(self.nfe), 'row')})"


@dataclass(frozen=True)
class Ends:
    """How the rows of a generation ended, on the CPU."""

    masked: Tensor  # [B, L] bool what is still noise, as aligned as the trace
    done: Tensor  # [B] bool
    stuck: Tensor  # [B] bool a guide refused every commit
    rejected: Tensor  # [B] commits that a guide refused
    forms: Tensor  # [B] which of a guide's forms the answer is to have
    given: Tensor | None = None  # [B, L] bool tokens of the answer that were given; None: no row has one
    failed: frozenset[int] = frozenset()  # rows for which the model returned no finite statistics


def summarise(
    trace: Trace,
    ends: Ends,
    spec: ModelSpec,
    tokenizer: PreTrainedTokenizerBase | None,
    stop_strings: Sequence[str],
    guides: Sequence[Guide] = (),
) -> Result:
    """The result of a trace."""
    masked = ends.masked
    column = torch.arange(trace.ids.shape[1])
    gone = masked | (column >= trace.end[:, None])
    tokens = torch.where(gone, spec.pad_id, trace.ids)[:, trace.origin :]
    width = tokens.shape[1]
    place, gone = torch.arange(width), gone[:, trace.origin :]
    hole = torch.where(gone, place, width).amin(1)  # an unfinished row's answer ends before its first noise
    ended = torch.where(is_end(tokens, spec.eos_ids) & ~gone, place, width).amin(1)
    lengths = torch.minimum(ended + 1, hole)
    texts, gaps, stopped, kept = None, None, [False] * len(tokens), [0] * len(tokens)
    known = (torch.zeros_like(masked) if ends.given is None else ends.given)[:, trace.origin :]
    sizes = trace.end - trace.origin
    if tokenizer is not None:
        stops = torch.minimum(ended, hole).tolist()
        rows = [row[:stop] for row, stop in zip(tokens.tolist(), stops, strict=True)]
        heads = torch.where(known, place + 1, 0).amax(1).tolist()
        found = cut(rows, tokenizer, stop_strings, heads)
        texts, kept, stopped = ([*each] for each in zip(*found, strict=True))
        if ends.given is not None:
            marks = [own[:size] for own, size in zip(known.tolist(), sizes.tolist(), strict=True)]
            parts = zip(rows, marks, heads, strict=True)
            gaps = [_gaps(row, own, head, tokenizer, stop_strings) if head else None for row, own, head in parts]
    complete = ends.done & ~ends.stuck
    closed = known.gather(1, (sizes[:, None] - 1).clamp(min=0))[:, 0].tolist()
    reasons: list[FinishReason] = []
    answers = [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    rows = zip(answers, ends.stuck.tolist(), ends.done.tolist(), strict=True)
    for row, (answer, stuck, done) in enumerate(rows):
        if row in ends.failed:
            reasons.append("not_finite")
        elif stuck:
            reasons.append("constraint")
        elif not done:
            reasons.append("max_steps")
        elif stopped[row]:
            reasons.append("stop_string")
        else:
            has_end = first_end(answer, spec.eos_ids) is not None
            reasons.append("end" if has_end or closed[row] else "length")
    found = [_valid(guides, answer, form) for answer, form in zip(answers, ends.forms.tolist(), strict=True)]
    valid = None if None in found else complete & torch.tensor(found)
    has_stop = torch.tensor(stopped)
    lengths = torch.where(has_stop, torch.tensor(kept), lengths)
    over = torch.where(has_stop, lengths, ended + 1)
    tokens = tokens.masked_fill(place >= over[:, None], spec.pad_id)
    return Result(tokens, lengths, texts, trace.nfe, complete, trace, reasons, ends.rejected, valid, gaps)


def _gaps(
    row: list[int], given: list[bool], head: int, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str]
) -> list[str]:
    """Texts of the runs of generated tokens; what stands behind the first `head` tokens ends at a stop string."""
    runs = [[*run] for _, run in groupby(range(len(given)), key=lambda at: given[at])]
    free = [row[run[0] : run[-1] + 1] for run in runs if not given[run[0]]]
    tail = [stop_strings if run[0] >= head else () for run in runs if not given[run[0]]]
    return [decode([part], tokenizer, stops)[0] for part, stops in zip(free, tail, strict=True)]


def _valid(guides: Sequence[Guide], answer: Sequence[int], form: int) -> bool | None:
    """Whether an answer is what the guides want; None: none says."""
    said = [valid for guide in guides if (valid := guide.valid(answer, form)) is not None]
    return all(said) if said else None


@dataclass(frozen=True, repr=False)
class Speculation:
    """Verified answers of a batch, on the CPU. R rounds, each one pass of the target."""

    tokens: Tensor  # [B, max_new_tokens] int64; padding behind the answer
    lengths: Tensor  # [B] tokens up to and with the first end token; after a stop string as in `Result`
    texts: list[str] | None  # cut at the end token and at a stop string; None without a tokenizer
    accepted: Tensor  # [B, R] int64 drafted tokens taken in each round; -1: the row was done
    step_map: Tensor  # [B, max_new_tokens] the round that emitted each token, from 0; -1: none
    drafter_nfe: Tensor  # [B] int64 forwards of the drafter
    complete: Tensor  # [B] bool: False where a round was not finite and ended the batch before its time

    def __repr__(self) -> str:
        return _shown("Speculation", self)

    @property
    def nfe(self) -> Tensor:
        """`[B]` forwards of the target, which are the rounds."""
        return (self.accepted >= 0).sum(1)

    @property
    def tokens_per_forward(self) -> Tensor:
        """`[B] float32` tokens per forward of the target; plain autoregressive decoding has 1."""
        return self.lengths / self.nfe.clamp(min=1)

    @property
    def mean_accepted(self) -> float:
        """Drafted tokens taken per round, over all rows."""
        made = self.accepted >= 0
        return float(self.accepted[made].double().mean()) if bool(made.any()) else 0.0


@dataclass(frozen=True, repr=False)
class Answer:
    """One answer to one prompt, on the CPU."""

    index: int  # of the prompt, from 0
    sample: int  # of the answers to that prompt, from 0
    finish_reason: FinishReason
    tokens: Tensor  # [max_new_tokens] int64; see `Result.tokens`
    length: int = 0  # see `Result.lengths`
    text: str | None = None  # cut at the end token and at a stop string; None without a tokenizer
    nfe: int = 0  # forwards that the answer took part in
    trace: Trace | None = None  # of this answer alone; None if the prompt was refused
    rejections: int = 0  # commits that a guide refused
    valid: bool | None = None  # whether it is what a guide wants; None: no guide says
    gaps: list[str] | None = None  # text of each gap; None: no tokens were given, or no tokenizer
    error: str | None = None  # why the prompt was refused

    def __repr__(self) -> str:
        said = self.tokens[: self.length].tolist() if self.text is None else self.text
        shown = self.error if self.error is not None else textwrap.shorten(repr(said), SHOWN, placeholder=" ...")
        size = f"{counted(self.length, 'token')}, {counted(self.nfe, 'forward')}"
        return f"Answer({self.index}, {shown}, {size}, {self.finish_reason})"

    @property
    def complete(self) -> bool:
        """Whether the answer came to its end."""
        return self.finish_reason not in ("max_steps", "constraint", "not_finite", "refused")


def _shown(name: str, result: Result | Speculation, reasons: Sequence[str] = ()) -> str:
    """Figures of a result, and its first answers."""
    nfe, lengths = result.nfe.tolist(), result.lengths.tolist()
    texts = result.texts or [row[:length] for row, length in zip(result.tokens.tolist(), lengths, strict=True)]
    rate, count = sum(lengths) / max(1, sum(nfe)), len(nfe)
    lines = [f"{name}({counted(count, 'answer')}, {rate:.2f} tokens per forward)"]
    for row, text in enumerate(texts[:ROWS]):
        why = f", {reasons[row]}" if reasons else ""
        said = textwrap.shorten(repr(text), SHOWN, placeholder=" ...")
        lines.append(f"  {row}: {said}  {counted(lengths[row], 'token')}, {counted(nfe[row], 'forward')}{why}")
    return "\n".join(lines + [f"  ... {count - ROWS} more"] * (count > ROWS))
