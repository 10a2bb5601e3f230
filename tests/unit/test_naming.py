"""Messages say what the user typed: names of plug-ins, not of their classes, and fields by their whole name."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

import dllm_sampler
from dllm_sampler import UserError, config
from dllm_sampler.cache.store_pass import StorePass
from dllm_sampler.core.naming import KINDS, named
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.threshold import Threshold
from tests import toys
from tests.refusals import refused
from tests.sampling import each


def plug_ins(kind: str) -> list[str]:
    """Return the names of the plug-ins of a kind that are classes."""
    return [name for name in config.names(kind) if config.entry(kind, name).settings]


def target(kind: str, name: str) -> Any:
    return resolve_name(config.entry(kind, name).settings["_target_"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_has_the_name_of_its_yaml(kind: str, subtests: pytest.Subtests) -> None:
    for name in plug_ins(kind):
        with subtests.test(name):
            assert named(target(kind, name)) == name


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_value_is_refused_by_the_whole_name_of_its_field(kind: str, subtests: pytest.Subtests) -> None:
    """Where the constructor has something to say of it: types are judged before (`config.check`)."""
    for name in plug_ins(kind):
        given = {key: value for key, value in config.entry(kind, name).settings.items() if key != "_target_"}
        if "inner" in given:
            given["inner"] = config.build(kind, given["inner"])
        for field in (one.name for one in fields(target(kind, name)) if one.init and one.name != "inner"):
            with subtests.test(f"{name}.{field}"):
                said = ""
                try:
                    target(kind, name)(**{**given, field: -7.5})
                except UserError as error:
                    said = str(error)
                except (TypeError, AttributeError):  # a type that no plug-in gets from a user
                    pass
                short = name in ("temperature", "top_k", "top_p") and name in said  # they are options of their own, too
                whole = f"guide.{name}.{field}" if kind == "guide" else f"{kind}.{field}"
                assert not said or short or whole in said


def test_no_message_asks_a_class_for_its_name() -> None:
    """Names of noise, models and the like stay: their objects are what the user gave."""
    wrong = re.compile(r"\b(scheduler|cache|blocks|stop|guide)=\{type\(")
    folder = Path(dllm_sampler.__file__).parent
    sources = [*folder.rglob("*.py"), *(folder / "eval").resolve().rglob("*.py")]
    assert len(sources) > 200
    assert [path for path in sources if wrong.search(path.read_text(encoding="utf-8"))] == []


@dataclass(frozen=True)
class Fixed(FixedSteps):
    """Another one of the same kind."""


@dataclass(frozen=True)
class Mine(FixedSteps):
    """A scheduler of the user's own, in a YAML of the user's own."""


def test_other_classes() -> None:
    assert named(Fixed()) == "Fixed"
    assert named(StorePass(Threshold())) == "threshold", "what the user named"
    assert named(config.build("scheduler", {"name": "my-rule", "_target_": f"{__name__}.Mine"})) == "my-rule"


@each(
    ("plugins", "said"),
    [
        ({"cache": "dllm", "scheduler": "wino"}, "cache-incompatible: scheduler=wino, cache=dllm"),
        ({"guide": "regex", "scheduler": "credit"}, "plugins-incompatible: scheduler=credit, guide=regex"),
        (
            {"guide": {"name": "grammar", "grammar": "arithmetic", "depth": 1}, "stop": "prophet"},
            "plugins-incompatible: guide=grammar",
        ),
        ({"guide": "regex", "tokenizer": None}, "tokenizer-missing: guide=regex"),
        ({"scheduler": {"name": "freedave", "inner": "wino"}}, "scheduler-incompatible: scheduler=freedave"),
        ({"blocks": "full", "scheduler": "threshold"}, "options-conflict: block_length, blocks=fixed, blocks=full"),
    ],
)
def test_refused_combinations(plugins: dict[str, Any], said: str) -> None:
    pytest.importorskip("outlines_core")
    with refused(said):
        toys.sampler(**plugins).generate(toys.PROMPTS, max_new_tokens=4, block_length=2)
