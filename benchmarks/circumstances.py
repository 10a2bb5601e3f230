"""Circumstances of a figure besides the code, and failures of measurements."""

from __future__ import annotations

import json
import os
import platform
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table

import dllm_sampler
from dllm_sampler.errors import FallbackWarning, first_line
from dllm_sampler.host import files
from dllm_sampler.kernels.backend import forget

Value = TypeVar("Value")


def circumstances(**more: object) -> dict[str, object]:
    """Versions, machine and threads, and what else there is to say."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "not installed"
    return {
        "dllm_sampler": dllm_sampler.__version__,
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "not measured: no GPU",
        "threads": torch.get_num_threads(),
    } | more


def show(console: Console, about: dict[str, object]) -> None:
    """A line for each."""
    console.print(*(f"{key}: {value}" for key, value in about.items()), sep="\n", highlight=False)


def save(file: Path | None, about: dict[str, object], **measured: object) -> None:
    """Write what was measured, and under which circumstances, as JSON; without a file nothing is written."""
    if file:
        files.write(file, json.dumps({"about": about} | measured, indent=1))


def report(
    about: dict[str, object], table: Table, rows: list[dict[str, Any]], file: Path | None, width: int = 120
) -> None:
    """Print what was measured and under which circumstances; write both to `file`, if there is one."""
    console = Console(width=width)
    show(console, about)
    console.print(table)
    save(file, about, rows=rows)


def attempt(run: Callable[[], Value]) -> tuple[Value | None, str]:
    """Return the result of `run`, and a note if it failed or a kernel fell back to torch."""
    forget()
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always", FallbackWarning)
        try:
            found, failed = run(), []
        except Exception as error:  # CUDA's, a compiler's, the allocator's: the next line is measured all the same
            found, failed = None, [f"failed: {type(error).__name__}: {first_line(error)}"]
    fell = [str(one.message) for one in met if issubclass(one.category, FallbackWarning)]
    return found, "; ".join(failed + fell)
