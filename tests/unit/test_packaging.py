"""The package holds what it should, once; the documents say what the files say."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import dllm_sampler
from tests.sampling import each

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@each("name", ["conf", "eval"])
def test_symlinks(name: str) -> None:
    link = ROOT / "dllm_sampler" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..", name), "relative, so that a clone anywhere works"
    assert (link / "__init__.py").is_file()


@pytest.mark.slow
def test_wheel(tmp_path: Path) -> None:
    """Built in place with the installed setuptools: each file once, configuration and model inside."""
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    source = tmp_path / "source"
    source.mkdir()
    for name in ("dllm_sampler", "conf", "eval"):  # the build leaves folders behind: give it its own view of the tree
        _copy(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"dllm_sampler-{dllm_sampler.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    assert {name.partition("/")[0] for name in names} == {
        "dllm_sampler",
        wheel.name.rpartition("-py3")[0] + ".dist-info",
    }
    tracked = {f"dllm_sampler/conf/{file.relative_to(ROOT / 'conf')}" for file in (ROOT / "conf").rglob("*.yaml")}
    mini = ROOT / "dllm_sampler" / "models" / "mini"
    tracked |= {
        str(file.relative_to(ROOT)) for file in mini.glob("*") if file.suffix in (".json", ".safetensors", ".md")
    }
    tracked |= {f"dllm_sampler/eval/report/page.{kind}" for kind in ("html", "css", "js")}
    tracked.add("dllm_sampler/check/filter.safetensors")
    examples = ROOT / "dllm_sampler" / "guides" / "grammar" / "examples"
    tracked |= {str(file.relative_to(ROOT)) for file in examples.glob("*.grammar")}
    assert tracked | {"dllm_sampler/py.typed", "dllm_sampler/eval/__init__.py"} <= set(names)


def _copy(source: Path, target: Path) -> None:
    if source.is_symlink():
        target.symlink_to(source.readlink())
    elif source.is_dir():
        target.mkdir()
        for inner in source.iterdir():
            if inner.name != "__pycache__":
                _copy(inner, target / inner.name)
    else:
        target.symlink_to(source)


def test_every_dependency_has_a_tested_version() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    known = {re.sub(r"[-_.]+", "-", name).lower() for name in pinned}
    extras = [
        one for extra in PROJECT["project"]["optional-dependencies"].values() for one in extra if "[docs]" not in one
    ]
    for requirement in [*PROJECT["project"]["dependencies"], *extras]:
        name = re.split(r"[\[<>=;]", requirement)[0].strip()
        assert name in known, f"{name} is not in constraints.txt"
    assert pinned["torch"] == "2.13.0"


def test_install_hints_name_extras() -> None:
    """Each message that says how to install what is missing names an extra of this package."""
    sources = [path for folder in ("dllm_sampler", "eval") for path in (ROOT / folder).rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in sources]
    hints = [extra for text in texts for extra in re.findall(r"\binstalling\(['\"](\w+)['\"]\)", text)]
    assert len(hints) >= 8
    assert {*hints} <= {*PROJECT["project"]["optional-dependencies"]}
    assert not [text for text in texts if re.search(r"pip install '?dllm.sampler", text)]  # it is on no index


def test_readme() -> None:
    """Two commands for all set-up, and no link into the void."""
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"^pip install .*", readme, re.MULTILINE) == [
        "pip install -c constraints.txt -e '.[constraints]'"
        ' && dllm-sample "shuffle: Ada, Ben, Cal, Dan, Eve" max_new_tokens=16 stream=true',
        "pip install -c constraints.txt -e '.[test]' && pytest",
    ]
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", readme):
        assert (ROOT / target).exists(), f"README.md links to {target}, which is not there"


def test_links_between_documents() -> None:
    """Each link leads to a file, and to a heading of it where it names one."""
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), f"{page} links to {link}, which is not there"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
                known = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
                assert anchor in known, f"{page} links to {link}, and {target.name} has no such heading"


def test_scripts() -> None:
    for target in PROJECT["project"]["scripts"].values():
        module, _, function = target.partition(":")
        path = ROOT / Path(*module.split("."))
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert re.search(rf"\b{function}\b", source.read_text())
