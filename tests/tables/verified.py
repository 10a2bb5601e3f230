"""Checks that S2D2 where it verifies all, and linear_spec, decode one token after another; figures of docs/drafting.md.

`python -m tests.tables.verified` takes some minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

import torch

from benchmarks.options import positive
from dllm_sampler.cli.terminal import Parser, command
from dllm_sampler.host import files
from dllm_sampler.sampler import Sampler
from tests.tables import markdown
from tests.tables.drafting import PAGE, TINY

SECTION = "verified"
COMMAND = "python -m tests.tables.verified"
CANVAS, BATCH = 32, 50
Settings = Mapping[str, object]
CHECKPOINTS = {"s2d2": "tiny-sdar", "linear_spec": "tiny-nemotron-labs-diffusion"}
LENGTHS = (4, 16)
THRESHOLDS = (0.0, 0.5)
STORES = ("ride", "separate")
ALWAYS = "all"
POLICIES: dict[str, Settings] = {
    ALWAYS: {},
    "`score_threshold`": {"policy": "score_threshold"},
    "`contextual_bandit_ucb`": {"policy": "contextual_bandit_ucb"},
}


class Subject:
    """A tiny checkpoint in float64 and random prompts; what it answers at block size 1."""

    def __init__(self, scheduler: str, count: int):
        self.denoiser = Sampler.from_pretrained(str(TINY / CHECKPOINTS[scheduler]), dtype="float64").denoiser
        random, spec = Random(count), self.denoiser.spec
        plain = [one for one in range(spec.vocab_size) if one not in (spec.mask_id, *spec.eos_ids, spec.pad_id)]
        self.prompts = [random.choices(plain, k=random.randint(1, 40)) for _ in range(count)]
        self.alone, _ = self.decode("fixed", 1, "block_causal")

    def decode(self, scheduler: object, length: int, *caches: object) -> tuple[torch.Tensor, float]:
        """Answers `[N, CANVAS]` of blocks of `length`, greedy, batches by turns under the caches; forwards of each."""
        found, forwards = [], 0
        for turn, start in enumerate(range(0, len(self.prompts), BATCH)):
            cache, blocks = caches[turn % len(caches)], {"name": "fixed", "length": length}
            sampler = Sampler(self.denoiser, scheduler=scheduler, cache=cache, blocks=blocks, stop="none")
            result = sampler.generate(self.prompts[start : start + BATCH], max_new_tokens=CANVAS)
            found.append(result.tokens)
            forwards += int(result.nfe.sum())
        return torch.cat(found), forwards / len(self.prompts)

    def linear(self) -> Iterator[tuple[bool, list[str]]]:
        """Of the table of linear_spec: whether the answers differ from those of one token after another."""
        for length in LENGTHS:
            for threshold in THRESHOLDS:
                rule = {"name": "linear_spec", "threshold": threshold}
                tokens, forwards = self.decode(rule, length + 1, "none", "block_causal")
                differ = int((tokens != self.alone).any(1).sum())
                yield differ > 0, [str(length), str(threshold), str(len(tokens)), str(differ), f"{forwards:.1f}"]

    def rows(self) -> Iterator[tuple[bool, list[str]]]:
        """Of the table: whether each policy at each block length must be, and is, the model at block size 1."""
        for length in LENGTHS:
            for name, policy in POLICIES.items():
                caches = [{"name": "block_causal", "token_causal": True, "store_pass": store} for store in STORES]
                tokens, forwards = self.decode({"name": "s2d2", **policy}, length, *caches)
                differ = int((tokens != self.alone).any(1).sum())
                wrong = name == ALWAYS and differ > 0
                yield wrong, [str(length), name, str(len(tokens)), str(differ), f"{forwards:.1f}"]


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog=COMMAND,
        description="Compare S2D2 and linear_spec with decoding one token after another and write docs/drafting.md.",
        epilog="Exit status: 0; 1: some row differs that must not; 2: a mistake in the arguments",
    )
    add = parser.add_argument
    add("--prompts", type=positive, default=500, metavar="N", help="random prompts (500)")
    add("--threads", type=positive, default=1, metavar="N", help="of torch (1)")
    add("--docs", type=Path, default=PAGE, metavar="FILE", help="document whose figures are replaced")
    return parser.parse_args(words)


@command(COMMAND)
def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = parse(words)
    markdown.read(options.docs, SECTION)  # a mistake shows before the work
    torch.set_num_threads(options.threads)
    work = list(Subject("s2d2", options.prompts).rows())
    linear = list(Subject("linear_spec", options.prompts).linear())
    text = content(options.prompts, [cells for _, cells in work], [cells for _, cells in linear])
    files.write(options.docs, markdown.fill(markdown.read(options.docs, SECTION), SECTION, text))
    print(text)
    return int(any(wrong for wrong, _ in (*work, *linear)))


def content(count: int, rows: Sequence[Sequence[str]], linear: Sequence[Sequence[str]]) -> str:
    """What stands in the document."""
    head = ("blocks of", "rounds that are verified", "rows compared", "differ", "forwards")
    about = (
        "Greedy answers of `scheduler=s2d2 cache.token_causal=true` against those of blocks of one token,"
        f" {CHECKPOINTS['s2d2']}, {count} random prompts of 1 to 40 tokens, ragged batches of {BATCH} that take both"
        f" store passes by turns, {CANVAS} tokens, float64. At block size 1 an answer takes {CANVAS} forwards. The"
        " weights are random, so the number of forwards says nothing of a trained model."
    )
    other = (
        "Greedy answers of `scheduler=linear_spec` against those of blocks of one token, autoregressive decoding, on as"
        f" many such prompts for {CHECKPOINTS['linear_spec']}, whose weights were trained; caches `none` and"
        " `block_causal` by turns."
    )
    published = ("published `block_length`", "`threshold`", *head[2:])
    tables = [about, markdown.table(head, rows), other, markdown.table(published, linear), f"Made by `{COMMAND}`."]
    return "\n\n".join(tables)


if __name__ == "__main__":
    sys.exit(main())
