"""Results of a generation."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dllm_sampler.core.ends import first_end, is_end
from dllm_sampler.core.protocols import Guide
from dllm_sampler.core.recorder import Recorder, aligned
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Canvas
from dllm_sampler.errors import UserError, counted, first_line
from dllm_sampler.host import files
from dllm_sampler.host.reading import load_json
from dllm_sampler.inputs.texts import cut, decode

ROWS, SHOWN = 8, 80  # answers in a `repr`, and characters of each

FinishReason = Literal["end", "stop_string", "length", "max_steps", "constraint", "not_finite", "refused"]

SCHEMA = 2
FIELDS = ("ids", "step_map", "gone", "logprob", "nfe", "rows", "begin", "end", "seeds", "revised")
OPTIONAL = ("entropy", "born")  # a trace may lack these
NUMBERS = ("origin", "mask_id", "pad_id", "grid")


@dataclass(frozen=True, repr=False)
class Scores:
    """Exact log-likelihoods of answers under a model and a sampler, in nats, on the CPU.

    N is the length of the longest answer. After the end of a shorter one, tensors have 0 and `step_map` has -1.
    """

    tokens: Tensor  # [B, N] tokens of the answers
    log_q: Tensor  # [B, N] float64 log-probability with which each token is drawn in the step that commits it
    step_map: Tensor  # [B, N] forward that commits each token, from 0
    nfe: Tensor  # [B] forwards of each row
    computed: Tensor  # [B] positions computed over all forwards
    lengths: Tensor  # [B] tokens of each answer
    prompt_lengths: Tensor  # [B] tokens of each prompt

    @staticmethod
    def joined(parts: Sequence[Scores]) -> Scores:
        """Return the scores of several batches as one `Scores`."""
        most = max(part.log_q.shape[1] for part in parts)

        def cat(name: str) -> Tensor:
            tensors, fill = [getattr(part, name) for part in parts], -1 if name == "step_map" else 0
            wide = [F.pad(one, (0, most - one.shape[1]), value=fill) if one.dim() == 2 else one for one in tensors]
            return torch.cat(wide)

        return Scores(**{one.name: cat(one.name) for one in fields(Scores)})

    def __repr__(self) -> str:
        return f"Scores({counted(len(self.nfe), 'answer')}, perplexity {self.perplexity:.6g})"

    @property
    def log_p(self) -> Tensor:
        """`[B] float64` log-likelihood of each answer."""
        return self.log_q.sum(1)

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-likelihood of a token, over the tokens of all answers."""
        return float((-self.log_p.sum() / self.lengths.sum()).exp())

    def steps(self, row: int = 0) -> list[list[int]]:
        """Return for each forward of a row the list of positions that it commits."""
        positions = self.step_map[row].tolist()
        return [[at for at, one in enumerate(positions) if one == step] for step in range(int(self.nfe[row]))]


