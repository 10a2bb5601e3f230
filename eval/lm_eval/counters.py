"""Counts of tokens and forwards for each task, which `dllm-report` reads in the harness's results."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dllm_sampler.eval.statistics import bootstrap

KEY = "dllm_sampler"  # of `config` in the results
SCHEMA = 1


@dataclass
class Counter:
    """Counts of the answers to one task.

    The harness writes `OUTPUT_PATH/MODEL/results_DATE.json`. With this package's model, `config.dllm_sampler` has these
    fields:

    - `schema`: 1
    - `choices`, `config`, `environment`: as in `run.json` of `dllm-eval`
    - `tasks`: for each task that generates, `answers`, the sums `answer_tokens`, `canvas_tokens`, `forwards` and
      `seconds`, and `tokens_per_forward` with its 95 % interval (`_low`, `_high`)

    tokens: the number of tokens of each answer, up to and including the first end-of-text token
    forwards: the number of forwards of each answer
    canvas: the sum of the canvas lengths, in tokens
    seconds: the sum of the times between successive answers
    """

    tokens: list[int] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    canvas: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, forwards: int, canvas: int, seconds: float) -> None:
        """Count an answer with its tokens, its forwards, the length of its canvas in tokens, and its seconds."""
        self.tokens.append(tokens)
        self.forwards.append(forwards)
        self.canvas += canvas
        self.seconds += seconds

    def summary(self) -> dict[str, Any]:
        """Return sums over the answers, and tokens per forward with its 95 % interval."""
        tokens, forwards = sum(self.tokens), sum(self.forwards)
        low, high = bootstrap(self.tokens, self.forwards)
        return {
            "answers": len(self.tokens),
            "answer_tokens": tokens,
            "canvas_tokens": self.canvas,
            "forwards": forwards,
            "seconds": round(self.seconds, 3),
            "tokens_per_forward": tokens / forwards if forwards else None,
            "tokens_per_forward_low": low,
            "tokens_per_forward_high": high,
        }


def counted(results: Any) -> Any:
    """Add tokens per forward and forwards to the metrics of each task in the harness's results, and return the results.

    The device becomes the model's, since the harness writes that of its command line, by default `cuda:0`. None, the
    value in other processes of the harness, is returned as it is.
    """
    if results is None or (ours := results["config"].get(KEY)) is None:
        return results
    results["config"]["device"] = ours["environment"]["device"]
    for task, one in ours["tasks"].items():
        if one["forwards"] and task in results["results"]:
            added = {"tokens_per_forward": one["tokens_per_forward"], "forwards": one["forwards"] / one["answers"]}
            results["results"][task] |= {f"{name},none": value for name, value in added.items()}
            better: Mapping[str, bool] = {"tokens_per_forward": True, "forwards": False}
            results.setdefault("higher_is_better", {}).setdefault(task, {}).update(better)
    return results
