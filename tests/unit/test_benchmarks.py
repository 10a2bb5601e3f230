"""The benchmarks run, say what went wrong in a sentence, and refuse to compare sides that do different work."""

import json
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dllm_sampler.kernels import backend
from dllm_sampler.kernels.backend import TORCH
from tests.sampling import each

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_smoke_measures_every_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plain loop gives the same tokens, or there would be no figure."""
    assert import_module("step_overhead").main(["--smoke", "--json", str(tmp_path / "measured.json")]) == 0
    found = json.loads((tmp_path / "measured.json").read_text())
    kinds = {(row["batch"], row["cache"], row["kind"]) for row in found["rows"]}
    assert kinds == {(b, c, k) for b in (1, 2) for c in ("none", "dual") for k in ("overhead", "replay", "speed")}
    assert all(ratio > 0 for row in found["rows"] for ratio in row["ratios"])
    assert found["about"]["torch"] == torch.__version__
    assert "ratio" in capsys.readouterr().out


def test_different_tokens_are_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, official = import_module("step_overhead"), import_module("official_style")
    generate = official.generate
    monkeypatch.setattr(official, "generate", lambda *given, **how: (generate(*given, **how)[0].flip(1), 8))
    with pytest.raises(SystemExit, match="sides differ in"):
        bench.main(["--smoke", "--kinds", "speed"])


def test_tokens_after_the_end_are_compared_as_committed(capsys: pytest.CaptureFixture[str]) -> None:
    """Two of these eight answers of mini have tokens after their end-of-text token."""
    words = ["--models", "mini", "--batch", "8", "--caches", "none", "--kinds", "speed", "--repeats", "1"]
    assert import_module("step_overhead").main(words) == 0
    assert "plain loop" in " ".join(capsys.readouterr().out.split())


def test_kernels_without_a_gpu_are_not_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert import_module("kernels").main(["--smoke", "--json", str(tmp_path / "kernels.json")]) == 0
    found = json.loads((tmp_path / "kernels.json").read_text())
    kinds = {row["name"].split()[0] for row in found["rows"]}
    assert kinds == {"readout", "head", "attention", "norm", "qkv_rope", "linear", "swiglu"}
    assert all(row["reference"] and not row["kernel"] and not row["ratios"] for row in found["rows"])
    assert found["about"]["gpu"] == "not measured: no GPU"
    assert "only their torch references" in capsys.readouterr().out


def test_a_decoding_step_without_a_gpu_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert import_module("decode_step").main(["--smoke", "--json", str(tmp_path / "steps.json")]) == 0
    rows = json.loads((tmp_path / "steps.json").read_text())["rows"]
    assert {row["kind"] for row in rows} == {"readout", "generate", "uncached", "window", "refresh"}
    assert {(row["batch"], row["window"]) for row in rows if row["kind"] == "window"} == {(1, 8), (1, 4), (2, 8)}
    assert all(row["seconds"] and row["side"] == "torch" for row in rows)
    assert all(row["read"] > 0 and row["copy"] > 0 for row in rows if not row["plain"])
    answers = {row["kind"]: row["answers"] for row in rows if row["plain"]}
    assert answers["generate"] == "16 tokens, 0 of them differ from the plain loop's"
    # A cache changes the tokens of a random model: were they equal, the other loop would have one too.
    assert re.fullmatch(r"16 tokens, [1-9]\d* of them differ from the loop's without a cache", answers["uncached"])
    printed = capsys.readouterr().out
    assert "nothing about a GPU was measured" in printed
    assert sum(line.split()[1:2] == ["torch"] for line in printed.splitlines()) == len(rows)


def test_a_loop_of_other_forwards_is_no_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, official = import_module("decode_step"), import_module("official_style")
    generate = official.generate

    def longer(*given: Any, **how: Any) -> Any:
        answer, forwards = generate(*given, **how)
        return answer, forwards + 1

    monkeypatch.setattr(official, "generate", longer)
    words = ["--smoke", "--windows", "4", "--slots", "16", "--kinds", "generate", "--json", str(tmp_path / "a.json")]
    assert bench.main(words) == 0
    (row,) = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert "forwards, where the plain loop's are" in row["note"] and not row["seconds"]


COMMANDS = (
    "campaign", "ceilings", "decode_step", "products", "timeline", "kernels", "branches", "in_flight",
    "step_overhead", "step_operations", "batching",
)  # fmt: skip


@each("name", COMMANDS)
def test_help_is_the_docstring_and_every_default(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = import_module(name)
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and command.__doc__ and command.__doc__.strip() in printed
    options = re.split(r"\n  (?=--)", printed.partition("\noptions:")[2])[1:]
    given = [one for one in options if re.match(r"--\S+ \S", one)]  # others are flags
    assert given and all("(default" in one for one in given)


@each(
    ("words", "said"),
    [
        ("decode_step", "a model of 8 billion parameters needs a GPU"),
        ("decode_step --smoke --sides tritn", "unknown side 'tritn'. Did you mean 'triton'"),
        ("decode_step --smoke --sides torch,triton", "--sides torch,triton: --smoke runs on the CPU"),
        ("decode_step --smoke --json nowhere/a.json", "a.json cannot be written: the folder nowhere does not exist"),
        ("decode_step --smoke --kinds official", "say where it is with --official FILE"),
        ("products", "this measures a GPU, and torch finds none: run it on a machine with a GPU, or add --smoke. See"),
        ("timeline", "this measures a GPU"),
        ("in_flight --shortest 65", "--shortest 65: should be at most --tokens 64"),
        ("in_flight --graph", "--graph needs a model on a GPU, which mini is not"),
        ("campaign", "this measures a GPU"),
        ("campaign --smoke --only batch", "unknown stage 'batch'. Did you mean 'batches'"),
        ("campaign --smoke --continue", "--continue cannot read campaign/campaign.json"),
        ("campaign --smoke --official generate.py", "--official=generate.py is not a file. Name generate.py"),
        (
            "step_overhead --smoke --caches elastic --kinds overhead",
            "The last step with cache=elastic does not compute one run",
        ),
        ("step_overhead --models llada-8b", "llada-8b needs a GPU"),
        ("step_overhead --models smoke --steps 64", "--steps 64 does not suit smoke"),
        ("step_operations --stops non", "unknown stop 'non'. Did you mean 'none'"),
        ("branches --branches 2,4", "--branches 2,4: should begin with 1"),
        ("batching --seed 99999999999999999999", "--seed: should be a whole number from 1 to 2147483647, not"),
        ("branches --slack nan", "--slack: should be a number above 0, not 'nan'"),
        ("batching --caches dul", "unknown cache 'dul'. Did you mean 'dual'"),
        ("batching --schedulers fixd", "unknown scheduler 'fixd'. Did you mean 'fixed'"),
        ("batching --batches 4,8", "--batches 4,8: should begin with 1"),
        ("batching --prompts 8", "--batches 1,4,8,16,32: no batch can be larger than --prompts 8"),
        ("batching --shortest 9 --longest 8", "--longest 8: should be at least --shortest 9"),
        ("batching --vocabulary 2", "--vocabulary 2: should be at least 3"),
        ("batching --width 20 --heads 4", "--width 20: should be a multiple of twice --heads 4"),
        ("batching --longest 4000", "--longest 4000 and --tokens 128 exceed the model. Set at most 3968"),
        ("batching --threads 2", "add --clock wall"),
        ("batching --caches dkv_greedy", "cache=dkv_greedy must know before each forward"),
    ],
)
def test_mistakes_are_one_sentence(
    words: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    name, *arguments = words.split()
    assert import_module(name).main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith(f"{name}.py: ") and error.count("\n") == 1


def test_what_a_kernel_is_timed_by() -> None:
    bench = import_module("kernels")
    cases, clocks = import_module("kernel_cases"), import_module("clocks")
    made: list[int] = []
    ran: list[tuple[int, float]] = []  # data and seconds

    def make() -> Any:
        made.append(len(made))

        def run(it: Any, data: int = made[-1]) -> torch.Tensor:
            ran.append((data, 0.5 if it is TORCH else 0.125))
            return torch.ones(1)

        return cases.Work(run, 8)

    class Clock(clocks.Clock):
        def replayed(self, runs: Any) -> Any:
            ran.clear()
            for run in runs:
                run()
            assert sorted(data for data, _ in ran) == [0, 1, 2]  # each on data of its own
            seconds = ran[0][1]
            return lambda: seconds

        def copies(self, moved: int) -> int:
            return 3

    row = bench.measure(cases.Case("one", make), object(), Clock(torch.device("cpu")), repeats=2)
    assert (row.kernel, row.reference, row.moved, row.ratios) == ([0.125] * 2, [0.5] * 2, 8, [4, 4])
    moves = clocks.Bandwidth(copy=64, read=128)
    shown = [next(column.cells) for column in bench.table([row], moves).columns]
    assert shown[:7] == ["one", "125000.0", "500000.0", "4.00", "4.00 to 4.00", "50%", "100%"]

    def falls(it: Any) -> None:
        if it is not TORCH:
            backend.warn("the Triton kernel one cannot run, torch takes its place: too large")

    clock = clocks.Clock(torch.device("cpu"))
    row = bench.noted(cases.Case("one", lambda: cases.Work(falls, 1)), SimpleNamespace(), clock, 2)
    assert len(row.reference) == 2 and not row.kernel and "too large" in row.note


PUBLISHED = """
import torch

