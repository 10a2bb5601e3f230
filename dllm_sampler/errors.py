"""The exceptions a user may meet. A message says what is wrong, then what to do."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

LONGEST_WORD = 400  # characters of a word that a message quotes whole
LONGEST = 4000  # characters of a message


class Sentence(Exception):
    """A message that stays short, and in one line, whatever it quotes."""

    def __init__(self, message: object = "") -> None:
        super().__init__(bounded(str(message)))


class UserError(Sentence, ValueError):
    """A mistake in the user's input: what is wrong, where, and what would be right.

    Attributes:
        code: the kind of mistake, for programs, for example `prompt-empty`. docs/errors.md lists them. The words of a
            message may change; its code does not, and the message names the input as it was typed.
    """

    def __init__(self, code: str, message: object):
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to unpickle it: subclasses differ in their arguments."""
        return Exception.__new__, (type(self), *self.args), self.__dict__


FAULTS = ("plugin-result", "plugin-needs")  # codes of a plug-in that breaks its contract, alone or combined


class NotWrittenError(UserError):
    """A file cannot be written, for example because the disk is full. Its old content is still there."""

    def __init__(self, message: object):
        super().__init__("file-not-written", message)


class FallbackWarning(Sentence, RuntimeWarning):
    """A request cannot run, and something slower does the same. The message gives the reason."""


class NoEffectWarning(Sentence, UserWarning):
    """An unknown input has no effect. The message names it."""


class RandomScoreWarning(UserWarning):
    """The scored model is in train mode with dropout, so that its scores are random."""


class UntrainedWarning(UserWarning):
    """A setting makes the model work in a way that it was not trained for; the message names the setting."""


def installing(extra: str) -> str:
    """Return the command that installs an extra of this package, for an error about a missing package.

    The package is on no index, so the command is one for a clone of the repository, as in README.md.
    """
    return f"pip install -c constraints.txt -e '.[{extra}]' (in a clone of dllm_sampler)"


def bounded(text: str) -> str:
    """Return a message in one line. The middle of long words, and of what is too long as a whole, is left out."""
    text = re.sub(r"\s*[\r\n]\s*", " ", text)  # as in the `repr` of a tensor
    text = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: f"{word[0][:60]}...{word[0][-20:]}", text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 4 :]}"


def counted(number: int, noun: str) -> str:
    """Return a number and a noun, as in `1 sample` and `2 samples`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error without its full stop, or the name of its class if it is empty.

    For an error of YAML, return the problem and its line.
    """
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"{getattr(error, 'problem', None) or 'it is not YAML'} in line {mark.line + 1}"
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return short(said.rstrip("."), 300)


def short(text: str, most: int = 200) -> str:
    """Shorten a text of more than `most` characters to its beginning and its length."""
    return text if len(text) <= most else f"{text[: most // 2]}... ({len(text)} characters)"


def nearest(word: str, names: Iterable[str], most: int = 2, cutoff: float = 0.6) -> list[str]:
    """Return the names that a word probably meant: those that it shortens, else those that are spelt like it."""
    known, word = list(dict.fromkeys(names)), word[:200]
    short_for = sorted((name for name in known if len(word) > 1 and name.startswith(word)), key=len)
    return short_for[:most] or get_close_matches(word, known, most, cutoff)


def unknown(kind: str, word: str, choices: Iterable[str], listing: str | None = None) -> UserError:
    """Return the error for a word that is not among the choices. It names the nearest ones and lists them all.

    Args:
        kind: what the word should be, for example `scheduler`.
        word: as typed.
        choices: the known words.
        listing: replaces the list, which may be too long.
    """
    known = list(choices)
    subject = kind.partition(" ")[0]
    code = f"{subject}-unknown" if subject in ("field", "flag", "option") else "choice-unknown"
    near = " or ".join(f"'{name}'" for name in nearest(word, known))
    word = short(word)
    what = "fields" if kind.startswith("field") else "choices"
    listing = listing or (f"the {what} are {', '.join(known)}" if known else "it has none")
    return UserError(
        code, f"unknown {kind} '{word}'" + (f", did you mean {near}? ({listing})" if near else f": {listing}")
    )


class RowError(UserError):
    """A mistake that shows in some rows of a batch: the message names their prompts.

    Attributes:
        rows: the rows (from 0) it happened to.
        prompts: the numbers (from 1) of their prompts.
    """

    def __init__(self, code: str, template: str, rows: list[int], prompts: list[int] | None = None):
        """Put the numbers of the prompts, by default those of the rows, in place of `{prompts}` in the template."""
        numbers = sorted({row + 1 for row in rows} if prompts is None else {*prompts})
        named = f"prompt{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
        super().__init__(code, template.replace("{prompts}", named))
        self.template, self.rows, self.prompts = template, rows, numbers

    def numbered(self, prompts: Sequence[int]) -> "RowError":
        """The same error where row i belongs to the prompt number `prompts[i]`, from 1."""
        return RowError(self.code, self.template, self.rows, [prompts[row] for row in self.rows])


class NotFiniteError(UserError):
    """The model, or a guide that rewrote its logits, returned NaN, an infinite logit or no finite one.

    Attributes:
        step: the step (from 1) at which it happened.
        rows: the prompts (from 1) it happened to.
        state: the loop's state, in which nothing of that step was committed for those rows.
        result: what was done until then.
    """

    state: Any = None
    result: Any = None

    def __init__(self, step: int, rows: list[int]):
        which = ", ".join(map(str, rows))
        super().__init__(
            "not-finite",
            f"The model or a guide returned NaN or infinite logits at step {step} for prompt {which}: generation"
            " stopped there. Check the weights, the dtype (float16 overflows where bfloat16 does not) and your guides.",
        )
        self.step, self.rows = step, rows
