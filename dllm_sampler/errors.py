"""The exceptions of this package and their codes. A message says what is wrong, then what to do.

A code without a sentence below explains itself.

**Options and settings**

- `field-unknown`: A plug-in or model has no such setting.
- `choice-unknown`: The value is not one of the choices, for example of a scheduler, a task, a metric or a dtype.
- `choice-taken`: A YAML file of yours has the name of a packaged choice.
- `option-repeated`: An option that takes one value has several.
- `option-ambiguous`: Several plug-ins have the setting.
- `option-not-applicable`: The option has no effect, or cannot work, with the other options.
- `option-syntax`: The word, pattern or template cannot be read.
- `option-reserved`: The command sets this itself.
- `config-invalid`: A YAML file of yours, or the configuration composed with it, cannot be used.
- `target-invalid`: `_target_` does not name a class of this kind.
- `candidates-identical`: Candidates are compared, but without a temperature they are identical.
- `option-unknown`, `flag-unknown`, `option-missing`, `option-type`, `option-range`, `options-conflict`.

**Prompts and given tokens**

- `messages-invalid`: Chat messages need the texts `role` and `content`.
- `mask-token-given`: A prompt, a given token or an answer to score is or contains the mask token.
- `length-mismatch`: A list has another length than the list of prompts.
- `context-exceeded`: Prompt and answer are longer than the model's context or `max_length`.
- `given-unsupported`: The model or the scheduler does not support given tokens at these positions.
- `gap-unexpected`: A prompt has gaps, which another option excludes.
- `gap-without-text`: A text to fill has only a gap.
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
- `plugin-needs`: A plug-in reads a statistic that is not in its `needs`, or that does not exist.
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

- `hub-unreachable`: The model or the data set cannot be downloaded from the hub.
- `model-invalid`: The object is not a model that can be sampled from.
- `architecture-unknown`: No family has this architecture.
- `checkpoint-config-invalid`: A file of the checkpoint has a field that is missing or impossible.
- `checkpoint-tensors`: Tensors are missing, left over or of another shape.
- `checkpoint-pickled`: The weights are pickle files, which are not loaded.
- `code-untrusted`: The checkpoint's tokenizer needs code of its own, which is not run by default.
- `tokenizer-unsupported`: A guide that judges the form of answers does not support the tokenizer.
- `mask-token-invalid`: The mask token is not a token id, or is the end-of-text token.
- `device-map-invalid`: `device_map` does not place each layer on a device.
- `filter-invalid`: A file is not a filter of `scheduler=learn2pd`.
- `verifier-unsupported`: The verifier's attention does not reach all earlier tokens.
- `export-unsupported`: The model cannot be written in this format.
- `model-not-found`, `model-gated`, `checkpoint-unsupported`, `checkpoint-incomplete`, `checkpoint-damaged`,
  `tokenizer-missing`, `tokenizer-invalid`, `tokenizer-differs`, `vocabulary-differs`, `mask-token-missing`,
  `end-token-missing`, `device-missing`, `adapter-invalid`, `adapter-incompatible`, `adapter-unsupported`,
  `filter-incompatible`, `model-not-scorable`, `model-not-trainable`.

**Files and functions**

- `file-name`: A file's name has an ending of another format, or none.
- `folder-invalid`: A path is a file, but must be a folder.
- `version-differs`: Another version of this package wrote the file.
- `package-missing`: A package is not installed, or is too old.
- `path-invalid`, `file-missing`, `file-unreadable`, `file-invalid`, `file-overwrite`, `file-locked`,
  `file-not-written`, `json-invalid`, `function-missing`, `function-invalid`, `function-failed`, `function-result`.

**Runs**

- `run-unfinished`: The folder has an unfinished run, and `resume` is not set.
- `run-failed`: Runs of a sweep ended with an error in the code.
- `runs-refused`: No run of a sweep can start.
- `samples-missing`: No sample can be reported, or the data is empty.
- `baseline-failed`: The baseline of a search, one token per step, cannot run or has score 0.
- `task-result`: A task of your own returned wrong samples or grades.
- `trace-not-scorable`: A trace's states cannot be rebuilt.
- `trajectories-unsupported`: Trajectories of these plug-ins cannot be scored.
- `run-finished`, `run-differs`, `run-damaged`, `worker-killed`, `example-invalid`, `example-too-long`,
  `nothing-to-learn`, `trace-invalid`.
"""

import json
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

LONGEST_WORD = 400  # most characters of a word that a message quotes without a cut
LONGEST = 4000  # characters of a message


class Sentence(Exception):
    """An exception whose message is cut to a bounded length and is one line."""

    def __init__(self, message: object = "") -> None:
        super().__init__(bounded(str(message)))


