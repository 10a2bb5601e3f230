"""Learn2PD, End-of-Text prediction, and every one of its neighbours as batch and alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dllm_sampler import Canvas, Edit, Query, Readout, Sampler
from dllm_sampler.blocks.fixed import FixedBlocks, FullBlock
from dllm_sampler.published.learn2pd import FilteredEdit, PublishedLearnedFilter
from dllm_sampler.schedulers.eoser import Eoser
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.learn2pd import LearnedFilter
from dllm_sampler.schedulers.threshold import Threshold
from dllm_sampler.stops.end_of_text import EndOfText
from dllm_sampler.stops.end_tokens import TruncateStop
from tests import toys
from tests.refusals import refused
from tests.sampling import each
from tests.scripted import BLOCK, PROMPTS, TOKENS, Script, constant, play, run, same
from tests.toys import EOS


def filter_file(folder: Path, *layers: tuple[Tensor, Tensor]) -> str:
    path = folder / "filter.safetensors"
    parts = {
        f"fc{i}.{name}": t.float()
        for i, layer in enumerate(layers, 1)
        for name, t in zip(("weight", "bias"), layer, strict=True)
    }
    save_file(parts, path)
    return str(path)


@pytest.fixture
def random_filter(tmp_path: Path) -> str:
    """Near the identity on confidences, somewhat mixed: accepts what is sure."""
    draw = torch.Generator().manual_seed(3)
    mix = torch.eye(BLOCK) + 0.1 * torch.randn(BLOCK, BLOCK, generator=draw)
    return filter_file(tmp_path, (mix, torch.zeros(BLOCK)), (20 * torch.eye(BLOCK), torch.full((BLOCK,), -10.0)))


# Learn2PD


def test_filter_by_hand(tmp_path: Path) -> None:
    """Logit i is 10 c_i - 9 except that position 0 also needs position 2 (committed, or missing) to be sure."""
    weight = torch.diag(torch.tensor([10.0, 10, 10]))
    weight[0, 2] = 10
    path = filter_file(tmp_path, (torch.eye(3), torch.zeros(3)), (weight, torch.tensor([-18.0, -9, -9])))
    # sigmoid > 0.5 where the logit is above 0: c_1 > 0.9, c_2 > 0.9, c_0 + c_2 > 1.8.
    model = constant([0.85, 0.95, 0.6])
    assert play(model, LearnedFilter(path, 0.5), 3, FixedBlocks(3)) == [[1], [0], [2]]
    # The surest one goes in any case; in a block of two the missing third position counts as 1.0.
    model = constant([0.5, 0.5, 0.5, 0.85, 0.3])
    assert play(model, LearnedFilter(path, 0.5), 5, FixedBlocks(3)) == [[0], [1], [2], [3], [4]]
    model = constant([0.5, 0.5, 0.5, 0.85, 0.97])
    assert play(model, LearnedFilter(path, 0.5), 5, FixedBlocks(3))[3:] == [[3, 4]]


@pytest.mark.slow
def test_filter_accepting_nothing_is_one_per_step(random_filter: str) -> None:
    assert same(run(LearnedFilter(random_filter, 1.0)), run(FixedSteps()))


def test_filter_accepting_all_takes_one_step_per_block(tmp_path: Path) -> None:
    zero = torch.zeros(BLOCK, BLOCK)
    path = filter_file(tmp_path, (zero, torch.zeros(BLOCK)), (zero.clone(), torch.full((BLOCK,), 50.0)))
    assert run(LearnedFilter(path)).nfe.tolist() == [3] * len(PROMPTS)


def test_filter_shares_steps(tmp_path: Path) -> None:
    zero = torch.zeros(4, 4)
    path = filter_file(tmp_path, (zero, torch.full((4,), -50.0)))
    model = constant([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])
    assert play(model, LearnedFilter(path, steps=6), 8, FixedBlocks(4)) == [[0, 1], [2], [3], [4, 5], [6], [7]]


def test_filter_fires_and_sees_confidences_only(random_filter: str) -> None:
    rule = LearnedFilter(random_filter, 0.6)
    result = run(rule)
    assert (result.nfe < TOKENS).all()
    assert (result.nfe > 3).all()
    confidence = [0.9, 0.4, 0.75, 0.3, 0.8, 0.6] * 2
    orders = [play(constant(confidence, tokens), rule, 12, FixedBlocks(BLOCK)) for tokens in ([1] * 12, [4, 2, 5] * 4)]
    assert orders[0] == orders[1]


def test_filter_inside_another_scheduler(random_filter: str) -> None:
    """Whatever stands around it asks for the whole block, and takes its length over."""
    rule = LearnedFilter(random_filter, 0.6)
    around = Eoser(rule, low=1.0)
    assert same(run(around), run(rule))
    with refused("plugins-incompatible: scheduler=eoser"):
        run(around, blocks=FixedBlocks(4))


def test_filter_says_what_was_not_its_choice(random_filter: str) -> None:
    """The published scheduler's edit names the commits that the filter accepted, and commits the same."""
    seen: list[FilteredEdit] = []

    class Spy(PublishedLearnedFilter):
        def tell(self, canvas: Canvas, query: Query, readout: Readout, carry: Any) -> tuple[Edit, Any]:
            edit, carry = super().tell(canvas, query, readout, carry)
            assert isinstance(edit, FilteredEdit)
            seen.append(edit)
            return edit, carry

    assert same(run(Spy(random_filter, 0.6)), run(LearnedFilter(random_filter, 0.6)))
    told = [(edit.commit, edit.accepted) for edit in seen if edit.accepted is not None]
    assert any((accepted & commit).any() for commit, accepted in told)
    assert any((commit & ~accepted).any() for commit, accepted in told)
    assert all(not (accepted & ~commit).any() for commit, accepted in told)


