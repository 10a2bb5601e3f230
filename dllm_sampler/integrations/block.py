"""A scheduler on plain tensors: one block per row, and its logits from another engine.

The loop, the forward and the cache belong to that engine. Letters: B rows, W positions of a block, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dllm_sampler import config
from dllm_sampler.core import select
from dllm_sampler.core.naming import named
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Carry, Guide, Scheduler
from dllm_sampler.core.spec import BatchState, ChangingLength, ModelSpec, OwnInputs, UniformNoise
from dllm_sampler.core.values import FREE, Canvas, Query, Readout
from dllm_sampler.engine import decide, faults, layout, readout
from dllm_sampler.engine.plugins import Plugins, assemble
from dllm_sampler.errors import UserError
from dllm_sampler.integrations.forms import OfAnswer, of_text
from dllm_sampler.kernels.backend import TORCH, Backend
from dllm_sampler.options import check_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_END = 2**31 - 1  # id for an unknown end-of-text token


@dataclass(frozen=True)
class BlockState:
    """The state of rows in their blocks. Every tensor has one row per row of the batch."""

    canvas: Canvas  # `[B, W+1]`: the block, and the empty slot
    carry: Carry  # of the scheduler
    before: Tensor | None = None  # [B, N] tokens of the answer in earlier blocks, if a guide judges its form
    count: Tensor | None = None  # [B] number of these tokens


class Decision(NamedTuple):
    """The changes of one forward."""

    ids: Tensor  # [B, W] the block after the forward. Ids at noise only count in uniform diffusion
    noise: Tensor  # [B, W] bool: still to be decoded
    commit: Tensor  # [B, W] bool: written by this step
    token: Tensor  # [B, W] predicted token of each queried position, else that of the block
    confidence: Tensor  # [B, W] float64 probability of `token`, 0 at positions that are not queried
    over: Tensor  # [B] bool: the block is complete
    settled: Tensor  # [B] bool: it is complete, and this step wrote nothing, so the forward saw the final tokens
    failed: Tensor  # [B] bool: the logits are not finite. Nothing is written to such a row
    logits: Tensor | None = None  # [B, W, V] logits that tokens were chosen from, for self-conditioning


class BlockRule:
    """A rule that decides what each forward over a block commits, as `Sampler` does with the same scheduler.

    It stores no state of a row. The scheduler sees the block as a whole answer, so `scheduler.steps` are forwards per
    full block. Rules that count over an answer (`Traits.scope`) count over the block, with a warning.

    Args:
        scheduler: a name, a dict with `name` and settings, or a `Scheduler`.
        spec: facts about the engine's model, see `model`.
        length: W, positions of a block.
        guide, temperature, top_k, top_p: as for `Sampler`.
        compat: let the mask id be chosen, as published code does.
        tokenizer: for guides that read text.
        max_new_tokens: N, the length of an answer. A guide that judges the form of answers needs this.
        kernels: backend that reads out the logits.

    Raises:
        UserError: an unknown name, a wrong setting, or a plug-in that needs more than the logits of a block.
    """

    def __init__(
        self,
        scheduler: object,
        spec: ModelSpec,
        length: int,
        *,
        guide: object = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        compat: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_new_tokens: int | None = None,
        kernels: Backend = TORCH,
    ):
        given = config.build("scheduler", scheduler)
        why = unsupported_trait(given) if isinstance(given, Scheduler) else None  # before a second model is loaded
        if why is not None:
            raise UserError("engine-unsupported", why)
        guides = config.build("guide", guide)
        check_text(spec, guides, tokenizer)
        check_options({"temperature": temperature, "top_k": top_k, "top_p": top_p})
        self.plugins = assemble(
            spec,
            given,
            blocks={"name": "fixed", "length": length},
            stop=None,
            cache=None,
            guide=guides,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            compat=compat,
            tokenizer=tokenizer,
        )
        self.spec, self.length, self.kernels, self.max_new_tokens = spec, length, kernels, max_new_tokens
        why = obstacle(self.plugins)
        if why is not None:
            raise UserError("engine-unsupported", why)
        bound = self.plugins.scheduler, *self.plugins.guides
        _check_ends(spec, bound)
        self.ends = any(not {*spec.eos_ids}.isdisjoint(_ends(one)) for one in bound)  # a plug-in uses them
        self.form = next((guide for guide in self.plugins.guides if guide.joint), None)
        if self.form is not None:
            if max_new_tokens is None:
                raise UserError(
                    "option-missing", f"guide={named(self.form)} needs the length of answers. Set max_new_tokens."
                )
            self.form.check_answer([FREE] * max_new_tokens)
        rule = self.plugins.scheduler
        if rule.traits.scope == "answer":
            warnings.warn(
                f"scheduler={named(rule)} counts over an answer, but sees one block of {length} positions. Its tokens"
                " differ from Sampler's.",
                stacklevel=2,
            )
        needs = self.plugins.needs | {"logits"} if spec.self_conditioning else self.plugins.needs
        self.rule = readout.Rule(spec, self.plugins.guides, needs, compat)
        self.asks = type(rule).ask is not Scheduler.ask  # it chooses its queries. Others get the whole block

    def open(
        self, ids: Tensor, noise: Tensor, frozen: Tensor, before: Sequence[Sequence[int]] | None = None
    ) -> BlockState:
        """Create the state of blocks before their first forward.

        Args:
            ids: `[B, W] int64` tokens of the blocks.
            noise: `[B, W] bool` positions to be decoded.
            frozen: `[B, W] bool` positions of the prompt, which never change. They are the first ones of a block.
            before: tokens of each answer in earlier blocks, if a guide judges its form.
        """
        canvas = layout.block_canvas(ids, noise, frozen, self.spec)
        carry = self.plugins.scheduler.init(canvas)
        if self.max_new_tokens is None:
            return BlockState(canvas, carry)
        known = [list(row)[: self.max_new_tokens] for row in before or [[]] * len(ids)]
        filled = [row + [0] * (self.max_new_tokens - len(row)) for row in known]
        return BlockState(
            canvas, carry, *(torch.tensor(one, device=ids.device) for one in (filled, [len(row) for row in known]))
        )

    def decide(
        self, state: BlockState, ids: Tensor, logits: Tensor, first: Tensor, step: Tensor, seed: Tensor
    ) -> tuple[Decision, BlockState]:
        """Return the changes of one forward, and the state for the next. The device is not read.

        Args:
            state: state of the rows, whose blocks may differ in age.
            ids: `[B, W] int64` tokens that the forward saw.
            logits: `[B, W, V]` logits of these positions. They are overwritten.
            first: `[B] int64` column in its row, prompt included, at which each block begins.
            step: `[B] int64` forwards that each row made before this one, in earlier blocks, too.
            seed: `[B] int64` seed of each row. Noise depends only on seed, step and column.
        """
        plugins, canvas = self.plugins, self._seen(state.canvas, ids, first, step, seed)
        columns = canvas.columns()[:, :-1].expand(len(ids), -1)
        query = plugins.scheduler.ask(canvas, state.carry) if self.asks else Query.at(canvas, columns)
        seen, good = self._read(canvas, query, logits, state), torch.zeros_like(canvas.step)
        try:
            _, query, seen, edit, carry, failed_at, _ = decide.judge(plugins, canvas, query, seen, state.carry, good)
        except Exception as error:
            faults.check_needs(error, seen)
            raise
        after = canvas.apply(query.positions, edit)
        over = after.block_over(edit) if edit.finish is None else after.block_over(edit) | edit.finish
        over = over | canvas.done
        ids = after.ids if self.spec.mask_id is None else after.ids.masked_fill(after.masked, self.spec.mask_id)
        wrote = (ids != canvas.ids) | (after.masked != canvas.masked)  # [B, W+1]
        decision = Decision(
            ids=ids[:, :-1],
            noise=after.masked[:, :-1],
            commit=(wrote & ~after.masked)[:, :-1],
            token=canvas.ids.scatter(1, query.positions, seen.token[:, 0])[:, :-1],
            confidence=seen.confidence.new_zeros(ids.shape).scatter(1, query.positions, seen.confidence[:, 0])[:, :-1],
            over=over,
            settled=over & ~wrote.any(1),
            failed=failed_at > 0,
            logits=seen.logits[:, 0] if self.spec.self_conditioning and seen.logits is not None else None,
        )
        after = replace(after, ids=ids).with_layout(noise=CounterNoise())
        return decision, replace(state, canvas=after.advance(torch.zeros_like(over), 0, over), carry=carry)

    def _seen(self, canvas: Canvas, ids: Tensor, first: Tensor, step: Tensor, seed: Tensor) -> Canvas:
        ids = torch.cat([ids, canvas.ids[:, -1:]], 1)
        masked = canvas.masked if self.spec.mask_id is None else (ids == self.spec.mask_id) & ~canvas.layout.frozen
        return replace(
            canvas,
            ids=ids,
            masked=masked,
            step=step,
            layout=replace(canvas.layout, seeds=seed, noise=CounterNoise(begin=first)),
        )

    def _read(self, canvas: Canvas, query: Query, logits: Tensor, state: BlockState) -> Readout:
        if self.asks:
            at = query.positions.clamp(max=canvas.length - 1)  # the empty slot has no logits, so any are used
            rows = at + canvas.length * select.arange(len(at), at.device)[:, None]
            logits = logits.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, at.shape)  # a gather is slower
        rule = self.rule
        if state.before is not None and state.count is not None and self.spec.mask_id is not None:
            about = state.before, state.count, self.spec.mask_id
            rule = rule._replace(guides=tuple(OfAnswer(one, *about) if one.joint else one for one in rule.guides))
        return readout.predict(_Given(), logits.flatten(0, 1), canvas, HeadRows.every(query), rule, self.kernels)


class _Given:
    """A stand-in for a model whose logits are already computed."""

    @staticmethod
    def head(hidden: Tensor) -> Tensor:
        """Return the logits `[..., V]` unchanged."""
        return hidden


def _ends(plugin: Scheduler | Guide) -> tuple[int, ...]:
    """Return the end-of-text tokens that a bound plug-in treats specially."""
    return *getattr(plugin, "end_ids", ()), *(getattr(plugin, "ids", None) or ())


def check_text(spec: ModelSpec, guides: Iterable[Guide], tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Refuse guides that judge the form of answers if the tokenizer or the end-of-text token is missing.

    Raises:
        UserError: one of them is missing. The message names the guide.
    """
    formed = [one for one in guides if of_text(one)]
    if formed and tokenizer is None:
        raise UserError("tokenizer-missing", f"guide={named(formed[0])} reads the text of tokens. Add a tokenizer.")
    _check_ends(spec, formed)


