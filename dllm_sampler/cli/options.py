"""The options of `dllm-sample`: everything that is not a plug-in."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dllm_sampler import options
from dllm_sampler.core.checks import check_count, check_number
from dllm_sampler.errors import UserError
from dllm_sampler.host.paths import expanded
from dllm_sampler.options import MOST_ROWS, option

OTHER_FORMATS = (".csv", ".tsv", ".parquet", ".xlsx", ".html", ".md", ".yaml", ".yml")
# Options that change no sample. resume=true may continue a file that was begun with other values of these.
ELSEWHERE = (
    "output", "resume", "prompts_file", "stream", "stream_delay", "batch_size", "batching", "device",
    "threads",
)  # fmt: skip


def _check_path(name: str, path: str | None) -> None:
    if path not in (None, "-"):
        expanded(name, path)


@dataclass(frozen=True, kw_only=True)
class Options(options.Options):
    """The options of `dllm-sample`, besides the plug-ins."""

    max_new_tokens: int = option(128, "length of the answer's canvas, in tokens", check_count)
    samples: int = option(
        1,
        "answers to each prompt; drawn without a bias to likely ones by scheduler=random_order or leftright",
        partial(check_count, most=MOST_ROWS),
    )
    prefix: str | None = option(None, "text that the answer begins with")
    suffix: str | None = option(None, "text that the answer ends with, at max_new_tokens")
    infill: str | None = option(None, "the answer as a text with gaps: {gap:8} is 8 tokens")
    stop_strings: list[str] | str | None = option(
        None, "text, or a list, at which an answer ends; not part of it. It may be spelled as a special token"
    )
    forms: list[int] | int | None = option(
        None, "number of each prompt's form, from 0, or one number for all, if a guide has a list of forms"
    )
    target: str | None = option(
        None,
        "DEER: a causal LM, FOLDER or ORG/NAME, that verifies what the model drafts. Answers follow its distribution",
        _check_path,
    )
    draft_length: int = option(32, "tokens that the model drafts for the target in a round. 0 runs the target alone")
    draft_scheduled: bool = option(
        False, "draft with the scheduler, in several forwards instead of one. Excludes temperature"
    )
    separator: str | None = option(None, "token after the masks that the drafter was trained with")
    chat: bool = option(False, "send each prompt as a user's message, through the model's chat template")
    prompts_file: str | None = option(
        None, 'text lines, or FILE.jsonl with "prompt" or "messages" in each, and "form"; - reads a pipe', _check_path
    )
    output: str | None = option(
        None, "FILE.jsonl for text, tokens, NFE, tokens per forward, step map and time of each sample", _check_path
    )
    resume: bool = option(False, "skip the samples that output=FILE has from an interrupted run")
    stream: bool = option(False, "watch the canvas being denoised")
    stream_delay: float = option(
        0.15,
        "least seconds that a step stays on the screen",
        partial(check_number, what="a number of seconds", most=60),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume and self.output is None:
            raise UserError("option-missing", "resume=true continues a file of samples. Name it as output=FILE.jsonl.")
        if self.output == "-":
            raise UserError("file-name", "output=- would write a file named -. Use output=/dev/stdout.")
        if self.output is not None and (suffix := Path(self.output).suffix.lower()) in OTHER_FORMATS:
            raise UserError("file-name", f"output={self.output}: {suffix} is not JSON lines. Name a .jsonl file.")
