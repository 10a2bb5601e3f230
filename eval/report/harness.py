"""Results of lm-evaluation-harness with this package's model, read as runs."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from dllm_sampler.errors import UserError, first_line
from dllm_sampler.eval.lm_eval.counters import KEY, SCHEMA
from dllm_sampler.eval.measures import MEASURES
from dllm_sampler.eval.statistics import Z, wilson
from dllm_sampler.host.reading import load_json

PATTERN = "results_*.json"

OWN = ("tokens_per_forward", "forwards")  # metrics that our command adds to those of a task
Figures = dict[str, float | None]


@dataclass(frozen=True)
class Result:
    """One task of a results file.

    about: the fields of `run.json`, filled from the results
    figures: every measure by name, or None if the task has none
    grades: the metrics besides the score, by name
    """

    about: Mapping[str, Any]
    figures: Figures | None
    grades: Mapping[str, float]


def results(file: Path) -> list[Result]:
    """Return the tasks of a results file. The list is empty if the results are those of another model.

    Raises:
        UserError: the file cannot be read, has another schema, or is not a results file of the harness.
    """
    try:
        content = file.read_bytes()
        found = load_json(content)
        ours = found["config"].get(KEY)
        if ours is None:
            return []
        if ours["schema"] != SCHEMA:
            raise UserError(
                "version-differs",
                f"{file} is from another version of dllm_sampler (schema {ours['schema']}, not {SCHEMA}). Use that"
                " version, or name a folder without this file.",
            )
        digest = hashlib.sha256(content).hexdigest()[:12]
        groups = found.get("groups") or {}
        return [_result(task, found, ours, digest) for task in found["results"] if task not in groups]
    except UserError:  # a ValueError, too
        raise
    except OSError as error:
        raise UserError(
            "file-unreadable", f"{file} cannot be read ({error.strerror}). Check its permissions."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = first_line(error) if isinstance(error, ValueError) else "a field is missing or has another type"
        raise UserError(
            "file-invalid",
            f"{file} has the name of a results file of lm-evaluation-harness, but is not one ({reason}). Rename it.",
        ) from None


def _result(task: str, found: Mapping[str, Any], ours: Mapping[str, Any], digest: str) -> Result:
    one = found["results"][task]
    metrics = _metrics(one)
    better = (found.get("higher_is_better") or {}).get(task) or {}
    falls = {name for name in metrics if better.get(name.partition(" ")[0]) is False}
    shares = [name for name, (value, _) in metrics.items() if 0 <= value <= 1 and name not in falls]
    counts = ours["tasks"].get(task)
    reason = None
    if counts is None or not counts["forwards"]:
        reason = "lm-evaluation-harness asked for likelihoods, which have no tokens per forward."
    elif not shares:
        reason = f"none of its metrics is a share from 0 to 1 ({', '.join(metrics) or 'it has none'})."
    score = shares[0] if shares else ""
    limit = found["config"].get("limit")
    about = {
        "name": f"{task}-{digest}",
        "choices": {**ours["choices"], "task": task},
        "config": {
            **ours["config"],
            "task": {"name": task, "n_shot": (found.get("n-shot") or {}).get(task), "limit": limit},
        },
        "samples": 0 if counts is None else int(counts["answers"]),
        "score": score,
        "dependency": None,
        "refused": reason,
        "measures": None,
        "environments": [ours["environment"]],
    }
    if reason is not None or counts is None:
        return Result(about, None, {})
    grades = {name: value for name, (value, _) in metrics.items() if name != score}
    samples = (found.get("n-samples") or {}).get(task) or {}
    return Result(about, _figures(*metrics[score], int(samples.get("effective") or counts["answers"]), counts), grades)


def _metrics(one: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Return the metrics of a task by `name`, or `name (filter)`: value and standard error."""
    made = {}
    for key, value in one.items():
        name, comma, chosen = key.partition(",")
        if not comma or name.endswith("_stderr") or name in OWN or not isinstance(value, int | float):
            continue
        error = one.get(f"{name}_stderr,{chosen}")
        told = name if chosen == "none" else f"{name} ({chosen})"
        made[told] = (float(value), float(error) if isinstance(error, int | float) else None)
    return made


def _figures(score: float, error: float | None, samples: int, counts: Mapping[str, Any]) -> Figures:
    """Return the measures that follow from sums over samples. The others are None.

    The score's interval is 1.96 standard errors, as the harness computed them. Where it computed none, or 0, it is
    Wilson's.
    """
    low, high = wilson(score * samples, samples)
    if error:
        low, high = max(0.0, score - Z * error), min(1.0, score + Z * error)
    answers, tokens, forwards, seconds = (
        float(counts[name]) for name in ("answers", "answer_tokens", "forwards", "seconds")
    )
    return dict.fromkeys(measure.name for measure in MEASURES) | {
        "samples": float(samples),
        "score": score,
        "score_low": low,
        "score_high": high,
        "answer_tokens_per_forward": tokens / forwards,
        "answer_tokens_per_forward_low": float(counts["tokens_per_forward_low"]),
        "answer_tokens_per_forward_high": float(counts["tokens_per_forward_high"]),
        "canvas_tokens_per_forward": float(counts["canvas_tokens"]) / forwards,
        "tokens_per_second": tokens / seconds if seconds else None,
        "seconds": seconds / answers,
        "nfe": forwards / answers,
        "answer_tokens": tokens / answers,
    }


def pooled(each: Sequence[Figures]) -> Figures:
    """Return the measures of several runs together, computed from the measures of each, without their samples.

    Ratios are ratios of sums. Measures that need the samples are None: intervals of ratios, correlations, the oracle.
    """

    def total(*names: str) -> float | None:
        """Return the sum over runs of the number of samples times the named measures."""
        values = [[one["samples"], *(one[name] for name in names)] for one in each]
        return None if any(None in some for some in values) else sum(prod(some) for some in values)  # pyright: ignore

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if above is not None and below else None

    samples, tokens, forwards, seconds = total(), total("answer_tokens"), total("nfe"), total("seconds")
    return dict.fromkeys(each[0]) | {
        "samples": samples,
        "answer_tokens": ratio(tokens, samples),
        "nfe": ratio(forwards, samples),
        "seconds": ratio(seconds, samples),
        "answer_tokens_per_forward": ratio(tokens, forwards),
        "canvas_tokens_per_forward": ratio(total("canvas_tokens_per_forward", "nfe"), forwards),
        "tokens_per_second": ratio(tokens, seconds),
    }
