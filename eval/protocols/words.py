"""The words of each run of `suite=protocol/NAME task=... method=...`."""

from collections.abc import Sequence
from itertools import product

from dllm_sampler.cli.user_files import choices, entry
from dllm_sampler.errors import unknown
from dllm_sampler.eval.protocols import spec

PREFIX = "protocol/"


def is_protocol(suite: str) -> bool:
    """Return True if a suite is a protocol, and not a list of sweeps."""
    name = suite.removeprefix(PREFIX)
    known = suite.startswith(PREFIX) and name in choices(spec.GROUP)
    return known and "variants" in entry(spec.GROUP, name).settings


def lines(suite: str, words: Sequence[str]) -> list[list[str]]:
    """Return the words of each combination of models, tasks and methods.

    Words of the command line replace those of the protocol and of the method.

    Raises:
        UserError: a task, variant or method is unknown.
    """
    name = suite.removeprefix(PREFIX)
    protocol = spec.load(name)
    given = {word.partition("=")[0].lstrip("+~"): word.partition("=")[2] for word in words}
    rest = [word for word in words if not word.startswith(("task=", "method=", "model=", "task.variant="))]
    first = next((models[0] for models in protocol.models.values() if models), "mini")
    found = []
    for model in given.get("model", first).split(","):
        variant = protocol.variant(model, given.get("task.variant"))
        known = protocol.tasks(variant)
        methods = protocol.methods[variant]
        tasks = given["task"].split(",") if "task" in given else known
        chosen = given["method"].split(",") if "method" in given else [next(iter(methods))]
        for task, method in product(tasks, chosen):
            if task not in known:
                raise unknown(f"task of suite={suite}", task, known)
            if method not in methods:
                raise unknown(f"method of suite={suite}", method, methods)
            cell = protocol.cells[variant, task]
            fixed = ["task=protocol", f"task.protocol={name}", f"task.task={task}", f"task.variant={variant}"]
            common = [f"max_new_tokens={cell.length}", "oracle=false", *cell.settings]
            own = _override(common, *protocol.words(variant, method, task), rest)
            found.append([f"model={model}", *fixed, *own, *rest])
    return found


def _override(words: Sequence[str], *others: Sequence[str]) -> list[str]:
    """Return `words` and all of `others` but the last list, without the words that a later list replaces."""
    kept = list(words)
    for number, more in enumerate(others):
        keys = {word.partition("=")[0].lstrip("+~") for word in more}
        kept = [word for word in kept if not keys & {word.partition("=")[0], word.partition("=")[0].partition(".")[0]}]
        kept += more if number < len(others) - 1 else ()
    return kept
