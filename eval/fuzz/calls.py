"""Calls of the Python interface with wrong arguments."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import numpy as np
import torch

from dllm_sampler.errors import UserError
from dllm_sampler.eval.fuzz import models
from dllm_sampler.eval.fuzz.harness import PASSED, Case, Outcome, sentence
from dllm_sampler.eval.testbeds import toys
from dllm_sampler.prompts import Infill
from dllm_sampler.sampler import Sampler

# Expressions, so that a case can be saved and read.
NO_COUNT = ("0", "-1", "1.5", "'x'", "True", "[]", "float('nan')", "b'3'", "object()", "{}", "torch.tensor(1.5)")
NO_REAL = ("-1", "'x'", "True", "[]", "float('nan')", "float('inf')", "object()", "1j", "b'1'")
NO_NAME = ("'nothing'", "''", "3", "True", "[]", "{}", "{'name': 'threshold', 'no': 1}", "object()", "b'none'")
NO_TRUTH = ("'x'", "3", "None", "[]")
NO_PROMPT = (
    "None", "3", "[]", "[[]]", "[['a']]", "[[1.5]]", "[[-1]]", "[[10**9]]", "[[True]]", "b'abc'", "[b'abc']", "{}",
    "[None]", "[{'role': 'user'}]", "[[{'role': 1, 'content': 2}]]", "torch.ones(2, 2)", "torch.ones(1, 1, 1).long()",
    "object()", "[[1]] * 2 + ['']", "{1, 2}", "range(0)", "np.ones(3)",
    "Infill('a', None)", "Infill([], [1])", "Infill('{gap:x}')", "Infill(3)",
)  # fmt: skip
WRONG: dict[str, dict[str, tuple[str, ...]]] = {
    "Sampler": {
        "scheduler": NO_NAME, "cache": NO_NAME, "blocks": NO_NAME, "stop": NO_NAME,
        "guide": ("'nothing'", "3", "[3]", "{'name': 'top_k', 'k': 'x'}", "{'name': 'top_k', 'k': -1}", "object()"),
        "temperature": NO_REAL, "top_k": NO_COUNT, "top_p": (*NO_REAL, "0", "1.5"), "max_steps": NO_COUNT,
        "poll_every": (*NO_COUNT, "None"), "backend": ("'x'", "3", "None", "True"), "compile": ("'x'", "3", "None"),
        "cuda_graph": ("'x'", "3", "None", "True"), "compat": NO_TRUTH, "entropy": NO_TRUTH, "noise": ("3", "'x'"),
        "tokenizer": ("3", "'x'", "object()"),
    },
    "generate": {
        "prompts": NO_PROMPT, "max_new_tokens": (*NO_COUNT, "None", "10**30"), "block_length": NO_COUNT,
        "samples": (*NO_COUNT, "None"), "seed": ("'x'", "1.5", "None", "[]", "[1, 2, 3]", "True", "10**30", "{}"),
        "stop_strings": ("3", "[3]", "None", "['']", "b'x'", "{}"), "prefix": ("3", "[-1]", "[10**9]", "{}", "b'x'"),
        "suffix": ("3", "[-1]", "[1] * 99", "{}"), "pinned": ("'x'", "[-2, 1]", "[[1]] * 9", "3", "[1.5] * 8"),
        "forms": ("'x'", "1", "[0, 0, 0]", "1.5"), "progress": ("3", "'x'"), "temperature": NO_REAL,
    },
    "generate_many": {
        "prompts": ("None", "3", "'x'", "b'abc'", "{}", "[[1], [-1]]", "[3]", "[[]]"),
        "batch_size": (*NO_COUNT, "None"), "max_new_tokens": (*NO_COUNT, "None", "[1, 2, 3]"),
        "samples": (*NO_COUNT, "None"), "seed": ("'x'", "1.5", "None", "[1, 2, 3]", "True", "10**30"),
        "order": NO_NAME, "on_error": NO_NAME, "batching": NO_NAME, "max_length": (*NO_COUNT, "2"),
        "progress": ("3",), "stop_strings": ("3", "[3]"),
    },
    "infill": {"texts": ("3", "None", "[]", "['a']", "'{gap:-1}a'", "'{gap:10000000000}a'", "'a {gap'", "[3]")},
    "refine": {
        "answers": ("3", "None", "'x'", "[]", "[['a']]"),
        "span": ("3", "None", "(2, 1)", "(0, 99)", "('a', 'b')"),
    },
}  # fmt: skip
RIGHT: dict[str, dict[str, str]] = {
    "Sampler": {},
    "generate": {"prompts": "[[5, 11], [7]]", "max_new_tokens": "8"},
    "generate_many": {"prompts": "[[5, 11], [7]]", "max_new_tokens": "8"},
    "infill": {"texts": "'a{gap:3}b'"},
    "refine": {"answers": "[[5, 6, 7]]", "span": "(0, 2)"},
}


def draw(random: Random) -> Case:
    """A call with one wrong argument, or two."""
    call = random.choice([*WRONG])
    chosen = random.sample([*WRONG[call]], random.choice([1, 1, 1, 2]) if len(WRONG[call]) > 1 else 1)
    given = {name: random.choice(WRONG[call][name]) for name in chosen}
    family = random.choice(["llada", "llada", "causal", "bert"])
    return {"command": "call", "call": call, "given": given, "family": family}


def check(case: Case) -> Outcome:
    """Make the call: it must be refused."""
    names = {"torch": torch, "np": np, "Infill": Infill}
    given = {name: eval(value, names) for name, value in ({**RIGHT[case["call"]], **case["given"]}).items()}
    try:
        if case["call"] == "Sampler":
            _ = Sampler(models.denoiser(case["family"], "float64"), **given)
        else:
            made: Any = getattr(_sampler(case["family"]), case["call"])(**given)
            if case["call"] == "generate_many":
                list(made)
    except UserError as error:
        return sentence(str(error))
    said = ", ".join(f"{name}={value}" for name, value in case["given"].items())
    names_only = " ".join(sorted(case["given"]))
    return Outcome("wrong", f"{case['call']}({said}) is accepted", f"{case['call']} {names_only}") if said else PASSED


@cache
def _sampler(family: str) -> Sampler:
    return Sampler(models.denoiser(family, "float64"), tokenizer=toys.tokenizer(), cache="none", stop="none")
