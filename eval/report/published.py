"""Published figures beside those of runs under a published protocol."""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from dllm_sampler.eval.protocols import published, spec
from dllm_sampler.eval.protocols.published import DIFFERS, QUESTIONS, Figure, z_score
from dllm_sampler.eval.protocols.spec import Cell
from dllm_sampler.eval.report.data import Comparison, Run
from dllm_sampler.eval.statistics import interval

# Beginnings of methods in the table, and the scheduler of each.
SCHEDULERS = {
    "one per step": "fixed", "entropy, one per step": "fixed", "fixed": "fixed", "threshold": "threshold",
    "entropy threshold": "entropy", "entropy multi-block": "entropy", "hierarchical": "hierarchical",
}  # fmt: skip
BLOCKS = {"adablock": "adablock", "dsb": "sliding"}  # rows of other blocks do not name them
SPEEDS = {
    "forwards": "protocol_steps", "TPF": "protocol_tokens_per_forward", "tokens/s": "protocol_tokens_per_second",
}  # fmt: skip
METRICS = ("flexible-extract", "strict-match", "math_verify", "exact_match")
HEAD = (
    "configuration", "task", "ours, %", "published, %", "z", "speed: published (ours)", "method of the row", "settings",
    "metric", "source", "note",
)  # fmt: skip
USUAL = (
    "What usually differs: the chat template, how the answer is extracted, which metric of MATH it is, the examples"
    " (they depend on the number of GPUs), the BOS token, and the length. Compare `metric` and `note`."
)


@dataclass(frozen=True)
class Beside:
    """A figure of ours beside a published one.

    label, task: of the run; ours: the mean of the metric and its 95 % interval, from 0 to 1; asked: its questions
    speeds: our forwards per question, tokens per forward and tokens per second, as the protocol counts them
    """

    label: str
    task: str
    ours: tuple[float, float, float]
    asked: int
    figure: Figure
    z: float
    speeds: Mapping[str, float | None]

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of a table with `HEAD`."""
        mean, low, high = (100 * one for one in self.ours)
        return (
            self.label,
            self.task,
            f"{mean:.1f} [{low:.1f}, {high:.1f}] (n = {self.asked})",
            f"{self.figure.accuracy:g}",
            f"{self.z:+.1f}" + "!" * (abs(self.z) > DIFFERS),
            self.speed,
            self.figure.decoding,
            self.figure.settings,
            self.figure.metric,
            self.figure.source,
            self.figure.note,
        )

    @property
    def speed(self) -> str:
        """Forwards, tokens per forward and tokens per second of the row, each with ours in brackets."""
        row = {"forwards": self.figure.nfe, "TPF": self.figure.tpf, "tokens/s": self.figure.tps}
        said = [f"{value:g} {name} ({_number(self.speeds[name])})" for name, value in row.items() if value is not None]
        return ", ".join(said) + (f" on {self.figure.gpu}" if self.figure.gpu else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def beside(found: Comparison) -> list[Beside]:
    """Return a row for each published figure with the model, task, lengths and method of a run."""
    made = []
    for method in found.methods:
        for task, run in method.runs.items():
            cell = cell_of(run)
            rows = [] if cell is None else [row for row in related(run, cell) if _has_method(row, run)]
            for row in rows:
                assert cell is not None and row.accuracy is not None
                scores = _scores(run, row, cell)
                ours = fmean(scores), *interval(scores)
                z = z_score(ours[0], len(scores), row.accuracy / 100, QUESTIONS[cell.kind])
                speeds = {name: run.figures.get(measure) for name, measure in SPEEDS.items()}
                made.append(Beside(method.label, task, ours, len(scores), row, z, speeds))
    return made


def warnings(rows: Sequence[Beside]) -> list[str]:
    """Return a list with a sentence on figures that differ by more than `DIFFERS`. It is empty if none do."""
    far = [row for row in rows if abs(row.z) > DIFFERS]
    if not far:
        return []
    return [f"{len(far)} of {len(rows)} published figures differ by more than {DIFFERS:g} standard errors. {USUAL}"]


def section(found: Comparison) -> str:
    """Return the part of the page with published figures. It is empty if no run has any."""
    rows = beside(found)
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(one)}</th>" for one in HEAD)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(one)}</td>" for one in row.cells) + "</tr>" for row in rows)
    hints = [
        f"z: the difference in standard errors of a difference. !: above {DIFFERS:g} or below -{DIFFERS:g}.",
        *warnings(rows),
    ]
    told = "".join(f'<p class="hint">{html.escape(one)}</p>' for one in hints)
    table = (
        f'<div class="scroll"><table id="published"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
    return f"<section><h2>Published figures</h2>{table}{told}</section>"


def points(found: Comparison, tasks: Sequence[str], rate: str) -> list[tuple[float, float, str]]:
    """Return published rates and scores in % with their names, of all methods with the model and task of some run."""
    made: dict[tuple[float, float, str], None] = {}
    for run in (method.runs[task] for method in found.methods for task in tasks if task in method.runs):
        cell = cell_of(run)
        for row in [] if cell is None else related(run, cell):
            x = row.tps if rate == "tokens_per_second" else row.tokens_per_forward
            if x and row.accuracy is not None:
                cache = f", {row.cache}" if row.cache not in ("", "none") else ""
                made[x, row.accuracy, f"{row.method}{cache} ({row.source.partition(' ')[0]})"] = None
    return list(made)


def cell_of(run: Run) -> Cell | None:
    """Return the cell of a run under a protocol, or None for other runs."""
    task = run.about["config"]["task"]
    if not run.records or task.get("protocol") not in spec.names():  # the table has no rows of a user's protocol
        return None
    protocol = spec.load(task["protocol"])
    return protocol.cells.get((protocol.variant(None, task.get("variant")), task["task"]))


def related(run: Run, cell: Cell) -> list[Figure]:
    """Return published figures with an accuracy for a run's model, task, examples and lengths, by any method."""
    config = run.about["config"]
    length = int(config["task"].get("canvas") or cell.length)
    lengths = {"gen_length": str(length), "block_length": _block(run, length)}
    model = Path(str(config["model"].get("path"))).name
    known = _tasks(cell)
    return [
        row
        for row in published.figures()
        if row.accuracy is not None
        and row.model == model
        and row.task in known
        and row.shots in ("", str(cell.shots))
        and row.gen_length in ("", lengths["gen_length"])
        and ("full" if row.block_length == row.gen_length else row.block_length) in ("", lengths["block_length"])
        and (cell.opencompass is not None) == row.settings.startswith("OpenCompass")
    ]


