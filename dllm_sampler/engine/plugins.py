"""A set of plug-ins, built from names and checked against one another and the model."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from dllm_sampler import config
from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.cache.suffix import SuffixCache
from dllm_sampler.core.around import Around
from dllm_sampler.core.checks import check_count
from dllm_sampler.core.naming import described, named
from dllm_sampler.core.protocols import (
    Blocks,
    Cache,
    Context,
    Foresees,
    Guide,
    Paced,
    Particles,
    Scheduler,
    Stop,
    Tempered,
    Wraps,
    is_random,
)
from dllm_sampler.core.spec import (
    CausalQueries,
    ChangingLength,
    CommittedMasks,
    LeftToRightVerifier,
    ModelSpec,
    OwnInputs,
    PlannedCommits,
    ShadowRows,
    TrainedBlocks,
    Traits,
    UniformNoise,
    WatchedLayers,
)
from dllm_sampler.engine.readout import FIELDS
from dllm_sampler.errors import UserError, invalid
from dllm_sampler.guides import Temperature, TopK, TopP

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = TypeVar("Kind")
Judge = Literal["draw", "best"]


@dataclass(frozen=True)
class Plugins:
    """A set of plug-ins for one model, bound to each other.

    Args:
        compat: let the mask id be chosen, as published code does.
        judge: `draw` if plug-ins judge the drawn tokens, `best` if they judge the most likely ones.
    """

    scheduler: Scheduler
    blocks: Blocks
    stop: Stop
    cache: Cache
    guides: tuple[Guide, ...]
    compat: bool
    particles: Particles
    context: Context = field(repr=False, compare=False)  # without the scheduler
    judge: Judge = "draw"
    paced: bool = field(init=False, repr=False, compare=False)  # the scheduler measures time (`Paced`)
    owns_noise: bool = field(init=False, repr=False, compare=False)  # the scheduler writes random tokens itself
    foresees: bool = field(init=False, repr=False, compare=False)  # the cache must know what comes next (`Foresees`)

    @property
    def described(self) -> str:
        """Names of all plug-ins, with the settings that differ from their defaults."""
        kinds = [f"{kind}={described(getattr(self, kind))}" for kind in ("scheduler", "blocks", "stop", "cache")]
        guides = ", ".join(map(described, self.guides))
        kinds += [f"guide=[{guides}]"] if guides else []
        return ", ".join(kinds if self.particles.count == 1 else [*kinds, f"particles={described(self.particles)}"])

    @property
    def needs(self) -> frozenset[str]:
        """Fields of `Readout` that scheduler, blocks, stop or a vetoing guide needs."""
        # Such a guide looks for another token where it refuses one.
        vetoed = {"draw", "logits"} if any(guide.vetoes for guide in self.guides) else frozenset[str]()
        return self.scheduler.needs | self.blocks.needs | self.stop.needs | vetoed

    @property
    def watched_layers(self) -> int:
        """Number of last layers whose attention a plug-in needs. 0 if none needs it."""
        watched = self.scheduler.traits.find(WatchedLayers) or WatchedLayers()
        return watched.count if "attention" in self.needs else 0

    @property
    def forbidden_token(self) -> int | None:
        """The token whose commits leave noise: under `compat` the mask token, unless the scheduler may commit it."""
        return self.context.spec.mask_id if self.compat and not self.scheduler.traits.has(CommittedMasks) else None

    def bound(self, tokens: int) -> int:
        """Return an upper bound on the number of steps. A step with a vetoing guide may commit a single token.

        If rows of one prompt wait for each other, in the worst case they run one after the other.
        """
        steps = self.scheduler.bound(tokens)
        steps = steps + tokens if any(guide.vetoes for guide in self.guides) else steps
        return steps * self.particles.count if self.particles.meets else steps

    @property
    def forms(self) -> int:
        """Number of forms of answers. Each prompt names a form. 0 if no guide has a list of forms."""
        return max((guide.forms for guide in self.guides), default=0)

    def __post_init__(self) -> None:
        # Looked up once for all steps: `isinstance` of a protocol takes as long as ten small operations.
        vars(self).update(paced=isinstance(self.scheduler, Paced), foresees=isinstance(self.cache, Foresees))
        uniform = self.scheduler.traits.find(UniformNoise)
        vars(self).update(owns_noise=uniform is not None and not uniform.masks)

    def with_block_length(self, block_length: int) -> Plugins:
        """Return the same set with blocks of another length.

        Raises:
            UserError: the length is not a positive whole number, or the blocks are not blocks=fixed.
        """
        check_count("block_length", block_length)
        if not isinstance(self.blocks, FixedBlocks):
            raise UserError(
                "options-conflict",
                f"block_length={block_length} needs blocks=fixed, not blocks={named(self.blocks)}. Remove block_length,"
                " or set blocks=fixed.",
            )
        return self.with_blocks(replace(self.blocks, length=block_length))

    def with_blocks(self, blocks: Blocks) -> Plugins:
        """Return the same set with other blocks.

        Raises:
            UserError: the plug-ins cannot work together with these blocks.
        """
        context = replace(self.context, blocks=blocks)
        context = replace(context, blocks=blocks.bind(context))
        scheduler = self.scheduler.bind(context)
        others = replace(context, scheduler=scheduler)
        plugins = Plugins(
            scheduler=scheduler,
            blocks=context.blocks,
            stop=self.stop.bind(others),
            cache=self.cache.bind(others),
            guides=tuple(guide.bind(others) for guide in self.guides),
            compat=self.compat,
            particles=self.particles.bind(others),
            context=context,
            judge=self.judge,
        )
        check(plugins)
        return plugins


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
    tokenizer: PreTrainedTokenizerBase | None = None,
    judge: Judge = "draw",
    particles: object = None,
) -> Plugins:
    """Build every plug-in from its spec (`config.build`), and refuse combinations that cannot work.

    Raises:
        UserError: an unknown name or field, a bad value, or an impossible combination.
    """
    guides: list[Guide] = list(config.build("guide", guide))
    # A shortcut sets the field of the guide that is there already. Otherwise a temperature comes before any
    # truncation, whose meaning depends on it, and truncations come last.
    if temperature is not None:
        first = next((i for i, one in enumerate(guides) if one.truncates), len(guides))
        _set(guides, Temperature(value=temperature), "value", first)
    if top_k is not None:
        _set(guides, TopK(k=top_k), "k", len(guides))
    if top_p is not None:
        _set(guides, TopP(p=top_p), "p", len(guides))
    guides.sort(key=lambda one: getattr(one, "joint", False))  # a joint choice of tokens comes last
    unbound = tuple(_of(Guide, "guide", one) for one in guides)
    given = _of(Blocks, "blocks", config.build("blocks", blocks))
    context = Context(spec, given, unbound, tokenizer)
    context = replace(context, blocks=given.bind(context))
    rule = _of(Scheduler, "scheduler", config.build("scheduler", scheduler)).bind(context)
    others = replace(context, scheduler=rule)
    bound = tuple(one.bind(others) for one in unbound)
    plugins = Plugins(
        scheduler=rule,
        blocks=context.blocks,
        stop=_of(Stop, "stop", config.build("stop", stop)).bind(others),
        cache=_of(Cache, "cache", config.build("cache", cache)).bind(others),
        guides=rule.guides(bound) if isinstance(rule, Tempered) else bound,
        compat=compat,
        particles=_of(Particles, "particles", config.build("particles", particles)).bind(others),
        context=context,
        judge=judge,
    )
    check(plugins)
    rule = plugins.cache.around(rule) if isinstance(plugins.cache, Wraps) else rule
    return replace(plugins, scheduler=plugins.particles.around(rule))


def _set(guides: list[Guide], new: Guide, field: str, place: int) -> None:
    """Copy `field` of `new` to the guides of its class. If there is none, insert `new` at `place`."""
    found = [i for i, one in enumerate(guides) if isinstance(one, type(new))]
    for i in found:
        guides[i] = replace(cast(Any, guides[i]), **{field: getattr(new, field)})
    if not found:
        guides.insert(place, new)


def _of(kind: type[Kind], group: str, plugin: object) -> Kind:
    if not isinstance(plugin, kind):
        raise invalid(group, plugin, f"Give a name, a settings dict or an instance of {kind.__name__}", "option-type")
    return plugin


def check(plugins: Plugins) -> None:
    """Refuse a set of plug-ins that cannot work together, or not with this model.

    The conditions of a single plug-in are checked in its `bind`. The rules here compare traits of several plug-ins.

    Raises:
        UserError: they cannot. The message names both sides and the way out.
    """
    for group in ("scheduler", "blocks", "stop"):
        plugin = getattr(plugins, group)
        if not isinstance(plugin.needs, Set):
            raise UserError(
                "plugin-needs",
                f"{group}={named(plugin)} has {plugin.needs!r} as its needs. Return a frozenset of names.",
            )
        unknown = sorted(plugin.needs - FIELDS)
        if unknown:
            raise UserError(
                "plugin-needs",
                f"{group}={named(plugin)} needs {', '.join(unknown)}, which `Readout` does not have. Choose from"
                f" {', '.join(sorted(FIELDS))}.",
            )
    why = next(chain(_obstacles(plugins), _of_guides(plugins.guides), _of_best(plugins)), None)
    if why is not None:
        raise UserError("plugins-incompatible", why)


def untrained(plugins: Plugins) -> str | None:
    """Return a sentence about settings that the model was not trained for, or None."""
    spec, length = plugins.context.spec, plugins.blocks.grid
    if spec.attention != "block_causal" or spec.block_length is None or length == spec.block_length:
        return None
    return (
        f"block_length={length} (blocks.length) changes what each token sees, since this model was trained on blocks of"
        f" {spec.block_length}. Leave it out, or set it to {spec.block_length}."
    )


def _obstacles(plugins: Plugins) -> Iterator[str]:
    """Yield a message for each conflict between scheduler, blocks, stop, cache, guides and model."""
    spec, traits = plugins.context.spec, plugins.scheduler.traits
    scheduler, blocks, stop = (f"{group}={named(getattr(plugins, group))}" for group in ("scheduler", "blocks", "stop"))
    if traits.has(OwnInputs) and not (spec.cacheable and spec.mask_id is not None):
        inputs = "additional mask tokens (shadow rows)" if traits.has(ShadowRows) else "mixtures of embeddings"
        other = "entropy_renoise" if spec.mask_id is None else "threshold"
        yield f"{scheduler} gives the model {inputs}, which this one does not support. Use scheduler={other}."
    if traits.drafts and (plugins.stop.cuts or plugins.stop.fills):
        yield (
            f"{scheduler} drafts tokens for later steps, and {stop} would change the canvas that they are drafted for."
            " Use stop=prefix, stop=block or stop=none."
        )
    if plugins.stop.judges_all and isinstance(plugins.cache, SuffixCache):
        yield (
            f"{stop} waits for a prediction of every mask, and cache={named(plugins.cache)} hides masks after the"
            " block. Use stop=prefix, stop=block or another cache."
        )
    if plugins.watched_layers:
        yield from _of_attention(plugins)
    if traits.has(ChangingLength):
        yield from _of_lengths(plugins, scheduler, blocks, stop)
    forms = [f"guide={named(guide)}" for guide in plugins.guides if guide.joint or guide.vetoes]
    if len(forms) > 1:
        yield f"{' and '.join(forms)} both restrict the form of the answer. Remove one of them."
    if forms and traits.own_tokens:
        yield (
            f"{scheduler} writes tokens that its step did not predict, and {forms[0]} checks predicted tokens only. Use"
            " another scheduler, for example threshold."
        )
    if forms and plugins.stop.fills:
        yield f"{stop} writes tokens that {forms[0]} has not checked. Use stop=prefix."
    if any(guide.vetoes for guide in plugins.guides):
        if traits.drafts:
            yield (
                f"{scheduler} relies on commits that {forms[0]} may refuse. Use another scheduler, for example"
                " threshold."
            )
        if plugins.foresees:
            yield (
                f"cache={named(plugins.cache)} relies on commits that {forms[0]} may refuse. Use another cache,"
                " for example dual."
            )
    if plugins.blocks.several or plugins.blocks.slides:
        yield from _of_several(plugins.scheduler, plugins.blocks)
    trained = traits.find(TrainedBlocks)
    if trained is not None and _length(plugins.blocks, trained.length) != trained.length:
        yield (
            f"{scheduler} was trained on blocks of {trained.length} positions, and {blocks} makes others. Use"
            f" blocks=fixed with blocks.length={trained.length} (in SGLang and diffusers"
            f" block_length={trained.length}), or train for other blocks."
        )
    uniform = traits.find(UniformNoise)
    if spec.mask_id is not None and uniform is not None and not uniform.masks:
        yield (
            f"{scheduler} denoises random tokens (uniform diffusion), and this model has a mask token. Use"
            " scheduler=origin."
        )
    if spec.mask_id is None and uniform is None:
        yield (
            f"{scheduler} needs a mask token, and this model's noise is random tokens (uniform diffusion). Use"
            " scheduler=entropy_renoise, scheduler=block_refine or scheduler=discrete_ddim."
        )
    if spec.encoder and _length(plugins.blocks, spec.block_length or 1) != spec.block_length:
        yield (
            f"This model denoises canvases of {spec.block_length} positions, and {blocks} makes others. Use"
            f" blocks=fixed with blocks.length={spec.block_length} or null."
        )
    if spec.encoder and plugins.stop.cuts:
        yield (
            f"{stop} cuts the canvas after an end-of-text token, and this model takes whole canvases only. Use"
            " stop=prefix or stop=block."
        )
    if spec.attention == "block_causal" and plugins.blocks.grid is None:
        yield (
            f"This model's attention needs blocks of one length, and {blocks} does not set a length for all. Use"
            " blocks=fixed."
        )
    if spec.routing is not None and (plugins.blocks.grid or 0) % spec.routing:
        yield (
            f"This model chooses experts for blocks of {spec.routing} tokens together, and {blocks} makes others. Use"
            f" blocks=fixed with blocks.length={spec.routing} or a multiple."
        )
    if spec.routing is not None and traits.has(ShadowRows):
        yield (
            f"{scheduler} adds shadow rows of mask tokens to the forward, and this model chooses experts for blocks of"
            " tokens together, which shadow rows would change. Use another scheduler, for example threshold."
        )
    if spec.seeds and (traits.has(ShadowRows) or traits.drafts) and not traits.has(CausalQueries):
        yield (
            f"{scheduler} gives the model tokens that are not committed (drafts or shadow rows), and this model"
            " computes a finished block again, as context. Use another scheduler, for example threshold."
        )


def _of_best(plugins: Plugins) -> Iterator[str]:
    """Yield conflicts with `judge="best"`, which writes drawn tokens in place of those that are judged."""
    if plugins.judge != "best":
        return
    traits, scheduler = plugins.scheduler.traits, f"scheduler={named(plugins.scheduler)}"
    if traits.drafts or traits.revises or traits.has(LeftToRightVerifier):
        yield f"{scheduler} checks its tokens later, and judge=best writes other tokens. Remove judge=best."
    if plugins.stop.fills:
        yield f"stop={named(plugins.stop)} writes tokens that are not drawn. Remove judge=best, or use stop=prefix."


def _of_attention(plugins: Plugins) -> Iterator[str]:
    """Yield conflicts with a plug-in that needs attention, which is measured for whole rows of one candidate."""
    spec, cache = plugins.context.spec, plugins.cache
    kinds = {"scheduler": plugins.scheduler, "blocks": plugins.blocks, "stop": plugins.stop}
    who = next(f"{kind}={named(one)}" for kind, one in kinds.items() if "attention" in one.needs)
    if not spec.cacheable:
        kind = who.partition("=")[0]
        other = "scheduler=threshold" if kind == "scheduler" else f"another {kind}"
        yield f"{who} needs attention, which this model does not provide. Use {other}."
    if cache.stores or isinstance(cache, SuffixCache):
        yield f"{who} needs attention between all columns, and cache={named(cache)} omits some. Use cache=none."
    if plugins.scheduler.traits.drafts or plugins.scheduler.traits.has(ShadowRows):
        name = named(plugins.scheduler)
        yield f"{who} needs attention, and scheduler={name} has candidates or shadow rows. Remove one of them."


def _of_several(scheduler: Scheduler, blocks: Blocks) -> Iterator[str]:
    """Yield reasons why a scheduler cannot run if several blocks are open or a window slides."""
    does = "opens several blocks at once" if blocks.several else "slides a window"
    inner = scheduler.inner if isinstance(scheduler, Around) else None
    inside = [] if inner is None else _of_one_block(inner.traits)
    for fact in _of_one_block(scheduler.traits):
        too = f", as scheduler.inner={named(inner)} does" if fact in inside else ""
        yield f"scheduler={named(scheduler)} {fact}{too}, and blocks={named(blocks)} {does}. Use scheduler=threshold."


def _of_one_block(traits: Traits) -> list[str]:
    """Return phrases for the abilities of a scheduler that need one open block that does not move."""
    trained = traits.find(TrainedBlocks)
    facts = {
        "remasks or replaces tokens, which a finished block does not allow": traits.revises,
        "plans what a forward commits": traits.has(PlannedCommits),
        "depends on the block's length or on the forwards made in it": traits.scheduled,
    }
    said = [fact for fact, holds in facts.items() if holds]
    return said if trained is None else [*said, f"was trained on single blocks of {trained.length} positions"]


def _of_lengths(plugins: Plugins, scheduler: str, blocks: str, stop: str) -> Iterator[str]:
    """Yield conflicts with a scheduler that changes the length of answers (`ChangingLength`)."""
    if plugins.context.spec.attention != "bidirectional" or plugins.context.spec.encoder:
        yield (
            f"{scheduler} looks for the end of the answer after the block, which this model does not see. Use"
            " scheduler=threshold with stop=prefix. Then max_new_tokens is an upper bound, too."
        )
    if plugins.blocks.sizes_on_open or plugins.blocks.several or plugins.blocks.slides:
        yield f"{scheduler} moves the end of a block, and so does {blocks}. Use blocks=fixed or blocks=full."
    if plugins.stop.cuts or plugins.stop.fills:
        yield f"{scheduler} changes the length of the answer, and {stop} changes the canvas too. Use stop=prefix."
    for guide in plugins.guides:
        if guide.joint or guide.vetoes:
            yield (
                f"{scheduler} changes the length of the answer, which guide={named(guide)} must know. Use another"
                " scheduler, for example threshold."
            )


def _length(blocks: Blocks, near: int) -> int:
    """Return the number of positions per block, in a long answer whose blocks have about `near` positions."""
    return blocks.lookahead(near * 2**16)


def _of_guides(guides: tuple[Guide, ...]) -> Iterator[str]:
    """Yield a message for each conflict between guides."""
    draws, cut = is_random(guides), None
    for guide in guides:
        name = named(guide)
        if guide.truncates and not draws and not guide.measures:
            yield (
                f"{name} changes nothing at temperature 0, where the most likely token is always chosen. Set a"
                f" temperature above 0, for example temperature=1, or remove {name}."
            )
        if guide.excludes and cut is not None:
            yield f"guide={name} is after {cut}, which may keep only tokens that {name} excludes. Put {name} first."
        cut = name if guide.truncates else cut
