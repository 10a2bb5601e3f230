"""Rollouts and trainers under DDP and FSDP2 over gloo, in one process and in two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from dllm_sampler import Sampler, UserError
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.training import journal
from dllm_sampler.training.trajectory import trajectories
from tests import tiny, toys

ROOT = Path(__file__).parents[2]


def sampled_and_scored(module: Any, prompts: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their log-probabilities, and the gradient of these."""
    sampler = Sampler(TransformerDenoiser(module, toys.MASK, toys.EOS), scheduler="random_order", temperature=1.0)
    before = torch.get_rng_state()
    trace = sampler.generate(prompts, max_new_tokens=12, samples=2, seed=4).trace
    assert torch.equal(torch.get_rng_state(), before)
    assert module.training and all(p.grad is None and p.requires_grad for p in module.parameters())
    (chunk,) = trajectories(trace, sampler.denoiser.spec, after_eos=True).chunks(10**6)
    chunk.score(module)[0].sum().backward()
    grad = next(iter(module.parameters())).grad
    return trace.ids, trace.logprob, grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def worker(rank: int, store: str, processes: int) -> None:
    """One process, with its own prompts, so that the gradients are the means over processes."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    try:
        prompts = toys.PROMPTS[2 * rank : 2 * rank + 2]
        ids, logprob, own = sampled_and_scored(toys.transformer(), prompts)
        mean = own.clone()
        torch.distributed.all_reduce(mean)
        sharded = toys.transformer()
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (processes,))
        for layer in sharded.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        for module in (nn.parallel.DistributedDataParallel(toys.transformer()), sharded):
            found = sampled_and_scored(module, prompts)
            for one, other in zip((ids, logprob, mean / processes), found, strict=True):
                torch.testing.assert_close(other, one, atol=1e-10, rtol=1e-10)
    finally:
        torch.distributed.destroy_process_group()


def test_wrapped_modules_sample_and_score_as_they_are(tmp_path: Path) -> None:
    """Under DDP and FSDP2: the plain module's answers, its log-probabilities, and the gradients of these."""
    worker(0, str(tmp_path / "store"), 1)


@pytest.mark.slow
def test_each_process_samples_and_gradients_are_averaged(tmp_path: Path) -> None:
    spawn(worker, (str(tmp_path / "store"), 2), nprocs=2)


KILLER = """
import os, pathlib, signal
from dllm_sampler.training import deer, replay
def dying(module, name):
    calls, plain = [], getattr(module, name)
    def third(*arguments):
        if calls.append(0) or len(calls) == 3 and pathlib.Path("kill").exists():
            os._exit(9)
        return plain(*arguments)
    setattr(module, name, third)
dying(replay, "replay")
dying(deer, "masked_loss")
def metric(text, answer, **_):
    if pathlib.Path("kill").exists() and pathlib.Path("parts/checkpoint.safetensors").exists():
        os._exit(9)
    if pathlib.Path("interrupt").exists() and os.environ["RANK"] == "1":
        signal.raise_signal(signal.SIGINT)
    return float(text == answer)
def letters(completion_ids, **_):
    return [sum(ids) % 97 / 97 for ids in completion_ids]
"""


COMMON = [
    "held_out=3", "new_tokens=12", "warmup=0", "dtype=float64", "learning_rate=1e-3", "evaluate_every=2", "device=cpu",
    "checkpoint_every=1", "data.metric=killer:metric", "evaluation={}",
]  # fmt: skip
POLICY = ["prompts=2", "group=3", "rollout={temperature: 4.0}", "rewards={killer:letters: 1}", "updates=2"]
TASKS = {
    "sft": ["batch=5", "padding=longest", "average=0.5"],
    "cjgrpo": [*POLICY, "beta=0.1", "reference_every=1", "average=0.5", "transitions=4"],
    "grpo": [*POLICY, "beta=0.1", "reference_every=2"],
    "distill": ["answers=8", "keep=false", "batch=3", "teacher={}", "average=0.5"],
}


