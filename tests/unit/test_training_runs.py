"""Whole runs: every task on every family by the command, from Python as a user of TRL writes it, killed and resumed."""

from __future__ import annotations

import json
import os
import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer

from dllm_sampler import Sampler, config
from dllm_sampler.cli import main as sample
from dllm_sampler.models import loading
from dllm_sampler.training import cli
from dllm_sampler.training.distill import DistillConfig, DistillTrainer
from dllm_sampler.training.grpo import TrajectoryGRPOConfig, TrajectoryGRPOTrainer
from dllm_sampler.training.masked import Dice
from dllm_sampler.training.policy import Goal
from dllm_sampler.training.sft import MaskedDiffusionConfig, MaskedDiffusionTrainer
from dllm_sampler.training.trainer import DiffusionTrainer
from tests import tiny
from tests.refusals import refused
from tests.sampling import sampled

ROWS: list[Any] = [json.loads(line) for line in tiny.FACTS.read_text().splitlines()]
COMMON = ["max_steps=2", "held_out=2", "new_tokens=16", "warmup_steps=0", "learning_rate=1e-2", "use_cpu=true"]
COMMON += ["evaluation={}", "logging_steps=1", "per_device_train_batch_size=2"]
POLICY = ["num_generations=3", "rollout={temperature: 4.0}", "rewards={tests.unit.test_training_runs:letters: 1}"]
TASKS = {"sft": [], "cjgrpo": POLICY, "grpo": POLICY, "distill": ["prompts=4", "keep=false", "teacher={}"]}


