"""Certainty-forcing distillation: masks and losses."""

from __future__ import annotations

import pytest
import torch

from dllm_sampler.training.distill import certainty_loss, split
from dllm_sampler.training.masked import Dice, Rows, collate


def dice(batch: Rows, seed: int) -> Dice:
    return Dice([f"{seed}/{row}" for row in range(len(batch.ids))])


def rows() -> Rows:
    """Answers of 8 (two whole blocks), 5, 3 (less than one) and 9."""
    return collate([([1] * 3, [2] * 8), ([1], [2] * 5), ([1] * 6, [2] * 3), ([1] * 2, [2] * 9)], 0)


def test_two_halves_of_one_block() -> None:
    """Over many draws: the halves make up the block, each block has its turn, nothing else is ever masked."""
    batch, starts = rows(), [set() for _ in range(4)]
    column = torch.arange(batch.ids.shape[1])
    for seed in range(60):
        one, other, future = split(batch, 4, 0.5, dice(batch, seed))
        active = one | other
        assert not (one & other).any()
        for row in range(4):
            inside = active[row].nonzero()[:, 0]
            first, end = int(batch.prompt[row]), int(batch.length[row])
            start, stop = int(inside[0]), int(inside[-1]) + 1
            assert (start - first) % 4 == 0 and start >= first
            assert len(inside) == stop - start == min(4, end - start), "a block, or what is left of it"
            assert torch.equal(future[row], (column >= stop) & (column < end))
            starts[row].add((start - first) // 4)
    assert starts == [{0, 1}, {0, 1}, {0}, {0, 1, 2}]


def test_a_row_is_masked_as_it_is_alone_in_number() -> None:
    """Rows are independent, which they are not in the published code: no two have the same mask."""
    batch = collate([([1] * 4, [2] * 64)] * 6, 0)
    one, _, _ = split(batch, 64, 0.25, dice(batch, 0))
    assert len({tuple(row) for row in one.tolist()}) == 6
    many = torch.cat([split(batch, 64, 0.25, dice(batch, seed))[0] for seed in range(40)])
    assert float(many.sum() / (40 * 6 * 64)) == pytest.approx(0.25, abs=0.01)


def test_losses_by_hand() -> None:
    chances = torch.tensor([[0.7, 0.2, 0.1, 0.0], [0.1, 0.8, 0.1, 0.0], [0.25, 0.25, 0.5, 0.0], [0.9, 0.1, 0.0, 0.0]])
    ids = torch.tensor([[0, 0, 2, 0]])
    masked = torch.tensor([[True, True, True, False]])
    logits = chances.clamp(min=1e-30).log()[None]
    cross, entropy, right = certainty_loss(logits, ids, masked, 0.5, mask_id=3)
    assert float(cross) == pytest.approx(-float(torch.tensor([0.7, 0.1, 0.5]).log().mean()))
    sharp = chances[[0, 2], :3].square()
    sharp = sharp / sharp.sum(1, keepdim=True)
    assert float(entropy) == pytest.approx(float(torch.special.entr(sharp).sum(1).mean()), rel=1e-5)
    assert float(right) == pytest.approx(2 / 3)
    nothing = certainty_loss(logits, ids, torch.zeros_like(masked), 0.5, mask_id=3)
    assert [float(value) for value in nothing] == [0, 0, 0]


def test_no_entropy_gradient_where_nothing_is_right() -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    wrong = (logits.argmax(-1) + 1) % 6
    certainty_loss(logits, wrong, torch.ones(2, 5, dtype=torch.bool), 0.5, mask_id=6)[1].sum().backward()
    assert logits.grad is not None and not logits.grad.any()
    right = logits.detach()[..., :6].argmax(-1)
    certainty_loss(logits, right, torch.ones(2, 5, dtype=torch.bool), 0.5, mask_id=6)[1].sum().backward()
    assert logits.grad.any() and logits.grad.isfinite().all()
