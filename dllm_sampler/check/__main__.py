"""The command `python -m dllm_sampler.check`."""

import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dllm_sampler import config
from dllm_sampler.cli.compose import SAMPLE, composition, parts
from dllm_sampler.cli.terminal import ending
from dllm_sampler.cli.user_files import with_config_dir
from dllm_sampler.cli.words import literal, parse, spelled_out
from dllm_sampler.errors import UserError

COMMAND = "python -m dllm_sampler.check"
HELP = f"""\
usage: {COMMAND} GROUP=NAME [GROUP.FIELD=VALUE ...] [--config-dir DIR]

Check the promises of every plug-in, on small random networks in float64:
  rows     a row of a ragged batch equals the row alone
  reads    no step reads the device
  prompts  prompts, padding and finished rows never change
  commits  a committed token stays, unless `traits` says `revises`
  ends     every row ends within the bound that `bound` gives, with no mask left
  traits   a scheduler's `traits` are true of confidence, of `canvas.age` and of the positions in its queries
and list the plug-ins that it runs with. GROUP is scheduler, cache, blocks, stop or guide. NAME is a packaged choice, or
your own in ./conf/GROUP/NAME.yaml or DIR/GROUP/NAME.yaml. Several groups can be set: all others are tried in turn.

exit status: 0 every promise is kept, 1 a promise is broken, 2 a mistake in the command or in the YAML
"""
# Toys. The last three are block-causal, have a causal context, and have no mask token.
TOYS = ("llada", "dream", "cfg", "causal", "context", "uniform")
ROWS_DIFFER = (
    "Look for a sum or mean over all rows or over positions that are not eligible, for random numbers, and for state"
    " outside the carry."
)
GROUPS = tuple(group for group in config.GROUPS if group not in ("model", "particles"))  # what acts in a step
Labelled = tuple[str | None, Any]  # a case, after the plug-in that it adds to the plainest ones


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    return ending(COMMAND, lambda: with_config_dir(sys.argv[1:] if words is None else words, _run))


def _run(words: Sequence[str]) -> int:
    if {"-h", "--help"} & {*words}:
        print(HELP, end="")
        return 0
    chosen = subject(words)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return check(chosen)


def subject(words: Sequence[str]) -> dict[str, Any]:
    """Return the specs (`config.build`) of the plug-ins that the command's `words` set, by group.

    Raises:
        UserError: a word cannot be parsed, or does not set a plug-in.
    """
    groups = dict[str, None]()
    for word in (word for given in spelled_out(words) for word in literal(given)):
        group = parse(word).key_or_group.partition(".")[0]
        if group not in GROUPS:
            raise UserError(
                "option-not-applicable",
                f"{word} does not set a plug-in that acts in a step. Set only {', '.join(GROUPS)}.",
            )
        groups[group] = None
    if not groups:
        raise UserError(
            "option-missing", "No plug-in is named. Add scheduler=NAME, or another group of those in --help."
        )
    _, plugins = parts(composition(SAMPLE, words))
    return {group: plugins[group] for group in groups}


def check(chosen: dict[str, Any]) -> int:
    """Check plug-ins, print a line for each promise, and return the exit status.

    Raises:
        UserError: a YAML names no class of its group, or sets a field wrongly.
    """
    from dllm_sampler.check import promises  # torch and transformers take seconds

    title = " ".join(f"{group}={_name(spec)}" for group, spec in chosen.items())
    try:
        built = [config.build(group, spec) for group, spec in chosen.items()]
    except UserError:
        raise
    except Exception as error:  # whatever the user's plug-in raises
        print(title)
        return _report("", [(None, explained(error, ()))], 1)
    print(f"{title}, on small random networks in float64")
    try:
        cases, refused = combinations(chosen)
    except Exception as error:  # whatever the user's plug-in raises
        return _report("", [(None, explained(error, built))], 1)
    if not cases:
        first = {promises.refusal(toy, **chosen): toy for toy in reversed(TOYS)}  # a toy for each reason
        said = " ".join(f"On the small network {toy}: {reason}" for reason, toy in reversed(first.items()))
        return _report("It runs", [(None, f"No combination of plug-ins is legal. {said}")], 1)
    failures = 0

    def keep(promise: str, cases: Sequence[Labelled], test: Callable[[Any], object], hint: str = "") -> list[Labelled]:
        """Return the cases that keep a promise, and report the others."""
        nonlocal failures
        kept, broken = [], []
        for label, case in cases:
            try:
                test(case)
                kept.append((label, case))
            except promises.CannotTry:
                raise
            except Exception as error:  # whatever the user's plug-in raises: it is a sentence of the report
                broken.append((label or f"the small network {case.toy}", explained(error, built)))
        failures += _report(promise, broken, len(cases), hint)
        return kept

    with promises.known_tokens():
        running = keep("It runs with every plug-in listed below.", cases, lambda case: case.stream())
    plain = [(label, case) for label, case in running if label is None]
    if not plain:
        return 1
    alone = {id(case): promises.EVERY for _, case in plain}  # all rows of the plain ones, and one of each other
    keep(
        "A row of a ragged batch equals the row alone.",
        running,
        lambda case: promises.check_rows(case, alone.get(id(case), (len(str(case)) % len(promises.EVERY),))),
        ROWS_DIFFER,
    )
    keep("Prompts, padding and finished rows never change.", running, promises.check_prompts)
    keep("A committed token stays, unless `traits` says `revises`.", running, promises.check_commits)
    keep("Every row ends within its bound, with no mask left.", running, promises.check_end)
    if any(promises.reads(case) or not case.sampler.plugins.scheduler.traits.graph_safe for _, case in plain):
        print("    --  A step may read the device, as the plug-in declares.")
    else:
        keep("No step reads the device.", plain, promises.check_reads)
    tests = {
        "ranks_by_confidence": promises.check_confidence,
        "scheduled": promises.check_age,
        "asks": promises.check_asks,
    }
    for trait, test in tests.items() if "scheduler" in chosen else ():
        try:
            if failures:
                raise promises.CannotTry("a promise above is broken")
            keep(
                f"What `traits.{trait}` says is true.",
                plain[:1],
                lambda case, test=test: test(case.scheduler, case.toy),
            )
        except promises.CannotTry as reason:
            print(f"    --  What `traits.{trait}` says is not tried: {str(reason).rstrip('.')}.")
    for group in promises.GROUPS:
        names = [label.partition("=")[2] for label, _ in running if label and label.startswith(f"{group}=")]
        if names:
            print(f"runs with {group}: {', '.join(names)}")
    for label, reason in refused:
        print(f"refused {label}: {reason}")
    return int(failures > 0)


