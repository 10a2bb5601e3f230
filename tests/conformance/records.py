"""Records of other shapes, read as lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def named(raw: dict[str, Any]) -> dict[str, Any]:
    """Any record, with what some call by other names: a seed, the rows of a batch."""
    found = {**raw}
    for name in ("prompt_ids", "output_ids"):
        rows = found.pop(f"{name}_batch", None)
        found |= {} if rows is None else {name: rows}
    drawn = found.get("rng")
    if isinstance(drawn, dict) and "seed" in drawn:
        found["rng"] = {"torch_manual_seed": drawn["seed"]}
    return found


def decisions(raw: dict[str, Any]) -> dict[str, Any]:
    """A record of decisions (arXiv 2508.10111) with the `steps` that they make, and the forwards that they took.

    An end token is written to everything behind it.
    """
    tokens: list[int | None] = [None] * len(raw["output_ids"])
    ends = raw["params"]["eos_ids"]
    steps: list[list[int]] = [[] for _ in range(max((one[0] + 1 for one in raw["decisions"]), default=0))]
    for forward, at, token, committed in raw["decisions"]:
        if committed:
            behind = range(at, len(tokens) if token in ends else at + 1)
            steps[forward] += [place for place in behind if tokens[place] is None]
            for place in behind:
                tokens[place] = token
    return {**raw, "steps": [sorted(step) for step in steps], "nfe": len(steps)}


def states(raw: dict[str, Any]) -> dict[str, Any]:
    """A record of canvases (arXiv 2408.08252), which has no checkpoint and no prompt: `svdd.recorded` compares it."""
    rows = raw["output"]
    return {
        **raw,
        "model": "",
        "params": {},
        "prompt_ids": [[0] for _ in rows],
        "output_ids": rows,
        "nfe": raw["model_calls"],
        "steps": [[] for _ in rows],
        "length": raw["steps"],
    }


RECORDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"constrained_cfg": decisions, "svdd": states}