@dataclass(frozen=True, repr=False)
class Trace:
    """The history of a generation, on the CPU. Prompts are padded on the left.

    A file has the tensors, and the numbers in its metadata entry `trace`, a JSON object with `schema` 2.

    Attributes:
        ids: `[B, L]` the final canvas.
        step_map: `[B, L]` forward that committed each token, from 0. -1: prompt, padding, never committed.
        gone: `[B, L]` forward after which a stop cut the column off. -1: never.
        logprob: `[B, L]` log-probability of the token at its commit, without temperature. It is float64 of a float64
            model, else float32. The other tokens share the mask token's probability, unless `compat` is set.
            Their sum is not the log-likelihood of the answer, which `Sampler.score` computes.
        nfe: `[B]` forwards that the row took part in.
        rows: `[B]` positions computed, over all forwards.
        begin: `[B]` first column of the row's prompt.
        end: `[B]` first column after the row.
        seeds: `[B]` seed of the row's random draws.
        revised: `[B] bool` rows in which a token was remasked or replaced. Their step map has only the last commits.
        origin: first generated column of every row.
        mask_id: the mask token. None for a model without one.
        pad_id: the token of padding.
        grid: length of a block-causal model's blocks, counted from the row's first token. None for other models.
        entropy: `[B, L]` nats of the prediction that the token was committed from. None if not recorded.
        born: `[B, L]` first forward that saw the column. None if no length changed.
        tokenizer: decodes tokens for display in a notebook. It is not saved.
    """

    ids: Tensor
    step_map: Tensor
    gone: Tensor
    logprob: Tensor
    nfe: Tensor
    rows: Tensor
    begin: Tensor
    end: Tensor
    seeds: Tensor
    revised: Tensor
    origin: int
    mask_id: int | None
    pad_id: int
    grid: int | None = None
    entropy: Tensor | None = None
    born: Tensor | None = None
    tokenizer: Any = field(default=None, repr=False, compare=False)

    @staticmethod
    def of(canvas: Canvas, recorder: Recorder, mask_id: int | None, pad_id: int, tokenizer: Any = None) -> Trace:
        """Return the trace of a generation so far."""
        origin = int(canvas.layout.first.max())
        begin = origin - canvas.layout.first  # [B]
        layout = canvas.layout
        wanted = layout.answer_end if layout.surplus is None else layout.answer_end - layout.surplus
        kept = {
            "ids": aligned(canvas, canvas.ids, pad_id),
            "step_map": aligned(canvas, recorder.step_map, -1),
            "gone": aligned(canvas, recorder.gone, -1),
            "logprob": aligned(canvas, recorder.logprob, 0),
            "nfe": recorder.nfe,
            "rows": recorder.computed,
            "begin": begin,
            "end": begin + torch.minimum(canvas.end, wanted),
            "seeds": layout.seeds,
            "revised": recorder.revised,
        }
        if recorder.entropy is not None:
            kept["entropy"] = aligned(canvas, recorder.entropy, 0)
        if recorder.born is not None:
            kept["born"] = aligned(canvas, recorder.born, 0)
        tensors = {name: tensor.cpu().clone() for name, tensor in kept.items()}
        grid = None if layout.grid is None else layout.grid.length
        about = {"mask_id": mask_id, "pad_id": pad_id, "grid": grid, "tokenizer": tokenizer}
        return Trace(**tensors, origin=origin, **about)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle, without the tokenizer, which is large."""
        return vars(self) | {"tokenizer": None}

    def __repr__(self) -> str:
        rows, width = self.generated.shape
        forwards = "1 forward" if (span := _span(self.nfe)) == "1" else f"{span} forwards"
        return f"Trace({counted(rows, 'row')} of {counted(width, 'token')}, {forwards})"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the answers, with a slider over the forwards."""
        return _page(self, self.tokenizer)

    @property
    def generated(self) -> Tensor:
        """`[B, N]` step map without the prompts."""
        return self.step_map[:, self.origin :]

    @property
    def decoded(self) -> Tensor:
        """`[B, N]` all decoded tokens, also after an end-of-text token. Positions without a token have `pad_id`."""
        noise = self.step_map < 0 if self.mask_id is None else self.ids == self.mask_id
        gone = noise | (torch.arange(self.ids.shape[1]) >= self.end[:, None])
        return self.ids.masked_fill(gone, self.pad_id)[:, self.origin :]

    @property
    def real(self) -> Tensor:
        """`[B, L] bool` columns that are not padding. Columns that a stop cut off are included."""
        column = torch.arange(self.ids.shape[1])
        return (column >= self.begin[:, None]) & ((column < self.end[:, None]) | (self.gone >= 0))

    def steps(self, row: int = 0) -> list[list[int]]:
        """Return for each forward of a row the ascending positions in the answer that it committed.

        A token that was remasked counts for the forward that committed it last.
        """
        found: list[list[int]] = [[] for _ in range(int(self.nfe[row]))]
        for position, step in enumerate(self.generated[row].tolist()):
            if step >= 0:
                found[step].append(position)
        return found

    def state(self, step: int | Tensor) -> Tensor:
        """Return `[B, L]` the canvas that forward number `step` of each row saw. `step` is a number, or `[B]`.

        It is rebuilt from the step map: tokens that were committed at `step` or later are noise. It is exact for rows
        that are not `revised`. If the length of answers changed, columns are those of that canvas.
        """
        noise = self.pad_id if self.mask_id is None else self.mask_id
        generated = torch.arange(self.ids.shape[1]) >= self.origin
        hidden = generated & (self.step_map >= torch.as_tensor(step).view(-1, 1))
        state, there = torch.where(hidden, noise, self.ids), self._there(step)
        if there is None:
            return state
        state = state.gather(1, (~there).long().argsort(dim=1, stable=True))
        return torch.where(there.sort(1, descending=True).values, state, self.pad_id)

    def seen(self, step: int | Tensor) -> Tensor:
        """Return `[B, L] bool` the columns of `state(step)` that are not padding and not cut off yet."""
        there = self._there(step)
        if there is not None:
            return there.sort(1, descending=True).values & (torch.arange(self.ids.shape[1]) >= self.begin[:, None])
        return self.real & ((self.gone < 0) | (self.gone >= torch.as_tensor(step).view(-1, 1)))

    def _there(self, step: int | Tensor) -> Tensor | None:
        """Return `[B, L] bool` final columns that forward number `step` of each row saw, and padding before prompts.

        Returns None if no length changed.
        """
        if self.born is None:
            return None
        column = torch.arange(self.ids.shape[1])
        born = (self.born <= torch.as_tensor(step).view(-1, 1)) & (column < self.end[:, None])
        return born | (column < self.origin)

    def replay(self) -> Iterator[Tensor]:
        """Yield `[B, L]` the canvas before each forward and after the last one, by `state`."""
        for step in range(int(self.nfe.max()) + 1):
            yield self.state(step)

    def row(self, *rows: int) -> Trace:
        """Return the trace of some rows, in the given order."""
        at = torch.tensor(rows)
        tensors = {name: value[at] for name in (*FIELDS, *OPTIONAL) if (value := getattr(self, name)) is not None}
        return replace(self, **tensors)

    def unpadded(self, new_tokens: int) -> Trace:
        """Return the trace of a single row without padding before its prompt and after its `new_tokens`."""
        cut, end = int(self.begin), self.origin + new_tokens
        names = ("ids", "step_map", "gone", "logprob", *OPTIONAL)
        kept = {name: value[:, cut:end] for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **kept, begin=self.begin - cut, end=self.end - cut, origin=self.origin - cut)

    @staticmethod
    def stack(traces: Sequence[Trace]) -> Trace:
        """Return the rows of several traces as one trace, padded to the longest prompt and the longest answer."""
        first = traces[0]
        origin, width = max(one.origin for one in traces), max(one.generated.shape[1] for one in traces)
        padding = {"ids": first.pad_id, "step_map": -1, "gone": -1, "logprob": 0, "entropy": 0, "born": 0}

        def rows(name: str) -> Tensor | None:
            found = []
            for one in traces:
                value, before = getattr(one, name), origin - one.origin
                if value is None:
                    return None
                if name in padding:
                    value = F.pad(value, (before, width - one.generated.shape[1]), value=padding[name])
                found.append(value + before if name in ("begin", "end") else value)
            return torch.cat(found)

        return replace(first, origin=origin, **{name: rows(name) for name in (*FIELDS, *OPTIONAL)})

    def save(self, path: str | Path) -> None:
        """Write the trace atomically to a safetensors file. Its metadata holds the numbers as JSON.

        Raises:
            UserError: the file cannot be written.
        """
        about = {"schema": SCHEMA, **{name: getattr(self, name) for name in NUMBERS}}
        names = (*FIELDS, *(name for name in OPTIONAL if getattr(self, name) is not None))
        data = save({name: getattr(self, name).contiguous() for name in names}, {"trace": json.dumps(about)})
        files.write(path, data)

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Return the trace in a file that `save` wrote.

        Raises:
            UserError: the file does not exist, is not a trace, or has another schema.
        """
        way = "Name a file that Trace.save wrote"
        try:
            with safe_open(path, framework="pt") as file:
                about = load_json((file.metadata() or {}).get("trace", "{}"))
                known = isinstance(about, dict) and {"schema", *NUMBERS} <= about.keys() and about["schema"] == SCHEMA
                optional = {*OPTIONAL} & set(file.keys())
                tensors = {name: file.get_tensor(name) for name in (*FIELDS, *optional)} if known else {}
        except (OSError, SafetensorError, ValueError) as error:
            said = f"'{path}' cannot be read as a trace ({first_line(error)}). {way}."
            raise UserError("trace-invalid", said) from error
        if not known:
            raise UserError("trace-invalid", f"'{path}' is not a trace of schema {SCHEMA}. Generate it again.")
        return Trace(**tensors, **{name: about[name] for name in NUMBERS})


@dataclass(frozen=True)
class MeetingRecord:
    """A resampling of the rows of one prompt, called a meeting."""

    log_weights: list[float]  # of each row before it, up to a constant
    ancestors: list[int] | None  # for each row the number of the row that it becomes a copy of. None without copies

    @property
    def effective(self) -> float:
        """Effective number of rows: 1 if one row has all weight, and their number if all weights are equal."""
        weights = torch.tensor(self.log_weights, dtype=torch.float64).softmax(0)
        return float(1 / weights.square().sum())


@dataclass(frozen=True, repr=False)
class Rows:
    """The rows from which one answer was chosen (`particles`)."""

    batch: Result  # these rows and those of other prompts
    first: int  # number of the first of these rows in `batch`
    winner: int  # number of the row that is the answer, from 0
    ratings: list[float]  # of each row. The highest rating among the complete rows wins
    meetings: list[MeetingRecord]

    def __repr__(self) -> str:
        again = sum(one.ancestors is not None for one in self.meetings)
        met = f"{counted(len(self.meetings), 'meeting')}, {again} with copies"
        return f"Rows({len(self.ratings)}, row {self.winner} is the answer, {met})"

    @property
    def result(self) -> Result:
        """All rows as a `Result`. Its `nfe` counts the forwards of each row number, also before copies."""
        return self.batch.row(*range(self.first, self.first + len(self.ratings)))

    def record(self) -> dict[str, Any]:
        """Return the fields of `particles` in a file of samples."""
        return {
            "winner": self.winner,
            "ratings": self.ratings,
            "nfe": self.result.nfe.tolist(),
            "ancestors": [one.ancestors for one in self.meetings],
        }


@dataclass(frozen=True, repr=False)
class Result:
    """Answers of a batch, on the CPU."""

    # [B, max_new_tokens] int64. Padding follows the first end-of-text token, or the part before a stop string.
    # Positions that were never decoded are padding, too. `trace.decoded` has all decoded tokens.
    tokens: Tensor
    # [B] tokens up to and with the first end-of-text token, or before the first mask of an unfinished row, or before a
    # stop string. A token with both the text's end and the stop string's beginning counts, unless its part of the text
    # is white space.
    lengths: Tensor
    texts: list[str] | None  # cut at the first end-of-text token or stop string. None without a tokenizer
    nfe: Tensor  # [B] int64 forwards that the row took part in. With `particles`, the sum over all rows of the prompt
    complete: Tensor  # [B] bool: false if max_steps, a guide or NaN ended the row early
    trace: Trace
    finish_reason: list[FinishReason]  # reason that each row ended
    rejections: Tensor  # [B] int64 commits that a guide refused
    valid: Tensor | None = None  # [B] bool: the guides accept the answer. None if no guide judges answers
    gaps: list[list[str] | None] | None = None  # text of each gap of each row, if tokens are given
    rows: list[Rows] | None = None  # the rows that each answer was chosen from. None without `particles`

    def __repr__(self) -> str:
        return _shown("Result", self, self.finish_reason)

    def _repr_html_(self) -> str:
        """Return HTML for a notebook, as `Trace` does."""
        return self.trace._repr_html_()

    @staticmethod
    def stack(answers: Iterable[Answer]) -> Result:
        """Return answers of `Sampler.generate_many` as one result, in the order of prompts and samples.

        Raises:
            UserError: `answers` is empty, or the prompt of an answer was refused.
        """
        given = sorted(answers, key=lambda answer: (answer.index, answer.sample))
        if not given:
            raise UserError("answers-missing", "The list of answers is empty. Give at least one.")
        refused = next((answer for answer in given if answer.trace is None), None)
        if refused is not None:
            raise UserError(
                "answer-refused",
                f"The answer to prompt {refused.index + 1} has no tokens: its prompt was refused. Leave it out.",
            )
        trace = Trace.stack([answer.trace for answer in given if answer.trace is not None])
        width = trace.generated.shape[1]
        texts = [answer.text for answer in given if answer.text is not None]
        return Result(
            torch.stack([F.pad(one.tokens, (0, width - len(one.tokens)), value=trace.pad_id) for one in given]),
            torch.tensor([answer.length for answer in given]),
            texts if len(texts) == len(given) else None,
            torch.tensor([answer.nfe for answer in given]),
            torch.tensor([answer.complete for answer in given]),
            trace,
            [answer.finish_reason for answer in given],
            torch.tensor([answer.rejections for answer in given]),
            None if any(answer.valid is None for answer in given) else torch.tensor([one.valid for one in given]),
            None if all(answer.gaps is None for answer in given) else [one.gaps for one in given],
            None if any(answer.rows is None for answer in given) else [one.rows for one in given],  # pyright: ignore
        )

    def row(self, *rows: int) -> Result:
        """Return the result with only some rows, in the given order."""
        at = torch.tensor(rows)
        tensors = {one.name: value[at] for one in fields(self) if isinstance(value := getattr(self, one.name), Tensor)}
        lists = {
            one.name: [value[row] for row in rows]
            for one in fields(self)
            if isinstance(value := getattr(self, one.name), list)
        }
        return replace(self, **tensors, **lists, trace=self.trace.row(*rows))

    def answer(self, row: int, index: int, sample: int = 0, *, max_new_tokens: int) -> Answer:
        """Return one row as answer number `sample` to prompt `index`, both from 0."""
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
            rows=None if self.rows is None else self.rows[row],
        )

    def token_rows(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens of each prompt, and the tokens of each answer up to and with its end-of-text token."""
        trace = self.trace
        prompts = [
            ids[begin : trace.origin] for ids, begin in zip(trace.ids.tolist(), trace.begin.tolist(), strict=True)
        ]
        answers = [row[:length] for row, length in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)]
        return prompts, answers

    @property
    def step_map(self) -> Tensor:
        """`[B, max_new_tokens]` forward that committed each token, from 0. -1 means none."""
        return self.trace.generated

    @property
    def generated(self) -> Tensor:
        """`[B] int64` number of generated tokens in each answer, without given tokens."""
        column = torch.arange(self.tokens.shape[1])
        return ((self.step_map >= 0) & (column < self.lengths[:, None])).sum(1)

    @property
    def tokens_per_forward(self) -> Tensor:
        """`[B] float32` generated tokens over `nfe`. Tokens after the end-of-text token do not count."""
        return self.generated / self.nfe.clamp(min=1)


