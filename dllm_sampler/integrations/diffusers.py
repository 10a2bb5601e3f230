"""Schedulers of this library in pipelines of diffusers: `LLaDA2Pipeline` and `DiffusionGemmaPipeline`.

    pipe = LLaDA2Pipeline(model=model, scheduler=DllmScheduler("localleap"), tokenizer=tokenizer)

Letters: B rows, W positions of a block, V vocabulary.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import compress
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from dllm_sampler import config as configuration
from dllm_sampler.core.checks import check_count, check_switch
from dllm_sampler.core.ends import end_ids, is_end
from dllm_sampler.core.naming import described, named
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import Guide, Scheduler, is_random
from dllm_sampler.core.spec import UniformNoise
from dllm_sampler.core.values import Canvas, Query
from dllm_sampler.errors import NotFiniteError, UserError, installing
from dllm_sampler.host.functions import resolve_callable
from dllm_sampler.integrations.block import BlockRule, BlockState, model

try:
    from diffusers.configuration_utils import ConfigMixin, FrozenDict, register_to_config
    from diffusers.schedulers.scheduling_utils import SchedulerMixin
    from diffusers.utils.outputs import BaseOutput
except ImportError as error:
    raise UserError(
        "package-missing", f"DllmScheduler needs the package diffusers. Run {installing('diffusers')}."
    ) from error

try:  # not in diffusers 0.42
    from diffusers.schedulers.scheduling_utils import DiscreteSchedulerOutput as Output  # pyright: ignore
except ImportError:
    Output = BaseOutput

# Default settings that `LLaDA2Pipeline` passes to every scheduler.
UNSAID = {"temperature": 0.0, "top_p": None, "top_k": None, "threshold": 0.7, "editing_threshold": 0.5}


class Timesteps:
    """N steps per block, at the times 1, 1 - 1/N, ... 1/N."""

    num_inference_steps: int | None = None
    timesteps: Tensor = torch.empty(0)  # [N] float32
    step_index: int | None = None  # number of the next step, from 0. None before a block's first step
    begin_index: int | None = None  # first step of a block, if a pipeline has set it

    @property
    def steps(self) -> int:
        """N, the number of steps per block.

        Raises:
            UserError: `set_timesteps` was not called.
        """
        if self.num_inference_steps is None:
            raise UserError("timesteps-missing", "set_timesteps has not been called. Call it before step.")
        return self.num_inference_steps

    def clock(self, num_inference_steps: int, device: str | torch.device | None) -> None:
        """Set N and the times on `device`, and start with the first step."""
        check_count("num_inference_steps", num_inference_steps)
        self.num_inference_steps = num_inference_steps
        self.timesteps = torch.arange(num_inference_steps, 0, -1, device=device).float() / num_inference_steps
        self.step_index = self.begin_index = None

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Set the first step of a block, so that its timestep need not be read from the device."""
        self.begin_index = begin_index

    def index_for_timestep(self, timestep: float | Tensor) -> int:
        """Return the number, from 0, of the step at time `timestep`."""
        return self.steps - round(float(timestep) * self.steps)

    def index(self, timestep: int | float | Tensor) -> int:
        """Return the number, from 0, of this step: `timestep` if it is an integer, else the next one of the block."""
        if isinstance(timestep, int) or (isinstance(timestep, Tensor) and not timestep.is_floating_point()):
            return int(timestep)
        if self.step_index is None:
            return self.index_for_timestep(timestep) if self.begin_index is None else self.begin_index
        return self.step_index


@dataclass
class DllmSchedulerOutput(Output):  # pyright: ignore[reportGeneralTypeIssues]
    """The changes of a step, with the fields of discrete schedulers in diffusers (PR #14741)."""

    prev_sample: Tensor  # [B, W] the block for the next forward
    pred_original_sample: Tensor  # [B, W] the predicted token of each position
    sampled_probs: Tensor  # [B, W] float32 probability of that token, before temperature and truncation
    pred_logits: Tensor  # [B, W, V] logits that tokens are drawn from. DiffusionGemma conditions on them next
    committed_mask: Tensor  # [B, W] bool: noise that became a token
    edited_mask: Tensor  # [B, W] bool: a token that became another token or noise

    @property
    def transfer_index(self) -> Tensor:
        """`committed_mask` under its name in diffusers 0.42."""
        return self.committed_mask

    @property
    def editing_transfer_index(self) -> Tensor:
        """`edited_mask` under its name in diffusers 0.42."""
        return self.edited_mask

    @property
    def sampled_tokens(self) -> Tensor:
        """`pred_original_sample` under its name in diffusers 0.42."""
        return self.pred_original_sample


