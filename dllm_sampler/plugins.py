"""A set of plug-ins, built from names and checked against one another and the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from dllm_sampler import config
from dllm_sampler.cache.base import Cache
from dllm_sampler.cache.block_causal import BlockCausalCache
from dllm_sampler.errors import UserError
from dllm_sampler.guides import EndTokens, Temperature, TopK, TopP
from dllm_sampler.protocols import Blocks, Guide, ModelSpec, Scheduler, Stop
from dllm_sampler.readout import FIELDS
from dllm_sampler.schedulers.stored import StorePass

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Plugins:
    """One of each kind. `compat` lets the mask id be chosen, as published code does."""

    scheduler: Scheduler
    blocks: Blocks
    stop: Stop
    cache: Cache
    guides: tuple[Guide, ...]
    compat: bool

    def __post_init__(self) -> None:
        draws = any(guide.draws for guide in self.guides)
        object.__setattr__(self, "scheduler", self.scheduler.beside(self.blocks, draws))

    @property
    def needs(self) -> frozenset[str]:
        """Readout fields that any of them wants."""
        return self.scheduler.needs | self.blocks.needs | self.stop.needs


def assemble(
    spec: ModelSpec,
    scheduler: object,
    blocks: object,
    stop: object,
    cache: object,
    guide: object,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    compat: bool,
) -> Plugins:
    """Build every plug-in (`config.build` says what a spec may be) and refuse combinations that cannot work.

    Raises:
        UserError: an unknown name or field, a bad value, or an impossible combination.
    """
    guides: list[Guide] = list(config.build("guide", guide))
    # A shortcut sets the field of the guide that is there already. Otherwise a temperature comes before any
    # truncation, whose meaning depends on it, and truncations come last.
    if temperature is not None:
        first = next((i for i, one in enumerate(guides) if isinstance(one, TopK | TopP)), len(guides))
        _set(guides, Temperature(value=temperature), "value", first)
    if top_k is not None:
        _set(guides, TopK(k=top_k), "k", len(guides))
    if top_p is not None:
        _set(guides, TopP(p=top_p), "p", len(guides))
    rule = _of(Scheduler, "scheduler", config.build("scheduler", scheduler)).bind(spec)
    plugins = Plugins(
        scheduler=rule,
        blocks=_of(Blocks, "blocks", config.build("blocks", blocks)).bind(spec),
        stop=_of(Stop, "stop", config.build("stop", stop)).bind(spec),
        cache=_of(Cache, "cache", config.build("cache", cache)).suit(spec, rule),
        guides=rule.guides(tuple(_of(Guide, "guide", one).bind(spec) for one in guides)),
        compat=compat,
    )
    check(plugins, spec)
    if isinstance(plugins.cache, BlockCausalCache) and plugins.cache.store_pass == "separate":
        return replace(plugins, scheduler=StorePass(plugins.scheduler))
    return plugins


def _set(guides: list[Guide], new: Guide, field: str, place: int) -> None:
    """Give the guides of `new`'s kind its `field`; where there is none, insert it."""
    found = [i for i, one in enumerate(guides) if isinstance(one, type(new))]
    for i in found:
        guides[i] = replace(cast(Any, guides[i]), **{field: getattr(new, field)})
    if not found:
        guides.insert(place, new)


def _of(kind: type[Kind], group: str, plugin: object) -> Kind:
    if not isinstance(plugin, kind):
        raise UserError(f"{group} must be a name, a settings dict or a {kind.__name__}, not {type(plugin).__name__}")
    return plugin


