"""Decisions by the figures of `campaign.py`: a limit each, and what to do on either side of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

Measured = Mapping[str, float]  # "stage: figure" to its value


@dataclass(frozen=True)
class Rule:
    """A figure and its limit.

    figure: in words
    value: of what was measured; KeyError: its stage has not been
    most: the limit
    above, within: what to do if the figure is above it, and if not
    """

    figure: str
    value: Callable[[Measured], float]
    most: float
    above: str
    within: str


RULES = [
    Rule("a step of one row, over its floor by reading", lambda it: it["step: over read"], 1.25,
         "find out where the time goes: `products`, `timeline`", "leave batch 1; look at `batches` and the GPU tests"),
    Rule("what is outside the model, share of a step", lambda it: it["step: outside"], 0.03,
         "look at `compiled`: the small operations of the engine are worth compiling", "leave the engine's operations"),
    Rule("LLaDA's loop without a cache, over ours", lambda it: it["uncached: speed"], 4.0,
         "claim it, with the GPU's name and the sizes of the line `uncached`", "claim nothing; read `timeline` first"),
    Rule("a loop with the dual cache, over ours", lambda it: it["dual: speed"], 1.0,
         "say how much in docs/kernels.md", "find the error: the loop does more work in the same forwards"),
    Rule("products of 32 rows by the library, over their floor", lambda it: it["products: 32 rows over floor"], 1.08,
         "try the tiles of stage `tiles`", "keep the library; prefetch the next weight if gaps are long"),
    Rule("the kernel's products of 32 rows, over the library's", lambda it: it["products: kernel over library"], 0.95,
         "keep the library", "use the kernel for up to 64 rows"),
    Rule("the best tiles' products, over the library's", lambda it: it["tiles: best over library"], 0.97,
         "keep the tiles", "use these tiles"),
    Rule("small kernels and gaps of a step, ms", lambda it: it["timeline: small and gaps ms"], 0.7,
         "prefetch the next weight into the cache, then programmatic dependent launch", "leave the small kernels"),
    Rule("the host's waits under a threshold, share of the time", lambda it: it["timeline: waits"], 0.02,
         "send the next step before the host knows its size", "nothing to gain from sending steps ahead"),
    Rule("the head of 16 rows, share of the bandwidth of reading", lambda it: it["head: lowest"], 0.85,
         "leave the head", "try 128 or 256 of the width at once, and 3 or 4 stages"),
    Rule("16 rows of 32, over the floor by reading", lambda it: it["batches: 16 x 32 over read"], 1.25,
         "profile that size: arithmetic is its limit, not memory", "leave batch 16"),
    Rule("a step of 256 columns over one of 8", lambda it: it["windows: 1 x 256 ms"] / it["windows: 1 x 8 ms"], 1.3,
         "advise shorter blocks for one row", "advise blocks as long as answers allow"),
    Rule("a step with 8-bit weights, over one of bfloat16", lambda it: it["int8: ms"] / it["step: ms"], 0.75,
         "delete the kernel of 8-bit weights", "leave the kernel of 8-bit weights"),
    Rule("drafts that are free (a tenth longer at most)", lambda it: it["drafts: free"], 3.0,
         "keep the default of four", "make that number the default of drafting on this GPU"),
    Rule("batch after batch, over in flight", lambda it: it["in_flight: static over in flight"], 1.1,
         "say so in docs/architecture.md", "profile the admission of rows: places that are free cost nothing yet"),
    Rule("a compiled step, over one that is not", lambda it: it["compiled: ms"] / it["step: ms"], 0.97,
         "do not advise `compile=step`", "advise `compile=step`"),
]  # fmt: skip


def decisions(measured: Measured) -> Iterator[tuple[Rule, float, str]]:
    """Yield the decisions by the measured figures: rule, value, what to do."""
    for rule in RULES:
        try:
            value = rule.value(measured)
        except KeyError:
            continue
        yield rule, value, rule.above if value > rule.most else rule.within
