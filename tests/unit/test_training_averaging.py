"""The moving average of weights: by hand, measured and saved in their place, and kept by a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dllm_sampler import Sampler
from dllm_sampler.training.averaging import Average
from tests.refusals import refused
from tests.unit.test_training_rl import lines, trainer


def test_by_hand() -> None:
    weight = nn.Parameter(torch.tensor([8.0, 0.0]))
    average = Average([weight], 0.75)
    for value in (0.0, 16.0):
        weight.data = torch.tensor([value, 4.0])
        average.update()
    with average.applied():
        assert weight.tolist() == [8.5, 1.75], "8, 6, 8.5 and 0, 1, 1.75"
    assert weight.tolist() == [16, 4] and average.weights[0].tolist() == [8.5, 1.75]
    assert not any(each.requires_grad for each in average.parameters())


@pytest.mark.slow
def test_the_average_is_measured_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The average over three steps is what is measured and saved; each step goes on from the weights themselves."""
    changes: dict[str, Any] = {"steps": 3, "updates": 1, "learning_rate": 1e-3, "warmup": 0}
    run = trainer("cjgrpo", tmp_path / "plain", average=0.0, **changes)
    weights: list[list[torch.Tensor]] = []
    update = run.update

    def noted(*given: Any) -> dict[str, float]:
        if not weights:
            weights.append([weight.detach().clone() for weight in run.trained.learning()])
        found = update(*given)
        weights.append([weight.detach().clone() for weight in run.trained.learning()])
        return found

    run.update = noted  # pyright: ignore[reportAttributeAccessIssue]
    run.run()
    first, *later = weights
    for each in later:
        first = [0.6 * mean + 0.4 * weight for mean, weight in zip(first, each, strict=True)]
    other = trainer("cjgrpo", tmp_path / "run", average=0.6, **changes)
    measure, seen = other.measure, list[list[torch.Tensor]]()

    def looked() -> dict[str, float]:
        seen.append([weight.detach().clone() for weight in other.trained.learning()])
        return measure()

    other.measure = looked  # pyright: ignore[reportAttributeAccessIssue]
    other.run()
    assert len(seen) == 2 and len(first) > 10
    for mean, found, moved in zip(first, seen[1], weights[-1], strict=True):
        torch.testing.assert_close(found, mean, atol=1e-6, rtol=1e-5)
        assert not torch.equal(found, moved)
    plain, average = lines(tmp_path / "plain"), lines(tmp_path / "run")
    assert [line["loss"] for line in plain[1:]] == [line["loss"] for line in average[1:]], "steps are not averaged"
    saved: Any = Sampler.from_pretrained(str(tmp_path / "run"), device="cpu", dtype="float32").denoiser
    for found, mean in zip(saved.transformer.parameters(), first, strict=True):
        torch.testing.assert_close(found.detach(), mean, atol=1e-6, rtol=1e-3)  # float16 in the file


def test_refusals(tmp_path: Path) -> None:
    for value in (-0.1, 1.0):
        with refused("option-range: train.average"):
            trainer("cjgrpo", tmp_path, average=value)
