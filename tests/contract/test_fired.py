"""Each mechanism did something on the toys: without this, a test on a mechanism that never acted proves nothing.

A new plug-in is in no table here, so `test_every_plug_in_is_told_what_it_changes` fails until it is.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from dllm_sampler import Result, config
from tests import toys
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
APD = {"name": "apd", "verifier": toys.verifier(), "max_lookahead": None}
LEFTMOST = {"scheduler": "leftright"}
WINO = {"name": "wino", "threshold": 0.3, "least": 2}
SVDD: dict[str, Any] = {"name": "svdd", "inner": {"name": "fixed", "score": "random"}, "candidates": 4}
HIERARCHY = {"name": "hierarchical", "low": 0.3}
ANYWHERE = {"scheduler": {"name": "fixed", "score": "random"}, "blocks": "full"}
# what runs, what it is compared with, what must be different
FIRED: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Result, Result], bool]]] = {
    "scheduler.threshold": ({}, STEPWISE, parallel),
    "scheduler.factor": ({"scheduler": "factor"}, STEPWISE, parallel),
    "scheduler.budgeted": ({"scheduler": {"name": "budgeted", "threshold": 0.7, "steps": 2}}, STEPWISE, parallel),
    "scheduler.fixed": ({"scheduler": {"name": "fixed", "steps": 7}}, STEPWISE, parallel),
    "scheduler.origin": ({"scheduler": {"name": "origin", "steps": 3}}, STEPWISE, parallel),
    "scheduler.ascending": ({"scheduler": "ascending", "blocks": "full"}, STEPWISE | {"blocks": "full"}, parallel),
    "scheduler.apd": ({"scheduler": APD | {"mixture_weight": 0.95}}, LEFTMOST, parallel),
    "scheduler.leftright": ({"scheduler": {"name": "leftright", "tokens_per_step": 4}}, LEFTMOST, parallel),
    "scheduler.ccd": (
        {"scheduler": {"name": "ccd", "warmup": 1}},
        {"scheduler": {"name": "fixed", "score": "entropy"}},
        parallel,
    ),
    "scheduler.ccd_marginal": ({"scheduler": {"name": "ccd_marginal", "epsilon": 1.0}}, STEPWISE, parallel),
    "scheduler.certainty": ({"scheduler": {"name": "certainty", "sigma": 1.0}}, STEPWISE, other_order),
    "scheduler.credit": (
        {"scheduler": {"name": "credit", "threshold": 0.7}},
        {"scheduler": {"name": "dinfer", "threshold": 0.7}},
        fewer_forwards,
    ),
    "scheduler.dinfer": ({"scheduler": {"name": "dinfer", "threshold": 0.7}}, STEPWISE, parallel),
    "scheduler.dus": ({"scheduler": "dus"}, STEPWISE, parallel),
    "scheduler.editing": (
        {"scheduler": {"name": "editing", "edit": 0.4}},
        {"scheduler": {"name": "editing", "edit": 1.0}},
        takes_back,
    ),
    "scheduler.entropy": ({"scheduler": {"name": "entropy", "entropy": 1.0}}, STEPWISE, parallel),
    "scheduler.entropy_bound": ({"scheduler": {"name": "entropy_bound", "gamma": 1.0}}, STEPWISE, parallel),
    "scheduler.entropy_renoise": (
        {"scheduler": RENOISE | {"entropy_bound": 1.0}},
        {"scheduler": RENOISE | {"entropy_bound": 0.0}},
        answers_differ,
    ),
    "scheduler.block_refine": (
        {"scheduler": {"name": "block_refine", "steps": 6, "threshold": 0.6}},
        {"scheduler": {"name": "block_refine", "steps": 6, "threshold": 1.0}},
        fewer_forwards,
    ),
    "scheduler.eoser": ({"scheduler": {"name": "eoser", "low": 0.0}}, STEPWISE, other_order),
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
    "scheduler.svdd": (
        {"scheduler": SVDD | {"reward": "tests.toys:reward"}},
        {"scheduler": SVDD["inner"]},
        more_kinds,
    ),
    "scheduler.ssd": (
        {"scheduler": {"name": "ssd", "length": 4, "width": 3}},
        {"scheduler": {"name": "ssd", "length": 4}},
        same_in_fewer,
    ),
    "scheduler.d2f": ({"scheduler": {"name": "d2f", "threshold": 0.7}}, STEPWISE, parallel),
    "scheduler.lopa": (
        {"scheduler": LOPA, "blocks": PIPELINE},
        {"scheduler": LOPA | {"forks": 0}, "blocks": PIPELINE},
        fewer_but_other,
    ),
    "scheduler.hierarchical": ({"scheduler": HIERARCHY}, STEPWISE, parallel),
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
    "scheduler.pc": ({"scheduler": "pc"}, STEPWISE, other_order),
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
    "scheduler.random_order": ({"scheduler": "random_order"}, STEPWISE, other_order),
    "cache.dpad": (
        {"cache": {"name": "dpad", "inner": "none", "window": 6}, **STEPWISE},
        STEPWISE,
        computes_less,
    ),
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
    "blocks.ascending": ({"blocks": {"name": "ascending", "count": 3}}, {"blocks": "full"}, answers_differ),
    "blocks.multi_block": ({"blocks": MULTI | {"add_threshold": 0.25}}, {"blocks": MULTI}, decodes_ahead),
    "blocks.pipeline": ({"blocks": PIPELINE}, {"blocks": PIPELINE | {"name": "multi_block"}}, computes_less),
    "stop.end_of_text": ({"stop": {"name": "end_of_text", "mode": "predicted", "min_conf": 0.3}}, {}, cuts_the_context),
    "stop.prophet": ({"stop": {"name": "prophet", "early": 1.0, "mid": 1.0, "late": 1.0}}, {}, fills_at_once),
    "scheduler.dynamic": ({"scheduler": {"name": "dynamic", "threshold": 0.7}}, STEPWISE, parallel),
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
    "cache.block_causal": (
        {"kind": "causal", "cache": "block_causal"},
        {"kind": "causal", "cache": "none"},
        skips_rows,
    ),
    "cache.sub_block": (
        {"kind": "causal", "cache": "sub_block", "blocks": {"name": "fixed", "length": 6, "part": 3}},
        {"kind": "causal", "cache": "block_causal", "blocks": {"name": "fixed", "length": 6, "part": 3}},
        computes_less,
    ),
    "cache.d2f": ({"cache": "d2f"}, {}, skips_rows),
    "cache.prefix": ({"cache": "prefix"}, {}, skips_rows),
    "cache.dual": ({"cache": "dual"}, {}, skips_rows),
    "blocks.fixed": ({"blocks": {"name": "fixed", "length": 5}}, {"blocks": "full"}, answers_differ),
    "blocks.full": ({"blocks": "full"}, {"blocks": {"name": "fixed", "length": 5}}, answers_differ),
    "stop.prefix": ({"stop": "prefix"}, {}, saves_forwards),
    "stop.fill": ({"stop": "fill", **ANYWHERE}, ANYWHERE, fills_the_end),
    "stop.block": ({"stop": "block"}, {}, saves_forwards),
    "stop.truncate": ({"stop": "truncate", **ANYWHERE}, ANYWHERE, cuts_the_context),
    "guide.temperature": ({"guide": DRAWN}, {}, answers_differ),
    "guide.top_k": ({"guide": [DRAWN, {"name": "top_k", "k": 2}]}, {"guide": DRAWN}, answers_differ),
    "guide.top_p": ({"guide": [DRAWN, {"name": "top_p", "p": 0.4}]}, {"guide": DRAWN}, answers_differ),
    "guide.end_tokens": ({"guide": "end_tokens"}, {}, answers_differ),
    "guide.regex": ({"guide": {"name": "regex", "pattern": "[a-j]+"}}, {}, answers_differ),
    "guide.choices": ({"guide": {"name": "choices", "choices": ["abc", "cd-xy"]}}, {}, answers_differ),
    "guide.grammar": ({"guide": {"name": "grammar", "grammar": "json"}}, {}, answers_differ),
    "guide.json_schema": ({"guide": {"name": "json_schema", "schema": '{"type": "boolean"}'}}, {}, answers_differ),
}
# Compared with others, these are what "nothing happens" means.
NEUTRAL = {"cache.none", "cache.exact", "stop.none", "guide.none"}


PLUGINS = [f"{group}.{name}" for group in config.GROUPS if group != "model" for name in config.names(group)]


@pytest.mark.parametrize("name", PLUGINS)
def test_every_plug_in_is_told_what_it_changes(name: str) -> None:
    assert (name in FIRED) != (name in NEUTRAL), f"FIRED, in this file, should have a line for {name}"


def test_no_line_is_left_over() -> None:
    assert set(FIRED) | NEUTRAL <= set(PLUGINS)


@pytest.mark.parametrize("name", FIRED)
def test_the_mechanism_fires(name: str) -> None:
    plugins, baseline, differs = FIRED[name]
    assert differs(run(**plugins), compared(repr(baseline)))


@cache
def compared(baseline: str) -> Result:
    """What many mechanisms are compared with, made once for all."""
    return run(**next(plugins for _, plugins, _ in FIRED.values() if repr(plugins) == baseline))


def test_guidance_and_shift_change_answers() -> None:
    for kind in ("cfg", "dream"):
        sampler = toys.sampler(kind, scheduler=PARALLEL)
        other = sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS)
        assert answers_differ(other, run())
        assert torch.equal(other.trace.rows, other.nfe * (other.trace.end - other.trace.begin) * (1 + (kind == "cfg")))
