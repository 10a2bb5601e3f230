"""Run the unit tests under other versions: a new environment for each, made, tried and removed.

    python -m tests.environments --list                      # the environments, and the interpreters that are here
    python -m tests.environments                             # all of them, one after another
    python -m tests.environments --only py3.11-oldest        # one
    python -m tests.environments --continue                  # those that have not passed yet
    python -m tests.environments --tests tests/kernels       # other tests

An environment takes up to 8 GB while it is there. After each a line is printed and `environments.json` written; what
pip and pytest said lies next to it, in NAME.log. One that cannot be installed or hangs does not stop the others.
Interpreters are looked for on the PATH and in pyenv's folder.

Exit status: 0 if every environment passed, 1 if one did not or its interpreter is not here, 2 for a mistake in the
arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO
from xml.etree import ElementTree

from benchmarks.options import output, positive
from dllm_sampler.cli.terminal import Parser, ending
from dllm_sampler.errors import UserError
from dllm_sampler.eval.folders import commit
from dllm_sampler.host import files
from tests.tables import markdown
from tests.versions import ENVIRONMENTS, PINNED, ROOT, Environment, interpreter, requirements

COMMAND, FILE, SECTION = "python -m tests.environments", "environments.json", "environments"
VERSIONS = """
import importlib.metadata as it, json, platform
print(json.dumps({"python": platform.python_version()} | {one.name.lower(): one.version for one in it.distributions()}))
"""


def call(words: Sequence[str | Path], log: TextIO, seconds: float) -> int | None:
    """The exit status of a command in the clone, whose processes all end with it; None: it took too long."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "PYTHONHOME"))}
    inherited["PATH"] = f"{Path(words[0]).parent}{os.pathsep}{inherited.get('PATH', '')}"
    log.write(f"$ {' '.join(map(str, words))}\n")
    log.flush()
    with subprocess.Popen(words, cwd=ROOT, env=inherited, stdout=log, stderr=log, start_new_session=True) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def tested(report: Path) -> dict[str, Any]:
    """The figures of pytest's report: how many tests passed, which failed, and why some were skipped."""
    failed, skipped, cases = [], Counter[str](), ElementTree.parse(report).findall(".//testcase")
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif (skip := case.find("skipped")) is not None:
            skipped[skip.get("message", "")] += 1
    return {"passed": len(cases) - len(failed) - skipped.total(), "failed": failed, "skipped": skipped}


def run(it: Environment, options: argparse.Namespace) -> dict[str, Any]:
    """What became of an environment."""
    folder, pins, report, log = (options.out / f"{it.name}{end}" for end in ("", ".txt", ".xml", ".log"))
    found: dict[str, Any] = {"state": "not installed", "commit": commit(), "tests": options.tests, "versions": {}}
    base = interpreter(it.python)
    if base is None:
        return found | {"state": "no interpreter", "note": f"there is no python{it.python} here"}
    report.unlink(missing_ok=True)
    wanted, held = requirements(it)
    files.write(pins, "\n".join(held) + "\n")
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "-c", pins, "-e", ROOT, *wanted]
    test = [python, "-m", "pytest", "-q", "-n", str(options.processes), "-p", "no:cacheprovider"]
    begun = time.monotonic()
    try:
        with log.open("w") as told:
            for words in ([base, "-m", "venv", "--clear", folder], install):
                if call(words, told, 60 * options.minutes) != 0:
                    return found | {"note": f"see {log}"}
            listed = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True)
            found |= {"versions": json.loads(listed.stdout), "state": "failed", "installed": time.monotonic() - begun}
            begun = time.monotonic()
            status = call([*test, f"--junitxml={report}", *options.tests], told, 60 * options.minutes)
        found["seconds"] = time.monotonic() - begun
        if status is None:
            return found | {"state": "stopped", "note": f"after {options.minutes} minutes"}
        found |= tested(report) if report.exists() else {"note": f"see {log}"}
        return found | ({"state": "passed"} if status == 0 else {})
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)


