"""Plug-ins as names and settings, which a file can hold: the way back from `config.build`."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

from dllm_sampler import config
from dllm_sampler.core.naming import named
from dllm_sampler.errors import UserError
from dllm_sampler.host.functions import function


def written(group: str, plugin: Any) -> Any:
    """A plug-in as a dict of its name and settings, if its class is that of a YAML in `conf/<group>`; else as it is."""
    if isinstance(plugin, list | tuple):
        return [written(group, one) for one in plugin]
    if not is_dataclass(plugin) or isinstance(plugin, type) or named(plugin) not in config.names(group):
        return plugin
    target = config.entry(group, named(plugin)).settings.get("_target_")
    if target is None or function(group, str(target)) is not type(plugin):
        return plugin
    values = {one.name: getattr(plugin, one.name) for one in fields(plugin) if one.init}
    return {"name": named(plugin), **{key: written("scheduler", value) for key, value in values.items()}}


def check_json(group: str, plugin: Any) -> None:
    """Refuse what JSON cannot hold.

    Raises:
        UserError: the plug-in, or one of its settings, is an object.
    """
    try:
        json.dumps(plugin)
    except TypeError:
        raise UserError(
            f'{group}={plugin!r} cannot be saved: a file holds settings, so give a dict with "name", or with "_target_"'
            " for a class of your own"
        ) from None
