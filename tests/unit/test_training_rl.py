"""Policy-gradient training: rewards, advantages, the loss, and whole runs on mini."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dllm_sampler import Sampler, config
from dllm_sampler.training import cli, rewards
from dllm_sampler.training.rl import Goal, PolicyTrainer
from dllm_sampler.training.trajectory import Trajectories, trajectories
from tests import toys
from tests.refusals import refused
from tests.sampling import sampled

# Rewards --------------------------------------------------------------------------------------------------------------


def broken(**_: Any) -> list[float]:
    raise RuntimeError("no judge")


def nowhere(completions: list[str], **_: Any) -> list[float]:
    return [math.nan] * len(completions)


def by_length(completions: list[str], **_: Any) -> list[float | None]:
    return [None if not text else float(len(text)) for text in completions]


def judge(*functions: Any, completions: list[str] | None = None) -> rewards.Scores:
    texts = completions or ["a", "bb", ""]
    named = {f"r{i}": (function, 2.0) for i, function in enumerate(functions)}
    return rewards.judge(named, ["p"] * len(texts), texts, {"answer": ["x"] * len(texts)})


def test_rewards_add_up() -> None:
    scores = judge(by_length, lambda prompts, completions, **_: [1.0] * len(prompts))
    assert scores.total.tolist() == [4, 6, 2], "None adds nothing"
    assert scores.means == {"r0": 1.5, "r1": 1.0}
    assert not scores.troubles
    assert judge(by_length).total.isnan().tolist() == [False, False, True], "no function judged the last"


@pytest.mark.parametrize(
    ("reward", "message", "unscored"),
    [
        (broken, r"reward r0 failed \(RuntimeError: no judge\): the batch has no score", 3),
        (lambda **_: [1.0], "gave 1 numbers for 3 answers", 3),
        (lambda **_: [1.0, math.nan, math.inf], "not finite for 2 answers", 2),
        (lambda **_: ["high"] * 3, "failed .ValueError", 3),
    ],
)
def test_rewards_that_fail_say_so(reward: Any, message: str, unscored: int) -> None:
    scores = judge(reward, lambda **_: [1.0] * 3)
    assert int(scores.total.isnan().sum()) == unscored
    assert len(scores.troubles) == 1
    assert re.search(message, scores.troubles[0])


def test_advantages_by_hand() -> None:
    nan = math.nan
    scores = torch.tensor([1.0, 0, 0, 0.1, 0.1, 0.1, 2, nan, 4, nan, nan, nan], dtype=torch.float64)
    found = rewards.advantages(scores, 3, scale=False)
    assert found.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0, 0, 0, -1, 0, 1, 0, 0, 0])
    scaled = rewards.advantages(scores, 3, scale=True)
    assert scaled[3:6].tolist() == [0, 0, 0], "equal rewards stay nothing to learn from"
    assert float(scaled[6]) == pytest.approx(-1 / (2**0.5 + 1e-4))


def test_finding_rewards() -> None:
    assert rewards.find("correct") is rewards.correct
    assert rewards.find(f"{__name__}:broken") is broken
    for name, message in (
        ("corect", "choice-unknown: 'correct'"),
        ("no.such:f", "function-missing"),
        ("math:pi", "function-invalid"),
    ):
        with refused(message):
            rewards.find(name)
    assert rewards.correct(["copy: Ada"], ["Ada"], task=["copy"], answer=["Ada"]) == [1.0]
    assert rewards.items(["p"] * 2, ["Ada, Ben, Ada", ""], answer=["Ben, Ada, Cal, Dan", "Ada"]) == [0.5, 0]
    puzzle, right = "latin: 1_3_, _3_1, 2___, _41_", "1234, 4321, 2143, 3412"
    found = [right, right.replace("3412", "3411"), right.replace("1234", "2134"), "1234, 4321", right + "1", ""]
    assert rewards.lines([puzzle] * 6, found) == [1, 6 / 8, 0, 0, 0, 0]
    assert rewards.units([puzzle] * 3, found[:3]) == [1, 9 / 12, 0]
    open_puzzle, square = "latin: 1___, ____, ____, ____", "1234, 2341, 3412, 4123"
    assert rewards.units([open_puzzle], [square]) == [8 / 12], "no box of it is right"
    assert rewards.solved("latin", open_puzzle, "", square) and not rewards.solved("sudoku", open_puzzle, "", square)
    assert rewards.partly(["p"], ["12x4"], answer=["1234"]) == [0.75]


# The loss -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def view() -> Trajectories:
    sampler = toys.sampler(scheduler={"name": "threshold", "threshold": 0.6}, temperature=1.0)
    trace = sampler.generate(toys.PROMPTS[:2], max_new_tokens=13, samples=3).trace
    return trajectories(trace, sampler.denoiser.spec, after_eos=True)


def gradient(model: nn.Module, view: Trajectories, goal: Goal, budget: int, beta: float) -> tuple[float, Tensor, dict]:
    model.zero_grad()
    total, figures = 0.0, {"clipped": 0.0, "kl": 0.0}
    for chunk in view.chunks(budget):
        loss, some = goal.loss(chunk, chunk.score(model)[0], 0.5, beta)
        loss.backward()
        total += float(loss.detach())
        figures = {key: figures[key] + some.get(key, 0.0) for key in figures}
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), figures


def goal_of(view: Trajectories, advantage: Tensor, reference: Tensor | None = None) -> Goal:
    old = view.log_probabilities(toys.transformer())
    return Goal(advantage, view.weight / len(view.weight), old, reference)


def test_first_update_is_reinforce(view: Trajectories) -> None:
    """With the ratio at 1, the gradient is that of the mean over transitions of the mean log-probability."""
    advantage = torch.randn(6, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    model = toys.transformer()
    _, found, figures = gradient(model, view, goal_of(view, advantage), 10**6, 0.0)
    _, fresh, _ = gradient(model, view, replace(goal_of(view, advantage), old=None), 10**6, 0.0)
    torch.testing.assert_close(found, fresh, atol=1e-11, rtol=0)
    model.zero_grad()
    loss = torch.zeros((), dtype=torch.double)
    for row, steps in enumerate(view.trace.steps(b) for b in range(6)):
        parts = []
        for number, step in enumerate(steps):
            columns = torch.tensor(step) + view.trace.origin
            begin = int(view.trace.begin[row])
            logits = model(view.trace.state(number)[row : row + 1, begin:])[0, columns - begin]
            logits = logits.masked_fill(torch.arange(toys.VOCAB) == toys.MASK, -torch.inf)
            parts.append(logits.log_softmax(-1).gather(1, view.trace.ids[row, columns][:, None]).mean())
        loss = loss - advantage[row] * torch.stack(parts).mean() / 6
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=0)
    assert figures["clipped"] == 0


def test_the_cut_into_forwards_does_not_matter(view: Trajectories) -> None:
    advantage = torch.tensor([1.0, -1, 0, 2, -1, -1], dtype=torch.double)
    reference = view.log_probabilities(toys.transformer(seed=3))
    goal, model = goal_of(view, advantage, reference), toys.transformer(seed=4)
    one, two = (gradient(model, view, goal, budget, 0.04) for budget in (1, 10**6))
    assert one[0] == pytest.approx(two[0], abs=1e-11)
    torch.testing.assert_close(one[1], two[1], atol=1e-11, rtol=1e-11)
    assert one[2] == pytest.approx(two[2])
    assert one[2]["clipped"] > 0 and one[2]["kl"] > 0


def test_equal_rewards_teach_nothing(view: Trajectories) -> None:
    _, found, _ = gradient(toys.transformer(seed=4), view, goal_of(view, torch.zeros(6)), 10**6, 0.0)
    assert not found.any()


# Runs -----------------------------------------------------------------------------------------------------------------


def trainer(name: str, output: Path, **changes: Any) -> PolicyTrainer:
    settings = dict(config.entry("train", name).settings)
    settings.pop("_target_")
    small = {
        "steps": 2,
        "prompts": 2,
        "group": 3,
        "new_tokens": 8,
        "updates": 2,
        "held_out": 3,
        "tasks": {"shuffle": 1},
    }
    rollout = {"scheduler": "ascending", "blocks": "full", "stop": "none", "temperature": 1.0}
    fixed = {"device": "cpu", "output": str(output), "checkpoint_every": 1, "rollout": rollout, "evaluate_every": 9}
    return PolicyTrainer(**{**settings, **small, **fixed, "rewards": {"partly": 1.0}, **changes})


def lines(folder: Path) -> list[dict[str, float]]:
    """Of the log, without what depends on the clock."""
    read = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in read]


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(["cjgrpo", "grpo"]))
def test_goes_on_to_the_same_losses(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the third step, with the reference moved on and a line of a lost step in the log."""
    changes = {"steps": 3, "beta": 0.04, "reference_every": 1, "learning_rate": 1e-3, "transitions": 2}
    changes["mask_prompt"] = 0.15  # drawn again for each update
    trainer(name, tmp_path / "whole", **changes).run()
    step = PolicyTrainer.step

    def killed(self: PolicyTrainer, number: int) -> dict[str, float]:
        if number == 2:
            raise RuntimeError("killed")
        return step(self, number)

    monkeypatch.setattr(PolicyTrainer, "step", killed)
    with pytest.raises(RuntimeError, match="killed"):
        trainer(name, tmp_path / "parts", **changes).run()
    monkeypatch.undo()
    with (tmp_path / "parts" / "log.jsonl").open("a") as log:
        log.write('{"step": 3, "loss": 7}\n{"st')
    for other in ({"beta": 0.0}, {"beta": 0.5}):
        with refused("run-differs: train.beta"):
            trainer(name, tmp_path / "parts", **{**changes, **other}).run()
    trainer(name, tmp_path / "parts", **changes).run()
    whole, parts = lines(tmp_path / "whole"), lines(tmp_path / "parts")
    assert [line["step"] for line in whole] == [0, 1, 2, 3]
    assert whole == parts
    assert any(line.get("gradient", 0) > 0 for line in whole)
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "parts/model.safetensors").read_bytes()
    answer = Sampler.from_pretrained(str(tmp_path / "whole"), device="cpu").generate("shuffle: Ada", max_new_tokens=8)
    assert answer.texts is not None
    with refused("run-finished"):
        trainer(name, tmp_path / "whole", **changes).run()


