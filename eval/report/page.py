"""The report as one HTML file that loads nothing from the network."""

import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from dllm_sampler.errors import counted
from dllm_sampler.eval import passes
from dllm_sampler.eval.measures import MEASURES
from dllm_sampler.eval.records import Record, finite
from dllm_sampler.eval.report.data import RATES, Comparison, Run, say
from dllm_sampler.eval.report.figure import TITLES
from dllm_sampler.eval.report.headline import family_rows, sentences
from dllm_sampler.eval.report.published import section
from dllm_sampler.host.version import __version__

SHOWN = ("samples", "score", "score_low", "score_high", *(measure.name for measure in MEASURES))


def page(found: Comparison, title: str, replays: int) -> str:
    """Return the report as HTML. `replays` samples of each run can be watched, up to half of them wrong answers."""
    parts = {name: (files("dllm_sampler.eval.report") / name).read_text(encoding="utf-8") for name in _PARTS}
    script_data = json.dumps(_finite(data(found, replays)), separators=(",", ":"), allow_nan=False)
    filled = {
        "TITLE": html.escape(title),
        "STYLE": parts["page.css"],
        "SCRIPT": parts["page.js"],
        "HEADLINE": "".join(f"<li>{html.escape(line)}</li>" for line in sentences(found)),
        "PUBLISHED": section(found),
        "NOTES": "".join(f"<p>{html.escape(line)}</p>" for line in notes(found)),
        # no "<" at all: nothing in a sample can end the script element
        "DATA": script_data.replace("<", "\\u003c"),
    }
    # at once: what looks like a place in a title, a label or a sample is not filled
    return re.sub("@([A-Z]+)@", lambda place: filled[place[1]], parts["page.html"])


_PARTS = ("page.html", "page.css", "page.js")


def notes(found: Comparison) -> list[str]:
    """Return notes on the figures: missing samples, refused runs, methods without all tasks, and environments."""
    lines = []
    if found.missing:
        lines.append(
            f"Unfinished: {counted(found.missing, 'sample')} missing; the figures are those of the finished samples."
        )
    if found.unsaid:
        lines.append(found.unsaid)
    lines += [f"No figures: {label}: {reason}" for label, reason in found.refused]
    whole = set(found.figures["all tasks"])
    lines += [
        f"Not run on all tasks, so it is shown only with its own tasks: {method.label}."
        for method in found.methods
        if method.label not in whole
    ]
    lines += [
        f"{place['processor']} ({place['device']}), torch {place['torch']}, Python {place['python']}, dllm_sampler"
        f" {place['dllm_sampler']}, commit {place['commit'] or 'unknown'}, {place['platform']}."
        for place in found.environments
    ]
    return [*lines, f"Made by dllm-report {__version__}."]


def data(found: Comparison, replays: int) -> dict[str, Any]:
    """Return the data of the page's script."""
    index = {method.label: number for number, method in enumerate(found.methods)}
    ranges = [f"{name}_{end}" for name in found.passes for end in passes.BOUNDS]
    extra = [*found.passes, *ranges, *found.together]  # measures that not every run has
    views = {}
    for view, figures in found.figures.items():
        views[view] = {
            "tasks": found.views[view],
            "figures": {index[label]: _rounded(one, extra) for label, one in figures.items()},
            "front": {rate: sorted(index[label] for label in found.front(view, rate)) for rate in RATES},
            "oracle": found.oracle(view),
        }
    methods = [
        {
            "label": method.label,
            "family": method.family,
            "config": _config(next(iter(method.runs.values()))),
            "runs": {task: _run(run, replays) for task, run in method.runs.items()},
        }
        for method in found.methods
    ]
    return {
        "views": views,
        "methods": methods,
        "tasks": list(found.tasks),
        "reference": index[found.reference.label] if found.reference else None,
        "rates": {rate: TITLES[rate] for rate in RATES},
        "measures": [
            *(
                {"name": name, "title": passes.title(name), "about": passes.about(name), "range": True}
                for name in found.passes
            ),
            *({"name": name, "title": name.replace("_", " "), "about": "of all answers"} for name in found.together),
            *({"name": one.name, "title": one.title, "about": one.about} for one in MEASURES),
        ],
        "families": [
            {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
            for row in family_rows(found)
        ],
    }


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by null."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return finite(value) if isinstance(value, float) else value


def _rounded(figures: dict[str, float | None], extra: Sequence[str]) -> dict[str, float | None]:
    found = {name: figures.get(name) for name in (*SHOWN, *extra)}
    return {name: None if value is None else float(f"{value:.5g}") for name, value in found.items()}


def _config(run: Run) -> str:
    lines = []
    for key, value in run.config.items():
        if isinstance(value, dict):
            name = value.get("name") or run.about["choices"].get(key, "")
            lines.append(f"{key}={name}")
            lines += [f"{key}.{k}={say(v)}" for k, v in value.items() if k not in ("name", "_target_")]
        else:
            lines.append(f"{key}={say(value)}")
    return "\n".join(lines)


def _run(run: Run, replays: int) -> dict[str, Any]:
    score = run.about["score"]
    chosen = sorted(run.records, key=lambda record: (record.scores[score], record.index))
    # half of what is shown went wrong, if that many did
    wrong = [record for record in chosen if record.scores[score] < 1][: (replays + 1) // 2]
    right = [record for record in chosen if record.scores[score] >= 1][: replays - len(wrong)]
    shown = sorted([*wrong, *right], key=lambda record: record.index)
    return {"name": run.about["name"], "score": score, "replays": [_replay(record, score) for record in shown]}


def _replay(record: Record, score: str) -> dict[str, Any]:
    prompt = record.prompt if isinstance(record.prompt, str) else json.dumps(record.prompt, ensure_ascii=False)
    return {
        "index": record.index,
        "prompt": prompt,
        "text": record.text,
        "score": record.scores[score],
        "nfe": record.nfe,
        "oracle": record.oracle_nfe,
        "answer": record.answer,
        "pieces": record.pieces,
        "steps": record.step_map,
        "confidence": record.confidence,
        "revisions": record.revisions,
    }
