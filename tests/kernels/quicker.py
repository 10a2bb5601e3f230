"""A plugin for pytest: Triton's interpreter prepares its language once a launch, and its table of dtypes once.

By itself it does so again for each call of a device function, and for each tensor: a third of the time. What a kernel
does is the same.
"""

from functools import cache
from typing import Any

from triton import language as tl
from triton.runtime import interpreter

_prepare, _launch, _dtype = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter._get_np_dtype
_prepared: set[tuple[bool, bool]] = set()


def _once(function: Any) -> Any:
    seen = list(function.__globals__.values())
    modules = (any(value is tl for value in seen), any(value is tl.core for value in seen))
    if modules in _prepared:
        return None  # who calls a device function does not look
    _prepared.add(modules)
    return _prepare(function)


def _launched(self: Any, *args: Any, **kwargs: Any) -> Any:
    _prepared.clear()  # the end of a launch takes back what was prepared
    return _launch(self, *args, **kwargs)


_scalar = cache(_dtype)  # the types of pointers and blocks have no hash


def _numpy(kind: Any) -> Any:
    return _scalar(kind) if type(kind) is tl.dtype else _dtype(kind)


interpreter._patch_lang = _once
interpreter.GridExecutor.__call__ = _launched
interpreter._get_np_dtype = _numpy