def test_filter_refusals(tmp_path: Path, random_filter: str) -> None:
    for blocks in (FixedBlocks(5), FullBlock(), {"name": "fixed", "length": 32}):
        with refused("plugins-incompatible: blocks.length=6"):
            Sampler(toys.denoiser(), scheduler=LearnedFilter(random_filter), blocks=blocks)
    sampler = Sampler(toys.denoiser(), scheduler=LearnedFilter(random_filter), blocks=FixedBlocks(6))
    with refused("plugins-incompatible: scheduler=learn2pd"):
        sampler.generate([[1]], max_new_tokens=12, block_length=4)
    with refused("option-missing: scheduler.filter"):
        Sampler(toys.denoiser(), scheduler="learn2pd")
    text = tmp_path / "text"
    text.write_text("no tensors")
    for path in (text, tmp_path / "nowhere", tmp_path):
        with refused("filter-invalid"):
            Sampler(toys.denoiser(), scheduler=LearnedFilter(str(path)))
    with refused("filter-invalid"):
        Sampler(toys.denoiser(), scheduler=LearnedFilter(filter_file(tmp_path, (torch.zeros(3, 4), torch.zeros(3)))))
    layers = ((torch.zeros(3, 4), torch.zeros(3)), (torch.zeros(4, 4), torch.zeros(4)))
    with refused("filter-invalid"):
        Sampler(toys.denoiser(), scheduler=LearnedFilter(filter_file(tmp_path, *layers)))
    save_file({"weight": torch.zeros(3, 3)}, tmp_path / "other.safetensors")
    save_file({"fc1.weight": torch.tensor(1.0), "fc1.bias": torch.zeros(1)}, tmp_path / "scalar.safetensors")
    with refused("filter-invalid: shapes"):
        Sampler(toys.denoiser(), scheduler=LearnedFilter(str(tmp_path / "scalar.safetensors")))
    with refused("filter-invalid: fc1.weight"):
        Sampler(toys.denoiser(), scheduler=LearnedFilter(str(tmp_path / "other.safetensors")))


# End-of-Text prediction


def ending() -> Script:
    """Eight positions; end tokens are likely at 3 (0.5) and 5 (0.8), everything else is surer from left to right."""
    return constant([0.95, 0.9, 0.45, 0.5, 0.4, 0.8, 0.3, 0.2], [1, 2, 3, 6, 4, 6, 5, 1])


@each(
    ("stop", "left"),
    [
        (EndOfText(), [7, 6, 3, 1, 0]),  # commits 0, 1, 5 (cut at 6), 3 (cut at 4), 2
        (EndOfText("predicted", 0.0), [5, 4, 3, 1, 0]),  # cut at 6 at once
        (EndOfText("predicted", 0.7), [5, 4, 3, 1, 0]),
        (EndOfText("predicted", 0.9), [7, 6, 3, 1, 0]),
    ],
)
def test_end_of_text_by_hand(stop: EndOfText, left: list[int]) -> None:
    sampler = Sampler(ending(), scheduler=Threshold(2.0), blocks=FullBlock(), stop=stop)
    assert [int(commits.masked.sum()) for commits in sampler.stream([[0]], max_new_tokens=8)] == left
    trace = sampler.generate([[0]], max_new_tokens=8).trace
    assert int(trace.end[0]) - 1 == 4
    assert trace.ids[0, 1:5].tolist() == [1, 2, 3, 6]


def test_resolved_is_truncate() -> None:
    """Tokens up to the end token stay as they are, and nothing is left behind it."""
    scheduler = Threshold(0.6)
    cut, truncated = run(scheduler, stop=EndOfText()), run(scheduler, stop=TruncateStop())
    assert same(cut, truncated)
    assert (cut.trace.end < cut.trace.ids.shape[1]).any()
    sampler = Sampler(toys.denoiser(), scheduler=scheduler, blocks=FixedBlocks(BLOCK), stop=EndOfText())
    for row, prompt in enumerate(PROMPTS):
        for commits in sampler.stream([prompt], max_new_tokens=TOKENS):
            ends = (commits.tokens[0] == EOS) & ~commits.masked[0]
            known = ~commits.masked[0][: int(ends.int().argmax()) + 1] if ends.any() else ~commits.masked[0]
            final = cut.trace.ids[row, cut.trace.origin :][: len(known)]
            assert torch.equal(commits.tokens[0][: len(known)][known], final[known])


def test_predicted_end_of_text_fires_on_the_whole_canvas() -> None:
    """It cuts in a block that is not decoded yet."""
    sampler = Sampler(ending(), scheduler=Threshold(2.0), blocks=FixedBlocks(2), stop=EndOfText("predicted", 0.7))
    first = next(sampler.stream([[0]], max_new_tokens=8))
    result = sampler.generate([[0]], max_new_tokens=8)
    assert first.masked[0].tolist() == [False, True, True, True, True, True, False, False]
    assert int(result.nfe[0]) == 4
