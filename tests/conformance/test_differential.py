"""Random settings: our plug-ins against eager loops written from the published description (`reference`)."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_sampler.eval.conformance import lines, replay
from dllm_sampler.eval.conformance.builder import Checkpoints
from dllm_sampler.models.denoiser import TransformerDenoiser
from tests.conformance import reference, reference_blocks, reference_caches, reference_dream
from tests.conformance.reference import Net, Record

DATA = Path(__file__).parent / "data"
CHECKPOINTS = Checkpoints(DATA)
CASES = int(os.environ.get("CASES", 6))  # per family
QUICK = 2  # so many of them run by default
SPECIAL = 253  # tokens from here on are special in both vocabularies
Case = tuple[str, str, dict[str, Any]]  # checkpoint, system, params


def net(name: str, mask_id: int | None) -> Net:
    denoiser = CHECKPOINTS.load(name, mask_id)
    assert isinstance(denoiser, TransformerDenoiser)
    return Net(denoiser.transformer, denoiser.mask_id, denoiser.shift)


@cache
def recorded_prompts(name: str) -> list[list[int]]:
    return [row for line in lines.read(DATA) if line.model == name for row in line.prompts]


def blocks(rng: Random, steps_per_block: tuple[int, ...]) -> dict[str, int]:
    """A block grid, and steps that divide over it: fewer and more than a block has positions."""
    number, length = rng.choice([1, 2, 3]), rng.choice([1, 2, 5, 8, 12])
    return {"gen_length": number * length, "block_length": length, "steps": number * rng.choice(steps_per_block)}


def llada(rng: Random) -> Case:
    params = blocks(rng, (1, 2, 3, 5, 8, 13)) | {"temperature": 0.0, "mask_id": 255}
    params["cfg_scale"] = rng.choice([0.0, 0.0, 0.5, 1.5])
    params["remasking"] = rng.choice(["low_confidence", "low_confidence", "random"])
    return "tiny-llada", "llada-vanilla", params


def llada_sampled(rng: Random) -> Case:
    name, system, params = llada(rng)
    return name, system, params | {"temperature": rng.choice([0.3, 1.0])}


def llada_ends(rng: Random) -> Case:
    """Acts on common tokens, since this model seldom ends a text."""
    name, system, params = (llada, llada_sampled)[rng.randrange(2)](rng)
    modes = rng.choice([(True, False), (False, True), (True, True)])
    params |= {"eos_id": 36, "eot_id": 198, "logits_eos_inf": modes[0], "confidence_eos_eot_inf": modes[1]}
    return name, system, params


def fast_dllm(rng: Random) -> Case:
    system = rng.choice(["fast-dllm", "fast-dllm-v1"])
    params = blocks(rng, (2, 3, 5, 8, 13)) | {"cache": rng.choice(["none", "prefix", "dual"]), "temperature": 0.0}
    kind = rng.choice(["steps", "threshold", "threshold", "factor"])
    params["threshold"] = rng.choice([0.3, 0.6, 0.9, 1.1]) if kind == "threshold" else None
    if system == "fast-dllm-v1":
        params["factor"] = rng.choice([0.0, 0.3, 0.75, 1.0, 2.0]) if kind == "factor" else None
    return "tiny-llada", system, params


def dream(rng: Random) -> Case:
    params: dict[str, Any] = {"max_new_tokens": rng.choice([5, 12, 24]), "steps": rng.choice([1, 4, 9, 16, 30])}
    params |= {"alg": rng.choice(["maskgit_plus", "topk_margin", "entropy"]), "eps": rng.choice([0.001, 0.05])}
    params |= {"temperature": 0.0, "alg_temp": rng.choice([None, 0.0, 0.3]), "mask_token_id": 286}
    if rng.random() < 0.5:
        params["top_k"] = rng.choice([3, 20, None])
    return "tiny-dream", "dream", params


def dream_sampled(rng: Random) -> Case:
    name, system, params = dream(rng)
    return name, system, params | {"temperature": rng.choice([0.4, 1.0]), "top_p": rng.choice([None, 0.7, 0.95, 1.0])}


def dream_origin(rng: Random) -> Case:
    name, system, params = (dream, dream_sampled)[rng.randrange(2)](rng)
    return name, system, params | {"alg": "origin"}


def fast_dllm_dream(rng: Random) -> Case:
    length, quota = rng.choice([12, 24]), rng.choice([1, 2, 3, 6])
    params = {"max_new_tokens": length, "steps": length // quota, "alg": "confidence_threshold", "temperature": 0.0}
    return "tiny-dream", "fast-dllm-dream/plain-threshold", params | {"threshold": rng.choice([0.2, 0.5, 0.8, 1.0])}


def fast_dllm_dream_cached(rng: Random) -> Case:
    grid = blocks(rng, (2, 3, 8, 13))
    alg, dual = rng.choice(["confidence_threshold", "entropy"]), rng.random() < 0.5
    params: dict[str, Any] = {"max_new_tokens": grid.pop("gen_length"), "alg": alg, "dual_cache": dual} | grid
    params["temperature"] = 0.0
    if alg == "confidence_threshold":
        params["threshold"] = rng.choice([0.2, 0.5, 0.8, 1.0])
    kind = "threshold" if alg == "confidence_threshold" else "entropy"
    return "tiny-dream", f"fast-dllm-dream/{'dual' if dual else 'prefix'}-cache-{kind}", params


def cached(rng: Random, per_block: tuple[int, ...]) -> dict[str, Any]:
    """A block grid of one position to all, and its steps."""
    length = rng.choice([1, 4, 8, 15])
    number = rng.choice([1, 2, 3])
    steps = number * rng.choice([n for n in per_block if n <= length])
    params: dict[str, Any] = {"gen_length": number * length, "block_length": length, "steps": steps}
    return params | {"temperature": 0.0, "cfg_scale": 0.0, "remasking": "low_confidence", "mask_id": 255}


def dkv_decode(rng: Random) -> Case:
    params = cached(rng, (1, 3, 8, 15)) | {"enable_cache": rng.random() < 0.9}
    return "tiny-llada", "dkv-cache-decode", params | {"cache_reloading_step": rng.choice([1, 2, 3, 5, 40])}


def dkv_greedy(rng: Random) -> Case:
    params = cached(rng, (1, 3, 5, 8, 15)) | {"enable_cache": True, "remasking": "random"}
    params |= {"cache_reloading_step": rng.choice([1, 2, 3, 5, 40]), "window_size": rng.choice([0, 1, 2, 3, 9])}
    return "tiny-llada", "dkv-cache-greedy", params


def dkv_dream(rng: Random) -> Case:
    kind = rng.choice(["decoded", "decoded", "prefill", "pd"])
    name, _, params = dream(rng)
    params |= {"alg_temp": 0.0, "use_cache": True, "cache_type": kind, "shift_type": rng.choice(["un", "un_right"])}
    return name, f"dkv-cache-dream/{kind}", params | {"cache_steps": rng.choice([1, 2, 3, 5, 40])}


def dllm_cache(rng: Random) -> Case:
    params = cached(rng, (1, 3, 8, 15)) | {"prompt_interval_steps": rng.choice([1, 3, 7, 100])}
    params |= {"gen_interval_steps": rng.choice([1, 2, 5, 100]), "transfer_ratio": rng.choice([0.0, 0.1, 0.3, 1.0])}
    params |= {"cfg_scale": rng.choice([0.0, 0.0, 1.5]), "cfg_interval_steps": rng.choice([1, 2, 4, 50])}
    return "tiny-llada", "dllm-cache", params


def sdar(rng: Random) -> Case:
    """Pace and prompt leave no more positions than a step takes: there the published code overwrites tokens."""
    kind = rng.choice(["static", "dynamic", "dynamic", "sequential"])
    name = kind if kind == "sequential" else f"low_confidence_{kind}"
    length = rng.choice([2, 4, 7])
    params: dict[str, Any] = {"gen_length": rng.choice([3, 9, 16]), "block_length": length, "mask_id": 286}
    params |= {"denoising_steps": rng.choice([1, length // 2, length, length + 3]), "remasking_strategy": name}
    params |= {"confidence_threshold": rng.choice([0.3, 0.6, 0.9]), "temperature": rng.choice([1.0, 1.0, 0.7])}
    params |= {"top_k": rng.choice([0, 0, 4]), "top_p": rng.choice([1.0, 1.0, 0.9])}
    params |= {"stopping_criteria_idx": rng.choice([None, None, [285], [36, 40, 198]])}
    params |= {"token_draw": rng.choice(["argmax (over the same probabilities)", "torch.multinomial"])}
    return "tiny-sdar", f"sdar/{name}", params


def llada2(rng: Random) -> Case:
    """Common tokens stand for the end."""
    length = rng.choice([4, 8, 13])
    params: dict[str, Any] = {"gen_length": rng.choice([6, 16, 30]), "block_length": length, "mask_id": 286}
    params |= {"steps": rng.choice([1, 3, length, length + 5]), "minimal_topk": rng.choice([1, 2])}
    params |= {"threshold": rng.choice([0.2, 0.5, 0.9]), "eos_early_stop": rng.random() < 0.7, "temperature": 0.0}
    return "tiny-llada2-moe", "llada2", params | {"eos_id": rng.choice([285, *common("tiny-llada2-moe")])}


def adablock_dream(rng: Random) -> Case:
    dual, length = rng.random() < 0.5, rng.choice([8, 21, 40])
    params: dict[str, Any] = {"max_new_tokens": length, "alg": "confidence_threshold", "dual_cache": dual}
    params |= {"block_length": rng.choice([1, 5, 12]), "threshold": rng.choice([0.2, 0.5, 0.8])}
    params |= {"delimiter_threshold": rng.choice([0.02, 0.1, 0.2, 0.3])}
    if rng.random() < 0.5:
        params["top_k"] = rng.choice([2, 5, None])
    return "tiny-dream", f"adablock-dream/{'dual' if dual else 'no'}-cache", params


@cache
def common(name: str) -> list[int]:
    """Tokens that recorded runs of a checkpoint wrote most."""
    wrote = Counter(token for line in lines.read(DATA) if line.model == name for row in line.outputs for token in row)
    return [token for token, _ in wrote.most_common(12) if token < SPECIAL]


FAMILIES = [
    llada, llada_sampled, llada_ends, fast_dllm,
    dream, dream_sampled, dream_origin, fast_dllm_dream, fast_dllm_dream_cached,
    dkv_decode, dkv_greedy, dkv_dream, dllm_cache, sdar, llada2, adablock_dream,
]  # fmt: skip
LOOPS = {
    "dkv-cache-decode": reference_caches.dkv_decode,
    "dkv-cache-greedy": reference_caches.dkv_greedy,
    "dkv-cache-dream": reference_caches.dkv_dream,
    "dllm-cache": reference_caches.dllm_cache,
    "sdar": reference_blocks.sdar,
    "llada2": reference_blocks.llada2,
    "adablock-dream": reference_blocks.adablock_dream,
}  # of one row each


def batch(rng: Random, name: str, size: int, pad: bool) -> tuple[Tensor, Tensor]:
    """Left-padded prompts and which tokens are real; `pad=False` cuts them to one length instead."""
    rows = []
    for _ in range(size):
        own = [rng.randrange(SPECIAL) for _ in range(rng.randint(1, 12))]
        rows.append(own if rng.random() < 0.3 else rng.choice(recorded_prompts(name)))
    if not pad:
        rows = [row[-min(map(len, rows)) :] for row in rows]
    width = max(map(len, rows))
    ids = torch.tensor([[254] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])


def run(system: str, params: dict[str, Any], model: Net, ids: Tensor, real: Tensor | None, seed: int) -> Record:
    if system == "llada-vanilla":
        ends = (params.get("eos_id", 254), params.get("eot_id", 253))
        return reference.llada(model, ids, real, ends=ends, seed=seed, **params)
    if system == "dream":
        return reference_dream.dream(model, ids, real, seed=seed, **params)
    if loop := LOOPS.get(system.partition("/")[0]):
        return loop(model, ids, seed=seed, **params)
    if system.endswith("plain-threshold"):
        return reference_dream.dream_threshold(model, ids, **params)
    if system.startswith("fast-dllm-dream"):
        return reference_dream.dream_cached(model, ids, **params)
    return reference.fast_dllm(model, ids, first_release=system == "fast-dllm", **params)


def stable(record: Record, system: str, params: dict[str, Any], model: Net, *given: Any) -> bool:
    """Whether the run stays the same under slightly different logits, as every published trace does."""
    torch.manual_seed(0)
    return all(run(system, params, replace(model, jitter=1e-5), *given) == record for _ in range(2))


def draw_line(family: Any, number: int) -> lines.Line:
    """The first stable run of a family, beginning at a seed of its own."""
    for seed in range(1000 * number, 1000 * number + 50):
        rng = Random(f"{family.__name__} {seed}")
        name, system, params = family(rng)
        fast = system.startswith("fast-dllm")  # takes no padding, and only its later release for LLaDA takes a batch
        alone = (fast and system != "fast-dllm-v1") or system.partition("/")[0] in LOOPS or rng.random() < 0.5
        ids, real = batch(rng, name, 1 if alone else rng.choice([2, 3]), pad=not fast)
        padded = None if bool(real.all()) else real
        model = net(name, params.get("mask_id"))
        record = run(system, params, model, ids, padded, seed)
        if not stable(record, system, params, model, ids, padded, seed):
            continue
        rows = ids.tolist()
        raw = {"id": f"{family.__name__}-{seed}", "system": system, "model": name, "params": params, **record}
        raw |= {"prompt_ids": rows[0] if alone else rows}
        if not str(params.get("token_draw", "")).startswith("argmax"):
            raw["rng"] = {"torch_manual_seed": seed}
        if not alone:
            raw["attention_mask"] = real.int().tolist()
        return lines.check(lines.Line, {**raw, "where": raw["id"]}, raw["id"])
    raise AssertionError("no stable run found")


@pytest.mark.parametrize(
    "number", [pytest.param(one, marks=pytest.mark.slow if one >= QUICK else ()) for one in range(CASES)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_the_eager_loop(family: Any, number: int):
    line = draw_line(family, number)
    setup = replay.prepare(line, CHECKPOINTS)
    assert not isinstance(setup, replay.Verdict), setup
    verdict = replay.replay(line, setup)
    assert verdict.status == "passed", f"{line.params} {line.prompt_ids}: {verdict.reason}"
