"""Measures of a run, each under its own name, all derived from the counters of its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp
from statistics import fmean

from dllm_sampler.eval.records import Record
from dllm_sampler.eval.statistics import bootstrap, interval, kendall, spearman

LOG_LIKELIHOOD = "log_likelihood"  # a grade of measure=likelihood: nats, of the whole canvas


@dataclass(frozen=True)
class Measure:
    """A figure computed from the samples of a run, with its field of `summary` and its name in tables."""

    name: str
    title: str
    about: str
    of: Callable[[Sequence[Record]], float | None]


def summary(
    records: Sequence[Record],
    score: str | Callable[[Record], float],
    prompts: Sequence[Sequence[Record]] | None = None,
) -> dict[str, float | None]:
    """Return every measure of a run by name, and the 95 % intervals of score and tokens per forward.

    Args:
        records: its samples, at least one.
        score: the name of the grade that counts, or what reads it.
        prompts: the samples of each prompt, for intervals over prompts. None if each has one sample.
    """
    scores = [record.scores[score] if isinstance(score, str) else score(record) for record in records]
    place = {id(record): value for record, value in zip(records, scores, strict=True)}
    groups = [[record] for record in records] if prompts is None else prompts
    low, high = interval([fmean(place[id(record)] for record in group) for group in groups])
    slow, fast = bootstrap(
        [sum(record.answer for record in group) for group in groups],
        [sum(record.nfe for record in group) for group in groups],
    )
    found: dict[str, float | None] = {
        "samples": float(len(records)),
        "score": fmean(scores),
        "score_low": low,
        "score_high": high,
        "answer_tokens_per_forward_low": slow,
        "answer_tokens_per_forward_high": fast,
    }
    return found | {measure.name: measure.of(records) for measure in MEASURES}


def _ratio(above: Iterable[float], below: Iterable[float]) -> float:
    divisor = sum(below)
    return sum(above) / divisor if divisor else 0.0


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _seconds(records: Sequence[Record]) -> float:
    return sum(record.seconds / record.batch for record in records)


def answer_tokens_per_forward(records: Sequence[Record]) -> float:
    """All tokens up to and with each answer's first end token, over all forwards."""
    return _ratio((record.answer for record in records), (record.nfe for record in records))


def canvas_tokens_per_forward(records: Sequence[Record]) -> float:
    """Return ParallelBench's: canvas length over mean forwards, so that padding after the answer counts as speed."""
    return _ratio((record.canvas for record in records), (record.nfe for record in records))


def diffusion_gemma_tokens_per_forward(records: Sequence[Record]) -> float:
    """Return DiffusionGemma's in transformers: the mean ratio of answer tokens, with the end, to denoising passes.

    Forwards of an encoder do not count.
    """
    return fmean(record.answer / max(1, record.nfe) for record in records)


def dinfer_tokens_per_forward(records: Sequence[Record]) -> float:
    """dInfer's: tokens before the end token, over all forwards."""
    return _ratio((record.answer - record.ended for record in records), (record.nfe for record in records))


def dinfer_mean_tokens_per_forward(records: Sequence[Record]) -> float:
    """dInfer's second one: the mean of each sample's ratio."""
    return fmean((record.answer - record.ended) / max(1, record.nfe) for record in records)


def d3llm_tokens_per_forward(records: Sequence[Record]) -> float | None:
    """d3LLM's: tokens of the answers' texts, encoded again without special tokens, over all forwards; None unless every
    sample has a text. What its code calls so leaves ten samples out, for the clock to warm up."""
    known = [record.text_tokens for record in records if record.text_tokens is not None]
    return _ratio(known, (record.nfe for record in records)) if len(known) == len(records) else None


def _counted(records: Sequence[Record]) -> list[Record]:
    """Return the samples of a published protocol in which it counts tokens and forwards."""
    return [record for record in records if "protocol_tokens" in record.scores]


def protocol_tokens_per_forward(records: Sequence[Record]) -> float | None:
    """d3LLM's TPF under its protocol: tokens over forwards, both as the run's protocol counts them. None without."""
    counted = _counted(records)
    tokens, forwards = ([one.scores[f"protocol_{name}"] for one in counted] for name in ("tokens", "forwards"))
    return _ratio(tokens, forwards) if counted else None


def protocol_tokens_per_second(records: Sequence[Record]) -> float | None:
    """Fast-dLLM's tokens/s under its protocol: tokens as the run's protocol counts them, over seconds."""
    counted = _counted(records)
    return _ratio((one.scores["protocol_tokens"] for one in counted), [_seconds(counted)]) if counted else None


