"""Which combinations the contract is checked on: everything in `conf/`, found by name.

A new YAML is in the list at once. Settings are in `dllm_sampler.check.settings`. `golden.json` has the cases
that were drawn before, with what they gave (`golden.py`): collecting the tests assembles samplers for new cases only.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dllm_sampler import Result, Scheduler, config
from dllm_sampler.check import promises
from dllm_sampler.check.promises import GROUPS
from dllm_sampler.check.settings import Settings, settings
from dllm_sampler.core.spec import ChangingLength
from dllm_sampler.engine.in_flight import obstacle
from tests import toys
from tests.sampling import Draw, sample, sampled

TOKENS = promises.TOKENS
GOLDEN = Path(__file__).parent / "golden.json"


def one_each(group: str) -> list[Any]:
    """Every plug-in of a group under every one of its settings; slow are all but one of each."""
    return sampled(settings(group), lambda one: [one["name"]], label)


_KINDS: dict[str, list[tuple[str, object]]] = {}


def kinds(scheduler: Settings) -> list[tuple[str, object]]:
    """Return what a scheduler declares of itself: each trait and its value, and each rare one without its numbers."""
    if (name := str(scheduler)) not in _KINDS:  # each is asked for by many files
        traits = config.build("scheduler", scheduler).traits
        plain = [(f"traits.{one.name}", getattr(traits, one.name)) for one in fields(traits) if one.name != "rare"]
        _KINDS[name] = [*plain, *(("traits.rare", type(one).__name__) for one in traits.rare)]
    return _KINDS[name]


@functools.cache  # many files ask, and each scheduler is built
def one_of_each_kind() -> list[Any]:
    """Every scheduler under every one of its settings; slow are all but a sample that meets each value of each trait.

    For what the engine or a cache must do, and a scheduler changes by its traits alone.
    """
    return sampled(settings("scheduler"), kinds, label)


@dataclass(frozen=True)
class Case(promises.Case):
    """A combination of packaged plug-ins, with a name and facts that were recorded."""

    __hash__ = promises.Case.__hash__

    @property
    def parts(self) -> list[str]:
        """The toy, and the label of each plug-in."""
        return [self.toy, *(label(chosen) for chosen in self.plugins.values())]

    @property
    def id(self) -> str:
        return "-".join(self.parts)

    @property
    def scheduling(self) -> Scheduler:
        """The scheduler itself, which declares what it may do."""
        return self.sampler.plugins.scheduler

    @functools.cached_property
    def facts(self) -> dict[str, bool]:
        """What tests choose cases by: as recorded, or of the assembled sampler."""
        return RECORDED[self.id]["facts"] if self.id in RECORDED else self.compute_facts()

    @functools.cached_property
    def record(self) -> dict[str, Any]:
        """What the case gives for all toy prompts: as recorded, or computed now."""
        return RECORDED[self.id] if self.id in RECORDED else self.compute_record()

    def compute_record(self) -> dict[str, Any]:
        """Return what the case gives, in the form of `golden.json`."""
        return {"parts": self.parts, "facts": self.compute_facts(), **by_row(self.result)}

    def compute_facts(self) -> dict[str, bool]:
        """Return the facts of the assembled sampler.

        `reads`: a step may read the device. `static`: a CUDA graph can repeat its steps. `joins`: a row can join a
        running batch. `moves`: the answer's length changes. `revises`: committed tokens may be replaced, also after
        an end-of-text token.
        """
        plugins, sampler = self.sampler.plugins, self.sampler
        traits, vetoes = plugins.scheduler.traits, any(guide.vetoes for guide in plugins.guides)
        return {
            "reads": promises.reads(self),
            "static": traits.graph_safe and not plugins.cache.syncs and not plugins.cache.shared and not vetoes,
            "joins": obstacle(plugins, sampler.noise, sampler.denoiser) is None,
            "moves": traits.has(ChangingLength),
            "revises": traits.revises or self.stop["name"] == "fill",
        }


def by_row(result: Result) -> dict[str, list[Any]]:
    """Return what a record has of each row."""
    found = {
        "tokens": result.trace.ids[:, result.trace.origin :],
        "steps": result.step_map,
        "forwards": result.nfe,
        "computed": result.trace.rows,
        "lengths": result.lengths,
        "complete": result.complete,
    }
    return {name: one.tolist() for name, one in found.items()}


def label(chosen: Settings) -> str:
    return "_".join(Path(value).stem if isinstance(value, str) else str(value) for value in chosen.values())


def toy_of(cache: Settings) -> str:
    """A toy that the cache serves; a wrapper does not say."""
    return "causal" if getattr(config.build("cache", cache), "causal", False) else "llada"


def legal(**plugins: Any) -> bool:
    """Whether `plugins` accepts these together; that it refuses with reason is the business of test_product."""
    return promises.refusal(plugins.pop("kind", "llada"), **plugins) is None


@functools.cache
def _needs(name: str) -> str | None:
    setting = next(one for one in settings("scheduler") if one["name"] == name)
    found = next(
        (kind for kind in ("llada", "causal", "context", "uniform") if legal(kind=kind, scheduler=setting)), "llada"
    )
    return None if found == "llada" else found


def toy_for(scheduler: Settings, other: str = "llada") -> str:
    """A toy that a scheduler may run on: the block-causal one, or one with a causal context, where it needs that."""
    return _needs(scheduler["name"]) or other


def fits(kind: str, group: str, plugins: dict[str, Any], one: Settings) -> bool:
    """Whether a plug-in may be added to these on a toy; the block-causal one takes another cache only if it must."""
    if kind == "causal" and group == "cache" and one["name"] == "none":
        return not legal(kind=kind, **plugins, cache="block_causal")
    return legal(kind=kind, **plugins, **{group: one})


def recorded() -> dict[str, Any]:
    """Return what `golden.json` has of each case, by its id."""
    return json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.is_file() else {}


def cases() -> list[Case]:
    """Every scheduler under two caches, and on the block-causal toy, if it can. All other plug-ins are drawn, so that
    each occurs. Recorded cases stay, and more are drawn for what is new.

    Every pair of plug-ins, and more, runs in test_product.
    """
    by_label = {group: {label(one): one for one in settings(group)} for group in GROUPS}
    found = dict[str, Case]()
    for name, one in RECORDED.items():
        toy, *labels = one["parts"]
        if all(part in by_label[group] for group, part in zip(GROUPS, labels, strict=True)):
            found[name] = Case(toy, *(by_label[group][part] for group, part in zip(GROUPS, labels, strict=True)))

    def missing(group: str) -> list[Settings]:
        used = [getattr(case, group) for case in found.values()]
        return [one for one in settings(group) if one not in used]

    draws = {group: Draw(settings(group), group) for group in GROUPS[1:]}
    causal = {
        "cache": Draw(
            [one for one in settings("cache") if one["name"] in ("block_causal", "sub_block", "none")], "causal cache"
        ),
        "blocks": Draw([one for one in settings("blocks") if one["name"] == "fixed"], "causal blocks"),
    }
    draw_toy = Draw(toys.TOYS, "toy")

    def add(kind: str, scheduler: Settings, **given: Settings) -> None:
        plugins: dict[str, Settings] = {"scheduler": scheduler, **given}
        for group, draw in (draws | causal if kind == "causal" else draws).items():
            if group not in given:
                plugins[group] = draw(functools.partial(fits, kind, group, plugins))
        case = Case(kind, **plugins)
        found[case.id] = case

    for scheduler in missing("scheduler"):
        kinds = (toy_for(scheduler, draw_toy()), toy_for(scheduler, draw_toy()), "causal")
        for kind in kinds if legal(kind="causal", scheduler=scheduler) else kinds[:2]:
            add(kind, scheduler)
    for group in GROUPS[1:]:
        for one in missing(group):
            kind = toy_of(one) if group == "cache" else "llada"
            fit = (
                scheduler
                for scheduler in settings("scheduler")
                if legal(kind=kind, scheduler=scheduler, **{group: one})
            )
            add(kind, next(fit), **{group: one})
    return list(found.values())


RECORDED = recorded()
CASES = cases()

# Those whose steps read nothing of the device. A cache that `syncs` has to: what it reads decides the shape of its next
# layer. A guide that `vetoes` looks at texts, and the reward of svdd too: the tests of these count how often.
SILENT = [case for case in CASES if not case.facts["reads"]]


def met(case: Case, groups: Iterable[str] = ()) -> list[tuple[str, object]]:
    """Return the toy and the plug-ins of a case, of these groups or of all. The group `traits` stands for `kinds`."""
    named = [(group, one["name"]) for group, one in case.plugins.items() if group in groups or not groups]
    return [("toy", case.toy), *named, *(kinds(case.scheduler) if "traits" in groups else ())]


# Guarantees choose from few cases if they can: what one of them has computed serves the others.
SHARED = set(sample(CASES, lambda case: [*met(case), *kinds(case.scheduler), *case.facts.items()]))


def thinned(chosen: Iterable[Case], *groups: str, first: Callable[[Case], bool] = SHARED.__contains__) -> list[Any]:
    """The cases; slow are all but a sample that meets what any of them does (`met`)."""
    return sampled(list(chosen), lambda case: met(case, groups), lambda case: case.id, first)
