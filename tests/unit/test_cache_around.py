"""A cache around another one hands on all that the contract of caches has, also what that gains later."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import ClassVar, get_origin, get_type_hints
from unittest.mock import MagicMock

import torch

from dllm_sampler import Query
from dllm_sampler.cache.dpad import DPadCache
from dllm_sampler.cache.none import NoCache
from dllm_sampler.core.protocols import Cache
from tests import toys
from tests.sampling import each

DRIVES = {"layer", "cost"}  # asked of the plan's cache, the inner one
ITS_OWN = {"bind", "init", "computes", "narrow"}  # more than the inner one's
METHODS = [name for name, one in vars(Cache).items() if inspect.isfunction(one) and not name.startswith("_")]


@each("method", [name for name in METHODS if name not in DRIVES | ITS_OWN])
def test_it_hands_on_what_the_contract_of_caches_has(method: str) -> None:
    inner = MagicMock(spec=Cache)
    given = [object() for _ in list(inspect.signature(getattr(Cache, method)).parameters)[1:]]
    assert getattr(DPadCache(inner), method)(*given) in (getattr(inner, method).return_value, None)
    getattr(inner, method).assert_called_once_with(*given)


def test_it_says_what_the_cache_inside_says() -> None:
    facts = {name for name, hint in get_type_hints(Cache).items() if get_origin(hint) is ClassVar}
    properties = {name for name, one in vars(Cache).items() if isinstance(one, property)}
    inner = MagicMock(spec=Cache, **{name: object() for name in facts | properties})
    for name in sorted(facts | properties):
        assert getattr(DPadCache(inner), name) is getattr(inner, name), name


def test_it_hides_more_than_the_query_does() -> None:
    canvas = replace(toys.canvas(torch.ones(1, 12, dtype=torch.bool)), stop=torch.tensor([3]))
    live, query = DPadCache(NoCache(), scale=0.0).init(canvas, toys.denoiser().spec), Query.masks(canvas)
    computed = live.computes(canvas)
    assert computed is not None
    hidden = canvas.columns().expand_as(canvas.masked) == 1
    for before, wanted in ((None, [*range(3, 12)]), (hidden, [1, *range(3, 12)])):
        narrowed = live.narrow(canvas, replace(query, hidden=before), computed)
        assert narrowed.hidden is not None and narrowed.hidden[0].nonzero()[:, 0].tolist() == wanted
