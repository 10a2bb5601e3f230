"""How a trace shows itself in a notebook: the answers as they were denoised, one forward after the other."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from dllm_sampler.core.trace import Trace

ROWS = 4  # that are shown
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


def page(trace: Trace, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """HTML of the first rows: each token in the colour of its forward, and a slider from noise to answer.

    Args:
        tokenizer: None: token ids are shown.
    """
    last = max(1, int(trace.nfe.max()))
    rows = [_row(trace, row, last, tokenizer) for row in range(min(ROWS, len(trace.nfe)))]
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
    """One answer, without what lies behind its end."""
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
    """What each token reads: a line break as a sign, a special token as a dot."""
    if tokenizer is None:
        return [f"{token} " for token in ids]
    special = set(tokenizer.all_special_ids)
    return ["·" if token in special else str(tokenizer.decode([token])).replace("\n", "⏎") for token in ids]
