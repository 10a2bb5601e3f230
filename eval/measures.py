"""Measures of a run, computed from the records of its samples."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp
from statistics import fmean

from dllm_sampler.eval.records import Record
from dllm_sampler.eval.statistics import bootstrap, interval, kendall, spearman

LOG_LIKELIHOOD = "log_likelihood"  # a grade of measure=likelihood: nats, of the whole canvas


Of = Callable[[Sequence[Record]], float | None]


@dataclass(frozen=True)
class Measure:
    """A figure computed from the samples of a run.

    name: its key in `summary`; title: its name in tables; about: a description in one line
    of: the function that computes it. It returns None if the samples do not have the figure
    """

    name: str
    title: str
    about: str
    of: Of


MEASURES: list[Measure] = []  # in the order of tables
SPEEDS: list[str] = []  # names of the measures of speed: larger is faster


def summary(
    records: Sequence[Record], score: str | Callable[[Record], float], prompts: Sequence[Sequence[Record]] | None = None
) -> dict[str, float | None]:
    """Return every measure of a run by name, and the 95 % intervals of score and tokens per forward.

    There is at least one sample. `score` is the name of the grade that counts, or a function that returns it. With
    `prompts`, the samples of each prompt, intervals are over prompts.
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


def _measure(title: str, about: str, speed: bool = False, name: str = "") -> Callable[[Of], Of]:
    """Register the decorated function as a measure, under `name` or else its own name. `speed` adds it to `SPEEDS`."""

    def add(of: Of) -> Of:
        MEASURES.append(Measure(name or of.__name__.removeprefix("_"), title, about, of))
        SPEEDS.extend([MEASURES[-1].name] * speed)
        return of

    return add


def _mean_per_sample(name: str, title: str, about: str, value: Callable[[Record], float]) -> None:
    """Register the mean of `value` over samples as a measure."""
    _measure(title, about, name=name)(lambda records: fmean(map(value, records)))


def _ratio(above: Iterable[float], below: Iterable[float]) -> float:
    divisor = sum(below)
    return sum(above) / divisor if divisor else 0.0


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _total_seconds(records: Sequence[Record]) -> float:
    return sum(record.seconds / record.batch for record in records)


def _counted(records: Sequence[Record]) -> list[Record]:
    """Return the samples in which a published protocol counts tokens and forwards."""
    return [record for record in records if "protocol_tokens" in record.scores]


def _fewest(records: Sequence[Record]) -> float | None:
    """Return the sum of the oracle's forwards, or None if a sample has none."""
    known = [record.oracle_nfe for record in records if record.oracle_nfe is not None]
    return float(sum(known)) if len(known) == len(records) else None


@_measure("tokens / forward", "answer tokens, with the end-of-text token, over forwards", speed=True)
def _answer_tokens_per_forward(records: Sequence[Record]) -> float:
    return _ratio((record.answer for record in records), (record.nfe for record in records))


@_measure("canvas tokens / forward", "ParallelBench: canvas length over mean forwards; padding counts", speed=True)
def _canvas_tokens_per_forward(records: Sequence[Record]) -> float:
    return _ratio((record.canvas for record in records), (record.nfe for record in records))


@_measure(
    "tokens / forward (DiffusionGemma)",
    "mean over samples of answer tokens, with the end-of-text token, over denoising forwards",
    speed=True,
)
def _diffusion_gemma_tokens_per_forward(records: Sequence[Record]) -> float:
    return fmean(record.answer / max(1, record.nfe) for record in records)


@_measure(
    "tokens / forward (dInfer)",
    "answer tokens without the end-of-text token, over forwards of the row; dInfer counts forwards of the batch",
    speed=True,
)
def _dinfer_tokens_per_forward(records: Sequence[Record]) -> float:
    return _ratio((record.answer - record.ended for record in records), (record.nfe for record in records))


@_measure("mean tokens / forward (dInfer)", "mean over samples of tokens / forward (dInfer)", speed=True)
def _dinfer_mean_tokens_per_forward(records: Sequence[Record]) -> float:
    return fmean((record.answer - record.ended) / max(1, record.nfe) for record in records)


@_measure(
    "tokens / forward (d3LLM)",
    "tokens of the answers' texts, encoded again, over forwards; d3LLM's code leaves out the first ten samples",
    speed=True,
)
def _d3llm_tokens_per_forward(records: Sequence[Record]) -> float | None:
    known = [record.text_tokens for record in records if record.text_tokens is not None]
    return _ratio(known, (record.nfe for record in records)) if len(known) == len(records) else None


@_measure("TPF (protocol)", "tokens over forwards, as the run's published protocol counts them (d3LLM's TPF)")
def _protocol_tokens_per_forward(records: Sequence[Record]) -> float | None:
    counted = _counted(records)
    tokens, forwards = ([one.scores[f"protocol_{name}"] for one in counted] for name in ("tokens", "forwards"))
    return _ratio(tokens, forwards) if counted else None


@_measure("tokens / s (protocol)", "tokens as the run's published protocol counts them, over seconds (Fast-dLLM)")
def _protocol_tokens_per_second(records: Sequence[Record]) -> float | None:
    counted = _counted(records)
    tokens = [one.scores["protocol_tokens"] for one in counted]
    return _ratio(tokens, [_total_seconds(counted)]) if counted else None


