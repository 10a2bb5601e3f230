"""The forwards of block-causal samplers that only store, around any scheduler. Used by `cache.store_pass=separate`."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils import _pytree

from dllm_sampler.canvas import Canvas, Edit, Query, Readout
from dllm_sampler.protocols import Carry, block_over
from dllm_sampler.schedulers.around import Around


@dataclass(frozen=True)
class StorePass(Around):
    """Spend a forward on the prompt, where it has a full block, and one on every block that is over.

    Source: SDAR's published loop, arXiv 2510.06303. Nothing is committed by them; the inner scheduler does not see them.

    Args:
        inner: the scheduler of all other forwards.
    """

    def init(self, canvas: Canvas) -> Carry:
        """`[B]` the block waits for its store pass, and the inner carry."""
        return torch.zeros_like(canvas.done), super().init(canvas)

    def ask(self, canvas: Canvas, width: int, carry: Carry) -> Query:
        """See `Scheduler.ask`."""
        canvas, idle = self._inside(canvas, carry[0])
        return super().ask(canvas, width, carry[1]).drop(canvas, ~idle[:, None].expand_as(canvas.masked))

    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        """See `Scheduler.tell`."""
        due, before = carry
        canvas, idle = self._inside(canvas, due)
        edit, after = self.inner.tell(canvas, query, readout, before)
        over = block_over(canvas.apply(query.positions, edit), edit)
        hold = over if edit.hold is None else over | edit.hold
        leave = due if edit.leave is None else due | (edit.leave & ~idle)
        edit = replace(
            edit,
            commit=edit.commit & ~idle[:, None],
            remask=None if edit.remask is None else edit.remask & ~idle[:, None],
            hold=torch.where(idle, ~due, hold),
            leave=leave,
            finish=None if edit.finish is None else edit.finish & ~idle,
            end=None if edit.end is None else torch.where(idle, canvas.end, edit.end),
        )
        return edit, (over & ~idle, _pytree.tree_map(lambda old, new: _keep(idle, old, new), before, after))

    def bound(self, tokens: int) -> int:
        """See `Scheduler.bound`: one more forward per block, and one for the prompt."""
        return super().bound(tokens) + tokens + 1

    @staticmethod
    def _inside(canvas: Canvas, due: Tensor) -> tuple[Canvas, Tensor]:
        """The canvas with the ages that the inner scheduler counts, and `[B]` the rows whose forward only stores."""
        assert canvas.grid is not None
        prefilled = canvas.origin - canvas.begin >= canvas.grid
        late = prefilled & (canvas.start == canvas.origin)
        return replace(canvas, age=(canvas.age - late.long()).clamp(min=0)), due | (prefilled & (canvas.step == 0))


def _keep(idle: Tensor, old: object, new: object) -> object:
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return new
    return torch.where(idle.view(-1, *[1] * (new.dim() - 1)), old, new)
