"""Rewards and distillation on models and data of a user's own: losses of every family, and whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_sampler import Sampler, UserError, config
from dllm_sampler.training.distill import DistillTrainer, certainty_loss, split
from dllm_sampler.training.masking import Rows, chunk, collate
from dllm_sampler.training.rl import PolicyTrainer
from dllm_sampler.training.trained import Trained
from dllm_sampler.training.trajectory import trajectories
from tests import tiny
from tests.sampling import sampled
from tests.unit.test_training_sft import FACTS, lines

PROMPTS = [[5, 11, 3], [7, 1, 30, 22, 9, 14, 2], [16]]


def trained(name: str, folder: Path) -> Trained:
    return Trained.load(str(tiny.write(name, folder)), torch.device("cpu"), "float64", None, 0)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_what_was_sampled_is_what_is_scored(name: str, tmp_path: Path) -> None:
    """The log-probabilities of ragged rows, as they were recorded, with a gradient."""
    it = trained(name, tmp_path / name)
    sampler = Sampler(it.denoiser, scheduler="random_order", temperature=1.0, stop="none")
    trace = sampler.generate(PROMPTS, max_new_tokens=9, seed=1).trace
    view = trajectories(trace, it.denoiser.spec, after_eos=True)
    found = view.log_probabilities(it.network)
    assert int(view.valid.sum()) == 27
    torch.testing.assert_close(found[view.valid], trace.logprob[view.valid].double(), atol=1e-10, rtol=1e-9)
    (one,) = view.chunks(10**6)
    one.score(it.network)[0].sum().backward()
    assert all(weight.grad is not None for weight in it.learning())


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_the_loss_of_distillation(name: str, tmp_path: Path) -> None:
    """Against each row by itself: a clean context, the active block, and masks behind it."""
    it = trained(name, tmp_path / name)
    spec = it.denoiser.spec
    causal, size = spec.attention == "block_causal", spec.block_length or 4
    rows: Rows = collate([([7, 9, 30], [41, 5, 5, 6, 12, 3, 8, 2, 9]), ([3] * 6, [11, 13])], spec.eos_id)
    pair = split(rows, size, 0.5, torch.Generator().manual_seed(4), aligned=causal)
    for masked in (pair.one, pair.other):
        one = chunk(rows, masked | pair.future, masked, spec)
        found = certainty_loss(one.logits(it.network), one.tokens, one.there, 0.5, one.mask_id)
        for row in range(2):
            end = int(rows.length[row])
            hidden = (masked | pair.future)[row, :end]
            seen = rows.ids[row, :end].masked_fill(hidden, one.mask_id)[None]
            block = torch.arange(end) // size
            keys = (block[None] <= block[:, None])[None] if causal else None
            logits = it.network(seen, keys=keys)
            logits = logits.roll(1, 1) if spec.shift else logits
            right = certainty_loss(logits, rows.ids[row : row + 1, :end], masked[row : row + 1, :end], 0.5, one.mask_id)
            for some, other in zip(found, right, strict=True):
                torch.testing.assert_close(some[row], other[0], atol=1e-10, rtol=1e-9)


def test_active_blocks_of_block_causal_models_are_their_own() -> None:
    rows = collate([([1] * 6, [2] * 9)], 0)
    starts = set()
    for seed in range(40):
        pair = split(rows, 4, 0.5, torch.Generator().manual_seed(seed), aligned=True)
        inside = (pair.one | pair.other)[0].nonzero()[:, 0].tolist()
        starts.add((inside[0], inside[-1] + 1))
    assert starts == {(6, 8), (8, 12), (12, 15)}


def settings(task: str, model: Path, output: Path, **changes: Any) -> dict[str, Any]:
    given = dict(config.entry("train", task).settings)
    given.pop("_target_")
    fixed = {"model": str(model), "output": str(output), "device": "cpu", "data": {"path": str(FACTS)}, "steps": 2}
    return (
        given | fixed | {"new_tokens": 8, "held_out": 2, "evaluation": {}, "warmup": 0, "learning_rate": 1e-3} | changes
    )


def test_rewards_on_a_users_data(tmp_path: Path) -> None:
    """The reward gets the columns of the file; prompts may be chats."""
    model = tiny.write("sdar", tmp_path / "m")
    changes = {"rewards": {f"{__name__}:level": 1.0, "partly": 1.0}, "prompts": 2, "group": 2}
    given = settings("cjgrpo", model, tmp_path / "run") | changes
    given |= {"rollout": {"temperature": 1.0}, "data": {"path": str(FACTS), "chat": True, "metric": "contains"}}
    PolicyTrainer(**given).run()
    log = lines(tmp_path / "run")
    assert [line["step"] for line in log] == [0, 1, 2] and log[1]["unscored"] == 0
    assert 0 < log[1][f"reward/{__name__}:level"] < 1
    answer = Sampler.from_pretrained(str(tmp_path / "run"), device="cpu").generate("Hi", max_new_tokens=8)
    assert answer.texts is not None


def level(prompts: list[Any], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Whatever comes to mind that needs all of them; different for different answers to a prompt."""
    assert {"prompt", "prompts"}.isdisjoint(columns) and len(prompts) == len(answer) == len(columns["completion_ids"])
    assert prompts[0][0]["role"] == "user" and answer[0].isalpha()
    return [0.1 + 0.8 * (sum(map(ord, text)) % 97) / 97 for text in completions]


@pytest.mark.parametrize("name", sampled(["dream", "llada2-moe", "bert"]))
def test_distillation_on_a_users_data(name: str, tmp_path: Path) -> None:
    model = tiny.write(name, tmp_path / "m")
    changes: dict[str, Any] = {"answers": 100, "keep": False, "batch": 2, "teacher": {}}
    if name == "llada2-moe":
        with pytest.raises(UserError, match=r"block-causal: it takes train\.masking=block and train\.block_length=32"):
            DistillTrainer(**settings("distill", model, tmp_path / "run", **changes)).run()
    DistillTrainer(**settings("distill", model, tmp_path / "run", **changes, block_length=32)).run()
    assert lines(tmp_path / "run")[2]["loss"] > 0
