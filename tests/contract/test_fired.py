"""Each mechanism did something on the toys: without this, a test on a mechanism that never acted proves nothing.

A new plug-in needs no row here if it can be told from the plainest one of its group (`acts`).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dllm_sampler import Result, config
from tests import toys
from tests.contract.cases import Settings, settings, toy_of
from tests.contract.differences import (
    TOKENS,
    accepts_and_rejects,
    answers_differ,
    computes_less,
    cuts_the_context,
    decodes_ahead,
    fewer_but_other,
    fewer_forwards,
    fills_again,
    fills_at_once,
    fills_the_end,
    grows_and_shrinks,
    inserts,
    more_kinds,
    other_order,
    parallel,
    refreshes,
    same_in_fewer,
    saves_forwards,
    serves_and_changes,
    skips_rows,
    stays_greedy,
    takes_back,
)

PARALLEL = {"name": "threshold", "threshold": 0.7}
DRAWN = {"name": "temperature", "value": 1.0}


def run(**plugins: Any) -> Result:
    sampler = toys.sampler(**{"scheduler": PARALLEL, **plugins})
    return sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS)


STEPWISE = {"scheduler": "fixed"}
MULTI: dict[str, Any] = {"name": "multi_block", "length": 4, "add_threshold": 1.0}
PIPELINE: dict[str, Any] = {"name": "pipeline", "length": 4, "add_threshold": 0.25, "full_threshold": 0.5}
LOPA: dict[str, Any] = {"name": "lopa", "inner": {"name": "d2f", "threshold": 0.9}}
FIXED6 = {"name": "fixed", "length": 6}
FILTER = {"name": "learn2pd", "filter": toys.FILTER}
KLASS = {"name": "klass", "threshold": 0.3, "history": 1}
RENOISE = {"name": "entropy_renoise", "max_denoising_steps": 6}
DDIM = {"name": "discrete_ddim", "max_denoising_steps": 8}
APD = {"name": "apd", "verifier": toys.verifier(), "max_lookahead": None}
LEFTMOST = {"scheduler": "leftright"}
WINO = {"name": "wino", "threshold": 0.3, "least": 2}
SVDD: dict[str, Any] = {"name": "svdd", "inner": {"name": "fixed", "score": "random"}, "candidates": 4}
HIERARCHY = {"name": "hierarchical", "low": 0.3}
ANYWHERE = {"scheduler": {"name": "fixed", "score": "random"}, "blocks": "full"}
# what runs, what it is compared with, what must be different
FIRED: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Result, Result], bool]]] = {
    "scheduler.budgeted": ({"scheduler": {"name": "budgeted", "threshold": 0.7, "steps": 2}}, STEPWISE, parallel),
    "scheduler.fixed": ({"scheduler": {"name": "fixed", "steps": 7}}, STEPWISE, parallel),
    "scheduler.ascending": ({"scheduler": "ascending", "blocks": "full"}, STEPWISE | {"blocks": "full"}, parallel),
    "scheduler.apd": ({"scheduler": APD | {"mixture_weight": 0.95}}, LEFTMOST, parallel),
    "scheduler.leftright": ({"scheduler": {"name": "leftright", "tokens_per_step": 4}}, LEFTMOST, parallel),
    "scheduler.ccd": (
        {"scheduler": {"name": "ccd", "warmup": 1}},
        {"scheduler": {"name": "fixed", "score": "entropy"}},
        parallel,
    ),
    "scheduler.credit": (
        {"scheduler": {"name": "credit", "threshold": 0.7}},
        {"scheduler": {"name": "dinfer", "threshold": 0.7}},
        fewer_forwards,
    ),
    "scheduler.editing": (
        {"scheduler": {"name": "editing", "edit": 0.4}},
        {"scheduler": {"name": "editing", "edit": 1.0}},
        takes_back,
    ),
    "scheduler.entropy_renoise": (
        {"scheduler": RENOISE | {"entropy_bound": 1.0}},
        {"scheduler": RENOISE | {"entropy_bound": 0.0}},
        answers_differ,
    ),
    "scheduler.discrete_ddim": (
        {"kind": "uniform", "scheduler": DDIM | {"corrector_steps": 1}},
        {"kind": "uniform", "scheduler": DDIM},
        answers_differ,
    ),
    "scheduler.block_refine": (
        {"scheduler": {"name": "block_refine", "steps": 6, "threshold": 0.6}},
        {"scheduler": {"name": "block_refine", "steps": 6, "threshold": 1.0}},
        fewer_forwards,
    ),
    "scheduler.daedal": (
        {"scheduler": {"name": "daedal", "initial": 4, "expand": 3, "eos_tokens": 2, "grow": 0.2, "unsure": 0.6}},
        {},
        inserts,
    ),
    "scheduler.rho_eos": (
        {"scheduler": {"name": "rho_eos", "initial": 6, "expand": 2, "eos_tokens": 1, "low": 0.1, "high": 0.4}},
        {},
        grows_and_shrinks,
    ),
    "scheduler.freedave": ({"scheduler": "freedave"}, STEPWISE, same_in_fewer),
    "scheduler.svdd": ({"scheduler": SVDD | {"reward": "tests.toys:reward"}}, {"scheduler": SVDD["inner"]}, more_kinds),
    "scheduler.ssd": (
        {"scheduler": {"name": "ssd", "length": 4, "width": 3}},
        {"scheduler": {"name": "ssd", "length": 4}},
        same_in_fewer,
    ),
    "scheduler.lopa": (
        {"scheduler": LOPA, "blocks": PIPELINE},
        {"scheduler": LOPA | {"forks": 0}, "blocks": PIPELINE},
        fewer_but_other,
    ),
    "scheduler.klass": (
        {"scheduler": KLASS | {"divergence": 1.0}},
        {"scheduler": KLASS | {"divergence": 0.0}},
        parallel,
    ),
    "scheduler.learn2pd": (
        {"scheduler": FILTER | {"threshold": 0.5}},
        {"scheduler": FILTER | {"threshold": 1.0}},
        parallel,
    ),
    "scheduler.localleap": (
        {"scheduler": {"name": "localleap", "threshold": 0.7, "relaxed": 0.3}},
        {"scheduler": PARALLEL},
        fewer_forwards,
    ),
    "scheduler.rcr": ({"scheduler": "rcr"}, STEPWISE, fills_again),
    "scheduler.remdm": (
        {"scheduler": {"name": "remdm", "tokens": 3}},
        {"scheduler": {"name": "remdm", "revisions": 0}},
        takes_back,
    ),
    "scheduler.streaming": ({"scheduler": {"name": "streaming", "threshold": 0.7, "alpha": 0.9}}, {}, answers_differ),
    "scheduler.slowfast": (
        {"scheduler": {"name": "slowfast", "threshold": 0.7}, "blocks": "full"},
        {"scheduler": {"name": "slowfast", "threshold": 0.7, "slow": 0}, "blocks": "full"},
        answers_differ,
    ),
    "scheduler.wino": ({"scheduler": WINO | {"back": 0.9}}, {"scheduler": WINO | {"back": 0.0}}, takes_back),
    "cache.dpad": ({"cache": {"name": "dpad", "inner": "none", "window": 6}, **STEPWISE}, STEPWISE, computes_less),
    "cache.streaming": (
        {"cache": {"name": "streaming", "window": 2}, **STEPWISE},
        {"cache": "prefix", **STEPWISE},
        computes_less,
    ),
    "cache.dkv": ({"cache": "dkv", **STEPWISE}, STEPWISE, serves_and_changes),
    "cache.dkv_greedy": (
        {"cache": "dkv_greedy", "scheduler": "random_order"},
        {"scheduler": "random_order"},
        serves_and_changes,
    ),
    "cache.dllm": ({"cache": {"name": "dllm", "response_every": 3}, **STEPWISE}, STEPWISE, serves_and_changes),
    "cache.vicinity": (
        {"cache": {"name": "vicinity", "before": 2, "after": 3, "warmup": 2}, **STEPWISE},
        {"cache": "dual", **STEPWISE},
        refreshes,
    ),
    "cache.sparse": ({"cache": "sparse", **STEPWISE}, STEPWISE, serves_and_changes),
    "cache.trailing": ({"cache": {"name": "trailing", "window": 2}, **LEFTMOST}, LEFTMOST, serves_and_changes),
    "cache.elastic": ({"cache": {"name": "elastic", "window": 4}, **STEPWISE}, STEPWISE, serves_and_changes),
    "cache.d2": ({"cache": {"name": "d2", "masks": 3}, **STEPWISE}, STEPWISE, serves_and_changes),
    "cache.delayed_prefix": (
        {"cache": {"name": "delayed_prefix", "delay": 2, "refresh_every": 3}, **STEPWISE},
        STEPWISE,
        serves_and_changes,
    ),
    "cache.periodic_prefix": (
        {"cache": {"name": "periodic_prefix", "every": 2}, **STEPWISE},
        {"cache": "prefix", **STEPWISE},
        refreshes,
    ),
    "cache.periodic_dual": (
        {"cache": {"name": "periodic_dual", "every": 2}, **STEPWISE},
        {"cache": "dual", **STEPWISE},
        refreshes,
    ),
    "blocks.adablock": (
        {"blocks": {"name": "adablock", "delimiters": list(range(20)), "threshold": 0.0, "length": 6, "window": 1.0}},
        {"blocks": FIXED6},
        answers_differ,
    ),
    "blocks.multi_block": ({"blocks": MULTI | {"add_threshold": 0.25}}, {"blocks": MULTI}, decodes_ahead),
    "blocks.pipeline": ({"blocks": PIPELINE}, {"blocks": PIPELINE | {"name": "multi_block"}}, computes_less),
    "stop.end_of_text": ({"stop": {"name": "end_of_text", "mode": "predicted", "min_conf": 0.3}}, {}, cuts_the_context),
    "stop.prophet": ({"stop": {"name": "prophet", "early": 1.0, "mid": 1.0, "late": 1.0}}, {}, fills_at_once),
    "scheduler.linear_spec": (
        {"kind": "context", "scheduler": "linear_spec"},
        {"kind": "context", "scheduler": "linear_spec", "blocks": {"name": "fixed", "length": 1}},
        stays_greedy,
    ),
    "scheduler.s2d2": (
        {"kind": "causal", "scheduler": "s2d2"},
        {"kind": "causal", "scheduler": "dynamic"},
        accepts_and_rejects,
    ),
    "scheduler.s2d2_editing": (
        {"kind": "causal", "scheduler": {"name": "s2d2_editing", "edit": 0.3}},
        {"kind": "causal", "scheduler": {"name": "s2d2_editing", "edit": 1.0, "extra": 0}},
        takes_back,
    ),
    "cache.sub_block": (
        {"kind": "causal", "cache": "sub_block", "blocks": {"name": "fixed", "length": 6, "part": 3}},
        {"kind": "causal", "cache": "block_causal", "blocks": {"name": "fixed", "length": 6, "part": 3}},
        computes_less,
    ),
    "blocks.fixed": ({"blocks": {"name": "fixed", "length": 5}}, {"blocks": "full"}, answers_differ),
    "blocks.full": ({"blocks": "full"}, {"blocks": {"name": "fixed", "length": 5}}, answers_differ),
    "stop.fill": ({"stop": "fill", **ANYWHERE}, ANYWHERE, fills_the_end),
    "stop.truncate": ({"stop": "truncate", **ANYWHERE}, ANYWHERE, cuts_the_context),
    "guide.top_k": ({"guide": [DRAWN, {"name": "top_k", "k": 2}]}, {"guide": DRAWN}, answers_differ),
    "guide.top_p": ({"guide": [DRAWN, {"name": "top_p", "p": 0.4}]}, {"guide": DRAWN}, answers_differ),
    "particles.best_of_n": ({"guide": DRAWN, "particles": "best_of_n"}, {"guide": DRAWN}, answers_differ),
    "particles.smc": ({"guide": DRAWN, "particles": "smc"}, {"guide": DRAWN}, answers_differ),
    "particles.steering": (
        {"guide": DRAWN, "particles": {"name": "steering", "reward": toys.reward}},
        {"guide": DRAWN},
        answers_differ,
    ),
}
# Compared with others, these are what "nothing happens" means.
NEUTRAL = {"cache.none", "cache.exact", "stop.none", "guide.none", "particles.none"}


PLUGINS = [f"{group}.{name}" for group in config.GROUPS if group != "model" for name in config.names(group)]


def acts(group: str, one: Settings) -> bool:
    """Return True if a plug-in does something beside the plainest one of its group."""
    if group == "scheduler":
        other, differs, rest = STEPWISE, lambda *both: parallel(*both) or other_order(*both), {}
    elif group == "cache":
        toy = toy_of(one)
        other, differs, rest = {"kind": toy, "cache": "none", **STEPWISE}, skips_rows, {"kind": toy, **STEPWISE}
    elif group == "blocks":
        other, differs, rest = {"blocks": FIXED6}, answers_differ, {}
    else:
        other, differs, rest = {}, saves_forwards if group == "stop" else answers_differ, {}
    return differs(run(**{group: one}, **rest), compared(other))


@pytest.mark.parametrize("name", [name for name in PLUGINS if name not in FIRED and name not in NEUTRAL])
def test_a_plug_in_without_a_row_acts(name: str) -> None:
    group, _, plugin = name.partition(".")
    assert any(acts(group, one) for one in settings(group) if one["name"] == plugin), (
        f"{name} does nothing under its settings that can be seen beside the plainest {group}."
        f" Add a row to FIRED, in this file, or a setting to dllm_sampler/check/settings.py."
    )


def test_no_line_is_left_over() -> None:
    assert set(FIRED) | NEUTRAL <= set(PLUGINS)


@pytest.mark.parametrize("name", FIRED)
def test_the_mechanism_fires(name: str) -> None:
    plugins, baseline, differs = FIRED[name]
    assert differs(run(**plugins), compared(baseline))


COMPARED: dict[str, Result] = {}


def compared(baseline: dict[str, Any]) -> Result:
    """Return what many mechanisms are compared with, made once for all."""
    name = repr(baseline)
    if name not in COMPARED:
        COMPARED[name] = run(**baseline)
    return COMPARED[name]


def test_guidance_and_shift_change_answers() -> None:
    for kind in ("cfg", "dream"):
        sampler = toys.sampler(kind, scheduler=PARALLEL)
        other = sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS)
        assert answers_differ(other, run())
        assert torch.equal(other.trace.rows, other.nfe * (other.trace.end - other.trace.begin) * (1 + (kind == "cfg")))
