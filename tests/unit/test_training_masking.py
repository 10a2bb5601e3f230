"""The loss of masked diffusion: against a few lines of plain torch, for every family, with its gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.training import masking
from dllm_sampler.training.masking import Masks, Pair, Rows, collate, cut, draw, padded
from dllm_sampler.training.trained import Trained
from tests import tiny, toys
from tests.refusals import refused
from tests.sampling import sampled

PAIRS: list[Pair] = [([7, 9, 30], [41, 5, 5, 6, 12, 3, 8]), ([3] * 6, [11, 13]), ([20], [44, 2, 9, 9, 60, 31, 7, 4, 1])]


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def trained(name: str, folder: Path) -> Trained:
    return Trained.load(str(tiny.write(name, folder)), torch.device("cpu"), "float64", None, 0)


def plain(it: Trained, rows: Rows, masks: Masks) -> Tensor:
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


def gradients(it: Trained, loss: Tensor) -> dict[str, Tensor]:
    it.network.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in it.network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", sampled(tiny.EVERY, lambda name: [name == "sdar"]))
def test_the_loss_of_every_family(name: str, tmp_path: Path) -> None:
    """Loss and gradient of a padded batch, cut into two forwards, against rows by themselves."""
    it = trained(name, tmp_path / name)
    spec, times = it.denoiser.spec, 6 if (it.denoiser.spec.block_length or 0) > 4 else 1  # of several blocks
    rows = collate([(prompt, answer * times) for prompt, answer in PAIRS], spec.eos_id)
    for masks in draw(rows, masking.blocks(rows, spec), seeded(3), complementary=True, inverse=True):
        losses = []
        for some in (torch.tensor([1, 0]), torch.tensor([2])):
            few = rows.some(some)
            hidden, weight = (one[some, : few.ids.shape[1]] for one in (masks.hidden, masks.weight))
            chunk = masking.chunk(few, hidden, hidden, spec)
            losses.append((chunk.losses(it.network) * weight.gather(1, chunk.columns) * chunk.there).sum())
        loss, expected = torch.stack(losses).sum(), plain(it, rows, masks)
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-11)
        found, right = gradients(it, loss), gradients(it, expected)
        assert found.keys() == right.keys() and len(right) > 10
        for key, gradient in right.items():
            torch.testing.assert_close(found[key], gradient, atol=1e-10, rtol=1e-8, msg=key)


def test_what_is_hidden_is_a_bound_of_the_likelihood() -> None:
    """Over many draws each token of an answer counts 1/R in expectation, and nothing else ever does."""
    rows = collate(PAIRS * 4000, 0)
    one = collate(PAIRS, 0)
    expected = one.answer / one.answer.sum(1, keepdim=True) / 3
    for complementary in (False, True):
        for blocks in (None, 4):
            total = torch.zeros(rows.ids.shape, dtype=torch.float64)
            for masks in draw(rows, grid(rows, blocks), seeded(0), complementary=complementary, inverse=True):
                assert not (masks.hidden & ~rows.answer).any() and not masks.weight[~masks.hidden].any()
                total += masks.weight
            found = total.view(4000, 3, -1).sum(0)
            assert float((found - expected).abs().max() / expected.max()) < 0.15
            assert float(total.sum()) == pytest.approx(1, abs=0.03)


def test_ratios_are_a_rows_or_a_blocks() -> None:
    rows = collate([([1] * 3, [2] * 61)] * 400, 0)
    whole, blocks = (
        draw(rows, grid(rows, size), seeded(0), complementary=False, inverse=True)[0] for size in (None, 8)
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
    first = int(whole.hidden[0].sum())
    ratio = 1 / (whole.weight[0].max() * 61 * 400)
    assert first / 61 == pytest.approx(float(ratio), abs=0.2)


def test_complementary_masks_hide_every_token_once() -> None:
    rows = collate(PAIRS, 0)
    one, other = draw(rows, None, seeded(1), complementary=True, inverse=False)
    assert torch.equal(one.hidden ^ other.hidden, rows.answer) and not (one.hidden & other.hidden).any()
    assert torch.allclose((one.weight + other.weight).sum(1), torch.full((3,), 1 / 6, dtype=torch.float64))


@pytest.mark.parametrize(
    ("padding", "lengths"),
    [("longest", [10, 10, 10]), ("none", [10, 8, 10]), ("block", [12, 8, 12]), (3, [10, 9, 10]), (20, [23, 24, 21])],
)
def test_end_tokens_behind_answers(padding: Any, lengths: list[int]) -> None:
    found = padded(PAIRS, 99, padding, 4, 24)
    assert [len(prompt) + len(answer) for prompt, answer in found] == lengths
    for (prompt, answer), (before, text) in zip(found, PAIRS, strict=True):
        assert prompt == before and answer[: len(text)] == text and set(answer[len(text) :]) <= {99}
    assert max(len(prompt) + len(answer) for prompt, answer in padded(PAIRS, 99, 500, 4, 24)) == 24


def test_answers_are_cut_at_random_lengths() -> None:
    rows = collate([([1] * 2, [2] * 6)] * 3000, 0)
    assert torch.equal(cut(rows, 0.0, seeded(0)).length, rows.length)
    length = cut(rows, 0.5, seeded(0)).length - 2
    assert sorted(set(length.tolist())) == [1, 2, 3, 4, 5, 6]
    shares = [float((length == one).double().mean()) for one in range(1, 6)]
    assert shares == pytest.approx([0.5 / 6] * 5, abs=0.02)


def test_a_model_without_such_a_loss_is_refused() -> None:
    spec: ModelSpec = toys.denoiser("causal").spec
    with refused("model-not-trainable"):
        masking.check(spec, "toy")
    masking.check(toys.denoiser("dream").spec, "toy")


def test_the_mask_token_is_a_word_of_the_loss(tmp_path: Path) -> None:
    """As published: its logit is in the sum, so that the model unlearns to predict it."""
    it = trained("llada-gqa", tmp_path / "m")
    rows = collate(PAIRS[:1], 0)
    chunk = masking.chunk(rows, rows.answer, rows.answer, it.denoiser.spec)
    logits = it.network(rows.ids.masked_fill(rows.answer, 255))[0, 3:]
    torch.testing.assert_close(chunk.losses(it.network)[0], F.cross_entropy(logits, rows.ids[0, 3:], reduction="none"))
    assert (-chunk.score(it.network)[0][0] < chunk.losses(it.network)[0]).all()