@pytest.mark.slow
def test_adapters_alone_learn(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    lora: dict[str, float] = {"r": 2, "alpha": 4, "dropout": 0.1}
    board = find_spec("tensorboard") is not None
    changes: dict[str, Any] = {"learning_rate": 1e-2, "precision": "bf16", "tracker": "tensorboard" if board else None}
    trainer("cjgrpo", tmp_path / "lora", lora=lora, reference_every=0, **changes).run()
    assert board == any(tmp_path.glob("lora/log.tensorboard/events*"))
    before, after = (load_file(Path(one) / "model.safetensors") for one in (mini(), tmp_path / "lora"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not any("wte" in name or "norm" in name for name in changed), "only linear layers have adapters"
    with refused("options-conflict: train.reference_every"):
        trainer("cjgrpo", tmp_path / "other", lora=lora)


def mini() -> str:
    return str(config.model("mini")["path"])


def test_a_reward_that_always_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("dllm_sampler.training.rl.PATIENCE", 2)
    before = toys.transformer()
    assert before.training is True
    with refused("nothing-to-learn"):
        trainer("cjgrpo", tmp_path / "run", rewards={f"{__name__}:nowhere": 1.0}, steps=5).run()
    assert "nowhere is not finite for 6 answers" in capsys.readouterr().err.replace("\n", " ")
    assert lines(tmp_path / "run")[1]["unscored"] == 6


def test_gradients_that_are_not_finite_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Goal.loss

    def broken_once(self: Goal, chunk: Any, logprob: Tensor, *rest: float) -> tuple[Tensor, Any]:
        monkeypatch.undo()
        loss, figures = right(self, chunk, logprob, *rest)
        return loss * math.nan, figures

    monkeypatch.setattr(Goal, "loss", broken_once)
    run = trainer("cjgrpo", tmp_path / "run", steps=1, updates=1, learning_rate=1e-2)
    run.run()
    assert "gradients are not finite" in capsys.readouterr().err.replace("\n", " ")
    before, after = (load_file(Path(one) / "model.safetensors") for one in (mini(), tmp_path / "run"))
    assert all(torch.equal(before[name].float(), after[name].float()) for name in before)
    assert all(p.isfinite().all() for p in run.trained.network.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": 1}, "option-range: train.group"),
        ({"rollout": {"scheduler": "fixed"}}, "option-range: train.rollout.temperature"),
        ({"likelihood": "one"}, "choice-unknown: train.likelihood, 'one'"),
        ({"epsilon": 0.0}, "option-range: train.epsilon"),
        ({"tasks": {"dance": 1.0}}, "choice-unknown: 'dance'"),
        ({"lora": {"r": 2}}, "option-type: train.lora"),
        ({"schedule": "linear"}, "choice-unknown: train.schedule"),
        ({"transitions": 0}, "option-range: train.transitions"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with refused(message):
        trainer("cjgrpo", tmp_path, **changes)


def test_a_sampler_that_cannot_be_scored_is_refused(tmp_path: Path) -> None:
    with refused("trajectories-unsupported"):
        trainer("cjgrpo", tmp_path / "run", rollout={"scheduler": "remdm", "temperature": 1.0}).run()
    assert replace(trainer("cjgrpo", tmp_path), group=5).group == 5


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["steps=1", "prompts=1", "group=2", "updates=1", "held_out=1", "new_tokens=8", "device=cpu"]
    few.append(f"output={tmp_path / 'run'}")
    assert cli.main(["train=cjgrpo", *(f"train.{one}" for one in few)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'run'}\n"
    assert cli.main(["train=cjgrpo", "train.grup=2"]) == 2
    assert "did you mean 'group'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["grpo", "cjgrpo"])
def test_small_data_is_enough_and_the_held_out_part_is_said(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "copy: Ada {i}", "answer": "Ada"}}\n' for i in range(21)))
    few = ["steps=1", "prompts=2", "group=2", "new_tokens=4", "device=cpu", "rollout.scheduler.inner.steps=2"]
    few += [f"data={data}", f"output={tmp_path / 'run'}", "rewards={partly: 1}"]
    assert cli.main([f"train={name}", *(f"train.{one}" for one in few)]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "19 examples to learn from, 0.105 times each; 2 held out to measure on" in said


def test_settings_in_braces_replace() -> None:
    """Also where the default is null, which Hydra can neither delete nor merge into."""
    words = ["train.rewards={items: 2}", "train.tasks={copy: 1}", "train.evaluation.scheduler={name: threshold}"]
    found = cli.trainer(["train=cjgrpo", *words])
    assert (found.rewards, found.tasks) == ({"items": 2}, {"copy": 1})
    assert found.evaluation["scheduler"] == {"name": "threshold"}
    for written in ("{items:2,my.module:reward: 0.5}", "{items: 2, my.module:reward: 0.5}"):
        found = cli.trainer(["train=cjgrpo", f"train.rewards={written}"])
        assert found.rewards == {"items": 2, "my.module:reward": 0.5}
    pytest.importorskip("peft")
    found = cli.trainer(["train=cjgrpo", "train.lora={r: 8, alpha: 16, dropout: 0}", "train.reference_every=0"])
    assert found.lora == {"r": 8, "alpha": 16, "dropout": 0}
