"""Execution of jobs in this process, in workers of a Hydra launcher, or in processes of `accelerate launch`."""

import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast

import torch
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dllm_sampler.cli import threads
from dllm_sampler.cli.user_files import named_folder, own, read, using
from dllm_sampler.cli.words import quoted
from dllm_sampler.config import PACKAGE
from dllm_sampler.errors import FAULTS, NotWrittenError, UserError, first_line, installing, unknown
from dllm_sampler.eval.folders import RunFolder
from dllm_sampler.eval.jobs import EVAL, Job, of_hydra
from dllm_sampler.eval.runner import Share, run
from dllm_sampler.host import files
from dllm_sampler.models.loading import as_device

LAUNCHER = "hydra/launcher="


def launch(words: Sequence[str], found: Sequence[Job], console: Console) -> dict[str, str]:
    """Run all jobs of a command line, and return the reasons of those that cannot run, by the runs' names."""
    workers = max(job.options.workers for job in found)
    named = any(word.startswith(LAUNCHER) and word != f"{LAUNCHER}basic" for word in words)
    if accelerated() is not None and (named or workers > 1):
        word = next((word for word in words if word.startswith(LAUNCHER)), f"workers={workers}")
        raise UserError(
            "options-conflict",
            f"{word} cannot be combined with accelerate launch or torchrun: both start processes. Remove one of them.",
        )
    alone = not named and workers == 1
    idle = [word for word in words if alone and of_hydra(word) and word != f"{LAUNCHER}basic"]
    if idle:
        raise UserError(
            "option-not-applicable",
            f"{idle[0]} has no effect with workers=1. Set workers=N above 1 or hydra/launcher=NAME, or remove it.",
        )
    share = accelerated() or Share()
    if share.rank == 0:
        files.make_folder(Path(found[0].options.output).expanduser())
        for job in found:
            RunFolder(job.folder).reopen()
    if share.world > 1:
        _state().wait_for_everyone()
    if alone:
        return run_in_process(found, console)
    with watched(found, console):
        return run_in_workers(words, found, workers, named)