@dataclass(frozen=True, repr=False)
class Commits:
    """The canvas after a step of a stream, on the CPU. The last step has the result."""

    step: int  # forwards made so far
    tokens: Tensor  # [B, max_new_tokens] tokens of the answers
    masked: Tensor  # [B, max_new_tokens] bool: positions that are still noise
    step_map: Tensor  # [B, max_new_tokens] forward that committed each token, from 0. -1 means none yet
    nfe: Tensor  # [B] forwards of each row
    result: Result | None = None
    given: Tensor | None = None  # [B, max_new_tokens] bool: given tokens. None without any
    sizes: Tensor | None = None  # [B] columns of each answer. None if their number never changes
    open_end: Tensor | None = None  # [B] column of the answer at which the open blocks end. None if unknown

    @property
    def there(self) -> Tensor:
        """`[B, max_new_tokens] bool` columns that each answer has now."""
        if self.sizes is None:
            return torch.ones_like(self.masked)
        return torch.arange(self.masked.shape[1]) < self.sizes[:, None]

    def rows(self) -> Iterator[tuple[list[int], list[bool], list[int]]]:
        """Yield the tokens, the noise and the step map of each answer, cut to its current length."""
        sizes = self.there.sum(1).tolist()
        tables = (self.tokens.tolist(), self.masked.tolist(), self.step_map.tolist())
        for tokens, masked, steps, size in zip(*tables, sizes, strict=True):
            yield tokens[:size], masked[:size], steps[:size]

    def __repr__(self) -> str:
        left = int(self.masked.sum())
        return f"Commits(step {self.step}, {counted(left, 'mask')} left in {counted(len(self.nfe), 'row')})"


