"""Which combinations the contract is checked on: everything in `conf/`, found by name.

A new YAML is in the list at once. Their settings stand in `dllm_sampler.eval.testbeds.plugins`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dllm_sampler import Commits, Result, Sampler, Scheduler, UserError, config
from dllm_sampler.eval.testbeds.plugins import Settings, settings
from tests import toys
from tests.sampling import Draw, sampled

TOKENS = 14


def one_each(group: str) -> list[Any]:
    """Every plug-in of a group under every one of its settings; slow are all but one of each."""
    return sampled(settings(group), lambda one: [one["name"]], label)


def kinds(scheduler: Settings) -> list[tuple[str, object]]:
    """What a scheduler declares of itself."""
    traits = config.build("scheduler", scheduler).traits
    return [(f"traits.{one.name}", getattr(traits, one.name)) for one in fields(traits)]


def one_of_each_kind() -> list[Any]:
    """Every scheduler under every one of its settings; slow are all but a sample that meets each value of each trait.

    For what the engine or a cache must do, and a scheduler changes by its traits alone.
    """
    return sampled(settings("scheduler"), kinds, label)


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
    return "causal" if config.build("cache", cache).causal else "llada"


def legal(**plugins: Any) -> bool:
    """Whether `plugins` accepts these together; that it refuses with reason is the business of test_product."""
    try:
        toys.sampler(**plugins)
    except UserError:
        return False
    return True


def legal_caches(scheduler: Settings) -> list[Settings]:
    """The caches under which a scheduler may run."""
    kind = toy_for(scheduler)
    return [cache for cache in settings("cache") if legal(kind=kind, scheduler=scheduler, cache=cache)]


@functools.cache
def _needs(name: str) -> str | None:
    setting = next(one for one in settings("scheduler") if one["name"] == name)
    found = next((kind for kind in ("llada", "causal", "context") if legal(kind=kind, scheduler=setting)), "llada")
    return None if found == "llada" else found


def toy_for(scheduler: Settings, other: str = "llada") -> str:
    """A toy that a scheduler may run on: the block-causal one, or one with a causal context, where it needs that."""
    return _needs(scheduler["name"]) or other


def fits(kind: str, group: str, plugins: dict[str, Any], one: Settings) -> bool:
    """Whether a plug-in may be added to these on a toy; the block-causal one takes another cache only if it must."""
    if kind == "causal" and group == "cache" and one["name"] == "none":
        return not legal(kind=kind, **plugins, cache="block_causal")
    return legal(kind=kind, **plugins, **{group: one})


def cases() -> list[Case]:
    """Every scheduler under two caches, and on the block-causal toy, if it can; all other plug-ins are drawn, so that
    each is met.

    Every pair of plug-ins, and more, runs in test_product.
    """
    draws = {group: Draw(settings(group), group) for group in ("cache", "blocks", "stop", "guide")}
    causal = {
        "cache": Draw(
            [one for one in settings("cache") if one["name"] in ("block_causal", "sub_block", "none")], "causal cache"
        ),
        "blocks": Draw([one for one in settings("blocks") if one["name"] == "fixed"], "causal blocks"),
    }
    toy, found = Draw(toys.TOYS, "toy"), dict[str, Case]()
    for scheduler in settings("scheduler"):
        kinds = (toy_for(scheduler, toy()), toy_for(scheduler, toy()), "causal")
        for kind in kinds if legal(kind="causal", scheduler=scheduler) else kinds[:2]:
            plugins: dict[str, Settings] = {"scheduler": scheduler}
            for group, draw in (draws | causal if kind == "causal" else draws).items():
                plugins[group] = draw(functools.partial(fits, kind, group, plugins))
            case = Case(kind, **plugins)
            found[case.id] = case
    return list(found.values())


CASES = cases()

# Those whose steps read nothing of the device. A cache that `syncs` has to: what it reads decides the shape of its next
# layer. A guide that `vetoes` looks at texts, and the reward of svdd too: the tests of these count how often.
SILENT = [
    case
    for case in CASES
    if not case.sampler.plugins.cache.syncs
    and case.scheduler["name"] != "svdd"
    and not any(guide.vetoes for guide in case.sampler.plugins.guides)
]


def thinned(chosen: Iterable[Case], *groups: str) -> list[Any]:
    """The cases; slow are all but a sample that meets each toy and plug-in (of these groups, or of all).

    The group `traits` stands for what schedulers declare (`kinds`).
    """

    def meets(case: Case) -> list[tuple[str, object]]:
        named = [(group, one["name"]) for group, one in case.plugins.items() if group in groups or not groups]
        return [("toy", case.toy), *named, *(kinds(case.scheduler) if "traits" in groups else ())]

    return sampled(list(chosen), meets, lambda case: case.id)