def _tasks(cell: Cell) -> set[str]:
    """Return the names that a cell's task has in the table."""
    stem = Path(cell.lm_eval or cell.kind).stem.replace("-", "_")
    name = cell.kind if cell.kind == "minerva_math" else stem
    return {f"{name}_instruct"} if cell.prefix is not None else {name, *(["math"] if cell.opencompass else [])}


def _block(run: Run, length: int) -> str:
    if run.about["choices"]["blocks"] == "full":
        return "full"
    config = run.about["config"]
    blocks: Any = config.get("blocks")
    found = [blocks.get("length"), blocks.get("masks")] if isinstance(blocks, Mapping) else []
    given = next((one for one in (config.get("block_length"), *found) if one), None)
    return "full" if given in (None, length) else str(given)


def _has_method(row: Figure, run: Run) -> bool:
    """Return True if a row has the scheduler, its threshold, the blocks, and the cache of a run.

    A value that the row does not state matches.
    """
    choices, config = run.about["choices"], run.about["config"]
    scheduler: Mapping[str, Any] = config["scheduler"]
    plain = re.sub(r" \(.*\)", "", row.method)
    name = SCHEDULERS.get(plain, plain.partition(",")[0])
    ours = {"budgeted": "threshold"}.get(choices["scheduler"], choices["scheduler"])  # Fast-dLLM's threshold for Dream
    if name != ours or BLOCKS.get(row.cache, row.cache) not in ("", choices["cache"]):
        return False
    said = next((kind for theirs, kind in BLOCKS.items() if f"blocks {theirs}" in row.settings), None)
    if said != next((kind for kind in BLOCKS.values() if kind == choices["blocks"]), None):
        return False
    if said == "sliding" and ("greedy" in row.settings) != (config["blocks"].get("max_width") is None):
        return False
    if choices["scheduler"] == "entropy" and ("multi-block" in plain) != (choices["blocks"] == "multi_block"):
        return False
    if choices["scheduler"] == "fixed":
        return (scheduler.get("steps") or int(config["task"]["canvas"])) == (row.nfe or int(config["task"]["canvas"]))
    given = re.search(r"\b(threshold|entropy) (\d+(\.\d+)?)", row.settings)
    return given is None or scheduler.get(given[1]) in (None, float(given[2]))


def _scores(run: Run, row: Figure, cell: Cell) -> list[float]:
    """Return our grades by the row's metric if it names one that we have, else by the protocol's."""
    grades = run.records[0].scores
    said = next((one for one in METRICS if row.metric.startswith(one)), None)
    name = next((one for one in grades if said is not None and said in one.split(",") and "today" not in one), None)
    return [record.scores[name or cell.published] for record in run.records]
