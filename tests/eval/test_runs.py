"""Runs: resumed anywhere, the same whatever ran them."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dllm_sampler.core.protocols import Plan
from dllm_sampler.core.values import Canvas, Query, Spent
from dllm_sampler.errors import NoEffectWarning, RowError
from dllm_sampler.eval import command, runner
from dllm_sampler.eval.checked import parse
from dllm_sampler.eval.folders import RunFolder
from dllm_sampler.eval.jobs import jobs
from dllm_sampler.eval.launch import end_with, launch, run_all
from dllm_sampler.eval.measures import summary
from dllm_sampler.eval.oracle import Oracle
from dllm_sampler.eval.runner import History, Runner, Share, numbered
from dllm_sampler.eval.tasks.base import Sample
from dllm_sampler.models.mini_tasks import TASKS
from dllm_sampler.sampler import Sampler
from tests import toys
from tests.refusals import refused
from tests.sampling import few

ROOT = Path(__file__).parents[2]
SMALL = ["scheduler=threshold,wino", "task.operation=copy,shuffle", "task.count=7", "batch_size=3", "device=cpu"]
SMALL += ["dtype=float64"]  # in flight what else is computed at the same time then changes nothing


def evaluate(output: Path, *words: str, shares: tuple[Share, ...] = (Share(),)) -> dict[str, str]:
    found = jobs([*SMALL, *words, f"output={output}"])
    refused: dict[str, str] = {}
    for share in shares:
        refused |= run_all(found, share, "cpu", lambda job: None, lambda done: None)
    return refused


def content(output: Path) -> dict[str, list[dict[str, Any]]]:
    """Everything but times, by the run's name."""
    found = {}
    for file in output.glob("*/samples.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        found[file.parent.name] = [{key: value for key, value in line.items() if key != "times"} for line in lines]
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole")
    assert evaluate(output) == {}
    return output


def test_a_run_directory_says_what_it_is(whole: Path) -> None:
    folder = next(whole.glob("mini-mini-wino-exact-*"))
    about = json.loads((folder / "run.json").read_text())
    assert about["config"]["scheduler"]["name"] == "wino" and about["config"]["seed"] == 0
    assert about["score"] == "exact_match" and about["dependency"] in ("low", "high") and about["samples"] == 7
    (place,) = about["environments"]
    assert {"torch", "python", "commit", "processor", "device"} <= set(place)
    assert sorted(file.name for file in folder.iterdir() if file.name[0] != ".") == ["run.json", "samples.jsonl"]
    lines = content(whole)[folder.name]
    assert [line["index"] for line in lines] == list(range(7)) == [line["seed"] for line in lines]
    assert any(line["revisions"] for lines in content(whole).values() for line in lines), "WINO took something back"


def test_replays_end_in_the_answer(whole: Path) -> None:
    """The step map and the revisions together are the whole history: as many commits as were counted."""
    for lines in content(whole).values():
        for line in lines:
            stood = sum(step >= 0 for step in line["step_map"])
            lost = sum(piece is not None for _, _, piece in line["revisions"])
            assert line["commits"] == stood + lost
            assert all(0 <= step < line["nfe"] for step, _, _ in line["revisions"])
            assert "".join(line["pieces"][: line["answer"] - line["ended"]]) == line["text"]
            assert line["oracle_nfe"] >= 1
            assert line["text_tokens"] == line["answer"] - line["ended"], "mini has one way to write a text"


def test_who_takes_nothing_back_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its commits are those that a watcher counts."""
    (one,) = jobs([*SMALL[1:], "scheduler=threshold", "task.operation=copy", "stop=truncate"])
    runner, batch = Runner(one, "cpu"), one.built_task.samples()[:4]
    watched = History()
    for commits in runner.sampler.stream(runner._prompts(batch), **runner._settings(batch)):
        watched.note(commits.step, commits.step_map, commits.tokens)
    monkeypatch.setattr(Sampler, "stream", None)
    records = [record for some in runner.records([batch], ()) for record in some]
    found = sorted(records, key=lambda record: record.index)
    assert [record.commits for record in found] == watched.commits
    assert [record.revisions for record in found] == watched.revisions == [[]] * 4


def test_steps_that_cannot_be_recorded_are_refused(tmp_path: Path) -> None:
    (why,) = evaluate(tmp_path, "scheduler=threshold", "task.operation=copy", "cuda_graph=true").values()
    assert why == "cuda_graph=true is not supported here (the model is on cpu, not on a GPU). Remove it."


@pytest.mark.slow
def test_the_oracle_is_not_slower_than_what_was_run(tmp_path: Path) -> None:
    """Its own forwards, before the smaller of the two counts; it gives the very answers."""
    saved = 0
    for one in jobs([*SMALL, "task.operation=shuffle", f"output={tmp_path}"]):
        runner, batch = Runner(one, "cpu"), one.built_task.samples()
        answered = [answer for some in runner.answered([batch], ()) for answer in some]
        answered.sort(key=lambda answer: answer.sample.index)
        result = runner.sampler.generate(runner._prompts(batch), **runner._settings(batch))
        plugins = {**runner.plugins, "scheduler": Oracle.of(result.trace)}
        oracle = Sampler(runner.denoiser, tokenizer=runner.tokenizer, **plugins)
        found = oracle.generate(runner._prompts(batch), **runner._settings(batch))
        assert torch.equal(found.tokens, result.tokens)
        assert bool((found.nfe <= result.nfe).all())
        saved += int((result.nfe - found.nfe).sum())
        assert runner._oracle(answered) == found.nfe.tolist()
    assert saved > 0


@pytest.mark.parametrize(
    "how", [["scheduler=threshold"], pytest.param(["batching=static", "dtype=float32"], marks=pytest.mark.slow)]
)
def test_workers_change_nothing(tmp_path: Path, how: list[str]) -> None:
    shares = tuple(Share(rank, 3) for rank in range(3))
    how = [*how, "task.operation=shuffle", "oracle=false"]
    evaluate(tmp_path / "one", *how)
    evaluate(tmp_path / "three", *how, shares=shares)
    assert content(tmp_path / "one") == content(tmp_path / "three")


@few(("scheduler", "batching"), [("threshold", "in_flight"), ("threshold", "static"), ("wino", "static")])
def test_a_sample_that_is_not_finite_is_told_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str, batching: str
) -> None:
    loaded = runner._loaded

    class Poisoned(toys.Spy):
        def __call__(self, canvas: Canvas, query: Query, plan: Plan) -> tuple[torch.Tensor, Spent]:
            hidden, spent = super().__call__(canvas, query, plan)
            return hidden.masked_fill((canvas.layout.seeds == 4)[plan.head_rows.row, None], torch.nan), spent

    def load(*given: Any) -> tuple[Any, Any]:
        denoiser, tokenizer = loaded(*given)
        return Poisoned(denoiser), tokenizer

    monkeypatch.setattr(runner, "_loaded", load)
    words = [f"scheduler={scheduler}", "task.operation=copy", "oracle=false", f"batching={batching}"]
    (why,) = evaluate(tmp_path, *words).values()
    assert "NaN or infinite logits at step 1 for prompt 5" in why
    (one,) = jobs([*SMALL, *words, f"output={tmp_path}"])
    assert RunFolder(one.folder).done() == {0, 1, 2, 3, 5, 6}
    monkeypatch.setattr(runner, "_loaded", loaded)
    assert evaluate(tmp_path, *words) == {} and RunFolder(one.folder).complete


@pytest.mark.slow
def test_the_batch_changes_no_answer(whole: Path, tmp_path: Path) -> None:
    evaluate(tmp_path, "batch_size=4")
    one, two = (sorted(json.dumps(lines) for lines in content(path).values()) for path in (whole, tmp_path))
    assert one == two


@pytest.mark.slow
def test_a_torn_run_goes_on(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker of three is lost, and another's file is cut in the middle of a line: what is whole stays."""
    evaluate(tmp_path, shares=(Share(0, 3), Share(1, 3)))
    assert not content(tmp_path), "nothing is complete"
    parts = sorted(tmp_path.glob("*/part-*.jsonl"))
    text = parts[0].read_bytes()
    parts[0].write_bytes(text[: len(text) - 20])
    before = sum(RunFolder(folder).done().__len__() for folder in tmp_path.iterdir())
    answered: list[int] = []  # prompts of each generation
    prompts = Runner._prompts
    monkeypatch.setattr(Runner, "_prompts", lambda self, batch: answered.append(len(batch)) or prompts(self, batch))
    evaluate(tmp_path)
    assert content(tmp_path) == content(whole)
    # Each generation's prompts are the oracle's, too; whole batches of three run again under WINO.
    assert before > 0 and sum(answered) <= 2 * (28 - before) + 8, "what was there was not done again"
    answered.clear()
    evaluate(tmp_path)
    assert not answered


@pytest.mark.slow
def test_a_run_whose_answers_change_in_length_goes_on(tmp_path: Path) -> None:
    how = ["scheduler=daedal,rho_eos", "scheduler.initial=8", "scheduler.expand=4", "scheduler.eos_tokens=8"]
    evaluate(tmp_path / "cut", *how, shares=(Share(0, 3), Share(1, 3)))
    assert not content(tmp_path / "cut"), "nothing is complete"
    for folder in ("cut", "whole"):
        evaluate(tmp_path / folder, *how)
    assert content(tmp_path / "cut") == content(tmp_path / "whole") != {}


@pytest.mark.slow
def test_one_model_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner._loaded.cache_clear()
    loads: list[object] = []
    load = runner.loading.load
    monkeypatch.setattr(runner.loading, "load", lambda **given: loads.append(given) or load(**given))
    evaluate(tmp_path, "task.count=2")
    assert len(loads) == 1


@pytest.mark.slow
def test_joblib_workers(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    output = tmp_path / "a,b=c d"
    words = [*SMALL, f"output={output}", "workers=2"]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random.py").write_text("raise SystemExit('a file of the working directory was imported')\n")
    assert launch(words, jobs(words), Console(quiet=True)) == {}
    assert content(output) == content(whole)


def test_a_single_worker_of_joblib(tmp_path: Path) -> None:
    """joblib runs it in this process, which must not wait for a parent that is itself."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    command = [
        "-m",
        "dllm_sampler.eval",
        *SMALL[1:],
        "task.count=1",
        "scheduler=threshold",
        f"output={tmp_path}",
        "hydra/launcher=joblib",
    ]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "2 runs in" in done.stdout, done.stderr


def starting(line: Connection) -> None:
    """Starts a worker that has much to do."""
    worker = multiprocessing.get_context("fork").Process(target=working, args=(os.getpid(),))
    worker.start()
    line.send(worker.pid)
    worker.join()


def working(parent: int) -> None:
    end_with(parent)
    time.sleep(60)


def test_a_worker_ends_with_its_command() -> None:
    """Those of joblib went on to the end of their share, held memory, and wrote into the folder."""
    processes = multiprocessing.get_context("fork")
    line, other = processes.Pipe()
    command = processes.Process(target=starting, args=(other,))
    command.start()
    worker = Path("/proc", str(line.recv()))
    assert worker.exists()
    command.kill()
    command.join()
    deadline = time.monotonic() + 30
    while worker.exists() and (worker / "cmdline").read_bytes() and time.monotonic() < deadline:  # none: it has ended
        time.sleep(0.02)
    assert time.monotonic() < deadline


@pytest.mark.slow
def test_a_worker_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one sentence, and the same command makes what is missing."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    (tmp_path / "deadly.py").write_text(
        "import os, pathlib\n"
        "def score(answer, **rest):\n"
        "    file = pathlib.Path(__file__).with_name('killed')\n"
        "    if answer == '7' and not file.exists():\n"
        "        file.touch()\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return 1.0\n"
    )
    lines = [json.dumps({"prompt": "copy: Ada", "answer": str(number)}) for number in range(12)]
    (tmp_path / "asked.jsonl").write_text("\n".join(lines))
    loky = pytest.importorskip("joblib.externals.loky")
    loky.get_reusable_executor().shutdown(wait=True)  # workers of an earlier test do not know the new path
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    monkeypatch.syspath_prepend(tmp_path)
    words = ["task=jsonl", f"task.file={tmp_path / 'asked.jsonl'}", "task.metric=deadly:score", "batch_size=2"]
    words += ["device=cpu", "workers=2", "oracle=false", f"output={tmp_path / 'o'}"]
    with refused("worker-killed"):
        launch(words, jobs(words), Console(quiet=True))
    assert launch(words, jobs(words), Console(quiet=True)) == {}
    (samples,) = content(tmp_path / "o").values()
    assert [sample["index"] for sample in samples] == list(range(12))


@pytest.mark.slow
def test_submitit_on_this_machine(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = [*SMALL, f"output={tmp_path}", "workers=2", "hydra/launcher=submitit_local"]
    assert launch(words, jobs(words), Console(quiet=True)) == {}
    assert content(tmp_path) == content(whole)


@pytest.mark.slow
def test_processes_of_accelerate(whole: Path, tmp_path: Path) -> None:
    """Two processes in the environment that `accelerate launch` gives to those of several GPUs."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    words = [*torchrun, "-m", "dllm_sampler.eval", *SMALL, f"output={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(words, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=300)
    assert content(tmp_path) == content(whole)


def test_a_plug_in_names_samples_by_their_numbers() -> None:
    samples = [Sample(7, ""), Sample(11, "")]
    with refused("function-failed: prompts 8, 12"), numbered(samples):
        raise RowError("function-failed", "the reward failed for {prompts}", [1, 0])


def test_sampling_values_of_a_checkpoint_are_named(checkpoint: Path, tmp_path: Path) -> None:
    """As by `Sampler.from_pretrained`; a configuration that sets the temperature decides it."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.7}')
    words = ["task=mini", "task.operation=copy", "task.count=1", f"model={folder}", f"output={tmp_path / 'out'}"]
    plain, drawn = jobs([*words, "temperature=null,0.5"])
    with pytest.warns(NoEffectWarning, match=r"generation_config.json asks for do_sample=true, temperature=0\.7"):
        Runner(plain, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoEffectWarning)
        Runner(drawn, "cpu")


def test_right_answers_are_scored_in_place_of_answering(tmp_path: Path) -> None:
    rule = ["scheduler=fixed", "scheduler.score=margin", "scheduler.steps=8", "stop=none", "temperature=1"]
    words = ["task=formed", "task.operation=shuffle", "task.count=3", "measure=likelihood", "device=cpu"]
    assert command.main([*words, *rule, f"output={tmp_path}"]) == 0
    (file,) = tmp_path.glob("*/samples.jsonl")
    records = [parse(line, None) for line in file.read_bytes().splitlines()]
    options = {"scheduler": {"name": "fixed", "score": "margin", "steps": 8}, "stop": "none", "temperature": 1.0}
    sampler = Sampler.from_pretrained("mini", **options)
    texts = [one.text or "" for one in records]
    right = [TASKS["shuffle"].check(one.prompt, text) for one, text in zip(records, texts, strict=True)]
    scores = sampler.score([one.prompt for one in records], texts, max_new_tokens=32)
    assert right == [True] * 3 and [one.nfe for one in records] == scores.nfe.tolist()
    assert [one.scores["log_likelihood"] for one in records] == pytest.approx(scores.log_p.tolist(), rel=1e-4)
    assert summary(records, "exact_match")["perplexity"] == pytest.approx(scores.perplexity, rel=1e-4)
    assert summary([replace(records[0], scores={"exact_match": 1.0})], "exact_match")["perplexity"] is None
    assert command.main(["task=markov", "task.count=1", *words[3:], *rule, f"output={tmp_path}"]) == 2
