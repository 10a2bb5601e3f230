"""A plugin for pytest: Triton's interpreter prepares its language once, and works out no shape twice.

By itself it prepares for each launch and for each call of a device function, and works out types and shapes for each
tensor: more than half of the time. What a kernel does is the same. Of a Triton that has other names inside, what
goes by these stays as it is, and slow.
"""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

from triton import language as tl
from triton.language import semantic
from triton.runtime import interpreter

Sizes = tuple[int, ...]


def replace(owner: Any, name: str, quicker: Callable[[Any], Any]) -> None:
    """What `quicker` makes of a function, if there is one of that name."""
    if hasattr(owner, name):
        setattr(owner, name, quicker(getattr(owner, name)))


def prepare_once(prepare: Any) -> Any:
    """Nothing else speaks the language in a process that interprets, so it stays prepared after a launch."""
    prepared = set[tuple[bool, bool]]()

    def once(function: Any) -> Any:
        seen = list(function.__globals__.values())
        modules = (any(value is tl for value in seen), any(value is tl.core for value in seen))
        if modules not in prepared:
            prepare(function)
            prepared.add(modules)
        return SimpleNamespace(restore=lambda: None)

    return once


def remember_dtype(dtype: Any) -> Any:
    scalar = cache(dtype)  # the types of pointers and blocks have no hash
    return lambda kind: scalar(kind) if type(kind) is tl.dtype else dtype(kind)


def remember_block(make: Any) -> Any:
    """A shape is a tuple of Triton's own, which works out the types of its items."""
    known = dict[Sizes, tuple[Any, int, str]]()

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        if sizes in known:
            self.element_ty = element_ty
            self.shape, self.numel, written = known[sizes]
            self.name = f"<{written}, {element_ty}>"
        else:
            make(self, element_ty, shape)  # which may refuse
            if vars(self).keys() == {"element_ty", "shape", "numel", "name"}:
                known[sizes] = self.shape, self.numel, str(self.shape)

    return init


def remember_tensor(make: Any) -> Any:
    known = dict[Sizes, tuple[Any, Any]]()

    def init(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes in known:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = known[sizes]
        else:
            make(self, handle, type)
            if vars(self).keys() == {"handle", "type", "dtype", "numel", "shape"}:
                known[sizes] = self.numel, self.shape

    return init


def broadcast_if_need_be(broadcast: Any) -> Any:
    def shape(value: Any) -> list[int]:
        return value.type.shape.values if value.type.is_block() else []

    return lambda self, lhs, rhs: (lhs, rhs) if shape(lhs) == shape(rhs) else broadcast(self, lhs, rhs)


replace(interpreter, "_patch_lang", prepare_once)
replace(interpreter, "_get_np_dtype", remember_dtype)
if hasattr(getattr(tl, "tuple", None), "__iter__"):
    replace(tl.block_type, "__init__", remember_block)
    replace(tl.tensor, "__init__", remember_tensor)
    replace(getattr(semantic, "TritonSemantic", None), "broadcast_impl_value", broadcast_if_need_be)
