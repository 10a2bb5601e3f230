"""The number of candidates that a forward computes in hardly more time than one, measured while it runs."""

from dataclasses import dataclass, field

from dllm_sampler.core.packing import ForwardRequest

Table = dict[int, list[float]]  # number of candidates to the seconds of forwards with them


@dataclass
class Pace:
    """A number of candidates that doubles as long as forwards take hardly longer than with a single candidate.

    A GPU that waits for its memory computes some rows at no cost. Where that ends depends on the model, the batch and
    the window, so each shape has a table of its own. The shortest of a few forwards counts, because the others may
    have waited for something else.

    Args:
        most: upper bound on the candidates.
        slack: a forward may take this many times as long as one with a single candidate.
        tries: forwards timed per number of candidates.
    """

    most: int = 16
    slack: float = 1.25
    tries: int = 3
    tables: dict[tuple[int, int, int], Table] = field(default_factory=dict, repr=False)

    def next(self, made: ForwardRequest, seconds: float) -> int:
        """Record the duration of the last step, and return the number of candidates for the next forward."""
        sizes = made.sizes
        batch, columns = made.computed.shape
        # Prompts of nearly one length share a table: their forwards differ less than the slack.
        table = self.tables.setdefault((batch, columns.bit_length(), sizes.block), {1: []})
        now = made.most_candidates
        # A forward that opens a block is wider, and one with few masks left has fewer candidates than it may.
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