def run_in_process(found: Sequence[Job], console: Console) -> dict[str, str]:
    """Run all jobs, or this process's share under accelerate. Return the reason of each refused run by its name."""
    share = accelerated() or Share()
    with bars(console, share.rank == 0) as progress:
        folders = [RunFolder(job.folder) for job in found]
        total = sum(len(job.built_task.samples()) for job in found)
        every = progress.add_task("samples", total=total // share.world or 1)
        progress.update(every, completed=sum(folder.count() for folder in folders) // share.world)

        def begin(job: Job) -> None:
            progress.update(every, description=f"{job.choices['task']} {job.choices['scheduler']}")

        local = int(os.environ.get("LOCAL_RANK", "0"))
        refused = run_all(found, share, device(found, local), begin, lambda done: progress.advance(every, done))
    if share.world > 1:
        _state().wait_for_everyone()
    return refused


def run_in_workers(words: Sequence[str], found: Sequence[Job], workers: int, named: bool) -> dict[str, str]:
    """Run all jobs in workers of the Hydra launcher that the words name, else of joblib, as `run_in_process` does."""
    said = [word for word in words if of_hydra(word) and word != f"{LAUNCHER}basic"]
    if not named:
        said.append(f"{LAUNCHER}joblib")
    parent = None
    if f"{LAUNCHER}joblib" in said:
        parent = os.getpid()
        device(found, 0)  # an unknown device is reported here, not by each process
        if not any(word.startswith("hydra.launcher.n_jobs=") for word in said):
            said.append(f"hydra.launcher.n_jobs={workers}")
    for name in {word.removeprefix(LAUNCHER) for word in said if word.startswith(LAUNCHER)} & set(
        own("hydra/launcher")
    ):
        ConfigStore.instance().store(name, read("hydra/launcher", name).settings, "hydra/launcher")
    output = f"hydra.sweep.dir={quoted(found[0].options.output)}"
    with initialize_config_module(PACKAGE, job_name=EVAL.name, version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        try:
            with files.uninterrupted():  # OmegaConf fails where Ctrl-C comes while it cleans up
                cfg = loader.load_configuration(EVAL.root, [*said, output], RunMode.MULTIRUN)
            HydraConfig.instance().set_config(cfg)
            context = HydraContext(config_loader=loader, callbacks=cast(Any, _NoCallbacks()))
            piece = Piece(tuple(found), workers, parent, not threads.are_set(), named_folder())
            try:
                launcher = Plugins.instance().instantiate_launcher(context, piece, cfg)
            except RuntimeError as error:  # Hydra's, for a class outside of the packages of its plug-ins
                raise UserError(
                    "target-invalid",
                    f"hydra.launcher._target_ is not a launcher ({first_line(error)}). Correct the launcher's file.",
                ) from error
            try:
                with _safe_path():
                    done: Sequence[JobReturn] = launcher.launch([[f"+worker={rank}"] for rank in range(workers)], 0)
            except BrokenExecutor as error:
                raise UserError(
                    "worker-killed", "A worker was killed (by a user or out of memory). Rerun the command to resume."
                ) from error
            except (RuntimeError, ValueError) as error:  # of the launcher, for example without Slurm
                chosen = next(word for word in said if word.startswith(LAUNCHER))
                raise UserError(
                    "config-invalid",
                    f"{chosen} cannot start workers ({first_line(error)}). Correct its settings, or name another.",
                ) from error
        except (HydraException, ImportError) as error:
            raise _explain(error, said, loader) from error
    refused: dict[str, str] = {}
    for job in done:
        refused |= job.return_value  # raises what a worker raised
    return refused


@contextmanager
def _safe_path() -> Iterator[None]:
    """Set PYTHONSAFEPATH, so that new processes do not import modules of the working directory by accident.

    Launchers start `python -c` and `python -m`, which search that directory first. A `random.py` there would replace
    Python's.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        os.environ.pop("PYTHONSAFEPATH")
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


def _explain(error: Exception, said: Sequence[str], loader: Any) -> UserError:
    """Return the error for a launcher that Hydra cannot load: an unknown name or setting, or a missing package."""
    text = first_line(error)
    key = re.search(r"Could not override '(.+?)'", text)
    chosen = next((word for word in said if word.startswith(LAUNCHER)), LAUNCHER)
    if key:
        launcher = loader.load_configuration(EVAL.root, [chosen], RunMode.MULTIRUN).hydra.launcher
        names = [f"hydra.launcher.{name}" for name in launcher if name != "_target_"]
        return unknown("setting of Hydra", key[1], ["hydra/launcher", *names])
    names = loader.get_group_options("hydra/launcher")
    if not {"joblib", "submitit_slurm"} <= set(names):
        return UserError("package-missing", f"{text}. Run {installing('eval')}, or correct {chosen}.")
    if chosen.removeprefix(LAUNCHER) not in names:
        return unknown("hydra/launcher", chosen.removeprefix(LAUNCHER), names)
    detail = f" ({first_line(error.__cause__)})" if error.__cause__ is not None else ""
    return UserError("config-invalid", f"{text}{detail}. Correct the value, or the file of {chosen}.")


def run_all(
    jobs: Sequence[Job], share: Share, device: str, begin: Callable[[Job], None], progress: Callable[[int], None]
) -> dict[str, str]:
    """Run the missing samples of all jobs, and return the reasons of jobs that cannot run, by the runs' names.

    Consecutive jobs with the same model load it once. `begin` is called with each job before its samples, and
    `progress` with the number of samples that were just finished.

    Raises:
        NotWrittenError: samples cannot be written. Later jobs are not run.
        UserError: jobs failed with an exception, for example of a plug-in's code. Their exceptions are printed at once,
            and the error is raised after all other jobs.
    """
    refused, failed = {}, []
    for number, job in enumerate(jobs):
        begin(job)
        try:
            reason = run(job, number, share, device, progress)
        except NotWrittenError as error:
            raise NotWrittenError(f"{error} Then rerun the command. Stored samples are kept.") from error
        except UserError as error:
            if error.code not in FAULTS:
                raise
            print(f"{job.name}: {error}", file=sys.stderr)
            failed.append(job.name)
            continue
        except Exception:  # of a user's own code: the other jobs are run all the same
            traceback.print_exc()
            failed.append(job.name)
            continue
        if reason:
            refused[job.name] = reason
    if failed:
        runs = "this run" if len(failed) == 1 else f"these {len(failed)} runs"
        raise UserError(
            "run-failed",
            f"{runs} ended with an error that is printed above: {', '.join(failed)}."
            " Correct the cause, then rerun the command to resume.",
        )
    return refused


@dataclass(frozen=True)
class Piece:
    """The function that a launcher calls in each worker: it runs the worker's share of all jobs.

    workers: number of workers
    parent: the id of the process that waits for it. None for a job that outlives the command, for example on a cluster
    free: True if the user has not set torch's threads. joblib then sets them to the worker's share of the cores
    config_dir: the folder of the command's `--config-dir`, or None
    """

    jobs: tuple[Job, ...]
    workers: int
    parent: int | None = None
    free: bool = True
    config_dir: Path | None = None

    def __call__(self, cfg: Any) -> dict[str, str]:
        """Run the share of worker `cfg.worker` (from 0), and return the reasons of refused runs by the runs' names."""
        if self.parent not in (None, os.getpid()):  # joblib runs a single worker in this process
            end_with(self.parent)
        for name in threads.VARIABLES if self.free else ():
            os.environ.pop(name, None)  # torch has read it
        share = Share(int(cfg.worker), self.workers)
        gpus = torch.cuda.device_count()
        where = device(self.jobs, share.rank % max(1, gpus))
        with using(self.config_dir):
            return run_all(self.jobs, share, where, lambda job: None, lambda done: None)


def end_with(parent: int) -> None:
    """Start a thread that ends this process after the process `parent` has ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)  # what it has written is whole, whenever it ends

    Thread(target=watch, daemon=True).start()


def device(found: Sequence[Job], local: int) -> str:
    """Return the device of this process. `local` is the process's number on this machine.

    Raises:
        UserError: the device does not exist.
    """
    given = found[0].options.device
    if given != "auto":
        return str(as_device(given))
    return f"cuda:{local}" if torch.cuda.is_available() else "cpu"


def accelerated() -> Share | None:
    """Return this process's share under `accelerate launch`, or None for a single process."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return Share(int(os.environ["RANK"]), world) if world > 1 and "RANK" in os.environ else None


def _state() -> Any:
    from accelerate import PartialState

    # Processes wait for the slowest one, which may be days.
    return PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=30))


class _NoCallbacks:
    """A stand-in for Hydra's callbacks, whose class is private."""

    def on_job_start(self, **_: Any) -> None:
        pass

    def on_job_end(self, **_: Any) -> None:
        pass


def bars(console: Console, shown: bool = True) -> Progress:
    """Return a progress bar with the number of samples, the elapsed time and the estimated time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not shown,
    )


@contextmanager
def watched(found: Sequence[Job], console: Console) -> Iterator[None]:
    """Show a progress bar of the samples that other processes write."""
    folders, over = [RunFolder(job.folder) for job in found], Event()
    with bars(console) as progress:
        every = progress.add_task("samples", total=sum(len(job.built_task.samples()) for job in found))

        def follow() -> None:
            while not over.wait(1.0):
                progress.update(every, completed=sum(folder.count() for folder in folders))

        thread = Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