@_measure("#Steps (protocol)", "mean forwards per sample, as the run's published protocol counts them (dParallel)")
def _protocol_steps(records: Sequence[Record]) -> float | None:
    return _mean(record.scores.get("protocol_forwards") for record in records)


@_measure(
    "tokens / full forward",
    "answer tokens over full forwards: positions computed, divided by the positions of prompt and canvas",
    speed=True,
)
def _answer_tokens_per_full_forward(records: Sequence[Record]) -> float:
    return _ratio((record.answer for record in records), (record.full_equivalents for record in records))


@_measure(
    "tokens / s",
    "answer tokens over wall seconds, without the oracle; a scheduler that remasks also has a transfer in each step",
    speed=True,
)
def _tokens_per_second(records: Sequence[Record]) -> float:
    return _ratio((record.answer for record in records), [_total_seconds(records)])


@_measure("s / sample", "wall seconds of generation per sample, without the oracle")
def _seconds(records: Sequence[Record]) -> float:
    return _total_seconds(records) / len(records)


_mean_per_sample("nfe", "forwards", "mean per sample", lambda one: one.nfe)
_mean_per_sample(
    "forwards_without_commit",
    "forwards without a commit",
    "forwards that committed no token, for example to fill the cache or to remask; mean per sample",
    lambda one: one.idle,
)
_mean_per_sample("rows", "positions computed", "mean per sample", lambda one: one.rows)
_mean_per_sample(
    "full_forwards",
    "full forwards",
    "positions computed, divided by the positions of prompt and canvas; mean per sample",
    lambda one: one.full_equivalents,
)


@_measure("oracle's tokens / forward", "answer tokens over the forwards of a sampler that knows these answers")
def _oracle_tokens_per_forward(records: Sequence[Record]) -> float | None:
    return None if (fewest := _fewest(records)) is None else _ratio((r.answer for r in records), [fewest])


@_measure("share of the oracle", "forwards of a sampler that knows these answers, over the forwards made")
def _oracle_share(records: Sequence[Record]) -> float | None:
    return None if (fewest := _fewest(records)) is None else _ratio([fewest], (record.nfe for record in records))


@_measure("valid", "share of answers in the form that the task or the guide demands")
def _validity(records: Sequence[Record]) -> float | None:
    said = [record.scores.get("valid", record.valid) for record in records]
    return _mean(said) if None not in said else None


_mean_per_sample(
    "rejections", "rejections", "commits that a guide refused, mean per sample", lambda one: one.rejections
)


@_measure("perplexity", "exp of the mean negative log-likelihood of a token of right answers, exact under the sampler")
def _perplexity(records: Sequence[Record]) -> float | None:
    known = [record.scores[LOG_LIKELIHOOD] for record in records if LOG_LIKELIHOOD in record.scores]
    nats = -_ratio(known, (record.canvas for record in records))
    return exp(min(nats, 700)) if len(known) == len(records) else None


@_measure("recomputed", "positions computed, over the positions of as many forwards of the whole prompt and canvas")
def _recompute_share(records: Sequence[Record]) -> float:
    whole = [record.nfe * (record.prompt_tokens + record.canvas) for record in records]
    return _ratio((record.rows for record in records), whole)


_mean_per_sample("commits", "commits", "commits per sample, including those that did not stay", lambda one: one.commits)
_mean_per_sample(
    "revisions",
    "revisions",
    "commits per sample that did not stay",
    lambda one: sum(piece is not None for _, _, piece in one.revisions),
)
_mean_per_sample(
    "answer_tokens", "answer tokens", "per sample, with the first end-of-text token", lambda one: one.answer
)
_mean_per_sample(
    "tokens_after_end",
    "tokens after the end",
    "tokens committed after the first end-of-text token, per sample",
    lambda one: one.after_end,
)


def _add_order(name: str, title: str, about: str, correlation: Callable[..., float | None], padding: bool) -> None:
    """Register the mean correlation of positions and commit steps: 1 is left to right, -1 is right to left.

    `padding` includes the positions after the answer's end-of-text token.
    """

    def order(record: Record) -> float | None:
        steps = record.step_map if padding else record.step_map[: record.answer]
        known = [(place, step) for place, step in enumerate(steps) if step >= 0]
        return correlation(*zip(*known, strict=True)) if len(known) > 1 else None

    _measure(title, about, name=name)(lambda records: _mean(map(order, records)))


_add_order("kendall", "order (Kendall)", "tau-b of position and commit step inside answers", kendall, False)
_add_order("spearman", "order (Spearman)", "rho of position and commit step inside answers", spearman, False)
_add_order("kendall_padded", "order (Kendall, padded)", "tau-b over the whole canvas", kendall, True)
_add_order("spearman_padded", "order (Spearman, padded)", "rho over the whole canvas", spearman, True)


@_measure("peak memory, MiB", "largest value of any batch: of the GPU, or of the process on a CPU")
def _peak_memory(records: Sequence[Record]) -> float:
    return max(record.peak_memory for record in records) / 2**20


_mean_per_sample(
    "unfinished", "unfinished", "share of samples that max_steps or a guide ended", lambda one: not one.complete
)
