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
ALWAYS = "all rounds verified"
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

    def compare(self, rule: Settings, lengths: Sequence[int], *caches: object) -> tuple[bool, list[str]]:
        """Return whether any answer differs from one token after another, and a cell for each block length."""
        wrong, cells = False, []
        for length in lengths:
            tokens, forwards = self.decode(rule, length, *caches)
            differ = int((tokens != self.alone).any(1).sum())
            wrong |= differ > 0
            cells.append(f"{differ}, {forwards:.1f}")
        return wrong, cells

    def linear(self) -> Iterator[tuple[bool, list[str]]]:
        """Yield the lines of linear_spec: none may differ. `blocks.length` counts the last position, too."""
        for threshold in THRESHOLDS:
            rule = {"name": "linear_spec", "threshold": threshold}
            wrong, cells = self.compare(rule, [length + 1 for length in LENGTHS], "none", "block_causal")
            yield wrong, [f"`linear_spec`, `threshold={threshold:g}`", *cells]

    def rows(self) -> Iterator[tuple[bool, list[str]]]:
        """Yield the lines of s2d2: an answer may differ only where some rounds are not verified."""
        caches = [{"name": "block_causal", "token_causal": True, "store_pass": store} for store in STORES]
        for name, policy in POLICIES.items():
            differ, cells = self.compare({"name": "s2d2", **policy}, LENGTHS, *caches)
            yield name == ALWAYS and differ, [f"`s2d2`, {name}", *cells]


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
    work = [*Subject("s2d2", options.prompts).rows(), *Subject("linear_spec", options.prompts).linear()]
    text = content(options.prompts, [cells for _, cells in work])
    files.write(options.docs, markdown.fill(markdown.read(options.docs, SECTION), SECTION, text))
    print(text)
    return int(any(wrong for wrong, _ in work))


def content(count: int, rows: Sequence[Sequence[str]]) -> str:
    """What the document's section contains."""
    about = (
        f"Of {count} greedy answers, those that differ from one token after another, and forwards for {CANVAS} tokens"
        f" ({', '.join(CHECKPOINTS.values())}; float64):"
    )
    head = ["", *(f"blocks of {length}" for length in LENGTHS)]
    return "\n\n".join([about, markdown.table(head, rows), f"Made by `{COMMAND}`."])


if __name__ == "__main__":
    sys.exit(main())
