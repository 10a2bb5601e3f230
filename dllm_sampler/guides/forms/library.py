"""Calls of outlines-core, which compiles regular expressions and JSON schemas, with limits of time and memory."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from dllm_sampler.errors import UserError, installing

SECONDS = 10  # most time to build
MEMORY = 4 << 30  # bytes that building may take

# Runs in a process of its own: an expression may have exponentially many states, and the library cannot be stopped.
BUILD = """
import json, sys
from outlines_core import Index, Vocabulary
given = json.load(sys.stdin)
sys.setrecursionlimit(10**5)
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (given["memory"], given["memory"]))
except (ImportError, ValueError, OSError):  # not on this platform: time is limited in any case
    pass
try:
    if "schema" in given:
        from outlines_core.json_schema import build_regex_from_schema
        json.dump(build_regex_from_schema(given["schema"], given["whitespace"], given["depth"]), sys.stdout)
        sys.exit()
except MemoryError:
    raise
except Exception as error:  # the library has no type of its own; the caller makes a sentence of it
    sys.exit(f"invalid: {str(error).splitlines()[0]}")
found = []
for bare, marked in given["patterns"]:
    try:
        Index(bare, Vocabulary(256, {b"a": [97]}))  # alone: a stray bracket would close that of the mark
    except MemoryError:
        raise
    except Exception as error:  # as above
        if "missing tokens" not in str(error).lower():
            sys.exit(f"invalid: {error}")
    try:
        index = Index(marked, Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)}))
    except MemoryError:
        raise
    except Exception as error:  # as above. With a token for every byte, one is missing only if no text matches
        sys.exit("empty" if "missing tokens" in str(error).lower() else f"invalid: {error}")
    moves = index.get_transitions()
    if len(moves) > given["states"]:
        sys.exit(f"large: {len(moves)}")
    found.append([index.get_initial_state(), sorted(index.get_final_states()), list(moves.items())])
json.dump(found, sys.stdout)
"""


def run(given: dict[str, Any], name: str, why: Callable[[], tuple[str, str]] | None = None) -> str:
    """Run the library on an input and return its result, as JSON.

    Args:
        given: the input of `BUILD`.
        name: name of the form in errors.
        why: returns the fault of the input and what to do, instead of the library's own error.

    Raises:
        UserError: the library is not installed, refuses the input, finds no text, fails, or would take too much time
            or memory.
    """
    if not installed():
        raise UserError("package-missing", f"Guides on a form need outlines-core. Run {installing('constraints')}.")
    command = [sys.executable, "-P", "-c", BUILD]
    try:
        text = json.dumps({**given, "memory": MEMORY})
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError("form-too-large", f"{name} takes more than {SECONDS} s to build. Simplify it.") from None
    if not done.returncode:
        return done.stdout
    said = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""
    if said == "empty":
        raise UserError("form-impossible", f"{name} matches no text. Correct it.")
    # The library reads JSON up to a depth of its own. Schemas that come here are JSON.
    deep = done.returncode == -signal.SIGSEGV or "overflowed its stack" in done.stderr
    if deep or said.startswith("invalid: Expected a valid JSON string"):
        raise UserError("form-too-large", f"{name} is nested too deeply. Make it flatter.")
    if said.startswith("invalid: "):
        reason, way = why() if why else (said[9:].rstrip("."), "Correct or simplify it.")
        raise UserError("form-invalid", f"{name} cannot be used ({reason}). {way}")
    if said.startswith("large: "):
        said = f"{name} has {said[7:]} states as an automaton, more than {given['states']}"
        raise UserError("form-too-large", f"{said}. Simplify it, for example with smaller counts or lengths.")
    if done.returncode == -signal.SIGKILL or "memory allocation" in done.stderr or "MemoryError" in said:
        raise UserError("form-too-large", f"{name} needs more than {MEMORY >> 30} GiB to build. Simplify it.")
    ended = said or f"exit status {done.returncode}"
    raise UserError("form-invalid", f"{name} makes outlines-core fail ({ended}). Simplify it.")


@cache
def installed() -> str:
    """Return the library's version, or an empty text if it is not installed."""
    return version("outlines-core") if find_spec("outlines_core") else ""
