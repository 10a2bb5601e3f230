"""Functions that a user names: an installed module first, else one file of the working directory, and no other."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dllm_sampler import config
from dllm_sampler.host.functions import resolve_callable
from dllm_sampler.training.rewards import find
from tests.refusals import refused


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty one; what it has that is imported is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__spec__", "")):
            del sys.modules[name]


def test_a_file_and_a_package_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "own_metric.py").write_text("def one(): return 1\n")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").touch()
    (tmp_path / "own_package" / "inner.py").write_text("from own_package.other import two\n")
    (tmp_path / "own_package" / "other.py").write_text("def two(): return 2\n")
    path, finders = list(sys.path), list(sys.meta_path)
    assert resolve_callable("it", "own_metric:one")() == 1 == find("own_metric:one")(), "and a reward of dllm-train"
    assert resolve_callable("it", "own_package.inner:two")() == 2
    assert sys.path == path and sys.meta_path == finders


def test_installed_modules_come_first(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("def mine(): ...\n")  # a module of Python that nothing here has imported
    sys.modules.pop("colorsys", None)
    assert resolve_callable("it", "colorsys:rgb_to_hsv")(0, 0, 0) == (0, 0, 0)
    with refused("function-missing: 'colorsys', colorsys.py"):
        resolve_callable("it", "colorsys:mine")


def test_nothing_else_is_imported_from_there(tmp_path: Path) -> None:
    """Neither what the named module imports, nor what is imported later."""
    (tmp_path / "own_reward.py").write_text("import own_helper\n")
    (tmp_path / "own_helper.py").touch()
    path = list(sys.path)
    with refused("function-missing: 'own_helper', cannot import own_helper.py"):
        resolve_callable("it", "own_reward:one")
    assert "own_reward" not in sys.modules and sys.path == path
    with pytest.raises(ImportError):
        __import__("own_helper")


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "own_broken.py").write_text("def f(:\n")
    (tmp_path / "own_fine.py").write_text("x = 1\n")
    with refused("function-missing: own_fine.py:one, own_fine:one"):
        resolve_callable("it", "own_fine.py:one")
    for name, said in (
        ("own_gone:f", "function-missing: 'own_gone', own_gone.py"),
        ("own_broken:f", "function-missing"),
        ("own_fine:f", "function-missing: 'f'"),
        ("own_fine:x", "function-invalid: own_fine:x"),
    ):
        with refused(said):
            resolve_callable("it", name)


def test_a_plug_in_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "own_blocks.py").write_text(
        "from dataclasses import dataclass\n\nfrom dllm_sampler import Blocks\n\n"
        "@dataclass\nclass Mine(Blocks):\n    length: int = 3\n"
    )
    assert config.build("blocks", {"name": "mine", "_target_": "own_blocks.Mine", "length": 4}).length == 4
    with refused("function-missing: blocks=mine, _target_, own_gone.Mine"):
        config.build("blocks", {"name": "mine", "_target_": "own_gone.Mine"})
    with refused("target-invalid: blocks=mine, _target_"):
        config.build("blocks", {"name": "mine", "_target_": None, "length": 4})
