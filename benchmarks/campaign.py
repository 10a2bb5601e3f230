"""All measurements on a GPU within a number of minutes, the most decisive first.

    python benchmarks/campaign.py --minutes 9                  # on a GPU; results go to the folder campaign
    python benchmarks/campaign.py --minutes 9 --continue       # what was not reached, then what went wrong
    python benchmarks/campaign.py --list                       # the stages, with the seconds they take by estimate
    python benchmarks/campaign.py --smoke                      # every stage tiny on the CPU: does it run?

Each stage is a benchmark of this folder in a process of its own, stopped at a time limit: a stage that hangs or fails
does not stop the others. A line is printed after each, and `campaign.json` written; the stage's own file and what it
printed are next to it. A stage without enough time left does not begin; `--continue` runs it. The last lines are the
decisions by the rules of `campaign_rules.py`.

Exit status: 0 if something was measured, 1 if nothing was, 2 for a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from campaign_rules import decisions
from campaign_stages import STAGES, Figures, Stage
from options import add_smoke, among, check_gpu, command, parser, quantity

from dllm_sampler.errors import UserError
from dllm_sampler.host import files

HERE = Path(__file__).parent
FILE = "campaign.json"
ENDED = 10  # seconds that a stopped stage has to end by itself


def words(stage: Stage, options: argparse.Namespace, file: Path) -> list[str]:
    """The command line of a stage."""
    script, *given = shlex.split(stage.smoke if options.smoke else stage.command)
    if options.official and stage.name == "uncached":
        given += ["--official", str(options.official)]
    return [sys.executable, str(HERE / script), *given, "--json", str(file)]


def run(stage: Stage, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Run a stage and return its record."""
    file, log = (options.out.absolute() / f"{stage.name}.{kind}" for kind in ("json", "log"))
    file.unlink(missing_ok=True)
    begun, state = time.monotonic(), "done"
    with log.open("w") as told:
        process = subprocess.Popen(
            words(stage, options, file), stdout=told, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if process.wait(limit):
                state = "failed"
        except subprocess.TimeoutExpired:
            state = "stopped"
        finally:
            stop(process)
    seconds = time.monotonic() - begun
    figures, notes = read(stage, file)
    if state == "stopped":
        notes.insert(0, f"after {seconds:.0f} s")
    elif not figures or state == "failed":
        state = "failed"
        notes = notes or [last_line(log)]
    return {"state": state, "seconds": round(seconds, 1), "figures": figures, "note": "; ".join(notes)}


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a stage and what it started, if it runs still."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, sent)
                process.wait(ENDED)


def read(stage: Stage, file: Path) -> tuple[Figures, list[str]]:
    """The figures that a stage wrote, and its notes; of one that was stopped, what was there."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}, []
    rows = [row for row in found.get("rows", ()) if isinstance(row, dict)]
    notes = list(dict.fromkeys(row["note"] for row in rows if row.get("note")))
    try:
        return stage.read(found), notes
    except (LookupError, StopIteration, ValueError):  # what it takes has not been measured
        return {}, notes


def last_line(log: Path) -> str:
    """Return the last line of a stage's log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def said(name: str, one: dict[str, Any]) -> str:
    """A stage's line."""
    figures = ", ".join(f"{figure} {value:.3g}" for figure, value in one["figures"].items())
    return f"{name:<10} {one['state']:<8} {one['seconds']:5.0f} s  {'; '.join(filter(None, (figures, one['note'])))}"


def decided(stages: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the decisions by the figures of the stages."""
    measured = {f"{name}: {figure}": v for name, one in stages.items() for figure, v in one["figures"].items()}
    return [
        {"figure": rule.figure, "value": value, "limit": rule.most, "do": do} for rule, value, do in decisions(measured)
    ]


def order(chosen: Sequence[Stage], before: dict[str, Any]) -> list[Stage]:
    """The stages to run: those that have not been, then those that went wrong."""
    new = [stage for stage in chosen if stage.name not in before]
    return new + [stage for stage in chosen if before.get(stage.name, {"state": "done"})["state"] != "done"]


def earlier(options: argparse.Namespace) -> dict[str, Any]:
    """Return the stages that an earlier call of the same kind wrote, or raise `UserError`."""
    file = options.out / FILE
    try:
        found = json.loads(file.read_text())
        stages, smoke = found["stages"], found["smoke"]
    except OSError:
        raise UserError(
            "file-missing", f"--continue cannot read {file}. Leave it out, or name the folder of a campaign with --out."
        ) from None
    except (ValueError, LookupError, TypeError):
        raise UserError(
            "file-invalid", f"{file} is not a result of a campaign. Remove it, and leave out --continue."
        ) from None
    if smoke != options.smoke:
        raise UserError(
            "run-differs", f"{file} was written {'with' if smoke else 'without'} --smoke. Continue it in the same way."
        )
    return stages


def listed(chosen: Sequence[Stage]) -> None:
    """Print the stages."""
    for stage in chosen:
        print(f"{stage.name:<10} {stage.seconds:4d} s  {stage.asks}\n{'':18}{stage.command}")
    print(f"{sum(stage.seconds for stage in chosen)} s in all, by estimate; each is stopped after twice its own")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    it = parser(__doc__)
    add = it.add_argument
    names = [stage.name for stage in STAGES]
    add("--minutes", type=quantity, default=9.0, help="time for all stages together (default %(default)s)")
    add(
        "--only",
        type=among("stage", names),
        metavar="STAGES",
        help="names of the stages to run, with commas between them (default all)",
    )
    add("--continue", dest="resume", action="store_true", help="keep the results in --out, and run the other stages")
    add("--list", action="store_true", help="print the stages, and run none")
    add(
        "--out",
        type=Path,
        default="campaign",
        metavar="FOLDER",
        help="folder for the results, created if necessary (default %(default)s)",
    )
    add(
        "--official",
        type=Path,
        metavar="FILE",
        help="LLaDA's own generate.py, for the stage `uncached` (default: a loop like it)",
    )
    add_smoke(it, "run every stage at tiny sizes on the CPU, to see that it works")
    options = it.parse_args(argv)
    if options.list:
        return options
    check_gpu(it, options)
    if options.official and not options.official.is_file():
        it.error(f"--official={options.official} is not a file. Name generate.py of LLaDA")
    if options.official:
        options.official = options.official.absolute()
    files.make_folder(options.out)
    return options


@command
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    chosen = [stage for stage in STAGES if not options.only or stage.name in options.only]
    if options.list:
        listed(chosen)
        return 0
    stages = earlier(options) if options.resume else {}
    over = time.monotonic() + 60 * options.minutes
    later: list[str] = []
    for stage in order(chosen, stages):
        left = over - time.monotonic()
        if left < stage.needs(options.smoke):
            later.append(stage.name)
            continue
        stages[stage.name] = run(stage, options, min(left, stage.limit(options.smoke)))
        print(said(stage.name, stages[stage.name]), flush=True)
        result = {"smoke": options.smoke, "stages": stages, "decisions": decided(stages)}
        files.write(options.out / FILE, json.dumps(result, indent=1))
    for one in decided(stages):
        print(f"{one['figure']}: {one['value']:.3g} (limit {one['limit']:g}) -> {one['do']}")
    if options.smoke:
        print("Tiny models on a CPU: these figures say nothing, and neither do the decisions.")
    if later:
        print(f"No time was left for {', '.join(later)}. Run them with --continue.")
    return 0 if any(one["figures"] for one in stages.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
