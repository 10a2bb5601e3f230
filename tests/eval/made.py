"""Records made by hand: two configurations on two tasks."""

from collections.abc import Mapping
from typing import Any

from dllm_sampler.eval.records import Record
from dllm_sampler.eval.report.data import Comparison, Run, compare

HERE = {
    "dllm_sampler": "0",
    "commit": "c0ffee",
    "torch": "2",
    "python": "3",
    "packages": {},
    "device": "cpu",
    "processor": "a processor",
    "platform": "a platform",
}


def record(index: int = 0, **changes: Any) -> Record:
    """Four tokens on a canvas of six, in two forwards."""
    given: dict[str, Any] = {
        "index": index,
        "seed": index,
        "prompt": "copy: a, b",
        "text": "a b c",
        "scores": {"exact_match": 1.0},
        "complete": True,
        "prompt_tokens": 4,
        "canvas": 6,
        "answer": 4,
        "ended": True,
        "text_tokens": 3,
        "nfe": 2,
        "rows": 20,
        "commits": 6,
        "oracle_nfe": 1,
        "tokens": [5, 6, 7, 0, 0, 0],
        "pieces": ["a", " b", " c", "[EOS]", "[EOS]", "[EOS]"],
        "step_map": [0, 0, 1, 1, 0, -1],
        "confidence": [0.9, 0.8, 0.7, 1.0, 1.0, 0.0],
        "revisions": [],
        "seconds": 0.5,
        "batch": 2,
        "peak_memory": 2**20,
    }
    return Record(**{**given, **changes})


def run(
    records: list[Record],
    scheduler: str,
    operation: str = "copy",
    refused: str | None = None,
    others: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Run:
    """A run of these records; `fields` of the scheduler, `others` of the configuration."""
    about = {
        "schema": 2,
        "name": f"{scheduler}-{operation}",
        "choices": {
            "task": "mini",
            "model": "mini",
            "scheduler": scheduler,
            "blocks": "fixed",
            "stop": "prefix",
            "cache": "none",
            "guide": "none",
        },
        "config": {
            "task": {"name": "mini", "operation": operation, "count": 4},
            "model": {"path": "mini"},
            "scheduler": {"name": scheduler, **fields},
            "guide": [],
            "seed": 0,
            **(others or {}),
        },
        "samples": len(records),
        "score": "exact_match",
        "dependency": "high" if operation == "shuffle" else "low",
        "refused": refused,
        "environments": [HERE],
    }
    return Run(about, records)


def comparison(text: str = "a b c") -> Comparison:
    """One per step, and a threshold at two settings, bolder and worse on the task of high dependency."""
    slow = [record(index, nfe=6, rows=60, oracle_nfe=1, text=text, prompt=text) for index in range(4)]
    bold = [record(index, nfe=1, rows=10, text=text) for index in range(4)]
    wrong = [record(index, nfe=1, rows=10, scores={"exact_match": 0.0}, pieces=[text] * 6) for index in range(4)]
    return compare(
        [
            run(slow, "fixed"),
            run(slow, "fixed", "shuffle"),
            run([record(index) for index in range(4)], "threshold", threshold=0.9),
            run([record(index) for index in range(4)], "threshold", "shuffle", threshold=0.9),
            run(bold, "threshold", threshold=0.3),
            run(wrong, "threshold", "shuffle", threshold=0.3),
            run([], "wino", refused=f"cannot {text}"),
        ]
    )