def generate(model, prompt, attention_mask=None, steps=128, gen_length=128, block_length=128, mask_id=126336, **_):
    ids = torch.cat([prompt, prompt.new_full((len(prompt), gen_length), mask_id)], 1).to(model.device)
    for end in range(prompt.shape[1] + block_length, ids.shape[1] + 1, block_length):
        for _ in range(block_length):
            sure, best = model(ids, attention_mask=attention_mask).logits.softmax(-1).max(-1)
            sure[ids != mask_id], sure[:, end:] = -1, -1
            ids.scatter_(1, sure.argmax(1)[:, None], best.gather(1, sure.argmax(1)[:, None]))
    return ids
"""  # one token per step, as the published code writes it; ours, not theirs


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("branches --model smoke --branches 1,4 --repeats 1", "over one branch"),
        ("ceilings --smoke", "driver: "),
        ("in_flight --model smoke --prompts 6 --batch 2 --caches none --tokens 16 --repeats 1", "in flight"),
        ("decode_step --smoke --windows 4 --slots 16 --kinds uncached,official --official a.py", "of them differ from"),
        (
            "step_overhead --models smoke --batch 2 --steps 32 --repeats 1 --kinds speed --caches none --official a.py",
            "smoke batch 2 none official",
        ),
    ],
)
def test_it_runs(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text(PUBLISHED)
    name, *arguments = words.split()
    assert import_module(name).main(arguments) == 0
    assert said in capsys.readouterr().out


def test_throughput_counts_answers_up_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, row = import_module("in_flight"), import_module("in_flight").Row("fixed", "none", 2)
    flown = [SimpleNamespace(tokens=torch.zeros(9), length=length, nfe=4) for length in (3, 9)]
    monkeypatch.setattr(bench, "answers", lambda *_: flown)
    bench.count(SimpleNamespace(denoiser=None), row, [[5], [6]], [9, 9])
    assert row.tokens == 12


TINY = (
    "--shortest 3 --longest 12 --tokens 15 --block 6 --vocabulary 40 --width 16 --inner 24 --layers 2 --heads 2"
    " --dtype float64 --threshold 0.3 --steps 5 --repeats 1"
)


def test_what_a_ragged_batch_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench, file = import_module("batching"), tmp_path / "batching.json"
    words = [*TINY.split(), "--prompts", "4", "--batches", "1,4", "--json", str(file)]
    assert bench.main(words) == 0
    found = json.loads(file.read_text())
    lengths = [len(row) for row in bench.prompts(bench.arguments(words))]
    assert len(set(lengths)) > 1
    rows = {(r["scheduler"], r["cache"], r["loop"], r["batch"]): SimpleNamespace(**r) for r in found["batches"]}
    caches = ("none", "prefix", "dual", "block_causal", "dkv")
    ours = [(scheduler, cache, "sampler") for scheduler in ("threshold", "fixed") for cache in caches]
    plain = [("threshold", c, "lock-step") for c in ("none", "prefix", "dual")]
    assert rows.keys() == {(*name, batch) for name in ours + plain for batch in (1, 4)}
    for row in rows.values():
        assert len(row.seconds) == len(row.ratios) == 1
        assert row.positions >= row.needed > 0 and row.head >= row.head_needed > 0
        assert row.differ == 0  # each prompt as alone, in lock-step too
    # Blocks of 6, 6 and 3 tokens take a step for three tokens, at any batch size.
    alone, whole = (rows["fixed", "none", "sampler", batch] for batch in (1, 4))
    assert alone.forwards == 4 * 5 and whole.forwards == 5
    assert alone.positions == alone.needed == whole.needed == sum(length + 15 for length in lengths) * 5
    assert whole.positions == whole.needed
    assert alone.head == whole.head == whole.head_needed == 4 * (6 + 3 + 6 + 3 + 3)
    waits = rows["threshold", "none", "lock-step", 4]
    assert waits.positions == waits.head == 4 * (max(lengths) + 15) * waits.forwards
    branches = {(r["scheduler"], r["cache"], r["batch"]): SimpleNamespace(**r) for r in found["branches"]}
    names = [(name, cache) for name in ("freedave", "guided") for cache in ("none", "dual")]
    assert branches.keys() == {(*name, batch) for name in names for batch in (1, 4)}
    assert all(row.positions >= row.needed and row.differ == 0 for row in branches.values())
    drafts, plain_ = branches["freedave", "none", 1], rows["threshold", "none", "sampler", 1]
    assert drafts.forwards < plain_.forwards and drafts.positions > plain_.positions
    printed = capsys.readouterr().out
    assert "| threshold | dual | lock-step | 4 |" in printed and "| guided | dual | sampler | 4 |" in printed


def test_what_is_counted_at_the_model() -> None:
    """Packed rows as much as those of a rectangle; what is not counted is no result."""
    bench = import_module("batching")
    network = bench.untrained(bench.arguments([*TINY.split(), "--batches", "1"])).transformer
    meter = bench.Meter()
    for shape in ((3, 4), (1, 12)):
        with meter.on(network):
            hidden = network(
                torch.zeros(shape, dtype=torch.long), drive=lambda index, layer, hidden, rope, rows: hidden
            )
            network.head(hidden[:, -2:])
        assert (meter.forwards, meter.positions, meter.head) == (1, 12, 2 * shape[0])
    network(torch.zeros(2, 2, dtype=torch.long))
    assert meter.positions == 12  # the hooks are gone
    with pytest.raises(RuntimeError, match="was not counted"), meter.on(network):
        pass


def test_figures_of_a_batch() -> None:
    bench = import_module("batching")
    row = bench.Row("sampler", "fixed", "dual", 8, 5, 300, 200, 90, 60, 1, [3.0, 2.0, 7.0], [1.5, 1.25, 2.0])
    shown = [bench.heading(timed=True)[0], bench.line(row, timed=True)]
    head, line = (text.strip("| ").split(" | ") for text in shown)
    assert dict(zip(head, line, strict=True)) == {
        "scheduler": "fixed", "cache": "dual", "loop": "sampler", "batch": "8", "forwards": "5", "positions": "300",
        "positions / needed": "1.50", "head rows": "90", "head rows / needed": "1.50", "seconds": "3.00",
        "time": "1.50 (1.25-2.00)", "differ": "1",
    }  # fmt: skip
    assert "seconds" not in bench.heading(timed=False)[0]
