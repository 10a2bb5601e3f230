"""`dllm-sample` without a prompt at a terminal: type a prompt, watch it being denoised, change a setting, try again."""

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rich.console import Console

from dllm_sampler.cli import help as pages
from dllm_sampler.cli import run
from dllm_sampler.cli.compose import GROUPS, SEVERAL, Settings, settings
from dllm_sampler.cli.inputs import check_length
from dllm_sampler.cli.options import Options
from dllm_sampler.cli.terminal import show
from dllm_sampler.cli.words import guides, is_flag, is_override, spelled_out, split
from dllm_sampler.errors import UserError
from dllm_sampler.host.version import __version__
from dllm_sampler.sampler import Sampler

WELCOME = """\
Type a prompt, or settings: scheduler.threshold=0.7, cache=dual, stream=false, ...
A text with gaps, {gap:8} for 8 tokens, is filled. A line after -- is a prompt, whatever it looks like.
--help and --info explain, as on the command line. quit, exit or Ctrl-D ends."""

# Their values are texts, which go on to the end of the line, or to where only settings follow.
_TEXT = re.compile(r"(?<!\S)(prefix|suffix|infill)=")
_NAMES = "|".join([*GROUPS, *Options.__dataclass_fields__])
_SETTING = re.compile(rf"(?:\+\+?|~)?(?:{_NAMES})(?:[.@][\w./@-]*)?=")
_BETWEEN = re.compile(rf"\s+(?={_SETTING.pattern})")
_ENDINGS = ("quit", "exit")
# Settings of a command line with prompts.
_ELSEWHERE = ("target", "draft_length", "draft_scheduled", "separator", "prompts_file", "output", "resume")


def ask() -> str:
    """Return the next line that is typed.

    Raises:
        EOFError: the input has ended.
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
    """Answer prompts until Ctrl-D. After a mistake the message is printed, and the session continues.

    Args:
        overrides: settings of the command line, which apply until others are typed.
        ask: returns the next line, and raises EOFError after the last one.

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
        except KeyboardInterrupt:  # stops an answer or discards a line
            print(file=sys.stderr)
        except UserError as error:
            show(f"dllm-sample: {' '.join(str(error).split())}", sys.stderr)


@dataclass
class Session:
    """The current settings, and the sampler that is built from them."""

    overrides: list[str] = field(default_factory=list)
    chosen: Settings | None = None
    sampler: Sampler | None = None

    def do(self, line: str) -> None:
        """Run one line.

        Raises:
            UserError: the line has a mistake. The settings are unchanged.
            EOFError: the line ends the session.
        """
        line = line.strip()
        words = typed(line)
        if line in _ENDINGS:
            raise EOFError
        if line == "help":
            print(WELCOME, file=sys.stderr)
        elif is_flag(line.partition(" ")[0]):
            explain(line)
        elif words:
            self.change(words)
            print(f"settings: {' '.join(map(shlex.quote, self.overrides)) or 'none'}", file=sys.stderr)
        elif line and line != "--":
            self.answer(line.removeprefix("-- "))

    def change(self, words: Sequence[str]) -> None:
        """Apply the overrides `words` to the current settings.

        Raises:
            UserError: an override is wrong. The settings are then unchanged.
        """
        check_length(words)
        overrides = merged(self.overrides, words)
        overrides = [word for word in overrides if not _idle(word, overrides)]
        for word in overrides:
            if _name(word) in _ELSEWHERE:
                way = f"Leave it, and add {shlex.quote(word)} to a command"
                raise UserError("option-not-applicable", f"{word} does not work in a session. {way}.")
        said = any(word.startswith(("stream=", "particles=")) for word in overrides)
        shown = [] if said else ["stream=true"]
        chosen = settings([*overrides, *shown])
        # Reuse the loaded model if it is the same: loading may take minutes.
        same = self.chosen is not None and _weights(chosen) == _weights(self.chosen)
        sampler = run.load(chosen, self.sampler if same else None)
        run.check(sampler, chosen.options)
        self.sampler, self.overrides, self.chosen = sampler, overrides, chosen

    def answer(self, prompt: str) -> None:
        """Answer a prompt under the current settings.

        Raises:
            UserError: the prompt cannot be answered.
        """
        assert self.sampler is not None and self.chosen is not None
        totals = run.respond(self.sampler, None, self.chosen.options, [prompt], None, None)
        for said in (totals.shortcomings(), totals.line(str(self.sampler.device))):
            if said:
                print(said, file=sys.stderr)


def typed(line: str) -> list[str]:
    """Return the overrides of a line, or an empty list if the line is a prompt."""
    text = _TEXT.search(line)
    if text and not text.start() and not line[text.end() :].startswith(("'", '"')):
        for between in _BETWEEN.finditer(line, text.end()):
            rest = typed(line[between.end() :])
            if rest and all(map(_SETTING.match, rest)):
                return [line[: between.start()], *rest]
        return [line]
    try:
        words = shlex.split(line)
    except ValueError:  # a quote that does not end
        words = []
    if words and all(map(is_override, words)):
        return words
    before = typed(line[: text.start()].strip()) if text and text.start() else []
    return [*before, *typed(line[text.start() :])] if text and before else []


def explain(line: str) -> None:
    """Print the page that a line with a flag asks for, on stderr.

    Raises:
        UserError: an unknown flag, or `--info` with a word that names nothing.
    """
    try:
        words = shlex.split(line)
    except ValueError:  # a quote that does not end
        words = line.split()
    arguments = split(words)
    if arguments.action == "version":
        print(f"dllm-sample {__version__}", file=sys.stderr)
    else:
        pages.show(arguments, Console(stderr=True))


def merged(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return the old overrides with the new ones. A new choice of a plug-in removes fields of the old choice."""
    words = spelled_out([*old, *new])
    later = {_name(word): word for word in words[len(old) :]}
    kept = [word for word in words[: len(old)] if not any(_replaced(_name(word), one) for one in later.values())]
    return [*kept, *later.values()]


def _name(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _replaced(old: str, new: str) -> bool:
    """Return True if the override `new` removes the setting named `old`."""
    name = _name(new)
    if name == "guide" and old.startswith("guide."):
        return old.split(".")[1] not in guides([new])
    return old == name or (name in GROUPS and name not in SEVERAL and old.startswith(f"{name}."))


def _idle(word: str, overrides: Sequence[str]) -> bool:
    """Return True for an override `NAME=null` that changes nothing."""
    others = [one for one in overrides if one != word]
    return word.endswith("=null") and settings(others) == settings(overrides)


def _weights(chosen: Settings) -> tuple[object, ...]:
    """Return the settings whose change requires loading the model again."""
    options = chosen.options
    return chosen.model, options.dtype, options.device, options.compile