def protocol_steps(records: Sequence[Record]) -> float | None:
    """Mean forwards per sample as the run's protocol counts them: dParallel's #Steps. None without a protocol."""
    return _mean(record.scores.get("protocol_forwards") for record in records)


def answer_tokens_per_full_forward(records: Sequence[Record]) -> float:
    """Answer tokens over forwards of the whole prompt and canvas that would compute as many positions."""
    return _ratio((record.answer for record in records), (record.full_equivalents for record in records))


def tokens_per_second(records: Sequence[Record]) -> float:
    """Answer tokens over the seconds that they took together."""
    return _ratio((record.answer for record in records), [_seconds(records)])


def oracle_tokens_per_forward(records: Sequence[Record]) -> float | None:
    """Return `answer_tokens_per_forward` with perfect knowledge of the answers."""
    return None if (fewest := _oracle(records)) is None else _ratio((r.answer for r in records), [fewest])


def oracle_share(records: Sequence[Record]) -> float | None:
    """The oracle's forwards over those made: 1 where nothing is left to gain for the same answers."""
    return None if (fewest := _oracle(records)) is None else _ratio([fewest], (record.nfe for record in records))


def _oracle(records: Sequence[Record]) -> float | None:
    """Forwards of the oracle, None unless every sample has them: a share of other samples would be another measure."""
    known = [record.oracle_nfe for record in records if record.oracle_nfe is not None]
    return float(sum(known)) if len(known) == len(records) else None


def validity(records: Sequence[Record]) -> float | None:
    """Return the share of answers whose form the task, or else the run's guide, accepts. None if neither checks."""
    said = [record.scores.get("valid", record.valid) for record in records]
    return _mean(said) if None not in said else None


def perplexity(records: Sequence[Record]) -> float | None:
    """Return exp of the mean negative log-likelihood of a token. None unless every answer was scored."""
    known = [record.scores[LOG_LIKELIHOOD] for record in records if LOG_LIKELIHOOD in record.scores]
    nats = -_ratio(known, (record.canvas for record in records))
    return exp(min(nats, 700)) if len(known) == len(records) else None


def recompute_share(records: Sequence[Record]) -> float:
    """Positions computed, over those of as many whole forwards: 1 without a cache."""
    whole = [record.nfe * (record.prompt_tokens + record.canvas) for record in records]
    return _ratio((record.rows for record in records), whole)


def order(record: Record, correlation: Callable[..., float | None], padding: bool) -> float | None:
    """Return the correlation of a sample's commit steps with their positions: 1 is left to right, -1 right to left.

    padding: include positions after the answer's end token.
    """
    steps = record.step_map if padding else record.step_map[: record.answer]
    known = [(place, step) for place, step in enumerate(steps) if step >= 0]
    return correlation(*zip(*known, strict=True)) if len(known) > 1 else None


def _order(correlation: Callable[..., float | None], padding: bool) -> Callable[[Sequence[Record]], float | None]:
    return lambda records: _mean(order(record, correlation, padding) for record in records)


