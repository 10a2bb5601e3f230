"""DUS: a schedule that commits positions together only if they are far apart."""

from dataclasses import dataclass

from typing_extensions import override

from dllm_sampler.core.checks import check_count, check_number
from dllm_sampler.core.protocols import Carry, Scheduler
from dllm_sampler.core.spec import Traits
from dllm_sampler.core.values import Canvas, Edit, Query, Readout


@dataclass(frozen=True)
class Dilated(Scheduler):
    """Dilated unmasking: positions far apart are committed together, in about log2 of the block's length forwards.

        for level = 1, 2, 3, ... while masks remain in the block:
            token, confidence = model(canvas)
            distance = floor(length of the block / base ** level), at least 1
            comb = the masks at every distance-th position of the block
            commit comb where confidence >= skip, all of it if distance is 1

    Source: DUS (dilated unmasking scheduler), arXiv 2506.19037, as in ParallelBench, arXiv 2510.04767. A position below
    `skip` waits for the next level, so a step may commit nothing. Deviations: the published code looks at a position in
    one level only and leaves skipped ones masked for good. It also merges a last level that is smaller than the one
    before, which never happens for blocks of a power of two.

    Args:
        base: each level's distance is the one before over `base`, rounded down.
        skip: probability a due position must reach before the last level. 0 skips none.
    """

    base: int = 2
    skip: float = 0.3

    def __post_init__(self) -> None:
        check_count("scheduler.base", self.base, 2)
        check_number("scheduler.skip", self.skip)

    @property
    def traits(self) -> Traits:
        """Traits of a given order, which confidences may only delay."""
        return Traits(ranks_by_confidence=self.skip > 0, scheduled=True)

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        level = (canvas.age + 1).clamp(max=40).double()  # [B]
        length = (canvas.stop - canvas.start).double()
        distance = (length / self.base**level).floor().long().clamp(min=1)[:, None]  # [B, 1]
        due = (query.positions - canvas.start[:, None]) % distance == 0  # [B, Q]
        sure = (readout.confidence[:, 0] >= self.skip) | (distance == 1)
        return Edit(readout.token[:, 0], canvas.eligible(query.positions) & due & sure), carry