class UserError(Sentence, ValueError):
    """A mistake in the user's input. The message says what is wrong, where, and what to do.

    Attributes:
        code: the kind of mistake, for programs, for example `prompt-empty`. The module's docstring lists all codes. The
            words of a message may change, but its code does not.
    """

    def __init__(self, code: str, message: object):
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a constructor for pickle that does not depend on the arguments of a subclass."""
        return Exception.__new__, (type(self), *self.args), self.__dict__


FAULTS = ("plugin-result", "plugin-needs")  # codes for a plug-in that breaks its contract


class NotWrittenError(UserError):
    """A file cannot be written, for example because the disk is full. Its old content is still there."""

    def __init__(self, message: object):
        super().__init__("file-not-written", message)


class FallbackWarning(Sentence, RuntimeWarning):
    """A warning that a slower way with the same results is used. The message has the reason."""


class NoEffectWarning(Sentence, UserWarning):
    """A warning that an input has no effect, or less than it says. The message names the input."""


class RandomScoreWarning(UserWarning):
    """A warning that scores are random, because the model is in train mode with dropout."""


class UntrainedWarning(UserWarning):
    """A warning that a setting uses the model in a way that it was not trained for. The message names the setting."""


def installing(extra: str) -> str:
    """Return the command that installs an extra of this package, for an error about a missing package.

    The package is on no index, so the command is one for a clone of the repository, as in README.md.
    """
    return f"pip install -c constraints.txt -e '.[{extra}]' (in a clone of dllm_sampler)"


def bounded(text: str) -> str:
    """Return a message as one line. The middle of long words, and of a long message, is left out."""
    text = re.sub(r"\s*[\r\n]\s*", " ", text)  # as in the `repr` of a tensor
    text = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: f"{word[0][:60]}...{word[0][-20:]}", text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 4 :]}"


def counted(number: int, noun: str) -> str:
    """Return a number with a noun in its singular or plural, for example `1 sample` or `2 samples`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error without its full stop, or the name of its class if it is empty.

    For an error in YAML, returns the problem and its line.
    """
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"{getattr(error, 'problem', None) or 'it is not YAML'} in line {mark.line + 1}"
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return short(said.rstrip("."), 300)


def short(text: str, most: int = 200) -> str:
    """Shorten a text of more than `most` characters to its beginning and its length."""
    return text if len(text) <= most else f"{text[: most // 2]}... ({len(text)} characters)"


def as_typed(value: object, exact: bool = False) -> str:
    """Return a value as it is typed in a setting, for example `null` or `[1, 'a']`. A long one is shortened.

    Args:
        exact: keep 2.0. By default it is 2, since a type check may have made it of a typed 2.
    """
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 and not exact:
        return str(int(value))
    if isinstance(value, list | tuple):
        return short(f"[{', '.join(as_typed(one, exact) for one in value)}]")
    if isinstance(value, dict):
        return short("{" + ", ".join(f"{key}: {as_typed(one, exact)}" for key, one in value.items()) + "}")
    return short(repr(value))


def invalid(name: str, value: object, way: str, code: str = "option-range", exact: bool = False) -> UserError:
    """Return the error for a value that a setting cannot have.

    Args:
        way: what to do, without the full stop.
        exact: as for `as_typed`, for a setting that takes 2 and not 2.0.
    """
    return UserError(code, f"{name}={as_typed(value, exact)} is invalid. {way}.")


def nearest(word: str, names: Iterable[str], most: int = 2, cutoff: float = 0.6) -> list[str]:
    """Return the names that begin with a word, or else those with a similar spelling."""
    known, word = list(dict.fromkeys(names)), word[:200]
    short_for = sorted((name for name in known if len(word) > 1 and name.startswith(word)), key=len)
    return short_for[:most] or get_close_matches(word, known, most, cutoff)


def unknown(kind: str, word: str, choices: Iterable[str], listing: str | None = None) -> UserError:
    """Return the error for a word that is not among the choices. Its message has similar choices, and all of them.

    Args:
        kind: kind of the word, for example `scheduler` or `field of cache=dual`.
        word: the word as typed.
        choices: the known words.
        listing: a sentence, without its full stop, to use instead of a long list of all choices.
    """
    known = list(choices)
    subject = kind.partition(" ")[0]
    code = f"{subject}-unknown" if subject in ("field", "flag", "option") else "choice-unknown"
    near = " or ".join(f"'{name}'" for name in nearest(word, known))
    word = short(word)
    what = "fields" if kind.startswith("field") else "choices"
    empty = f"It has no fields, so remove '{word}'" if what == "fields" else f"There is no {kind}"
    several = f"The {what} are" if len(known) > 1 else f"The only {what[:-1]} is"
    listing = listing or (f"{several} {', '.join(known)}" if known else empty)
    owner = kind.removeprefix("field of ")
    wrong = f"unknown {kind} '{word}'" if owner == kind else f"{owner} has no field '{word}'"
    return UserError(code, f"{wrong}. {f'Did you mean {near}? ' * bool(near)}{listing}.")


class RowError(UserError):
    """A mistake in some rows of a batch. The message names their prompts.

    Attributes:
        rows: numbers of these rows, from 0.
        prompts: numbers of their prompts, from 1.
    """

    def __init__(self, code: str, template: str, rows: list[int], prompts: list[int] | None = None):
        """Create the error. In the template `{prompts}` is replaced by the prompts' numbers, by default the rows'."""
        numbers = sorted({row + 1 for row in rows} if prompts is None else {*prompts})
        named = f"prompt{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
        super().__init__(code, template.replace("{prompts}", named))
        self.template, self.rows, self.prompts = template, rows, numbers

    def numbered(self, prompts: Sequence[int]) -> "RowError":
        """Return the same error with `prompts[i]` as the number, from 1, of row i's prompt."""
        return RowError(self.code, self.template, self.rows, [prompts[row] for row in self.rows])


class NotFiniteError(UserError):
    """The model or a guide returned logits with NaN or +infinity, or without a finite one.

    Attributes:
        step: number of the step, from 1.
        rows: numbers of the prompts, from 1.
        state: the loop's state. Nothing of that step was committed in those rows.
        result: the answers until then.
    """

    state: Any = None
    result: Any = None

    def __init__(self, step: int, rows: list[int]):
        which = f"prompt{'s' * (len(rows) > 1)} {', '.join(map(str, rows))}"
        super().__init__(
            "not-finite",
            f"The model or a guide returned NaN or infinite logits at step {step} for {which}: generation"
            " stopped there. Check the weights, the dtype (float16 overflows where bfloat16 does not) and your guides.",
        )
        self.step, self.rows = step, rows