def letters(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Different for nearly all answers."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


def history(folder: Path) -> list[dict[str, float]]:
    """The lines of the log, without what depends on the clock."""
    state = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    clock = "runtime|per_second|epoch"
    return [{key: value for key, value in line.items() if not re.search(clock, key)} for line in state]


@pytest.mark.parametrize("chosen", sampled(list(product(TASKS, tiny.EVERY)), lambda pair: [pair[0]], "-".join))
def test_every_task_and_family(chosen: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps on a user's data; what is saved has the family's own names, and answers by `dllm-sample`."""
    task, name = chosen
    model, output = tiny.write(name, tmp_path / "m"), tmp_path / "run, [1]"
    size = loading.load(model, device="cpu").denoiser.spec.block_length or 32
    words = [*COMMON, *TASKS[task], f"model={model}", f"data={tiny.FACTS}", f"output_dir={output}", "eval_steps=2"]
    words += [f"block_length={size}"] if task == "distill" else []
    status = cli.main([f"train={task}", *(f"train.{word}" for word in words)])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert printed.out == f"{output}\n"
    whole = [line for line in printed.err.splitlines() if line.startswith("{") and line.endswith("}")]
    assert sum("'loss'" in line for line in whole) == 2, "lines of the log do not wrap in a pipe"
    log = history(output)
    assert [line["step"] for line in log] == [0, 1, 2, 2, 2] and any(line.get("grad_norm", 0) > 0 for line in log)
    before, after = (load_file(folder / "model.safetensors") for folder in (model, output))
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert len(changed) > len(before) / 2 and not any("expert_bias" in key for key in changed)
    assert sample.main([f"model={output}", "What is the capital of France?", "max_new_tokens=8", "device=cpu"]) == 0
    assert re.search(r" tokens? in ", capsys.readouterr().err)


def arguments(kind: type[Any], output: Path, **changes: Any) -> Any:
    usual: dict[str, Any] = {"max_steps": 3, "per_device_train_batch_size": 4, "use_cpu": True, "logging_steps": 1}
    usual |= {"save_steps": 1, "new_tokens": 12, "learning_rate": 1e-3, "report_to": [], "disable_tqdm": True}
    return kind(str(output), **{**usual, **changes})


def trainer(kind: str, model: Any, output: Path, **changes: Any) -> DiffusionTrainer:
    data: dict[str, Any] = {"train_dataset": ROWS[:18], "eval_dataset": ROWS[18:20]}
    data |= {
        name: changes.pop(name) for name in ("peft_config", "train_dataset", "processing_class") if name in changes
    }
    if kind == "sft":
        return MaskedDiffusionTrainer(model, arguments(MaskedDiffusionConfig, output, **changes), **data)
    if kind == "distill":
        settings = {"keep": False, "block_length": 4, **changes}
        return DistillTrainer(model, arguments(DistillConfig, output, **settings), **data)
    own = {"num_generations": 3, "rollout": {"temperature": 4.0}, "beta": 0.1, "ref_model_sync_steps": 1} | changes
    rewards, data["reward_weights"] = own.pop("reward_funcs", letters), own.pop("reward_weights", None)
    return TrajectoryGRPOTrainer(model, rewards, arguments(TrajectoryGRPOConfig, output, **own), **data)


SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {"complementary": True, "average": 0.5, "eval_strategy": "steps", "eval_steps": 1},
    "distill": {"average": 0.5, "eval_strategy": "steps", "eval_steps": 1},
    "trajectory": {"average": 0.5, "per_device_train_batch_size": 2},
    "masked": {"mask_prompt": 0.15, "num_iterations": 2, "save_steps": 2, "max_steps": 4, "likelihood": "masked"}
    | {"per_device_train_batch_size": 2},
}


@pytest.mark.parametrize("kind", sampled(SETTINGS, lambda kind: [kind == "sft"]))
def test_a_run_that_resumes_comes_to_the_same_losses(kind: str, llada: Path, tmp_path: Path) -> None:
    """With the average, the reference, and everything that is drawn as they were."""
    changes = SETTINGS[kind]
    whole = trainer(kind, llada, tmp_path / "run", **changes)
    whole.train()
    again = trainer(kind, llada, tmp_path / "run", **changes)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{changes.get('save_steps', 1)}"))
    one, other = whole.state.log_history[:-1], again.state.log_history[:-1]
    assert len(one) == len(other) and any(line.get("grad_norm", 0) > 0 for line in one)
    for line, same in zip(one, other, strict=True):
        figures = {key: value for key, value in line.items() if "runtime" not in key and "per_second" not in key}
        assert figures == pytest.approx({key: same[key] for key in figures}, rel=1e-6, abs=1e-9)
    for name, weight in whole.trained.learned().items():
        torch.testing.assert_close(again.trained.learned()[name], weight, atol=1e-6, rtol=1e-6)
    if changes.get("average"):
        assert whole.average.copies is not None and again.average.copies is not None
        torch.testing.assert_close(again.average.copies, whole.average.copies, atol=1e-6, rtol=1e-6)


def test_the_command_resumes_when_told(
    llada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed run, the same again, and a finished one."""

    def words(name: str, *more: str) -> list[str]:
        given = [
            *COMMON,
            f"model={llada}",
            f"data={tiny.FACTS}",
            f"output_dir={tmp_path / name}",
            "save_steps=1",
            *more,
        ]
        return ["train=sft", *(f"train.{word}" for word in [*given, "eval_strategy=no", "eval_on_start=false"])]

    assert cli.main(words("whole")) == 0
    step = MaskedDiffusionTrainer.loss_of

    def killed(self: Any, model: nn.Module, some: list[Any], dice: Dice) -> torch.Tensor:
        if self.state.global_step == 1:
            raise KeyboardInterrupt
        return step(self, model, some, dice)

    with monkeypatch.context() as patch:
        patch.setattr(MaskedDiffusionTrainer, "loss_of", killed)
        assert cli.main(words("parts")) == 130
    capsys.readouterr()
    assert cli.main(words("parts")) == 2
    assert "has an unfinished run. Set train.resume=true" in capsys.readouterr().err
    assert cli.main(words("parts", "resume=true", "report_to=none")) == 0
    assert history(tmp_path / "parts")[:-1] == history(tmp_path / "whole")[:-1]
    for key, tensor in load_file(tmp_path / "whole" / "model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "parts" / "model.safetensors")[key], tensor)
    assert cli.main(words("parts", "resume=true")) == 2
    assert "has a finished run" in capsys.readouterr().err


OTHER = {"deer": ["answers=4"], "distill": ["prompts=4", "keep=false"], "filter": ["prompts=4", "block_length=4"]}


@pytest.mark.parametrize("task", sampled(OTHER))
def test_collected_answers_are_of_the_same_model_and_data(
    task: str, llada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was killed in its training resumes with the settings that its answers depend on, and no others."""

    def command(*more: str) -> cli.Command:
        given = ["use_cpu=true", "new_tokens=8", f"output_dir={tmp_path / 'run'}", f"data={tiny.FACTS}"]
        given += [f"model={llada}", *OTHER[task], *more]
        given += [f"target={tiny.target_of(llada)}", "separator=null"] if task == "deer" else ["held_out=2"]
        return cli.read([f"train={task}", *(f"train.{word}" for word in given)])

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    other = tmp_path / "other.jsonl"
    other.write_text(tiny.FACTS.read_text())
    monkeypatch.setattr(Trainer, "train", killed)
    for more in ((), ("resume=true", "logging_steps=1")):
        with pytest.raises(KeyboardInterrupt):
            command(*more).run()
    for name, then, now in (
        ("new_tokens", "8", "9"),
        ("seed", "0", "1"),
        ("data.path", str(tiny.FACTS), str(other)),
        ("model", str(llada), "mini"),
    ):
        with refused(f"run-differs: train.{name}={now}, {then}, train.output_dir"):
            command("resume=true", f"{name}={now}").run()


def test_the_average_is_measured_and_saved(llada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand over three steps; each step goes on from the weights themselves."""
    changes: dict[str, Any] = {"average": 0.6, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "no"}
    run, weights = trainer("sft", llada, tmp_path / "run", **changes), list[dict[str, torch.Tensor]]()
    seen = list[dict[str, torch.Tensor]]()

    def now() -> dict[str, torch.Tensor]:
        return {name: weight.detach().clone() for name, weight in run.trained.learned().items()}

    monkeypatch.setattr(run, "measured", lambda: seen.append(now()) or {})
    plain = run.loss_of  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(run, "loss_of", lambda *given: weights.append(now()) or plain(*given))
    run.train()
    weights = [*weights[:3], now()]
    mean = weights[0]
    for each in weights[1:]:
        mean = {name: 0.6 * mean[name] + 0.4 * weight for name, weight in each.items()}
    torch.testing.assert_close(seen[0], mean, atol=1e-6, rtol=1e-5)
    assert any(not torch.equal(now()[name], mean[name]) for name in mean)
    run.save_model()
    saved = Sampler.from_pretrained(str(tmp_path / "run"), device="cpu", dtype="float32").denoiser
    for name, weight in saved.transformer.named_parameters():  # pyright: ignore[reportAttributeAccessIssue]
        torch.testing.assert_close(weight.detach(), mean[f"network.{name}"], atol=1e-6, rtol=1e-5)


def test_what_the_hub_gets(llada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The family's own format, once, after training; checkpoints on the way stay here."""
    sent, url = list[list[str]](), SimpleNamespace(repo_id="me/mine")
    hub = SimpleNamespace(
        create_repo=lambda *_, **__: url, upload_folder=lambda folder_path, **_: sent.append(os.listdir(folder_path))
    )
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    run = trainer("sft", llada, tmp_path / "run", max_steps=1, push_to_hub=True, hub_model_id="me/mine")
    run.train()
    assert not sent
    monkeypatch.setattr(run, "create_model_card", lambda **_: None)
    run.save_model()
    assert len(sent) == 1 and {"config.json", "model.safetensors", "tokenizer.json"} <= {*sent[0]}


@pytest.mark.slow
def test_layers_that_run_twice_change_nothing(llada: Path, tmp_path: Path) -> None:
    """Neither does it matter how a step is cut into forwards."""
    found = []
    for number, changes in enumerate(({}, {"gradient_checkpointing": True}, {"gradient_accumulation_steps": 4})):
        size = 1 if "gradient_accumulation_steps" in changes else 4
        usual: dict[str, Any] = {"dtype": "float64", "padding": "none", "per_device_train_batch_size": size}
        run = trainer("sft", llada, tmp_path / str(number), max_steps=1, **usual, **changes)
        run.train()
        found.append(run.state.log_history[0])
    for other in found[1:]:
        assert found[0]["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert found[0]["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-6)


def test_one_held_out_example_has_a_loss(llada: Path, tmp_path: Path) -> None:
    """Each token is hidden once, also where a random mask hides none."""
    for seed in range(2):
        run: Any = trainer("sft", llada, tmp_path / str(seed), seed=seed, padding="none")
        first, second = (run.evaluate(run.eval_dataset[:1])["eval_loss"] for _ in range(2))
        assert first == second > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llada", "sdar"])
def test_learns_facts_by_heart(name: str, tmp_path: Path) -> None:
    model = tiny.write(name, tmp_path / "m")
    changes = {"max_steps": 400, "per_device_train_batch_size": 24, "padding": 10, "save_strategy": "no"}
    run = trainer("sft", model, tmp_path / "run", train_dataset=ROWS, **changes)
    run.train()
    run.save_model()
    sampler = Sampler.from_pretrained(str(tmp_path / "run"), device="cpu")
    texts = sampler.generate([one["prompt"] for one in ROWS], max_new_tokens=10).texts
    assert sum(text == one["answer"] for text, one in zip(texts or [], ROWS, strict=True)) >= 22


def test_gradients_that_are_not_finite_change_nothing(llada: Path, tmp_path: Path, capsys: Any) -> None:
    run = trainer("sft", llada, tmp_path / "run", max_steps=1)
    before = {name: weight.detach().clone() for name, weight in run.trained.learned().items()}
    plain = run.loss_of  # pyright: ignore[reportAttributeAccessIssue]
    run.loss_of = lambda *given: plain(*given) * float("nan")  # pyright: ignore[reportAttributeAccessIssue]
    run.train()
    assert "step 1: the gradients are not finite and were left out" in capsys.readouterr().err
    assert all(torch.equal(before[name], weight) for name, weight in run.trained.learned().items())


def nowhere(completions: list[str], **_: Any) -> list[float]:
    return [float("nan")] * len(completions)


def test_rewards_that_fail(llada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A wrong one is an error before the first step; one that never gives a score ends the run."""
    for reward, said in ((lambda **_: [1.0], "function-result"), (lambda **_: {}["level"], "function-failed: 'level'")):
        with refused(said):
            trainer("trajectory", llada, tmp_path / "run", reward_funcs=reward)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr("dllm_sampler.training.grpo.PATIENCE", 2)
    run = trainer("trajectory", llada, tmp_path / "run", reward_funcs=nowhere, beta=0.0)
    with refused("nothing-to-learn"):
        run.train()
    assert "nowhere is not finite: 12 answers without a score" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("trajectory", {"num_generations": 1}, "option-range: num_generations"),
        ("trajectory", {"rollout": {"scheduler": "fixed"}}, "option-range: rollout.temperature"),
        ("trajectory", {"rollout": {"scheduler": "remdm", "temperature": 1.0}}, "trajectories-unsupported"),
        ("trajectory", {"likelihood": "one"}, "choice-unknown: likelihood='one'"),
        ("trajectory", {"epsilon": 0.0}, "option-range: epsilon"),
        ("trajectory", {"num_iterations": 2}, "options-conflict: save_steps=1, num_iterations=2"),
        ("distill", {"ratio": 1.0}, "option-range: ratio"),
        ("sft", {"train_dataset": None}, "nothing-to-learn: train_dataset"),
        ("trajectory", {"reward_funcs": [letters] * 2, "reward_weights": [1.0]}, "length-mismatch: 2"),
        ("sft", {"train_dataset": [{"prompt": "a", "completion": "b" * 600}]}, "example-too-long: 602 tokens, 512"),
        ("sft", {"new_tokens": 1}, "example-too-long: row, eval_dataset, new_tokens=1"),
    ],
)  # fmt: skip
def test_refusals(kind: str, changes: dict[str, Any], said: str, llada: Path, tmp_path: Path) -> None:
    with refused(said):
        trainer(kind, llada, tmp_path / "run", **changes)


@pytest.mark.parametrize("task", sampled([*TASKS, "filter"]))
def test_a_prompt_without_room_is_told_before_the_first_step(
    task: str, llada: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its line, although no step may come to it; and no answer has been sampled."""
    data, output = tmp_path / "data.jsonl", tmp_path / "run"
    lines = [{"prompt": "a" * (600 if line == 7 else 2), "answer": "b"} for line in range(20)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [f"model={llada}", f"data={data}", f"output_dir={output}", "use_cpu=true"]
    words += [*COMMON, *TASKS[task]] if task in TASKS else []
    assert cli.main([f"train={task}", *(f"train.{word}" for word in words)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert (
        "line 8 has 602 tokens of prompt and answer" if task == "sft" else "data.jsonl line 8 has 600 tokens" in error
    ), error
    assert not output.exists()


@pytest.mark.slow
def test_the_clip_of_a_second_iteration(llada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both iterations learn from the same answers: the old log-probabilities are those of the first one's weights."""
    old, plain = list[Any](), Goal.loss

    def noted(self: Goal, chunk: Any, logprob: torch.Tensor, *rest: float) -> Any:
        assert self.old is not None
        at = self.old[chunk.row[:, None], chunk.columns]
        old.append((torch.where(chunk.there, at.to(logprob) - logprob.detach(), 0).abs().max(), self.advantage))
        return plain(self, chunk, logprob, *rest)

    monkeypatch.setattr(Goal, "loss", noted)
    changes = {"num_iterations": 2, "save_strategy": "no", "max_steps": 2, "beta": 0.0, "batch_tokens": 10**6}
    trainer("trajectory", llada, tmp_path / "run", **changes).train()
    (first, advantage), (second, same) = old
    assert first < 1e-5 < second and torch.equal(advantage, same)


def test_settings_in_braces_replace() -> None:
    """Also where the default is null, which Hydra can neither delete nor merge into."""
    words = ["train.rewards={items: 2}", "train.tasks={copy: 1}", "train.evaluation.scheduler={name: threshold}"]
    found = cli.read(["train=cjgrpo", *words])
    assert (found.rewards, found.tasks) == ({"items": 2}, {"copy": 1})
    assert found.settings["evaluation"]["scheduler"] == {"name": "threshold"}
    for written in ("{items:2,my.module:reward: 0.5}", "{items: 2, my.module:reward: 0.5}"):
        found = cli.read(["train=cjgrpo", f"train.rewards={written}"])
        assert found.rewards == {"items": 2, "my.module:reward": 0.5}
    found = cli.read(["train=sft", "train.fsdp_config={version: 2}", "train.max_grad_norm=0.5"]).settings
    assert found["fsdp_config"] == {"version": 2} and found["max_grad_norm"] == 0.5


def test_every_yaml_is_right() -> None:
    for name in config.names("train"):
        found = cli.read([f"train={name}"])
        if name != "mini":
            assert found.arguments(found.trainer.config).output_dir == f"{name}-run"
