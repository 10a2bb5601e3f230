"""The canvas as it is denoised, in the terminal: committed tokens coloured by their step, noise as dim blocks."""

import colorsys
import time
from types import TracebackType
from typing import Self

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dllm_sampler.cli.terminal import visible
from dllm_sampler.core.ends import is_end
from dllm_sampler.result import Commits

NOISE = "░░"
CYCLE = 24  # steps after which colours repeat


def colour(step: int) -> str:
    """Return the colour of tokens that a step committed. Consecutive steps have similar colours."""
    red, green, blue = colorsys.hsv_to_rgb((0.55 + step / CYCLE) % 1, 0.55, 1.0)
    return f"rgb({round(red * 255)},{round(green * 255)},{round(blue * 255)})"


def render(
    ids: list[int],
    masked: list[bool],
    steps: list[int],
    tokenizer: PreTrainedTokenizerBase | None,
    terminal: bool = False,
    open_end: int | None = None,
) -> Text:
    """Return one row of the canvas as coloured text. Adjacent committed tokens are decoded together.

    Args:
        ids, masked, steps: for each column its token, true if it is noise, and the forward that committed it.
        tokenizer: decodes the tokens. Without one their ids are shown.
        terminal: make control characters visible.
        open_end: first column that is not open yet. Noise from there on is counted, not shown.
    """
    line, run, closed = Text(), [], 0
    special = set(tokenizer.all_special_ids) if tokenizer else set()
    for column, (token, noise, step) in enumerate(zip(ids, masked, steps, strict=True)):
        if noise and open_end is not None and column >= open_end:
            closed += 1
            continue
        if closed:
            run, closed = [], _count(line, closed)
        if noise or token in special:
            run = []
            line.append(" " if line and not line.plain.endswith(" ") else "")
            line.append(NOISE if noise else "·", "bright_black")
            continue
        before = _spell(run, tokenizer)
        run = [*run, token]
        piece = _spell(run, tokenizer)[len(before) :]
        if len(run) == 1 and line and not piece.startswith(" "):
            line.append(" ")
        line.append(visible(piece) if terminal else piece, colour(step))
    if closed:
        _count(line, closed)
    return line


def _count(line: Text, closed: int) -> int:
    """Append the number `closed` of columns that are not open yet, and return 0."""
    line.append(" " if line and not line.plain.endswith(" ") else "")
    line.append(f"... {closed} more", "bright_black")
    return 0


class Screen:
    """A display of the commits of one batch: live in a terminal, as a plain line per step and row elsewhere."""

    def __init__(
        self,
        console: Console,
        labels: list[str],
        tokenizer: PreTrainedTokenizerBase | None,
        delay: float,
        end_ids: tuple[int, ...],
    ):
        self.console, self.labels, self.tokenizer, self.delay, self.end_ids = console, labels, tokenizer, delay, end_ids
        self.live = Live(console=console, auto_refresh=False, vertical_overflow="ellipsis")

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.live.stop()

    def show(self, commits: Commits) -> float:
        """Draw a step and return the seconds that this took, which do not count as sampling."""
        begun = time.perf_counter()
        count, result = len(commits.nfe), commits.result
        ends = [None] * count if commits.open_end is None else commits.open_end.tolist()
        lengths = [None] * count  # a complete answer is shown up to its end
        if result is not None:
            ended = zip(result.lengths.tolist(), result.complete.tolist(), strict=True)
            lengths = [size if whole else None for size, whole in ended]
        lines = [
            render(ids[:size], masked[:size], steps[:size], self.tokenizer, self.console.is_terminal, end)
            for (ids, masked, steps), size, end in zip(commits.rows(), lengths, ends, strict=True)
        ]
        if self.console.is_terminal:
            several = len(lines) > 1
            shown = [
                Text(f"{label}: ", "bold") + line if several else line
                for label, line in zip(self.labels, lines, strict=True)
            ]
            self.live.update(Group(*shown, Text(figures(commits, self.end_ids), "bright_black")), refresh=True)
            time.sleep(max(0.0, self.delay - (time.perf_counter() - begun)))
        else:
            for label, line in zip(self.labels, lines, strict=True):
                self.console.print(
                    f"step {commits.step} {label}: {line.plain}", markup=False, highlight=False, soft_wrap=True
                )
        return time.perf_counter() - begun


def figures(commits: Commits, end_ids: tuple[int, ...]) -> str:
    """Return the line below the canvas: step, NFE, tokens, tokens per forward.

    All committed tokens count until the last step. Then only tokens up to the end-of-text token count, as in the
    summary of the run.
    """
    width = commits.tokens.shape[1]
    column = torch.arange(width)
    ended = torch.where(is_end(commits.tokens, end_ids) & ~commits.masked, column, width - 1).amin(
        1, keepdim=True
    )  # [B, 1]
    free = commits.there if commits.given is None else commits.there & ~commits.given
    answer = free & (column <= ended)
    done = ~commits.masked & (free if commits.result is None else answer)
    made, missing = int(done.sum()), int((commits.masked & answer).sum())
    return (
        f"step {commits.step} · NFE {_span(commits.nfe)} · {made}/{made + missing} tokens · "
        f"{made / max(1, int(commits.nfe.sum())):.2f} tokens per forward"
    )


def _span(nfe: Tensor) -> str:
    low, high = int(nfe.min()), int(nfe.max())
    return str(low) if low == high else f"{low}-{high}"


def _spell(ids: list[int], tokenizer: PreTrainedTokenizerBase | None) -> str:
    return str(tokenizer.decode(ids)) if tokenizer else " ".join(map(str, ids))
