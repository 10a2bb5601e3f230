"""The kernels that a generation runs on: Triton's, or their references in torch."""

import importlib.util
import subprocess
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache, wraps
from types import NoneType
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from dllm_sampler.core.checks import check_choice
from dllm_sampler.core.values import Readout
from dllm_sampler.errors import FallbackWarning, first_line
from dllm_sampler.kernels import reference
from dllm_sampler.kernels.sampling import Sampling

Function = TypeVar("Function", bound=Callable[..., Any])
Choice = Literal["auto", "triton", "torch"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Words in errors of the device, which torch would raise as well.
LOST = ("illegal", "misaligned", "out of memory", "launch failure", "device-side assert", "timed out", "ECC")
CAPABILITY = (8, 0)  # least compute capability. Older GPUs have no bfloat16


@dataclass(frozen=True)
class LayerKernels:
    """Kernels of a transformer layer, from the modules `attention`, `linear`, `norm`, `rope` and `swiglu`."""

    attention: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    norm: Callable[..., tuple[Tensor, Tensor]]
    qkv_rope: Callable[..., Any]
    swiglu: Callable[..., Tensor]


@dataclass(frozen=True)
class Backend:
    """The kernels of one implementation. `readout` and `head` have the signatures of those in `kernels.reference`."""

    name: Literal["triton", "torch"]
    readout: Callable[..., Readout]
    head: Callable[..., Readout]
    layer: LayerKernels | None = None  # None: the modules of a layer compute it


TORCH = Backend("torch", reference.readout, reference.head)


def select(backend: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """Return the kernels for logits or weights of `dtype` on `device`.

    If Triton's kernels cannot run, torch's replace them, and one warning gives the reason. The same holds for a single
    kernel that later fails to compile or to launch.

    Args:
        backend: `torch`, `triton` or `auto`. `auto` means Triton's on a GPU of NVIDIA or AMD with a dtype of `DTYPES`,
            and torch's otherwise.

    Raises:
        UserError: `backend` is unknown.
    """
    check_choice("backend", backend, Choice)
    if backend == "torch" or (backend == "auto" and (device.type != "cuda" or dtype not in DTYPES)):
        return TORCH
    why = obstacle(device, dtype)
    if why is None:
        return _triton()
    warn(f"Triton kernels cannot run here ({why}). torch replaces them.")
    return TORCH


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason that Triton's kernels cannot run, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if dtype not in DTYPES:
        return f"they are written for bfloat16, float16 and float32, not {str(dtype).removeprefix('torch.')}"
    from triton import knobs

    if knobs.runtime.interpret:
        return None  # on the CPU too, slowly
    if device.type != "cuda":
        return f"the device is {device.type}, not a GPU of NVIDIA or AMD"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < CAPABILITY:
        has, needed = (".".join(map(str, version)) for version in (capability, CAPABILITY))
        return f"the GPU has compute capability {has}, and they need {needed}"
    return driver()


@cache
def driver() -> str | None:
    """Return the reason that Triton finds no GPU or cannot launch anything on it, or None if it can."""
    from triton.runtime import driver as runtime

    try:
        runtime.active.get_current_target()
    except Exception as error:  # it compiles a C module first, which can raise anything
        return f"triton's driver does not start: {first_line(error)}"
    return None


@cache
def warn(sentence: str) -> None:
    """Warn once per process."""
    warnings.warn(sentence, FallbackWarning, stacklevel=3)


@cache
def _triton() -> Backend:
    from dllm_sampler.kernels import attention, head, linear, norm, readout, rope, swiglu

    return Backend(
        "triton",
        guarded(readout.readout, reference.readout),
        guarded(head.head, reference.head),
        LayerKernels(
            guarded(attention.packed_attention, reference.attention),
            guarded(linear.linear, linear.linear_reference),
            guarded(norm.norm, norm.norm_reference),
            guarded(rope.qkv_rope, rope.qkv_rope_reference),
            guarded(swiglu.swiglu, swiglu.swiglu_reference),
        ),
    )


def forget() -> None:
    """Reset the warnings that were given and the kernels that failed, so that both are tried again."""
    for kept in (warn, driver, _triton):
        kept.cache_clear()


def guarded(fused: Function, plain: Function) -> Function:
    """Return a function that calls `fused`, or `plain` for arguments `alike` to those with which `fused` has failed."""
    failed: set[Hashable] = set()

    @wraps(fused)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not failed or alike((args, kwargs)) not in failed:
            try:
                return fused(*args, **kwargs)
            except Exception as error:  # compiler and launcher raise many kinds; the others are raised again
                if not replaceable(error):
                    raise
                failed.add(alike((args, kwargs)))
                warn(f"The Triton kernel {fused.__name__} cannot run ({first_line(error)}). torch replaces it.")
        return plain(*args, **kwargs)

    return cast(Function, call)


def alike(value: Any) -> Hashable:
    """Return a key that is equal for arguments of one compiled kernel: types, and sizes up to a power of two."""
    if isinstance(value, Tensor):
        return value.dtype, tuple((size - 1).bit_length() for size in value.shape)
    if isinstance(value, dict):
        return tuple((name, alike(item)) for name, item in value.items())
    if isinstance(value, tuple):
        return tuple(alike(item) for item in value)
    if isinstance(value, Sampling):
        return alike(vars(value))
    return value if isinstance(value, (bool, int, NoneType)) else type(value)


def replaceable(error: Exception) -> bool:
    """Return True if torch can replace the failed kernel: the device works, and no CUDA graph is being captured."""
    from triton.errors import TritonError

    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return False
    if isinstance(error, (TritonError, subprocess.CalledProcessError)):  # the latter: the C compiler, for a launcher
        return True
    said = str(error)
    if type(error) is not RuntimeError or any(word in said for word in LOST):
        return False
    return said.startswith(("PassManager::run failed", "Triton Error [", "AMD LLVM", "Failed to find C compiler"))


def has_hooks(module: nn.Module) -> bool:
    """Return True if a call of the module does more than its class's `forward`, for example offloading or sharding."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)
