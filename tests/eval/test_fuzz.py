"""The fuzz: a short run of each kind finds nothing, a planted fault is found, made smaller, saved and replayed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console

from dllm_sampler import UserError
from dllm_sampler.core.values import Canvas
from dllm_sampler.eval.fuzz import batches, calls, harness, inputs, mutations, patience, rows, scene
from dllm_sampler.eval.fuzz.__main__ import main
from dllm_sampler.eval.fuzz.harness import PASSED, Case, Outcome, crashed, drawn, guarded, sentence, shrunk
from dllm_sampler.eval.fuzz.patience import Patience, members

QUIET = Console(quiet=True)


def tried(name: str, count: int, first: int = 0, folder: Path | None = None) -> harness.Tally:
    """Cases of seed 0, in this process."""
    check = harness.named(name).check
    return harness.run(
        name, 0, cases=count, first=first, folder=folder, attempt=lambda case: guarded(check, case), console=QUIET
    )


def test_a_row_is_the_row_alone_whatever_the_configuration() -> None:
    tally = tried("batches", 12)
    assert tally.failed == 0, tally.faults
    assert tally.counts["passed"] >= 6 and tally.counts["refused"] >= 2


def test_bad_inputs_end_in_a_sentence() -> None:
    tally = tried("inputs", 2, first=100)
    assert tally.failed == 0, tally.faults
    assert tally.counts["refused"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seconds"), [("batches", 120), ("inputs", 120), ("kills", 240)])
def test_a_long_run(name: str, seconds: int, tmp_path: Path) -> None:
    assert main([name, "--seconds", str(seconds), "--seed", "1", "--output", str(tmp_path)]) == 0
    assert [file.name for file in tmp_path.iterdir()] == [f"tally-{name}-1-0.json"]


@pytest.mark.slow
def test_a_fault_of_the_batch_is_found_and_made_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that count a step too many where there are two of them."""
    advance = Canvas.advance

    def wrong(self: Canvas, *given: Any, **named: Any) -> Canvas:
        after = advance(self, *given, **named)
        vars(after)["nfe"] = after.nfe + (len(after.nfe) > 1)
        return after

    monkeypatch.setattr(Canvas, "advance", wrong)
    tally = tried("batches", 3, folder=tmp_path)
    assert tally.failed > 0 and tally.tried == 3
    (file, *_) = tmp_path.glob("batches-*.json")
    saved = json.loads(file.read_text())["case"]
    assert len(saved["prompts"]) == 2 and saved["guide"] == [] and saved["many"] is None
    assert guarded(batches.FUZZ.check, saved).kind == "wrong"
    monkeypatch.setattr(Canvas, "advance", advance)
    assert guarded(batches.FUZZ.check, saved).kind in ("passed", "refused")


@pytest.mark.parametrize("name", ["batches", "inputs", "kills"])
def test_a_case_is_the_same_in_every_process(name: str) -> None:
    for number in range(30):
        case = drawn(name, 3, number)
        assert case == drawn(name, 3, number) == json.loads(json.dumps(case))
        for one in harness.named(name).simpler(case):
            assert one != case and one.keys() == case.keys()


def test_every_broken_promise_of_a_result_is_seen() -> None:
    plain = {group: {"name": name} for group, name in (("cache", "none"), ("blocks", "fixed"), ("stop", "none"))}
    case: Case = {
        **batches.OPTIONAL, **plain, "family": "llada", "dtype": "float64", "scheduler": {"name": "threshold"},
        "prompts": [[5, 11], [7]], "tokens": 6, "seeds": [1, 2],
    }  # fmt: skip
    sampler = batches.built(case)

    def result() -> Any:
        return sampler.generate(case["prompts"], max_new_tokens=6, seed=case["seeds"])

    assert rows.broken(result(), case, sampler) == ""
    for field, value, says in [
        ("tokens", 39, "mask"), ("tokens", -1, "vocabulary"), ("lengths", 9, "length"), ("nfe", 0, "forward"),
        ("complete", False, "reason"),
    ]:  # fmt: skip
        bad = result()
        getattr(bad, field)[1] = value
        assert says in rows.broken(bad, case, sampler), field
    for field, value, says in [
        ("ids", 3, "prompt changed"),
        ("logprob", float("nan"), "not finite"),
        ("logprob", 1, "1"),
    ]:
        bad = result()
        getattr(bad.trace, field)[:] = value
        assert says in rows.broken(bad, case, sampler), field
    given = case | {"given": {"suffix": [[1], [2]]}}
    assert "given token" in rows.broken(result(), given, sampler)
    assert "max_steps" in rows.broken(result(), case | {"max_steps": 1}, sampler)
    one, two = result(), result()
    assert rows.unlike(one, 0, two, exact=True, computed=True) == ""
    two.trace.logprob[0] += 1e-6
    assert "logprob" in rows.unlike(one, 0, two, exact=True, computed=True)
    assert rows.unlike(one, 0, two, exact=False, computed=True) == ""
    two.tokens[0, 2] += 1
    assert "tokens" in rows.unlike(one, 0, two, exact=False, computed=True)


