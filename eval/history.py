"""What a scheduler that takes tokens back did: every commit, and those that did not stay."""

from __future__ import annotations

import torch
from torch import Tensor


class History:
    """What happened to each position, from one view of the canvas to the next."""

    def __init__(self) -> None:
        self.commits: list[int] = []
        self.revisions: list[list[tuple[int, int, int | None]]] = []  # forward, position, token or None: taken back
        self.before: tuple[Tensor, Tensor] | None = None

    def note(self, step: int, step_map: Tensor, tokens: Tensor) -> None:
        """Compare the step map and tokens `[B, N]` after `step` forwards with those before."""
        if self.before is None:
            self.before = torch.full_like(step_map, -1), tokens
            self.commits, self.revisions = [0] * len(tokens), [[] for _ in tokens]
        old, written = self.before
        changed = step_map != old
        wrote = (changed & (step_map >= 0)).sum(1).tolist()
        self.commits = [sum(pair) for pair in zip(self.commits, wrote, strict=True)]
        for row, place in (changed & (old >= 0)).nonzero().tolist():
            self.revisions[row].append((int(old[row, place]), place, int(written[row, place])))
            if step_map[row, place] < 0:
                self.revisions[row].append((step - 1, place, None))
        self.before = step_map, tokens
