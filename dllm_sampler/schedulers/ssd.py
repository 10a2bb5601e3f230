"""SSD: drafts as a chain, or as a tree that survives a swap of two steps."""

from dataclasses import dataclass, field

from dllm_sampler.core.checks import check_count
from dllm_sampler.core.protocols import Scheduler
from dllm_sampler.schedulers.drafting.candidates import Branch
from dllm_sampler.schedulers.drafting.scheduler import Drafting
from dllm_sampler.schedulers.fixed import FixedSteps


@dataclass(frozen=True)
class SelfSpeculative(Drafting):
    """SSD around another scheduler: drafts are a chain, or a tree that survives a swap of two steps.

        while masks remain in the block:
            drafts = the canvas, and a chain or tree of inner's next length steps
                if the last prediction did not change
            predictions = model(drafts), in one forward
            while inner(canvas, its prediction) is one of drafts:
                canvas = that draft
            canvas = inner(canvas, its prediction)

    Source: self-speculative decoding (SSD), arXiv 2510.04147. The chain (`width=1`) is FreeDave's with `draft = length
    + 1`. The paper leaves open how its tree mixes orders. Here level j holds the first j - 1 drafted steps and one of
    the steps j, j + 1 ..., so that verification continues if the inner scheduler swaps two steps.

    Args:
        inner, eager: see `Drafting`.
        length: steps drafted. 0 is the inner scheduler itself.
        width: drafts per level. 1 is a chain.
        nodes: limit on candidates per forward, the canvas included. The chain comes first, then swaps near its root.
    """

    inner: Scheduler = field(default_factory=FixedSteps)
    length: int = 3
    width: int = 1
    nodes: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("scheduler.length", self.length, 0)
        check_count("scheduler.width", self.width)
        check_count("scheduler.nodes", self.nodes)

    def branches(self, most: int) -> list[Branch]:
        """Return prefixes of the drafted steps. Prefixes with a later step in place of their next one follow."""
        length = min(self.length, most - 1)
        chain = [Branch(steps) for steps in range(1, length + 1)]
        swaps = [
            Branch(steps, steps + 1 + skipped)
            for steps in range(length)
            for skipped in range(1, self.width)
            if steps + 1 + skipped < most
        ]
        return [*chain, *swaps][: self.nodes - 1]
