"""Rollouts and trainers under DDP and FSDP2 over gloo, in one process and in two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from dllm_sampler import Sampler
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.training.trajectory import Trajectories
from tests import tiny, toys
from tests.refusals import refused
from tests.unit.test_training_runs import history

ROOT = Path(__file__).parents[2]


def sampled_and_scored(module: Any, prompts: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their log-probabilities, and the gradient of these."""
    sampler = Sampler(TransformerDenoiser(module, toys.MASK, toys.EOS), scheduler="random_order", temperature=1.0)
    before = torch.get_rng_state()
    trace = sampler.generate(prompts, max_new_tokens=12, samples=2, seed=4).trace
    assert torch.equal(torch.get_rng_state(), before)
    assert module.training and all(p.grad is None and p.requires_grad for p in module.parameters())
    (chunk,) = Trajectories(trace, sampler.denoiser.spec, after_eos=True).chunks(10**6)
    chunk.score(module)[0].sum().backward()
    grad = next(iter(module.parameters())).grad
    return trace.ids, trace.logprob, grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def joined(rank: int, store: str, processes: int) -> Any:
    """One process of a group, and a sharded toy."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    sharded = toys.transformer()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (processes,))
    for layer in sharded.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    return sharded


def worker(rank: int, store: str, processes: int) -> None:
    """One process, with its own prompts, so that the gradients are the means over processes."""
    sharded = joined(rank, store, processes)
    try:
        prompts = toys.PROMPTS[2 * rank : 2 * rank + 2]
        ids, logprob, own = sampled_and_scored(toys.transformer(), prompts)
        mean = own.clone()
        torch.distributed.all_reduce(mean)
        for module in (nn.parallel.DistributedDataParallel(toys.transformer()), sharded):
            found = sampled_and_scored(module, prompts)
            for one, other in zip((ids, logprob, mean / processes), found, strict=True):
                torch.testing.assert_close(other, one, atol=1e-10, rtol=1e-10)
    finally:
        torch.distributed.destroy_process_group()


def test_wrapped_modules_sample_and_score_as_they_are(tmp_path: Path) -> None:
    """Under DDP and FSDP2: the plain module's answers, its log-probabilities, and the gradients of these."""
    worker(0, str(tmp_path / "store"), 1)


def test_soft_inputs_of_a_sharded_table(tmp_path: Path) -> None:
    """The table is gathered while the model's forward runs, where mixtures are made."""
    sharded = joined(0, str(tmp_path / "store"), 1)
    try:
        for rule in ("dmax", "remix"):
            one, other = (
                Sampler(toys.wrapped(model), scheduler=rule, stop="none").generate(toys.PROMPTS, max_new_tokens=12)
                for model in (toys.transformer(), sharded)
            )
            assert torch.equal(one.tokens, other.tokens) and torch.equal(one.nfe, other.nfe)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_each_process_samples_and_gradients_are_averaged(tmp_path: Path) -> None:
    spawn(worker, (str(tmp_path / "store"), 2), nprocs=2)


def streamer(rank: int, store: str, processes: int) -> None:
    """One process of a sharded model, with more prompts than its neighbour, which has none in the end."""
    sharded = joined(rank, store, processes)
    try:
        for prompts in (toys.PROMPTS[: (4, 1)[rank]], toys.PROMPTS[: (0, 2)[rank]], [[], [3, 4]][rank:]):
            for cache, scheduler in (("none", "threshold"), ("dual", "threshold"), ("dual", "remix"), ("none", "dmax")):
                options = {"scheduler": {"name": scheduler, "threshold": 0.5}, "stop": "none"}
                sampler = Sampler(toys.wrapped(sharded), cache=cache, **options)
                stream = sampler.generate_many(prompts, batch_size=2, max_new_tokens=8, on_error="yield")
                answers = [answer for answer in stream if answer.error is None]
                assert len(answers) == sum(bool(prompt) for prompt in prompts)
                plain = Sampler(toys.denoiser(), cache=cache, **options)
                for answer in answers:
                    alone = plain.generate([prompts[answer.index]], max_new_tokens=8, seed=answer.index)
                    assert torch.equal(answer.tokens, alone.tokens[0]) and answer.nfe == int(alone.nfe[0])
        with refused("ranks-unsupported: cache=dllm"):
            Sampler(toys.wrapped(sharded), cache="dllm").generate_many(toys.PROMPTS, max_new_tokens=8)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_ranks_of_a_sharded_model_have_as_many_prompts_as_they_like(tmp_path: Path) -> None:
    spawn(streamer, (str(tmp_path / "store"), 2), nprocs=2)


