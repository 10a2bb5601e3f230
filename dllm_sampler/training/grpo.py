"""Policy gradients on rewards: CJ-GRPO over trajectories (arXiv 2509.23924), and diffu-GRPO (arXiv 2504.12216)."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count, islice
from random import Random
from typing import Annotated, Any, ClassVar, Literal

import torch
from accelerate.utils import gather_object
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

from dllm_sampler.errors import UserError, counted
from dllm_sampler.result import Result, Trace
from dllm_sampler.training import policy, rewards
from dllm_sampler.training.data import Row, columns_of
from dllm_sampler.training.masked import Dice
from dllm_sampler.training.trainer import Count, DiffusionConfig, DiffusionTrainer, Number, Positive, WeightCopy, say
from dllm_sampler.training.trajectory import Trajectories, check

PATIENCE = 10  # steps in a row without a single score before the run ends


@dataclass
class TrajectoryGRPOConfig(DiffusionConfig):
    """Settings of `TrajectoryGRPOTrainer`.

    per_device_train_batch_size: prompts of a process and step; each has `num_generations` answers
    num_generations: answers to each prompt
    rollout: settings of the sampler; any that commits each position once, at a temperature
    likelihood: scores tokens by the state each was committed from (`trajectory`), or with all masked (`masked`)
    mask_prompt: share of the prompt that `masked` hides, drawn again for each iteration
    scale_rewards: divide advantages by their group's deviation (GRPO; not CJ-GRPO)
    after_eos: tokens after the first end-of-text token count too, as in the published code
    num_iterations: optimizer steps on the same answers
    epsilon, beta: of the clipping, and the weight of the divergence from the reference
    ref_model_sync_steps: steps after which the reference becomes the present model; 0, or with adapters: never
    batch_tokens: columns of a forward, which bound its memory
    """

    num_generations: Annotated[int, Field(ge=2)] = 6
    rollout: dict[str, Any] = field(default_factory=lambda: {"scheduler": "fixed", "temperature": 1.0})
    likelihood: Literal["trajectory", "masked"] = "trajectory"
    mask_prompt: Annotated[float, Field(ge=0, le=1)] = 0.0
    scale_rewards: bool = False
    after_eos: bool = False
    num_iterations: Count = 1
    epsilon: Positive = 0.5
    beta: Number = 0.0
    ref_model_sync_steps: Annotated[int, Field(ge=0)] = 64
    batch_tokens: Count = 8192

    samplers: ClassVar[tuple[str, ...]] = ("evaluation", "rollout")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rollout.get("temperature"):
            said = "train.rollout has no temperature above 0, so the answers to a prompt are identical."
            raise UserError("option-range", f"{said} Set train.rollout.temperature=1.")
        if self.num_iterations > 1 and self.save_strategy == "steps" and self.save_steps % self.num_iterations:
            said = f"train.num_iterations={self.num_iterations} does not divide train.save_steps={self.save_steps:g}."
            raise UserError("options-conflict", f"{said} Set train.save_steps to a multiple of it.")


class TrajectoryGRPOTrainer(DiffusionTrainer):
    """Samples answers to each prompt, and makes those more likely that are better than their group's mean.

    The loss is the mean over a transition's tokens, then over a sample's transitions, then over the samples. The
    published code of CJ-GRPO pools the tokens of a micro-batch instead, which depends on the batch.

    reward_funcs: functions in TRL's form, or names: see `rewards.find`
    reward_weights: of each. With None each counts 1
    """

    config: ClassVar[type[DiffusionConfig]] = TrajectoryGRPOConfig
    most_held_out: ClassVar[int] = 800  # one deviation of a measurement is 1.7 points
    answers: ClassVar[bool] = False  # rewards may do without

    def __init__(
        self, model: Any, reward_funcs: rewards.Functions = (), args: TrajectoryGRPOConfig | None = None, *given: Any,
        reward_weights: Sequence[float] | None = None, **named: Any,
    ):  # fmt: skip
        listed = [reward_funcs] if isinstance(reward_funcs, str) or callable(reward_funcs) else [*reward_funcs]
        if not listed:
            raise UserError("option-missing", "Rewards are missing. Set train.rewards={correct: 1}, for example.")
        weights = [1.0] * len(listed) if reward_weights is None else reward_weights
        if len(weights) != len(listed):
            said = f"{counted(len(listed), 'reward')} but {counted(len(weights), 'weight')} in reward_weights."
            raise UserError("length-mismatch", f"{said} Give a weight for each of reward_funcs.")
        names = [one if isinstance(one, str) else one.__name__ for one in listed]
        found = [rewards.find(one) if isinstance(one, str) else one for one in listed]
        self._rewards = dict(zip(names, zip(found, weights, strict=True), strict=True))
        args = args or TrajectoryGRPOConfig("trained")
        self.reference = WeightCopy("reference", 0.0, args.ref_model_sync_steps)
        if args.beta and named.get("peft_config") is None:
            named["callbacks"] = [*named.get("callbacks", ()), self.reference]
        self._rollouts: dict[tuple[int, ...], tuple[Trace, list[tuple[Trajectories, policy.Goal]]]] = {}
        self._unscored = 0
        super().__init__(model, args, *given, **named)
        self.rollouts = self.sampler(**{**self.args.rollout, "entropy": True})
        size = self.args.train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps
        if self.args.max_steps <= 0:
            batches = math.ceil(self.args.num_train_epochs * len(self.train_rows) / size)
            self.args.max_steps = self.args.num_iterations * batches
        self.train_dataset = [*islice(self._stream(size), self.args.max_steps * size)]

    def prepare(self) -> None:
        """Check the sampler, and the rewards on two right answers."""
        some = self.examples[:2]
        texts = [one.answer if isinstance(one.answer, str) else "" for one in some]
        tokens: Any = self.trained.tokenizer(texts, add_special_tokens=False)
        columns = {"completion_ids": [*tokens["input_ids"]], **columns_of(some)}
        for name, (reward, _) in self._rewards.items():
            rewards.call(name, reward, [one.prompt for one in some], texts, columns)
        check(self.sampler(**self.args.rollout))

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # pyright: ignore[reportArgumentType]

    def _stream(self, size: int) -> Iterator[Row]:
        """Yield the rows of each step `num_iterations` times, shuffled in each epoch and numbered by their place."""
        left, place = list[Row](), 0
        for epoch in count():
            left += Random(self.seed_of("epoch", epoch)).sample(self.train_rows, len(self.train_rows))
            while len(left) >= size:
                batch = [replace(row, number=place + at) for at, row in enumerate(left[:size])]
                left, place = left[size:], place + size
                for _ in range(self.args.num_iterations):
                    yield from batch

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Sample and judge answers, or take those of the step before, and sum the gradients of each forward."""
        args, some = self.args, inputs["rows"]
        update, key = self.state.global_step % args.num_iterations, tuple(row.number for row in some)
        if update == 0:
            self._rollouts[key] = self._roll_out(model, some)
        trace, updates = self._rollouts[key] if update + 1 < args.num_iterations else self._rollouts.pop(key)
        view, goal = updates[update]
        moot = not goal.weight.any() or (not goal.advantage.any() and not args.beta)
        if moot and args.world_size == 1:  # others would wait for this one's gradients
            return torch.zeros((), device=args.device)
        model.train()
        goal = replace(goal, weight=goal.weight / self.current_gradient_accumulation_steps)
        learner = torch.zeros_like(trace.logprob)
        total, figures = torch.zeros((), device=args.device), {"clipped": 0.0, "kl": 0.0}
        parts = self.together(view.parts(args.batch_tokens))
        for number, (items, counts) in enumerate(parts, 1):
            chunk = view.chunk(items).to(self.trained.spec.device)
            synced = number == len(parts) or self.is_fsdp_enabled
            with nullcontext() if synced else self.accelerator.no_sync(model):
                logprob, _ = chunk.score(model)
                loss, found = goal.loss(chunk, logprob, args.epsilon, args.beta)
                self.accelerator.backward(loss if counts else 0 * loss)
            if counts:
                total += loss.detach()
                figures |= {name: figures[name] + value for name, value in found.items()}
                chunk.scatter(logprob.detach(), learner)
        self.note(figures)
        if update == 0:
            self.note(policy.mismatch(trace.logprob, learner, view.valid))
        return total

    def _roll_out(self, model: nn.Module, some: list[Row]) -> tuple[Trace, list[tuple[Trajectories, policy.Goal]]]:
        """Answer and judge prompts; return the trace, and the view and the goal of each update."""
        args, group = self.args, self.args.num_generations
        examples, key = [row.example for row in some], tuple(row.number for row in some)
        seeds = [Random(self.seed_of("rollout", row.number, at)).getrandbits(48) for row in some for at in range(group)]
        result = Result.stack(self.answered(self.rollouts, [one.prompt for one in examples], seeds, group))
        repeated = [example for example in examples for _ in range(group)]
        ids = [row[:length] for row, length in zip(result.tokens.tolist(), result.lengths.tolist(), strict=True)]
        columns: dict[str, list[Any]] = {"completion_ids": ids} | columns_of(repeated)
        scores = rewards.judge(self._rewards, [one.prompt for one in repeated], result.texts or [], columns)
        advantage = policy.advantages(scores[0], group, args.scale_rewards)
        views = [self._view(result, key, update) for update in range(args.num_iterations)]
        self._report(scores, advantage, result, views[0])
        # A single update starts at the policy that sampled: its ratios are 1, and what made them is the graph itself.
        old, reference = self._score(model, views) if len(views) > 1 else [], list[Tensor]()
        if args.beta:
            with ExitStack() as stack:
                if (adapter := self.trained.adapter) is None:
                    stack.enter_context(self.reference.applied())
                else:  # the model without adapters is the one before training
                    adapter.disable_adapter_layers()
                    stack.callback(adapter.enable_adapter_layers)
                reference = self._score(model, views)
        there = (~scores[0].isnan()).double()
        share = (there / there.sum().clamp(min=1))[:, None]  # [N, 1]
        nothing = [None] * len(views)
        each = zip(views, old or nothing, reference or nothing, strict=True)
        return result.trace, [(view, policy.Goal(advantage, view.weight * share, *logs)) for view, *logs in each]

    def _score(self, model: nn.Module, views: list[Trajectories]) -> list[Tensor]:
        """Return log-probabilities of each view, computed once if the views are the same."""
        model.eval()
        alike, found = self.args.likelihood == "trajectory", list[Tensor]()
        for view in views[:1] if alike else views:
            chunks = (view.chunk(items) for items, _ in self.together(view.parts(self.args.batch_tokens)))
            found.append(view.log_probabilities(model, chunks=chunks))
        return found * len(views) if alike else found

    def _view(self, result: Result, key: tuple[int, ...], update: int) -> Trajectories:
        """Return the part of the answers that one update scores."""
        args, trace = self.args, result.trace
        blocks = self.rollouts.plugins.blocks.lookahead(args.new_tokens)
        view = Trajectories(trace, self.trained.spec, after_eos=args.after_eos, blocks=blocks)
        if args.likelihood == "trajectory":
            return view
        dice = Dice([self.seed_of("view", number, at, update) for number in key for at in range(args.num_generations)])
        column = torch.arange(trace.ids.shape[1])
        place = column - trace.begin[:, None]  # [B, L] in the row's own prompt
        drawn = dice.uniform(trace.origin - trace.begin, len(column)).gather(1, place.clamp(min=0))
        blank = (drawn < args.mask_prompt) & (place >= 0) & (column < trace.origin)
        return replace(view, single=True, blank=blank)

    def _report(self, scores: rewards.Scores, advantage: Tensor, result: Result, view: Trajectories) -> None:
        (total, means, troubles), entropy = scores, result.trace.entropy
        there = ~total.isnan()
        assert entropy is not None
        for trouble in troubles:
            say(f"step {self.state.global_step + 1}: {trouble}")
        self._unscored = 0 if any(gather_object([bool(there.any())])) else self._unscored + 1
        if self._unscored == PATIENCE:
            said = "Rewards failed, were not finite, or were None for every answer. Correct train.rewards."
            raise UserError("nothing-to-learn", f"No answer in {PATIENCE} steps had a score. {said}")
        equal = (advantage.view(-1, self.args.num_generations) == 0).all(1)
        self.note({"reward": total[there].mean(), **{f"reward/{name}": mean for name, mean in means.items()}})
        self.note({"unscored": (~there).sum(), "equal_groups": equal.double().mean()})
        self.note({"distinct": policy.distinct(result, self.args.num_generations)})
        self.note({"entropy": entropy[view.valid].double().mean()})
        self.note({"rollout_nfe": result.nfe.double().mean(), "rollout_tokens": result.lengths.double().mean()})
