"""`Runtime`: the parts of a sampler that a generation needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.core.spec import ChangingLength, ModelSpec
from dllm_sampler.core.values import Canvas, Noise
from dllm_sampler.engine import layout
from dllm_sampler.engine.in_flight import Request
from dllm_sampler.engine.loop import Engine
from dllm_sampler.engine.plugins import Plugins


class HasRuntime(Protocol):
    """The part of a `Sampler` that `SpeculativeSampler` uses, typed here since `Sampler` imports this folder."""

    @property
    def runtime(self) -> Runtime:
        """The parts of a sampler that a generation needs."""
        ...

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """The user's end-of-text tokens."""
        ...


@dataclass(frozen=True)
class Runtime:
    """A model, its plug-ins and their limits for one call.

    Args:
        tokenizer: encodes and decodes texts. Without one, prompts are token ids and results have no texts.
        max_steps: most steps of an answer. None means the scheduler's own bound.
        make_engine: returns the engine for plug-ins and a number of consecutive rows with the same prompt.
    """

    denoiser: Denoiser
    plugins: Plugins
    tokenizer: PreTrainedTokenizerBase | None
    noise: Noise
    max_steps: int | None
    make_engine: Callable[[Plugins, int], Engine]

    @property
    def spec(self) -> ModelSpec:
        """The current spec of the model, with `stop_token_ids` among its end-of-text tokens."""
        return self.denoiser.spec.with_ends(self.plugins.context.spec.eos_ids)

    def engine(self, samples: int = 1) -> Engine:
        """Return the engine for batches in which each `samples` consecutive rows have the same prompt."""
        return self.make_engine(self.plugins, samples)

    def bound(self, tokens: int) -> int:
        """Return the most forwards of an answer of `tokens`."""
        return self.max_steps or self.plugins.bound(tokens)

    def canvas(
        self,
        requests: Sequence[Request],
        multiple: int,
        *,
        cuts: bool,
        length: int = 0,
        lengths: Collection[int] = (),
        has_given: bool = False,
    ) -> Canvas:
        """Return the canvas of requests.

        Args:
            has_given: rows that join later may have given tokens. Other arguments are as in `layout.canvas`.
        """
        plugins, has_given = self.plugins, has_given or any(one.given is not None for one in requests)
        return layout.canvas(
            [one.prompt for one in requests],
            [one.max_new_tokens for one in requests],
            [one.seed for one in requests],
            self.spec,
            plugins.blocks,
            self.noise,
            cuts,
            multiple,
            length,
            lengths,
            [one.form for one in requests] if plugins.forms else None,
            [one.given for one in requests] if has_given else None,
            plugins.scheduler.traits.find(ChangingLength),
        )
