"""The traces that are published with this package pass: `python -m tests.conformance`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import lines
from tests.conformance.__main__ import check, main
from tests.sampling import sampled

DATA = Path(__file__).parent / "data"
FURTHER = DATA / "further"
SYSTEMS = {
    "apd-dream": 14,
    "adablock": 21,
    "adablock-dream/no-cache": 5,
    "adablock-dream/dual-cache": 5,
    "ass": 8,
    "dinfer-threshold": 16,
    "dinfer-hierarchy": 16,
    "dinfer-credit": 16,
    "d3llm": 6,
    "d3llm-cache": 19,
    "dawn": 7,
    "dparallel-entropy": 8,
    "dcd": 3,
    "dcd-cache": 5,
    "dcd-static": 2,
    "dsb": 3,
    "dsb-cache": 7,
    "dpad": 16,
    "streaming": 14,
    "eb-sampler": 8,
    "eoser": 11,
    "eoser-ass": 8,
    "freedave": 16,
    "freedave-static": 10,
    "freedave-dream/static": 6,
    "freedave-dream/threshold": 6,
    "freedave-dream/freedave": 5,
    "freedave-dream/freedave-batch": 5,
    "freedave-dream/freedave-threshold": 6,
    "freedave-dream/freedave-eager": 3,
    "freedave-sdar/static": 5,
    "freedave-sdar/freedave": 5,
    "freedave-sdar/freedave-batch": 5,
    "freedave-sdar/freedave-eager": 5,
    "freedave-sdar/threshold": 5,
    "freedave-sdar/freedave-threshold": 5,
    "freedave-sdar/freedave-eager-threshold": 5,
    "klass": 11,
    "lopa": 19,
    "d2f": 3,
    "learn2pd": 7,
    "learn2pd-eot": 2,
    "localleap": 8,
    "constrained_cfg": 45,
    "svdd": 24,
    "diffusion-gemma": 5,
    "discrete-ddim": 2,
    "discrete-ddim/corrector": 5,
    "sdar/low_confidence_static": 3,
    "sdar/low_confidence_dynamic": 8,
    "sdar/sequential": 1,
    "illada/llada-generate": 19,
    "sdar-moe/low_confidence_static": 11,
    "sdar-moe/low_confidence_dynamic": 13,
    "sdar-moe/sequential": 3,
    "stable-diffcoder/generate_block": 31,
    "fast-dllm-v2/generate": 16,
    "fast-dllm-v2/generate/block-cache": 14,
    "fast-dllm-v2/batch_sample": 16,
    "fast-dllm-v2/batch_sample/block-cache": 9,
    "nemotron-labs-diffusion/generate": 25,
    "nemotron-labs-diffusion/linear_spec": 9,
    "s2d2/contextual_bandit_ucb": 2,
    "s2d2/mask_span_length": 8,
    "s2d2/score_hysteresis": 2,
    "s2d2/score_threshold": 6,
    "a2d/mdlm": 20,
    "a2d/bd3lm": 21,
    "bert-chat/mdlm": 6,
    "rnd1/diffusion_sample": 16,
    "llada2": 7,
    "dmax": 21,
    "remix": 20,
    "t2m/low_prob": 9,
    "t2m/t2t_remask": 6,
    "t2m/logit_diff": 6,
    "llada2.1/threshold on block routing": 11,
    "llada2.1/joint-threshold on block routing": 12,
    "daedal": 18,
    "rho-eos": 20,
    "pc-sampler": 8,
    "pcs-entropy": 4,
    "pcs-margin": 4,
    "prophet": 10,
    "sr-smc/llada": 6,
    "sr-smc/llada-cache": 3,
    "sr-smc/dream": 4,
    "wino": 10,
    "dkv-cache-decode": 10,
    "dkv-cache-greedy": 8,
    "dkv-cache-dream/decoded": 5,
    "dkv-cache-dream/prefill": 2,
    "dkv-cache-dream/pd": 3,
    "dllm-cache": 11,
    "llada-vanilla": 22,
    "fast-dllm": 36,
    "fast-dllm-v1": 33,
    "dream": 17,
    "fast-dllm-dream/plain-threshold": 4,
    "fast-dllm-dream/prefix-cache-threshold": 5,
    "fast-dllm-dream/prefix-cache-entropy": 3,
    "fast-dllm-dream/dual-cache-threshold": 5,
    "fast-dllm-dream/dual-cache-entropy": 3,
}


def linked(folder: Path, *traces: Path) -> None:
    """The checkpoints and what lies next to the traces, and of the traces these."""
    (folder / "traces").mkdir(parents=True)
    companions = (path for path in (DATA / "traces").iterdir() if path.suffix != ".jsonl")
    for path in DATA.glob("tiny-*"):
        (folder / path.name).symlink_to(path)
    for path in (*companions, *traces):
        (folder / "traces" / path.name).symlink_to(path)


def test_a_published_trace_of_every_system_passes(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """The one of each system with the fewest forwards; all of them are slow."""
    linked(tmp_path)
    found = [line for file in (DATA / "traces").glob("*.jsonl") for line in file.read_text().splitlines()]
    parsed = {line: json.loads(line) for line in found}

    def cost(line: str) -> tuple[int, int, str]:
        steps = parsed[line].get("steps")
        return len(steps) if isinstance(steps, list) else 0, len(line), line

    assert Counter(trace["system"] for trace in parsed.values()) == SYSTEMS
    some = {parsed[line]["system"]: line for line in sorted(found, key=cost, reverse=True)}.values()
    (tmp_path / "traces" / "some.jsonl").write_text("".join(line + "\n" for line in some))
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == f"conformance: {len(SYSTEMS)} passed, 0 failed, 0 unsupported"
    assert {tuple(line.rsplit(maxsplit=1)) for line in out[:-1]} == {(name, "1/1") for name in SYSTEMS}


def test_the_verdicts_of_one_system_in_a_file(tmp_path: Path):
    name = "dkv-cache-dream/prefill"
    assert main([str(DATA), "--system", name, "--json", str(tmp_path / "verdicts.json")]) == 0
    found = json.loads((tmp_path / "verdicts.json").read_text())
    assert found["systems"] == {name: {"passed": SYSTEMS[name], "failed": 0, "unsupported": 0}}
    assert [line["id"] for line in found["lines"]] == [line.id for line in lines.read(DATA, name)]


BATCH = {"prompt_ids_batch": [[5], [6]], "output_ids_batch": [[7], [8]], "params": {"use_block_cache": True}}


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        ("fast-dllm-v2-batch", BATCH, "what the block cache refreshes for all rows"),
        ("daedal", {"params": {"cfg_scale": 1.0}}, "fails under guidance"),
        ("stable-diffcoder", {"params": {"shift": True}}, "is a slip of the published loop"),
        ("llada2.2-block-routing", {"params": {"temperature": 0.5}}, "no order of draws is published"),
        ("d3llm", {"params": {"max_new_tokens": 9}}, "blocks that do not divide the answer"),
    ],
)
def test_what_is_unsupported_is_named(tmp_path: Path, file: str, change: dict[str, Any], reason: str):
    line = json.loads((DATA / "traces" / f"{file}.jsonl").read_text().splitlines()[0])
    line |= {**change, "params": line["params"] | change.get("params", {})}
    linked(tmp_path)
    (tmp_path / "traces" / "one.jsonl").write_text(json.dumps(line))
    (verdict,) = check(tmp_path)
    assert verdict.status == "unsupported" and reason in verdict.reason


@pytest.mark.slow
def test_every_published_trace_passes(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main([str(DATA), "--json", str(tmp_path / "verdicts.json")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == f"conformance: {sum(SYSTEMS.values())} passed, 0 failed, 0 unsupported"
    assert {tuple(line.rsplit(maxsplit=1)) for line in out[:-1]} == {(name, f"{n}/{n}") for name, n in SYSTEMS.items()}

    found = json.loads((tmp_path / "verdicts.json").read_text())
    assert found["systems"] == {name: {"passed": n, "failed": 0, "unsupported": 0} for name, n in SYSTEMS.items()}
    ids = [line.id for line in lines.read(DATA)]
    assert [line["id"] for line in found["lines"]] == ids
    assert all(line.keys() == {"id", "system", "status", "reason"} for line in found["lines"])
    assert {(line["status"], line["reason"]) for line in found["lines"]} == {("passed", "")}
    assert list(tmp_path.iterdir()) == [tmp_path / "verdicts.json"], "no partial file is left behind"


FILES = sorted(FURTHER.glob("*.jsonl"))


@pytest.mark.parametrize("file", sampled(FILES, name=lambda file: file.stem))
def test_further_runs_of_published_code(file: Path, tmp_path: Path):
    """Settings that the traces do not have, and random ones; each line names its code in `source`."""
    linked(tmp_path, file)
    verdicts = check(tmp_path)
    assert verdicts
    assert [verdict for verdict in verdicts if verdict.status != "passed"] == []