def _check_ends(spec: ModelSpec, plugins: Iterable[Scheduler | Guide]) -> None:
    """Refuse plug-ins that need the end-of-text token if `spec` has none."""
    for one in plugins if spec.eos_id == NO_END else ():
        if NO_END not in _ends(one) and not of_text(one):
            continue
        kind = "guide" if isinstance(one, Guide) else "scheduler"
        raise UserError(
            "end-token-missing",
            f"{kind}={named(one)} needs an end-of-text token. Set it as DllmScheduler(eos_token_id=ID) for diffusers,"
            " eos_token_id in the checkpoint's config.json for SGLang, or model(ends=(ID,)) for BlockRule.",
        )


def model(vocab_size: int, mask_id: int | None, ends: tuple[int, ...], length: int, device: torch.device) -> ModelSpec:
    """Return the spec of a block-causal model that another engine runs. Unknown end-of-text tokens are empty `ends`."""
    eos_id, *others = ends or (NO_END,)
    return ModelSpec(
        vocab_size=vocab_size,
        mask_id=mask_id,
        eos_id=eos_id,
        other_eos_ids=tuple(others),
        pad_id=eos_id if ends else 0,
        max_positions=2**31 - 1,
        num_layers=0,
        num_kv_heads=0,
        head_dim=0,
        dtype=torch.float32,
        device=device,
        attention="block_causal",
        block_length=length,
    )