# Trainers -------------------------------------------------------------------------------------------------------------

# accelerate spreads weights over GPUs alone. Here it takes the processes of gloo for such.
MODULE = """
import os, pathlib, sys
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
plain = AcceleratorState.__init__
def init(self, *given, **named):
    if named.get("fsdp_plugin") is not None and not AcceleratorState._shared_state:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plain(self, *given, **named)
AcceleratorState.__init__ = init
def letters(completion_ids, **_):
    if pathlib.Path("kill").exists() and pathlib.Path("parts/checkpoint-2").exists():
        os._exit(9)
    return [sum(ids) % 97 / 97 for ids in completion_ids]
if __name__ == "__main__":
    from dllm_sampler.training import cli
    sys.exit(cli.main())
"""
COMMON = [
    "max_steps=3", "held_out=4", "new_tokens=12", "dtype=float64", "learning_rate=1e-3", "warmup_steps=0",
    "eval_steps=3", "logging_steps=1", "save_steps=1", "use_cpu=true", "evaluation={}", "save_total_limit=9",
]  # fmt: skip
POLICY = ["num_generations=3", "rollout={temperature: 4.0}", "rewards={run:letters: 1}", "beta=0.1", "batch_tokens=96"]
POLICY += ["ref_model_sync_steps=1"]
TASKS = {
    "sft": ["padding=16", "average=0.5"],
    "cjgrpo": [*POLICY, "average=0.5"],
    "grpo": [*POLICY, "num_iterations=3", "save_steps=3"],
    "distill": ["prompts=8", "keep=false", "block_length=4", "teacher={}", "average=0.5"],
}
FSDP = ["fsdp=true", "fsdp_config={version: 2, state_dict_type: FULL_STATE_DICT}"]
LORA = ["lora={r: 2, lora_alpha: 4}"]


