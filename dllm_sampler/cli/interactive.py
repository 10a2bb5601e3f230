"""`dllm-sample` without a prompt at a terminal: type a prompt, watch it being denoised, change a setting, try again."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from dllm_sampler.cli import run
from dllm_sampler.cli.arguments import is_override
from dllm_sampler.cli.compose import GROUPS, SEVERAL, Settings, settings
from dllm_sampler.cli.request import check_target
from dllm_sampler.errors import UserError
from dllm_sampler.sampler import Sampler

WELCOME = """\
Type a prompt, or settings: scheduler.threshold=0.7, cache=dual, stream=false, ...
A text with gaps, {gap:8} for 8 tokens, is filled. A line after -- is a prompt, whatever it looks like. Ctrl-D ends."""

# Their values are texts, which go on to the end of the line.
_TEXT = re.compile(r"(prefix|suffix|infill)=")
_ELSEWHERE = ("target", "prompts_file", "output")  # settings of a command line with prompts


def ask() -> str:
    """The next line that is typed.

    Raises:
        EOFError: there is none.
    """
    if sys.stdout.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 - `input` has a history with it
        return input("> ")
    print("> ", end="", file=sys.stderr, flush=True)  # stdout is for answers
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def session(overrides: Sequence[str], ask: Callable[[], str] = ask) -> int:
    """Answer what is typed until Ctrl-D. A mistake is one sentence, and the session goes on.

    Args:
        overrides: settings of the command line, in force until others are typed.
        ask: reads a line; raises EOFError behind the last one.

    Returns:
        The exit status.

    Raises:
        UserError: a mistake in `overrides`.
    """
    state = Session()
    state.change(list(overrides))
    print(WELCOME, file=sys.stderr)
    while True:
        try:
            state.do(ask())
        except EOFError:
            print(file=sys.stderr)
            return 0
        except KeyboardInterrupt:  # ends an answer, or a line
            print(file=sys.stderr)
        except UserError as error:
            print(f"dllm-sample: {' '.join(str(error).split())}", file=sys.stderr)


@dataclass
class Session:
    """The settings in force, and the sampler that they make."""

    overrides: list[str] = field(default_factory=list)
    chosen: Settings | None = None
    sampler: Sampler | None = None

    def do(self, line: str) -> None:
        """What one line says.

        Raises:
            UserError: a mistake in it; all stays as it was.
        """
        line = line.strip()
        words = typed(line)
        if words:
            self.change(words)
            print(f"settings: {' '.join(map(shlex.quote, self.overrides))}", file=sys.stderr)
        elif line and line != "--":
            self.answer(line.removeprefix("-- "))

    def change(self, words: Sequence[str]) -> None:
        """Put settings in force.

        Raises:
            UserError: they cannot be; those before stay in force.
        """
        overrides = merged(self.overrides, words)
        shown = [] if any(word.startswith("stream=") for word in overrides) else ["stream=true"]
        chosen = settings([*overrides, *shown])
        for name in _ELSEWHERE:
            if getattr(chosen.options, name) is not None:
                raise UserError(f"{name}= is for a command line with prompts: start dllm-sample with it")
        check_target(chosen.options, overrides)
        # The same model stays where it is: loading one may take minutes.
        same = self.chosen is not None and _weights(chosen) == _weights(self.chosen)
        self.sampler = run.load(chosen, self.sampler if same else None)
        self.overrides, self.chosen = overrides, chosen

    def answer(self, prompt: str) -> None:
        """Answer a prompt, under the settings in force.

        Raises:
            UserError: it cannot be answered.
        """
        assert self.sampler is not None and self.chosen is not None
        totals = run.respond(self.sampler, None, self.chosen.options, [prompt], None, None)
        for said in (totals.shortcomings(), totals.line(str(self.sampler.device))):
            if said:
                print(said, file=sys.stderr)


def typed(line: str) -> list[str]:
    """The overrides of a line that has nothing else; empty: it is a prompt."""
    text = _TEXT.match(line)
    if text and not line[text.end() :].startswith(("'", '"')):
        return [line]
    try:
        words = shlex.split(line)
    except ValueError:  # a quote that does not end
        return []
    return words if all(map(is_override, words)) else []


def merged(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Overrides of which later ones count: a choice of a plug-in also takes the fields of the one before it away."""
    kept = list(old)
    for word in new:
        name = word.lstrip("+~").partition("=")[0]
        fields = f"{name}." if name in GROUPS and name not in SEVERAL else None
        kept = [one for one in kept if not _replaced(one.lstrip("+~").partition("=")[0], name, fields)]
        kept.append(word)
    return kept


def _replaced(old: str, new: str, fields: str | None) -> bool:
    return old == new or (fields is not None and old.startswith(fields))


def _weights(chosen: Settings) -> tuple[object, ...]:
    """The settings that need another model when they change."""
    options = chosen.options
    return chosen.model, options.dtype, options.device, options.compile