# Those that say how fast a configuration is: larger is better.
SPEEDS = (
    "answer_tokens_per_forward",
    "canvas_tokens_per_forward",
    "diffusion_gemma_tokens_per_forward",
    "dinfer_tokens_per_forward",
    "dinfer_mean_tokens_per_forward",
    "d3llm_tokens_per_forward",
    "answer_tokens_per_full_forward",
    "tokens_per_second",
)
MEASURES = (
    Measure(
        "answer_tokens_per_forward",
        "tokens / forward",
        "answer tokens, the end token included, over forwards",
        answer_tokens_per_forward,
    ),
    Measure(
        "canvas_tokens_per_forward",
        "canvas tokens / forward",
        "ParallelBench: canvas length over mean forwards; padding counts",
        canvas_tokens_per_forward,
    ),
    Measure(
        "diffusion_gemma_tokens_per_forward",
        "tokens / forward (DiffusionGemma)",
        "mean over samples of answer tokens, the end token included, over denoising forwards",
        diffusion_gemma_tokens_per_forward,
    ),
    Measure(
        "dinfer_tokens_per_forward",
        "tokens / forward (dInfer)",
        "answer tokens without the end token, over forwards of the row; dInfer counts those of the batch",
        dinfer_tokens_per_forward,
    ),
    Measure(
        "dinfer_mean_tokens_per_forward",
        "mean tokens / forward (dInfer)",
        "the same, as the mean over samples",
        dinfer_mean_tokens_per_forward,
    ),
    Measure(
        "d3llm_tokens_per_forward",
        "tokens / forward (d3LLM)",
        "tokens of the answers' texts, encoded again, over forwards; d3LLM's code leaves out the first ten samples",
        d3llm_tokens_per_forward,
    ),
    Measure(
        "protocol_tokens_per_forward",
        "TPF (protocol)",
        "tokens and forwards as the run's published protocol counts them: d3LLM's TPF",
        protocol_tokens_per_forward,
    ),
    Measure(
        "protocol_tokens_per_second",
        "tokens / s (protocol)",
        "tokens as the run's published protocol counts them, over seconds: Fast-dLLM's",
        protocol_tokens_per_second,
    ),
    Measure(
        "protocol_steps",
        "#Steps (protocol)",
        "mean forwards per sample, as the run's published protocol counts them: dParallel's",
        protocol_steps,
    ),
    Measure(
        "answer_tokens_per_full_forward",
        "tokens / full forward",
        "answer tokens over positions computed, in forwards of the whole prompt and canvas",
        answer_tokens_per_full_forward,
    ),
    Measure(
        "tokens_per_second",
        "tokens / s",
        "answer tokens over wall seconds without the oracle; a rule that takes tokens back pays for a transfer a step",
        tokens_per_second,
    ),
    Measure(
        "seconds",
        "s / sample",
        "wall seconds of generating per sample",
        lambda records: _seconds(records) / len(records),
    ),
    Measure("nfe", "forwards", "mean per sample", lambda records: fmean(record.nfe for record in records)),
    Measure(
        "forwards_without_commit",
        "forwards without a commit",
        "those that wrote no token: they stored, looked, or took back; mean per sample",
        lambda records: fmean(record.idle for record in records),
    ),
    Measure("rows", "positions computed", "mean per sample", lambda records: fmean(record.rows for record in records)),
    Measure(
        "full_forwards",
        "full forwards",
        "positions computed, in forwards of the whole prompt and canvas, mean per sample",
        lambda records: fmean(record.full_equivalents for record in records),
    ),
    Measure(
        "oracle_tokens_per_forward",
        "oracle's tokens / forward",
        "with perfect knowledge of these answers",
        oracle_tokens_per_forward,
    ),
    Measure(
        "oracle_share",
        "share of the oracle",
        "forwards that perfect knowledge of these answers needs, over those made",
        oracle_share,
    ),
    Measure("validity", "valid", "share of answers of the form that the task or the guide asks for", validity),
    Measure(
        "rejections",
        "rejections",
        "commits that a guide refused, mean per sample",
        lambda records: fmean(record.rejections for record in records),
    ),
    Measure(
        "perplexity",
        "perplexity",
        "exp of the mean negative log-likelihood of a token of right answers, exact under the sampler",
        perplexity,
    ),
    Measure("recompute_share", "recomputed", "positions computed over those of whole forwards", recompute_share),
    Measure("commits", "commits", "tokens written per sample, all", lambda records: fmean(r.commits for r in records)),
    Measure(
        "revisions",
        "revisions",
        "commits per sample that did not stay",
        lambda records: fmean(sum(piece is not None for _, _, piece in r.revisions) for r in records),
    ),
    Measure(
        "answer_tokens",
        "answer tokens",
        "up to and with the first end token, per sample",
        lambda records: fmean(record.answer for record in records),
    ),
    Measure(
        "tokens_after_end",
        "tokens after the end",
        "committed after the first end token, per sample",
        lambda records: fmean(record.after_end for record in records),
    ),
    Measure("kendall", "order (Kendall)", "tau-b of position and commit step inside answers", _order(kendall, False)),
    Measure("spearman", "order (Spearman)", "rho of position and commit step inside answers", _order(spearman, False)),
    Measure("kendall_padded", "order (Kendall, padded)", "tau-b with the padding", _order(kendall, True)),
    Measure("spearman_padded", "order (Spearman, padded)", "rho with the padding", _order(spearman, True)),
    Measure(
        "peak_memory",
        "peak memory, MiB",
        "the most of any batch: of the GPU, else of the process",
        lambda records: max(record.peak_memory for record in records) / 2**20,
    ),
    Measure(
        "unfinished",
        "unfinished",
        "share of samples that max_steps or a guide ended",
        lambda records: fmean(not record.complete for record in records),
    ),
)
