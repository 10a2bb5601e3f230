"""The trainer of Learn2PD's filter: what it writes down, what it learns, what it saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_sampler import Sampler
from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.host import files
from dllm_sampler.models.filter import judge, load
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.training import cli, replay
from dllm_sampler.training.filter import FilterTrainer, fit, judged, loss
from dllm_sampler.training.replay import Records, Replay
from tests import tiny
from tests.refusals import refused
from tests.sampling import sampled

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "data": {},
    "count": 20,
    "new_tokens": 10,
    "block_length": 4,
    "batch": 4,
    "depth": 2,
    "committed": False,
    "caution": 1.0,
    "threshold": 0.8,
    "against": (0.9,),
    "steps": 60,
    "learning_rate": 3e-3,
    "weight_decay": 0.0,
    "seed": 0,
    "tracker": None,
}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    names = ("Ada", "Ben", "Cal", "Dan", "Eve")
    texts = [f"copy : {one} , {other}" for one in names for other in names if one != other]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def records(count: int, seed: int) -> Any:
    """Right where the confidence is above 0.9; none is close to that."""
    draw = torch.rand(count, 8, generator=torch.Generator().manual_seed(seed))
    known = torch.where(draw < 0.5, draw * 1.6, 0.95 + (draw - 0.5) * 0.1)
    everywhere = torch.ones_like(known, dtype=torch.bool)
    return Records(known, known > 0.9, everywhere, everywhere)


@pytest.mark.slow
def test_learns_a_threshold() -> None:
    """It then accepts what the threshold rule accepts."""
    layers, loss = fit(records(1000, 0), records(200, 1), steps=1000, learning_rate=2e-2, weight_decay=0.0)
    assert loss < 0.05
    fresh = records(200, 2)
    agree = (judge(layers, fresh.known).sigmoid() > 0.5) == fresh.final
    assert agree.double().mean() > 0.99
    scores = judged(layers, fresh, 0.9)
    assert scores["precision"] > 0.99
    assert scores["recall"] > 0.95


@pytest.mark.parametrize("committed", [False, True])
def test_the_loss_by_hand(committed: bool) -> None:
    """Loss and gradient of two layers, against one position after the other in plain torch."""
    draw = torch.Generator().manual_seed(0)
    known = torch.rand(7, 4, generator=draw, dtype=torch.float64)
    final, open_, there = (torch.rand(7, 4, generator=draw) < share for share in (0.6, 0.5, 0.8))
    weights = [torch.randn(size, generator=draw, dtype=torch.float64) for size in ((4, 4), (4,), (4, 4), (4,))]
    found, expected = ([one.clone().requires_grad_() for one in weights] for _ in range(2))
    value = loss(
        ((found[0], found[1]), (found[2], found[3])), Records(known, final, open_ & there, there), committed, 3
    )
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


def test_counts_only_what_is_open_unless_told() -> None:
    """Positions already committed say nothing, or everything."""
    known = torch.tensor([[0.2, 0.8]]).repeat(50, 1)
    there = torch.ones_like(known, dtype=torch.bool)
    open_ = torch.tensor([[True, False]]).repeat(50, 1)
    final = torch.tensor([[True, False]]).repeat(50, 1)
    one = Records(known, final, open_, there)
    logit = {
        committed: judge(fit(one, one, steps=300, learning_rate=2e-2, committed=committed)[0], known[:1])[0]
        for committed in (False, True)
    }
    assert logit[False][0] > 2
    assert logit[True][0] > 2
    assert logit[True][1] < -2 < logit[False][1]


@pytest.mark.slow
def test_caution_accepts_less() -> None:
    """Two thirds right wherever it looks: enough for even odds, not where a mistake weighs four times as much."""
    known = torch.full((60, 2), 0.9)
    everywhere = torch.ones_like(known, dtype=torch.bool)
    one = Records(known, (torch.arange(60) % 3 > 0)[:, None].expand(60, 2), everywhere, everywhere)
    chance = [
        float(judge(fit(one, one, steps=400, caution=caution)[0], known[:1]).sigmoid().mean()) for caution in (1, 4)
    ]
    assert chance == pytest.approx([2 / 3, 1 / 3], abs=0.02)


def test_scores_by_hand() -> None:
    layers = ((torch.eye(4) * 10, torch.full((4,), -5.0)),)  # accepts above 0.5
    known = torch.tensor([[0.9, 0.6, 0.2, 0.9]])
    final, open_ = torch.tensor([[True, False, True, True]]), torch.tensor([[True, True, True, False]])
    scores = judged(layers, Records(known, final, open_, torch.ones_like(open_)), 0.5)
    assert scores == pytest.approx(
        {"precision": 0.5, "recall": 0.5, "false_positive_rate": 1.0, "final": 2 / 3, "records": 1.0}
    )


def test_starts_as_a_threshold() -> None:
    """Where the records say nothing, what is sure by itself is accepted, whatever its neighbours are."""
    nothing = torch.zeros(1, 8, dtype=torch.bool)
    one = Records(torch.rand(1, 8), nothing, nothing, nothing)
    layers, _ = fit(one, one, steps=1, depth=3)
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
    assert len(seen) == int(result.nfe.sum())
    assert (seen.open & ~seen.there).sum() == 0
    assert int((~seen.there).sum()) > 0  # the last block is short
    assert (seen.known[~seen.there] == 1).all()


def trainer(output: Path, checkpoint: Path, prompts: Path | None, **changes: Any) -> FilterTrainer:
    named = None if prompts is None else str(prompts)
    return FilterTrainer(str(output), prompts=named, **{"model": str(checkpoint), **SETTINGS, **changes})


@pytest.fixture(scope="module")
def whole(checkpoint: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A filter of a run that nothing disturbed."""
    return trainer(tmp_path_factory.mktemp("filter") / "whole", checkpoint, prompts).run()