def said(it: Environment, found: dict[str, Any]) -> str:
    """An environment's line."""
    versions = " ".join(f"{name} {version(it, found, name)}" for name in ("python", *PINNED))
    time = f", {found['installed']:.0f} + {found['seconds']:.0f} s" if "seconds" in found else ""
    return f"{it.name}: {outcome(found)}{time} ({versions}) {found.get('note', '')}".rstrip()


def version(it: Environment, found: dict[str, Any], name: str) -> str:
    """Return the version of a package in an environment: what was installed, or else what pip would be told."""
    return found["versions"].get(name) or getattr(it, name) or "newest"


def outcome(found: dict[str, Any]) -> str:
    """How an environment's tests ended."""
    if "passed" not in found:
        return found["state"]
    skipped = sum(found["skipped"].values())
    return f"{found['state']}: {found['passed']} passed, {len(found['failed'])} failed, {skipped} skipped"


def brief(found: dict[str, Any]) -> str:
    """Return how an environment's tests ended, without those that passed."""
    if "passed" not in found:
        return str(found["state"])
    counts = {"failed": len(found["failed"]), "skipped": sum(found["skipped"].values())}
    return ", ".join([found["state"], *(f"{count} {name}" for name, count in counts.items() if count)])


def earlier(file: Path) -> dict[str, Any]:
    """What earlier calls wrote, by environment.

    Raises:
        UserError: the file is no result of this command.
    """
    try:
        found = json.loads(file.read_text())["environments"]
        return {name: one for name, one in found.items() if {"state", "commit", "tests", "versions"} <= one.keys()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise UserError(
            "file-invalid", f"{file} is no result of this command: remove it, or name another folder with --out"
        ) from None


def table(found: dict[str, Any]) -> str:
    """What was found, for a page."""
    rows = []
    for it in ENVIRONMENTS:
        one = found.get(it.name, {"state": "not run", "versions": {}, "commit": "-"})
        versions = [version(it, one, name) for name in ("python", *PINNED)]
        rows.append([it.name, *versions, it.rest, brief(one), str(one["commit"])[:9]])
    return markdown.table(["environment", "Python", *PINNED, "others", "tests", "commit"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status of the command."""
    names = [one.name for one in ENVIRONMENTS]
    it = Parser(prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = it.add_argument
    add(
        "--only",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help="these environments, in this order (all)",
    )
    add("--tests", nargs="+", default=["tests/unit"], metavar="PATH", help="what pytest is given (tests/unit)")
    add("--processes", type=positive, default=2, metavar="N", help="of pytest (2)")
    add("--minutes", type=positive, default=45, metavar="N", help="for an installation, and for its tests (45)")
    add("--out", type=Path, default=ROOT / "outputs" / "environments", metavar="FOLDER", help="(outputs/environments)")
    add("--continue", dest="resume", action="store_true", help="leave out what has passed these tests before")
    add("--keep", action="store_true", help="leave the environments in --out")
    add("--list", action="store_true", help="print the environments, make none")
    add("--docs", type=output, metavar="FILE", help="fill this page's table with what is in --out, make none")

    def command() -> int:
        options = it.parse_args(argv)
        options.out = options.out.absolute()
        chosen = [one for name in options.only for one in ENVIRONMENTS if one.name == name]
        found = earlier(options.out / FILE)
        if options.list:
            for one in chosen:
                print(f"{said(one, {'state': interpreter(one.python) or 'no interpreter', 'versions': {}})} {one.rest}")
            return 0
        if options.docs:
            page = markdown.read(options.docs, SECTION)
            files.write(options.docs, markdown.fill(page, SECTION, table(found)))
            return 0
        files.make_folder(options.out)
        for one in chosen:
            before = found.get(one.name, {})
            if options.resume and (before.get("state"), before.get("tests")) == ("passed", options.tests):
                continue
            found[one.name] = run(one, options)
            print(said(one, found[one.name]), flush=True)
            files.write(options.out / FILE, json.dumps({"environments": found}, indent=1) + "\n")
        return int(any(found[one.name]["state"] != "passed" for one in chosen))

    return ending("environments", command)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what it started ends, and its environment goes
    sys.exit(main())
