"""The YAML files of conf/ are the registry: they agree with the classes, and names become objects."""

import dataclasses
import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any

import pytest
from hydra.utils import get_class

from dllm_sampler import blocks, cache, config, guides, schedulers, stops
from dllm_sampler.blocks.adablock import AdaBlock
from dllm_sampler.cache.dual import DualCache
from dllm_sampler.core.protocols import Blocks, Cache, Guide, Scheduler, Stop
from dllm_sampler.guides import EndTokens, Temperature, TopP
from dllm_sampler.schedulers.fixed import FixedSteps
from dllm_sampler.schedulers.threshold import Threshold
from tests.refusals import refused
from tests.sampling import each

PLUGINS = [(group, name) for group in config.GROUPS if group != "model" for name in config.names(group)]


def test_yaml_is_the_class(subtests: pytest.Subtests) -> None:
    for group, name in PLUGINS:
        with subtests.test(f"{group}={name}"):
            settings = dict(config.entry(group, name).settings)
            target = settings.pop("_target_", None)
            if target is None:
                assert (group, name) == ("guide", "none")
                continue
            cls: Any = get_class(target)
            fields = {field.name: _written(field) for field in dataclasses.fields(cls) if field.init}
            assert settings == fields, "a plug-in's YAML holds the fields of its class and their defaults"
            built = config.build(group, name if group != "guide" else [name])
            assert isinstance(built, tuple if group == "guide" else cls)


def _written(field: Any) -> object:
    """A field's default as YAML says it: a tuple is a list, a plug-in of its own defaults is named."""
    if field.default_factory is not dataclasses.MISSING:
        target = f"{type(inner := field.default_factory()).__module__}.{type(inner).__qualname__}"
        return next(name for kind, name in PLUGINS if config.entry(kind, name).settings.get("_target_") == target)
    return list(field.default) if isinstance(field.default, tuple) else field.default


def test_yaml_says_what_it_is(subtests: pytest.Subtests) -> None:
    for group, name in [*PLUGINS, *(("model", name) for name in config.names("model"))]:
        with subtests.test(f"{group}={name}"):
            about = config.entry(group, name).about
            assert about.endswith(".") and len(about) < 160


def test_no_plugin_lacks_its_yaml() -> None:
    """Every public plug-in that can be made from defaults alone is a choice of its group."""
    offered = {config.entry(group, name).settings.get("_target_", "").rpartition(".")[2] for group, name in PLUGINS}
    for package, kind in ((schedulers, Scheduler), (cache, Cache), (guides, Guide), (blocks, Blocks), (stops, Stop)):
        for module in [package, *_modules(package)]:
            for name, cls in inspect.getmembers(module, inspect.isclass):
                made = (
                    [field for field in dataclasses.fields(cls) if field.init] if dataclasses.is_dataclass(cls) else []
                )
                ready = all(field.default is not dataclasses.MISSING for field in made)
                ready = ready and not inspect.isabstract(cls) and not cls.__module__.endswith(".base")
                if issubclass(cls, kind) and cls is not kind and ready and not name.startswith("_"):
                    assert name in offered, f"{cls.__module__}.{name} has no YAML in conf/"


def _modules(package: ModuleType) -> list[ModuleType]:
    paths = getattr(package, "__path__", [])
    return [importlib.import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(paths)]


def test_build() -> None:
    assert config.build("scheduler", "threshold") == Threshold()
    assert config.build("scheduler", {"name": "threshold", "threshold": 1}) == Threshold(1.0)
    assert config.build("scheduler", {"name": "fixed", "steps": 4, "score": "margin"}) == FixedSteps(4, "margin")
    assert isinstance(config.build("cache", "dual"), DualCache)
    mine = Threshold(0.5)
    assert config.build("scheduler", mine) is mine
    assert config.build("guide", None) == config.build("guide", "none") == config.build("guide", []) == ()
    both = config.build("guide", [{"name": "top_p", "p": 0.5}, Temperature(value=1.0)])
    assert both == (TopP(p=0.5), Temperature(value=1.0))


@each(
    ("group", "spec", "message"),
    [
        ("scheduler", "treshold", "choice-unknown: 'treshold', 'threshold'"),
        ("scheduler", {"name": "threshold", "treshold": 1}, "field-unknown: scheduler=threshold, 'treshold'"),
        ("scheduler", {"name": "threshold", "threshold": "abc"}, "option-type: scheduler.threshold='abc'"),
        ("scheduler", {"name": "threshold", "threshold": True}, "option-type: scheduler.threshold=true"),
        ("scheduler", {"name": "fixed", "steps": 2.5}, "option-type: scheduler.steps=2.5"),
        ("scheduler", {"name": "fixed", "score": "best"}, "choice-unknown: scheduler.score='best', confidence, margin"),
        ("guide", {"name": "none", "p": 1}, "field-unknown: guide=none, 'p'"),
        ("guide", ["top_p", "top_q"], "choice-unknown: 'top_q'"),
    ],
)
def test_build_refuses(group: str, spec: object, message: str) -> None:
    with refused(message):
        config.build(group, spec)


def test_model(tmp_path: Any) -> None:
    assert config.model("mini")["path"].endswith("mini")
    assert config.model("org/name") == {**config.model("mini"), "path": "org/name"}
    assert config.model(str(tmp_path))["path"] == str(tmp_path)
    assert config.model({"name": "llada-8b", "cfg_scale": 1.5})["cfg_scale"] == 1.5
    for spec, message in (
        ("minni", "choice-unknown: 'minni', 'mini'"),
        (str(tmp_path / "gone"), "model-not-found"),
        ({"name": "mini", "cfg_scal": 1.0}, "field-unknown: model=mini, 'cfg_scal', 'cfg_scale'"),
    ):
        with refused(message):
            config.model(spec)


@each(("plugin", "field"), [(AdaBlock, "delimiters"), (EndTokens, "ids")])
def test_token_ids_are_a_list(plugin: Any, field: str) -> None:
    assert plugin(**{field: [3, 4]}) == plugin(**{field: (3, 4)}) and hash(plugin(**{field: [3, 4]}))
    for wrong in (198, [-1], ["a"], "34"):
        with refused(f"option-type: {field}"):
            plugin(**{field: wrong})