def test_what_an_ending_means() -> None:
    def ended(words: list[str], must: str = "") -> Outcome:
        case = {"command": "dllm-sample", "words": words, "file": None, "must": must, "process": False}
        return guarded(inputs.FUZZ.check, case)

    right = ["copy: Ada", "model=ck", "max_new_tokens=4", "device=cpu"]
    assert ended(right) == PASSED
    assert ended(right, "a mistake").kind == "wrong"
    assert ended([*right, "shceduler=fixed"]).kind == "refused"
    assert sentence("a sentence").kind == "refused"
    assert sentence("").kind == sentence("x" * 99999).kind == "wrong"
    with pytest.raises(IndexError) as raised:
        torch.zeros(2)[5]
    assert crashed(raised.value).kind == "traceback" and "IndexError" in crashed(raised.value).fault
    assert guarded(lambda case: calls.check(case), {"call": "generate", "given": {}, "family": "llada"}) == PASSED


@pytest.mark.slow
def test_without_a_mistake_everything_runs() -> None:
    """A command that is refused as it is would hide every mistake."""
    words = [inputs.words(kind) for kind in inputs.BASE] + [(command, words) for command, words, _ in inputs.FILES]
    for command, given in words:
        case = {"command": command, "words": given, "file": None, "must": "", "process": False}
        assert guarded(inputs.FUZZ.check, case) == PASSED, given


def test_a_command_in_a_process_of_its_own_runs() -> None:
    assert "dllm-sample: unknown flag '--nothing'" in scene.started("dllm-sample", ["--nothing"]).err


def test_what_names_the_file_with_the_mistake_stays() -> None:
    """Without `model=BERT` its config is not read, and the command is right."""
    file = {"name": "BERT/config.json", "content": ""}
    case = {"command": "dllm-sample", "words": ["a", "model=BERT"], "file": file, "must": "x", "process": False}
    assert [one["words"] for one in inputs.FUZZ.simpler(case)] == [["model=BERT"]]


@pytest.mark.parametrize(("words", "file"), [(["a", "b", "mistake"], None), (["a"], {"name": "f", "content": ""})])
def test_a_mistake_is_not_taken_out(words: list[str], file: dict[str, str] | None) -> None:
    case = {"command": "dllm-sample", "words": words, "file": file, "must": "a mistake", "process": False}
    smaller = [one["words"] for one in inputs.FUZZ.simpler(case)]
    assert smaller == ([["b", "mistake"], ["a", "mistake"]] if file is None else [[]])


def test_mutations_change_what_they_are_given() -> None:
    random = Random(0)
    node = {"a": [1, {"b": "c"}], "d": 2.5}
    changed = sum(mutations.value(random, node) != node for _ in range(50))
    assert changed > 40 and node == {"a": [1, {"b": "c"}], "d": 2.5}
    assert sum(mutations.typo(random, "threshold") != "threshold" for _ in range(50)) > 40
    assert len({mutations.file(random, b'{"a": 1}', "x.json") for _ in range(50)}) > 10


class Planted:
    """Cases of numbers; what takes too long, dies or is even shows."""

    limit: ClassVar[float] = 1.0

    def draw(self, random: Random) -> Case:
        return {"items": [random.randint(0, 99) for _ in range(6)]}

    def check(self, case: Case) -> Outcome:
        if case["items"] == ["sleep"]:
            time.sleep(60)
        if case["items"] == ["die"]:
            raise SystemExit(3)
        if case["items"] == ["refuse"]:
            raise UserError("no")
        return Outcome("wrong", "an even one", "even") if any(one % 2 == 0 for one in case["items"]) else PASSED

    def simpler(self, case: Case) -> Iterator[Case]:
        for at in range(len(case["items"])):
            yield {"items": case["items"][:at] + case["items"][at + 1 :]}

    def command(self, case: Case) -> str | None:
        return "echo" if case["items"] else None


def test_shrinking_ends_at_one_item() -> None:
    fuzz, case = Planted(), {"items": [1, 3, 4, 5, 6]}
    small, outcome = shrunk(fuzz, fuzz.check, case, fuzz.check(case))
    assert len(small["items"]) == 1 and small["items"][0] % 2 == 0 and outcome.fault == "even"


def test_what_takes_too_long_is_not_made_smaller() -> None:
    """A smaller case would take as long, and one that is slow only when smaller would look like the same fault."""
    hang, case = Outcome("hang", "", "hang"), {"items": [1, 3]}
    assert shrunk(Planted(), lambda _: hang, case, hang) == (case, hang)


