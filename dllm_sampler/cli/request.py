"""What a command line asks for, read and checked before torch is imported: a mistake does not wait for seconds."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dllm_sampler.cli import inputs
from dllm_sampler.cli.compose import Settings, settings
from dllm_sampler.cli.help import choices_of
from dllm_sampler.cli.inputs import Prompt
from dllm_sampler.cli.options import Options
from dllm_sampler.cli.user_files import entry, own
from dllm_sampler.cli.words import Arguments
from dllm_sampler.errors import UserError


@dataclass(frozen=True)
class Request:
    """A run of `dllm-sample`: its settings, its prompts, and what these say of their forms (None: nothing)."""

    settings: Settings
    prompts: list[Prompt]
    forms: inputs.Forms | None = None
    session: Sequence[str] | None = None  # the overrides of an interactive session, which asks for its prompts itself


def request(arguments: Arguments) -> Request:
    """Compose the settings and read the prompts of a sorted command line.

    Raises:
        UserError: a name that is not known, a value of the wrong type, a prompt that cannot be read.
    """
    chosen = settings(arguments.overrides)
    options = chosen.options
    check_target(options, arguments.overrides)
    check_length(arguments.overrides)
    check_experiments(chosen, arguments.overrides)
    terminal = sys.stdin is None or sys.stdin.isatty()
    alone = not arguments.prompts and options.prompts_file is None
    if alone and terminal and options.infill is None and options.target is None and sys.stderr.isatty():
        return Request(chosen, [], session=arguments.overrides)
    # With infill= a prompt is not needed, and a pipe may be there for other reasons.
    pipe = None if terminal else sys.stdin
    given, own = inputs.read(arguments.prompts, options.prompts_file, pipe, options.infill is None)
    if own is not None and options.forms is not None:
        raise UserError("options-conflict", f"forms= and {options.prompts_file} both name forms. Remove one.")
    return Request(chosen, given, own)


def check_length(overrides: Sequence[str]) -> None:
    """Refuse `max_new_tokens` for answers whose gaps say how long they are.

    Raises:
        UserError: both are given.
    """
    given = {name for name, _, value in (word.lstrip("+~").partition("=") for word in overrides) if value != "null"}
    if {"infill", "max_new_tokens"} <= given:
        raise UserError("options-conflict", "max_new_tokens= and infill= exclude each other. Write lengths as {gap:8}.")


def check_experiments(chosen: Settings, overrides: Sequence[str]) -> None:
    """Refuse an experiment that sets a field which another choice of a plug-in does not have.

    Raises:
        UserError: it names the experiment, which set the field where the overrides do not.
    """
    named = [word for word in overrides if re.match(r"experiment=(?!null\Z)", word)]
    typed = {word.lstrip("+~").partition("=")[0] for word in overrides}
    for _, experiment in choices_of(named[-1]) if named else ():
        for group, fields in entry("experiment", experiment).settings.items():
            plugin = chosen.plugins.get(group)
            # A user's own YAML may leave fields out.
            if not isinstance(plugin, dict) or not isinstance(fields, dict) or plugin["name"] in own(group):
                continue
            known = entry(group, plugin["name"]).settings
            for field in fields:
                if field not in known and f"{group}.{field}" not in typed:
                    raise UserError(
                        "options-conflict",
                        f"experiment={experiment} sets {group}.{field}, unknown to {group}={plugin['name']}. Remove"
                        f" one.",
                    )


def check_target(options: Options, overrides: Sequence[str]) -> None:
    """Refuse settings that say nothing with a target, or nothing without one.

    Raises:
        UserError: the first of them, and what to do instead.
    """
    given = {re.split(r"[.=@]", word.lstrip("+~"))[0] for word in overrides}
    if options.target is None:
        if idle := sorted(given & {"draft_length", "draft_scheduled", "separator"}):
            raise UserError("option-not-applicable", f"{idle[0]} needs a verifier. Add target=MODEL.")
        return
    if options.stream:
        raise UserError("options-conflict", "stream=true and target= exclude each other. Remove one.")
    if wrong := sorted(given & {"prefix", "suffix", "infill", "samples"}):
        raise UserError("option-not-applicable", f"{wrong[0]} does nothing with target=. Remove it.")
    if options.block_length is not None:
        raise UserError("option-not-applicable", "block_length does nothing with target=. Set draft_length.")
    if not options.draft_scheduled and (idle := sorted(given & {"scheduler", "blocks", "stop", "cache", "experiment"})):
        raise UserError("option-not-applicable", f"{idle[0]} needs draft_scheduled=true. Add it.")