def obstacle(plugins: Plugins) -> str | None:
    """Return a message if a plug-in cannot run in another engine, which shows it one block at a time, else None."""
    for guide in plugins.guides:
        if guide.vetoes:
            return (
                f"guide={named(guide)} judges whole answers, and an engine shows one block. Use guide=json_schema or"
                " guide=regex."
            )
        if guide.forms:
            return (
                f"guide={named(guide)} has a list of forms, but an engine's requests cannot choose one. Set one form."
            )
    return unsupported_trait(plugins.scheduler)


def unsupported_trait(scheduler: Scheduler) -> str | None:
    """Return a message if an unbound scheduler needs more than the logits of one block, else None."""
    why = reason(scheduler)
    return why and (
        f"scheduler={named(scheduler)} needs more than the logits of a block, which are all that an engine passes:"
        f" {why}. Use another scheduler, for example threshold."
    )


def reason(scheduler: Scheduler) -> str | None:
    """Return the reason that a scheduler needs more than the logits of a block, or None if they suffice."""
    traits = scheduler.traits
    if "attention" in scheduler.needs:
        return "it reads attention weights"
    if traits.scope != "model":
        return None
    if traits.has(ChangingLength):
        return "it changes the length of the answer"
    if traits.has(OwnInputs):
        return "it adds inputs of its own to the forward"
    if traits.has(UniformNoise):
        return "some of its forwards leave the model's self-conditioning as it was"
    if traits.drafts:
        return "it predicts several states in one forward"
    if traits.has(BatchState):
        return "it uses a second model"
    return "it hides positions from the model" if traits.graph_safe else "it judges whole answers"