def run(folder: Path, launcher: list[str], task: str, output: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A run of a task by a launcher of processes."""
    (folder / "run.py").write_text(MODULE)
    common = COMMON if task != "filter" else ["use_cpu=true", "new_tokens=12", "logging_steps=1"]
    common = [word for word in common if task != "deer" or not word.startswith(("eval", "held_out"))]
    given = [f"train.{word}" for word in (*common, *words, f"data={tiny.FACTS}", f"output_dir={output}")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{folder}"}
    command = [sys.executable, *launcher, "-m", "run", f"train={task}", *given]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)


def torchrun(folder: Path, task: str, output: str, *words: str, size: int = 1) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = run(folder, launcher, task, output, *words, f"per_device_train_batch_size={size}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith(output) and done.stdout.count("\n") == 1


def same(folder: Path, first: str, *others: str) -> None:
    """All of these runs have the same losses, and end with the same weights."""
    logs = {name: history(folder / name)[:-1] for name in (first, *others)}
    weights = {name: load_file(folder / name / "model.safetensors") for name in logs}
    assert len(logs[first]) > 3 and any(line.get("grad_norm", 0) > 0 for line in logs[first])
    for name in others:
        for line, other in zip(logs[first], logs[name], strict=True):
            # Means over tokens of a process, whose mean over the processes is another one.
            shared = {key for key in line if key != "entropy" and not key.startswith("ratio")}
            figures = {key: line[key] for key in shared}
            assert figures == pytest.approx({key: other[key] for key in shared}, rel=1e-5, abs=1e-7), name
        for key, tensor in weights[first].items():
            torch.testing.assert_close(weights[name][key], tensor, atol=1e-6, rtol=1e-6, msg=f"{name} {key}")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_processes_do_not_change_a_loss(task: str, lora: bool, tmp_path: Path) -> None:
    """One process; two under DDP; two that share the weights (FSDP2), which then resume from a checkpoint."""
    words = [f"model={tiny.write('llada', tmp_path / 'm')}", *TASKS[task], *(LORA if lora else [])]
    done = run(tmp_path, [], task, "one", *words, "per_device_train_batch_size=2")
    assert done.returncode == 0, done.stderr[-3000:]
    torchrun(tmp_path, task, "ddp", *words)
    torchrun(tmp_path, task, "fsdp2", *words, *FSDP)
    same(tmp_path, "one", "ddp", "fsdp2")
    if task != "grpo":
        (tmp_path / "fsdp2" / "model.safetensors").unlink()
        for step in (2, 3):
            (tmp_path / "fsdp2" / f"checkpoint-{step}").rename(tmp_path / f"{step}")
        torchrun(tmp_path, task, "fsdp2", *words, *FSDP, "resume=true")
        same(tmp_path, "one", "fsdp2")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dream", "llada2-moe", "bert", "diffusion-gemma"])
def test_every_kind_of_model_in_two_processes(name: str, tmp_path: Path) -> None:
    words = [f"model={tiny.write(name, tmp_path / 'm')}", "padding=16", "new_tokens=20"]
    done = run(tmp_path, [], "sft", "one", *words, "per_device_train_batch_size=2")
    assert done.returncode == 0, done.stderr[-3000:]
    torchrun(tmp_path, "sft", "ddp", *words)
    torchrun(tmp_path, "sft", "fsdp2", *words, *FSDP)
    same(tmp_path, "one", "ddp", "fsdp2")


@pytest.mark.slow
def test_accelerate_launch(tmp_path: Path) -> None:
    """Two CPU processes; a killed run resumes to the losses of one that was not."""
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launcher += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    words = [f"model={tiny.write('llada', tmp_path / 'm')}", *TASKS["cjgrpo"], "per_device_train_batch_size=1"]
    whole = run(tmp_path, launcher, "cjgrpo", "whole", *words)
    assert whole.returncode == 0, whole.stderr[-3000:]
    assert whole.stdout == "whole\n"
    (tmp_path / "kill").touch()
    assert run(tmp_path, launcher, "cjgrpo", "parts", *words).returncode != 0
    (tmp_path / "kill").unlink()
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    parts = run(tmp_path, launcher, "cjgrpo", "parts", *words, "resume=true")
    assert parts.returncode == 0, parts.stderr[-3000:]
    same(tmp_path, "whole", "parts")


def close(one: Path, *others: Path) -> None:
    """These files have the same tensors."""
    tensors = load_file(one)
    for other in others:
        torch.testing.assert_close(load_file(other), tensors, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_processes_do_not_change_a_filter(tmp_path: Path) -> None:
    words = [f"model={tiny.write('llada', tmp_path / 'm')}", "prompts=18", "held_out=2", "block_length=4"]
    words += ["answer_batch_size=4", "max_steps=60"]
    assert run(tmp_path, [], "filter", "one", *words).returncode == 0
    torchrun(tmp_path, "filter", "two", *words)
    close(*(tmp_path / name / "filter.safetensors" for name in ("one", "two")))


@pytest.mark.slow
def test_processes_do_not_change_a_drafter(tmp_path: Path) -> None:
    model = tiny.write("llada", tmp_path / "m")
    words = [f"model={model}", f"target={tiny.target_of(model)}", "answers=8", "distill_steps=4", "refine_steps=4"]
    words += ["draft_length=4", "separator='<unk>'", "answer_batch_size=2"]
    done = run(tmp_path, [], "deer", "one", *words, "per_device_train_batch_size=2")
    assert done.returncode == 0, done.stderr[-3000:]
    torchrun(tmp_path, "deer", "ddp", *words)
    torchrun(tmp_path, "deer", "fsdp2", *words, *FSDP)
    runs = [tmp_path / name for name in ("one", "ddp", "fsdp2")]
    for stage in ("distilled", "drafter"):
        close(*(folder / stage / "model.safetensors" for folder in runs))
