"""Generation and grading of the samples that a run's directory lacks."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
import transformers
from torch import Tensor

from dllm_sampler import config
from dllm_sampler.cli import threads
from dllm_sampler.core.protocols import Denoiser, is_random
from dllm_sampler.engine.graphs import networks
from dllm_sampler.errors import FAULTS, NotFiniteError, NotWrittenError, RowError, UserError
from dllm_sampler.eval.folders import RunFolder
from dllm_sampler.eval.jobs import Job
from dllm_sampler.eval.measures import LOG_LIKELIHOOD
from dllm_sampler.eval.oracle import LEGAL_STOPS, Oracle
from dllm_sampler.eval.records import Record, encoded_again
from dllm_sampler.eval.tasks.base import Answer as Graded
from dllm_sampler.eval.tasks.base import Sample
from dllm_sampler.eval.tasks.formed import Demanded
from dllm_sampler.generation.batch import warn_of_bias
from dllm_sampler.inputs.prompts import encode_one
from dllm_sampler.models import loading
from dllm_sampler.models.cfg import guided, laid_out
from dllm_sampler.options import SamplerOptions
from dllm_sampler.result import Answer
from dllm_sampler.sampler import Sampler
from dllm_sampler.stops.end_tokens import PrefixStop

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Share:
    """The part of this process among `world` processes that share the batches. `rank` is its number, from 0."""

    rank: int = 0
    world: int = 1

    def has(self, job: int, batch: int) -> bool:
        """Return True if this process runs the batch. The first batches of successive jobs have different processes."""
        return (job + batch) % self.world == self.rank


def run(job: Job, order: int, share: Share, device: str, progress: Progress) -> str | None:
    """Run the missing samples of a job that are for this process.

    `order` is the number of the job among all. `progress` is called with the number of samples of each group that ends.
    Returns the reason that the configuration cannot run, or None if it can.

    Raises:
        NotWrittenError: samples cannot be written.
        UserError: a plug-in breaks its contract (`FAULTS`), or the run's folder is damaged.
    """
    folder = RunFolder(job.folder)
    if folder.complete:
        folder.tidy()
        return None
    folder.begin(job, device)
    samples = job.built_task.samples()
    if folder.finish(job.built_task):
        return None
    done = folder.done()
    try:
        runner, size = Runner(job, device), job.options.batch_size
        starts = enumerate(range(0, len(samples), size))
        batches = [samples[first : first + size] for number, first in starts if share.has(order, number)]
        for records in runner.records(batches, done):
            folder.add(records)
            progress(len(records))
    except NotWrittenError:  # for example a full disk, which is not the configuration's fault
        raise
    except UserError as error:
        if error.code in FAULTS:
            raise
        reason = " ".join(str(error).split())
        folder.refuse(reason)
        return reason
    folder.finish(job.built_task)
    return None


@dataclass(frozen=True)
class Answered:
    """A sample with its answer."""

    sample: Sample
    answer: Answer
    commits: int  # tokens committed, including those that did not stay
    revisions: Sequence[tuple[int, int, int | None]]  # forward, position, and token, or None for a remask
    times: tuple[float, int, int]  # seconds, number of answers in that time, peak memory in bytes

    @staticmethod
    def of(sample: Sample, answer: Answer, times: tuple[float, int, int]) -> Answered:
        """Return the sample of a scheduler that never revises. The step map of the trace then has all commits."""
        assert answer.trace is not None
        return Answered(sample, answer, int((answer.trace.generated >= 0).sum()), (), times)


class Runner:
    """A sampler for one job, with the conversion of its answers to records."""

    def __init__(self, job: Job, device: str):
        task, options = job.built_task, job.options
        self.job = job
        self.denoiser, self.tokenizer = _model(job, device)
        threads.choose(options.threads, threads.parameters(networks(self.denoiser)), device)
        self.plugins = {group: config.build(group, spec) for group, spec in job.plugins.items()}
        self.forms: tuple[str, ...] = ()  # each once
        if options.guided:
            self.forms = tuple(dict.fromkeys(self._form(sample) for sample in task.samples()))
            self.plugins["guide"] = (*self.plugins["guide"], Demanded(self.forms))
        self.guides: dict[str, Any] = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
        loading.warn_of_sampling(self.denoiser.spec, {**self.plugins, **self.guides})
        given: SamplerOptions = {**options.of_sampler(), **self.plugins}  # type: ignore[typeddict-item]
        self.sampler = Sampler(self.denoiser, tokenizer=self.tokenizer, **given)
        warn_of_bias(self.sampler.plugins, options.samples)
        if options.guided:  # its forms are built: the oracle's samplers take them as they are
            bound = next(one for one in self.sampler.plugins.guides if isinstance(one, Demanded))
            self.plugins["guide"] = (*self.plugins["guide"][:-1], bound)
        laid_out(self.sampler.denoiser, self.sampler.kernels)
        first: Any = task.samples()[0].prompt
        if self.tokenizer is None and (isinstance(first, str) or any(isinstance(one, Mapping) for one in first)):
            raise UserError(
                "tokenizer-missing",
                f"task={job.choices['task']} has text prompts, but the model has no tokenizer. Add one to its folder.",
            )
        self._check_prompts()

    def records(self, batches: Sequence[Sequence[Sample]], done: Container[int]) -> Iterator[list[Record]]:
        """Run the samples whose index is not in `done`, and yield their records in groups.

        Raises:
            NotFiniteError: the logits of a sample were not finite. The records of all others have been yielded.
        """
        if self.job.options.measure == "likelihood":
            for batch in batches:
                yield [self._scored(sample) for sample in batch if sample.index not in done]
            return
        bad = None
        for answered in self.answered(batches, done):
            ready: list[Answered] = []
            for one in answered:
                if one.answer.finish_reason == "not_finite":
                    bad = bad or NotFiniteError(one.answer.nfe, [one.sample.index + 1])
                elif one.sample.index not in done:
                    ready.append(one)
            if not ready:
                continue
            fewest = self._oracle(ready) if self.job.options.oracle else [None] * len(ready)
            yield [self._record(one, least) for one, least in zip(ready, fewest, strict=True)]
        if bad is not None:
            raise bad

    def answered(self, batches: Sequence[Sequence[Sample]], done: Container[int]) -> Iterator[list[Answered]]:
        """Yield the answers in groups that the oracle runs as a batch.

        A static batch is answered whole, so its group also has samples that are in `done`.
        """
        plugins = self.sampler.plugins  # revisions are found step by step, in one batch at a time
        revises = plugins.scheduler.traits.revises and plugins.particles.count == 1
        if self.job.options.batching == "in_flight" and not revises:
            yield from self._in_flight([one for batch in batches for one in batch if one.index not in done])
            return
        # A batch has the same samples on any process, also after an interruption, so its answers are equal to the bit.
        for batch in batches:
            if any(sample.index not in done for sample in batch):
                yield self._watched(batch) if revises else self._batch(batch)

    def _in_flight(self, samples: Sequence[Sample]) -> Iterator[list[Answered]]:
        ready: list[Answered] = []
        size = self.job.options.batch_size
        stream = self.sampler.generate_many(self._prompts(samples), batch_size=size, **self._settings(samples))
        with numbered(samples), closing(cast("Generator[Answer, None, None]", stream)):
            reset_memory(self.denoiser.spec.device)
            begun = time.perf_counter()
            for answer in stream:
                times = time.perf_counter() - begun, 1, peak_memory(self.denoiser.spec.device)
                ready.append(Answered.of(samples[answer.index], answer, times))
                if len(ready) == size or not self.job.options.oracle:
                    yield ready
                    ready = []
                begun = time.perf_counter()
        if ready:
            yield ready

    def _batch(self, batch: Sequence[Sample]) -> list[Answered]:
        begun = time.perf_counter()
        reset_memory(self.denoiser.spec.device)
        options: dict[str, Any] = {**self._settings(batch), "batch_size": len(batch), "batching": "static"}
        with numbered(batch):
            answers = list(self.sampler.generate_many(self._prompts(batch), **options))
        times = time.perf_counter() - begun, len(batch), peak_memory(self.denoiser.spec.device)
        return [Answered.of(batch[answer.index], answer, times) for answer in answers]

    def _watched(self, batch: Sequence[Sample]) -> list[Answered]:
        """Answer one batch step by step, to record the commits that its scheduler revises."""
        begun, found = time.perf_counter(), []
        reset_memory(self.denoiser.spec.device)
        left = list(batch)
        while left:
            history, result, bad = History(), None, set()
            try:
                with numbered(left):
                    for commits in self.sampler.stream(self._prompts(left), every=1, **self._settings(left)):
                        history.note(commits.step, commits.step_map, commits.tokens)
                        result = commits.result
            except NotFiniteError as error:  # these rows end, and the others are generated again without them
                result, bad = error.result, {row - 1 for row in error.rows}
            assert result is not None
            for row in sorted(bad or range(len(left))):
                answer = result.answer(row, row, max_new_tokens=self.job.max_new_tokens)
                made, lost = (0, ()) if bad else (history.commits[row], history.revisions[row])
                found.append((left[row], answer, made, lost))
            left = [sample for row, sample in enumerate(left) if row not in bad] if bad else []
        times = time.perf_counter() - begun, len(batch), peak_memory(self.denoiser.spec.device)
        return [Answered(*one, times=times) for one in found]

    def _prompts(self, batch: Sequence[Sample]) -> list[Any]:
        task = self.job.built_task
        prompts: list[Any] = [task.prompt(sample, self.tokenizer) for sample in batch]
        if self.job.options.chat:
            return [[{"role": "user", "content": text}] if isinstance(text, str) else text for text in prompts]
        return [list(prompt) if not isinstance(prompt, str) else prompt for prompt in prompts]

    def _check_prompts(self) -> None:
        """Raise `UserError` with its file and line for a prompt from a file that the model cannot take."""
        task, length = self.job.built_task, self.job.max_new_tokens
        for sample in task.samples():
            if (where := task.source(sample)) is not None:
                try:
                    (prompt,) = self._prompts([sample])
                    encode_one(prompt, self.tokenizer, self.denoiser.spec, length, f"prompt {sample.index + 1}")
                except UserError as error:
                    raise UserError(error.code, f"{where}: {error}") from error

    def _form(self, sample: Sample) -> str:
        form = self.job.built_task.form(sample)
        if form is None:
            raise UserError(
                "option-not-applicable",
                f"guided=true needs a regular expression for each answer, and task={self.job.choices['task']} has none."
                " Use task=formed, or remove guided=true.",
            )
        return form

    def _settings(self, batch: Sequence[Sample]) -> dict[str, Any]:
        forms = {"forms": [self.forms.index(self._form(sample)) for sample in batch]} if self.forms else {}
        return {
            **forms,
            "max_new_tokens": self.job.max_new_tokens,
            "block_length": self.job.options.block_length,
            "seed": [self.job.options.seed + sample.index for sample in batch],
        }

    def _oracle(self, answered: Sequence[Answered]) -> list[int | None]:
        """Return for each answer its forwards, or those of the oracle, which knows the answer, if they are fewer.

        Returns None for an incomplete answer, one that the oracle does not reproduce, and settings that it does not
        support.
        """
        stop = self.plugins["stop"]
        batch, answers = [one.sample for one in answered], [one.answer for one in answered]
        known = Oracle.of(*(answer.trace for answer in answers if answer.trace is not None))
        legal = isinstance(stop, LEGAL_STOPS) and getattr(stop, "mode", None) != "predicted"
        plugins = {**self.plugins, "scheduler": known, "stop": stop if legal else PrefixStop(), "particles": None}
        try:
            oracle = Sampler(
                self.denoiser,
                tokenizer=self.tokenizer,
                stop_token_ids=self.job.options.stop_token_ids,
                backend=self.job.options.backend,
                **plugins,
                **self.guides,
            )
            if is_random(oracle.plugins.guides):
                return [None] * len(batch)  # a draw differs at another step
            found = oracle.generate(self._prompts(batch), **self._settings(batch))
        except UserError:  # the model or a plug-in does not support the oracle
            return [None] * len(batch)
        fewest: list[int | None] = []
        for row, answer in enumerate(answers):
            whole = answer.complete and bool(found.complete[row])
            same = torch.equal(found.tokens[row, : answer.length], answer.tokens[: answer.length])
            fewest.append(min(int(found.nfe[row]), answer.nfe) if whole and same else None)
        return fewest

    def _record(self, answered: Answered, fewest: int | None) -> Record:
        sample, given = answered.sample, answered.answer
        trace, answer, text = given.trace, given.length, given.text
        assert trace is not None
        tokens = trace.decoded[0].tolist()  # also those after the end-of-text token
        ended = answer > 0 and tokens[answer - 1] in self.sampler.spec.eos_ids
        steps, sure = trace.generated[0].tolist(), trace.logprob[0, trace.origin :].exp().tolist()
        graded = Graded(text or "", tokens[: answer - ended], tokens, steps, given.nfe, self.tokenizer)
        grades = self.job.built_task.grade(sample, graded)
        seconds, batch, peak = answered.times
        return self._kept(
            sample,
            text,
            grades,
            tokens,
            complete=given.complete,
            prompt_tokens=trace.origin,
            answer=answer,
            ended=ended,
            nfe=given.nfe,
            rows=int(trace.rows[0]),
            commits=answered.commits,
            oracle_nfe=fewest,
            step_map=steps,
            # two digits: the others depend on how many rows were multiplied together
            confidence=[round(one, 2) if step >= 0 else 0.0 for one, step in zip(sure, steps, strict=True)],
            revisions=[
                (step, place, None if token is None else self._piece(token))
                for step, place, token in answered.revisions
            ],
            seconds=round(seconds, 6),
            batch=batch,
            peak_memory=peak,
            finish_reason=given.finish_reason,
            valid=given.valid,
            rejections=given.rejections,
        )

    def _scored(self, sample: Sample) -> Record:
        """Return the record of a right answer as if the sampler had generated it, in the order in which it is scored.

        Raises:
            UserError: the task has no right answer, or the sampler has no exact likelihood.
        """
        task, begun = self.job.built_task, time.perf_counter()
        answer = task.reference(sample)
        if answer is None:
            raise UserError(
                "option-not-applicable",
                f"measure=likelihood scores right answers, and task={self.job.choices['task']} has none. Use another"
                " task, for example task=mini.",
            )
        reset_memory(self.denoiser.spec.device)
        (prompt,) = self._prompts([sample])
        length, block_length = self.job.max_new_tokens, self.job.options.block_length
        found = self.sampler.score([prompt], [answer], max_new_tokens=length, block_length=block_length)
        tokens, steps, ends = found.tokens[0].tolist(), found.step_map[0].tolist(), self.sampler.spec.eos_ids
        size = next((place for place, token in enumerate(tokens) if token in ends), None)
        text = answer if isinstance(answer, str) else None
        graded = Graded(text or "", tokens[:size], tokens, steps, int(found.nfe), self.tokenizer)
        grades = {**task.grade(sample, graded), LOG_LIKELIHOOD: float(found.log_p)}
        return self._kept(
            sample,
            text,
            grades,
            tokens,
            complete=True,
            prompt_tokens=int(found.prompt_lengths),
            answer=len(tokens) if size is None else size + 1,
            ended=size is not None,
            nfe=int(found.nfe),
            rows=int(found.computed),
            commits=len(tokens),
            oracle_nfe=None,
            step_map=steps,
            confidence=[round(one, 2) for one in found.log_q[0].exp().tolist()],
            revisions=[],
            seconds=round(time.perf_counter() - begun, 6),
            batch=1,
            peak_memory=peak_memory(self.denoiser.spec.device),
        )

    def _kept(
        self, sample: Sample, text: str | None, grades: Mapping[str, float], tokens: list[int], **others: Any
    ) -> Record:
        """Return the record of a sample. `others` are the remaining fields of `Record`."""
        return Record(
            index=sample.index,
            seed=self.job.options.seed + sample.index,
            prompt=sample.prompt if isinstance(sample.prompt, str) else list(sample.prompt),
            text=text,
            scores={name: float(value) for name, value in grades.items()},
            canvas=len(tokens),
            text_tokens=encoded_again(text, self.tokenizer),
            tokens=tokens,
            pieces=[self._piece(token) for token in tokens],
            **others,
        )

    def _piece(self, token: int) -> str:
        return str(token) if self.tokenizer is None else str(self.tokenizer.decode([token]))


def _model(job: Job, device: str) -> tuple[Denoiser, Any]:
    """Return the model of a job and its tokenizer. A test bed has None in place of a tokenizer."""
    bed = job.built_task.denoiser()
    return (bed, None) if bed is not None else _loaded(json.dumps(job.model), job.options.dtype, device)


@lru_cache(maxsize=1)  # configurations of one model share it
def _loaded(model: str, dtype: str, device: str) -> tuple[Denoiser, Any]:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    settings = config.model(json.loads(model))
    scale = settings.pop("cfg_scale")
    denoiser, tokenizer = loading.load(**settings, dtype=dtype, device=device)
    return guided(denoiser, scale), tokenizer


class History:
    """The number of commits and the list of revisions of each row, from successive states of the canvas."""

    def __init__(self) -> None:
        self.commits: list[int] = []
        self.revisions: list[list[tuple[int, int, int | None]]] = []  # as in `Answered`
        self.before: tuple[Tensor, Tensor] | None = None

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


@contextmanager
def numbered(samples: Sequence[Sample]) -> Iterator[None]:
    """Replace the numbers of prompts in a `RowError` by those (from 1) of their samples."""
    try:
        yield
    except RowError as error:
        numbers = [samples[number - 1].index + 1 for number in error.prompts]
        raise RowError(error.code, error.template, error.rows, numbers) from error.__cause__


def reset_memory(device: torch.device) -> None:
    """Reset the counter of peak memory of a GPU. Has no effect on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes.

    On a GPU it is counted since the last reset. On a CPU it is that of the process, and 0 on Windows.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
