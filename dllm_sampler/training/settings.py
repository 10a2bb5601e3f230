"""Checks of the numbers that trainers have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dllm_sampler.core.checks import check_count, check_number, check_positive, check_share
from dllm_sampler.errors import UserError, unknown
from dllm_sampler.models.mini_tasks import LESSONS
from dllm_sampler.options import SamplerOptions
from dllm_sampler.training import adapters, journal

# The steps of a run are seeded with seed * 2**32 + step, in 64 bits.
LARGEST_SEED, LARGEST_STEP = 2**31 - 1, 2**32 - 1
LEAST = {"steps": 1, "checkpoint_every": 1, "new_tokens": 1, "warmup": 0, "batch_size": 1, "batch_tokens": 1}
LEAST |= {"evaluate_every": 1, "held_out": 1}
WORDS = {
    "schedule": ("constant", "cosine"),
    "precision": ("no", "bf16"),
    "dtype": ("float32", "float64", "bfloat16"),
}
LLAMA = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip
SAMPLERS = {"evaluation", "rollout", "teacher"}  # settings of a sampler
SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_positions")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse numbers with which no optimizer can train, wherever a trainer has them.

    Args:
        settings: the fields of a trainer; those that it lacks are not looked at.

    Raises:
        UserError: the first such number, by its name.
    """
    for name, value in settings.items():
        field = f"train.{name}"
        if name in ("learning_rate", "clip"):
            check_positive(field, value)
        elif name in ("weight_decay", "init_std", "embedding_std"):
            check_number(field, value, finite=True)
        elif name == "warmup":
            check_count(field, value, 0)
        elif name == "decay":
            check_share(field, value)
        elif name == "average" and not 0 <= value < 1:
            raise UserError("option-range", f"{field} must be from 0 to below 1, not {value}")
        elif name == "betas" and not all(0 <= beta < 1 for beta in value):
            raise UserError("option-range", f"{field} must be two numbers from 0 to below 1, not {list(value)}")
        elif name == "steps" and value > LARGEST_STEP:
            raise UserError("option-range", f"{field} must be a whole number up to {LARGEST_STEP}, not {value}")
        elif name == "seed" and abs(value) > LARGEST_SEED:
            raise UserError("option-range", f"{field} must be a whole number up to {LARGEST_SEED}, not {value}")


def check_run(settings: Mapping[str, Any]) -> None:
    """Refuse settings with which no model that exists can be trained further.

    Args:
        settings: the fields of a `FineTuner`.

    Raises:
        UserError: the first such field, by its name.
    """
    for name, least in LEAST.items():
        if settings[name] is not None and settings[name] < least:  # None of what may be null
            raise UserError("option-range", f"train.{name} must be at least {least}, not {settings[name]}")
    check_settings(settings)
    check_model(settings)


def check_model(settings: Mapping[str, Any]) -> None:
    """Refuse what cannot be said of a model that exists and learns, of its tasks, and of the log.

    Args:
        settings: the fields of a trainer; those that it lacks are not looked at.

    Raises:
        UserError: the first such field, by its name.
    """
    for name, choices in WORDS.items():
        if name in settings and settings[name] not in choices:
            raise unknown(f"train.{name}", settings[name], choices)
    if settings["dtype"] == "bfloat16" and settings["lora"] is None:
        raise UserError(
            "options-conflict",
            "train.dtype=bfloat16 is for train.lora: all weights learn in float32, which bfloat16 would round to where"
            " they were; train.precision=bf16 computes in bfloat16",
        )
    for task, share in settings["tasks"].items():
        if task not in LESSONS:
            raise unknown("task", task, LESSONS)
        check_number(f"train.tasks.{task}", share, "a share", finite=True)
    if settings["tasks"] and not any(settings["tasks"].values()):
        raise UserError("option-range", "train.tasks has no share above 0. Write {copy: 1}.")
    for name in SAMPLERS & settings.keys():
        for option in settings[name]:
            if option not in SamplerOptions.__annotations__:
                raise unknown(f"field of train.{name}", option, SamplerOptions.__annotations__)
    adapters.check(settings["lora"])
    journal.check(settings["tracker"])


def check_llama(shape: Mapping[str, Any]) -> None:
    """Refuse sizes of a Llama to be trained that are missing, are no sizes or do not go together.

    Raises:
        UserError: the first such size, by its name.
    """
    for name in LLAMA:
        if name not in shape:
            raise UserError("option-missing", f"train.shape needs {', '.join(LLAMA)}, and {name} is missing")
        check_count(f"train.shape.{name}", shape[name])
    for name, parts in (("hidden_size", "num_attention_heads"), ("num_attention_heads", "num_key_value_heads")):
        if shape[name] % shape[parts]:
            raise UserError(
                "option-range", f"train.shape.{name}={shape[name]} is not a multiple of {parts}={shape[parts]}"
            )


def check_shape(shape: Mapping[str, Any]) -> None:
    """Refuse sizes of a network to be trained that are no sizes.

    Raises:
        UserError: the first such size, by its name.
    """
    for name in SIZES:
        if name in shape:
            check_count(f"train.model.{name}", shape[name])
    for name in ("rope_theta", "norm_eps"):
        if name in shape:
            check_positive(f"train.model.{name}", shape[name])
    heads, keys, dim = (shape.get(name) for name in ("num_heads", "num_kv_heads", "head_dim"))
    if heads and keys and heads % keys:
        raise UserError("option-range", f"train.model.num_heads={heads} is not a multiple of num_kv_heads={keys}")
    if dim and dim % 2:
        raise UserError("option-range", f"train.model.head_dim must be even, not {dim}")
