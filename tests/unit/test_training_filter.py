"""The trainer of Learn2PD's filter: what it writes down, what it learns, what it saves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_sampler import Sampler
from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.models.filter import Filter, judge, load
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.training import cli, filter
from dllm_sampler.training.filter import Records, Replay, loss
from tests import tiny
from tests.sampling import sampled


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    names = ("Ada", "Ben", "Cal", "Dan", "Eve")
    texts = [f"copy : {one} , {other}" for one in names for other in names if one != other]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("committed", [False, True])
def test_the_loss_by_hand(committed: bool) -> None:
    """Loss and gradient of two layers, against one position after the other in plain torch."""
    draw = torch.Generator().manual_seed(0)
    known = torch.rand(7, 4, generator=draw, dtype=torch.float64)
    final, open_, there = (torch.rand(7, 4, generator=draw) < share for share in (0.6, 0.5, 0.8))
    weights = [torch.randn(size, generator=draw, dtype=torch.float64) for size in ((4, 4), (4,), (4, 4), (4,))]
    found, expected = ([one.clone().requires_grad_() for one in weights] for _ in range(2))
    said = judge(((found[0], found[1]), (found[2], found[3])), known)
    value = loss(said, Records(known, final, open_ & there, there), committed, 3)
    first, offset, second, last = expected
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in range(7):
        hidden = torch.stack([(first[unit] * known[row]).sum() + offset[unit] for unit in range(4)])
        hidden = hidden * (hidden > 0)
        for place in range(4):
            if there[row, place] and (committed or open_[row, place]):
                chance = 1 / (1 + (-((second[place] * hidden).sum() + last[place])).exp())
                right, weight = bool(final[row, place]), 1 if final[row, place] else 3
                total, count = total - weight * (chance if right else 1 - chance).log(), count + weight
    assert float(value.detach()) == pytest.approx(float(total.detach()) / count, rel=1e-12)
    value.backward()
    (total / count).backward()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-12, rtol=1e-10)


def test_starts_as_a_threshold() -> None:
    """Where the records say nothing, what is sure by itself is accepted, whatever its neighbours are."""
    layers = Filter(8, 3).layers()
    known = torch.tensor([[0.5, 0.8, 0.89, 0.91, 0.95, 1.0, 0.0, 0.93]])
    assert torch.equal(judge(layers, known) > 0, known > 0.9)


def test_replay_ends_at_the_answer(checkpoint: Path) -> None:
    """Every commit is the reference's token, in fewer forwards; what was final is written down."""
    plugins: dict[str, Any] = {"blocks": FixedBlocks(4), "stop": "none"}
    sampler = Sampler.from_pretrained(str(checkpoint), device="cpu", scheduler=FixedSteps(), **plugins)
    prompts = [[4, 9, 10], [5], [6, 11, 12, 13]]
    reference = sampler.generate(prompts, max_new_tokens=10)
    answer = reference.trace.ids[:, reference.trace.origin :]
    towards = Replay(answer, 4)
    result = Sampler(sampler.denoiser, scheduler=towards, **plugins).generate(prompts, max_new_tokens=10)
    assert torch.equal(result.tokens, reference.tokens)
    assert (result.nfe < 10).all()
    seen = Records.join(towards.seen)
    assert len(seen.known) == int(result.nfe.sum())
    assert (seen.open & ~seen.there).sum() == 0
    assert int((~seen.there).sum()) > 0  # the last block is short
    assert (seen.known[~seen.there] == 1).all()


def words(output: Path, model: Path, *more: str) -> list[str]:
    given = [f"output_dir={output}", f"model={model}", "prompts=18", "held_out=2", "new_tokens=10", "block_length=4"]
    given += ["caution=1.0", "answer_batch_size=4", "max_steps=60", "learning_rate=3e-3"]
    return ["train=filter", *(f"train.{word}" for word in [*given, "use_cpu=true", *more])]


def test_run(checkpoint: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "made" / "run"
    given = words(output, checkpoint, f"data={prompts}")
    (output / "checkpoint-1").mkdir(parents=True)  # of the model that was trained there
    (output / "checkpoint-1" / "trainer_state.json").touch()
    assert cli.main(given) == 0
    printed, path = capsys.readouterr(), output / "filter.safetensors"
    assert printed.out == f"{path}\n"
    spec = Sampler.from_pretrained(str(checkpoint), device="cpu").denoiser.spec
    assert [tuple(weight.shape) for weight, _ in load(path, spec)] == [(4, 4), (4, 4)]
    first, *_, last = re.findall(r"'eval_loss': '([\d.]+)", printed.err)
    assert (
        0 < json.loads(path.with_suffix(".json").read_text())["validation_loss"] == pytest.approx(float(last), rel=1e-3)
    )
    assert float(last) < float(first)
    assert sorted(file.name for file in output.iterdir()) == ["checkpoint-1", "filter.json", "filter.safetensors"]
    assert cli.main(given) == 2
    assert "has a finished run" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(tiny.EVERY))
def test_every_family(name: str, tmp_path: Path) -> None:
    """On a user's data; a filter is good for its own model."""
    model, output = tiny.write(name, tmp_path / "m"), tmp_path / "run"
    size = Sampler.from_pretrained(str(model), device="cpu").denoiser.spec.block_length or 4
    assert cli.main(words(output, model, f"data={tiny.FACTS}", f"block_length={size}", "max_steps=2")) == 0
    assert json.loads((output / "filter.json").read_text())["records"]["training"] > 0
    scheduler = {"name": "learn2pd", "filter": str(output / "filter.safetensors")}
    sampler = Sampler.from_pretrained(str(model), device="cpu", scheduler=scheduler, blocks=FixedBlocks(size))
    assert sampler.generate("What is the capital of France?", max_new_tokens=8).texts


@pytest.mark.slow
def test_a_killed_run_resumes(
    checkpoint: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Nothing is collected twice, and the same filter comes out."""
    assert cli.main(words(tmp_path / "whole", checkpoint, f"data={prompts}")) == 0
    output, calls, plain = tmp_path / "parts", list[int](), filter.replay

    def killed(*arguments: Any) -> Any:
        if calls.append(0) or len(calls) == 4:
            raise KeyboardInterrupt
        return plain(*arguments)

    given = words(output, checkpoint, f"data={prompts}")
    with monkeypatch.context() as patch:
        patch.setattr(filter, "replay", killed)
        assert cli.main(given) == 130
    assert cli.main(given) == 2
    assert "unfinished run" in capsys.readouterr().err
    done = list[int]()
    monkeypatch.setattr(filter, "replay", lambda *arguments: done.append(0) or plain(*arguments))
    assert cli.main([*given, "train.resume=true"]) == 0
    assert len(done) == 6 - 3  # 18 training prompts in batches of 4, and one more of 2
    whole, parts = (tmp_path / name / "filter.safetensors" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()