@dataclass(frozen=True)
class Ends:
    """Ends of the rows of a generation, on the CPU."""

    masked: Tensor  # [B, L] bool positions that are still noise, aligned as the trace
    done: Tensor  # [B] bool rows that ended by themselves
    stuck: Tensor  # [B] bool rows in which a guide refused every commit
    rejected: Tensor  # [B] number of commits that a guide refused
    forms: Tensor  # [B] number of the form in a guide's list that the answer must have
    given: Tensor | None = None  # [B, L] bool given tokens of the answer, if any
    failed: frozenset[int] = frozenset()  # rows with NaN or infinite statistics


def summarise(
    trace: Trace,
    ends: Ends,
    spec: ModelSpec,
    tokenizer: PreTrainedTokenizerBase | None,
    stop_strings: Sequence[str],
    guides: Sequence[Guide] = (),
) -> Result:
    """Return the result of a generation from its trace and the ends of its rows."""
    masked = ends.masked
    column = torch.arange(trace.ids.shape[1])
    gone = masked | (column >= trace.end[:, None])
    tokens = torch.where(gone, spec.pad_id, trace.ids)[:, trace.origin :]
    width = tokens.shape[1]
    place, gone = torch.arange(width), gone[:, trace.origin :]
    hole = torch.where(gone, place, width).amin(1)  # the answer of an unfinished row ends before its first mask
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
    """Return the text of each run of generated tokens. Runs after the first `head` tokens end at a stop string."""
    runs = [[*run] for _, run in groupby(range(len(given)), key=lambda at: given[at])]
    free = [row[run[0] : run[-1] + 1] for run in runs if not given[run[0]]]
    tail = [stop_strings if run[0] >= head else () for run in runs if not given[run[0]]]
    return [decode([part], tokenizer, stops)[0] for part, stops in zip(free, tail, strict=True)]


