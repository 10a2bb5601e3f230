"""The exceptions a user may meet, and their codes. A message says what is wrong, then what to do.

A code without a sentence says itself what is wrong.

**Options and settings**

- `field-unknown`: A plug-in or model has no such setting.
- `choice-unknown`: The value is none of the choices: no such scheduler, task, metric, dtype ...
- `choice-taken`: A file of yours has the name of a packaged choice.
- `option-repeated`: An option is given several values where it takes one.
- `option-ambiguous`: Several plug-ins have the setting.
- `option-not-applicable`: The option does nothing, or cannot work, beside the others.
- `option-syntax`: The word, pattern or template cannot be read.
- `option-reserved`: The command sets this itself.
- `config-invalid`: A YAML file of yours, or what Hydra composed of it, cannot be used.
- `target-invalid`: `_target_` does not name a class of this kind.
- `candidates-identical`: Candidates are compared, and nothing is drawn.
- `option-unknown`, `flag-unknown`, `option-missing`, `option-type`, `option-range`, `options-conflict`.

**Prompts and given tokens**

- `messages-invalid`: Chat messages need the texts `role` and `content`.
- `mask-token-given`: A prompt, a given token or an answer to score has the mask token.
- `length-mismatch`: One list has another length than the list of prompts.
- `context-exceeded`: Prompt and answer are longer than the model's context or `max_length`.
- `given-unsupported`: This model or scheduler cannot serve given tokens where they are.
- `gap-unexpected`: A text with gaps was given where none can be filled.
- `gap-without-text`: There is nothing but a gap.
- `answers-missing`: The list of answers to stack is empty.
- `answer-refused`: An answer has no tokens, because its prompt was refused.
- `prompt-missing`, `prompt-empty`, `prompt-type`, `text-invalid`, `text-outside-vocabulary`,
  `token-outside-vocabulary`, `answer-empty`, `answer-too-long`, `nothing-to-generate`, `given-conflict`,
  `given-too-long`, `gap-missing`, `gap-invalid`, `span-invalid`, `chat-template-missing`, `chat-template-failed`.

**Combinations**

- `engine-unsupported`: SGLang or diffusers cannot run these plug-ins.
- `graph-unsupported`: Steps cannot be recorded as a CUDA graph.
- `compile-unsupported`: The model or kernels cannot be compiled.
- `ranks-unsupported`: Ranks that share weights cannot answer these prompts.
- `limits-unsupported`: The machine cannot limit the time and memory of programs.
- `processes-unsupported`: The command cannot run in several processes.
- `timesteps-missing`: `set_timesteps` was not called.
- `shape-mismatch`: A tensor has another shape than the block.
- `cache-in-use`: A cache that belongs to a generation was given as a setting.
- `plugin-result`: A plug-in returned something that does not fit the contract.
- `plugin-needs`: A plug-in reads a statistic that it does not ask for, or that does not exist.
- `plugin-not-saved`: A plug-in object cannot be written to a file of settings.
- `score-inexact`: The sampler has several paths to an answer, so that its likelihood is not exact.
- `not-finite`: The model or a guide returned NaN or infinite logits.
- `particles-incompatible`: Rows cannot be copied with this scheduler, cache or model.
- `plugins-incompatible`, `scheduler-incompatible`, `cache-incompatible`, `blocks-incompatible`, `stop-incompatible`,
  `guide-incompatible`.

**Forms**

- `form-not-regular`: A grammar nests, and no depth is given.
- `form-number`: The number of a prompt's form is missing or does not exist.
- `form-invalid`, `form-impossible`, `form-too-large`, `grammar-invalid`.

**Models**

- `hub-unreachable`: The hub does not deliver the model or the data set.
- `model-invalid`: The object is not a model that can be sampled from.
- `architecture-unknown`: No family has this architecture.
- `checkpoint-config-invalid`: A file of the checkpoint has a field that is missing or impossible.
- `checkpoint-tensors`: Tensors are missing, left over or of another shape.
- `checkpoint-pickled`: The weights are pickles.
- `code-untrusted`: The checkpoint needs code of its own.
- `tokenizer-unsupported`: The tokenizer cannot serve a form.
- `mask-token-invalid`: The mask token is not a token id, or is the end-of-text token.
- `device-map-invalid`: `device_map` does not place each layer on a device.
- `filter-invalid`: A file is not a filter.
- `verifier-unsupported`: The verifier does not see all tokens.
- `export-unsupported`: The model cannot be written in this format.
- `model-not-found`, `model-gated`, `checkpoint-unsupported`, `checkpoint-incomplete`, `checkpoint-damaged`,
  `tokenizer-missing`, `tokenizer-invalid`, `tokenizer-differs`, `vocabulary-differs`, `mask-token-missing`,
  `end-token-missing`, `device-missing`, `adapter-invalid`, `adapter-incompatible`, `adapter-unsupported`,
  `filter-incompatible`, `model-not-scorable`, `model-not-trainable`.

**Files and functions**

- `file-name`: A file's name does not say its format, or says another one.
- `folder-invalid`: A folder is needed, and there is a file.
- `version-differs`: Another version of this package wrote the file.
- `package-missing`: A package is not installed, or is too old.
- `path-invalid`, `file-missing`, `file-unreadable`, `file-invalid`, `file-overwrite`, `file-locked`,
  `file-not-written`, `json-invalid`, `function-missing`, `function-invalid`, `function-failed`, `function-result`.

**Runs**

- `run-unfinished`: The folder holds an unfinished run, and nothing says to resume it.
- `run-failed`: Runs of a sweep ended with an error in the code.
- `runs-refused`: No run of a sweep can start.
- `samples-missing`: No sample can be reported, or the data is empty.
- `baseline-failed`: One token per step, which a search compares with, cannot run or scores nothing.
- `task-result`: A task of your own returned wrong samples or grades.
- `trace-not-scorable`: A trace's states cannot be rebuilt.
- `trajectories-unsupported`: Trajectories of these plug-ins cannot be scored.
- `run-finished`, `run-differs`, `run-damaged`, `worker-killed`, `example-invalid`, `example-too-long`,
  `nothing-to-learn`, `trace-invalid`.
"""

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
        code: the kind of mistake, for programs, for example `prompt-empty`. The module lists them. The words of a
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
        kind: what the word should be, for example `scheduler` or `field of cache=dual`.
        word: as typed.
        choices: the known words.
        listing: a sentence without its full stop in place of the list, which may be too long.
    """
    known = list(choices)
    subject = kind.partition(" ")[0]
    code = f"{subject}-unknown" if subject in ("field", "flag", "option") else "choice-unknown"
    near = " or ".join(f"'{name}'" for name in nearest(word, known))
    word = short(word)
    what = "fields" if kind.startswith("field") else "choices"
    listing = listing or (f"The {what} are {', '.join(known)}" if known else "It has none")
    owner = kind.removeprefix("field of ")
    wrong = f"unknown {kind} '{word}'" if owner == kind else f"{owner} has no field '{word}'"
    return UserError(code, wrong + (f", did you mean {near}? " if near else ". ") + f"{listing}.")


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
