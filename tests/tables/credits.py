"""The table of the site's page of credits, made from papers that comments in conf/ name and from `papers.csv`."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from dllm_sampler import config
from dllm_sampler.errors import UserError
from tests.tables import markdown
from tests.tables.methods import ROOT

PAPERS = Path(__file__).with_name("papers.csv")
GROUPS = (*config.GROUPS[1:], "train", "task")  # models have pages of their own
HEAD = ("paper", "authors", "code", "here", "what the code does, or what differs here")


def users() -> dict[str, list[str]]:
    """Return the plug-ins whose comments name each paper, by the paper's arXiv id."""
    found: dict[str, list[str]] = {}
    for group in GROUPS:
        for name in config.names(group):
            comments = re.findall(r"^#.*", (ROOT / "conf" / group / f"{name}.yaml").read_text(), re.MULTILINE)
            for paper in dict.fromkeys(re.findall(r"\b\d{4}\.\d{5}\b", "\n".join(comments))):
                found.setdefault(paper, []).append(f"{group}={name}")
    return found


def papers() -> dict[str, dict[str, str]]:
    """Return the rows of `papers.csv` by arXiv id."""
    with PAPERS.open(encoding="utf-8", newline="") as file:
        return {row["paper"]: row for row in csv.DictReader(file)}


def document(text: str) -> str:
    """Return the text of docs/credits.md with its table."""
    named, known = users(), papers()
    if missing := sorted(named.keys() - known.keys()):
        raise UserError("made-up", f"{PAPERS.name} has no row for {', '.join(missing)}. Add the authors and the code.")
    rows = [cells(known[paper], plugins) for paper, plugins in sorted(named.items())]
    return markdown.fill(text, "credits", markdown.table(HEAD, rows))


def cells(row: dict[str, str], plugins: list[str]) -> list[str]:
    """Return the cells of a paper and of the plug-ins that name it."""
    place, _, commit = row["code"].partition(" ")
    code = f"[{place}](https://github.com/{place}) {commit}".strip() if "/" in place else row["code"]
    tasks = [one for one in plugins if one.startswith("task=")]
    shown = [f"`{one}`" for one in plugins if one not in tasks]
    if tasks:
        shown.append(f"`{tasks[0]}`" if len(tasks) == 1 else f"{len(tasks)} [tasks](tasks.md)")
    name = f"[{row['name']}](https://arxiv.org/abs/{row['paper']})"
    return [name, row["authors"], code, ", ".join(shown), row["differs"]]
