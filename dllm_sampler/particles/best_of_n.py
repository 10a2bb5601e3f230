"""Best of N: the best of several independent rows."""

from dataclasses import dataclass, field
from typing import Any, Literal, Self

from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_choice
from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Carry, Context, Meeting
from dllm_sampler.core.spec import with_bound_fields
from dllm_sampler.errors import UserError
from dllm_sampler.inputs.rewards import Reward
from dllm_sampler.particles.resampling import SeveralRows, judge_of, rewards

By = Literal["confidence", "likelihood", "reward"]


@dataclass(frozen=True)
class BestOfN(SeveralRows):
    """Independent rows for each prompt. The best one is the answer.

    Args:
        by: `confidence` is the product of the tokens' probabilities, each in the step that committed it. `likelihood`
            is the probability of the answer under model and sampler (`Sampler.score`), which takes forwards of its own.
            `reward` is the value of the function `reward`.
        reward: a function, or `package.module:function`; see `inputs.rewards.Reward` and docs/rewards.md.
    """

    by: By = "confidence"
    reward: Any = None
    judge: Reward | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("particles.by", self.by, By)

    @property
    @override
    def needs_likelihood(self) -> bool:
        return self.by == "likelihood"

    @override
    def bind(self, context: Context) -> Self:
        bound = super().bind(context)
        if self.by != "reward":
            if self.reward is not None:
                raise UserError(
                    "option-not-applicable",
                    f"particles.reward has no effect with particles.by={self.by}. Remove it, or set"
                    " particles.by=reward.",
                )
            return bound
        return with_bound_fields(bound, judge=judge_of(self.reward, f"particles={named(self)}", context))

    @override
    def rate(self, meeting: Meeting, carry: Carry, likelihood: Tensor | None) -> Tensor:
        if self.judge is not None:
            return rewards(self.judge, meeting).view_as(meeting.log_p)
        return meeting.log_p if likelihood is None else likelihood
