"""`threads=` of the commands, which alone set the threads of torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_sampler import Sampler
from dllm_sampler.cli import threads
from dllm_sampler.cli.main import main
from dllm_sampler.cli.threads import SMALL, VARIABLES
from dllm_sampler.eval import launch, runner
from dllm_sampler.eval.command import main as evaluate
from dllm_sampler.eval.jobs import jobs
from dllm_sampler.options import check_threads
from dllm_sampler.training import cli as training
from tests.refusals import refused
from tests.sampling import each

pytestmark = pytest.mark.usefixtures("at_a_terminal")


@pytest.fixture(autouse=True)
def seven(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch has seven threads, and the user has set none."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_default", lambda: 7)
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    yield
    torch.set_num_threads(before)


def test_auto_is_one_thread_for_small_models_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, size, device, expected in (
        ("auto", SMALL - 1, "cpu", 1), ("auto", SMALL, "cpu", 7), ("auto", None, "cpu", 7), ("auto", 1, "cuda:0", 7),
        (3, SMALL, "cpu", 3), (3, 1, "cuda", 3), ("auto", 1, "cpu", 1),
    ):  # fmt: skip
        threads.choose(given, size, device)
        assert torch.get_num_threads() == expected, (given, size, device)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    torch.set_num_threads(5)
    threads.choose("auto", 1, "cpu")
    assert torch.get_num_threads() == 5, "what the user has set stays"
    threads.choose(2, 1, "cpu")
    assert torch.get_num_threads() == 2


@each("wrong", ["many", 0, -1, 4097, True, 1.5, None])
def test_wrong_numbers(wrong: Any) -> None:
    with refused("option-range: 4096"):
        check_threads("threads", wrong)


def test_the_library_sets_none(checkpoint: Path) -> None:
    Sampler.from_pretrained(checkpoint, device="cpu").generate("copy: Ada", max_new_tokens=4)
    assert torch.get_num_threads() == 7


@each(("said", "expected"), [([], 1), (["threads=3"], 3)])
def test_every_command(
    said: list[str], expected: int, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*words, *said, "copy: Ada"]) == 0
    assert torch.get_num_threads() == expected
    torch.set_num_threads(7)
    assert evaluate(["task.count=1", "max_new_tokens=8", "device=cpu", "oracle=false", *said]) == 0
    assert torch.get_num_threads() == expected
    for name, more in (("mini", []), ("sft", ["train.tasks={copy: 1}", "train.max_steps=1"])):
        cls = training.read([f"train={name}", *more]).trainer

        def stop(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(cls, "train", stop)
        torch.set_num_threads(7)
        assert (
            training.main([f"train={name}", "train.use_cpu=true", f"train.output_dir={tmp_path / name}", *more, *said])
            == 130
        )
        assert torch.get_num_threads() == expected


def test_a_worker_goes_by_the_users_variables_and_not_by_joblibs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joblib sets them in its workers, to each one's share of the cores: what large models get."""
    found = tuple(jobs(["task.count=1", "max_new_tokens=8", "device=cpu", "oracle=false"]))
    seen: list[int] = []
    monkeypatch.setattr(runner.Runner, "records", lambda *_: seen.append(torch.get_num_threads()) or iter(()))
    for free, expected in ((True, 1), (False, 7)):
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        torch.set_num_threads(7)
        launch.Piece(found, 1, None, free)(type("cfg", (), {"worker": 0}))
        assert seen.pop() == expected


def test_a_run_is_the_run_it_was_before_there_was_auto() -> None:
    identity = jobs(["task.count=1", "device=cpu"])[0].identity
    assert identity["threads"] is None
    assert jobs(["task.count=1", "device=cpu", "threads=2"])[0].identity["threads"] == 2
