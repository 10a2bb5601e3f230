"""Kernels and their torch references: one signature, the choice of a backend, and compiling without a GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from packaging.version import Version

from dllm_sampler.kernels import backend
from dllm_sampler.kernels.backend import TORCH, select
from dllm_sampler.kernels.sampling import GREEDY, Sampling
from tests.refusals import refused
from tests.sampling import each

# Choosing a backend, and compiling kernels for GPUs that are not here


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def amd() -> str:
    """A GPU of AMD's that can be compiled for; before Triton 3.5 that takes ROCm's linker, and this is NVIDIA's."""
    return "sm_80" if Version(importlib.metadata.version("triton")) < Version("3.5") else "gfx942"


@each("name", ["auto", "torch"])
def test_a_cpu_needs_no_warning(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select(name, CPU, torch.float64) is TORCH


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs on a CPU")
@each(
    ("device", "dtype", "why"),
    [
        (CPU, torch.float32, "device is cpu"),
        (torch.device("cuda"), torch.float64, "not float64"),
        (torch.device("meta"), torch.bfloat16, "device is meta"),
    ],
)
def test_what_cannot_run_is_said_once(device: torch.device, dtype: torch.dtype, why: str) -> None:
    pytest.importorskip("triton")
    with pytest.warns(RuntimeWarning, match=why):
        assert select("triton", device, dtype) is TORCH
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select("triton", device, dtype) is TORCH


@each(("device", "dtype"), [("cuda", torch.float64), ("mps", torch.bfloat16), ("cpu", torch.float32)])
def test_auto_takes_torch_where_no_kernel_is_meant_to_run(device: str, dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select("auto", torch.device(device), dtype) is TORCH


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.warns(RuntimeWarning, match="triton is not installed"):
        assert select("auto", torch.device("cuda"), torch.bfloat16) is TORCH


@pytest.mark.skipif(INTERPRETED, reason="the interpreter needs no capability")
def test_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "7.5" in str(backend.obstacle(torch.device("cuda"), torch.float16))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(backend, "driver", lambda: None)
    assert backend.obstacle(torch.device("cuda"), torch.float16) is None
    assert select("auto", torch.device("cuda"), torch.float16).name == "triton"


@pytest.mark.skipif(INTERPRETED, reason="the interpreter needs no driver")
def test_a_driver_that_does_not_start(monkeypatch: pytest.MonkeyPatch, drive: Callable[[object], None]) -> None:
    """As where there is no C compiler, and here, where triton finds no GPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    backend.driver.cache_clear()
    failing = types.SimpleNamespace(get_current_target=lambda: (_ for _ in ()).throw(RuntimeError("no C compiler\n")))
    drive(failing)
    with pytest.warns(RuntimeWarning, match="driver does not start: no C compiler"):
        assert select("auto", torch.device("cuda"), torch.float16) is TORCH
    backend.driver.cache_clear()


def test_an_unknown_backend() -> None:
    with refused("choice-unknown: 'cuda'"):
        select("cuda", CPU, torch.float32)


def failures() -> list[Exception]:
    errors = pytest.importorskip("triton.runtime.errors")
    return [
        errors.OutOfResources(1, 0, "shared memory"),
        errors.PTXASError("no such instruction"),
        RuntimeError("PassManager::run failed"),
        RuntimeError("AMD LLVM 1234: no such register"),
        RuntimeError("Triton Error [CUDA]: invalid argument"),
        subprocess.CalledProcessError(1, ["gcc"]),
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
    ]


@each("which", range(7))
def test_a_kernel_that_does_not_launch_is_replaced_for_good(which: int) -> None:
    calls = []

    def fused(value: torch.Tensor, sampling: Sampling = GREEDY) -> torch.Tensor:
        calls.append(value.numel())
        if len(value) == 1:
            raise failures()[which]
        return value

    call = backend.guarded(fused, lambda value, sampling=GREEDY: -value)
    one, many = torch.ones(1, 3), torch.ones(2, 3)
    with pytest.warns(RuntimeWarning, match="fused cannot run "):
        assert torch.equal(call(one, Sampling(3, 0.5)), -one)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(call(one, Sampling(3, 0.7)), -one)  # the same kernel, which is not tried again
        assert torch.equal(call(one, Sampling(4, 0.5)), -one)  # others
        assert torch.equal(call(many, Sampling(3, 0.5)), many)
    assert calls == [3, 3, 6]


@each(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        torch.AcceleratorError("CUDA error: device-side assert triggered", 710),
        torch.OutOfMemoryError("CUDA out of memory"),
        AssertionError("neither fresh keys nor stored ones"),
    ],
)
def test_an_error_that_torch_would_meet_too_is_raised(error: Exception) -> None:
    pytest.importorskip("triton")

    def fused(value: int) -> int:
        raise error

    with pytest.raises(type(error)):
        backend.guarded(fused, lambda value: -value)(3)


def test_nothing_is_replaced_inside_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(value: int) -> int:
        raise failures()[0]

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(type(failures()[0])):
        backend.guarded(fused, lambda value: -value)(3)


FAMILIES = (
    "attention LLaDA-8B bf16 Dh=128 queries=16 stored until split", "head bf16 V=126464 16 rows greedy",
    "linear int8 bf16 4608 x 3584 32 rows", "norm bf16 D=3584 add", "qkv_rope SDAR-8B bf16 slots",
    "readout bf16 V=126464 greedy one row", "swiglu bf16",
)  # fmt: skip


def ahead_of_time(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("ahead_of_time")


def test_configurations_are_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are unique, and every argument of the kernel is described once."""
    found = ahead_of_time(monkeypatch).configurations()
    assert len({it.name for it in found}) == len(found)
    for it in found:
        assert list(it.signature) == list(it.kernel.arg_names)
        assert {name for name, kind in it.signature.items() if kind == "constexpr"} == set(it.constants)


def command(
    tmp_path: Path, *arguments: str, timeout: float = 300, environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, BENCHMARKS / "kernels.py", "--aot", *arguments],
        env={**clean, "TRITON_CACHE_DIR": str(tmp_path / "cache"), **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.slow
def test_kernels_compile_for_every_target(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    report = tmp_path / "report.json"
    run = command(tmp_path, *(f"--only={name}" for name in FAMILIES), "--json", str(report))
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(report.read_text())["kernels"]
    assert {one["kernel"] for one in found} == set(FAMILIES) and len(found) == 4 * len(FAMILIES)
    assert {one["target"] for one in found} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert all(one["registers"] >= 8 and one["spills"] == 0 for one in found)
    assert all(0 < one["shared"] <= 64 * 1024 for one in found if one["kernel"].startswith("head"))
    assert "head bf16" in run.stdout


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
def test_kernels_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One family; `test_kernels_compile_for_every_target` has the others."""
    report = ahead_of_time(monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    places = [it.name for it in report.configurations()]
    for number, name in enumerate(FAMILIES[-1:]):  # the others take seconds each
        found = report.compiled(places.index(name), ("sm_90", amd())[number % 2])
        assert found.error is None and found.spills == 0, name
        assert found.registers is not None and found.registers >= 8


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    run = command(tmp_path, "--target", "sm_90", timeout=1200)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 failed, 0 spill to memory\n" in run.stdout


@pytest.mark.slow
def test_an_interpreter_cannot_compile(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    run = command(tmp_path, environment={"TRITON_INTERPRET": "1"})
    assert run.returncode == 2
    assert "TRITON_INTERPRET is set" in run.stderr and run.stderr.count("\n") == 1


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
@each(
    ("arguments", "sentence"),
    [
        (("--target", "sm_9"), "Did you mean 'sm_90'"),
        (("--only", "nothing"), "name contains nothing"),
        (("--json", "tests"), "tests cannot be written: it is not a file"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(BENCHMARKS)
    assert importlib.import_module("kernels").main(["--aot", *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
def test_what_fails_fails_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel that needs too much shared memory, and one that is no kernel for such arguments."""
    report = ahead_of_time(monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    fits = next(it for it in report.configurations() if it.name == "head bf16 V=126464 16 rows greedy")
    wrong = replace(fits, name="wrong", constants={**fits.constants, "BLOCK_V": 100})
    monkeypatch.setattr(report, "configurations", lambda: [replace(fits, name="large"), wrong])
    target = amd()
    monkeypatch.setitem(report.TARGETS, target, report.TARGETS[target]._replace(shared=1024))
    found = [report.compiled(place, target) for place in (0, 1)]
    assert "a program may have 1024" in str(found[0].error)
    assert found[1].error and "\n" not in found[1].error
    monkeypatch.setattr(report, "compile_all", lambda *_: found)
    assert report.report([target], [""], 1, None) == 1
    said = capsys.readouterr().out
    assert f"large on {target}: needs" in said and "2 compiled: 2 failed, 0 spill to memory, 1 not known" in said


def test_resources_that_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    report = ahead_of_time(monkeypatch)
    Compiled, resources = report.Compiled, report.resources
    assert resources({"amdgcn": "nothing"}) == (None, None, 0)
    spills = ".private_segment_fixed_size: 16\n .sgpr_spill_count: 4\n .vgpr_count: 30\n .vgpr_spill_count: 3\n"
    assert resources({"amdgcn": spills}) == (30, 16, 4)
    assert str(Compiled("k", "sm_80", 1536)) == "1.5 KB, n/a, n/a"
    assert str(Compiled("k", "sm_80", 1536, 40, 0)) == "1.5 KB, 40"
    assert str(Compiled("k", "gfx942", 1536, 40, 16, 4)) == "1.5 KB, 40, 16 B, 4 s"


# A kernel and its torch reference are called in the same way: one can always take the other's place


def pairs() -> dict[str, tuple[Any, Any]]:
    """Every kernel of the Triton backend with the function that `backend.guarded` falls back on."""
    found: dict[str, tuple[Any, Any]] = {}

    def note(fused: Any, plain: Any) -> Any:
        found[fused.__qualname__] = fused, plain
        return fused

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "guarded", note)
        backend._triton.__wrapped__()
    return found


PAIRS = pairs()


def test_every_kernel_is_among_them() -> None:
    named = [one.name for one in fields(backend.LayerKernels)]
    assert len(PAIRS) == len(named) + len(("readout", "head"))


@each("name", PAIRS)
def test_signatures_are_equal(name: str) -> None:
    fused, plain = PAIRS[name]
    taken, known = ([*signature(one).parameters.values()] for one in (fused, plain))
    assert known[: len(taken)] == taken
    assert [one.name for one in known[len(taken) :]] == ["unseen"] * (name == "packed_attention"), "kernels know none"
    assert signature(fused).return_annotation == signature(plain).return_annotation