def _valid(guides: Sequence[Guide], answer: Sequence[int], form: int) -> bool | None:
    """Return True if the guides accept an answer, or None if no guide judges answers."""
    said = [valid for guide in guides if (valid := guide.valid(answer, form)) is not None]
    return all(said) if said else None


@dataclass(frozen=True, repr=False)
class Speculation:
    """Answers of a `SpeculativeSampler`, on the CPU. R is the number of rounds, each one pass of the target."""

    tokens: Tensor  # [B, max_new_tokens] int64 tokens, with padding after the answer
    lengths: Tensor  # [B] tokens up to and with the first end-of-text token, or before a stop string as in `Result`
    texts: list[str] | None  # cut at the end-of-text token or a stop string. None without a tokenizer
    accepted: Tensor  # [B, R] int64 drafted tokens accepted in each round. -1 if the row was done
    step_map: Tensor  # [B, max_new_tokens] round that emitted each token, from 0. -1 means none
    drafter_nfe: Tensor  # [B] int64 forwards of the drafter
    complete: Tensor  # [B] bool: false if NaN ended the batch early

    def __repr__(self) -> str:
        return _shown("Speculation", self)

    @property
    def nfe(self) -> Tensor:
        """`[B]` forwards of the target, one for each round until the row is done."""
        return (self.accepted >= 0).sum(1)

    @property
    def tokens_per_forward(self) -> Tensor:
        """`[B] float32` tokens per forward of the target. It is 1 for plain autoregressive decoding."""
        return self.lengths / self.nfe.clamp(min=1)

    @property
    def mean_accepted(self) -> float:
        """Mean number of accepted drafted tokens per round, over all rows."""
        made = self.accepted >= 0
        return float(self.accepted[made].double().mean()) if bool(made.any()) else 0.0