def torchrun(folder: Path, processes: int, task: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A run of a task in several processes."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    words = (*COMMON, *words) if task in TASKS else words
    run += ["-m", "dllm_sampler.training.cli", f"train={task}", *(f"train.{word}" for word in words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(run, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)


def ran(folder: Path, processes: int, task: str, *words: str) -> str:
    done = torchrun(folder, processes, task, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def killed(folder: Path, task: str, *words: str) -> None:
    """Two processes that end in the second of their steps, while they measure."""
    (folder / "kill").touch()
    assert torchrun(folder, 2, task, *words, "output=parts").returncode != 0
    (folder / "kill").unlink()
    assert [line["step"] for line in journal.read(folder / "parts" / journal.FILE)] == [0, 1]


def same(folder: Path, first: str, *others: str, rounding: float = 1e-6) -> None:
    """All of these runs have the same figures, and end with the same weights."""
    logs = {name: journal.read(folder / name / journal.FILE) for name in (first, *others)}
    weights = {name: load_file(folder / name / "model.safetensors") for name in logs}
    assert len(logs[first]) > 3 and any(line.get("gradient", 0) > 0 for line in logs[first])
    for name in others:
        for line, other in zip(logs[first], logs[name], strict=True):
            assert {**line, "seconds": 0} == pytest.approx({**other, "seconds": 0}, rel=1e-6, abs=1e-9), name
        for key, tensor in weights[first].items():
            torch.testing.assert_close(weights[name][key], tensor, atol=rounding, rtol=rounding, msg=f"{name} {key}")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_a_killed_run_goes_on_in_two_processes(task: str, lora: bool, tmp_path: Path) -> None:
    """A run under DDP; one that was killed and goes on; one whose processes share the weights (FSDP2), killed, too."""
    (tmp_path / "killer.py").write_text(KILLER)
    words = [f"model={tiny.write('llada', tmp_path / 'm')}", f"data={ROOT / 'examples' / 'facts.jsonl'}", "steps=3"]
    words += [*TASKS[task], "batch_tokens=96"]
    if lora:
        words += ["lora={r: 2, alpha: 4, dropout: 0}", *(["reference_every=0"] if "grpo" in task else [])]
    ran(tmp_path, 2, task, *words, "output=whole")
    for name, more in (("ddp", "shard=false"), ("fsdp2", "shard=true")):
        killed(tmp_path, task, *words, more)
        ran(tmp_path, 2, task, *words, "output=parts", more)
        (tmp_path / "parts").rename(tmp_path / name)
    same(tmp_path, "whole", "ddp", "fsdp2")


@pytest.mark.slow
@pytest.mark.parametrize("more", ["shard=false", "shard=true"])
def test_ctrl_c_that_one_process_hears_ends_all_after_the_same_step(more: str, tmp_path: Path) -> None:
    (tmp_path / "killer.py").write_text(KILLER)
    words = [f"model={tiny.write('llada', tmp_path / 'm')}", f"data={ROOT / 'examples' / 'facts.jsonl'}", "steps=4"]
    words += [*TASKS["sft"], more, "checkpoint_every=9"]
    ran(tmp_path, 2, "sft", *words, "output=whole")
    (tmp_path / "interrupt").touch()
    stopped = torchrun(tmp_path, 2, "sft", *words, "output=parts")
    assert stopped.returncode != 0 and "the same command" in stopped.stderr
    (tmp_path / "interrupt").unlink()
    assert (tmp_path / "parts" / "checkpoint.safetensors").exists()  # the first process writes it
    assert [line["step"] for line in journal.read(tmp_path / "parts" / journal.FILE)] == [0, 1]
    ran(tmp_path, 2, "sft", *words, "output=parts")
    same(tmp_path, "whole", "parts")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dream", "llada2-moe", "bert"])
def test_processes_do_not_change_a_loss(name: str, tmp_path: Path) -> None:
    """One process; two with five examples a step; two that share the weights (FSDP2); and two that share them, are
    killed in the second step, and go on without sharing them. All end with the same weights."""
    (tmp_path / "killer.py").write_text(KILLER)
    words = [f"model={tiny.write(name, tmp_path / 'm')}", f"data={ROOT / 'examples' / 'facts.jsonl'}", "steps=4"]
    words += [*TASKS["sft"], "evaluate_every=1"]
    sharded = ["shard=true", "batch_tokens=64", "checkpoint_every=9"]  # saving would have the weights gathered again
    for output, processes, more in (("one", 1, []), ("two", 2, []), ("sharded", 2, sharded)):
        ran(tmp_path, processes, "sft", *words, f"output={output}", *more)
    killed(tmp_path, "sft", *words, "shard=true")
    ran(tmp_path, 2, "sft", *words, "output=parts")
    same(tmp_path, "one", "two", "sharded", "parts")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_processes_do_not_change_a_loss_of_uniform_diffusion(lora: bool, tmp_path: Path) -> None:
    """One process; two that run layers twice under DDP; two that share the weights (FSDP2), and run layers twice; and
    two that share them, are killed in the second step, and go on without sharing them."""
    (tmp_path / "killer.py").write_text(KILLER)
    words = [f"model={tiny.write('diffusion-gemma', tmp_path / 'm')}", f"data={ROOT / 'examples' / 'facts.jsonl'}"]
    words += ["steps=4", *TASKS["sft"], "evaluate_every=1", *(["lora={r: 2, alpha: 4, dropout: 0}"] if lora else [])]
    twice, sharded = "gradient_checkpointing=true", "shard=true"
    rarely = [sharded, "batch_tokens=200", "checkpoint_every=9"]  # saving would have the weights gathered again
    outputs = {"one": [], "two": [twice], "sharded": rarely, "both": [sharded, twice]}
    for output, more in outputs.items():
        ran(tmp_path, 1 if output == "one" else 2, "sft", *words, f"output={output}", *more)
    killed(tmp_path, "sft", *words, sharded)
    ran(tmp_path, 2, "sft", *words, "output=parts")
    same(tmp_path, *outputs, "parts", rounding=1e-5)  # logits are float32, whatever the weights


@pytest.mark.slow
def test_processes_do_not_change_a_filter(tmp_path: Path) -> None:
    """One process; two, of which one has a batch less; two that are killed in their third batch, and go on."""
    (tmp_path / "killer.py").write_text(KILLER)
    words = [f"model={tiny.write('llada', tmp_path / 'm')}", f"data={ROOT / 'examples' / 'facts.jsonl'}", "device=cpu"]
    words += ["data.metric=killer:metric", "count=30", "new_tokens=8", "block_length=4", "batch=4", "against=[]"]
    words += ["steps=60"]
    for name, processes in (("one", 1), ("two", 2)):
        assert ran(tmp_path, processes, "filter", *words, f"output={name}") == f"{name}\n"
    (tmp_path / "kill").touch()
    assert torchrun(tmp_path, 2, "filter", *words, "output=parts").returncode != 0
    (tmp_path / "kill").unlink()
    with safe_open(tmp_path / "parts.unfinished", "pt") as file:
        assert len(json.loads(file.metadata()["state"])["counts"]) == 4
    ran(tmp_path, 2, "filter", *words, "output=parts")
    logs = [journal.read(tmp_path / f"{name}.log.jsonl") for name in ("one", "two", "parts")]
    assert len(logs[0]) == 3 and logs[0] == logs[1] == logs[2]
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes() == (tmp_path / "parts").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lora"), [("sdar", False), ("llada", True), ("bert", False)])
def test_processes_do_not_change_a_drafter(name: str, lora: bool, tmp_path: Path) -> None:
    """One process; two with three rows a step; two that are killed in the third step of stage I and go on, under DDP
    and where they share the weights (FSDP2). The target learns in float32."""
    (tmp_path / "killer.py").write_text(KILLER)
    words = [f"model={tiny.write(name, tmp_path / 'm')}", f"data={ROOT / 'examples' / 'facts.jsonl'}", "device=cpu"]
    words += [
        "data.metric=killer:metric",
        "target_steps=4",
        "answers=8",
        "batch=3",
        "distill_steps=4",
        "refine_steps=4",
    ]
    words += ["new_tokens=8", "draft_length=4", "held_out=2", "separator='<unk>'", "checkpoint_every=1"]
    words += ["dtype=float64", "learning_rate=1e-3", *(["lora={r: 2, alpha: 4, dropout: 0}"] if lora else [])]
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 96}
    words += [f"shape.{key}={value}" for key, value in shape.items()]
    for output, processes in (("one", 1), ("two", 2)):
        assert ran(tmp_path, processes, "deer", *words, f"output={output}") == f"{output}/drafter\n"
    for output, more in (("ddp", "shard=false"), ("fsdp2", "shard=true")):
        (tmp_path / "kill").touch()
        assert torchrun(tmp_path, 2, "deer", *words, f"output={output}", more).returncode != 0
        (tmp_path / "kill").unlink()
        assert [line["step"] for line in journal.read(tmp_path / output / "distilled" / journal.FILE)] == [1, 2]
        ran(tmp_path, 2, "deer", *words, f"output={output}", more)
    names = ("one", "two", "ddp", "fsdp2")
    for stage in ("distilled", "drafter"):
        same(tmp_path, *(f"{run}/{stage}" for run in names))
    runs = [tmp_path / run for run in names]
    answers, losses, reports = (
        [json.loads((run / "answers.json").read_text()) for run in runs],
        [[line["loss"] for line in journal.read(run / "target" / journal.FILE)] for run in runs],
        [json.loads((run / "report.json").read_text())["decoding"]["temperature 0"] for run in runs],
    )
    assert len(losses[0]) == 4
    for run in (1, 2, 3):
        assert answers[run] == answers[0]
        assert losses[run] == pytest.approx(losses[0], rel=1e-5)
        assert [arm["rounds"] for arm in reports[run].values()] == [arm["rounds"] for arm in reports[0].values()]
    few = torchrun(tmp_path, 2, "deer", *words, "output=few", "batch=1")
    assert few.returncode != 0 and "train.batch=1 is less than the 2 processes" in " ".join(few.stderr.split())


def streamer(rank: int, store: str, processes: int) -> None:
    """One process of a sharded model, with more prompts than its neighbour, which has none in the end."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    try:
        sharded = toys.transformer()
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (processes,))
        for layer in sharded.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        options = {"scheduler": {"name": "threshold", "threshold": 0.5}, "stop": "none"}
        for prompts in (toys.PROMPTS[: (4, 1)[rank]], toys.PROMPTS[: (0, 2)[rank]], [[], [3, 4]][rank:]):
            for cache in ("none", "dual"):
                sampler = Sampler(toys.wrapped(sharded), cache=cache, **options)
                stream = sampler.generate_many(prompts, batch_size=2, max_new_tokens=8, on_error="yield")
                answers = [answer for answer in stream if answer.error is None]
                assert len(answers) == sum(bool(prompt) for prompt in prompts)
                plain = Sampler(toys.denoiser(), cache=cache, **options)
                for answer in answers:
                    alone = plain.generate([prompts[answer.index]], max_new_tokens=8, seed=answer.index)
                    assert torch.equal(answer.tokens, alone.tokens[0]) and answer.nfe == int(alone.nfe[0])
        with pytest.raises(UserError, match="ranks with shared weights"):
            Sampler(toys.wrapped(sharded), cache="dllm").generate_many(toys.PROMPTS, max_new_tokens=8)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_ranks_of_a_sharded_model_have_as_many_prompts_as_they_like(tmp_path: Path) -> None:
    spawn(streamer, (str(tmp_path / "store"), 2), nprocs=2)