def combinations(chosen: dict[str, Any]) -> tuple[list[Labelled], list[tuple[str, str]]]:
    """Return the legal combinations of plug-ins with all others, and the refused ones with the reasons.

    The label of a combination names the plug-in that was added to the plainest ones. It is None if none was added.
    """
    from dllm_sampler.check import promises
    from dllm_sampler.check.settings import settings

    plainest = {
        "scheduler": {"name": "threshold", "threshold": 0.7},
        "cache": {"name": "none"},
        "blocks": {"name": "fixed", "length": 6},
        "stop": {"name": "none"},
        "guide": [],
    }
    firsts = [
        (group, next(one for one in settings(group) if one["name"] == name))
        for group in plainest
        if group not in chosen
        for name in config.names(group)
    ]

    def legal(given: dict[str, Any]) -> Iterator[str]:
        return (toy for toy in TOYS if promises.refusal(toy, **given) is None)

    base = {**plainest, **chosen}
    needed = (one for one in ({}, *({group: one} for group, one in firsts)) if next(legal({**base, **one}), None))
    base |= next(needed, {})  # the first plug-in with which it runs, if it does not run with the plainest
    toys = [*legal(base)]
    cases: list[Labelled] = [(None, promises.Case(toy, **base)) for toy in toys]
    if not cases:
        return [], []
    if "guide" not in chosen:
        drawn = base | {"guide": [{"name": "temperature", "value": 1.0}]}
        cases += [(None, promises.Case(toy, **drawn)) for toy in toys[:1] if promises.refusal(toy, **drawn) is None]
    refused = []
    for group, one in firsts:
        given, label = base | {group: one}, f"{group}={one['name']}"
        if served := next(legal(given), None):
            cases.append((label, promises.Case(served, **given)))
        else:
            refused.append((label, promises.refusal(toys[0], **given) or ""))
    return cases, refused


def explained(error: Exception, built: Sequence[Any]) -> str:
    """Return a description of an error: the message of a `Broken` or `UserError` as it is.

    For others it names the innermost line of a plug-in's file in the traceback, or else the line that raised the error.

    Args:
        built: the plug-ins. Guides are in a tuple.
    """
    from dllm_sampler.check.promises import Broken
    from dllm_sampler.check.reads import HostRead

    if isinstance(error, Broken | UserError):
        return str(error)
    own = {inspect.getsourcefile(type(one)) for part in built for one in (part if isinstance(part, tuple) else [part])}
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((one for one in reversed(frames) if one.filename in own), frames[-1])
    where = f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
    if isinstance(error, HostRead):
        way = "Use tensor operations, or declare it by Traits(graph_safe=False) of a scheduler or syncs=True of a cache"
        return f"A step reads the device: {error} ({where}). {way}."
    return f"It raised {type(error).__name__}: {' '.join(str(error).split())} ({where})."


def _report(promise: str, broken: Sequence[tuple[str | None, str]], tried: int, hint: str = "") -> int:
    """Print the outcome of a promise, and return 1 if it is broken.

    Args:
        hint: advice on where to look if the promise is broken.
    """
    if not broken:
        print(f"    ok  {promise}")
        return 0
    label, sentence = broken[0]
    more = f" and {len(broken) - 1} more of {tried} combinations" if len(broken) > 1 else ""
    seen = f". Seen with {label}{more}." if label else "."
    print(f"FAILED  {sentence.rstrip('.')}{seen}")
    if hint:
        print(f"        {hint}")
    return 1


def _name(spec: object) -> str:
    """Return the name in a plug-in's spec, or the names in a list of specs."""
    if isinstance(spec, list):
        return _name(spec[0]) if len(spec) == 1 else f"[{','.join(map(_name, spec))}]" if spec else "none"
    return str(spec.get("name")) if isinstance(spec, dict) else str(spec)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory, where the other commands find no neighbours of a plug-in's file
    sys.exit(main())