@dataclass(frozen=True, repr=False)
class Answer:
    """One answer to one prompt, on the CPU."""

    index: int  # number of the prompt, from 0
    sample: int  # number of the answer to that prompt, from 0
    finish_reason: FinishReason  # reason that the answer ended
    tokens: Tensor  # [max_new_tokens] int64, as `Result.tokens`
    length: int = 0  # as `Result.lengths`
    text: str | None = None  # cut at the end-of-text token or a stop string. None without a tokenizer
    nfe: int = 0  # forwards of the answer. With `particles`, the sum over all rows of the prompt
    trace: Trace | None = None  # trace of this answer. None if the prompt was refused
    rejections: int = 0  # commits that a guide refused
    valid: bool | None = None  # true if the guides accept the answer. None if no guide judges answers
    gaps: list[str] | None = None  # text of each gap. None without given tokens or a tokenizer
    error: str | None = None  # message of the error if the prompt was refused
    rows: Rows | None = None  # the rows that the answer was chosen from. None without `particles`

    def __repr__(self) -> str:
        said = self.tokens[: self.length].tolist() if self.text is None else self.text
        shown = self.error if self.error is not None else textwrap.shorten(repr(said), SHOWN, placeholder=" ...")
        size = f"{counted(self.length, 'token')}, {counted(self.nfe, 'forward')}"
        return f"Answer({self.index}, {shown}, {size}, {self.finish_reason})"

    @property
    def complete(self) -> bool:
        """True if the answer was not ended early by `max_steps`, a guide, NaN or a refusal."""
        return self.finish_reason not in ("max_steps", "constraint", "not_finite", "refused")


