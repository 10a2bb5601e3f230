"""What a plug-in says of itself so that others can rely on it, and how a subclass loses that."""

from __future__ import annotations

from collections.abc import Mapping


def keep_promises(kind: type, base: type, promises: Mapping[str, tuple[str, ...]]) -> None:
    """Take from a new class each promise whose ground it changes without giving it anew: `base`'s holds instead.

    Args:
        kind: the class.
        base: has the cautious default of every promise.
        promises: the methods that each rests on.
    """

    def depth(name: str) -> int:
        return next(at for at, one in enumerate(kind.__mro__) if name in vars(one))

    for promise, grounds in promises.items():
        if min(map(depth, grounds)) < depth(promise):
            setattr(kind, promise, vars(base)[promise])
