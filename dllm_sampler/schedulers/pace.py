"""How many branches a forward takes in passing, measured while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from dllm_sampler.core.values import Canvas

Table = dict[int, list[float]]  # branches to the seconds of their forwards


@dataclass
class Pace:
    """Doubles the branches as long as a forward with them takes hardly longer than one with a single branch.

    A GPU that waits for its memory computes some rows for nothing; where that ends depends on the model, the batch
    and the window, so that each shape has a table of its own. The shortest of a few forwards counts, because others
    may have waited for something else.

    Args:
        most: branches never exceed this.
        slack: how much longer is hardly longer.
        tries: forwards timed per number of branches.
    """

    most: int = 16
    slack: float = 1.25
    tries: int = 3
    tables: dict[tuple[int, int, int], Table] = field(default_factory=dict, repr=False)

    def next(self, canvas: Canvas, seconds: float) -> int:
        """Take down the last step's time and choose the branches of the next one."""
        sizes = canvas.sizes
        batch, columns = canvas.ids.shape
        # Prompts of nearly one length share a table: their forwards differ less than the slack.
        table = self.tables.setdefault((batch, columns.bit_length(), sizes.block), {1: []})
        now = canvas.branches
        # A forward that opens a block is wider, and one with few masks left takes fewer branches than it may.
        if now in table and not sizes.opens and sizes.queries >= now:
            table[now].append(seconds)
            del table[now][self.tries :]
        widest = max(table)
        if len(table[widest]) < self.tries:
            return widest
        free = min(table[widest]) <= self.slack * min(table[1])
        if free and 2 * widest <= self.most:
            table[2 * widest] = []
            return 2 * widest
        return widest if free else max(widest // 2, 1)