def test_run(checkpoint: Path, prompts: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "made" / "filter.safetensors"
    assert trainer(output, checkpoint, prompts).run() == output
    spec = Sampler.from_pretrained(str(checkpoint), device="cpu").denoiser.spec
    assert [tuple(weight.shape) for weight, _ in load(output, spec)] == [(4, 4), (4, 4)]
    report = json.loads(output.with_suffix(".json").read_text())
    assert set(report["test"]) >= {"precision", "recall", "false_positive_rate"}
    assert set(report["decoding"]) == {"one per step", "learn2pd 0.8", "threshold 0.9"}
    slow, fast = report["decoding"]["one per step"], report["decoding"]["learn2pd 0.8"]
    assert slow["same"] == slow["speed_up"] == 1
    assert 1 <= fast["nfe"] <= slow["nfe"] <= 10
    assert set(fast) == {"same", "nfe", "tokens_per_forward", "seconds", "speed_up"}
    printed = capsys.readouterr().err
    assert f"precision {report['test']['precision']:.4f}" in printed
    assert all(name in printed for name in report["decoding"])
    assert sorted(file.name for file in output.parent.iterdir()) == [
        "filter.json",
        "filter.log.jsonl",
        "filter.safetensors",
    ]
    with refused("file-overwrite"):
        trainer(output, checkpoint, prompts).run()
    assert output.read_bytes() == whole.read_bytes()


def test_a_users_data(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    """The same data and model options as other trainers have; right answers are judged by the metric."""
    data = tmp_path / "d.jsonl"
    lines = [{"q": json.loads(line)["prompt"], "a": "Ada"} for line in prompts.read_text().splitlines()]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {"path": str(data), "prompt": "q", "answer": "a", "metric": f"{__name__}:always"}
    trainer(tmp_path / "f", checkpoint, None, data=given, model={"path": str(checkpoint)}).run()
    report = json.loads((tmp_path / "f.json").read_text())
    assert report["decoding"]["one per step"]["right"] == 1 and report["records"]["training"] > 0
    for more in ({"test": "x"}, {}):
        with refused("options-conflict: train.prompts, train.data.test"):
            trainer(tmp_path / "g", checkpoint, None if more else data, data={**given, **more})


def always(text: str, answer: str, **_: Any) -> float:
    return 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(tiny.EVERY))
def test_every_family(name: str, tmp_path: Path) -> None:
    """On a user's data; a filter is good for its own model."""
    model = tiny.write(name, tmp_path / "m")
    data = {"path": str(Path(__file__).parents[2] / "examples" / "facts.jsonl")}
    size = Sampler.from_pretrained(str(model), device="cpu").denoiser.spec.block_length or 4
    output = trainer(tmp_path / "f.safetensors", model, None, data=data, block_length=size, against=(), steps=2).run()
    report = json.loads(output.with_suffix(".json").read_text())
    assert report["records"]["training"] > 0 and report["decoding"]["learn2pd 0.8"]["nfe"] > 0
    scheduler = {"name": "learn2pd", "filter": str(output)}
    sampler = Sampler.from_pretrained(str(model), device="cpu", scheduler=scheduler, blocks=FixedBlocks(size))
    assert sampler.generate("What is the capital of France?", max_new_tokens=8).texts


@pytest.mark.slow
@pytest.mark.parametrize("where", ["collecting", "writing"])
def test_a_killed_run_goes_on(
    checkpoint: Path, prompts: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Between batches or while the state is written: nothing is collected twice, and the same filter comes out."""
    output, calls = tmp_path / "parts", []
    with monkeypatch.context() as patch:
        owner, name = (replay, "replay") if where == "collecting" else (files.os, "replace")
        inner = getattr(owner, name)

        def killed(*arguments: Any) -> Any:
            if calls.append(0) or len(calls) == 4:
                raise KeyboardInterrupt
            return inner(*arguments)

        patch.setattr(owner, name, killed)
        with pytest.raises(KeyboardInterrupt):
            trainer(output, checkpoint, prompts).run()
    assert not output.exists()
    with refused("run-differs: train.new_tokens, 10"):
        trainer(output, checkpoint, prompts, new_tokens=8).run()
    other = tmp_path / "other.txt"
    other.write_text("copy : Ada\n" * 20)
    with refused("run-differs: train.prompts"):
        trainer(output, checkpoint, other).run()
    done = []
    plain = replay.replay
    monkeypatch.setattr(replay, "replay", lambda *arguments: done.append(0) or plain(*arguments))
    trainer(output, checkpoint, prompts).run()
    assert len(done) == 6 - 3  # 16 training prompts in batches of 4, and two more of 2
    assert output.read_bytes() == whole.read_bytes()
    assert not output.with_name("parts.unfinished").exists()


def test_refusals(prompts: Path, tmp_path: Path, checkpoint: Path) -> None:
    with refused("option-range: train.count, 10"):
        trainer(tmp_path / "f", checkpoint, None, count=9)
    with refused("file-name: train.output"):
        trainer(tmp_path / "f.json", checkpoint, None)
    with refused("option-range: train.caution"):
        trainer(tmp_path / "f", checkpoint, None, caution=0.0)
    with refused("option-range: train.threshold"):
        trainer(tmp_path / "f", checkpoint, None, threshold=1.5)
    few = tmp_path / "few.txt"
    few.write_text("copy : Ada\n" * 3)
    with refused("nothing-to-learn"):
        trainer(tmp_path / "f", checkpoint, few).run()
    with refused("option-missing: train.prompts"):
        trainer(tmp_path / "f", checkpoint, None).run()
    (tmp_path / "f.unfinished").write_text("no tensors")
    with refused("run-damaged: f.unfinished"):
        trainer(tmp_path / "f", checkpoint, prompts).run()


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tasks of mini in a few seconds; right answers are counted, too."""
    few = ["count=28", "steps=50", "batch=14", "against=[0.9]", "device=cpu", f"output={tmp_path / 'f.safetensors'}"]
    assert cli.main(["train=filter", *(f"train.{one}" for one in few)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'f.safetensors'}\n"
    assert "right" in printed.err
    assert json.loads((tmp_path / "f.json").read_text())["decoding"]["one per step"]["right"] > 0
