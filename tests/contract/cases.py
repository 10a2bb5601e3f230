"""Which combinations the contract is checked on: everything in `conf/`, found by name.

A new YAML is in the list at once, with its defaults. Where these are too tame for a canvas of a few tokens, `SETTINGS`
gives a plug-in more to do; every entry there is one more setting under which the whole contract holds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dllm_sampler import Commits, Result, Sampler, Scheduler, UserError, config
from tests import toys
from tests.sampling import Draw, sampled

Settings = dict[str, Any]
TOKENS = 14

SETTINGS: dict[str, list[Settings]] = {
    "scheduler.threshold": [{}, {"threshold": 0.6}],
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
    ],
    "scheduler.origin": [{}, {"steps": 4}],
    "scheduler.apd": [
        {"verifier": toys.verifier(), "mixture_weight": 0.9, "max_lookahead": None},
        {"verifier": toys.verifier(), "mixture_weight": 0.8, "max_lookahead": 4},
        {"verifier": toys.verifier(vocab=36), "mixture_weight": 0.0, "max_lookahead": 5},
    ],
    "scheduler.ccd": [{"warmup": 1}, {"dynamic": False, "steps": 8, "score": "margin"}],
    "scheduler.ccd_marginal": [{"epsilon": 1.0}, {"dynamic": False, "steps": 8}],
    "scheduler.certainty": [{"sigma": 1.0}, {"steps": 7}],
    "scheduler.credit": [{"threshold": 0.6, "memory": 2}],
    "scheduler.dinfer": [{"threshold": 0.7, "slack": 0.1}],
    "scheduler.dus": [{}, {"skip": 0.0, "base": 3}],
    "scheduler.editing": [
        {"threshold": 0.5, "edit": 0.3, "extra": 3},
        {"threshold": 0.3, "edit": 0.2, "quota": 2, "extra": 1},
    ],
    "scheduler.entropy": [{"entropy": 1.0}],
    "scheduler.entropy_bound": [{"gamma": 1.0}],
    "scheduler.entropy_renoise": [
        {"max_denoising_steps": 5, "entropy_bound": 1.0, "t_min": 1.0, "t_max": 2.0, "confidence_threshold": 1.5},
        {"max_denoising_steps": 4, "t_min": 0.0, "t_max": 0.0, "entropy_bound": 2.0, "stability_threshold": None},
    ],
    "scheduler.block_refine": [{"steps": 4}, {"steps": 9, "threshold": 0.6}],
    "scheduler.eoser": [{"low": 0.0}, {"low": 0.3, "progress": "step", "steps": 6}],
    "scheduler.freedave": [
        {},
        {"inner": {"name": "threshold", "threshold": 0.6}, "draft": 5},
        {"inner": {"name": "threshold", "threshold": 0.6}, "match": "subset"},
        {"inner": {"name": "ccd", "warmup": 1}, "eager": True},
    ],
    "scheduler.svdd": [
        {"inner": {"name": "fixed", "score": "random", "steps": 9}, "reward": "tests.toys:reward", "candidates": 3},
        {
            "inner": {"name": "dynamic", "score": "random", "threshold": 0.7, "steps": 3},
            "reward": "tests.toys:reward",
            "candidates": 2,
            "alpha": 2.0,
        },
        {
            "inner": {"name": "fixed", "score": "random", "steps": 8},
            "reward": "tests.toys:reward",
            "value": "masked",
            "alpha": 0.5,
        },
    ],
    "scheduler.ssd": [{"width": 3}, {"inner": {"name": "factor", "factor": 0.7}, "length": 5}],
    "scheduler.hierarchical": [{}, {"low": 0.2, "threshold": 0.8, "remask": 0.4}],
    "scheduler.klass": [{"threshold": 0.3, "divergence": 1.0}, {"steps": 8, "history": 1, "take": "steadiest"}],
    "scheduler.leftright": [{"tokens_per_step": 2}, {"tokens_per_step": 3, "max_lookahead": 5}],
    "scheduler.learn2pd": [{"filter": toys.FILTER, "threshold": 0.5}],
    "scheduler.localleap": [{"threshold": 0.7, "relaxed": 0.3, "radius": 2}],
    "scheduler.pc": [{}, {"steps": 7, "decay": 0.0}],
    "scheduler.rcr": [{}, {"steps": 7}],
    "scheduler.remdm": [{}, {"steps": 9, "revisions": 2, "tokens": 2}],
    "scheduler.slowfast": [{"threshold": 0.7}, {"threshold": 0.6, "glimpse": 0.2, "slow": 2, "truncate": False}],
    "scheduler.wino": [{"threshold": 0.4, "back": 0.5, "least": 2}, {"threshold": 0.2, "back": 0.9}],
    "scheduler.dynamic": [{"threshold": 0.6}, {"threshold": 0.7, "steps": 3}, {"score": "position", "steps": 4}],
    "blocks.adablock": [{"delimiters": [3, 15, 20, 34], "threshold": 0.1, "length": 7, "window": 0.5}],
    "blocks.ascending": [{"count": 3}],
    "stop.end_of_text": [{}, {"mode": "predicted", "min_conf": 0.5}],
    "stop.prophet": [{"early": 2.0, "mid": 1.5, "late": 1.0}, {"start": 5, "early": 2.0, "mid": 1.5, "late": 1.0}],
    "cache.block_causal": [{}, {"store_pass": "separate"}],
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
    "cache.trailing": [{"window": 3}, {"window": 0}],
    "cache.elastic": [{"window": 4}, {"window": 3, "track": 2, "gamma": 0.99, "full_every": 5}],
    "cache.d2": [{"masks": 4}, {"masks": 2, "rollout": 0.4, "gap": 0}],
    "blocks.fixed": [{"length": toys.FILTER_BLOCK}, {"length": 17}, {"length": 1}, {"length": 8}],
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
    """Every plug-in of a group under every one of its settings."""
    return [
        {"name": name, **chosen} for name in config.names(group) for chosen in SETTINGS.get(f"{group}.{name}", [{}])
    ]


def one_each(group: str) -> list[Any]:
    """Every plug-in of a group under every one of its settings; slow are all but one of each."""
    return sampled(settings(group), lambda one: [one["name"]], label)


@dataclass(frozen=True)
class Case:
    """One combination of plug-ins on one toy."""

    toy: str
    scheduler: Settings
    cache: Settings
    blocks: Settings
    stop: Settings
    guide: Settings

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def plugins(self) -> dict[str, Any]:
        return {group: getattr(self, group) for group in ("scheduler", "cache", "blocks", "stop", "guide")}

    @property
    def id(self) -> str:
        return "-".join([self.toy, *(label(chosen) for chosen in self.plugins.values())])

    @functools.cached_property
    def sampler(self) -> Sampler:
        return toys.sampler(self.toy, **self.plugins)

    @property
    def scheduling(self) -> Scheduler:
        """The scheduler itself, which declares what it may do."""
        return self.sampler.plugins.scheduler

    def generate(self, rows: list[int], **options: Any) -> Result:
        """The answer to some of the toy prompts, as one batch."""
        sampler = toys.sampler(self.toy, **self.plugins, **options)
        return sampler.generate(
            [toys.PROMPTS[row] for row in rows], max_new_tokens=TOKENS, seed=[toys.SEEDS[row] for row in rows]
        )

    @functools.cache  # noqa: B019 - a handful of small results
    def stream(self) -> list[Commits]:
        """Every step of all toy prompts as one batch."""
        return list(toys.sampler(self.toy, **self.plugins).stream(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS))


def label(chosen: Settings) -> str:
    return "_".join(Path(value).stem if isinstance(value, str) else str(value) for value in chosen.values())


def toy_of(cache: Settings) -> str:
    """A toy that the cache serves."""
    return "causal" if cache["name"] == "block_causal" else "llada"


def legal(**plugins: Any) -> bool:
    """Whether `plugins` accepts these together; that it refuses with reason is the business of test_product."""
    try:
        toys.sampler(**plugins)
    except UserError:
        return False
    return True


def legal_caches(scheduler: Settings) -> list[Settings]:
    """The caches under which a scheduler may run."""
    return [cache for cache in settings("cache") if legal(scheduler=scheduler, cache=cache)]


def fits(kind: str, group: str, plugins: dict[str, Any], one: Settings) -> bool:
    """Whether a plug-in may be added to these on a toy; the block-causal one takes another cache only if it must."""
    if kind == "causal" and group == "cache" and one["name"] == "none":
        return not legal(kind=kind, **plugins, cache="block_causal")
    return legal(kind=kind, **plugins, **{group: one})


def cases() -> list[Case]:
    """Every scheduler under two caches, and on the block-causal toy; all other plug-ins are drawn, so that each is met.

    Every pair of plug-ins, and more, runs in test_product.
    """
    draws = {group: Draw(settings(group), group) for group in ("cache", "blocks", "stop", "guide")}
    causal = {
        "cache": Draw([one for one in settings("cache") if one["name"] in ("block_causal", "none")], "causal cache"),
        "blocks": Draw([one for one in settings("blocks") if one["name"] == "fixed"], "causal blocks"),
    }
    toy, found = Draw(toys.TOYS, "toy"), dict[str, Case]()
    for scheduler in settings("scheduler"):
        for kind, drawing in ((toy(), draws), (toy(), draws), ("causal", draws | causal)):
            plugins: dict[str, Settings] = {"scheduler": scheduler}
            for group, draw in drawing.items():
                plugins[group] = draw(functools.partial(fits, kind, group, plugins))
            case = Case(kind, **plugins)
            found[case.id] = case
    return list(found.values())


CASES = cases()


def thinned(chosen: Iterable[Case], *groups: str) -> list[Any]:
    """The cases; slow are all but a sample that meets each toy and plug-in (of these groups, or of all)."""

    def meets(case: Case) -> list[tuple[str, str]]:
        named = [(group, one["name"]) for group, one in case.plugins.items() if group in groups or not groups]
        return [("toy", case.toy), *named]

    return sampled(list(chosen), meets, lambda case: case.id)
