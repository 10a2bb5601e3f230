"""The campaign: stages that fail, hang or have no time left; what their files hold; what the figures decide."""

import json
import re
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.refusals import check_refusal
from tests.sampling import each

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GOOD = "import json, sys; json.dump({'n': 3}, open(sys.argv[-1], 'w')); print('fine')"
BAD = "import sys; print('Traceback'); sys.exit('RuntimeError: no luck')"
SLOW = """
import json, subprocess, sys, time
json.dump({'n': 2, 'rows': [{'note': 'half'}]}, open(sys.argv[-1], 'w'))
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
open(sys.argv[-1] + '.pid', 'w').write(str(child.pid))
time.sleep(60)
"""
EMPTY = "import json, sys; json.dump({'rows': [{'note': 'failed: out of memory'}]}, open(sys.argv[-1], 'w'))"


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module("campaign")


@pytest.fixture
def staged(campaign: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Four scripts in place of the benchmarks; a stage may take a second, and needs none."""
    stages = import_module("campaign_stages")
    for name, text in {"good": GOOD, "bad": BAD, "slow": SLOW, "empty": EMPTY}.items():
        (tmp_path / f"{name}.py").write_text(text)

    class Quick(stages.Stage):
        def needs(self, smoke: bool) -> int:
            return self.seconds

        def limit(self, smoke: bool) -> int:
            return 1

    def read(found: Any) -> dict[str, float]:
        return {"over read": found["n"]}

    names = {"slow": "slow.py", "bad": "bad.py", "empty": "empty.py", "step": "good.py", "long": "good.py"}
    found = [Quick(name, "?", file, file, 1000 * (name == "long"), read) for name, file in names.items()]
    monkeypatch.setattr(campaign, "HERE", tmp_path)
    monkeypatch.setattr(campaign, "STAGES", found)
    return campaign


def runs(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    with suppress(OSError):  # it may end meanwhile
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_what_fails_or_hangs_costs_the_others_nothing(
    staged: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert staged.main(["--smoke", "--out", str(out), "--minutes", "5"]) == 0
    found = json.loads((out / "campaign.json").read_text())
    states = {name: (one["state"], one["figures"], one["note"]) for name, one in found["stages"].items()}
    assert states["bad"] == ("failed", {}, "RuntimeError: no luck")
    assert states["empty"] == ("failed", {}, "failed: out of memory")
    assert states["step"] == ("done", {"over read": 3}, "")
    assert states["slow"][:2] == ("stopped", {"over read": 2}) and "half" in states["slow"][2]  # what was there is kept
    assert "long" not in states  # there was no time for it
    assert found["decisions"][0] | {"do": ""} == {
        "figure": "a step of one row, over its floor by reading", "value": 3, "limit": 1.25, "do": "",
    }  # fmt: skip
    printed = capsys.readouterr().out
    assert "over its floor by reading: 3 (limit 1.25) -> find out where the time goes" in printed
    assert "No time was left for long: go on with --continue" in printed
    child, patience = int((out / "slow.json.pid").read_text()), time.monotonic() + 5
    while runs(child) and time.monotonic() < patience:
        time.sleep(0.01)
    assert not runs(child)


def test_it_goes_on_where_it_was(staged: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What has not been run comes before what went wrong; what is done stays."""
    words = ["--smoke", "--out", str(tmp_path / "out"), "--only"]
    assert staged.main([*words, "bad"]) == 1  # nothing was measured
    (tmp_path / "bad.py").write_text(GOOD.replace("3", "1"))
    capsys.readouterr()
    assert staged.main([*words, "bad,step", "--continue"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[:2]] == [
        ["step", "done"], ["bad", "done"],
    ]  # fmt: skip
    (tmp_path / "good.py").write_text(BAD)
    assert staged.main([*words, "bad,step", "--continue"]) == 0
    assert not any(line.startswith(("bad ", "step ")) for line in capsys.readouterr().out.splitlines())
    with pytest.raises(staged.UserError) as error:
        staged.earlier(staged.argparse.Namespace(out=tmp_path / "out", smoke=False))
    check_refusal(error.value, "run-differs: --smoke")
    (tmp_path / "out" / "campaign.json").write_text("{}")
    assert staged.main([*words, "bad", "--continue"]) == 2
    assert "campaign.json" in capsys.readouterr().err


def timed(**more: Any) -> dict[str, Any]:
    """A line of a benchmark."""
    return {"seconds": [0.004, 0.005, 0.009], "note": ""} | more


def window(batch: int, columns: int, seconds: float, note: str = "") -> dict[str, Any]:
    own = {"kind": "window", "batch": batch, "window": columns, "seconds": [seconds], "model": [seconds * 0.9]}
    return own | {"read": 0.004, "copy": 0.005, "note": note}


def files() -> dict[str, Any]:
    """What the stages write on a GPU."""
    loop = {"rows": [timed(plain=[0.02, 0.025, 0.045])]}
    step = {"rows": [timed(kind="refresh"), window(1, 32, 1, note="torch takes its place"), window(1, 32, 0.006)]}
    sizes = [(4, 32), (16, 32), (1, 8), (1, 256)]
    rule = {"span": 6000, "products": 3900, "attention": 300, "head": 270, "small": 500, "gaps": 400, "waits": 60}
    product = {"rows": 32, "note": "", "floor": 1e-4}
    sides = {"library": 1.1e-4, "kernel": 1e-4, "64 128 2 3 4": 0.9e-4}
    case = {"name": "head 16 x 4096, greedy", "kernel": [2e-4], "reference": [1.0], "moved": 800_000_000, "note": ""}
    flown = {"tokens": 3000, "seconds": {"in_flight": [2.0], "static": [3.0]}}
    return {
        "ceilings": {"figures": {"copy": 4e12, "read": 4.5e12, "node": 2e-6, "product": 8e14}},
        "step": step, "int8": step, "compiled": step, "uncached": loop, "dual": loop,
        "batches": {"rows": [window(*size, 0.006) for size in sizes]},
        "windows": {"rows": [window(*size, 0.006) for size in sizes]},
        "products": {"rows": [timed(shape="layer", side=side, **product) for side in sides]},
        "tiles": {"rows": [product | {"shape": "o", "side": s, "seconds": [t]} for s, t in sides.items()]},
        "timeline": {"rows": [{"rule": name, "note": ""} | rule for name in ("fixed", "threshold")]},
        "head": {"about": {"read GB/s": 4500.0}, "rows": [case, case | {"kernel": [], "note": "failed"}]},
        "attention": {"about": {"read GB/s": 4500.0}, "rows": [case]},
        "drafts": {"rows": [{"branches": n, "seconds": [1 + n // 4 / 5]} for n in (1, 2, 3, 4)]},
        "in_flight": {"rows": [flown]},
    }  # fmt: skip


def test_every_rule_has_its_figure(campaign: Any) -> None:
    found = files()
    read = {stage.name: stage.read(found[stage.name]) for stage in campaign.STAGES}
    assert read["step"] == pytest.approx({"ms": 6, "over read": 1.5, "over copy": 1.2, "outside": 0.1})
    assert read["uncached"]["speed"] == 5 and read["ceilings"]["read TB/s"] == 4.5
    assert read["head"] == pytest.approx({"lowest": 0.889, "head 16 x 4096 greedy": 0.889}, abs=1e-3)
    assert read["drafts"]["free"] == 3 and read["in_flight"]["tokens/s"] == 1500
    assert read["tiles"] == {"best over library": pytest.approx(0.9 / 1.1)}
    assert read["timeline"]["small and gaps ms"] == 0.9 and read["timeline"]["waits"] == 0.01
    rules = import_module("campaign_rules")
    measured = campaign.decided({name: {"figures": figures} for name, figures in read.items()})
    assert [one["figure"] for one in measured] == [rule.figure for rule in rules.RULES]
    assert campaign.decided({}) == []
    for rule in rules.RULES:
        assert rule.above != rule.within


@each("smoke", [False, True])
def test_every_stage_is_a_command_of_its_benchmark(
    smoke: bool, campaign: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its words are read as the benchmark reads them where there is a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for stage in campaign.STAGES:
        script, *words = shlex.split(stage.smoke if smoke else stage.command)
        assert (campaign.HERE / script).is_file()
        options = import_module(script.removesuffix(".py")).arguments([*words, "--json", str(tmp_path / "a.json")])
        if script == "kernels.py":
            cases = import_module("kernel_cases").cases(torch.device("cpu" if smoke else "cuda"), smoke)
            assert any(text in case.name for case in cases for text in options.only), stage.name


def test_every_stage_runs(campaign: Any, tmp_path: Path) -> None:
    assert campaign.main(["--smoke", "--out", str(tmp_path), "--official", str(_published(tmp_path))]) == 0
    found = json.loads((tmp_path / "campaign.json").read_text())["stages"]
    assert {name: one["state"] for name, one in found.items()} == {stage.name: "done" for stage in campaign.STAGES}
    assert all(one["figures"] for one in found.values())
    assert found["ceilings"]["figures"]["read TB/s"] > 0


def _published(folder: Path) -> Path:
    from tests.unit.test_benchmarks import PUBLISHED

    file = folder / "generate.py"
    file.write_text(PUBLISHED)
    return file


def test_a_clock_leaves_nothing_to_write_back(campaign: Any) -> None:
    clocks = import_module("clocks")
    clock = clocks.Clock(torch.device("cpu"))
    before, calls = clock.flush._version, []
    timer = clock.replayed([lambda: calls.append("a"), lambda: calls.append("b")])
    calls.clear()
    assert timer() > 0 and calls == ["a", "b"]
    assert clock.flush._version == before

    class Seconds(clocks.Clock):
        def __call__(self, run: Any) -> float:
            return 6.0

    assert Seconds(torch.device("cpu")).replayed([lambda: None] * 3)() == 2, "of one call"
    clock.gpu = True
    assert clock.copies(2**40) == 1 and clock.copies(2**27) == 8 and clock.copies(1) == clocks.MOST


def test_gaps_and_kernels_of_a_profile(campaign: Any) -> None:
    timeline = import_module("timeline")
    names = ["nvjet_hsh_64x8", "attention_kernel", "norm_kernel", "head_kernel"]
    begins = [(0.0, 10.0), (11.0, 15.0), (12.0, 13.0), (45.0, 50.0)]  # a gap, one within another, a wait
    found = timeline.summary([timeline.Event(*at, name) for at, name in zip(begins, names, strict=True)][::-1], 2)
    expected = {"span": 25, "busy": 9.5, "gaps": 0.5, "waits": 15, "nodes": 2}
    assert {name: found[name] for name in expected} == expected
    kinds = {"products": 5, "attention": 2, "head": 2.5, "small": 0.5}
    assert {name: found[name] for name in kinds} == kinds
    assert found["kernels"][0] == {"name": names[0], "runs": 1, "us": 10, "median": 10}


def test_the_products_of_a_layer_are_the_sum(campaign: Any) -> None:
    products = import_module("products")
    rows = [products.Row(name, 4, "library", 10, 0.5, [1.0, 2.0]) for name in products.SHAPES]
    (layer,) = products.layers([*rows, products.Row("qkv", 4, "kernel", 10, 0.5, [1.0])])  # three are missing
    assert (layer.side, layer.moved, layer.floor, layer.seconds) == ("library", 40, 2.0, [4.0, 8.0])


def test_a_floor_is_the_longer_of_memory_and_arithmetic(campaign: Any) -> None:
    products, clocks = import_module("products"), import_module("clocks")
    limits = products.Limits(clocks.Bandwidth(copy=1.0, read=4e12), 8e14)
    assert limits.floor(4e6, 8e5) == 1e-6 and limits.floor(4e6, 8e9) == 1e-5
    clock = clocks.Clock(torch.device("cpu"))
    for rows, read in ((1, True), (64, False)):
        limits = products.Limits(clocks.Bandwidth(copy=1.0, read=1e9), 5e9)
        (row,) = products.measure("o", (64, 64), rows, limits, clock, SimpleNamespace(tiles=False, repeats=1))
        assert row.floor == pytest.approx(row.moved / 1e9 if read else 2 * rows * 64 * 64 / 5e9)


def test_a_wrong_product_has_no_figure(campaign: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    products, clocks = import_module("products"), import_module("clocks")
    sides = {"library": torch.nn.functional.linear, "kernel": lambda x, weight: 1.1 * x @ weight.T}
    monkeypatch.setattr(products, "sides", lambda *_: sides.items())
    limits, clock = products.Limits(clocks.Bandwidth(1.0, 1e9), 1e9), clocks.Clock(torch.device("cpu"))
    good, bad = products.measure("o", (64, 64), 2, limits, clock, SimpleNamespace(tiles=False, repeats=1))
    assert len(good.seconds) == 1 and not good.note
    assert not bad.seconds and "another answer than the library's" in bad.note


def test_no_call_of_a_graph_finds_its_data_in_the_cache(campaign: Any) -> None:
    """The calls of one graph go through more than an H200's 50 MB: those of the smallest work of `kernels.py` too."""
    pytest.importorskip("triton")
    clock = import_module("clocks").Clock(torch.device("cpu"))
    clock.gpu = True
    dream = import_module("kernel_cases").Layer(torch.device("cpu"), torch.bfloat16, 1, 8, 64, 28, 4, 128)
    for make in (dream.norm, dream.qkv_rope, dream.swiglu):
        moved = make().moved
        assert moved * clock.copies(moved) > 70e6


def test_reading_compiles_to_loads_of_sixteen_bytes(
    campaign: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ahead, kernels, reading = map(import_module, ("ahead_of_time", "kernel_configurations", "reading"))
    signature = {"source": "*i32", "out": "*i32", "size": "i32:16", "BLOCK": "constexpr"}
    it = kernels.Configuration("read", reading.read_kernel, signature, {"BLOCK": reading.BLOCK}, reading.WARPS)
    binary = ahead.build(it, ahead.TARGETS["sm_90"])
    assert "v4.b32" in binary.asm["ptx"]
    assert ahead.resources(binary.asm)[1] == 0


def test_the_script_for_a_gpu_names_stages_and_tests_that_there_are(campaign: Any) -> None:
    text = (ROOT / "benchmarks" / "gpu_hour.sh").read_text()
    named = [name for line in re.findall(r"^  stages \d+ (\S+)$", text, re.M) for name in line.split(",")]
    assert set(named) == {stage.name for stage in campaign.STAGES}
    assert (
        named[: named.index("batches") + 1] == [stage.name for stage in campaign.STAGES][: named.index("batches") + 1]
    )
    files = re.findall(r"tests/gpu/\w+\.py", text)
    assert files and all((ROOT / file).is_file() for file in files)
    for name in re.findall(r"-k (\w+)", text):
        assert name in (ROOT / "tests/gpu/test_cuda_sampler.py").read_text()
    assert (
        text.count("stages 570") == 3
        and subprocess.run(["bash", "-n", "benchmarks/gpu_hour.sh"], cwd=ROOT).returncode == 0
    )
    written = re.findall(r"^  (?:tests|kernels) \d+ (\S+)", text, re.M)
    assert len({"campaign.json", "campaign.tgz", *written}) <= 8


def test_the_script_keeps_results_and_goes_on_with_them(tmp_path: Path) -> None:
    command = ["bash", "benchmarks/gpu_hour.sh", "other", str(tmp_path / "out")]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 2
    assert list((tmp_path / "out").iterdir()) == []