@pytest.mark.parametrize("kind", inputs.BASE)
def test_a_smaller_case_keeps_what_makes_its_run_short(kind: str) -> None:
    """Without `train.steps` a training that ends at once goes on for a day."""
    command, words = inputs.words(kind)
    case = {"command": command, "words": [*words, "x"], "file": None, "must": "", "process": False}
    bounds = {word for word in words if word.partition("=")[0] in inputs.BOUNDS}
    assert len(bounds) >= {"dllm-sample": 1, "dllm-eval": 2, "dllm-tune": 3, "dllm-train": 3}.get(kind, 0)
    smaller = list(inputs.FUZZ.simpler(case))
    assert smaller and all(bounds <= {*one["words"]} for one in smaller)


def test_a_run_that_is_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures are on the disk after each case, also those of a failure that is being made smaller."""
    monkeypatch.setattr(harness, "named", lambda name: Planted())

    def run(kill: Callable[[Case, int], bool], first: int, cases: int) -> harness.Tally:
        tried: list[Case] = []

        def attempt(case: Case) -> Outcome:
            tried.append(case)
            if kill(case, len(tried)):
                raise KeyboardInterrupt
            return Planted().check(case)

        return harness.run("planted", 4, cases=cases, first=first, folder=tmp_path, attempt=attempt, console=QUIET)

    def saved() -> dict[str, Any]:
        (file,) = tmp_path.glob("tally-*.json")
        return json.loads(file.read_text())

    whole = run(lambda *_: False, 0, 12)
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(KeyboardInterrupt):
        run(lambda case, _: len(case["items"]) < 6, 0, 12)
    assert saved()["next"] == sum(saved()["counts"].values()) == 1 and saved()["faults"] == {"wrong even": 1}
    (path,) = saved()["saved"].values()
    assert json.loads(Path(path).read_text())["case"] == Planted().draw(Random("planted 4 0"))
    with pytest.raises(KeyboardInterrupt):
        run(lambda _, tried: tried == 4, 1, 11)
    assert saved()["next"] == 4
    found = run(lambda *_: False, 4, 8)
    assert (found.counts, found.faults, found.first, found.next) == (whole.counts, whole.faults, 0, 12)
    assert {key: saved()[key] for key in ("counts", "saved", "next")} == {
        "counts": found.counts, "saved": found.saved, "next": 12
    }  # fmt: skip
    assert run(lambda *_: False, 100, 1).tried == 1, "no tally ends there"
    (tmp_path / "tally-planted-4-0.json").write_text("[]")
    with pytest.raises(UserError, match="no tally of a fuzz run: remove it"):
        run(lambda *_: False, 12, 1)


@pytest.mark.slow
def test_what_hangs_or_dies_is_told_and_the_next_case_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from multiprocessing import get_context

    monkeypatch.setattr(harness, "named", lambda name: Planted())
    monkeypatch.setattr(harness.multiprocessing, "get_context", lambda kind: get_context("fork"))
    monkeypatch.setattr(patience, "SLOW", [0.5])
    assert patience.patient(Planted.limit) == 0.5
    worker = harness.Worker("planted")
    kinds = [worker({"items": items}).kind for items in (["sleep"], ["die"], ["refuse"], [1], [2])]
    worker.close()
    assert kinds == ["hang", "traceback", "refused", "passed", "wrong"]


def test_what_a_process_waits_for_a_core_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter([{1: 5.0, 2: 7.0}, {1: 6.0, 2: 15.0}, {1: 9.0, 3: 1.0}, {}])  # seconds, in all, of some processes
    monkeypatch.setattr(Patience, "_waited", lambda self: next(waits).items())
    clock = iter([100.0, 110.0, 120.0, 130.0, 131.0])
    monkeypatch.setattr(patience.time, "monotonic", lambda: next(clock))
    one = Patience(0)
    assert [one.spent() for _ in range(4)] == [10 - 8, 20 - 8 - 3, 30 - 8 - 3, 30 - 8 - 3]


@pytest.mark.slow
def test_waits_for_a_core_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that compute all the time, on one core: each waits half of it."""
    code = "import time, os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); end = time.monotonic() + 1.5\n"
    code += "while time.monotonic() < end: pass"
    monkeypatch.setattr(patience, "LOOK", 0.2)
    begun = time.monotonic()
    (one, other) = [subprocess.Popen([sys.executable, "-c", code], start_new_session=True) for _ in range(2)]
    assert members(one.pid) == [one.pid]
    found, spent = Patience(one.pid), 0.0
    while one.poll() is None:
        spent = found.spent()
        time.sleep(0.05)
    assert 0 < spent < 0.8 * (time.monotonic() - begun)
    other.wait()


def test_mistakes_of_the_command_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("{}")
    for words in (
        ["nothing"],
        ["batches", "--seconds", "0"],
        ["batches", "--first", "-1"],
        ["batches", "--case", "no"],
    ):
        assert main(words) == 2
    assert main(["batches", "--case", str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().err.count("python -m dllm_sampler.eval.fuzz: ") == 5
