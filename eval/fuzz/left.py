"""What runs leave in their folders, without times, to be compared with what an undisturbed run leaves."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

EVERY = 2  # steps from one line of a training's log to the next
TRAINED = ("train", "sft")  # kinds of runs that train
TIMES = ("time", "times", "seconds", "peak_memory")


def sizes(folder: Path) -> list[int]:
    """Bytes of each file that a run has written so far."""
    found = []
    for file in (folder / "out").rglob("*"):
        with suppress(OSError):
            found.append(file.stat().st_size)
    return [*found, 0]


def lines(file: Path) -> list[dict[str, Any]]:
    """The records of a file, without times; what is cut off at its end is left out.

    Raises:
        ValueError: another line than the last is broken.
    """
    whole = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in whole]


def finished(what: str, folder: Path) -> bool:
    """Whether the run needs no further call: a finished training refuses one."""
    return what in TRAINED and (folder / "out/t/model.safetensors").exists()


def result(what: str, folder: Path) -> dict[str, Any]:
    """All that a finished run of a kind is to leave behind."""
    out = folder / "out"
    if what == "sample":
        return {"samples": lines(out / "o.jsonl")}
    if what in TRAINED:
        weights = out / "t/model.safetensors"
        digest = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else None
        rest = sorted(file.name for file in (out / "t").iterdir() if not file.name.startswith("."))
        log = [(line["step"], line.get("tokens"), line.get("loss")) for line in lines(out / "t/log.jsonl")]
        # Ctrl-C writes a line of its own, between those of whole intervals.
        whole = [one for one in log if one[0] % EVERY == 0]
        return {"weights": digest, "log": whole, "doubled": len(log) - len(set(log)), "files": rest}
    runs = {file.parent.name: lines(file) for file in sorted(out.glob("*/samples.jsonl"))}
    parts = [file.name for file in out.glob("*/part-*")]
    if what != "tune":
        about = {file.parent.name: json.loads(file.read_text()) for file in out.glob("*/run.json")}
        about = {name: {**one, "environments": len(one["environments"])} for name, one in about.items()}
        return {"runs": runs, "parts": parts, "about": about}
    chosen = folder / "conf/experiment/tuned.yaml"
    return {"runs": runs, "parts": parts, "winner": chosen.read_text() if chosen.exists() else None}


def unlike(what: str, folder: Path, whole: dict[str, Any]) -> str:
    """How it differs from what an undisturbed run left, as `part: figures`; empty: in nothing."""
    try:
        found = result(what, folder)
    except (ValueError, OSError) as error:
        return f"unreadable: {error}"
    for part, wanted in whole.items():
        if found[part] != wanted:
            return f"{part}: {_difference(found[part], wanted)}"
    return ""


def torn(what: str, folder: Path, whole: dict[str, Any]) -> str:
    """What is wrong in a folder whose run was cut off; empty: every whole line is one of the undisturbed run's."""
    if what != "sample":
        return ""
    try:
        found = lines(folder / "out/o.jsonl")
    except ValueError as error:
        return f"a broken line among others: {error}"
    known = [json.dumps(line, sort_keys=True) for line in whole["samples"]]
    given = [json.dumps(line, sort_keys=True) for line in found]
    if len(set(given)) != len(given):
        return "a line is there twice"
    return "" if set(given) <= set(known) else "a line that no undisturbed run writes"


def _difference(found: Any, wanted: Any) -> str:
    if isinstance(wanted, dict):
        missing, more = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
        if missing or more:
            return f"{len(missing)} missing, {len(more)} more"
        key = next(key for key in wanted if found[key] != wanted[key])
        return f"{key}: {_difference(found[key], wanted[key])}"
    if isinstance(wanted, list):
        at = next((at for at, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), None)
        return f"{len(found)} of {len(wanted)}, the first other one is {at}"
    return f"{str(found)[:80]} for {str(wanted)[:80]}"
