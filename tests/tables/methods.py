"""The tables of methods in docs/schedulers.md, made from comments of the YAML files in conf/.

`python -m tests.tables.methods [--check]`. The first comment of a YAML describes the plug-in and names its paper in
parentheses. `# Paper:` replaces that paper. `# Checked by:` is traces or spec. `# Note:` says what it needs or costs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dllm_sampler import config
from tests.tables import markdown

COMMAND = "python -m tests.tables.methods"
ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "schedulers.md"
SPEC = "spec"
SECTIONS = {"methods": ("scheduler",), "other methods": ("blocks", "stop")}


def document(text: str) -> str:
    """Return the text of docs/schedulers.md with its tables made anew."""
    for section, groups in SECTIONS.items():
        head = "`scheduler=`" if groups == ("scheduler",) else "plug-in"
        found = [cells for group in groups for cells in rows(group)]
        made = markdown.table((head, "does"), [(label, does) for label, _, does in found])
        if untraced := ", ".join(label for label, checked, _ in found if checked == SPEC):
            made += f"\n\nWritten from the paper, whose invariants are tests: {untraced}."
        text = markdown.fill(text, section, made)
    return text


def rows(group: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each method of a group, the kind of check, and what it does, with its papers and needs."""
    for name in config.names(group):
        text = (ROOT / "conf" / group / f"{name}.yaml").read_text(encoding="utf-8")
        marked = dict(re.findall(r"^# (Paper|Checked by|Note): (.+)", text, re.MULTILINE))
        does, paper = described(config.entry(group, name).about)
        label = f"`{name}`" if group == "scheduler" else f"`{group}={name}`"
        paper = linked(marked.get("Paper", paper).replace("arXiv ", ""))
        parts = (does + (f" ({paper})" if paper else ""), marked.get("Note"))
        yield label, marked.get("Checked by", ""), "; ".join(filter(None, parts))


def described(about: str) -> tuple[str, str]:
    """Return a description without its paper and its period, and the paper."""
    parts = re.fullmatch(r"(.*?)(?: \(([^()]+)\)([^()]*))?", about.removesuffix("."))
    assert parts is not None
    before, paper, after = parts.groups("")
    return before + after, paper.replace(", arXiv", "")


def linked(papers: str) -> str:
    """Return the names of papers, each a link to the arXiv id after it."""
    return re.sub(r"([^,\s][^,]*) (\d{4}\.\d{5})", r"[\1](https://arxiv.org/abs/\2)", papers)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Write the tables of methods in docs/schedulers.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if the tables are stale")
    check = parser.parse_args(arguments).check
    text = markdown.read(DOCS, *SECTIONS)
    if text == (made := document(text)):
        return 0
    if check:
        print(f"{DOCS} is older than the comments in conf/. Run {COMMAND}")
    else:
        DOCS.write_text(made, encoding="utf-8")
    return int(check)


if __name__ == "__main__":
    sys.exit(main())
