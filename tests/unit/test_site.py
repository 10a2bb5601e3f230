"""The documentation as a site: its navigation names every page, and it is built without a warning."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import fields
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

import dllm_sampler
from dllm_sampler import Trace, config, published
from dllm_sampler.cli.output import Records
from dllm_sampler.eval.checked import About
from dllm_sampler.eval.measures import MEASURES
from dllm_sampler.eval.records import Record

ROOT = Path(__file__).parents[2]


def pages(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages(part)]  # pyright: ignore


def test_the_navigation_names_every_page() -> None:
    named = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    generated = [page for page in named if page.startswith("reference/")]
    written = {str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md")}
    assert len(named) == len(set(named)) and len(generated) >= 11
    assert set(named) - set(generated) == {*written, "start.md", "contributing.md"}


def test_docstrings_describe_the_fields_of_files() -> None:
    lists = {"sample": Records, "run": About}
    described = {name: set(re.findall(r"`(\w+)`(?=[,:])", cls.__doc__ or "")) for name, cls in lists.items()}
    written = set(re.findall(r'"(\w+)": ', inspect.getsource(Records.write)))
    assert written <= described["sample"] and {"gaps", "finish_reason", "valid", "particles"} <= described["sample"]
    assert {*About.__annotations__, "schema"} <= described["run"]
    for cls in (Record, Trace):
        attributes = re.findall(r"^ {8}(\w+): ", cls.__doc__ or "", re.MULTILINE)
        assert attributes == [field.name for field in fields(cls)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def text(site: Path, page: str) -> str:
    return (site / page / "index.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_reference_has_every_plug_in(site: Path) -> None:
    for group in (*config.GROUPS, "task", "train", "experiment"):
        page = text(site, f"reference/{group}")
        for name in config.names(group):
            assert f">{name}<a class" in page, f"{group}={name}"
            target = config.entry(group, name).settings.get("_target_", "") if group != "train" else ""
            assert f'id="{target}"' in page or not target, f"{group}={name}: no docstring"
    quirks = text(site, "reference/published")
    assert not [name for name in published.__all__ if f'.{name}"' not in quirks]
    python = text(site, "reference/python")
    homes = [name for name in dllm_sampler.__all__ if not name.startswith("__")]
    assert not [name for name in homes if not re.search(rf'id="dllm_sampler\.[\w.]*{name}"', python)]
    measures = text(site, "reference/measures")
    assert not [one.name for one in MEASURES if f"<code>{one.name}</code>" not in measures]
    from tests.tables.site import FILES  # needs mkdocs

    files = text(site, "formats")
    assert not [title for title in FILES.values() if f">{title}<a class" not in files]
    assert "prompt-empty" in text(site, "errors") and ">LLaDA</a>" in text(site, "credits")
    commands = text(site, "reference/commands")
    for command in ("dllm-sample", "dllm-eval", "dllm-report", "dllm-tune", "dllm-train"):
        assert f">{command}<a class" in commands
    assert "max_new_tokens=128" in commands and "--figure" in commands


@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    """MkDocs checks links between pages. This one sees what it writes: links to source files and pictures, too."""
    seen = 0
    for page in site.rglob("*.html"):
        if page.name != "index.html":
            continue
        html = page.read_text(encoding="utf-8")
        for link in re.findall(r'(?:href|src)="([^"#]+)', html):
            path = unquote(unescape(link)).partition("?")[0]
            if re.match(r"[a-z]+:|//|/", path):
                continue
            target = page.parent / path
            assert target.is_file() or (target / "index.html").is_file(), f"{page}: {link}"
            seen += 1
    assert seen > 1000
    assert (site / "source" / "dllm_sampler" / "cache" / "d2.py.txt").is_file()
