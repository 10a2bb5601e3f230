"""The alignment of a drafter: both losses, a run that is cut and goes on, mistakes in one sentence."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dllm_sampler.models.transformer import Transformer, TransformerConfig
from dllm_sampler.training import cli, deer
from dllm_sampler.training.deer_losses import Rows, distill_mask, masked_loss, refine_mask
from dllm_sampler.training.export import export
from dllm_sampler.training.tokenizer import build_tokenizer
from tests import toys

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random drafter in mini's format."""
    folder, tokenizer = tmp_path_factory.mktemp("start"), build_tokenizer(96)
    model = Transformer(TransformerConfig(vocab_size=len(tokenizer), max_positions=96, **SHAPE))
    model.init_weights(std=0.2, embedding_std=1.0, generator=torch.Generator().manual_seed(0))
    export(model, tokenizer, folder)
    return folder


def words(output: Path, start: Path, *more: str) -> list[str]:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 96}
    small = [f"train.shape.{key}={value}" for key, value in {**shape, **heads}.items()]
    counts = {"target_steps": 12, "answers": 6, "new_tokens": 12, "batch": 4, "distill_steps": 8, "refine_steps": 6}
    few = [f"train.{key}={value}" for key, value in {**counts, "held_out": 2, "checkpoint_every": 5}.items()]
    return ["train=deer", f"train.output={output}", f"train.model={start}", "train.device=cpu", *small, *few, *more]


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C in the middle of a step of stage I or II."""
    seen: list[int] = []

    def loss(*arguments: Any) -> Tensor:
        if seen.append(0) or len(seen) == step:
            signal.raise_signal(signal.SIGINT)
        return masked_loss(*arguments)

    monkeypatch.setattr(deer, "masked_loss", loss)


def test_a_run_that_was_cut_ends_where_an_uninterrupted_one_does(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words(tmp_path / "whole", start)) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'whole' / 'drafter'}\n"
    for step in (7, 3):  # in stage I; then it goes on into stage II
        with monkeypatch.context() as patch:
            interrupt_at(step, patch)
            assert cli.main(words(tmp_path / "parts", start)) == 130
    assert (tmp_path / "parts/drafter/checkpoint.safetensors").exists()
    assert cli.main(words(tmp_path / "parts", start)) == 0
    for name in ("target", "distilled", "drafter"):
        whole, parts = (load_file(tmp_path / run / name / "model.safetensors") for run in ("whole", "parts"))
        assert all(torch.equal(whole[key], parts[key]) for key in whole | parts)
        assert not (tmp_path / "parts" / name / "checkpoint.safetensors").exists()
    reports = [json.loads((tmp_path / run / "report.json").read_text())["decoding"] for run in ("whole", "parts")]
    for temperature, arms in reports[0].items():
        assert list(arms) == ["plain", "before", "distilled", "refined"]
        assert arms["plain"]["tokens_per_round"] == 1
        for name, figures in arms.items():
            timed = {"cpu_seconds", "speed_up"}
            other = reports[1][temperature][name]
            assert {k: v for k, v in figures.items() if k not in timed} == {
                k: v for k, v in other.items() if k not in timed
            }
    assert all(figures["same_answer"] == 1 for figures in reports[0]["temperature 0"].values())
    assert cli.main(words(tmp_path / "whole", start)) == 2
    assert "already holds a finished run" in capsys.readouterr().err


def test_mistakes(start: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/settings.json").write_text(json.dumps({"seed": 1}))
    for word, sentence in (
        ("train.distill_steps=0", "train.distill_steps must be at least 1, not 0"),
        ("train.least_t=0", "train.least_t must be above 0"),
        ("train.alpha=-1", "train.alpha must be a number above 0"),
        ("+train.tasks.sing=1", "unknown task 'sing'"),
        ("train.separator=SEP", "unknown train.separator 'SEP', did you mean '[SEP]'"),
        (f"train.model={checkpoint}", "does not have mini's tokenizer"),
        ("train.seed=2", "unfinished run with another train.seed (1, not 2)"),
    ):
        output = tmp_path / ("run" if "seed" in word else "new")
        assert cli.main([*words(output, start), word]) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1


ANSWER = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]]).bool()


def test_stage_two_masks_the_last_tokens_and_weighs_the_first_of_them_most() -> None:
    seen = set()
    for seed in range(40):
        masked, weight = refine_mask(ANSWER, torch.Generator().manual_seed(seed), 3, 2.0)
        for row, last in zip(masked.tolist(), (3, 5), strict=True):
            count = sum(row)
            assert row == [last - count < place <= last for place in range(6)]
            seen.add(count)
        assert weight[0, 1:4].tolist() == [4, 2, 1]
        assert weight[1, 2:].tolist() == [8, 4, 2, 1]
    assert seen == {1, 2, 3}


def test_stage_one_weighs_by_the_masked_share() -> None:
    answer = torch.ones(400, 50, dtype=torch.bool)
    answer[:, :10] = False
    masked, weight = distill_mask(answer, torch.Generator().manual_seed(0), 0.05)
    t = 1 / weight[:, 0]
    assert (t >= 0.05).all()
    assert (t <= 1).all()
    assert abs(float(t.mean()) - 0.525) < 0.01
    assert not masked[:, :10].any()
    share = masked[:, 10:].double().mean(1)
    assert float((share - t).abs().mean()) < 0.08
    assert abs(float((share - t).mean())) < 0.01


def test_stage_two_unweighted_over_the_whole_answer_is_stage_one() -> None:
    network = toys.transformer()
    ids = torch.randint(0, toys.MASK, (2, 6), generator=torch.Generator().manual_seed(1))
    rows = Rows(ids, torch.ones_like(ids).bool(), ANSWER)
    one = distill_mask(ANSWER, torch.Generator().manual_seed(0), 1.0)  # t = 1
    two = refine_mask(ANSWER, torch.Generator().manual_seed(0), 10**9, 1.0)
    assert torch.equal(one[0], two[0])
    losses = [masked_loss(network, rows, *each, toys.MASK).item() for each in (one, two)]
    assert losses[0] == losses[1] > 0
    # by hand: the mean over the answers of what the network says to them, masked whole
    logits = network(ids.masked_fill(ANSWER, toys.MASK)).log_softmax(-1)
    assert losses[0] == pytest.approx(-logits.gather(2, ids[..., None])[..., 0][ANSWER].mean().item())
