"""Policy-gradient training on rewards: CJ-GRPO over trajectories (arXiv 2509.23924), and diffu-GRPO as its baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from dllm_sampler.errors import UserError, unknown
from dllm_sampler.inputs.prompts import Prompt
from dllm_sampler.result import Result
from dllm_sampler.training import policy, rewards
from dllm_sampler.training.examples import columns_of
from dllm_sampler.training.finetune import FREE, FineTuner, Part
from dllm_sampler.training.trajectory import Chunk, Trajectories, check, trajectories

Likelihood = Literal["trajectory", "masked"]
PATIENCE = 10  # steps in a row without a single score before the run ends


@dataclass
class PolicyTrainer(FineTuner):
    """Samples `group` answers to each prompt, and makes those more likely that are better than their group's mean.

    The loss is the clipped ratio to the policy that sampled, plus `beta` times an estimate of the divergence from the
    reference (exp(d) - d - 1 with d = log pi_ref - log pi). It is the mean over a transition's tokens, then over a
    sample's transitions, then over the samples, however it is cut into forwards; the official code of CJ-GRPO pools
    the tokens of all samples of a micro-batch instead, which depends on the cut. Probabilities are those of the model
    itself, without temperature, guide or cache.

    prompts, group: prompts of a step, and answers to each
    rollout: settings of the sampler; any that commits each position once, at a temperature
    rewards: weight of each reward: a name of `schedulers/rewards.py`, or `package.module:function` in TRL's form
    likelihood: `trajectory`, every token by the state it was committed from (CJ-GRPO); `masked`, all at once with the
        whole answer and a share of the prompt masked (diffu-GRPO, arXiv 2504.12216)
    mask_prompt: that share, drawn again for each update
    transitions: score at most this many of each answer's; null: all
    scale: divide advantages by their group's deviation (GRPO; not CJ-GRPO)
    after_eos: tokens behind the first end token count too, as in the official code
    updates: optimizer steps on the same answers
    epsilon, beta: of the clipping, and the weight of the divergence
    reference_every: steps after which the reference becomes the present model; 0: never. Adapters: always 0, the
        reference is the model without them
    """

    prompts: int
    group: int
    rollout: dict[str, Any]
    rewards: dict[str, float]
    likelihood: str
    mask_prompt: float
    transitions: int | None
    scale: bool
    after_eos: bool
    updates: int
    epsilon: float
    beta: float
    reference_every: int

    name: ClassVar[str] = "policy"
    most_held_out: ClassVar[int] = 800  # one deviation of a measurement is 1.7 points
    free: ClassVar[tuple[str, ...]] = FREE

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in {"prompts": 1, "group": 2, "updates": 1, "reference_every": 0}.items():
            if getattr(self, name) < least:
                raise UserError("option-range", f"train.{name} must be at least {least}, not {getattr(self, name)}")
        if self.transitions is not None and self.transitions < 1:
            raise UserError("option-range", f"train.transitions must be null or at least 1, not {self.transitions}")
        if self.likelihood not in get_args(Likelihood):
            raise unknown("train.likelihood", self.likelihood, get_args(Likelihood))
        if not self.epsilon > 0 or not self.beta >= 0:
            raise UserError(
                "option-range",
                f"train.epsilon must be above 0 and train.beta at least 0, not {self.epsilon}, {self.beta}",
            )
        if not 0 <= self.mask_prompt < 1:
            raise UserError("option-range", f"train.mask_prompt must be from 0 to below 1, not {self.mask_prompt}")
        if not self.rollout.get("temperature"):
            raise UserError("option-range", "train.rollout.temperature must be above 0: answers must differ")
        if self.lora is not None and self.reference_every:
            raise UserError("options-conflict", "train.reference_every must be 0 with train.lora")

    @property
    def needs_answers(self) -> bool:
        """See `FineTuner.needs_answers`: rewards may do without."""
        return False

    def prepare(self) -> None:
        """Checks of the examples, rewards, the rollouts' sampler and the reference."""
        self.check_prompts()
        self.say_examples(self.prompts)
        self._rewards = {name: (rewards.find(name), weight) for name, weight in self.rewards.items()}
        self._try_rewards()
        self.rollouts = self.sampler(**{**self.rollout, "entropy": True})
        check(self.rollouts)
        self._reference: nn.Module | None = None
        self._unscored, self._told_mismatch = 0, False
        if self.beta and self.trained.adapter is None:
            self._reference = self._frozen()

    def _frozen(self) -> nn.Module:
        """A copy of the network that learns nothing, whose weights are where the network's are."""
        if not self.trained.sharded:
            return deepcopy(self.trained.network).requires_grad_(False).eval()
        other = self.fresh(self.accelerator.device)
        other.network.requires_grad_(False)
        other.wrap(self.accelerator, self.shard)
        return other.network

    def _try_rewards(self) -> None:
        some = self.source.draw(f"{self.seed}/rewards", 2)
        texts = [one.answer if isinstance(one.answer, str) else "" for one in some]
        columns = {"completion_ids": self.trained.tokenizer(texts, add_special_tokens=False).input_ids}
        rewards.check(self._rewards, [one.prompt for one in some], texts, columns | columns_of(some))

    def others(self) -> dict[str, nn.Module]:
        """See `FineTuner.others`."""
        return {} if self._reference is None else {"reference": self._reference}

    def step(self, number: int) -> dict[str, float]:
        """Sample, judge, and update."""
        if self._reference is not None and self.reference_every and number and number % self.reference_every == 0:
            self._reference.load_state_dict(self.trained.network.state_dict())
        examples = self.examples(f"step {number}", self.prompts, number=number)
        result = self._sample([example.prompt for example in examples], number)
        repeated = [example for example in examples for _ in range(self.group)]
        assert result.texts is not None
        ids = [row[:length] for row, length in zip(result.tokens.tolist(), result.lengths.tolist(), strict=True)]
        columns = {"completion_ids": ids} | columns_of(repeated)
        scores = rewards.judge(self._rewards, [one.prompt for one in repeated], result.texts, columns)
        advantage = rewards.advantages(scores.total, self.group, self.scale)
        figures = self._told(number, scores, advantage, result)
        there = ~scores.total.isnan()
        moot = not there.any() or (not advantage.any() and not self.beta)
        if moot and self.accelerator.num_processes == 1:  # others would wait for this one's gradients
            return {**figures, "loss": 0.0}
        views = [self._view(result, number, update) for update in range(self.updates)]
        # A single update starts at the policy that sampled: its ratios are 1, and what made them is the graph itself.
        old = self._score_all(self.trained.network, views) if self.updates > 1 else None
        reference = None
        if self.beta:
            with self.trained.without_adapters() if self.trained.adapter is not None else nullcontext():
                reference = self._score_all(self._reference or self.trained.network, views)
        found: list[dict[str, float]] = []
        learner = torch.zeros_like(result.trace.logprob)  # log-probabilities before the first update
        for update, view in enumerate(views):
            weight = view.weight * (there / there.sum().clamp(min=1))[:, None]
            then = None if old is None else old[update]
            goal = Goal(advantage, weight, then, None if reference is None else reference[update])
            found.append(self.update(self._parts(view, goal, None if update else learner), f"step {number}/{update}"))
        figures |= {"kl": 0.0} | {name: sum(each[name] for each in found) / self.updates for name in found[0]}
        return figures | self._mismatch(number, result, views[0], learner)

    def _mismatch(self, number: int, result: Result, view: Trajectories, learner: Tensor) -> dict[str, float]:
        """How far the policy that sampled is from the one that learns; said once, where it is more than rounding."""
        found = policy.mismatch(result.trace.logprob, learner, view.valid)
        if found and self.likelihood == "trajectory" and not self._told_mismatch:
            sentence = policy.sentence(found, self.rollouts, self.precision)
            if sentence:
                self._told_mismatch = True
                self.say(f"step {number + 1}: {sentence}")
        return found

    def _sample(self, prompts: Sequence[Prompt], number: int) -> Result:
        seed = Random(f"{self.seed}/rollout/{number}/{self.accelerator.process_index}").getrandbits(48)
        return Result.stack(self.answered(self.rollouts, prompts, seed, self.group))

    def _told(self, number: int, scores: rewards.Scores, advantage: Tensor, result: Result) -> dict[str, float]:
        """Figures of the log, and sentences where something is wrong."""
        for trouble in scores.troubles:
            self.say(f"step {number + 1}: {trouble}")
        there = ~scores.total.isnan()
        self._unscored = 0 if there.any() else self._unscored + 1
        if self._unscored == PATIENCE:
            raise UserError("nothing-to-learn", f"no answer in {PATIENCE} steps had a reward. See the log.")
        flat = int((advantage.view(-1, self.group) == 0).all(1).sum())
        if flat == self.prompts:
            self.say(f"step {number + 1}: the answers to each prompt have equal rewards, so there is nothing to learn")
        known = scores.total[there]
        return {
            "reward": float(known.mean()) if len(known) else math.nan,
            **{f"reward/{name}": mean for name, mean in scores.means.items()},
            "unscored": int((~there).sum()),
            "equal_groups": flat / self.prompts,
            "distinct": policy.distinct(result, self.group),
            "entropy": policy.entropy(result.trace, self.trained.denoiser.spec.eos_ids),
            "rollout_nfe": float(result.nfe.double().mean()),
            "rollout_tokens": float(result.lengths.double().mean()),
        }

    def _view(self, result: Result, number: int, update: int) -> Trajectories:
        """What of the answers one update scores."""
        spec, generator = self.trained.denoiser.spec, torch.Generator()
        generator.manual_seed(Random(f"{self.seed}/view/{number}/{update}").getrandbits(62))
        blocks = self.rollouts.plugins.blocks.lookahead(self.new_tokens)
        common: dict[str, Any] = {"after_eos": self.after_eos, "blocks": blocks}
        if self.likelihood == "masked":
            blank = torch.rand(result.trace.ids.shape, generator=generator) < self.mask_prompt
            blank &= torch.arange(blank.shape[1]) < result.trace.origin
            return trajectories(result.trace, spec, single=True, blank=blank, **common)
        view = trajectories(result.trace, spec, **common)
        return view if self.transitions is None else view.sample(self.transitions, generator)

    def _score_all(self, network: nn.Module, views: list[Trajectories]) -> list[Tensor]:
        """Log-probabilities of each view under `network`, once where the views are the same."""
        alike = self.likelihood == "trajectory" and self.transitions is None
        with self.autocast():
            found = [
                view.log_probabilities(network, chunks=self._chunks(view)) for view in (views[:1] if alike else views)
            ]
        return found * len(views) if alike else found

    def _chunks(self, view: Trajectories) -> Iterator[Chunk]:
        return (chunk for chunk, _ in self.trained.together(view.chunks(self.batch_tokens)))

    def _parts(self, view: Trajectories, goal: Goal, kept: Tensor | None) -> Iterator[Part]:
        """The loss in parts of one forward each; writes log-probabilities to `kept` on the way."""

        def part(chunk: Chunk) -> tuple[Tensor, Mapping[str, float]]:
            logprob, _ = chunk.to(self.trained.denoiser.spec.device).score(self.trained.wrapped)
            if kept is not None:
                at = chunk.there
                kept[chunk.row[:, None].expand_as(at)[at], chunk.columns[at]] = logprob.detach().cpu()[at].to(kept)
            return goal.loss(chunk, logprob, self.epsilon, self.beta)

        return (partial(part, chunk) for chunk in view.chunks(self.batch_tokens))


