"""Every plug-in of `conf/`, under settings that give it something to do on a canvas of a few tokens.

A plug-in without an entry in `SETTINGS` has its defaults. If these do little on a short canvas, `SETTINGS` has others.
Each entry is one more setting under which tests check the whole contract. A value that is a function is called only
when it is needed, because transformers takes seconds to import.
"""

from functools import partial
from typing import Any

from dllm_sampler import config
from dllm_sampler.check import toys

Settings = dict[str, Any]

SETTINGS: dict[str, list[Settings]] = {
    "scheduler.threshold": [{}, {"threshold": 0.6}, {"threshold": 0.6, "position_temperature": 0.5}],
    "scheduler.factor": [{}, {"factor": 0.7}],
    "scheduler.budgeted": [{"threshold": 0.7}, {"threshold": 0.5, "steps": 3}],
    "scheduler.fixed": [
        {},
        {"steps": 7},
        {"steps": 8, "score": "margin"},
        {"steps": 30, "score": "entropy"},
        {"steps": 9, "score": "random"},
        {"steps": 10, "schedule": "timestep", "score": "entropy"},
        {"steps": 8, "schedule": "timestep", "alg_temp": 0.5},
        {"steps": 9, "schedule": "rounded"},
    ],
    "scheduler.origin": [{}, {"steps": 4}],
    "scheduler.apd": [
        {"verifier": toys.verifier, "mixture_weight": 0.9, "max_lookahead": None},
        {"verifier": toys.verifier, "mixture_weight": 0.8, "max_lookahead": 4},
        {"verifier": partial(toys.verifier, vocab=36), "mixture_weight": 0.0, "max_lookahead": 5},
    ],
    "scheduler.ccd": [{"warmup": 1}, {"dynamic": False, "steps": 8, "score": "margin"}],
    "scheduler.ccd_marginal": [{"epsilon": 1.0}, {"dynamic": False, "steps": 8}],
    "scheduler.certainty": [{"sigma": 1.0}, {"steps": 7}],
    "scheduler.credit": [{"threshold": 0.6, "memory": 2}],
    "scheduler.dinfer": [{"threshold": 0.7, "slack": 0.1}],
    "scheduler.dmax": [{}, {"threshold": 0.0}],
    "scheduler.dus": [{}, {"skip": 0.0, "base": 3}],
    "scheduler.editing": [
        {"threshold": 0.5, "edit": 0.3, "extra": 3},
        {"threshold": 0.3, "edit": 0.2, "quota": 2, "extra": 1},
        {"threshold": 0.5, "remask": "low_prob", "remask_threshold": 0.2, "remask_limit": 2, "extra": 3},
        {"threshold": 0.3, "remask": "t2t_remask", "remask_threshold": 0.2, "remask_share": 1.0, "remask_limit": 2},
        {"threshold": 0.5, "remask": "logit_diff", "remask_threshold": 0.05, "remask_limit": 2, "remask_share": 0.5},
    ],
    "scheduler.entropy": [{"entropy": 1.0}],
    "scheduler.entropy_bound": [{"gamma": 1.0}],
    "scheduler.entropy_renoise": [
        {"max_denoising_steps": 5, "entropy_bound": 1.0, "t_min": 1.0, "t_max": 2.0, "confidence_threshold": 1.5},
        {"max_denoising_steps": 4, "t_min": 0.0, "t_max": 0.0, "entropy_bound": 2.0, "stability_threshold": None},
    ],
    "scheduler.dawn": [
        {"threshold": 0.6, "low": 0.3, "induce": 0.2, "edge": 0.1, "sink": 0.2},
        {
            "threshold": 0.7,
            "low": 0.2,
            "sink": 2.0,
            "relative_sink": True,
            "exclude": "published",
            "attention_layers": 1,
        },
    ],
    "scheduler.discrete_ddim": [
        {"max_denoising_steps": 5},
        {"max_denoising_steps": 8, "corrector_steps": 1, "confidence_threshold": 1.5},
        {
            "max_denoising_steps": 9,
            "corrector_steps": 3,
            "corrector_k": 2,
            "corrector_selection": "lowest_log_margin",
            "confidence_threshold": None,
        },
    ],
    "scheduler.block_refine": [{"steps": 4}, {"steps": 9, "threshold": 0.6}],
    "scheduler.eoser": [{"low": 0.0}, {"low": 0.3, "progress": "step", "steps": 6}],
    "scheduler.daedal": [
        {"initial": 4, "expand": 3, "eos_tokens": 2, "grow": 0.2, "unsure": 0.6},
        {"inner": {"name": "klass", "threshold": 0.3, "divergence": 1.0}, "initial": 6, "expand": 4, "unsure": 0.5},
    ],
    "scheduler.rho_eos": [
        {"initial": 6, "expand": 2, "eos_tokens": 1, "low": 0.1, "high": 0.4},
        {
            "inner": {"name": "credit", "threshold": 0.6},
            "initial": 9,
            "expand": 3,
            "signal_of": "density",
            "low": 0.01,
            "high": 0.1,
            "scale": "linear",
        },
        {"initial": 14, "expand": 1, "eos_tokens": 1, "low": 0.1, "high": 0.2, "min_length": 5, "scale": "const"},
    ],
    "scheduler.freedave": [
        {},
        {"inner": {"name": "threshold", "threshold": 0.6}, "draft": 5},
        {"inner": {"name": "threshold", "threshold": 0.6}, "match": "subset"},
        {"inner": {"name": "ccd", "warmup": 1}, "eager": True},
    ],
    "scheduler.svdd": [
        {
            "inner": {"name": "fixed", "score": "random", "steps": 9},
            "reward": "dllm_sampler.check.toys:reward",
            "candidates": 3,
        },
        {
            "inner": {"name": "dynamic", "score": "random", "threshold": 0.7, "steps": 3},
            "reward": "dllm_sampler.check.toys:reward",
            "candidates": 2,
            "alpha": 2.0,
        },
        {
            "inner": {"name": "fixed", "score": "random", "steps": 8},
            "reward": "dllm_sampler.check.toys:reward",
            "value": "masked",
            "alpha": 0.5,
        },
    ],
    "scheduler.s2d2": [
        {},
        {"threshold": 0.6, "steps": 3, "policy": "score_threshold", "least": 1.5, "estimator": "hard_margin_threshold"},
        {"policy": "score_hysteresis", "enter": 1.5, "leave": 1.0, "cost": 0.5, "cost_above": 0.5},
        {"policy": "contextual_bandit_ucb", "tempering": 0.5, "score": "margin"},
    ],
    "scheduler.s2d2_editing": [{"edit": 0.3, "extra": 3}, {"edit": 0.2, "extra": 1, "min_span": 3, "threshold": 0.5}],
    "scheduler.d2f": [{"threshold": 0.6}],
    "scheduler.lopa": [
        {"inner": {"name": "d2f", "threshold": 0.6}},
        {"inner": {"name": "threshold", "threshold": 0.7}, "forks": 3, "score": "margin", "share": 0.5, "alpha": 0.3},
    ],
    "scheduler.ssd": [{"width": 3}, {"inner": {"name": "factor", "factor": 0.7}, "length": 5}],
    "scheduler.hierarchical": [{}, {"low": 0.2, "threshold": 0.8, "remask": 0.4}],
    "scheduler.klass": [{"threshold": 0.3, "divergence": 1.0}, {"steps": 8, "history": 1, "take": "steadiest"}],
    "scheduler.leftright": [{"tokens_per_step": 2}, {"tokens_per_step": 3, "max_lookahead": 5}],
    "scheduler.learn2pd": [{"filter": toys.FILTER, "threshold": 0.5}],
    "scheduler.localleap": [{"threshold": 0.7, "relaxed": 0.3, "radius": 2}],
    "scheduler.pc": [{}, {"steps": 7, "decay": 0.0}],
    "scheduler.remix": [{"threshold": 0.4}, {"threshold": 0.2, "divergence": 0.01, "share": 0.9}],
    "scheduler.rcr": [{}, {"steps": 7}],
    "scheduler.remdm": [{}, {"steps": 9, "revisions": 2, "tokens": 2}],
    "scheduler.streaming": [{"threshold": 0.7, "alpha": 0.6}],
    "scheduler.slowfast": [{"threshold": 0.7}, {"threshold": 0.6, "glimpse": 0.2, "slow": 2, "truncate": False}],
    "scheduler.wino": [{"threshold": 0.4, "back": 0.5, "least": 2}, {"threshold": 0.2, "back": 0.9}],
    "scheduler.dynamic": [{"threshold": 0.6}, {"threshold": 0.7, "steps": 3}, {"score": "position", "steps": 4}],
    "blocks.adablock": [{"delimiters": [3, 15, 20, 34], "threshold": 0.1, "length": 7, "window": 0.5}],
    "blocks.ascending": [{"count": 3}],
    "blocks.multi_block": [{"length": 4, "add_threshold": 0.25}, {"length": 6, "full_threshold": 0.3}],
    "blocks.sliding": [{"masks": 4}, {"masks": 5, "max_width": 7, "until_end": True}],
    "cache.sliding": [
        {"before": 2, "every": 5},
        {"before": 1, "after": 2, "every": 4, "anchor": "last"},
        {"before": 0, "after": None, "every": 6, "anchor": "window"},
    ],
    "cache.delayed_prefix": [{"delay": 0}, {"delay": 2, "refresh_every": 3}],
    "blocks.pipeline": [{"length": 4, "add_threshold": 0.25, "full_threshold": 0.5}],
    "stop.end_of_text": [{}, {"mode": "predicted", "min_conf": 0.5}],
    "stop.prophet": [{"early": 2.0, "mid": 1.5, "late": 1.0}, {"start": 5, "early": 2.0, "mid": 1.5, "late": 1.0}],
    "cache.block_causal": [{}, {"store_pass": "separate"}, {"token_causal": True}],
    "cache.periodic_prefix": [{"every": 2}],
    "cache.dkv": [
        {"refresh_every": 3},
        {"refresh_every": 4, "per_block": False, "shift": "un_right"},
        {"mode": "pd", "refresh_every": 2},
        {"mode": "prefill"},
    ],
    "cache.dkv_greedy": [{"refresh_every": 3, "window": 1}, {"window": 0}],
    "cache.dllm": [{"prompt_every": 4, "response_every": 3, "guidance_every": 2}, {"response_every": 2, "ratio": 0.0}],
    "scheduler.random_order": [{}, {"steps": 7}],
    "cache.periodic_dual": [{"every": 3}],
    "cache.vicinity": [{"before": 2, "after": 3, "warmup": 2}, {"before": 0, "after": 4, "warmup": 0}],
    "cache.sparse": [{}, {"keep": 0.3, "kernel": 1, "delay": 0}],
    "cache.dpad": [
        {"window": 7, "scale": 1.5},
        {"inner": "dual", "dropout": "uniform", "window": 6, "number": 3},
        {"inner": "none", "dropout": "even", "window": 8, "scale": 1.2},
    ],
    "cache.streaming": [{"window": 2}, {"inner": "sparse", "window": 3, "tail": 0}],
    "cache.trailing": [{"window": 3}, {"window": 0}],
    "cache.d2f": [{}, {"attention": "block_causal"}],
    "cache.elastic": [{"window": 4}, {"window": 3, "track": 2, "gamma": 0.99, "full_every": 5}],
    "cache.d2": [{"masks": 4}, {"masks": 2, "rollout": 0.4, "gap": 0}],
    "blocks.fixed": [
        {"length": toys.FILTER_BLOCK},
        {"length": 17},
        {"length": 1},
        {"length": 8},
        {"length": 6, "part": 3},
    ],
    "guide.temperature": [{"value": 0.8}, {"value": 1.5, "measured": True}],
    "guide.top_k": [{"k": 4, "measured": True}],
    "guide.top_p": [{"p": 0.7, "measured": True}],
    "guide.end_tokens": [{}, {"mode": "defer"}],
    "guide.regex": [{"pattern": "([a-j]{1,3}[0-9])+|[a-j]"}, {"pattern": "([a-j][0-9]?)*(true|null)?"}],
    "guide.choices": [{"choices": ["abc", "cd-xy"]}],
    "guide.grammar": [{"grammar": "json", "tries": 12}],
    "guide.json_schema": [{"schema": '{"type": "boolean"}'}],
}


def settings(group: str) -> list[Settings]:
    """Return every plug-in of a group under every one of its settings."""
    return [
        {"name": name, **{key: value() if callable(value) else value for key, value in chosen.items()}}
        for name in config.names(group)
        for chosen in SETTINGS.get(f"{group}.{name}", [{}])
    ]
