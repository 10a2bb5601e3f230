"""Fine-tuning on a user's data: whole runs of both commands for every family, and the losses of a plain script."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from dllm_sampler import Sampler, config
from dllm_sampler.cli import main as sample
from dllm_sampler.models.transformer import Transformer
from dllm_sampler.training import cli
from dllm_sampler.training.sft import SftTrainer, cuts
from dllm_sampler.training.trained import Trained
from tests import tiny
from tests.refusals import refused
from tests.sampling import sampled

FACTS = Path(__file__).parents[2] / "examples" / "facts.jsonl"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {name: tiny.write(name, folder / name) for name in tiny.FAMILIES}


def trainer(model: Path, output: Path, **changes: Any) -> SftTrainer:
    settings = dict(config.entry("train", "sft").settings)
    settings.pop("_target_")
    small = {"steps": 3, "batch": 4, "held_out": 2, "new_tokens": 12, "warmup": 0, "learning_rate": 1e-3}
    fixed = {"device": "cpu", "model": str(model), "output": str(output), "data": {"path": str(FACTS)}}
    return SftTrainer(**{**settings, **small, **fixed, "evaluate_every": 9, **changes})


def lines(folder: Path) -> list[dict[str, float]]:
    """Of the log, without what depends on the clock."""
    read = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in read]


@pytest.mark.parametrize("name", sampled(tiny.FAMILIES, lambda name: [name == "llada"]))
def test_both_commands(
    name: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Every family learns from a file, and what is saved answers: the same tensors, of which the weights moved."""
    monkeypatch.chdir(FACTS.parents[1])
    output = tmp_path / "a run, [1]"
    few = ["batch=4", "steps=2", "held_out=2", "new_tokens=12", "warmup=0", "learning_rate=1e-2", "device=cpu"]
    words = [f"model={models[name]}", "data=examples/facts.jsonl", f"output={output}", *few]
    assert cli.main(["train=sft", *(f"train.{word}" for word in words)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{output}\n" and "22 examples to learn from" in printed.err
    log = lines(output)
    assert [line["step"] for line in log] == [0, 1, 2] and all(line["gradient"] > 0 for line in log[1:])
    assert log[0]["held_out_loss"] != log[2]["held_out_loss"]
    before, after = (load_file(folder / "model.safetensors") for folder in (models[name], output))
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert len(changed) > len(before) / 2 and not any("expert_bias" in key for key in changed)
    assert sample.main([f"model={output}", "What is the capital of France?", "max_new_tokens=8", "device=cpu"]) == 0
    assert re.search(r" tokens? in ", capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llada", "sdar"])
def test_a_plain_script_has_the_same_losses(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Three steps of AdamW in float64, of the whole batch at once, in a few lines without the trainer's code."""
    changes = {"dtype": "float64", "steps": 3, "schedule": "constant", "clip": 1e9, "batch_tokens": 64}
    trainer(models[name], tmp_path / "run", padding="longest", **changes).run()
    it = Trained.load(str(models[name]), torch.device("cpu"), "float64", None, 0)
    model, spec, mask = it.inner, it.denoiser.spec, 255 if name == "llada" else 286

    def asked(text: Any) -> list[int]:
        return list(it.tokenizer(text).input_ids)

    run = trainer(models[name], tmp_path / "other")
    source = run._data.load(0, 2, True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.999), weight_decay=0.1)
    losses = []
    for step in range(3):
        texts = source.draw("", 4, number=step)
        rows = [asked(one.prompt) + asked(one.answer) + [spec.eos_id] for one in texts]
        length = max(map(len, rows))
        clean = torch.tensor([row + [spec.eos_id] * (length - len(row)) for row in rows])
        learnt = torch.arange(length) >= torch.tensor([len(asked(one.prompt)) for one in texts])[:, None]
        generator = torch.Generator().manual_seed(Random(f"0/noise {step}").getrandbits(62))
        for kind in (torch.float32, torch.float64):  # of random lengths
            torch.rand(4, generator=generator, dtype=kind)
        size = 4 if name == "sdar" else length
        block = torch.arange(length) // size
        t = torch.rand(4, int(block.max()) + 1, generator=generator, dtype=torch.float64)[:, block]
        p = (1 - 1e-3) * t + 1e-3
        hidden = (torch.rand(4, length, generator=generator, dtype=torch.float64) < p) & learnt
        noisy = torch.where(hidden, mask, clean)
        logits = torch.zeros(4, length, spec.vocab_size, dtype=torch.float64)
        for first in range(0, length, size):  # a block-causal model: what comes before the block is clean
            seen = torch.cat([clean[:, :first], noisy[:, first : first + size]], 1)
            causal = (block[None, : seen.shape[1]] <= block[: seen.shape[1], None]).expand(4, -1, -1)
            logits[:, first : first + size] = model(seen, keys=causal)[:, first:]
        each = F.cross_entropy(logits.flatten(0, 1), clean.flatten(), reduction="none").view(4, length)
        loss = ((each / p * hidden).sum(1) / learnt.sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    found = [line["loss"] for line in lines(tmp_path / "run")[1:]]
    assert found == pytest.approx(losses, rel=1e-7), "the log has eight digits"


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(["dream", "sdar", "bert"]))
def test_goes_on_to_the_same_losses(
    name: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"checkpoint_every": 1, "complementary": True, "random_length": 0.3}
    trainer(models[name], tmp_path / "whole", **changes).run()
    step = SftTrainer.step

    def killed(self: SftTrainer, number: int) -> dict[str, float]:
        if number == 2:
            raise RuntimeError("killed")
        return step(self, number)

    monkeypatch.setattr(SftTrainer, "step", killed)
    with pytest.raises(RuntimeError, match="killed"):
        trainer(models[name], tmp_path / "parts", **changes).run()
    monkeypatch.undo()
    with refused("run-differs: train.data"):
        trainer(models[name], tmp_path / "parts", **changes, data={"path": str(FACTS), "metric": "contains"}).run()
    trainer(models[name], tmp_path / "parts", **changes, gradient_checkpointing=True).run()
    whole, parts = lines(tmp_path / "whole"), lines(tmp_path / "parts")
    assert [line["step"] for line in whole] == [0, 1, 2, 3]
    for one, other in zip(whole, parts, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    assert whole[:3] == parts[:3]
    with refused("run-finished"):
        trainer(models[name], tmp_path / "whole").run()


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(["sdar", "llada"]))
def test_neither_cut_nor_second_computation_changes_a_loss(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    found = []
    for number, changes in enumerate(({"batch_tokens": 1}, {"batch_tokens": 10**6}, {"gradient_checkpointing": True})):
        trainer(models[name], tmp_path / str(number), steps=1, dtype="float64", padding="none", **changes).run()
        found.append(lines(tmp_path / str(number)))
    for one in found[1:]:
        for line, other in zip(found[0], one, strict=True):
            assert line == pytest.approx(other, rel=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llada", "sdar"])
def test_learns_facts_by_heart(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    changes = {"steps": 400, "batch": 23, "held_out": 1, "padding": 10, "evaluate_every": 400}
    trainer(models[name], tmp_path / "run", **changes).run()
    sampler = Sampler.from_pretrained(str(tmp_path / "run"), device="cpu")
    asked = [json.loads(line) for line in FACTS.read_text().splitlines()]
    texts = sampler.generate([one["prompt"] for one in asked], max_new_tokens=10).texts
    assert sum(text == one["answer"] for text, one in zip(texts or [], asked, strict=True)) >= 22


def test_what_does_not_learn_and_what_is_computed_twice(models: dict[str, Path]) -> None:
    """A router's biases stay; with gradient checkpointing the backward pass runs each layer again."""
    it = Trained.load(str(models["llada2-moe"]), torch.device("cpu"), "float32", None, 0)
    still = [name for name, weight in it.network.named_parameters() if not weight.requires_grad]
    assert still and all(name.endswith("router.bias") for name in still)
    for name in ("sdar", "bert"):
        it, ran = Trained.load(str(models[name]), torch.device("cpu"), "float32", None, 0), list[int]()
        norm = it.inner.layers[1].mlp_norm if name == "sdar" else it.inner.bert.encoder.layer[1].attention  # pyright: ignore
        norm.register_forward_hook(lambda *_, ran=ran: ran.append(1))  # pyright: ignore
        for times in (1, 2):
            ran.clear()
            it.network.train()(torch.tensor([[5, 6, 7]])).sum().backward()
            assert len(ran) == times, name
            it.recompute()


def test_no_forward_has_more_columns_than_it_may(models: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
    sizes = []
    forward = Transformer.forward

    def noted(self: Transformer, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            sizes.append(tuple(ids.shape))
        return forward(self, ids, **options)

    monkeypatch.setattr(Transformer, "forward", noted)
    trainer(models["sdar"], tmp_path / "run", batch=12, steps=1, batch_tokens=500, padding="none").run()
    assert all(rows * columns <= 500 for rows, columns in sizes) and sum(rows for rows, _ in sizes) == 12
    widths = [columns for _, columns in sizes]
    assert len(sizes) > 1 and widths == sorted(widths) and widths[0] < widths[-1], "short rows go together"


def test_groups_of_rows() -> None:
    lengths = torch.tensor([2, 2, 3, 5, 9, 9])
    for budget, groups in ((1, [1] * 6), (9, [3, 1, 1, 1]), (18, [3, 2, 1]), (10**6, [6])):
        found = [part.stop - part.start for part in cuts(lengths, budget)]
        assert found == groups, budget
    assert [(part.start, part.stop) for part in cuts(torch.tensor([4]), 1)] == [(0, 1)]


def test_mini_learns_its_own_tasks(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"data": {}, "tasks": {"copy": 1}, "held_out": 3, "new_tokens": 24, "steps": 2}
    trainer(Path("mini"), tmp_path / "run", **changes).run()
    assert lines(tmp_path / "run")[2]["right"] > 0.5
