"""What happened: which forward committed each token, and how sure it was. Saved, loaded, replayed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dllm_sampler.core.values import Canvas, Edit, Moved, Query, Readout, Spent
from dllm_sampler.errors import UserError, counted
from dllm_sampler.host import files
from dllm_sampler.host.reading import load_json

SCHEMA = 2
FIELDS = ("ids", "step_map", "gone", "logprob", "nfe", "rows", "begin", "end", "seeds", "revised")
OPTIONAL = ("entropy", "born")  # a trace has them or not
NUMBERS = ("origin", "mask_id", "pad_id", "grid")


class Recorder:
    """Device buffers of a running generation; nothing is transferred before the end.

    Costs 20 bytes per column of a row, 24 with the entropy (24 and 32 for float64 models), and per step some ten
    small operations on the queried positions. The entropy is one more reduction of the logits, unless a plug-in needs
    it anyway.

    Args:
        canvas: before the first step.
        dtype: of the model; log-probabilities are float32, of a float64 model float64.
        entropy: whether steps measure it.
        revises: whether the scheduler may take back or replace tokens.
        resizes: whether it changes the length of answers.
    """

    def __init__(
        self,
        canvas: Canvas,
        dtype: torch.dtype = torch.float32,
        entropy: bool = False,
        revises: bool = True,
        resizes: bool = False,
    ):
        self.revises = revises
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        self.step_map = torch.full_like(canvas.ids, -1)  # [B, L+1]
        self.gone = torch.full_like(canvas.ids, -1)  # [B, L+1]
        self.logprob = torch.zeros(canvas.ids.shape, dtype=precise, device=canvas.ids.device)  # [B, L+1]
        self.entropy = torch.zeros_like(self.logprob) if entropy else None
        self.born = torch.zeros_like(canvas.ids) if resizes else None  # [B, L+1]
        self.revised = torch.zeros_like(canvas.done)  # [B]
        self.rejected = torch.zeros_like(canvas.step)  # [B] commits that a guide refused
        self.stuck = torch.zeros_like(canvas.done)  # [B] rows in which a guide refused every commit
        self.nfe = torch.zeros_like(canvas.step)  # [B] passes that the row took part in
        self.computed = torch.zeros_like(canvas.step)  # [B] positions computed for the row

    def note(self, before: Canvas, after: Canvas, query: Query, edit: Edit, readout: Readout, spent: Spent) -> None:
        """Record what one step wrote and cost. Tokens are recorded under the row's own count of forwards."""
        self.nfe, self.computed = self.nfe + spent.nfe, self.computed + spent.computed
        at = query.positions
        was, noise = before.masked.gather(1, at), after.masked.gather(1, at)
        if self.revises or edit.remask is not None:
            writable = ~(before.layout.frozen.gather(1, at) | before.done[:, None])
            wrote = edit.commit & ~noise & writable
            other = edit.commit & (edit.ids != before.ids.gather(1, at))
            if edit.remask is not None:
                other = other | edit.remask
                self.step_map.scatter_(1, at.masked_fill(~noise, before.length), -1)
            self.revised |= (other & writable & ~was).any(1)
        else:
            wrote = edit.commit & was & ~noise
        # What was not written goes to the empty slot, whose numbers are never read.
        idle = ~wrote
        at = at.masked_fill(idle, before.length)
        self.step_map.scatter_(1, at, before.step[:, None].masked_fill(idle, -1))
        sure = readout.confidence[:, 0] if edit.confidence is None else edit.confidence
        self.logprob.scatter_(1, at, sure.log().to(self.logprob.dtype))
        if self.entropy is not None and readout.entropy is not None:
            self.entropy.scatter_(1, at, readout.entropy[:, 0].to(self.entropy.dtype))
        if edit.rejected is not None and edit.stuck is not None:
            self.rejected += edit.rejected
            self.stuck |= edit.stuck
        if edit.end is not None:
            cut = (before.columns() >= after.end[:, None]) & (before.columns() < before.end[:, None])
            self.gone = torch.where(cut, before.step[:, None], self.gone)

    def move(self, before: Canvas, moved: Moved) -> None:
        """Follow a change of length, behind `note`: what is known of a column goes where the column goes."""
        step = before.step[:, None]
        wrote = moved.added & ~moved.change.masked[:, None]  # tokens that the rule has written at the end
        self.step_map = torch.where(wrote, step, moved.values(self.step_map, -1))
        self.logprob = moved.values(self.logprob, 0.0)
        if self.entropy is not None:
            self.entropy = moved.values(self.entropy, 0.0)
        if self.born is not None:
            self.born = moved.values(self.born, 0).masked_fill(moved.new, 0) + moved.new * (step + 1)
        self.revised = self.revised | moved.lost