class DllmScheduler(Timesteps, SchedulerMixin, ConfigMixin):
    """A scheduler of this library for `LLaDA2Pipeline` and `DiffusionGemmaPipeline` of diffusers.

    It commits what `Sampler` with the same scheduler commits. It serves the pipelines of diffusers 0.42 and those of
    PR #14741, which call `set_timesteps` for each block. `from_config` takes over the settings of the scheduler that it
    replaces.

    Args:
        scheduler: a name, a dict with `name` and settings, or a `Scheduler`. Its `steps` are forwards per full block.
        block_length: W, positions of a block, unless the pipeline's call sets it.
        mask_token_id: the mask token, unless the pipeline passes one. If neither does, noise is random tokens
            (DiffusionGemma).
        eos_token_id: the end-of-text token, or a list of them, for schedulers and guides that treat end-of-text tokens
            specially. By default the tokenizer's.
        guide, temperature, top_k, top_p, compat: as for `BlockRule`. The pipeline's own settings of these names have no
            effect.
        tokenizer, max_new_tokens: for a guide that judges the form of answers, the pipeline's `tokenizer` and
            `gen_length`. Saved settings have no tokenizer: pass it to `from_pretrained(folder, tokenizer=...)`.

    Raises:
        UserError: an unknown name, a wrong setting, or a scheduler that needs more than the logits of a block.
    """

    order = 1

    @register_to_config
    def __init__(
        self,
        scheduler: object = "threshold",
        *,
        block_length: int = 32,
        mask_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        guide: object = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        compat: bool = False,
        tokenizer: Any = None,
        max_new_tokens: int | None = None,
    ):
        check_count("block_length", block_length)
        check_count("mask_token_id", mask_token_id, 0, optional=True)
        check_count("max_new_tokens", max_new_tokens, optional=True)
        check_switch("compat", compat)
        ends = list(eos_token_id) if isinstance(eos_token_id, list | tuple) else [eos_token_id]
        for end in ends:
            check_count("eos_token_id", end, 0, optional=True)
        given = {"scheduler": written("scheduler", scheduler), "guide": written("guide", guide)}
        # Arguments that were passed by position must be saved, too.
        self.register_to_config(**given, _use_default_values=[])
        # The vocabulary is known from the first logits. This one finds mistakes before the model is loaded.
        known = max(mask_token_id or 0, *(end or 0 for end in ends), 0 if tokenizer is None else len(tokenizer))
        rule = configuration.build("scheduler", scheduler)
        uniform = rule.traits.find(UniformNoise) if isinstance(rule, Scheduler) else None
        noise = mask_token_id
        if noise is None and (uniform is None or uniform.masks):
            noise = known + 1
        self._rule = self._built(known + 2, noise, block_length, torch.device("cpu"))
        self._built_for: tuple[Any, ...] = ()
        self._reset(None)

    def _built(self, vocab: int, mask_id: int | None, length: int, device: torch.device) -> BlockRule:
        """Return the rule for blocks of `length` positions of a model with these tokens."""
        told, tokenizer = self.config, self.config["tokenizer"]
        eos = getattr(tokenizer, "eos_token_id", None) if told["eos_token_id"] is None else told["eos_token_id"]
        ends = () if eos is None else end_ids(eos)
        spec = replace(model(vocab, mask_id, ends, length, device), self_conditioning=mask_id is None)
        names = ("guide", "temperature", "top_k", "top_p", "compat", "tokenizer", "max_new_tokens")
        return BlockRule(told["scheduler"], spec, length, **{name: told[name] for name in names})

    def _reset(self, block_length: int | None) -> None:
        """Remove the state of the last call. `block_length` is that of all its blocks, if the pipeline passes it."""
        self._length = block_length
        self._state: BlockState | None = None
        self._over = self._finished = torch.tensor(False)  # [B] rows whose block is complete, and whose answer is
        self._blocks = 0  # opened so far
        self._answers: list[list[int]] = []  # tokens of each row in earlier blocks
        self._made = self._seeds = torch.empty(0, dtype=torch.long)  # [B] forwards of each row, and its seed

    def set_timesteps(
        self, num_inference_steps: int, device: str | torch.device | None = None, *, block_length: int | None = None
    ) -> None:
        """Set the maximum number of forwards for a block, and remove the state of the last call.

        Args:
            num_inference_steps: N. The last step commits all remaining positions.
            device: device of `timesteps`, `[N] float32` from 1 to 1/N.
            block_length: length of each following block. A pipeline that calls this once per generation gives it. None
                if the pipeline calls this for every block.

        Raises:
            UserError: a value is not a positive whole number.
        """
        check_count("block_length", block_length, optional=True)
        self.clock(num_inference_steps, device)
        self._reset(block_length)

    def step(
        self,
        model_output: Tensor,
        timestep: int | float | Tensor,
        sample: Tensor,
        *,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
        **others: Any,
    ) -> DllmSchedulerOutput | tuple[Tensor, ...]:
        """Return the changes of one forward over a block. The device is read.

        Args:
            model_output: `[B, W, V]` logits.
            timestep: one of `timesteps`, or the number of the step in its block (diffusers 0.42). Step 0 opens a block.
            sample: `[B, W] int64` tokens that the forward saw.
            generator: seeds all noise. Without a mask token it also draws the random tokens of each step.
            return_dict: True for an output object, False for a tuple of its fields.
            others: further arguments of `LLaDA2Pipeline` 0.42: `mask_token_id`, `prompt_mask [W]`, and settings of
                diffusers' own scheduler, which have no effect here.

        Raises:
            UserError: the scheduler needs a mask token and there is none, a new block has no noise, or a tensor has a
                wrong shape.
            NotFiniteError: the model returned NaN.
        """
        index = self.index(timestep)
        mask_id = others.get("mask_token_id")
        mask_id = self.config["mask_token_id"] if mask_id is None else mask_id
        opens = self._state is None or index == 0
        self._check(sample, model_output, opens)
        if opens:
            self._open(model_output, sample, mask_id, generator, others)
        assert self._state is not None
        canvas = self._state.canvas
        noise = canvas.masked[:, :-1] if mask_id is None else (sample == mask_id) & ~canvas.layout.frozen[:, :-1]
        first = torch.full_like(self._made, (self._blocks - 1) * canvas.length)
        decision, self._state = self._rule.decide(
            self._state, sample, model_output.clone(), first, self._made, self._seeds
        )
        self._made, self.step_index = self._made + ~canvas.done, index + 1
        failed = decision.failed & ~self._finished
        if bool(failed.any()):
            raise NotFiniteError(index + 1, [row + 1 for row, bad in enumerate(failed.tolist()) if bad])

        token, ids, left, self._over = decision.token, decision.ids, decision.noise, decision.over
        if mask_id is not None and (self._rule.asks or self.config["compat"]):
            # The mask token was chosen, or is at a position that was not queried.
            best = model_output.index_fill(-1, sample.new_tensor([mask_id]), -torch.inf).argmax(-1)
            token = torch.where(token == mask_id, best, token)
        if index + 1 >= self.steps:
            ids, left = self._filled(ids, left, token)
        changed = (ids != sample) | left
        if mask_id is None and not self._rule.plugins.owns_noise:
            vocab = model_output.shape[-1]
            fresh = torch.randint(vocab, sample.shape, generator=generator, device=sample.device)
            ids = torch.where(left, fresh, ids)
        raw = model_output.float()
        shaped = self._shaped(model_output, canvas) if decision.logits is None else decision.logits
        output = DllmSchedulerOutput(
            prev_sample=ids,
            pred_original_sample=token,
            sampled_probs=(raw.gather(-1, token[..., None])[..., 0] - raw.logsumexp(-1)).exp(),
            pred_logits=shaped.to(model_output.dtype),
            committed_mask=noise & ~left,
            edited_mask=~noise & changed,
        )
        return output if return_dict else output.to_tuple()

    def check_eos_finished(
        self,
        cur_x: Tensor,
        finished: Tensor,
        eos_token_id: int | list[int],
        mask_token_id: int,
        prompt_length: int,
        **_: Any,
    ) -> Tensor:
        """Return `[B] bool` rows that are over: `finished` ones, and those with an end-of-text token and no mask before
        it.

        With a scheduler that remasks tokens, the row's block must be complete, too. Called by diffusers 0.42.
        """
        answer = cur_x[:, prompt_length:]
        ends = (is_end(answer, end_ids(eos_token_id)) & ((answer == mask_token_id).cumsum(1) == 0)).any(1)
        self._finished = finished | (ends & self._over if self._rule.plugins.scheduler.traits.revises else ends)
        return self._finished

    def check_block_should_continue(self, finished: Tensor, **_: Any) -> bool:
        """Return True if a row that is not `finished [B]` has an incomplete block. Called by diffusers 0.42."""
        return not bool((self._over | finished).all())

    def save_config(self, save_directory: str | PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write `scheduler_config.json`. `save_pretrained` calls this.

        Raises:
            UserError: a plug-in is an object that JSON cannot represent.
        """
        for group in ("scheduler", "guide"):
            plugin = self.config[group]
            try:
                json.dumps(plugin)
            except TypeError:
                raise UserError(
                    "plugin-not-saved",
                    f'{group}={plugin!r} cannot be saved as JSON. Give a dict with "name" (or "_target_" for'
                    " a class of your own), whose settings are numbers, texts, lists or dicts.",
                ) from None
        super().save_config(save_directory, push_to_hub, **kwargs)

    def to_json_string(self) -> str:
        """Return the settings as JSON, without the tokenizer."""
        whole = self._internal_dict
        self._internal_dict = FrozenDict({name: value for name, value in whole.items() if name != "tokenizer"})
        try:
            return super().to_json_string()
        finally:
            self._internal_dict = whole

    def __repr__(self) -> str:
        return f"DllmScheduler({described(self._rule.plugins.scheduler)})"

    def _check(self, sample: Tensor, logits: Tensor, opens: bool) -> None:
        """Refuse a block of another shape than expected, and logits that do not match it."""
        length = self._length or sample.shape[-1]
        shape = (len(sample), length) if opens or self._state is None else self._state.canvas.layout.frozen[:, 1:].shape
        if tuple(sample.shape) != tuple(shape):
            raise UserError(
                "shape-mismatch",
                f"sample has the shape {tuple(sample.shape)}, not {tuple(shape)}. Correct it, or call set_timesteps.",
            )
        if logits.dim() != 3 or logits.shape[:2] != sample.shape:
            said = f"model_output has the shape {tuple(logits.shape)}, but sample has {tuple(shape)}."
            raise UserError("shape-mismatch", f"{said} Give logits of the shape ({shape[0]}, {shape[1]}, V).")

    def _shaped(self, logits: Tensor, canvas: Canvas) -> Tensor:
        """Return the logits `[B, W, V]` after temperature, top-k and top-p, or unchanged if nothing is drawn."""
        guides = [guide for guide in self._rule.plugins.guides if guide.chooses and not guide.joint]
        if not is_random(guides):
            return logits
        columns, shaped = canvas.columns()[:, :-1].expand(len(logits), -1), logits.flatten(0, 1)
        rows = HeadRows.every(Query.at(canvas, columns))
        for guide in guides:
            shaped = guide(shaped, canvas, rows)
        return shaped.view_as(logits)

    def _filled(self, ids: Tensor, left: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Return the block with `token [B, W]` at the noise that is `left`, and an empty noise mask."""
        rows = left.any(1)
        if bool((rows & ~self._finished).any()):
            warnings.warn(
                f"scheduler={named(self._rule.plugins.scheduler)} needs more steps for a block than"
                f" num_inference_steps={self.num_inference_steps}, so the last step committed all masks that were left."
                " Raise num_inference_steps, or change the scheduler's settings.",
                stacklevel=3,
            )
        assert self._state is not None
        self._over = self._over | rows
        canvas = replace(self._state.canvas, masked=self._state.canvas.masked & ~rows[:, None], done=self._over)
        self._state = replace(self._state, canvas=canvas)
        return torch.where(left, token, ids), torch.zeros_like(left)

    def _open(
        self,
        logits: Tensor,
        sample: Tensor,
        mask_id: int | None,
        generator: torch.Generator | None,
        others: Mapping[str, Any],
    ) -> None:
        """Create the state of a block. The first block of a call also creates the seeds."""
        if mask_id is None and not self._rule.plugins.scheduler.traits.has(UniformNoise):
            raise UserError(
                "mask-token-missing",
                f"scheduler={named(self._rule.plugins.scheduler)} needs a mask token. Set mask_token_id, or use"
                " scheduler=entropy_renoise for a model without one.",
            )
        if mask_id is not None and mask_id >= logits.shape[-1]:
            said = f"mask_token_id={mask_id} is outside of the {logits.shape[-1]} tokens of model_output. Correct it."
            raise UserError("token-outside-vocabulary", said)
        frozen = torch.zeros_like(sample, dtype=torch.bool) if mask_id is None else sample != mask_id
        if others.get("prompt_mask") is not None:
            frozen = frozen | others["prompt_mask"]
        if bool(frozen.all()):
            raise UserError(
                "nothing-to-generate", f"sample has no mask token {mask_id}. Put it at the positions to decode."
            )
        made_for = (logits.shape[-1], mask_id, sample.shape[1], sample.device)
        if self._built_for != made_for:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # these warnings were given when this object was made
                self._rule, self._built_for = self._built(*made_for), made_for
        if not self._blocks:
            said = [f"{name}={others[name]}" for name in UNSAID if others.get(name, UNSAID[name]) != UNSAID[name]]
            if said:
                warnings.warn(
                    f"DllmScheduler ignores {', '.join(said)} of the pipeline. Give settings to DllmScheduler, as in"
                    ' DllmScheduler({"name": "threshold", "threshold": 0.8}, temperature=1.0).',
                    stacklevel=3,
                )
            # Without a mask token, renoising advances the generator. With one, this draw does.
            source = generator if mask_id is not None or generator is None else generator.clone_state()
            device = "cpu" if generator is None else generator.device
            seed = torch.randint(2**62, (1,), generator=source, device=device).to(sample.device)
            self._seeds = seed + torch.arange(len(sample), device=sample.device)
            self._made = torch.zeros_like(self._seeds)
        before = None if self._rule.form is None else self._earlier(self._rule.form, mask_id)
        self._blocks += 1
        self._state = self._rule.open(sample, ~frozen, frozen, before)

    def _earlier(self, form: Guide, mask_id: int | None) -> list[list[int]] | None:
        """Return the tokens of each answer in earlier blocks, or None before the second block."""
        if mask_id is None or self._length is None:
            raise UserError(
                "guide-incompatible",
                f"guide={named(form)} needs to see whole answers. Use LLaDA2Pipeline of diffusers 0.42.",
            )
        if self._state is None:
            return None
        canvas = self._state.canvas
        ids, own = canvas.ids[:, :-1].tolist(), (~canvas.layout.frozen[:, :-1]).tolist()
        earlier = self._answers or [[] for _ in ids]
        self._answers = [[*row, *compress(*last)] for row, *last in zip(earlier, ids, own, strict=True)]
        return self._answers


def written(group: str, plugin: Any) -> Any:
    """Return a packaged plug-in as a dict of its name and settings, and other values unchanged."""
    if isinstance(plugin, list | tuple):
        return [written(group, one) for one in plugin]
    if not is_dataclass(plugin) or isinstance(plugin, type) or named(plugin) not in configuration.names(group):
        return plugin
    target = configuration.entry(group, named(plugin)).settings.get("_target_")
    if target is None or resolve_callable(f"{group} ", str(target)) is not type(plugin):
        return plugin
    values = {one.name: getattr(plugin, one.name) for one in fields(plugin) if one.init}
    return {"name": named(plugin), **{key: written("scheduler", value) for key, value in values.items()}}
