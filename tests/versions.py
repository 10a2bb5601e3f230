"""The environments in which `tests/environments.py` runs the tests: versions, interpreters, what pip is told.

The package uses the inside of other libraries, which a release may change without notice. If a new one breaks
something, look here first:

- transformers, the cache: its keyword, `Cache.update(keys, values, layer, ...)`, a cache without layers. In
  `models/huggingface.py` (`cache_keyword`) and `models/autoregressive.py`
- transformers, DiffusionGemma: `model.decoder`, `model.encoder.language_model`, their dicts of masks,
  `cache.layers[i].keys`, `final_logit_softcapping`. In `models/diffusion_gemma.py` and `models/uniform.py`
- transformers, others: `MODEL_FOR_MASKED_LM_MAPPING_NAMES`, `set_experts_implementation`, `bytes_to_unicode`, the
  config classes' `sub_configs`. In `models/huggingface.py`, `integrations/forms.py` and `guides/forms/tokens.py`
- transformers, trainers: `Trainer._save`, `_push_from_checkpoint`, `_get_train_sampler`. In `training/trainer.py` and
  `training/grpo.py`
- torch: `torch._C` (`DispatchKey`), `torch._dynamo` (`config.recompile_limit`), `torch._foreach_copy_`,
  `torch.utils._python_dispatch`, `torch._C._cuda_endAllocateToPool`, `_cuda_releasePool`. In `models/compiled.py`,
  `engine/buffers.py`, `check/reads.py` and `engine/capture.py`
- trl: `rollout_func`. In `examples/trl_grpo.py`
- diffusers and SGLang: the protocols of pipelines and schedulers. In `integrations/`
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINNED = ("torch", "triton", "numpy", "transformers", "torchao")


@dataclass(frozen=True)
class Environment:
    """An interpreter, and versions that pip is told. An empty version is the newest that pip finds.

    rest: the other packages: "oldest" that pyproject.toml allows, those of "constraints.txt", or the "newest" that fit
    without: packages of pyproject.toml that are left out
    """

    name: str
    python: str
    torch: str = ""
    triton: str = ""
    numpy: str = ""
    transformers: str = ""
    torchao: str = ""
    rest: str = "newest"
    without: tuple[str, ...] = ()


ENVIRONMENTS = [
    # diffusers 0.42 asks for a newer huggingface-hub and safetensors than the package does, trl 1.16 for newer datasets
    Environment("py3.11-oldest", "3.11", "2.8.0", "3.4.0", "2.0.0", "5.0.0", "0.16.0", "oldest", ("diffusers", "trl")),
    Environment("py3.11-tested", "3.11", "2.13.0", "3.7.1", "2.4.6", "5.23.0", "0.18.0", "constraints.txt"),
    Environment(
        "py3.12-torch2.9", "3.12", "2.9.1", "3.5.1", "2.2.6", "5.5.4", "0.17.0"
    ),  # torchao 0.18 needs torch 2.10
    Environment("py3.12-torch2.10", "3.12", "2.10.0", "3.6.0", "2.3.5", "5.10.4", "0.18.0"),
    Environment("py3.12-torch2.11", "3.12", "2.11.0", "3.6.0", "2.5.0", "5.17.0", "0.18.0"),
    Environment("py3.13-torch2.8", "3.13", "2.8.0", "3.4.0", "2.1.3", "5.0.0", "0.17.0"),
    Environment("py3.13-torch2.12", "3.13", "2.12.1", "3.7.1", "2.4.6", "5.20.2", "0.18.0"),
    Environment("py3.13-torch2.13", "3.13", "2.13.0", "3.7.1", "2.5.5", "5.23.0", "0.18.0"),
    Environment("py3.11-newest", "3.11"),
]


def interpreter(version: str) -> str | None:
    """A Python of this version that runs, and can make environments; None: there is none."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for path in (shutil.which(name), *map(str, sorted(pyenv.glob(f"{version}.*/bin/{name}")))):
        with suppress(OSError):  # pyenv puts names on the PATH that run nothing
            if path and not subprocess.run([path, "-c", "import ensurepip, venv"], capture_output=True).returncode:
                return path
    return None


def requirements(it: Environment) -> tuple[list[str], list[str]]:
    """What pip is to install besides the package, and the versions it is held to."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    every = project["dependencies"] + project["optional-dependencies"]["test"]
    wanted = [one for one in every if not one.startswith(it.without)]
    pins = [f"{name}=={version}" for name in PINNED if (version := getattr(it, name))]
    lines = []
    if it.rest == "oldest":
        lines = [re.sub(r"\[.*\]", "", one).replace(">=", "==") for one in wanted]
    elif it.rest != "newest":
        lines = (ROOT / it.rest).read_text().splitlines()
    return wanted, pins + [one for one in lines if not re.match(rf"({'|'.join(PINNED)})=", one)]