def aligned(canvas: Canvas, values: Tensor, fill: float) -> Tensor:
    """`[B, P+N]` values `[B, L+1]` of a canvas, padded with `fill` so that each answer begins at column P."""
    answer = canvas.asked()  # [B, N]
    size = int(canvas.layout.first.max())
    columns = torch.cat([answer[:, :1] + torch.arange(-size, 0, device=answer.device), answer], 1)  # [B, P+N]
    outside = (columns < 0) | (columns == canvas.length)
    return values.gather(1, columns.clamp(min=0)).masked_fill(outside, fill)


@dataclass(frozen=True, repr=False)
class Trace:
    """The history of a generation, on the CPU: rows left-padded, so that column `origin` is every row's first generated
    one."""

    ids: Tensor  # [B, L] the final canvas
    step_map: Tensor  # [B, L] forward that committed each token, from 0; -1: prompt, padding, never committed
    gone: Tensor  # [B, L] forward after which a stop policy cut the column off, -1: never
    # [B, L] log-probability of the token at its commit, float32 (float64 of a float64 model). Unless `compat`, the mask
    # token is left out: the other tokens share its probability.
    logprob: Tensor
    nfe: Tensor  # [B]
    rows: Tensor  # [B] positions computed
    begin: Tensor  # [B] first real column
    end: Tensor  # [B] end of the row
    seeds: Tensor  # [B]
    revised: Tensor  # [B] bool: a token was taken back or replaced, so that the step map is not the whole story
    origin: int
    mask_id: int | None
    pad_id: int
    grid: int | None = None  # length of a block-causal model's blocks, counted from the row's first token
    entropy: Tensor | None = None  # [B, L] nats of the model's prediction at the commit; None: not recorded
    born: Tensor | None = None  # [B, L] the first forward that saw the column; None: all did, no length changed
    tokenizer: Any = field(default=None, repr=False, compare=False)  # what a notebook spells tokens with

    @staticmethod
    def of(canvas: Canvas, recorder: Recorder, mask_id: int | None, pad_id: int, tokenizer: Any = None) -> Trace:
        """The trace of a finished (or interrupted) generation."""
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
        """Without the tokenizer, which is megabytes, where a trace goes to another process."""
        return vars(self) | {"tokenizer": None}

    def __repr__(self) -> str:
        rows, width = self.generated.shape
        forwards = "1 forward" if (span := _span(self.nfe)) == "1" else f"{span} forwards"
        return f"Trace({counted(rows, 'row')} of {counted(width, 'token')}, {forwards})"

    def _repr_html_(self) -> str:
        """For a notebook: the answers, to be denoised again with a slider."""
        return _page(self, self.tokenizer)

    @property
    def generated(self) -> Tensor:
        """`[B, N]` step map of the generated part alone."""
        return self.step_map[:, self.origin :]

    @property
    def decoded(self) -> Tensor:
        """`[B, N]` tokens of the generated part as decoding left them, also after an end token.

        Padding where nothing was decoded.
        """
        noise = self.step_map < 0 if self.mask_id is None else self.ids == self.mask_id
        gone = noise | (torch.arange(self.ids.shape[1]) >= self.end[:, None])
        return self.ids.masked_fill(gone, self.pad_id)[:, self.origin :]

    @property
    def real(self) -> Tensor:
        """`[B, L] bool` the columns that are no padding, those that were cut off included."""
        column = torch.arange(self.ids.shape[1])
        return (column >= self.begin[:, None]) & ((column < self.end[:, None]) | (self.gone >= 0))

    def steps(self, row: int = 0) -> list[list[int]]:
        """Positions inside the generation that each forward of a row committed, in order of position.

        A token that was taken back counts for the forward that committed it last.
        """
        found: list[list[int]] = [[] for _ in range(int(self.nfe[row]))]
        for position, step in enumerate(self.generated[row].tolist()):
            if step >= 0:
                found[step].append(position)
        return found

    def state(self, step: int | Tensor) -> Tensor:
        """`[B, L]` the canvas that each row's forward number `step` saw; one number, or `[B]`.

        Nothing was stored for it: what was committed at `step` or later is noise. Exact for rows not `revised`. Where
        the length of answers changed, columns are those of that canvas, not of the final one.
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
        """`[B, L] bool` the columns of `state` that existed for each row's forward number `step`: no padding, not cut
        off yet."""
        there = self._there(step)
        if there is not None:
            return there.sort(1, descending=True).values & (torch.arange(self.ids.shape[1]) >= self.begin[:, None])
        return self.real & ((self.gone < 0) | (self.gone >= torch.as_tensor(step).view(-1, 1)))

    def _there(self, step: int | Tensor) -> Tensor | None:
        """`[B, L] bool` final columns that each row's forward number `step` saw, padding before a prompt among them;
        None: no length changed."""
        if self.born is None:
            return None
        column = torch.arange(self.ids.shape[1])
        born = (self.born <= torch.as_tensor(step).view(-1, 1)) & (column < self.end[:, None])
        return born | (column < self.origin)

    def replay(self) -> Iterator[Tensor]:
        """`[B, L]` the canvas before each forward and after the last (see `state`)."""
        for step in range(int(self.nfe.max()) + 1):
            yield self.state(step)

    def row(self, *rows: int) -> Trace:
        """The trace of some of the rows, in that order."""
        at = torch.tensor(rows)
        tensors = {name: value[at] for name in (*FIELDS, *OPTIONAL) if (value := getattr(self, name)) is not None}
        return replace(self, **tensors)

    def unpadded(self, new_tokens: int) -> Trace:
        """The trace of one row, without padding before its prompt and behind its `new_tokens`."""
        cut, end = int(self.begin), self.origin + new_tokens
        names = ("ids", "step_map", "gone", "logprob", *OPTIONAL)
        kept = {name: value[:, cut:end] for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **kept, begin=self.begin - cut, end=self.end - cut, origin=self.origin - cut)

    @staticmethod
    def stack(traces: Sequence[Trace]) -> Trace:
        """The rows of several traces of one model in one, padded to the longest prompt and the longest answer."""
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
        """Write one safetensors file whose metadata holds the rest as JSON; atomically.

        Raises:
            UserError: it cannot be written there.
        """
        about = {"schema": SCHEMA, **{name: getattr(self, name) for name in NUMBERS}}
        names = (*FIELDS, *(name for name in OPTIONAL if getattr(self, name) is not None))
        data = save({name: getattr(self, name).contiguous() for name in names}, {"trace": json.dumps(about)})
        files.write(path, data)

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read what `save` wrote.

        Raises:
            UserError: no such file, not a trace, or one of another schema.
        """
        try:
            with safe_open(path, framework="pt") as file:
                about = load_json((file.metadata() or {}).get("trace", "{}"))
                known = isinstance(about, dict) and {"schema", *NUMBERS} <= about.keys() and about["schema"] == SCHEMA
                optional = {*OPTIONAL} & set(file.keys())
                tensors = {name: file.get_tensor(name) for name in (*FIELDS, *optional)} if known else {}
        except (OSError, SafetensorError, ValueError) as error:
            raise UserError("trace-invalid", f"{path} cannot be read as a trace: {error}") from error
        if not known:
            raise UserError("trace-invalid", f"{path} is not a trace of schema {SCHEMA}, the one this version reads")
        return Trace(**tensors, **{name: about[name] for name in NUMBERS})


