"""Runs a configuration: batch by batch what its directory does not have yet."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dllm_sampler import config
from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.errors import UserError
from dllm_sampler.eval.folders import RunFolder
from dllm_sampler.eval.jobs import Job
from dllm_sampler.eval.oracle import LEGAL_STOPS, Oracle
from dllm_sampler.eval.records import Record
from dllm_sampler.eval.tasks.base import Answer, Sample
from dllm_sampler.models import loading
from dllm_sampler.models.cfg import guided
from dllm_sampler.result import Result
from dllm_sampler.sampler import Sampler
from dllm_sampler.stops.end_tokens import PrefixStop

Begin = Callable[[Job], None]
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Share:
    """Which of several processes this one is; they deal the batches out among themselves."""

    rank: int = 0
    world: int = 1

    def has(self, job: int, batch: int) -> bool:
        """Whether a batch of a job is for this process; the first batches of all jobs are not for the same one."""
        return (job + batch) % self.world == self.rank


def run_all(jobs: Sequence[Job], share: Share, device: str, begin: Begin, progress: Progress) -> dict[str, str]:
    """Do what is missing of the jobs; returns why some cannot run, by name.

    Args:
        jobs: in their order; neighbours of the same model share it.
        share: the part of them that is for this process.
        device: where the model lives.
        begin: called with each job before its samples.
        progress: called with the number of samples that were just done.
    """
    refused = {}
    for number, job in enumerate(jobs):
        begin(job)
        if reason := run(job, number, share, device, progress):
            refused[job.name] = reason
    return refused


def run(job: Job, order: int, share: Share, device: str, progress: Progress) -> str | None:
    """Do what is missing of a job's share of samples; `order` is its place among the jobs.

    Returns:
        Why the configuration cannot run; None if it can.
    """
    folder = RunFolder(job.folder)
    if folder.complete:
        folder.tidy()
        return None
    folder.begin(job, device)
    samples = job.built_task.samples()
    if folder.finish(job.built_task):
        return None
    if job.options.threads:
        torch.set_num_threads(job.options.threads)
    try:
        runner = Runner(job, device)
        done, size = folder.done(), job.options.batch_size
        # A batch is always the same samples, whoever runs it and whatever was done before: so is every bit of it.
        for number, first in enumerate(range(0, len(samples), size)):
            batch = samples[first : first + size]
            missing = [sample for sample in batch if sample.index not in done]
            if missing and share.has(order, number):
                wanted = {sample.index for sample in missing}
                folder.add(record for record in runner.answer(batch) if record.index in wanted)
                progress(len(missing))
    except UserError as error:
        reason = " ".join(str(error).split())
        folder.refuse(reason)
        return reason
    folder.finish(job.built_task)
    return None


class Runner:
    """A sampler for one job, and what turns its results into records."""

    def __init__(self, job: Job, device: str):
        task, options = job.built_task, job.options
        self.job = job
        self.denoiser, self.tokenizer = _model(job, device)
        self.plugins = {group: config.build(group, spec) for group, spec in job.plugins.items()}
        self.guides: dict[str, Any] = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
        self.sampler = Sampler(
            self.denoiser,
            tokenizer=self.tokenizer,
            compat=options.compat,
            max_steps=options.max_steps,
            backend=options.backend,
            cuda_graph=options.cuda_graph,
            compile=options.compile,
            **self.plugins,
            **self.guides,
        )
        self.sampler.lay_out()
        if self.tokenizer is None and any(isinstance(sample.prompt, str) for sample in task.samples()[:1]):
            raise UserError(f"task={job.choices['task']} has text prompts, and the model has no tokenizer")

    def answer(self, batch: Sequence[Sample]) -> list[Record]:
        """Run one batch."""
        begun = time.perf_counter()
        _reset_peak(self.denoiser)
        history, result = self._generate(batch)
        seconds, peak = time.perf_counter() - begun, _peak(self.denoiser)
        fewest = self._oracle(batch, result) if self.job.options.oracle else [None] * len(batch)
        return [
            self._record(sample, row, result, history, fewest[row], (seconds, len(batch), peak))
            for row, sample in enumerate(batch)
        ]

    def _generate(self, batch: Sequence[Sample]) -> tuple[_History, Result]:
        if not self.sampler.plugins.scheduler.traits.revises:  # the result has the whole step map
            result = self.sampler.generate(self._prompts(batch), **self._settings(batch))
            return _History.of(result), result
        history, last = _History(), None
        for commits in self.sampler.stream(self._prompts(batch), every=1, **self._settings(batch)):
            history.note(commits.step, commits.step_map, commits.tokens)
            last = commits.result
        assert last is not None
        return history, last

    def _prompts(self, batch: Sequence[Sample]) -> list[Any]:
        prompts: list[Any] = [sample.prompt for sample in batch]
        if self.job.options.chat:
            return [[{"role": "user", "content": text}] if isinstance(text, str) else text for text in prompts]
        return [list(prompt) if not isinstance(prompt, str) else prompt for prompt in prompts]

    def _settings(self, batch: Sequence[Sample]) -> dict[str, Any]:
        return {
            "max_new_tokens": self.job.max_new_tokens,
            "block_length": self.job.options.block_length,
            "seed": [self.job.options.seed + sample.index for sample in batch],
        }

    def _oracle(self, batch: Sequence[Sample], result: Result) -> list[int | None]:
        """The fewest forwards found that lead to these answers, with perfect knowledge of them.

        What the scheduler did itself is one way to get there, so it is never more than that.
        """
        stop = self.plugins["stop"]
        legal = isinstance(stop, LEGAL_STOPS) and getattr(stop, "mode", None) != "predicted"
        plugins = {**self.plugins, "scheduler": Oracle.of(result), "stop": stop if legal else PrefixStop()}
        try:
            oracle = Sampler(
                self.denoiser, tokenizer=self.tokenizer, backend=self.job.options.backend, **plugins, **self.guides
            )
            if any(guide.draws for guide in oracle.plugins.guides):
                return [None] * len(batch)  # a draw is not the same at another step
            found = oracle.generate(self._prompts(batch), **self._settings(batch))
        except UserError:  # the model or a plug-in has no place for it
            return [None] * len(batch)
        fewest: list[int | None] = []
        for row, length in enumerate(result.lengths.tolist()):
            whole = bool(result.complete[row]) and bool(found.complete[row])
            same = torch.equal(found.tokens[row, :length], result.tokens[row, :length])
            fewest.append(min(int(found.nfe[row]), int(result.nfe[row])) if whole and same else None)
        return fewest

    def _record(
        self,
        sample: Sample,
        row: int,
        result: Result,
        history: _History,
        fewest: int | None,
        times: tuple[float, int, int],
    ) -> Record:
        trace, spec = result.trace, self.denoiser.spec
        tokens, answer = result.tokens[row].tolist(), int(result.lengths[row])
        ended = answer > 0 and tokens[answer - 1] == spec.eos_id
        text = None if result.texts is None else result.texts[row]
        steps = result.step_map[row].tolist()
        sure = trace.logprob[row, trace.origin :].exp().tolist()
        grades = self.job.built_task.grade(sample, Answer(text or "", tokens[: answer - ended]))
        seconds, batch, peak = times
        return Record(
            index=sample.index,
            seed=self.job.options.seed + sample.index,
            prompt=sample.prompt if isinstance(sample.prompt, str) else list(sample.prompt),
            text=text,
            scores={name: float(value) for name, value in grades.items()},
            complete=bool(result.complete[row]),
            prompt_tokens=trace.origin - int(trace.begin[row]),
            canvas=len(tokens),
            answer=answer,
            ended=ended,
            text_tokens=encoded_again(text, self.tokenizer),
            nfe=int(result.nfe[row]),
            rows=int(trace.rows[row]),
            commits=history.commits[row],
            oracle_nfe=fewest,
            tokens=tokens,
            pieces=[self._piece(token) for token in tokens],
            step_map=steps,
            # two digits: the others depend on how many rows were multiplied together
            confidence=[round(one, 2) if step >= 0 else 0.0 for one, step in zip(sure, steps, strict=True)],
            revisions=[
                [step, place, None if token is None else self._piece(token)]
                for step, place, token in history.revisions[row]
            ],
            seconds=round(seconds, 6),
            batch=batch,
            peak_memory=peak,
        )

    def _piece(self, token: int) -> str:
        return str(token) if self.tokenizer is None else str(self.tokenizer.decode([token]))


def encoded_again(text: str | None, tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """How many tokens, none of them special, a text has: not always as many as it was decoded from."""
    if text is None or tokenizer is None:
        return None
    return len(tokenizer.encode(text, add_special_tokens=False))


class _History:
    """What happened to each position, from one view of the canvas to the next."""

    def __init__(self) -> None:
        self.commits: list[int] = []
        self.revisions: list[list[tuple[int, int, int | None]]] = []  # forward, position, token or None: taken back
        self.before: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, result: Result) -> _History:
        """That of a generation in which nothing was taken back."""
        made = cls()
        made.commits, made.revisions = (result.step_map >= 0).sum(1).tolist(), [[] for _ in result.tokens]
        return made

    def note(self, step: int, step_map: Tensor, tokens: Tensor) -> None:
        """Compare the step map and tokens `[B, N]` after `step` forwards with those before."""
        if self.before is None:
            self.before = torch.full_like(step_map, -1), tokens
            self.commits, self.revisions = [0] * len(tokens), [[] for _ in tokens]
        old, written = self.before
        changed = step_map != old
        wrote = (changed & (step_map >= 0)).sum(1).tolist()
        self.commits = [sum(pair) for pair in zip(self.commits, wrote, strict=True)]
        for row, place in (changed & (old >= 0)).nonzero().tolist():
            self.revisions[row].append((int(old[row, place]), place, int(written[row, place])))
            if step_map[row, place] < 0:
                self.revisions[row].append((step - 1, place, None))
        self.before = step_map, tokens


def _model(job: Job, device: str) -> tuple[Denoiser, Any]:
    """The model of a job: the test bed's, or the one that the configuration names."""
    bed = job.built_task.denoiser()
    return (bed, None) if bed is not None else _loaded(json.dumps(job.model), job.options.dtype, device)


@lru_cache(maxsize=1)  # configurations of one model share it
def _loaded(model: str, dtype: str, device: str) -> tuple[Denoiser, Any]:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    settings = config.model(json.loads(model))
    scale = settings.pop("cfg_scale")
    denoiser, tokenizer = loading.load(**settings, dtype=None if dtype == "auto" else dtype, device=device)
    return guided(denoiser, scale), tokenizer


def _reset_peak(denoiser: Denoiser) -> None:
    if denoiser.spec.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(denoiser.spec.device)


def _peak(denoiser: Denoiser) -> int:
    """Bytes: of the GPU since the last reset, else of the process so far."""
    if denoiser.spec.device.type == "cuda":
        return torch.cuda.max_memory_allocated(denoiser.spec.device)
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
