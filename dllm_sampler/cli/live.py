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
CYCLE = 24  # steps until a colour comes again


def colour(step: int) -> str:
    """The colour of what a step committed; neighbours differ a little, so a gradient reads as an order."""
    red, green, blue = colorsys.hsv_to_rgb((0.55 + step / CYCLE) % 1, 0.55, 1.0)
    return f"rgb({round(red * 255)},{round(green * 255)},{round(blue * 255)})"


def render(
    ids: list[int],
    masked: list[bool],
    steps: list[int],
    tokenizer: PreTrainedTokenizerBase | None,
    terminal: bool = False,
) -> Text:
    """One row of the canvas. A run of committed tokens is spelled as the tokenizer spells it in context.

    On a terminal, control characters are made visible.
    """
    line, run = Text(), []
    special = set(tokenizer.all_special_ids) if tokenizer else set()
    for token, noise, step in zip(ids, masked, steps, strict=True):
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
    return line


class Screen:
    """Shows the commits of one batch: live in a terminal, as a plain line per step elsewhere."""

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
        """Draw a step; returns the seconds spent on showing it, which are no part of sampling."""
        begun = time.perf_counter()
        lines = [render(*row, self.tokenizer, self.console.is_terminal) for row in commits.rows()]
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
    """The line below the canvas: step, NFE, tokens of the answers, tokens per forward, counted as in the last line.

    What stands behind an end token is no part of an answer.
    """
    width = commits.tokens.shape[1]
    column = torch.arange(width)
    ended = torch.where(is_end(commits.tokens, end_ids) & ~commits.masked, column, width - 1).amin(
        1, keepdim=True
    )  # [B, 1]
    free = commits.there & (column <= ended)
    free = free if commits.given is None else free & ~commits.given
    done, whole = int((~commits.masked & free).sum()), int(free.sum())
    return (
        f"step {commits.step} · NFE {_span(commits.nfe)} · {done}/{whole} tokens · "
        f"{done / max(1, int(commits.nfe.sum())):.2f} tokens per forward"
    )


def _span(nfe: Tensor) -> str:
    low, high = int(nfe.min()), int(nfe.max())
    return str(low) if low == high else f"{low}-{high}"


def _spell(ids: list[int], tokenizer: PreTrainedTokenizerBase | None) -> str:
    return str(tokenizer.decode(ids)) if tokenizer else " ".join(map(str, ids))
