"""The benchmark runs, and refuses to compare sides that do different work."""

import json
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.table import Table
from torch import Tensor

from dllm_sampler import capture, graphs, readout
from dllm_sampler.errors import UserError
from dllm_sampler.kernels import backend
from dllm_sampler.kernels.backend import TORCH
from tests.contract.test_in_place import Taped, taped

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_smoke_measures_every_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "measured.json"
    assert import_module("step_overhead").main(["--smoke", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    kinds = {(row["batch"], row["cache"], row["kind"]) for row in found["rows"]}
    assert kinds == {(b, c, k) for b in (1, 2) for c in ("none", "dual") for k in ("overhead", "speed")}
    assert all(ratio > 0 for row in found["rows"] for ratio in row["ratios"])
    assert found["about"]["torch"] == torch.__version__
    assert "ratio" in capsys.readouterr().out


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_both_sides_give_the_same_tokens(cache: str) -> None:
    bench, official = import_module("step_overhead"), import_module("official_style")
    it = bench.subject("smoke")
    prompts = it.prompts(3)
    result = it.sampler(cache, 8).generate(prompts, max_new_tokens=it.new_tokens)
    tokens, forwards = official.generate(it.network, prompts, it.new_tokens, it.block, 8, 1, dual=cache == "dual")
    assert torch.equal(result.tokens, tokens)
    assert result.nfe.tolist() == [forwards] * 3 == [8] * 3


def test_different_tokens_are_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, official = import_module("step_overhead"), import_module("official_style")
    generate = official.generate

    def other(*args: object, **options: object) -> tuple[torch.Tensor, int]:
        tokens, forwards = generate(*args, **options)
        return tokens.flip(1), forwards

    monkeypatch.setattr(official, "generate", other)
    with pytest.raises(SystemExit, match="sides differ in"):
        bench.main(["--smoke", "--kinds", "speed"])


def test_kernels_without_a_gpu_are_not_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "kernels.json"
    assert import_module("kernels").main(["--smoke", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert {row["name"].split()[0] for row in found["rows"]} == {
        "readout", "head", "commit", "bookkeeping", "attention", "norm", "qkv_rope", "linear", "swiglu"
    }  # fmt: skip
    assert all(row["reference"] and not row["kernel"] and not row["ratios"] for row in found["rows"])
    assert found["about"]["gpu"] == "not measured: no GPU"
    assert "only their torch references" in capsys.readouterr().out


def test_a_decoding_step_without_a_gpu_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "steps.json"
    bench = import_module("decode_step")
    assert bench.main(["--smoke", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert {row["kind"] for row in rows} == {"readout", "generate", "window", "refresh"}
    assert {(row["batch"], row["window"]) for row in rows if row["kind"] == "window"} == {(1, 8), (1, 4), (2, 8)}
    assert all(row["seconds"] and row["side"] == "torch" for row in rows)
    assert all(row["floor"] > 0 for row in rows if row["kind"] != "generate")
    assert next(row["note"] for row in rows if row["plain"]) == "16 tokens, 0 of them differ from the plain loop's"
    assert "nothing about a GPU was measured" in capsys.readouterr().out


COMMANDS = (
    "decode_step", "kernels", "roofline", "step_overhead", "scheduler_overhead", "host_gap", "step_operations",
    "branches", "recording", "recordings", "batching",
)  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_the_docstring_and_every_default(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = import_module(name)
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and command.__doc__ and command.__doc__.strip() in printed
    options = re.split(r"\n  (?=--)", printed.partition("\noptions:")[2])[1:]
    given = [one for one in options if re.match(r"--\S+ \S", one)]  # others are flags
    assert given and all("(default" in one for one in given)
    assert all(len(one.split()) > 1 for one in options)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("decode_step", "a model of 8 billion parameters needs a GPU"),
        ("decode_step --smoke --batch 0", "--batch: each should be a whole number of at least 1, not '0'"),
        ("decode_step --smoke --windows 8,x", "--windows: each should be a whole number of at least 1, not 'x'"),
        ("decode_step --smoke --sides tritn", "unknown side 'tritn', did you mean 'triton'"),
        ("decode_step --smoke --sides torch,triton", "--sides torch,triton: --smoke runs on the CPU"),
        ("recordings --shortest 9 --longest 8", "--longest 8: should be at least --shortest 9"),
        ("recordings --caches elastic --prompts 1", "under cache=ElasticCache are never recorded"),
        ("host_gap --caches elastic --layers 1", "under cache=ElasticCache are never recorded"),
        ("decode_step --smoke --official nowhere.py", "there is no Python file nowhere.py"),
        ("decode_step --smoke --json nowhere/a.json", "nowhere/a.json cannot be written: there is no folder nowhere"),
        ("kernels --inner 0", "--inner: should be a whole number of at least 1, not '0'"),
        ("kernels --repeats -1", "--repeats: should be a whole number of at least 1, not '-1'"),
        ("kernels --json .", "cannot be written: it is no file"),
        ("kernels --smoke --only nothing", "no case's name contains 'nothing'"),
        ("step_overhead --repeats 0", "--repeats: should be a whole number of at least 1, not '0'"),
        ("step_overhead --models min", "unknown model 'min', did you mean 'mini'"),
        ("step_overhead --kinds sped", "unknown kind 'sped', did you mean 'speed'"),
        ("step_overhead --caches dul", "unknown cache 'dul', did you mean 'dual'"),
        ("step_overhead --caches prefix", "--caches prefix: the plain loop of --kinds speed has none and dual alone"),
        (
            "step_overhead --models smoke --caches elastic --kinds overhead --batch 1",
            "a bare forward computes one run of columns, and cache=ElasticCache others",
        ),
        ("step_overhead --clock sun", "invalid choice: 'sun'"),
        ("step_overhead --clock cpu --threads 2", "add --threads 1"),
        ("step_overhead --models smoke --steps 3", "--steps 3 does not suit smoke"),
        ("step_overhead --models llada-8b", "llada-8b needs a GPU"),
        ("scheduler_overhead --only klas", "unknown scheduler 'klas', did you mean 'klass'"),
        ("scheduler_overhead --wanted nan", "--wanted: should be a number above 0, not 'nan'"),
        ("scheduler_overhead --smoke --only apd", "scheduler.verifier"),
        ("host_gap --generations 0", "--generations: should be a whole number of at least 1, not '0'"),
        ("host_gap --caches dul", "unknown cache 'dul', did you mean 'dual'"),
        ("step_operations --stops non", "unknown stop 'non', did you mean 'none'"),
        ("branches --model smok", "invalid choice: 'smok'"),
        ("branches --branches 2,4", "--branches 2,4: should begin with 1"),
        ("branches --slack 0", "--slack: should be a number above 0, not '0'"),
        ("recording --models smoke --steps 64", "--steps 64 does not suit smoke"),
        ("batching --caches dul", "unknown cache 'dul', did you mean 'dual'"),
        ("batching --schedulers fixd", "unknown scheduler 'fixd', did you mean 'fixed'"),
        ("batching --batches 4,8", "--batches 4,8: should begin with 1"),
        ("batching --prompts 8", "--batches 1,4,8,16,32: no batch can be larger than --prompts 8"),
        ("batching --shortest 9 --longest 8", "--longest 8: should be at least --shortest 9"),
        ("batching --vocabulary 2", "--vocabulary 2: should be at least 3"),
        ("batching --width 20 --heads 4", "--width 20: should be a multiple of twice --heads 4"),
        ("batching --longest 4000", "--longest 4000: beside --tokens 128 the model has room for 3968"),
        ("batching --threads 2", "add --clock wall"),
        ("batching --caches dkv_greedy", "cache=GreedyCache must know before each forward"),
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
    assert said in error and error.startswith("error: ") and error.count("\n") == 1


def cells(table: Table) -> list[dict[str, str]]:
    """The rows of a table, by the heads of its columns."""
    columns = [list(column.cells) for column in table.columns]
    return [dict(zip([str(c.header) for c in table.columns], row, strict=True)) for row in zip(*columns, strict=True)]


def test_figures_of_a_decoding_step() -> None:
    bench = import_module("decode_step")
    step = bench.Row("window", "graph", 1, 32, [0.004, 0.005, 0.010], [0.002, 0.004, 0.004], floor=0.002)
    whole = bench.Row("generate", "graph", 1, 32, [2.0, 4.0, 4.0], plain=[3.0, 8.0, 12.0])
    found = cells(bench.table([step, whole]))
    wanted = {"ms": "5.000", "spread": "4.000 to 10.000", "floor ms": "2.000", "over floor": "2.50", "outside": "20.0%"}
    assert found[0].items() >= (wanted | {"speed": ""}).items()
    wanted = {"ms": "4000.000", "over floor": "", "outside": "", "speed": "2.00 (1.50 to 3.00)"}
    assert found[1].items() >= wanted.items()


@pytest.fixture
def smoke() -> Any:
    bench = import_module("decode_step")
    return bench.Bench(bench.arguments(["--smoke"]))


def test_what_a_decoding_step_times(smoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which time goes where, and the two measures that its floor is made of."""

    def now(run: Any) -> float:
        run()
        return 3.0 if isinstance(run, partial) else {"ours": 2.0, "plain": 5.0}.get(run.__name__, 4.0)

    monkeypatch.setattr(smoke, "now", now)
    with torch.no_grad():
        window, refresh = smoke.steps("torch", 1, 8)
    assert (window.seconds, window.model) == ([4.0] * 7, [3.0] * 7)
    assert (refresh.seconds, refresh.model) == ([4.0], [3.0])
    row = smoke.generate("torch")
    assert (row.seconds, row.plain) == ([2.0], [5.0])
    smoke.clock = lambda run: 0.5
    assert smoke._peak(16) == 2 * 16**3 / 0.5
    smoke.copied = 1000.0
    row = smoke.readout("torch")
    assert (row.seconds, row.floor) == ([0.5], 16 * 640 * 4 / 1000)


def test_other_numbers_of_forwards_are_no_speed(smoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    official = import_module("official_style")
    generate = official.generate

    def slower(*args: object, **options: object) -> tuple[Tensor, int]:
        tokens, forwards = generate(*args, **options)
        return tokens, forwards + 1

    monkeypatch.setattr(official, "generate", slower)
    (row,) = smoke._guarded("generate", "torch", 1, 8, lambda: [smoke.generate("torch")])
    assert row.note == "failed: RuntimeError: 16 forwards are not the 17 of the plain loop"
    assert not row.seconds and not row.plain


def test_integers_are_compared_with_no_other_loop(smoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    smoke.options.sides, smoke.options.official = ["graph", "int8"], lambda: None
    smoke.device = torch.device("cuda")  # no kernel is launched
    monkeypatch.setattr(smoke, "_guarded", lambda kind, side, *_: [(kind, side)])
    found = list(smoke.measure())
    assert [kind for kind, side in found if side == "graph"][:4] == ["readout", "ahead", "generate", "official"]
    assert {kind for kind, side in found if side == "int8"} == {"readout", "window"}


@pytest.mark.parametrize(
    ("side", "rows", "dtype", "asked"),
    [
        ("triton", 300, torch.float32, "kernel"),
        ("triton", 4, torch.float16, "head"),  # rows and weight differ
        ("torch", 4, torch.float32, "head"),
    ],
)
def test_the_model_alone_multiplies_its_head_as_the_step_does(
    side: str, rows: int, dtype: torch.dtype, asked: str
) -> None:
    """Held against what `readout.predict` calls in a step."""
    bench, called = import_module("decode_step"), []
    hidden, weight = torch.zeros(1, 1, rows, 2, dtype=dtype), torch.zeros(6, 2)

    class Model:
        spec = SimpleNamespace(mask_id=5)

        def __call__(self, *_: Any) -> tuple[Tensor, None]:
            return hidden, None

        def head(self, given: Tensor) -> Tensor:
            called.append("head")
            return torch.zeros(*given.shape[:-1], 6)

        def head_weight(self) -> Tensor:
            return weight

    def kernel(given: Tensor, other: Tensor, *, mask_id: int) -> Any:
        assert given.shape == (rows, 2) and other is weight and mask_id == 5
        called.append("kernel")
        return SimpleNamespace(readout=lambda *_: None)

    seen = SimpleNamespace(readout=lambda *_: None)
    kernels = TORCH if side == "torch" else SimpleNamespace(name=side, head=kernel, readout=lambda *_, **__: seen)
    model: Any = Model()
    bench.Spy(model, kernels).again((None, None, None))
    query: Any = SimpleNamespace(ids=torch.zeros(1, 1, rows, dtype=torch.long))
    readout.predict(model, hidden, Any, query, model.spec, (), frozenset(), False, kernels)  # pyright: ignore
    assert called == [asked, asked]


def test_figures_of_a_kernel() -> None:
    bench = import_module("kernels")
    row = bench.Row("one", 6_000_000, [0.001, 0.002, 0.002], [0.004, 0.004, 0.010])
    assert row.ratios == pytest.approx([4, 2, 5])
    (found,) = cells(bench.table([row], copied=4e9))
    assert found == {
        "case": "one", "kernel us": "2000.0", "torch us": "4000.0", "ratio": "4.00", "spread": "2.00 to 5.00",
        "of copy": "75%", "": "",
    }  # fmt: skip
    assert bench.size(torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(2)) == 38


def test_what_a_kernel_is_timed_by() -> None:
    bench, copied = import_module("kernels"), []

    class Clock:
        device = torch.device("cpu")

        def __call__(self, run: Callable[[], Any]) -> float:
            copied.append(run())
            return 0.25

    assert bench.bandwidth(Clock(), 1000) == 2 * 4000 / 0.25  # read and written
    assert all(bool((one == 1).all()) and one.numel() == 1000 for one in copied)
    case = bench.Case("one", lambda it: 0.5 if it is TORCH else 0.125, 8)
    row = bench.measure(case, object(), lambda run: run(), repeats=2, inner=3)
    assert (row.kernel, row.reference, row.moved) == ([0.125] * 2, [0.5] * 2, 8)


def test_a_kernel_that_is_its_reference_is_no_case() -> None:
    pytest.importorskip("triton")
    bench = import_module("kernels")
    few, many = (
        {case.name.partition(" 1 x")[0]: case for case in bench.layers("cpu", torch.float32, 1, window, 256, 2, 1, 16)}
        for window in (128, 129)
    )
    assert few.keys() - many.keys() == {"linear int8"}
    stored, queries, own = 2 * 257 * 16 * 4, 128 * 32 * 4, 2 * 128 * 16 * 4
    assert few["attention"].moved == few["attention blocks of 32"].moved == 2 * queries + stored
    assert few["attention half in range"].moved == 2 * queries + stored // 2
    assert few["attention fresh keys"].moved == 2 * queries + stored + own


def test_figures_of_a_step() -> None:
    bench = import_module("step_overhead")
    ours, other = [2.0, 4.0, 3.0], [1.0, 1.0, 2.0]
    rows = [bench.Row("m", "random", 1, "none", kind, ours, other) for kind in ("overhead", "speed", "official")]
    assert rows[0].ratios == [2.0, 4.0, 1.5]
    assert rows[1].ratios == rows[2].ratios == pytest.approx([1 / 2, 1 / 4, 2 / 3])
    found = cells(bench.table(rows, steps=10))
    wanted = {"ours ms/step": "300.00", "other ms/step": "100.00", "ratio": "2.000", "spread": "1.500 to 4.000"}
    assert found[0].items() >= wanted.items()
    assert found[1]["ratio"] == "0.500"


def test_what_a_step_is_timed_by() -> None:
    bench = import_module("step_overhead")
    it = bench.subject("smoke")

    def clock(run: Callable[[], Any]) -> float:
        run()
        return {"ours": 3.0, "plain": 5.0, "advance": 2.0, "driven": 1.0}[run.__name__]

    assert bench.speed(it, 1, "none", 8, clock) == (3.0, 5.0)
    assert bench.overhead(it, 1, "dual", 8, clock) == (16.0, 8.0)


def test_branches_are_timed_in_both_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "branches.json"
    options = ["--model", "smoke", "--branches", "1,4", "--repeats", "1", "--json", str(file)]
    assert import_module("branches").main(options) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["branches"], row["layout"]) for row in rows] == [(1, "batch"), (4, "batch"), (4, "tree")]
    assert rows[0]["positions"] < rows[1]["positions"] and all(row["seconds"] for row in rows)
    assert "over one branch" in capsys.readouterr().out


PUBLISHED = """
import torch

def generate(model, prompt, attention_mask=None, steps=128, gen_length=128, block_length=128, temperature=0.0,
             cfg_scale=0.0, remasking="low_confidence", mask_id=126336):
    ids = torch.cat([prompt, prompt.new_full((len(prompt), gen_length), mask_id)], 1).to(model.device)
    for end in range(prompt.shape[1] + block_length, ids.shape[1] + 1, block_length):
        for _ in range(steps // (gen_length // block_length)):
            law = model(ids, attention_mask=attention_mask).logits.double().softmax(-1)
            sure = torch.where(ids == mask_id, law.amax(-1), -1)
            sure[:, end:] = -1
            for row, at in enumerate(sure.argmax(1)):
                ids[row, at] = law[row, at].argmax()
    return ids
"""  # of the published signature; ours, not theirs


def test_beside_the_published_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "generate.py"
    file.write_text(PUBLISHED)
    words = ["--models", "smoke", "--batch", "2", "--steps", "32", "--repeats", "1", "--kinds", "speed", "--official"]
    assert import_module("step_overhead").main([*words, str(file)]) == 0
    assert "smoke batch 2 none official" in capsys.readouterr().out
    words = ["--smoke", "--batch", "1", "--windows", "8", "--json", str(tmp_path / "steps.json"), "--official"]
    assert import_module("decode_step").main([*words, str(file)]) == 0
    (row,) = (one for one in json.loads((tmp_path / "steps.json").read_text())["rows"] if one["kind"] == "official")
    assert row["plain"] and row["note"].endswith(" 0 of them differ from the published code's")
    file.write_text("")
    with pytest.raises(UserError, match="has no function generate"):
        import_module("official_code").load(file)
    file.write_text("import nothing_of_this_name")
    with pytest.raises(UserError, match="cannot be imported: ModuleNotFoundError"):
        import_module("official_code").load(file)


def test_the_hosts_time_between_two_replays(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--schedulers", "threshold", "--caches", "dual", "--layers", "1", "--generations", "1"]
    assert import_module("host_gap").main(words) == 0
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "threshold" in line]
    (forwards, waits, vain), (same, fewer, idle) = ([int(cell) for cell in row[3:6]] for row in rows)
    assert forwards == waits == same and vain == 0
    assert 0 < fewer + idle < forwards / 2


def test_recording(capsys: pytest.CaptureFixture[str]) -> None:
    assert import_module("recording").main(["--models", "smoke", "--batch", "1", "--steps", "2", "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    assert "bytes per column: 20, with the entropy 24" in printed
    assert "smoke, batch 1, trace and entropy" in printed


def test_a_decoding_step_that_fails_is_a_line_and_the_rest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, bench = tmp_path / "steps.json", import_module("decode_step")
    written: list[int] = []

    def fails(self: Any, side: str) -> Any:
        bench.select("triton", self.device, torch.float64)  # which has no kernels
        raise RuntimeError("CUDA error: out of luck\nmore of it")

    def falls(self: Any, side: str) -> Any:
        written.append(len(json.loads(file.read_text())["rows"]))
        bench.select("triton", self.device, torch.float64)
        return bench.Row("generate", side, 1, 8)

    monkeypatch.setattr(bench.Bench, "readout", fails)
    monkeypatch.setattr(bench.Bench, "generate", falls)
    monkeypatch.setattr(bench.Bench, "steps", lambda self, side, batch, window: [])
    assert bench.main(["--smoke", "--json", str(file)]) == 0
    notes = [row["note"] for row in json.loads(file.read_text())["rows"]]
    assert written == [1]
    assert notes[0].startswith("failed: RuntimeError: CUDA error: out of luck; Triton kernels cannot run here")
    assert notes[1].startswith("Triton kernels cannot run here, torch takes their place")


@pytest.mark.parametrize("side", ["graph", "int8"])
def test_what_a_recorded_model_reads_stays_alive(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording keeps nothing: what it reads would be freed, and the memory used again."""
    if side == "int8":
        pytest.importorskip("torchao")
    bench, alive = import_module("decode_step"), []

    def record(run: Callable[[], None], wanted: None = None) -> Callable[[], Any]:
        if not isinstance(run, partial):  # a step of the engine, whose tensors have homes
            return taped(run)
        _, query, plan = run.args[0]
        read = [weakref.ref(one) for one in (query.positions, query.ids, plan.positions)]
        return lambda: alive.extend(one() is not None for one in read)

    monkeypatch.setattr(bench, "record", record)
    monkeypatch.setattr(bench, "StaticEngine", Taped)
    monkeypatch.setattr(bench, "select", lambda *_: TORCH)
    with torch.no_grad():
        rows = bench.Bench(bench.arguments(["--smoke"])).steps(side, 1, 8)
    assert [(row.kind, len(row.seconds), len(row.model)) for row in rows] == [("window", 7, 7), ("refresh", 1, 1)]
    assert alive and all(alive)


@pytest.mark.filterwarnings("ignore:Triton kernels cannot run here")
def test_steps_sent_ahead_are_timed_beside_a_host_that_waits(smoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="recordings cannot choose here"):
        smoke.ahead("graph")
    Taped.waits = 0
    waits: list[int] = []
    monkeypatch.setattr(graphs, "obstacle", lambda *_: None)
    monkeypatch.setattr(capture, "cuda", taped)
    monkeypatch.setattr(capture, "chooses", lambda _: True)
    monkeypatch.setattr("dllm_sampler.sampler.StaticEngine", Taped)
    now = smoke.now
    monkeypatch.setattr(smoke, "now", lambda run: (now(run), waits.append(Taped.waits))[0])
    with torch.no_grad():
        row = smoke.ahead("graph")
    assert len(row.seconds) == len(row.plain) == 1
    ahead, waiting = waits[-2] - waits[-3], waits[-1] - waits[-2]
    assert waiting == 16 and ahead < 8


def test_a_kernel_that_torch_replaced_has_no_figure() -> None:
    bench, calls = import_module("kernels"), []

    def run(kernels: Any) -> None:
        calls.append(kernels)
        if kernels is not TORCH:
            backend.warn("the Triton kernel one cannot run, torch takes its place: too large")

    case = bench.Case("one", run, 1)
    row = bench.noted(case, SimpleNamespace(), lambda timed: 1.0, 2, 1)
    assert row.reference == [1.0, 1.0] and not row.kernel and "too large" in row.note
    assert cells(bench.table([row], 1.0))[0]["kernel us"] == "not measured"
    row = bench.noted(replace(case, run=lambda kernels: 1 / 0), TORCH, lambda timed: 1.0, 2, 1)
    assert row.note == "failed: ZeroDivisionError: division by zero" and not row.reference


def test_prompts_of_nearly_one_length_share_recordings() -> None:
    bench = import_module("recordings")
    shared, apart = (bench.counts(bench.sampler("fixed", "dual"), [40, 50, 64], 32, grain) for grain in (32, 1))
    assert sum(shared) == sum(apart) == 3 * 32
    assert apart[0] == 3 * shared[0] and shared[2] > apart[2]


TINY = (
    "--shortest 3 --longest 12 --tokens 15 --block 6 --vocabulary 40 --width 16 --inner 24 --layers 2 --heads 2"
    " --dtype float64 --threshold 0.3 --steps 5 --repeats 2"
)


def test_what_a_ragged_batch_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench, file = import_module("batching"), tmp_path / "batching.json"
    words = [*TINY.split(), "--prompts", "4", "--batches", "1,3,4", "--json", str(file)]
    assert bench.main(words) == 0
    found = json.loads(file.read_text())
    lengths = [len(row) for row in bench.prompts(bench.arguments(words))]
    assert len(set(lengths)) > 1
    rows = {(r["scheduler"], r["cache"], r["loop"], r["batch"]): SimpleNamespace(**r) for r in found["batches"]}
    caches = ("none", "prefix", "dual", "block_causal", "dkv")
    ours = [(scheduler, cache, "sampler") for scheduler in ("threshold", "fixed") for cache in caches]
    plain = [("threshold", c, "lock-step") for c in ("none", "prefix", "dual")]
    assert rows.keys() == {(*name, batch) for name in ours + plain for batch in (1, 3, 4)}
    for row in rows.values():
        assert len(row.seconds) == len(row.ratios) == 2
        assert row.positions >= row.needed > 0 and row.head >= row.head_needed > 0
        assert row.differ == 0  # each prompt as alone, in lock-step too
    # Blocks of 6, 6 and 3 tokens take a step for three tokens, at any batch size.
    alone, whole = (rows["fixed", "none", "sampler", batch] for batch in (1, 4))
    assert alone.forwards == 4 * 5 and whole.forwards == 5
    assert alone.positions == alone.needed == whole.needed == sum(length + 15 for length in lengths) * 5
    assert whole.positions == 4 * (max(lengths) + 15) * 5  # of a rectangle
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


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_rows_in_lock_step_get_the_tokens_of_the_sampler(cache: str) -> None:
    bench = import_module("batching")
    options = bench.arguments([*TINY.split(), "--prompts", "6", "--batches", "1"])
    it = bench.case("threshold", cache, bench.untrained(options), options)
    prompts, meter = bench.prompts(options), bench.Meter()
    with meter.on(it.network):
        tokens, needed = it.loops["sampler"](prompts)
    ours = meter.forwards
    with meter.on(it.network):
        waiting, _ = it.loops["lock-step"](prompts)
    assert torch.equal(waiting, tokens)
    assert meter.forwards >= ours and meter.positions > needed  # rows that wait and padding are paid


def test_what_is_counted_at_the_model() -> None:
    """Packed rows as much as those of a rectangle; what is not counted is no result."""
    bench = import_module("batching")
    network = bench.untrained(bench.arguments([*TINY.split(), "--batches", "1"])).transformer
    meter = bench.Meter()
    for shape in ((3, 4), (1, 12)):
        with meter.on(network):
            hidden = network(torch.zeros(shape, dtype=torch.long), drive=lambda index, layer, hidden, rope: hidden)
            network.head(hidden[:, -2:])
        assert (meter.forwards, meter.positions, meter.head) == (1, 12, 2 * shape[0])
    network(torch.zeros(2, 2, dtype=torch.long))
    assert meter.positions == 12  # the hooks are gone
    with pytest.raises(RuntimeError, match="was not counted"), meter.on(network):
        pass


def test_figures_of_a_batch() -> None:
    bench = import_module("batching")
    row = bench.Row("sampler", "fixed", "dual", 8, 5, 300, 200, 90, 60, 1, [3.0, 2.0, 7.0], [1.5, 1.25, 2.0])
    head, line = (text.strip("| ").split(" | ") for text in bench.table([row], timed=True).splitlines()[::2])
    assert dict(zip(head, line, strict=True)) == {
        "scheduler": "fixed", "cache": "dual", "loop": "sampler", "batch": "8", "forwards": "5", "positions": "300",
        "positions / needed": "1.50", "head rows": "90", "head rows / needed": "1.50", "seconds": "3.00",
        "time": "1.50 (1.25-2.00)", "differ": "1",
    }  # fmt: skip
    assert "seconds" not in bench.table([row], timed=False)
