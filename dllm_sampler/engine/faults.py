"""Errors about results of plug-ins. Each names the plug-in."""

from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor

from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Blocks, Cache, Carry, Guide, Scheduler, Stop
from dllm_sampler.core.values import MEASURABLE, Canvas, Edit, Query, Readout, Refusals
from dllm_sampler.errors import UserError

# Fields of `Edit`, their dtype if it is fixed, and whether they have a value for each position or for each row.
EDIT = (
    ("ids", torch.int64, True),
    ("commit", torch.bool, True),
    ("remask", torch.bool, True),
    ("confidence", None, True),
    ("score", None, True),
    ("keep_block", torch.bool, False),
    ("close_block", torch.bool, False),
    ("finish", torch.bool, False),
    ("stop", torch.int64, False),
    ("end", torch.int64, False),
    ("candidate", torch.int64, False),
)
KINDS = {"scheduler": Scheduler, "blocks": Blocks, "stop": Stop, "guide": Guide, "cache": Cache}


def _kind(value: object) -> str:
    kinds = value if isinstance(value, tuple) else [value]
    names = ", ".join(type(one).__name__ for one in kinds)
    return f"({names})" if isinstance(value, tuple) else names


def checked_answer(scheduler: Scheduler, told: Any, canvas: Canvas, query: Query) -> tuple[Edit, Carry]:
    """Return the edit and the carry that a scheduler's `tell` returned.

    Raises:
        UserError: `told` is not such a pair, or the edit does not fit the query.
    """
    if not isinstance(told, tuple) or len(told) != 2 or not isinstance(told[0], Edit):
        raise UserError(
            "plugin-result", f"scheduler={named(scheduler)}: tell returned {_kind(told)}. Return a tuple (edit, carry)."
        )
    check_edit("scheduler", scheduler, told[0], canvas, query)
    return told[0], told[1]


def check_edit(group: str, plugin: object, edit: Any, canvas: Canvas, query: Query) -> None:
    """Refuse an edit whose fields do not fit the query. Reads nothing of the device.

    Raises:
        UserError: naming the plug-in, the field and the right shape.
    """
    if not isinstance(edit, Edit):
        raise UserError("plugin-result", f"{group}={named(plugin)} returned {type(edit).__name__}. Return an Edit.")
    rows, positions = canvas.step.shape, query.positions.shape
    for name, dtype, each in EDIT:
        value: Any = getattr(edit, name)
        if value is None and name not in ("ids", "commit"):
            continue
        wanted = positions if each else rows
        if isinstance(value, Tensor) and value.shape == wanted and dtype in (None, value.dtype):
            continue
        shape = f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        right = f"{list(wanted)}{'' if dtype is None else f' of {dtype}'}"
        raise UserError(
            "plugin-result",
            f"{group}={named(plugin)} returned an Edit whose {name} is {shape}. Return {right}, one value for each"
            f" {'of query.positions' if each else 'row'}.",
        )


def checked_settlement(guide: Guide, settled: Any, canvas: Canvas, query: Query) -> tuple[Edit, Refusals]:
    """Return the edit and the refusals that a guide's `settle` returned.

    Raises:
        UserError: `settled` is not such a pair, or the edit does not fit the query.
    """
    if not isinstance(settled, tuple) or len(settled) != 2 or not isinstance(settled[1], Refusals):
        raise UserError(
            "plugin-result", f"guide={named(guide)}: settle returned {_kind(settled)}. Return a tuple (Edit, Refusals)."
        )
    check_edit("guide", guide, settled[0], canvas, query)
    return settled[0], settled[1]


def check_stopped(stop: Stop, stopped: Any, edit: Edit, canvas: Canvas, query: Query) -> None:
    """Refuse the result of a stop policy if it is not an edit, or if its block fields are not those of `edit`.

    Raises:
        UserError: naming the policy and the field.
    """
    check_edit("stop", stop, stopped, canvas, query)
    if stopped.close_block is not edit.close_block or stopped.keep_block is not edit.keep_block:
        raise UserError(
            "plugin-result",
            f"stop={named(stop)} changed close_block or keep_block of the edit. Return dataclasses.replace(edit, ...)"
            " with finish, end or tokens.",
        )


def check_needs(error: Exception, seen: Readout) -> None:
    """Refuse a plug-in that failed because it read a field that was not measured. Ignore other errors.

    Args:
        error: the plug-in's error.
        seen: the readout that the plug-in got.

    Raises:
        UserError: naming the plug-in and the field.
    """
    if "NoneType" not in str(error) and not isinstance(error, AssertionError):
        return
    missing = {name for name in MEASURABLE if getattr(seen, name) is None}
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    plugins = [(at, frame.f_locals.get("self")) for at, frame in enumerate(frames)]
    known = [(at, one, group) for at, one in plugins for group, kind in KINDS.items() if isinstance(one, kind)]
    for at, plugin, group in known[-1:]:  # the innermost one, and the functions that it called
        for frame in frames[at:]:
            for name in frame.f_code.co_names:
                if name in missing and name not in frame.f_globals:
                    owner = "its needs" if hasattr(plugin, "needs") else "the needs of a scheduler, blocks or a stop"
                    reads = f"{group}={named(plugin)} reads readout.{name}, which is not measured"
                    raise UserError("plugin-needs", f"{reads}. Add {name!r} to {owner}.") from error
