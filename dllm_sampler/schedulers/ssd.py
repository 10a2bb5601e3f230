"""SSD: drafts as a chain, or as a tree that survives a swap of two steps."""

from dataclasses import dataclass, field

from dllm_sampler.core.protocols import Scheduler
from dllm_sampler.schedulers.checks import check_count
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.verifier import Branch, Verifier


@dataclass(frozen=True)
class SelfSpeculative(Verifier):
    """Draft up to `length` steps ahead, each level with its `width` likeliest steps: equal tokens, fewer forwards.

    Source: self-speculative decoding (SSD), arXiv 2510.04147. The chain (`width=1`) is FreeDave's with
    `draft = length + 1`. The paper leaves open how its tree mixes orders; here level j holds the first j - 1 guessed
    steps and one of the steps j, j + 1 ..., so that a walk goes on where the model takes the next step but one first.

    Args:
        inner, eager: see `Verifier`.
        length: steps drafted; 0 is the inner scheduler itself.
        width: guesses per level; 1: a chain.
        nodes: candidates per forward at most, the canvas included; the chain comes first, then swaps near its root.
    """

    inner: Scheduler = field(default_factory=FixedSteps)
    length: int = 3
    width: int = 1
    nodes: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("length", self.length, 0)
        check_count("width", self.width)
        check_count("nodes", self.nodes)

    def branches(self, most: int) -> list[Branch]:
        """Prefixes of the guessed steps, then prefixes with one of the steps after the next."""
        length = min(self.length, most - 1)
        chain = [(first, 0) for first in range(1, length + 1)]
        swaps = [
            (first, first + 1 + skip)
            for first in range(length)
            for skip in range(1, self.width)
            if first + 1 + skip < most
        ]
        return [*chain, *swaps][: self.nodes - 1]