def _span(numbers: Tensor) -> str:
    """`8 to 12`, or the one number that all are."""
    low, high = int(numbers.min()), int(numbers.max())
    return str(low) if low == high else f"{low} to {high}"


# How a trace is shown in a notebook: the answers as they were denoised, one forward after the other.
SHOWN_ROWS = 4  # in a notebook
NOISE = "░░"
# The page shows the canvas after the last forward; the slider hides what later forwards committed. Each token is drawn
# over its noise, so that nothing moves.
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
    """HTML of the first rows: each token in the colour of its forward, and a slider from noise to answer.

    Args:
        tokenizer: None: token ids are shown.
    """
    last = max(1, int(trace.nfe.max()))
    rows = [_row(trace, row, last, tokenizer) for row in range(min(SHOWN_ROWS, len(trace.nfe)))]
    more = len(trace.nfe) - len(rows)
    notes = [f"{more} more row{'s' * (more > 1)}"] * (more > 0)
    if bool(trace.revised[: len(rows)].any()):
        notes.append("tokens were taken back: shown is the forward that committed each for good")
    return (
        f'<div class="dllm-trace"><style>{STYLE}</style>'
        f'<label><input type="range" min="0" max="{last}" value="{last}" oninput="{escape(MOVE)}">'
        f" <output>forward {last} of {last}</output></label>"
        f"{''.join(rows)}<small>{'; '.join(notes)}</small></div>"
    )


def _row(trace: Trace, row: int, last: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return the HTML of one answer up to its end."""
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
