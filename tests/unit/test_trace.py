"""The record of a generation: steps, replay, and its file."""

import json
import pickle
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dllm_sampler import Result, Sampler, Trace
from dllm_sampler.result import FIELDS
from tests import toys
from tests.refusals import refused
from tests.sampling import each

TOKENS = 13


@pytest.fixture(scope="module")
def result() -> Result:
    sampler = toys.sampler(scheduler={"name": "threshold", "threshold": 0.7}, stop="prefix")
    return sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS)


def test_what_it_holds(result: Result) -> None:
    trace = result.trace
    assert trace.seeds.tolist() == toys.SEEDS
    assert trace.begin.tolist() == [trace.origin - len(prompt) for prompt in toys.PROMPTS]
    assert (trace.end == trace.origin + TOKENS).all()
    assert torch.equal(trace.nfe, result.nfe)
    for row, prompt in enumerate(toys.PROMPTS):
        steps = trace.steps(row)
        assert len(steps) == int(result.nfe[row])
        assert all(step == sorted(step) for step in steps)
        for number, step in enumerate(steps):
            assert all(int(trace.generated[row, position]) == number for position in step)
        assert int(trace.rows[row]) == int(result.nfe[row]) * (len(prompt) + TOKENS)


def test_log_probabilities_are_the_models(result: Result) -> None:
    """Of the token at its commit, given the canvas before it."""
    trace, row = result.trace, 1  # the longest prompt: no padding
    model = toys.transformer()
    for step, canvas in enumerate(trace.replay()):
        with torch.no_grad():
            logits = model(canvas[row][None])[0]
        logits[:, toys.MASK] = -torch.inf
        sure = logits.log_softmax(-1)
        for column in (trace.step_map[row] == step).nonzero()[:, 0].tolist():
            expected = float(sure[column, trace.ids[row, column]])
            assert float(trace.logprob[row, column]) == pytest.approx(expected, abs=1e-6)


def test_replay_is_what_happened() -> None:
    sampler = toys.sampler(scheduler={"name": "threshold", "threshold": 0.7}, stop="prefix", cache="dual")
    steps = list(sampler.stream(toys.PROMPTS, max_new_tokens=TOKENS))
    assert steps[-1].result is not None
    trace = steps[-1].result.trace
    first, *frames = trace.replay()
    assert (first[:, trace.origin :] == toys.MASK).all()
    assert len(frames) == len(steps)
    for frame, commits in zip(frames, steps, strict=True):
        assert torch.equal(frame[:, trace.origin :], commits.tokens)
    assert torch.equal(frames[-1], trace.ids)


def test_save_and_load(result: Result, tmp_path: Path) -> None:
    file = tmp_path / "run.trace"
    result.trace.save(file)
    loaded = Trace.load(str(file))
    for field in (one for one in fields(Trace) if one.compare):
        one, two = getattr(result.trace, field.name), getattr(loaded, field.name)
        assert torch.equal(one, two) and one.dtype == two.dtype if isinstance(one, torch.Tensor) else one == two
    replace(loaded, mask_id=None).save(file)
    assert Trace.load(file).mask_id is None
    assert [path.name for path in tmp_path.iterdir()] == ["run.trace"], "a half-written file was left behind"


def _other_schema(file: Path, trace: Trace) -> None:
    save_file({name: getattr(trace, name) for name in FIELDS}, file, {"trace": json.dumps({"schema": 1})})


def _no_trace(file: Path, trace: Trace) -> None:
    save_file({"weight": torch.ones(2)}, file)


def _list(file: Path, trace: Trace) -> None:
    save_file({"weight": torch.ones(2)}, file, {"trace": "[]"})


def _deep(file: Path, trace: Trace) -> None:
    save_file({"weight": torch.ones(2)}, file, {"trace": "[" * 100_000})


def _half(file: Path, trace: Trace) -> None:
    trace.save(file)
    file.write_bytes(file.read_bytes()[:-100])


def _field_missing(file: Path, trace: Trace) -> None:
    about = {"schema": 2, "origin": 0, "mask_id": 1, "pad_id": 1, "grid": None}
    save_file({name: getattr(trace, name) for name in FIELDS[1:]}, file, {"trace": json.dumps(about)})


def _number_missing(file: Path, trace: Trace) -> None:
    save_file({name: getattr(trace, name) for name in FIELDS}, file, {"trace": json.dumps({"schema": 2})})


@each(
    ("damage", "message"),
    [
        (_number_missing, "trace-invalid"),
        (_other_schema, "trace-invalid"),
        (_no_trace, "trace-invalid"),
        (_list, "trace-invalid"),
        (_deep, "trace-invalid"),
        (_half, "trace-invalid"),
        (_field_missing, "trace-invalid"),
        (lambda file, trace: file.write_text("not a trace"), "trace-invalid"),
        (lambda file, trace: None, "trace-invalid"),
    ],
)
def test_load_refuses(damage, message: str, result: Result, tmp_path: Path) -> None:
    file = tmp_path / "bad.trace"
    damage(file, result.trace)
    with refused(message):
        Trace.load(file)


def test_a_trace_shows_itself_in_a_notebook(result: Result, tmp_path: Path) -> None:
    """Texts where there is a tokenizer, escaped; ids where a file or another process had none to give."""
    assert repr(result.trace) == f"Trace({len(toys.PROMPTS)} rows of {TOKENS} tokens, {_span(result)} forwards)"
    guide = {"name": "choices", "choices": ["Ada, Ben"]}
    trace = (
        Sampler.from_pretrained("mini", device="cpu", guide=guide).generate(["copy: Ada"] * 6, max_new_tokens=8).trace
    )
    page = trace._repr_html_()
    assert page.count("<p>") == 4 and "2 more rows" in page and ">Ada</span>" in page and ">·</span>" in page
    steps = [int(step) for step in re.findall(r'data-step="(\d+)"', page)]
    assert steps == [step for row in trace.generated[:4].tolist() for step in row if step >= 0]
    trace.save(tmp_path / "trace")
    for bare in (Trace.load(tmp_path / "trace"), pickle.loads(pickle.dumps(trace))):
        assert f">{int(trace.ids[0, trace.origin])} </span>" in bare._repr_html_()
        assert torch.equal(bare.ids, trace.ids)


def _span(result: Result) -> str:
    low, high = int(result.nfe.min()), int(result.nfe.max())
    return f"{low} to {high}" if low != high else str(low)
