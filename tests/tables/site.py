"""The hook of mkdocs.yml: pages of the site that are made from docstrings, YAML files and help pages.

README.md and CONTRIBUTING.md become pages, too. Pages about errors, files and credits get the texts that are written
beside the code. Files that pages link to are copied to `source/`, unless a page has their text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from importlib import import_module
from inspect import getdoc
from io import StringIO
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import dllm_sampler
from dllm_sampler import config as plugins
from dllm_sampler import published
from dllm_sampler.cli.help import GROUPS
from dllm_sampler.core import protocols
from dllm_sampler.eval.measures import MEASURES
from tests.tables import credits

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"README.md": "start.md", "CONTRIBUTING.md": "contributing.md"}  # outside docs/
COMMANDS = {
    "dllm-sample": "dllm_sampler.cli.main",
    "dllm-eval": "dllm_sampler.eval.command",
    "dllm-report": "dllm_sampler.eval.report.command",
    "dllm-tune": "dllm_sampler.eval.tuning",
    "dllm-train": "dllm_sampler.training.cli",
}
TITLES = {**GROUPS, "task": "what is asked, and how it is graded", "train": "what a model learns, and how"}

# the YAML above has the fields
OPTIONS = (
    "{members: false, inherited_members: false, show_signature: false, separate_signature: false, heading_level: 3}"
)

HARNESS = "dllm_sampler.eval.lm_eval.settings.Settings"
FILES = {  # whose docstrings describe the files that commands read and write
    "dllm_sampler.cli.inputs.read": "Prompts",
    "dllm_sampler.cli.output.Records": "Answers of dllm-sample",
    "dllm_sampler.eval.folders.RunFolder": "Directory of a run",
    "dllm_sampler.eval.checked.About": "run.json",
    "dllm_sampler.eval.records.Record": "samples.jsonl",
    "dllm_sampler.eval.lm_eval.counters.Counter": "Results of lm-evaluation-harness",
    "dllm_sampler.eval.tuning.Tuner": "study.db",
    "dllm_sampler.models.loading.find": "Checkpoints",
    "dllm_sampler.models.filter.load": "filter.safetensors",
    "dllm_sampler.training.filter.FilterTrainer.command": "filter.json",
}
PROTOCOL = "dllm_sampler.eval.protocols.spec.Cell"
DESCRIBED = {  # at the ends of pages
    "formats.md": FILES,
    "errors.md": {"dllm_sampler.errors": "Codes"},
    "protocols.md": {PROTOCOL: "Fields of a protocol"},
}
TEXT = "members: false, show_root_heading: false, show_root_toc_entry: false, show_docstring_raises: false"


def source(name: str) -> str:
    """Return the file that has a class or function, by its dotted name."""
    module = re.sub(r"\.[A-Z].*|\.\w+$", "", name)
    return module.removeprefix("dllm_sampler." * module.startswith("dllm_sampler.eval")).replace(".", "/") + ".py"


HOMES = {  # places of the site that have the text of a file or folder outside docs/
    **{source(name): f"formats.md#{slugify(title, '-')}" for name, title in FILES.items()},
    **{f"conf/{group}": f"reference/{group}.md" for group in TITLES},
    "dllm_sampler/published": "reference/published.md",
    "dllm_sampler/result.py": "reference/python.md#dllm_sampler.Trace",
    "dllm_sampler/errors.py": "errors.md#codes",
    "eval/tasks/jsonl.py": "reference/task.md#jsonl",
    "eval/lm_eval/settings.py": f"reference/commands.md#{HARNESS}",
    "eval/protocols/spec.py": "protocols.md#fields-of-a-protocol",
    "eval/measures.py": "reference/measures.md",
    "tests/tables/papers.csv": "credits.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, the two pages outside docs/, and the source files that pages link to."""
    pages = {target: (ROOT / name).read_text(encoding="utf-8") for name, target in PAGES.items()}
    made = pages | {f"reference/{name}.md": text for name, text in reference()} | {"site.css": STYLE}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    written = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    for name in sorted({path for text in [*written, *pages.values()] for path in sources(text)}):
        files.append(File.generated(config, f"source/{name}.txt", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return a page with its generated text. Links to files outside docs/ lead to pages and files of the site."""
    name = page.file.src_uri
    top = name in PAGES.values()
    if name == "credits.md":
        markdown = credits.document(markdown)
    described = (
        f"## {title}\n\n::: {one}\n    options: {{{TEXT}, show_docstring_parameters: {one == PROTOCOL}}}"
        for one, title in DESCRIBED.get(name, {}).items()
    )
    markdown = "\n\n".join([markdown, *described])
    return re.sub(r"(?<=\]\()(?!https?:)[^)#\s]+", lambda link: moved(link[0], top), markdown)


def moved(link: str, top: bool) -> str:
    """Return where a link leads on the site.

    Args:
        link: a path without its anchor.
        top: it is relative to the top folder, not to docs/.
    """
    if top and link.startswith("docs/"):
        return link.removeprefix("docs/")
    if not top and not link.startswith("../"):
        return link
    path = link.removeprefix("../")
    return PAGES.get(path) or HOMES.get(path) or f"source/{path}.txt"


def sources(text: str) -> Iterator[str]:
    """Yield the files outside docs/ to which a page links, relative to the top folder."""
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        path = link.removeprefix("../")
        if path not in PAGES and path not in HOMES and not path.startswith("docs/") and (ROOT / path).is_file():
            yield path


def reference() -> Iterator[tuple[str, str]]:
    """Yield name and text of each generated page."""
    public = [f"::: dllm_sampler.{name}" for name in dllm_sampler.__all__ if not name.startswith("__")]
    about = "Names of the package `dllm_sampler`. Examples begin with `from dllm_sampler import *`."
    letters = next(part for part in (getdoc(protocols) or "").split("\n\n") if part.startswith("Letters"))
    yield "python", "\n\n".join(["# Python", about, letters, *public])
    harness = "## python -m dllm_sampler.eval.lm_eval", f"::: {HARNESS}\n    options: {OPTIONS}"
    yield "commands", "\n\n".join(["# Commands", *map(help_page, COMMANDS), *harness])
    lines = [f"| `{one.name}` | {one.title} | {one.about} |" for one in MEASURES]
    yield "measures", "\n".join(["# Measures\n", "| name | in tables | |", "|---|---|---|", *lines])
    quirks = [f"::: dllm_sampler.published.{name}\n    options: {OPTIONS}" for name in published.__all__]
    yield "published", "\n\n".join(["# Published code, to the letter", getdoc(published) or "", *quirks])
    for group, title in TITLES.items():
        yield group, "\n\n".join([f"# `{group}=`", f"{title[0].upper()}{title[1:]}.", *entries(group)])


def help_page(command: str) -> str:
    """Return a section with the help page of a command."""
    said = StringIO()
    with redirect_stdout(said), suppress(SystemExit):  # argparse ends the process
        import_module(COMMANDS[command]).main(["--help"])
    return f"## {command}\n\n```text\n{said.getvalue().strip()}\n```"


def entries(group: str) -> Iterator[str]:
    """Yield the sections of a group: each choice with its sentence, its YAML, and the docstring of its class."""
    if group == "model":
        yield "::: dllm_sampler.config.ModelSettings"
    for name in plugins.names(group):
        text = (ROOT / "conf" / group / f"{name}.yaml").read_text(encoding="utf-8")
        settings = re.sub(r"\A(#.*\n|\s)+|^_target_.*\n", "", text, flags=re.MULTILINE).strip()
        yield f"## {name}"
        yield plugins.comment(text)
        if settings:
            yield f"```yaml\n{settings}\n```"
        if target := re.search(r"^_target_: *(\S+)", text, re.MULTILINE):
            yield f"::: {target[1]}\n    options: {OPTIONS}"
        if target and group == "task":
            module, _, cls = target[1].rpartition(".")
            yield f"Grades of an answer: {getdoc(getattr(import_module(module), cls).grade)}"


STYLE = """\
.wy-nav-content { max-width: 1100px; }
.wy-table-responsive table td, .wy-table-responsive table th { white-space: normal; }
.doc-children { margin-left: 1.5em; }
.highlight pre, .highlight code { border: 0; padding: 0; }
"""
