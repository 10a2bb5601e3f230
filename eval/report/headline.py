"""The headline of a report: a few sentences, computed."""

from collections.abc import Sequence

from dllm_sampler.eval.curves import adaptive_oracle, aup, parallelizability, pbx
from dllm_sampler.eval.report.data import Comparison, Figures, Method, value_of
from dllm_sampler.eval.statistics import Estimate, difference

LOSS = 0.01  # largest loss of score that counts as being as good
METHOD = "95 % intervals, Wilson's for right or wrong answers, else bootstrap"
LEVELS = (0.9, 0.8, 0.7)  # of PBx


def sentences(found: Comparison) -> list[str]:
    """Return sentences on the best trade-off, the cost of dependency between tokens, and the distance to the oracle."""
    return [line for line in (best(found), dependency(found), room(found)) if line]


def best(found: Comparison) -> str:
    """Return a sentence on the fastest method that is about as good as one token per step.

    It is compared with the best method if no run has one token per step.
    """
    whole = found.figures["all tasks"]
    if not whole:
        return "No method was run on all tasks; the tasks are shown one by one."
    top = max(whole, key=lambda label: value_of(whole[label], "score"))
    given = found.reference.label if found.reference else top
    against = "one token per step" if found.reference else f"the best method, {top}"
    plain = whole[given]
    if len(whole) == 1:
        return (
            f"{given} scores {_percent(plain)} at {_rate(plain)} tokens per forward (n = {_samples(plain)}; {METHOD})."
        )
    good = [label for label in whole if value_of(whole[label], "score") >= value_of(plain, "score") - LOSS]
    fast = max(good, key=lambda label: value_of(whole[label], "answer_tokens_per_forward"))
    quick = whole[fast]
    if value_of(quick, "answer_tokens_per_forward") <= value_of(plain, "answer_tokens_per_forward"):
        return (
            f"No method is faster than {given} and scores within one point of its {_percent(plain)}"
            f" (n = {_samples(plain)}; {METHOD})."
        )
    gap = difference(_score(quick), _score(plain))
    span, sure = f"the scores may differ by {100 * gap[1]:+.1f} to {100 * gap[2]:+.1f} points", gap[1] >= -LOSS
    least = value_of(quick, "answer_tokens_per_forward_low")
    others = [label for label in good if label not in (fast, given)]
    rivals = [label for label in others if value_of(whole[label], "answer_tokens_per_forward_high") >= least]
    return (
        f"{fast} {'is' if sure else 'was'} the fastest that {'scores' if sure else 'scored'} within one point of"
        f" {against}: {_percent(quick)} against {_percent(plain)}, with {compare_forwards(quick, plain)}"
        f" ({_rate(quick)} tokens per forward instead of {_rate(plain)}; n = {_each(quick, plain)}; {METHOD})."
        + ("" if sure else f" That is not enough to say that it is as good: {span}.")
        + (f" Its speed cannot be told from that of {_few(rivals)}." if rivals else "")
    )


def compare_forwards(fast: Figures, given: Figures) -> str:
    """Return a phrase that compares the forwards of two methods."""
    fewer = value_of(given, "nfe") / max(value_of(fast, "nfe"), 1e-9)
    if f"{fewer:.1f}" == "1.0":
        return "about as many forwards"
    return f"{fewer:.1f} times fewer forwards" if fewer > 1 else f"{1 / max(fewer, 1e-9):.1f} times as many forwards"


def dependency(found: Comparison) -> str | None:
    """Return a sentence on the score that parallel decoding costs, on tasks of high and of low token dependency.

    It is about the method that loses most from its slowest to its fastest setting. Returns None if no method ran on
    both at several settings.
    """
    low, high = (found.figures.get(f"{level} dependency", {}) for level in ("low", "high"))
    ends = []
    for methods in found.families.values():
        both = [method for method in methods if method.label in low and method.label in high]
        if len(both) > 1:
            both.sort(key=lambda method: value_of(high[method.label], "canvas_tokens_per_forward"))
            ends.append((both[0], both[-1]))
    if not ends:
        return None

    def loss(figures: dict[str, Figures], pair: tuple[Method, Method]) -> Estimate:
        return difference(_score(figures[pair[0].label]), _score(figures[pair[1].label]))

    slow, fast = max(ends, key=lambda pair: loss(high, pair)[0])
    more = difference(loss(high, (slow, fast)), loss(low, (slow, fast)))
    if more[0] <= 0:
        costs = "did not cost more"
    else:
        costs = "costs more" if more[1] > 0 else "cost more in these samples, which are too few to be sure,"
    return (
        f"Decoding in parallel {costs} where tokens have to agree with one another: from {slow.label} to {fast.label}"
        f" the score goes from {_percent(high[slow.label])} to {_percent(high[fast.label])} on tasks of high"
        f" dependency (n = {_each(high[slow.label], high[fast.label])}), and from {_percent(low[slow.label])} to"
        f" {_percent(low[fast.label])} on the others"
        f" (n = {_each(low[slow.label], low[fast.label])})."
    )