def check(plugins: Plugins, spec: ModelSpec) -> None:
    """Refuse a set of plug-ins that cannot work together, or not with this model.

    Raises:
        UserError: naming both sides and the way out.
    """
    plugins.cache.refuse_live()
    for plugin in (plugins.scheduler, plugins.blocks, plugins.stop):
        unknown = sorted(plugin.needs - FIELDS)
        if unknown:
            raise UserError(
                f"{type(plugin).__name__} needs {', '.join(unknown)}, which no readout has: there are"
                f" {', '.join(sorted(FIELDS))}"
            )
    if plugins.cache.stores and not spec.cacheable:
        raise UserError(
            f"cache={type(plugins.cache).__name__} cannot serve this model, whose forward computes whole rows only:"
            " use cache=none"
        )
    scheduler, cache = type(plugins.scheduler).__name__, type(plugins.cache).__name__
    if plugins.scheduler.whole and plugins.cache.stores:
        raise UserError(
            f"scheduler={scheduler} needs every position computed in each forward, and cache={cache} computes a part:"
            " use cache=none"
        )
    if plugins.scheduler.exact and plugins.cache.chooses:
        raise UserError(
            f"scheduler={scheduler} needs a prediction at every position it asks about, and cache={cache} chooses"
            " which masks to predict: use cache=dual or cache=none"
        )
    if plugins.scheduler.blind and not (spec.cacheable and spec.mask_id is not None):
        raise UserError(
            f"scheduler={scheduler} adds shadow rows of mask tokens to the forward, and this model takes plain rows"
            " only: use another scheduler, threshold say"
        )
    if plugins.cache.foresees and not plugins.scheduler.plans:
        raise UserError(
            f"cache={cache} must know before each forward what it will commit, and scheduler={scheduler} decides that"
            " by the forward's predictions: use scheduler=random_order, or another cache, dkv say"
        )
    if plugins.scheduler.drafts:
        if not plugins.cache.steady:
            raise UserError(
                f"scheduler={scheduler} makes fewer forwards than the scheduler inside, and what cache={cache} keeps"
                " changes from one forward to the next, so that tokens would differ: use cache=dual, prefix or none"
            )
        if plugins.scheduler.opens_ahead and plugins.cache.stores:
            raise UserError(
                f"scheduler.eager opens blocks without a forward of their own, in which cache={cache} refreshes what it"
                " keeps: use scheduler.eager=false, or cache=none"
            )
        if plugins.stop.cuts or plugins.stop.fills:
            raise UserError(
                f"scheduler={scheduler} takes several steps in one forward, and stop={type(plugins.stop).__name__}"
                " would change the canvas between them: use stop=prefix, block or none"
            )
    if plugins.scheduler.horizon is not None and plugins.cache.keeps_noise:
        raise UserError(
            f"scheduler={scheduler} hides what lies beyond its max_lookahead, and cache={cache} serves noise as an"
            " earlier forward saw it: use cache=trailing, cache=none or scheduler.max_lookahead=null"
        )
    trained = plugins.scheduler.block_length
    if trained is not None and plugins.blocks.lookahead(trained * 2**16) != trained:
        raise UserError(
            f"scheduler={scheduler} was trained on blocks of {trained} positions, and blocks="
            f"{type(plugins.blocks).__name__} makes others: use blocks=fixed with blocks.length={trained} or train anew"
        )
    blocks = type(plugins.blocks).__name__
    if spec.mask_id is None and not plugins.scheduler.uniform:
        raise UserError(
            f"scheduler={scheduler} fills masks, and this model has none, its noise are random tokens (uniform"
            " diffusion): use scheduler=entropy_renoise or scheduler=block_refine"
        )
    if spec.encoder and plugins.blocks.lookahead((spec.block_length or 1) * 2**16) != spec.block_length:
        raise UserError(
            f"this model denoises canvases of {spec.block_length} positions, and blocks={blocks} makes others: use"
            f" blocks=fixed with blocks.length={spec.block_length} or null"
        )
    if spec.encoder and plugins.stop.cuts:
        raise UserError(
            f"stop={type(plugins.stop).__name__} cuts the canvas behind an end token, and this model knows whole"
            " canvases only: use stop=prefix or stop=block"
        )
    if spec.attention == "block_causal" and plugins.blocks.grid is None:
        raise UserError(
            f"this model is block-causal, its attention knows blocks of one length from the first token on, and blocks="
            f"{blocks} makes others: use blocks=fixed"
        )
    if spec.attention == "block_causal" and plugins.cache.stores and not isinstance(plugins.cache, BlockCausalCache):
        raise UserError(
            f"cache={cache} is for models that see the whole canvas, and this one is block-causal: use"
            " cache=block_causal, which is exact, or cache=none"
        )
    if spec.attention != "block_causal" and isinstance(plugins.cache, BlockCausalCache):
        raise UserError(
            f"cache={cache} is for block-causal models, and this one sees the whole canvas: use cache=dual, or none"
        )
    draws = any(guide.draws for guide in plugins.guides)
    for guide in plugins.guides:
        if isinstance(guide, TopK | TopP) and not draws and not guide.measures:
            raise UserError(
                f"{type(guide).__name__} changes nothing without a temperature: tokens are chosen greedily;"
                " add temperature=1"
            )
    cut = next((i for i, guide in enumerate(plugins.guides) if isinstance(guide, TopK | TopP)), len(plugins.guides))
    if any(isinstance(guide, EndTokens) for guide in plugins.guides[cut:]):
        raise UserError(
            f"guide=EndTokens stands behind {type(plugins.guides[cut]).__name__}, which may have left nothing but end"
            " tokens: put end_tokens first"
        )
