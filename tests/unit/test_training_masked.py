"""The loss of masked diffusion: against a few lines of plain torch, for every family, with its gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_sampler.training import masked
from dllm_sampler.training.masked import Dice, MaskedLoss, Masks, Pair, Rows, collate, draw, padded
from dllm_sampler.training.model import Trainable
from tests import tiny, toys
from tests.refusals import refused
from tests.sampling import sampled
from tests.unit.test_training_families import gradients, same, trained

ORDER = torch.tensor([2, 0, 1])
PAIRS: list[Pair] = [([7, 9, 30], [41, 5, 5, 6, 12, 3, 8]), ([3] * 6, [11, 13]), ([20], [44, 2, 9, 9, 60, 31, 7, 4, 1])]


def dice(rows: Rows, seed: int = 0) -> Dice:
    return Dice([f"{seed}/{row}" for row in range(len(rows.ids))])


def plain(it: Trainable, rows: Rows, masks: Masks) -> Tensor:
    """Row by row, without padding, and block by block: the clean ones before it, and the noisy one."""
    spec, total = it.denoiser.spec, torch.zeros((), dtype=torch.float64)
    assert spec.mask_id is not None
    for row in range(len(rows.ids)):
        end = int(rows.length[row])
        clean, hidden, weight = rows.ids[row, :end], masks.hidden[row, :end], masks.weight[row, :end]
        noisy = torch.where(hidden, spec.mask_id, clean)
        size = end if spec.attention == "bidirectional" else spec.block_length or 0
        own = spec.attention == "causal_context"  # blocks begin with the answer, and what is before them is causal
        for first in range(int(rows.prompt[row]) if own else 0, end, size):
            seen = torch.cat([clean[:first], noisy[first : first + size]])
            column = torch.arange(len(seen))
            keys = {
                "bidirectional": torch.ones(len(seen), len(seen), dtype=torch.bool),
                "block_causal": column[None] // size <= column[:, None] // size,
                "causal_context": (column[None] <= column[:, None]) | (column[:, None] >= first),
            }[spec.attention]
            logits = (
                it.inner(seen[None]) if spec.attention == "bidirectional" else it.inner(seen[None], keys=keys[None])
            )
            logits = logits.logits[0] if hasattr(logits, "logits") else logits[0]
            for at in range(first, len(seen)):
                if hidden[at]:
                    before = spec.shift or (spec.seeds and at == first)
                    total = total - weight[at] * logits[at - before].log_softmax(-1)[clean[at]]
    return total


def grid(rows: Rows, size: int | None) -> Tensor | None:
    """Blocks of `size` columns."""
    return None if size is None else torch.arange(rows.ids.shape[1]).expand_as(rows.ids) // size


@pytest.mark.parametrize("name", sampled(tiny.EVERY, lambda name: [name == "sdar"]))
def test_the_loss_of_every_family(name: str, tmp_path: Path) -> None:
    """Loss and gradient of a padded batch, against rows by themselves; in any order each row has its own draws."""
    it = trained(name, tmp_path / name)
    spec, times = it.denoiser.spec, 6 if (it.denoiser.spec.block_length or 0) > 4 else 1  # of several blocks
    rows = collate([(prompt, [*answer] * times) for prompt, answer in PAIRS], spec.eos_id)
    expected = torch.zeros((), dtype=torch.float64)
    for masks in draw(rows, masked.blocks(rows, spec), dice(rows), complementary=True, inverse=True):
        expected = expected + plain(it, rows, masks)
    right = gradients(it, expected)
    loss = MaskedLoss(spec, complementary=True, inverse=True)(
        it, rows.some(ORDER), Dice([f"0/{row}" for row in ORDER.tolist()])
    )
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-11)
    assert len(right) > 10
    same(gradients(it, loss), right)


def test_what_is_hidden_is_a_bound_of_the_likelihood() -> None:
    """Over many draws each token of an answer counts 1/R in expectation, and nothing else ever does."""
    rows = collate(PAIRS * 2000, 0)
    one = collate(PAIRS, 0)
    expected = one.answer / one.answer.sum(1, keepdim=True) / 3
    for complementary, blocks in ((False, None), (True, 4)):
        total = torch.zeros(rows.ids.shape, dtype=torch.float64)
        for masks in draw(rows, grid(rows, blocks), dice(rows), complementary=complementary, inverse=True):
            assert not (masks.hidden & ~rows.answer).any() and not masks.weight[~masks.hidden].any()
            total += masks.weight
        found = total.view(2000, 3, -1).sum(0)
        assert float((found - expected).abs().max() / expected.max()) < 0.2
        assert float(total.sum()) == pytest.approx(1, abs=0.04)


def test_ratios_are_a_rows_or_a_blocks() -> None:
    rows = collate([([1] * 3, [2] * 61)] * 400, 0)
    whole, blocks = (
        draw(rows, grid(rows, size), dice(rows), complementary=False, inverse=True)[0] for size in (None, 8)
    )
    for masks, alike in ((whole, 64), (blocks, 8)):
        weight = masks.weight.masked_fill(~masks.hidden, torch.nan)
        for row in weight[:50]:
            for block in row.split(alike):
                known = block[~block.isnan()]
                assert len(known.unique()) <= 1
    assert max(len(row[row > 0].unique()) for row in blocks.weight) > 4, "blocks have ratios of their own"
    share = whole.hidden[:, 3:].double().mean(1)
    assert float(share.mean()) == pytest.approx(0.5, abs=0.04) and float(share.std()) == pytest.approx(0.29, abs=0.04)


def test_complementary_masks_hide_every_token_once() -> None:
    rows = collate(PAIRS, 0)
    one, other = draw(rows, None, dice(rows, 1), complementary=True, inverse=False)
    assert torch.equal(one.hidden ^ other.hidden, rows.answer) and not (one.hidden & other.hidden).any()
    assert torch.allclose((one.weight + other.weight).sum(1), torch.full((3,), 1 / 6, dtype=torch.float64))


@pytest.mark.parametrize(
    ("padding", "lengths"),
    [("longest", [10, 10, 10]), ("none", [10, 8, 10]), ("block", [12, 8, 12]), (3, [10, 9, 10]), (20, [23, 24, 21])],
)
def test_end_tokens_behind_answers(padding: Any, lengths: list[int]) -> None:
    spec = replace(toys.denoiser().spec, block_length=4)
    found = padded(PAIRS, spec, padding, 24)
    assert found.length.tolist() == lengths
    for ids, length, (prompt, answer) in zip(found.ids.tolist(), lengths, PAIRS, strict=True):
        whole = [*prompt, *answer]
        assert ids[: len(whole)] == whole and set(ids[len(whole) : length]) <= {spec.eos_id}
    assert int(padded(PAIRS, spec, 500, 24).length.max()) == 24


def test_a_model_without_such_a_loss_is_refused() -> None:
    with refused("model-not-trainable"):
        masked.blocks(collate(PAIRS, 0), toys.denoiser("causal").spec)


def test_the_mask_token_is_a_word_of_the_loss(tmp_path: Path) -> None:
    """As published: its logit is in the sum, so that the model unlearns to predict it."""
    it = trained("llada-gqa", tmp_path / "m")
    rows = collate(PAIRS[:1], 0)
    chunk = masked.chunk(rows, rows.answer, rows.answer, it.denoiser.spec)
    logits = it.network(rows.ids.masked_fill(rows.answer, 255))[0, 3:]
    torch.testing.assert_close(chunk.losses(it.network)[0], F.cross_entropy(logits, rows.ids[0, 3:], reduction="none"))
    assert (-chunk.score(it.network)[0][0] < chunk.losses(it.network)[0]).all()