def room(found: Comparison) -> str | None:
    """Return a sentence on the distance of the best methods to the oracle, or None without an oracle."""
    oracle, whole = found.oracle("all tasks"), found.figures["all tasks"]
    if oracle is None or found.reference is None:
        return None
    one = whole[found.reference.label]
    rivals = [label for label in whole if value_of(whole[label], "score") >= value_of(one, "score") - LOSS]
    rate = max(value_of(whole[label], "answer_tokens_per_forward") for label in rivals)
    return (
        f"A scheduler with perfect knowledge of the answers of one token per step would need"
        f" {value_of(one, 'nfe') * value_of(one, 'oracle_share'):.1f} forwards for each"
        f" ({oracle[0]:.1f} tokens per forward). The fastest method within one point of their score reaches"
        f" {100 * rate / oracle[0]:.0f} % of this speed (n = {_samples(one)})."
    )


def family_rows(found: Comparison) -> list[dict[str, object]]:
    """Return one row per family: AUP, PBx on the grid and interpolated, parallelizability, the adaptive oracle."""
    whole = found.figures["all tasks"]
    top = max((value_of(figures, "score") for figures in whole.values()), default=0.0)
    rows: list[dict[str, object]] = []
    for name, methods in found.families.items():
        figures = [whole[method.label] for method in methods]
        points = [(value_of(one, "answer_tokens_per_forward"), value_of(one, "score")) for one in figures]
        canvas = [(value_of(one, "canvas_tokens_per_forward"), value_of(one, "score")) for one in figures]
        row: dict[str, object] = {"family": name, "settings": len(methods), "AUP": aup(points, top)}
        if all(one.get("protocol_tokens_per_forward") for one in figures):
            counted = [(value_of(one, "protocol_tokens_per_forward"), value_of(one, "score")) for one in figures]
            row["AUP by the protocol's TPF"] = aup(counted, top)
        for level in LEVELS:
            row[f"PB{100 * level:.0f}"] = pbx(canvas, level, interpolate=False)
            row[f"PB{100 * level:.0f}, interpolated"] = pbx(canvas, level, interpolate=True)
        row["parallelizability"] = parallelizability(dict(canvas))
        runs = [
            [
                (record.nfe, record.scores[run.about["score"]])
                for task in found.tasks
                for run in [method.runs[task]]
                for record in run.records
            ]
            for method in methods
        ]
        if len(runs[0]) > 0 and len({len(run) for run in runs}) == 1:
            forwards, score = adaptive_oracle(runs)
            row["best setting per sample: forwards"] = forwards
            row["best setting per sample: score"] = 100 * score
        rows.append(row)
    return rows


def interval(figures: Figures) -> str:
    """Return the 95 % interval of the score, in %."""
    return f"[{100 * value_of(figures, 'score_low'):.1f}, {100 * value_of(figures, 'score_high'):.1f}]"


def _score(figures: Figures) -> Estimate:
    return value_of(figures, "score"), value_of(figures, "score_low"), value_of(figures, "score_high")


def _percent(figures: Figures) -> str:
    return f"{100 * value_of(figures, 'score'):.1f} % {interval(figures)}"


def _rate(figures: Figures) -> str:
    return f"{value_of(figures, 'answer_tokens_per_forward'):.2f}"


def _samples(figures: Figures) -> str:
    return f"{value_of(figures, 'samples'):.0f}"


def _each(one: Figures, other: Figures) -> str:
    """Return the sample counts of two methods as text: `100 each` if they are equal, else `100 and 90`."""
    counts = _samples(one), _samples(other)
    return f"{counts[0]} each" if counts[0] == counts[1] else " and ".join(counts)


def _few(labels: Sequence[str]) -> str:
    return " and ".join(labels) if len(labels) < 3 else f"{len(labels)} others"
