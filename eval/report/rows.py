"""Runs as rows of a table: for CSV files and data frames."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from dllm_sampler.eval.measures import MEASURES
from dllm_sampler.eval.report.data import GROUPS, Run, choice, leaves, named

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # beginnings of texts that spreadsheets take for a formula
FIGURES = ("score", "score_low", "score_high", "answer_tokens_per_forward_low", "answer_tokens_per_forward_high")


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row for each run: names, figures, plug-ins, settings. All have the same columns in the same order.

    The columns are `configuration` and `task` (as in the report), `dependency`, `samples` and `missing` (the numbers of
    finished and of missing samples), `samples_per_prompt`, the measures, the mean of each other grade of the task
    (`grade.error_missing`), the name of each group (`scheduler`, `cache` ...), each setting by the name it has on the
    command line (`scheduler.threshold`), `folder`, and `refused` (the reason that it cannot run).
    A value that a run does not have is None.
    """
    shown = (*FIGURES, *(measure.name for measure in MEASURES))
    found = []
    for run, label in zip(runs, named(runs), strict=True):
        figures = run.figures if run.is_measured else {}
        found.append(
            {"configuration": label.method, "task": label.task, "dependency": run.about["dependency"]}
            | {"samples": run.samples, "missing": run.missing, "samples_per_prompt": run.samples_per_prompt}
            | {name: figures.get(name) for name in dict.fromkeys((*shown, *run.passes, *run.together))}
            | {f"grade.{name}": value for name, value in run.grades.items()}
            | {group: choice(run, group) for group in GROUPS}
            | _settings(run.about["config"])
            | {"folder": str(run.folder / run.about["name"]), "refused": run.about["refused"]}
        )
    columns = list(dict.fromkeys(name for row in found for name in row))
    last = ("folder", "refused")  # after the settings of all runs
    columns = [name for name in columns if name not in last] + [*last] * bool(found)
    return [{name: row.get(name) for name in columns} for row in found]


def text(table: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as the text of a CSV file: with a header, empty cells for None, and JSON for lists.

    A text that a spreadsheet would run as a formula begins with a quotation mark.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for line in (list(table[0]), *(row.values() for row in table)):
        writer.writerow(map(_cell, line))
    return out.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return json.dumps(value)
    if not isinstance(value, str):
        return value
    shown = value.replace("\r\n", "\n").replace("\r", "\n")  # csv does not quote a lone \r, which ends a line
    return f"'{shown}" if value.startswith(FORMULA) and not _is_number(value) else shown


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return every setting of a run by the name it has on the command line."""
    found: dict[str, Any] = {}
    for group, value in config.items():
        if isinstance(value, Mapping):
            found |= {f"{group}.{name}": leaf for name, leaf in leaves(value).items()}
            found |= {f"{group}.{name}": value[name] for name in ("path", "content") if name in value}
        elif group == "guide":
            found |= {f"guide.{one['name']}.{name}": leaf for one in value for name, leaf in leaves(one).items()}
        elif group != "samples":  # `samples` is how many there are. These are `samples_per_prompt`
            found[group] = value
    return found
