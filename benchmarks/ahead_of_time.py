"""Compiles every kernel for every kind of GPU, on a machine without one: `kernels.py --aot`.

The table has shared memory, registers of a thread, and what it spills to memory, in bytes. On AMD scalar registers may
go to vector ones, not to memory: "n s". Registers and spills are read from the binaries. Compiled kernels stay in
Triton's cache, where a later run finds them.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from dllm_sampler.errors import UserError, unknown
from dllm_sampler.host import files

if TYPE_CHECKING:
    from kernel_configurations import Configuration


class Target(NamedTuple):
    """A GPU as Triton names it, and the shared memory that one of its programs may have."""

    backend: str
    arch: int | str
    warp: int
    shared: int


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 * 1024),  # A100
    "sm_90": Target("cuda", 90, 32, 227 * 1024),  # H100, H200
    "sm_100": Target("cuda", 100, 32, 227 * 1024),  # B200
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024),  # MI300
}


@dataclass(frozen=True)
class Compiled:
    """One configuration on one target; None where it is not known."""

    kernel: str
    target: str
    shared: int | None = None  # bytes per program
    registers: int | None = None  # per thread
    spills: int | None = None  # bytes of memory per thread
    scalars: int = 0  # scalar registers that are kept in vector registers
    error: str | None = None

    def __str__(self) -> str:
        if self.error:
            return "failed"
        shared = "n/a" if self.shared is None else f"{self.shared / 1024:.1f} KB"
        registers = "n/a" if self.registers is None else f"{self.registers}"
        spills = "n/a" if self.spills is None else f"{self.spills} B" if self.spills else ""
        return ", ".join(filter(None, (shared, registers, spills, f"{self.scalars} s" if self.scalars else "")))


def configurations() -> Sequence[Configuration]:
    """Return every configuration."""
    from kernel_configurations import CONFIGURATIONS  # needs triton, which the caller may report as missing

    return CONFIGURATIONS


def compiled(place: int, target: str) -> Compiled:
    """Compile the configuration at a place of `configurations`; the result says what went wrong."""
    it = configurations()[place]
    try:
        binary = build(it, TARGETS[target])
    except Exception as error:  # the compiler's own errors have no common base
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Compiled(it.name, target, error=f"{type(error).__name__}: {' '.join(lines)[:500]}")
    shared, limit = binary.metadata.shared, TARGETS[target].shared
    error = None if shared <= limit else f"needs {shared} bytes of shared memory, a program may have {limit}"
    return Compiled(it.name, target, shared, *resources(binary.asm), error)


def source(it: Configuration) -> Any:
    """Return what Triton compiles for a launch whose pointers and strides are multiples of 16.

    An integer that is 1 becomes a constant in a launch: configurations of one row name it among theirs.
    """
    from triton.compiler import ASTSource

    signature, aligned = {}, {}
    for number, name in enumerate(it.kernel.arg_names):
        kind, _, multiple = it.signature[name].partition(":")
        signature[name] = kind
        if kind.startswith("*") or multiple or name.endswith("stride"):
            aligned[(number,)] = [["tt.divisibility", 16]]
    constants = {name: it.constants.get(name) for name, kind in signature.items() if kind == "constexpr"}
    return ASTSource(it.kernel, signature, constants, aligned)


def build(it: Configuration, target: Target) -> Any:
    """The binary of a configuration."""
    import triton
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": it.warps, "num_stages": it.stages, "enable_fp_fusion": True}
    return triton.compile(source(it), target=GPUTarget(target.backend, target.arch, target.warp), options=options)


def resources(asm: dict[str, Any]) -> tuple[int | None, int | None, int]:
    """Read a binary (NVIDIA) or assembly (AMD): registers of a thread, spills in bytes, scalars in vector registers."""
    if "amdgcn" in asm:
        names = ("vgpr_count", "private_segment_fixed_size", "sgpr_spill_count")
        found = [re.search(rf"\.{name}: +(\d+)", asm["amdgcn"]) for name in names]
    else:
        usage = _usage(asm["cubin"])
        found = [re.search(rf"\b{name}:(\d+)", usage) for name in ("REG", "STACK")] + [None]
    registers, spills, scalars = (one and int(one[1]) for one in found)
    return registers, spills, scalars or 0


def _usage(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, RuntimeError, subprocess.CalledProcessError):  # without the tool only the figures are missing
            return ""


def compile_all(jobs: list[tuple[int, str]], processes: int, console: Console) -> list[Compiled]:
    """Compile the jobs on a number of `processes`; the results have the order of the jobs."""
    found = []
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(compiled, *job) for job in jobs]
        for job, future in track(list(zip(jobs, futures, strict=True)), "compiling", console=console):
            try:
                found.append(future.result())
            except Exception as error:  # a compiler that crashes ends its process
                place, target = job
                found.append(Compiled(configurations()[place].name, target, error=f"the compiler crashed: {error}"))
    return found


def cells(found: list[Compiled]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table: a kernel per row, a target per column."""
    targets = list(dict.fromkeys(one.target for one in found))
    by_kernel: dict[str, dict[str, Compiled]] = {}
    for one in found:
        by_kernel.setdefault(one.kernel, {})[one.target] = one
    return ["kernel", *targets], [[name, *(str(row[target]) for target in targets)] for name, row in by_kernel.items()]


def check() -> str:
    """The version of triton.

    Raises:
        UserError: it cannot compile here.
    """
    if importlib.util.find_spec("triton") is None:
        raise UserError(
            "package-missing",
            "triton is not installed, and nothing can be compiled without it. Run pip install triton.",
        )
    from triton import __version__, knobs

    if knobs.runtime.interpret:
        raise UserError(
            "compile-unsupported", "TRITON_INTERPRET is set, so that kernels are interpreted, not compiled. Unset it."
        )
    return __version__


def report(targets: Sequence[str], words: Sequence[str], processes: int, file: Path | None) -> int:
    """Compile the kernels whose name contains one of `words` for each target; print the table, write it to `file`.

    Returns the exit status: 1 if a kernel does not compile or does not fit.

    Raises:
        UserError: a target or a name is unknown, or nothing can be compiled here.
    """
    for target in targets:
        if target not in TARGETS:
            raise unknown("target", target, TARGETS)
    version = check()
    chosen = [place for place, it in enumerate(configurations()) if any(word in it.name for word in words)]
    if not chosen:
        raise UserError("choice-unknown", f"No kernel's name contains {' or '.join(words)}. Change --only.")
    console = Console(width=max(Console().width, 120))
    jobs = [(place, target) for place in chosen for target in targets]
    found = compile_all(jobs, processes, Console(stderr=True))
    head, rows = cells(found)
    table = Table(*head, title=f"Triton {version}: shared memory of a program, registers of a thread, spills")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    failed = [one for one in found if one.error]
    for one in failed:
        console.print(f"{one.kernel} on {one.target}: {one.error}", style="red", highlight=False, markup=False)
    spilling = sum(bool(one.spills) for one in found)
    unread = sum(one.spills is None for one in found)
    said = f"{len(found)} compiled: {len(failed)} failed, {spilling} spill to memory"
    console.print(f"{said}, {unread} not known" if unread else said, highlight=False)
    if file:
        written = {"triton": version, "kernels": [asdict(one) for one in found]}
        files.write(file, json.dumps(written, indent=1) + "\n")
    return 1 if failed else 0
