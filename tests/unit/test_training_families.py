"""The losses of rewards and distillation for every family, against each row by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dllm_sampler import Sampler
from dllm_sampler.training.distill import certainty_loss, split
from dllm_sampler.training.masked import Dice, Rows, chunk, collate
from dllm_sampler.training.model import Trainable
from dllm_sampler.training.policy import Goal
from dllm_sampler.training.trajectory import Trajectories, check
from tests import tiny
from tests.refusals import refused
from tests.sampling import crossed, sampled

PROMPTS = [[5, 11, 3], [7, 1, 30, 22, 9, 14, 2], [16]]


def trained(name: str, folder: Path, blocks: int | None = None) -> Trainable:
    """A tiny model in float64; where its context is causal, in `blocks` shorter than an answer."""
    it = Trainable.load(tiny.write(name, folder), "float64").eval()
    if blocks is not None and it.denoiser.spec.attention == "causal_context":
        it.denoiser = replace(it.denoiser, block_length=blocks)  # pyright: ignore[reportArgumentType]
    return it


@pytest.mark.parametrize("name", sampled(tiny.EVERY, lambda name: [name == "sdar"]))
def test_what_was_sampled_is_what_is_scored(name: str, tmp_path: Path) -> None:
    """The log-probabilities of ragged rows, as they were recorded, with a gradient."""
    it = trained(name, tmp_path / name, blocks=4)
    sampler = Sampler(it.denoiser, scheduler="random_order", temperature=1.0, stop="none")
    trace = sampler.generate(PROMPTS, max_new_tokens=9, seed=1).trace
    view = Trajectories(trace, it.denoiser.spec, after_eos=True, blocks=4)
    found = view.log_probabilities(it.network)
    assert int(view.valid.sum()) == 27
    torch.testing.assert_close(found[view.valid], trace.logprob[view.valid].double(), atol=1e-10, rtol=1e-9)
    (one,) = view.chunks(10**6)
    one.score(it.network)[0].sum().backward()
    assert all(weight.grad is not None for weight in it.learned().values())


@pytest.mark.parametrize("length", [1, 5, 9, None])
def test_a_causal_context_in_blocks_of_any_length(length: int | None, tmp_path: Path) -> None:
    """Trajectories take the length of the blocks that were decoded; one of blocks that differ is refused."""
    it = trained("nemotron-labs-diffusion", tmp_path / "m")
    blocks = "full" if length is None else {"name": "fixed", "length": length}
    rule = {"name": "threshold", "threshold": 0.1}
    sampler = Sampler(it.denoiser, scheduler=rule, blocks=blocks, cache="block_causal", temperature=1.0, stop="none")
    check(sampler)
    trace = sampler.generate(PROMPTS, max_new_tokens=9, samples=3, seed=1).trace
    view = Trajectories(trace, it.denoiser.spec, after_eos=True, blocks=length or 9)
    found = view.log_probabilities(it.network, 100)
    torch.testing.assert_close(found[view.valid], trace.logprob[view.valid].double(), atol=1e-10, rtol=1e-9)
    with refused("trajectories-unsupported: blocks=ascending"):
        check(Sampler(it.denoiser, scheduler="ascending", blocks="ascending", temperature=1.0))
    with refused("option-missing: blocks="):
        Trajectories(trace, it.denoiser.spec)


def by_hand(it: Trainable, ids: Tensor, prompt: int) -> Tensor:
    """Logits `[L, V]` of one row without padding, row i for token i; the mask token is no answer."""
    spec = it.denoiser.spec
    if spec.attention == "causal_context":  # a forward for each block, whose first token the row before it predicts
        assert spec.block_length is not None
        logits = torch.zeros(len(ids), it.inner.config.vocab_size, dtype=torch.float64)  # pyright: ignore
        for first in range(prompt, len(ids), spec.block_length):
            keys, last = inside(len(ids), first, spec.block_length), first + spec.block_length
            found = it.network(ids[None], keys=keys)[0]
            logits = torch.cat([logits[:first], found[first - 1 : first], found[first + 1 : last], logits[last:]])
    else:
        logits = it.network(ids[None], keys=sees(it, len(ids)))[0]
    logits = logits.roll(1, 0) if spec.shift else logits
    return logits.masked_fill(torch.arange(logits.shape[-1]) == spec.mask_id, -torch.inf)


def inside(length: int, first: int, size: int) -> Tensor:
    """`[1, L, L]` what tokens see in a causal context, of which the block from `first` on sees itself whole."""
    column = torch.arange(length)
    block = (column >= first) & (column < first + size)
    return ((column[None] <= column[:, None]) | (block[None] & block[:, None]))[None]


def sees(it: Trainable, length: int) -> Tensor | None:
    """`[1, L, L]` of a block-causal model."""
    size = it.denoiser.spec.block_length
    if it.denoiser.spec.attention == "bidirectional" or size is None:
        return None
    block = torch.arange(length) // size
    return (block[None] <= block[:, None])[None]


def gradients(it: Trainable, loss: Tensor) -> dict[str, Tensor]:
    it.network.zero_grad()
    loss.backward()
    return {key: weight.grad.clone() for key, weight in it.network.named_parameters() if weight.grad is not None}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys() and any(gradient.any() for gradient in one.values())
    for key, gradient in one.items():
        torch.testing.assert_close(gradient, other[key], atol=1e-10, rtol=1e-8, msg=key)


@pytest.mark.parametrize(("name", "likelihood"), crossed(tiny.EVERY, ["trajectory", "masked"], together=0))
def test_the_gradient_of_rewards(name: str, likelihood: str, tmp_path: Path) -> None:
    """Clipped ratios and the divergence of a padded batch with equal states, against each state by itself."""
    it = trained(name, tmp_path / name, blocks=4)
    spec, (epsilon, beta) = it.denoiser.spec, (0.2, 0.1)
    assert spec.mask_id is not None
    sampler = Sampler(it.denoiser, scheduler={"name": "threshold", "threshold": 0.05}, temperature=1.0, stop="none")
    trace = sampler.generate(PROMPTS, max_new_tokens=9, samples=2, seed=1).trace
    single = likelihood == "masked"
    blank = torch.zeros_like(trace.ids, dtype=torch.bool)
    if single:
        blank[2:4, trace.origin - 3] = True  # a token of the second prompt is hidden too
    view = Trajectories(trace, spec, single=single, blank=blank if single else None, blocks=4)
    generator = torch.Generator().manual_seed(5)
    noise = [0.3 * torch.randn(trace.ids.shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    now = view.log_probabilities(it.network)
    advantage = torch.tensor([1.0, -1, 0.5, -0.5, 2, -2], dtype=torch.float64)
    goal = Goal(advantage, view.weight / 6, now + noise[0], now + noise[1])
    total = [goal.loss(chunk, chunk.score(it.network)[0], epsilon, beta)[0] for chunk in view.chunks(64)]
    found = gradients(it, torch.stack(total).sum())

    loss = torch.zeros((), dtype=torch.float64)
    for row in range(6):
        begin, steps = int(trace.begin[row]), trace.step_map[row]
        counted = list(range(trace.origin, trace.ids.shape[1]))
        ends = [at for at in counted if trace.ids[row, at] == spec.eos_id]
        counted = [at for at in counted if not ends or at <= ends[0]]
        groups = (
            [counted] if single else [[at for at in counted if steps[at] == s] for s in range(int(steps.max()) + 1)]
        )
        groups = [group for group in groups if group]
        for group in groups:
            hidden = (steps >= (0 if single else steps[group[0]])) & (torch.arange(len(steps)) >= trace.origin)
            ids = trace.ids[row].masked_fill(hidden | (blank[row] if single else hidden), spec.mask_id)[begin:]
            chances = by_hand(it, ids, trace.origin - begin).log_softmax(-1)
            for at in group:
                log = chances[at - begin, trace.ids[row, at]]
                ratio = (log - goal.old[row, at]).exp()  # pyright: ignore[reportOptionalSubscript]
                away = goal.reference[row, at] - log  # pyright: ignore[reportOptionalSubscript]
                gain = torch.minimum(ratio * advantage[row], ratio.clamp(0.8, 1.2) * advantage[row])
                loss = loss + (beta * (away.exp() - away - 1) - gain) / (6 * len(groups) * len(group))
    assert float(torch.stack(total).detach().sum()) == pytest.approx(float(loss.detach()), rel=1e-10)
    same(found, gradients(it, loss))


@pytest.mark.parametrize("name", sampled(tiny.EVERY, lambda name: [name == "sdar"]))
def test_the_loss_of_distillation(name: str, tmp_path: Path) -> None:
    """Loss and gradient against each row by itself: a clean context, the active block, and masks behind it."""
    it = trained(name, tmp_path / name)
    spec = it.denoiser.spec
    causal, size = spec.attention != "bidirectional", spec.block_length or 4
    times = 6 if size > 4 else 1
    answers = [[41, 5, 5, 6, 12, 3, 8, 2, 9] * times, [11, 13] * times]
    rows: Rows = collate([([7, 9, 30], answers[0]), ([3] * 6, answers[1])], spec.eos_id)
    *halves, future = split(rows, size, 0.5, Dice([4, 5]), aligned=spec.attention == "block_causal")
    for masked in halves:
        one = chunk(rows, masked | future, masked, spec)
        found = certainty_loss(one.logits(it.network), one.tokens, one.there, 0.5, one.mask_id)
        expected = []
        for row in range(2):
            prompt, end = int(rows.prompt[row]), int(rows.length[row])
            hidden = (masked | future)[row, :end]
            seen = rows.ids[row, :end].masked_fill(hidden, one.mask_id)
            keys, column, first = sees(it, end), torch.arange(end), 0
            if spec.attention == "causal_context":
                first = prompt + (int(masked[row].nonzero()[0]) - prompt) // size * size
                keys = inside(end, first, size)
            logits = it.network(seen[None], keys=keys if causal else None)
            logits = logits.roll(1, 1) if spec.shift else logits
            if spec.seeds:
                logits = torch.where((column == first)[:, None], logits.roll(1, 1), logits)
            right = certainty_loss(logits, rows.ids[row : row + 1, :end], masked[row : row + 1, :end], 0.5, one.mask_id)
            for some, other in zip(found, right, strict=True):
                torch.testing.assert_close(some[row], other[0], atol=1e-10, rtol=1e-9)
            expected.append(right[0][0] + 2 * right[1][0])
        if masked.any():
            learnt = gradients(it, (found[0] + 2 * found[1]).sum())
            same(learnt, gradients(it, torch.stack(expected).sum()))


def dice(batch: Rows, seed: int) -> Dice:
    return Dice([f"{seed}/{row}" for row in range(len(batch.ids))])


def answers_of_blocks() -> Rows:
    """Answers of 8 (two whole blocks), 5, 3 (less than one) and 9."""
    return collate([([1] * 3, [2] * 8), ([1], [2] * 5), ([1] * 6, [2] * 3), ([1] * 2, [2] * 9)], 0)


def test_two_halves_of_one_block() -> None:
    """Over many draws: the halves make up the block, each block has its turn, nothing else is ever masked."""
    batch, starts = answers_of_blocks(), [set() for _ in range(4)]
    column = torch.arange(batch.ids.shape[1])
    for seed in range(60):
        one, other, future = split(batch, 4, 0.5, dice(batch, seed))
        active, aligned = one | other, split(batch, 4, 0.5, dice(batch, seed), aligned=True)
        assert not (one & other).any()
        for row in range(4):
            inside = active[row].nonzero()[:, 0]
            first, end = int(batch.prompt[row]), int(batch.length[row])
            start, stop = int(inside[0]), int(inside[-1]) + 1
            assert (start - first) % 4 == 0 and start >= first
            assert len(inside) == stop - start == min(4, end - start), "a block, or what is left of it"
            assert torch.equal(future[row], (column >= stop) & (column < end))
            starts[row].add((start - first) // 4)
            begin = int((aligned[0] | aligned[1])[row].nonzero()[0])
            assert begin == first or begin % 4 == 0, "blocks of a block-causal model are its own"
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
