"""What a decision costs in SGLang's loop, against the plainest rule there is.

    python benchmarks/block_rule.py                                    # the vocabulary of LLaDA2, 4 rows, blocks of 32
    python benchmarks/block_rule.py --schedulers threshold,klass --repeats 15 --json block_rule.json

Each side makes the third step of a block on equal logits, which lie where those of the first steps lay, as a CUDA graph
has it: `step` of `DllmSampler` with each scheduler, and `plain`, LowConfidence's rule written in six lines of torch.
Where SGLang is installed its own class runs too. Sides take turns in each repeat; figures are medians of the repeats
with their range, the ratio that of the repeat's `plain`. One thread, and by default the process's own clock. No forward
is in these times, and no GPU has been measured: there a step is launches, and one read.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from circumstances import circumstances, report
from options import add_json, add_smoke, among, command, parsed, parser
from rich.table import Table
from scene import Scene
from step_overhead import CLOCKS
from torch import Tensor

from dllm_sampler import config
from dllm_sampler.errors import UserError
from dllm_sampler.eval.arguments import positive
from dllm_sampler.integrations.sglang import BlockAlgorithm

STEPS = 3  # of which the last is measured: what a scheduler keeps has its place then
SCHEDULERS = ["threshold", "localleap", "editing", "entropy_bound", "klass"]


class Base:
    """What of SGLang's base class a step needs."""

    def __init__(self, config: Any):
        self.block_size, self.mask_id, self.fdfo = config.block_size, config.mask_id, config.first_done_first_out_mode


class Ours(BlockAlgorithm, Base):
    """`DllmSampler` without SGLang."""


class Plain(Base):
    """Take what is surer than a threshold, and the surest in any case."""

    def init_step_state(self, batch: Any) -> list[None]:
        return [None] * batch.batch_size

    def step(self, batch: Any, logits: Tensor, states: list[None]) -> list[bool]:
        ids = batch.input_ids.view(batch.batch_size, -1)
        noise, logits = ids == self.mask_id, logits.view(*ids.shape, -1)
        token = logits.argmax(-1)
        sure = logits.softmax(-1).gather(-1, token[..., None])[..., 0].masked_fill(~noise, -torch.inf)
        best = torch.zeros_like(noise).scatter(1, sure.argmax(1, keepdim=True), True)
        chosen = noise & ((sure > 0.9) | (best & ~(sure > 0.9).any(1, keepdim=True)))
        batch.input_ids.copy_(torch.where(chosen, token, ids).flatten())
        return (~noise.any(1)).tolist()


@dataclass
class Row:
    """One side; seconds of a step, one per repeat."""

    name: str
    seconds: list[float] = field(default_factory=list)


def sides(names: Sequence[str], scene: Scene) -> dict[str, Any]:
    """The algorithms by name, the plain one first."""

    def given(settings: dict[str, object]) -> Any:
        return SimpleNamespace(
            algorithm_config=settings,
            block_size=scene.block,
            mask_id=scene.spec.mask_id,
            first_done_first_out_mode=True,
        )

    found: dict[str, Any] = {"plain": Plain(given({}))}
    try:
        theirs = import_module("sglang.srt.dllm.algorithm.low_confidence")
        found["sglang LowConfidence"] = theirs.LowConfidence(given({"threshold": 0.9}))
    except ImportError:
        pass
    return found | {name: Ours(given({"scheduler": name})) for name in names}


def last_step(algorithm: Any, scene: Scene, now: Callable[[], float]) -> float:
    """Seconds of the last of the first `STEPS` steps of new blocks."""
    assert scene.spec.mask_id is not None
    batch = SimpleNamespace(
        batch_size=scene.batch,
        input_ids=torch.full((scene.batch * scene.block,), scene.spec.mask_id),
        positions=torch.arange(scene.block).repeat(scene.batch),
        dllm_prompt_mask=None,
        rids=[str(row) for row in range(scene.batch)],
        sampling_info=None,
    )
    states = algorithm.init_step_state(batch)
    if any(getattr(one, "lost", False) for one in states):
        raise UserError("a scheduler here asks for the model's end token, and no model is here: leave eoser out")
    times = [now()] * 2
    for _ in range(STEPS):
        logits = scene.scratch.copy_(scene.logits).view(-1, scene.vocab)
        times = [now()]
        algorithm.step(batch, logits, states)
        times.append(now())
    return times[1] - times[0]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    it = parser(__doc__)
    add = it.add_argument
    names = among("scheduler", config.names("scheduler"))
    add("--schedulers", type=names, metavar="NAME,...", default=SCHEDULERS, help=f"default: {','.join(SCHEDULERS)}")
    add("--batch", type=positive, default=4, help="rows (default %(default)s)")
    add("--block", type=positive, default=32, help="positions of a block (default %(default)s)")
    add("--vocab", type=positive, default=157184, help="tokens of the vocabulary (default %(default)s)")
    add("--repeats", type=positive, default=9, help="steps of each side (default %(default)s)")
    add("--clock", choices=CLOCKS, default="cpu", help="cpu: the process's own seconds (default %(default)s)")
    add_json(it)
    add_smoke(it, "a tiny vocabulary, once: does it run?")
    return parsed(it, argv, batch=2, block=8, vocab=640, repeats=1)


def spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


@command
@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    torch.set_num_threads(1)
    scene = Scene(options.batch, options.block, options.vocab)
    found = sides(options.schedulers, scene)
    rows = [Row(name) for name in found]
    for repeat in range(options.repeats + 1):
        for row in rows:
            seconds = last_step(found[row.name], scene, CLOCKS[options.clock])
            row.seconds += [seconds] if repeat else []  # the first warms up
    table = Table(title="a step: median (lowest to highest) of the repeats")
    for name in ("side", "ms", "ratio to plain"):
        table.add_column(name, justify="left" if name == "side" else "right")
    for row in rows:
        ratios = [mine / its for mine, its in zip(row.seconds, rows[0].seconds, strict=True)]
        table.add_row(row.name, spread([1e3 * one for one in row.seconds], 1), spread(ratios, 2))
    about = circumstances(**{name: getattr(options, name) for name in ("clock", "batch", "block", "vocab", "repeats")})
    report(about, table, [asdict(row) for row in rows], options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