def _shown(name: str, result: Result | Speculation, reasons: Sequence[str] = ()) -> str:
    """Return the `repr` of a result: its figures and its first answers."""
    nfe, lengths = result.nfe.tolist(), result.lengths.tolist()
    texts = result.texts or [row[:length] for row, length in zip(result.tokens.tolist(), lengths, strict=True)]
    rate, count = sum(lengths) / max(1, sum(nfe)), len(nfe)
    lines = [f"{name}({counted(count, 'answer')}, {rate:.2f} tokens per forward)"]
    for row, text in enumerate(texts[:ROWS]):
        why = f", {reasons[row]}" if reasons else ""
        said = textwrap.shorten(repr(text), SHOWN, placeholder=" ...")
        lines.append(f"  {row}: {said}  {counted(lengths[row], 'token')}, {counted(nfe[row], 'forward')}{why}")
    return "\n".join(lines + [f"  ... {count - ROWS} more"] * (count > ROWS))


def _span(numbers: Tensor) -> str:
    """Return the range of the numbers as text, for example `8 to 12`, or `8` if all are equal."""
    low, high = int(numbers.min()), int(numbers.max())
    return str(low) if low == high else f"{low} to {high}"


# The HTML of a trace in a notebook, with a slider over the forwards.
SHOWN_ROWS = 4  # most answers in the HTML
NOISE = "░░"
# The page shows the canvas after the last forward. The slider replaces tokens that later forwards committed by noise.
STYLE = (
    ".dllm-trace p{margin:.3em 0;line-height:1.9;font-family:monospace;white-space:pre-wrap}"
    ".dllm-trace p span{padding:.15em .1em;border-radius:.2em;color:#111}"
    ".dllm-trace p span.noise{background:none!important;color:#999}"
    ".dllm-trace small{color:#777}"
)
MOVE = (
    "const box=this.closest('.dllm-trace'),at=Number(this.value);"
    "box.querySelector('output').textContent='forward '+at+' of '+this.max;"
    "for(const token of box.querySelectorAll('span[data-step]')){const open=Number(token.dataset.step)>=at;"
    "token.className=open?'noise':'';token.textContent=open?token.dataset.noise:token.dataset.text}"
)


def _page(trace: Trace, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return HTML of the first rows: each token in the colour of its forward, and a slider from noise to answer.

    Args:
        tokenizer: decodes the tokens. Without one their ids are shown.
    """
    last = max(1, int(trace.nfe.max()))
    rows = [_row(trace, row, last, tokenizer) for row in range(min(SHOWN_ROWS, len(trace.nfe)))]
    more = len(trace.nfe) - len(rows)
    notes = [f"{more} more row{'s' * (more > 1)}"] * (more > 0)
    if bool(trace.revised[: len(rows)].any()):
        notes.append("tokens were remasked: colours show the last forward that committed each")
    return (
        f'<div class="dllm-trace"><style>{STYLE}</style>'
        f'<label><input type="range" min="0" max="{last}" value="{last}" oninput="{escape(MOVE)}">'
        f" <output>forward {last} of {last}</output></label>"
        f"{''.join(rows)}<small>{'; '.join(notes)}</small></div>"
    )


def _row(trace: Trace, row: int, last: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return the HTML of one answer, up to the end of its canvas."""
    size = int(trace.end[row]) - trace.origin
    ids, steps = trace.ids[row, trace.origin :][:size].tolist(), trace.generated[row, :size].tolist()
    chances = trace.logprob[row, trace.origin :][:size].exp().tolist()
    shown, made = [], int(trace.nfe[row])
    for place, (text, step, chance) in enumerate(zip(_pieces(ids, tokenizer), steps, chances, strict=True)):
        if step < 0:
            shown.append(f'<span class="noise" title="position {place}: not committed">{NOISE}</span>')
            continue
        title = f"position {place}, forward {step + 1}, confidence {chance:.3g}"
        text, hue = escape(text), round(250 - 220 * step / max(1, last - 1))
        shown.append(
            f'<span data-step="{step}" data-text="{text}" data-noise="{NOISE}" title="{title}"'
            f' style="background:hsl({hue} 70% 85%)">{text}</span>'
        )
    return f"<p><small>{row}: {made} forward{'s' * (made != 1)}</small> {''.join(shown)}</p>"


def _pieces(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """Return the text of each token, with a sign for a line break and a dot for a special token."""
    if tokenizer is None:
        return [f"{token} " for token in ids]
    special = set(tokenizer.all_special_ids)
    return ["·" if token in special else str(tokenizer.decode([token])).replace("\n", "⏎") for token in ids]
