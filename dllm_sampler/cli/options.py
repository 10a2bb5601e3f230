"""The root of `conf/sample.yaml`, checked: everything that is not a plug-in."""

from dataclasses import dataclass
from pathlib import Path

from dllm_sampler.cli import threads
from dllm_sampler.config import BATCHING, DTYPES, MOST_ROWS
from dllm_sampler.errors import UserError, unknown
from dllm_sampler.host.paths import expanded

OTHER_FORMATS = (".csv", ".tsv", ".parquet", ".xlsx", ".html", ".md", ".yaml", ".yml")
# What changes no sample, or only says where samples go: a file that was begun with others may be continued.
ELSEWHERE = (
    "output", "resume", "prompts_file", "stream", "stream_delay", "batch_size", "batching", "poll_every", "device",
    "threads",
)  # fmt: skip
LARGEST = 10**18 - 1  # of a seed: a prompt's own, seed + i, must still be an int64


@dataclass(frozen=True)
class Options:
    """The options of `dllm-sample` besides the plug-ins; `conf/sample.yaml` explains each field."""

    max_new_tokens: int = 128
    samples: int = 1
    prefix: str | None = None
    suffix: str | None = None
    infill: str | None = None
    block_length: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stop_strings: list[str] | str | None = None
    stop_token_ids: list[int] | int | None = None
    seed: int = 0
    forms: list[int] | int | None = None
    batch_size: int = 8
    batching: str = "in_flight"
    max_steps: int | None = None
    poll_every: int = 1
    target: str | None = None
    draft_length: int = 32
    draft_scheduled: bool = False
    separator: str | None = None
    device: str = "auto"
    threads: int | str = "auto"
    dtype: str = "auto"
    backend: str = "auto"
    cuda_graph: bool | str = False
    compile: bool | str = False
    compat: bool = False
    chat: bool = False
    prompts_file: str | None = None
    output: str | None = None
    resume: bool = False
    stream: bool = False
    stream_delay: float = 0.15

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "samples", "block_length", "batch_size", "max_steps", "poll_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} should be at least 1, not {value}")
        for name in ("prompts_file", "output", "target"):
            if (path := getattr(self, name)) not in (None, "-"):
                expanded(name, path)
        threads.check(self.threads)
        if self.resume and self.output is None:
            raise UserError("resume=true continues a file of samples. Name it as output=FILE.jsonl.")
        if self.batching not in BATCHING:
            raise UserError(f"batching should be {' or '.join(BATCHING)}, not {self.batching!r}")
        if self.dtype.removeprefix("torch.") not in DTYPES:
            raise unknown("dtype", self.dtype, DTYPES)
        if self.output == "-":
            raise UserError("output=- would write a file named -. For standard output say output=/dev/stdout.")
        if self.output is not None and (suffix := Path(self.output).suffix.lower()) in OTHER_FORMATS:
            raise UserError(
                f"output={self.output}: samples are written as JSON lines, not as {suffix[1:].upper()}; name a file"
                " that ends in .jsonl"
            )
        for name in ("samples", "batch_size"):
            if getattr(self, name) > MOST_ROWS:
                raise UserError(f"{name} should be at most {MOST_ROWS}, not {getattr(self, name)}")
        if not -LARGEST <= self.seed <= LARGEST:
            raise UserError(f"seed should have at most 18 digits, not {len(str(abs(self.seed)))}")
        if not 0 <= self.stream_delay <= 60:
            raise UserError(f"stream_delay should be between 0 and 60 seconds, not {self.stream_delay}")
