"""DMax: tokens of the block stay soft, and every forward predicts them again."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_number
from dllm_sampler.core.protocols import Carry, Context, Scheduler
from dllm_sampler.core.spec import SoftInputs, Traits, with_bound_fields
from dllm_sampler.core.values import Canvas, Edit, Mixture, Query, Readout

SURE = 0.9  # a block with no prediction below is over


class Standing(NamedTuple):
    """The tokens that the last forward of a block predicted, and their probabilities."""

    token: Tensor  # [B, L+1], -1 where none was predicted
    sure: Tensor  # [B, L+1] float32


@dataclass(frozen=True)
class SoftParallel(Scheduler):
    """DMax's soft parallel decoding: tokens of the block stay soft inputs, and each forward predicts all of them again.

        until the block is closed:
            token, confidence = model(canvas) at every position of the block
            commit masks from the left while confidence >= threshold, at least one
            replace each token that the block had by what is predicted now
            input of a token = confidence * E[token] + (1 - confidence) * E[mask]
            close the block if no mask is left,
                and all confidence >= 0.9 or nothing changed

    Source: DMax, arXiv 2604.08302. Its checkpoints are trained for such inputs. According to the paper other models
    collapse. E is the table of embeddings. A mixture gets the mean norm of its parts. After as many forwards as the
    block has columns it is closed in any case. The forward that opens a block reads tokens and masks alone, and a cache
    stores a finished block as tokens.

    Args:
        threshold: confidence below which a mask ends the run of commits. The published evaluation has 0.5. With 0 the
            first forward of a block commits all of it, and later ones revise.
    """

    threshold: float = 0.5
    grid: int = field(init=False, default=1, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_number("scheduler.threshold", self.threshold, "a probability")

    def bind(self, context: Context) -> Self:
        """Return a copy that stores the length of the grid's blocks, for `bound`. It is 1 without a grid."""
        return with_bound_fields(self, grid=context.blocks.grid or 1)

    @property
    @override
    def traits(self) -> Traits:
        return Traits(asks="window", revises=True, scheduled=True, scope="model", rare=(SoftInputs(),))

    @override
    def init(self, canvas: Canvas) -> Carry:
        none = torch.full_like(canvas.ids, -1)
        return Standing(none, torch.zeros_like(none, dtype=torch.float32))

    def ask(self, canvas: Canvas, carry: Carry) -> Query:
        """Return a query about the whole block. Tokens that the last forward predicted are soft inputs."""
        query = Query.window(canvas)
        at, token = query.positions, query.ids[:, 0]
        soft = canvas.inside(at) & ~canvas.masked.gather(1, at) & (carry.token.gather(1, at) == token)
        soft = soft & (canvas.age > 0)[:, None]
        return replace(query, mixture=Mixture(token[..., None], carry.sure.gather(1, at)[..., None], soft, True))

    @override
    def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Carry) -> tuple[Edit, Carry]:
        at, token, sure = query.positions, readout.token[:, 0], readout.confidence[:, 0]  # [B, Q]
        inside = canvas.inside(at)
        masks = inside & canvas.masked.gather(1, at)
        run = masks & ((masks & (sure < self.threshold)).cumsum(1) == 0)
        fill = run | (masks & (masks.cumsum(1) == 1))
        changed = fill | ((inside ^ masks) & (token != canvas.ids.gather(1, at)))
        unsure = (inside & (sure < SURE)).any(1) & changed.any(1)
        again = unsure & (canvas.age + 1 < canvas.stop - canvas.grid_start())
        # Nothing becomes noise, but stops should know that committed tokens are not final before the block is over.
        edit = Edit(token, changed, remask=torch.zeros_like(fill), keep_block=again)
        return edit, Standing(carry.token.scatter(1, at, token), carry.sure.scatter(1, at, sure.float()))

    def bound(self, tokens: int) -> int:
        """Return an upper bound on the steps. A block may take one for each column, prompt included."""
        return tokens * self.grid
