"""From drafted steps to the candidates of a query."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dllm_sampler.core.values import Candidates, Canvas, Query


class Branch(NamedTuple):
    """A candidate that has the commits of the first `steps` drafted steps, and those of step `extra` if it is not 0."""

    steps: int
    extra: int = 0

    @property
    def depth(self) -> int:
        """Number of the last drafted step whose commits the candidate has."""
        return max(self.steps, self.extra)


class Draft(NamedTuple):
    """The steps that the inner scheduler would take if predictions stayed the same."""

    root: Canvas  # before the first of them
    ids: Tensor  # [B, L+1] after the last one
    level: Tensor  # [B, L+1] drafted step, from 1, that commits each position. More than the last one's if none does
    depth: Tensor  # [B] number of drafted steps that a candidate may have

    def candidates(self, query: Query, branches: Sequence[Branch]) -> Query:
        """Return `query` with the root as candidate 0, then one candidate per branch, and the step of each."""
        root, ids, level = (row.gather(1, query.positions) for row in (self.root.ids, self.ids, self.level))
        found, steps, live = [root], [self.root.step], [torch.ones_like(self.root.done)]
        for branch in branches:
            drafted = self.depth >= branch.depth  # [B]
            committed = level <= branch.steps  # [B, Q]
            if branch.extra:
                committed = committed | (level == branch.extra)
            found.append(torch.where(committed & drafted[:, None], ids, root))
            steps.append(self.root.step + branch.steps + (branch.extra > 0))
            live.append(drafted)
        of = Candidates(torch.stack(live, 1), torch.stack(steps, 1))
        return replace(query, ids=torch.stack(found, 1), candidates=of)