@dataclass(frozen=True)
class Goal:
    """What the loss of an update is made of: one number per answer, or per answer and column."""

    advantage: Tensor  # [N]
    weight: Tensor  # [N, L] sums to 1
    old: Tensor | None  # [N, L] log-probability under the policy that sampled; None: under the present one
    reference: Tensor | None  # [N, L] under the reference

    def loss(self, chunk: Chunk, logprob: Tensor, epsilon: float, beta: float) -> tuple[Tensor, Mapping[str, float]]:
        """The chunk's share of the loss, `logprob [n, Q]` being the tokens', and of the figures."""

        def at(values: Tensor) -> Tensor:
            found = values[chunk.row[:, None], chunk.columns]
            return torch.where(chunk.there, found, 0).to(logprob)

        weight, advantage = at(self.weight), self.advantage[chunk.row][:, None].to(logprob)
        ratio = (logprob - (logprob.detach() if self.old is None else at(self.old))).exp()
        bounded = ratio.clamp(1 - epsilon, 1 + epsilon)
        each = -torch.minimum(ratio * advantage, bounded * advantage)
        figures = {"clipped": float((weight * (bounded * advantage < ratio * advantage)).sum())}
        if self.reference is not None:
            away = at(self.reference) - logprob
            divergence = away.exp() - away - 1
            figures["kl"] = float((weight * divergence.detach()).sum())
            each = each + beta * divergence
        return (weight * each).sum(), figures
