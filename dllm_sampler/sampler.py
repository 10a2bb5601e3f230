"""`Sampler`: a model and a set of plug-ins, ready to generate."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Literal, Unpack, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dllm_sampler import config
from dllm_sampler.core.checks import check_count
from dllm_sampler.core.naming import named
from dllm_sampler.core.noise import CounterNoise
from dllm_sampler.core.protocols import Denoiser
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.core.values import Noise
from dllm_sampler.engine import graphs
from dllm_sampler.engine.graphs import StaticEngine
from dllm_sampler.engine.loop import Engine
from dllm_sampler.engine.plugins import Plugins, assemble, untrained
from dllm_sampler.errors import UntrainedWarning, UserError
from dllm_sampler.generation import batch, many, score
from dllm_sampler.generation.runtime import Runtime
from dllm_sampler.inputs import arguments, given
from dllm_sampler.inputs.given import Piece, Pinned, Span
from dllm_sampler.inputs.prompts import Prompt
from dllm_sampler.kernels import backend as backends
from dllm_sampler.kernels.backend import Backend
from dllm_sampler.models import loading
from dllm_sampler.models.cfg import compiled, guided, laid_out
from dllm_sampler.models.rows import FunctionDenoiser, LogitsFunction
from dllm_sampler.options import GenerateOptions, Progress, SamplerOptions, check_known, check_options, end_token_ids
from dllm_sampler.result import Answer, Commits, Result, Scores

CALLS = 8  # different settings of calls whose plug-ins are stored: a guide may take long to build


class Sampler:
    """Sample from a masked-diffusion language model.

    Args:
        denoiser: what predicts: a `Denoiser` (see `dllm_sampler.models`), which may wrap a module in training. No
            weight is copied and no mode changed.
        scheduler, blocks, stop, cache, guide: a name, a dict (`{"name": "threshold", "threshold": 0.9}`) or an
            object; `guide` also a list of these, applied in order.
        particles: decodes several rows for each prompt and returns one. Given as the plug-ins before. See
            docs/particles.md.
        temperature, top_k, top_p: shortcuts for guides, applied in this order after `guide`.
        tokenizer: without it, prompts are token ids and results have no texts.
        noise: where randomness comes from; counter-based by default.
        compat: let the mask id be chosen as a token (the position then stays masked), as published code does.
        judge: `"draw"`: schedulers judge the tokens that a step drew, as published. `"best"`: they judge the best
            tokens, and the drawn ones are written. It changes nothing without a temperature. See docs/likelihood.md.
        stop_token_ids: further end-of-text tokens, one id or several: an answer ends at any of them as it does at the
            model's own (`spec.eos_ids`).
        max_steps: give up after this many steps. By default the scheduler's own bound.
        poll_every: steps from one look for finished rows to the next (1 under a cache that stores keys).
        backend: `triton` or `torch` kernels; `auto`: Triton's on a GPU for bfloat16, float16 and float32 (see
            docs/kernels.md). Where one cannot run, torch does the same and one warning says why.
        cuda_graph: record each size of step as a CUDA graph and replay it; `"auto"`: where that can be.
        compile: `torch.compile` the parts of a Transformer's layers, in place of Triton's kernels for them, and what a
            step does outside the model; `"step"`: the latter alone, whatever the model.
        entropy: record the entropy of the prediction that each token was committed from (`Trace.entropy`).

    Raises:
        UserError: an unknown name or setting, or a combination that cannot work.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        *,
        scheduler: object = "threshold",
        blocks: object = "fixed",
        stop: object = "prefix",
        cache: object = "exact",
        guide: object = None,
        particles: object = "none",
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        noise: Noise | None = None,
        compat: bool = False,
        judge: str = "draw",
        stop_token_ids: int | Sequence[int] | None = None,
        max_steps: int | None = None,
        poll_every: int = 1,
        backend: str = "auto",
        cuda_graph: bool | str = False,
        compile: bool | str = False,
        entropy: bool = False,
    ):
        chosen = {name: value for name, value in locals().items() if name in SamplerOptions.__annotations__}
        self._options = cast(SamplerOptions, chosen)  # for `using`
        check_options(chosen)
        arguments.check_parts(denoiser, tokenizer, noise)
        if compile is True:
            denoiser = compiled(denoiser)
        self.denoiser, self.tokenizer = denoiser, tokenizer
        self.stop_token_ids = end_token_ids(stop_token_ids, denoiser.spec)
        self.noise: Noise = CounterNoise() if noise is None else noise
        self.max_steps, self.poll_every = max_steps, poll_every
        self.backend, self.entropy, self.compile = backend, entropy, bool(compile)
        self.plugins: Plugins = assemble(
            self.spec, scheduler, blocks, stop, cache, guide, temperature, top_k, top_p, compat, tokenizer,
            "best" if judge == "best" else "draw", particles,
        )  # fmt: skip
        self.cuda_graph = cuda_graph
        self._static: list[StaticEngine] = []
        self._calls = dict[str, tuple[Sampler, Plugins]]()  # by the settings of a call
        self._told = set[str]()  # warnings that this sampler has given
        self.engine(self.plugins)  # refuses what cannot be recorded before a prompt is read

    def using(self, **options: Unpack[SamplerOptions]) -> Sampler:
        """The same model with other settings; no weight is copied.

        Args:
            options: as the constructor's; the others stay. CUDA graphs are recorded once for each sampler: keep it.
        """
        check_known(options, self.generate_many, self.generate)
        return Sampler(self.denoiser, tokenizer=self.tokenizer, **cast(SamplerOptions, {**self._options, **options}))

    def __repr__(self) -> str:
        spec = self.denoiser.spec
        model = "a model" if spec.folder is None else spec.folder.name
        return f"Sampler({model}, {str(spec.dtype).removeprefix('torch.')} on {spec.device}, {self.plugins.described})"

    @classmethod
    def from_pretrained(
        cls,
        model: str | PathLike[str] | Mapping[str, object],
        *,
        dtype: torch.dtype | str | None = None,
        device: str | torch.device = "auto",
        **options: Unpack[SamplerOptions],
    ) -> Sampler:
        """Load a model by configuration name (`"mini"`), checkpoint folder or hub id, and build a sampler around it.

        Args:
            model: also a dict of the model group's settings: `{"name": "llada-8b", "cfg_scale": 1.0}`.
            dtype: a torch dtype or its name. By default the checkpoint's.
            device: `"auto"` takes a GPU where there is one.
            options: as the constructor's.

        Raises:
            UserError: nothing to load there, a damaged or unknown checkpoint, or as the constructor does.
        """
        arguments.check_name(model)
        settings = config.model(model)
        scale = settings.pop("cfg_scale")
        # Refuse mistakes before a checkpoint is read, which may take minutes.
        check_known(options, cls.from_pretrained)
        check_options(options)
        denoiser, tokenizer = loading.load(**settings, dtype=dtype, device=device)
        loading.warn_of_sampling(denoiser.spec, options)
        sampler = cls(guided(denoiser, scale), tokenizer=tokenizer, **options)
        laid_out(sampler.denoiser, sampler.kernels)
        return sampler

    @classmethod
    def from_callable(
        cls,
        logits_fn: LogitsFunction,
        *,
        vocab_size: int,
        mask_id: int,
        eos_id: int | Sequence[int],
        pad_id: int | None = None,
        max_positions: int = 2**20,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype | str | None = None,
        device: str | torch.device | None = None,
        **options: Unpack[SamplerOptions],
    ) -> Sampler:
        """Build a sampler around any function that predicts tokens. It runs on whole rows, without a cache.

        Args:
            logits_fn: takes `ids [B, L]` int64 and `mask [B, L]` bool, true where a token is real, and returns logits
                `[B, L, vocab_size]`: row i predicts token i. Shorter rows of a batch are padded at the right. If no
                real token sees padding, each row comes out as if it were alone.
            vocab_size: size of the last axis of the logits.
            mask_id, eos_id, pad_id: the mask token, the end-of-text token (or a sequence of several), and what fills
                shorter rows (default: the first end-of-text token).
            max_positions: longest row that the function takes.
            tokenizer: without it, prompts are token ids and results have no texts.
            dtype: of the logits, a torch dtype or its name. By default that of a module's parameters, else float32.
            device: of `ids` and `mask`. `"auto"` takes a GPU if there is one. By default that of a module's parameters,
                else the CPU.
            options: as the constructor's.

        Raises:
            UserError: a token outside the vocabulary, or as the constructor does. A generation raises it if the
                function returns no logits of this shape.
        """
        check_known(options, cls.from_callable)
        place = None if device is None else loading.as_device(device)
        denoiser = FunctionDenoiser.of(
            logits_fn, vocab_size=vocab_size, mask_id=mask_id, eos_id=eos_id, pad_id=pad_id,
            max_positions=max_positions, dtype=loading.as_dtype(dtype), device=place,
        )  # fmt: skip
        return cls(denoiser, tokenizer=tokenizer, **options)

    @property
    def spec(self) -> ModelSpec:
        """The model's numbers and facts at this moment, with `stop_token_ids` among its end tokens."""
        return self.denoiser.spec.with_ends(self.stop_token_ids)

    @property
    def kernels(self) -> Backend:
        """The kernels that `backend` selects for the model where it is now. Each generation keeps to one choice."""
        spec = self.denoiser.spec
        return backends.select(self.backend, spec.device, spec.dtype)

    @property
    def device(self) -> torch.device:
        """Where the model's inputs live."""
        return self.denoiser.spec.device

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 128,
        block_length: int | None = None,
        seed: int | Sequence[int] = 0,
        stop_strings: str | Sequence[str] = (),
        progress: Progress | None = None,
        samples: int = 1,
        forms: int | Sequence[int] | None = None,
        prefix: Piece | Sequence[Piece] | None = None,
        suffix: Piece | Sequence[Piece] | None = None,
        pinned: Pinned | None = None,
        **options: Unpack[SamplerOptions],
    ) -> Result:
        """Answer a batch of prompts; each row comes out as if it were alone.

        Args:
            prompts: strings, token lists, tensors, chat messages or `Infill`s; one or several, of any lengths.
            max_new_tokens: canvas length after the prompt; the last block may be shorter than the others. Where a model
                denoises whole blocks only (DiffusionGemma), it is decoded whole and the answer is cut.
            block_length: shortcut for `blocks.length`.
            seed: row i samples with seed + i, or with its own number of a sequence.
            stop_strings: text at which an answer ends, or several; not part of it.
            progress: called after each step with (step, tokens committed, tokens wanted); reads the device.
            samples: answers per prompt, side by side in the result: all of the first prompt, then of the second. With
                the exact cache of a block-causal model the prompt is computed once for all of them (the positions
                count for the first, the pass for none); elsewhere a prompt's keys depend on its answer.
            forms: where a guide has a list of forms, the number of each prompt's, from 0, or one for all.
            prefix, suffix: what the answer begins and ends with, text or token ids; one for all prompts, or a list
                with one for each. A suffix ends at `max_new_tokens`, so that the answer is as long as that.
            pinned: `[max_new_tokens]`, or one row for each prompt: tokens of the answer that are given wherever they
                stand, -1 (or the mask token) where one is to be generated; what is missing at the end is. See
                docs/infilling.md.
            options: settings of the sampler that this call changes: `temperature=1`, `scheduler="klass"` ... (`using`).
                What they build is stored for further calls, so that a file that a setting names is read once.

        Raises:
            UserError: a bad prompt or argument.
            NotFiniteError: the model returned NaN; its `result` holds what was done.
        """
        runtime = self._runtime(options, block_length)
        steps = batch.steps(
            runtime, prompts, every=int(progress is not None), max_new_tokens=max_new_tokens, seed=seed,
            stop_strings=stop_strings, samples=samples, forms=forms, prefix=prefix, suffix=suffix, pinned=pinned,
            progress=progress,
        )  # fmt: skip
        result = batch.final_result(steps, progress)
        batch.warn_of_copies(runtime.plugins, result, samples)
        return result

    def infill(
        self,
        texts: str | Sequence[str],
        *,
        prompts: Prompt | Sequence[Prompt] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result:
        """Fill the gaps of texts; see docs/infilling.md.

        `Result.texts` are the whole texts, `Result.gaps` the texts in the gaps.

        Args:
            texts: `{gap:8}` stands for 8 tokens, as in `"def f(x):\\n{gap:8}\\n    return y"`.
            prompts: what each text answers, if anything; `options`: as in `generate`.

        Raises:
            UserError: as `generate`; a text without a gap, or a gap without its length.
        """
        return self.generate(given.templates(texts, prompts), **options)

    def refine(
        self,
        answers: Result | Sequence[int] | Sequence[Sequence[int]] | Tensor,
        span: Span | Sequence[Span],
        *,
        prompts: Prompt | Sequence[Prompt] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result:
        """Generate a part of answers again: that of `generate` with all other tokens `pinned`.

        Args:
            answers: an earlier result, up to each answer's end token; or token ids.
            span: (first, end), positions in each answer from 0, or several such.
            prompts: what each answers; a result knows it.
            options: as in `generate`.

        Raises:
            UserError: as `generate`; a span outside of an answer.
        """
        if isinstance(answers, Result):
            if prompts is not None:
                raise UserError("options-conflict", "A result has its prompts. Remove prompts.")
            prompts, answers = answers.token_rows()
        return self.generate(given.refined(answers, span, prompts), **options)

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        *,
        batch_size: int = 8,
        max_new_tokens: int | Sequence[int] = 128,
        block_length: int | None = None,
        seed: int | Sequence[int] = 0,
        stop_strings: str | Sequence[str] = (),
        samples: int = 1,
        forms: int | Sequence[int] | None = None,
        prefix: Piece | Sequence[Piece] | None = None,
        suffix: Piece | Sequence[Piece] | None = None,
        pinned: Pinned | None = None,
        order: Literal["finished", "given"] = "finished",
        max_length: int | None = None,
        on_error: Literal["raise", "yield"] = "raise",
        batching: Literal["in_flight", "static"] = "in_flight",
        progress: Progress | None = None,
        **options: Unpack[SamplerOptions],
    ) -> Iterator[Answer]:
        """Answer any number of prompts, `batch_size` at a time; one that ends gives its place to the next.

        Each answer is that of `generate` for its prompt alone: exactly in float64; in shorter dtypes the batch may
        change the last bit of a sum. Ranks that share a sharded model's weights (FSDP2) have prompts of their own, any
        number of them; each must take its answers to the end.

        Args:
            prompts: any iterable. A sequence is read whole at first, so that lanes fit its longest prompt. A
                generator is read as lanes become free.
            max_new_tokens: of each answer: one number for all, or a list with one per prompt.
            block_length, stop_strings: as in `generate`.
            seed: answer j of prompt i samples with `seed + i * samples + j`, or with that number of a list.
            samples: answers per prompt.
            forms, prefix, suffix, pinned: as in `generate`.
            order: `"finished"` yields answers as they finish, `"given"` in the order of the prompts.
            max_length: most tokens of a prompt with its answer, which fixes the memory. By default the most of a
                sequence of prompts. For another iterable lanes grow in steps as longer prompts come, and each time the
                answers in flight end first.
            on_error: what becomes of a prompt that is refused: `"raise"` after the answers in flight, or `"yield"` an
                answer with the `error`.
            batching: `"static"`: batch after batch, each as long as its slowest answer.
            progress: called after each forward with (forwards, tokens committed, tokens wanted of the prompts that
                were read); reads the device.
            options: as in `generate`.

        Yields:
            An `Answer`, with its `finish_reason`. One with NaN from the model ends alone.

        Raises:
            UserError: a bad argument, or a prompt that is refused.
        """
        return many.answers(
            self._runtime(options, block_length), prompts, batch_size=batch_size, order=order, on_error=on_error,
            batching=batching, max_new_tokens=max_new_tokens, seed=seed, stop_strings=stop_strings, samples=samples,
            forms=forms, prefix=prefix, suffix=suffix, pinned=pinned, progress=progress, max_length=max_length,
        )  # fmt: skip

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 128,
        block_length: int | None = None,
        seed: int | Sequence[int] = 0,
        stop_strings: str | Sequence[str] = (),
        every: int = 1,
        forms: int | Sequence[int] | None = None,
        prefix: Piece | Sequence[Piece] | None = None,
        suffix: Piece | Sequence[Piece] | None = None,
        pinned: Pinned | None = None,
        **options: Unpack[SamplerOptions],
    ) -> Iterator[Commits]:
        """As `generate`, yielding the canvas after every `every` steps (each view is a transfer from the device); the
        last item carries the result."""
        check_count("every", every)
        runtime = self._runtime(options, block_length)
        if runtime.plugins.particles.count > 1:
            raise UserError(
                "option-not-applicable",
                f"particles={named(runtime.plugins.particles)} knows the answer at the end only. Use generate.",
            )
        return batch.steps(
            runtime, prompts, every=every, max_new_tokens=max_new_tokens, seed=seed,
            stop_strings=stop_strings, forms=forms, prefix=prefix, suffix=suffix, pinned=pinned,
        )  # fmt: skip

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        answers: Piece | Sequence[Piece],
        *,
        max_new_tokens: int | None = None,
        block_length: int | None = None,
        batch_size: int = 8,
        **options: Unpack[SamplerOptions],
    ) -> Scores:
        """Return the exact log-likelihood of answers under the model and this sampler. See docs/likelihood.md.

        The canvas of a row has as many positions as its answer. Each row comes out as if it were alone.

        Args:
            prompts: as in `generate`. One prompt serves all answers.
            answers: texts or token ids, one or several.
            max_new_tokens: answers are padded with end-of-text tokens to this length. None scores them as they are.
            block_length: shortcut for `blocks.length`.
            batch_size: rows that are scored together.
            options: as in `generate`. The law is that of `temperature`, `top_k`, `top_p` and other guides.

        Raises:
            UserError: a bad prompt or answer, or a sampler with several paths to an answer (code `score-inexact`).
            NotFiniteError: the model returned NaN.
        """
        return score.scores(self._runtime(options, block_length), prompts, answers, max_new_tokens, batch_size)

    def engine(self, plugins: Plugins, samples: int = 1) -> Engine:
        """Return what runs a generation. One that records steps is kept for a later one, which may find them."""
        return graphs.engine(
            self.denoiser, plugins, self.poll_every, self.kernels, self.noise, self.cuda_graph,
            (self.entropy, samples, self.compile), self._static,
        )  # fmt: skip

    @property
    def runtime(self) -> Runtime:
        """The parts of this sampler that a generation needs."""
        return Runtime(self.denoiser, self.plugins, self.tokenizer, self.noise, self.max_steps, self.engine)

    def _runtime(self, options: SamplerOptions, block_length: int | None) -> Runtime:
        """Return what one call runs with. Samplers and plug-ins of the last `CALLS` different settings are stored."""
        key = self._settings_key(options, block_length)
        if key is not None and key in self._calls:
            own, plugins = self._calls[key]
        else:
            own = self.using(**options) if options else self
            plugins = own.plugins if block_length is None else own.plugins.with_block_length(block_length)
            if key is not None:
                self._calls[key] = own, plugins
                if len(self._calls) > CALLS:
                    self._calls.pop(next(iter(self._calls)))
        sentence = untrained(plugins)
        if sentence is not None and sentence not in self._told:
            self._told.add(sentence)
            warnings.warn(sentence, UntrainedWarning, stacklevel=3)
        return replace(own.runtime, plugins=plugins)

    def _settings_key(self, options: SamplerOptions, block_length: int | None) -> str | None:
        """Return the settings of a call as a text that names them. Returns None if some are objects."""
        spec = self.denoiser.spec
        try:
            return json.dumps([options, block_length, str(spec.device), str(spec.dtype)], sort_keys=True)
        except (TypeError, ValueError):
            return None
