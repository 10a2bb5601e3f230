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
from dllm_sampler.core.checks import check_count, check_number
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

CALLS = 8  # most settings of calls whose plug-ins are stored, since a guide may be slow to build


class Sampler:
    """Sample from a masked-diffusion language model.

    Args:
        denoiser: the model, a `Denoiser` (see `dllm_sampler.models`). It may wrap a module in training: weights are not
            copied, and the mode is not changed.
        scheduler, blocks, stop, cache, guide: a name, a dict (`{"name": "threshold", "threshold": 0.9}`) or an
            object. `guide` may also be a list of these, applied in order.
        particles: a plug-in, in the same forms, that decodes several rows for each prompt and returns one. See
            docs/particles.md.
        temperature, top_k, top_p: shortcuts for guides, applied in this order after `guide`.
        tokenizer: encodes and decodes texts. Without one, prompts are token ids and results have no texts.
        noise: the source of random numbers. By default it is counter-based.
        compat: allow the mask token as a prediction, as published code does. Its position then stays masked.
        judge: with `"draw"` schedulers judge the tokens that a step drew, as published. With `"best"` they judge the
            likeliest tokens, and the drawn ones are written. Without a temperature both are the same. See
            docs/likelihood.md.
        stop_token_ids: one or several ids of further end-of-text tokens, besides the model's own (`spec.eos_ids`).
        max_steps: most steps of an answer. By default the scheduler's own bound.
        backend: `triton` or `torch` kernels. `auto` selects Triton on a GPU for bfloat16, float16 and float32 (see
            docs/kernels.md). If a Triton kernel cannot run, torch is used, with one warning.
        cuda_graph: record each size of step as a CUDA graph and replay it. `"auto"` does so if possible.
        compile: use `torch.compile` for a Transformer's layers, instead of Triton's kernels for them, and for the rest
            of the step. `"step"` compiles only the latter, for any model.
        entropy: record the entropy of the prediction that each token was committed from (`Trace.entropy`).

    Raises:
        UserError: a name or setting is unknown, a value is wrong, or plug-ins do not work together.
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
        self.max_steps, self.backend = max_steps, backend
        self.entropy, self.compile = entropy, bool(compile)
        self.plugins: Plugins = assemble(
            self.spec, scheduler, blocks, stop, cache, guide, temperature, top_k, top_p, compat, tokenizer,
            "best" if judge == "best" else "draw", particles,
        )  # fmt: skip
        self.cuda_graph = cuda_graph
        self._static: list[StaticEngine] = []
        self._calls = dict[str, tuple[Sampler, Plugins]]()  # by the settings of a call
        self._told = set[str]()  # warnings that this sampler has given
        self.engine(self.plugins)  # refuses plug-ins that cannot be recorded as CUDA graphs

    def using(self, **options: Unpack[SamplerOptions]) -> Sampler:
        """Return a sampler of the same model with other settings. Weights are not copied.

        Args:
            options: options of the constructor to change. Each sampler records CUDA graphs of its own, so reuse it.

        Raises:
            TypeError: the constructor has no such option.
            UserError: as the constructor.
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
        """Load a model and return a sampler for it.

        Args:
            model: a configuration name (`"mini"`), a checkpoint folder, a hub id, or a dict of the model's settings,
                for example `{"name": "llada-8b", "cfg_scale": 1.0}`.
            dtype: a torch dtype or its name. By default the checkpoint's.
            device: a device. `"auto"` means a GPU if there is one.
            options: as for the constructor.

        Raises:
            UserError: the checkpoint does not exist, is damaged or is not supported, or as the constructor.
        """
        arguments.check_name(model)
        settings = config.model(model)
        scale = settings.pop("cfg_scale")
        # Refuse mistakes before a checkpoint is read, which may take minutes.
        check_known(options, cls.from_pretrained, cls.generate_many, cls.generate)
        check_options(options)
        check_number("model.cfg_scale", scale, finite=True)
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
        """Return a sampler for any function that predicts tokens. It computes whole rows, without a cache.

        Args:
            logits_fn: takes `ids [B, L]` int64 and `mask [B, L]` bool, true where a token is real, and returns logits
                `[B, L, vocab_size]`: row i predicts token i. Shorter rows of a batch are padded on the right. Answers
                do not depend on the batch if no real token sees padding.
            vocab_size: size of the last axis of the logits.
            mask_id, eos_id, pad_id: the mask token, the end-of-text token (or a sequence of several), and the padding
                token (by default the first end-of-text token).
            max_positions: longest row that the function supports.
            tokenizer: encodes and decodes texts. Without one, prompts are token ids and results have no texts.
            dtype: dtype of the logits, or its name. By default that of a module's parameters, else float32.
            device: device of `ids` and `mask`. `"auto"` means a GPU if there is one. By default that of a module's
                parameters, else the CPU.
            options: as for the constructor.

        Raises:
            UserError: a token is outside the vocabulary, or as the constructor. A generation raises `UserError` if the
                logits have another shape.
        """
        check_known(options, cls.from_callable, cls.generate_many, cls.generate)
        place = None if device is None else loading.as_device(device)
        denoiser = FunctionDenoiser.of(
            logits_fn, vocab_size=vocab_size, mask_id=mask_id, eos_id=eos_id, pad_id=pad_id,
            max_positions=max_positions, dtype=loading.as_dtype(dtype), device=place,
        )  # fmt: skip
        return cls(denoiser, tokenizer=tokenizer, **options)

    @property
    def spec(self) -> ModelSpec:
        """The current spec of the model, with `stop_token_ids` among its end-of-text tokens."""
        return self.denoiser.spec.with_ends(self.stop_token_ids)

    @property
    def kernels(self) -> Backend:
        """The kernels that `backend` selects for the model's current device and dtype."""
        spec = self.denoiser.spec
        return backends.select(self.backend, spec.device, spec.dtype)

    @property
    def device(self) -> torch.device:
        """Device of the model's inputs."""
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
        """Answer a batch of prompts. Each answer is the same as if its prompt were alone.

        Args:
            prompts: one or several strings, token lists, tensors, lists of chat messages or `Infill`s, of any lengths.
            max_new_tokens: number of positions after the prompt. The last block may be shorter than the others. A model
                that only denoises whole blocks (DiffusionGemma) decodes it whole, and the answer is cut.
            block_length: shortcut for `blocks.length`.
            seed: row i samples with seed + i, or with entry i of a sequence.
            stop_strings: a text, or several, before which an answer ends.
            progress: called after each step with (step, tokens committed, tokens wanted). This reads the device.
            samples: answers per prompt, adjacent in the result. With the exact cache of a block-causal model the prompt
                is computed once for all of them. `Trace.rows` counts its positions for the first answer, and `nfe` does
                not count this forward. With other models a prompt's keys depend on its answer.
            forms: number of each prompt's form, from 0, or one number for all, if a guide has a list of forms.
            prefix, suffix: text or token ids at the beginning and at the end of the answer, one for all prompts or a
                list with one for each. A suffix ends at `max_new_tokens`.
            pinned: `[max_new_tokens]` fixed tokens of the answer, or one such row for each prompt. -1 (or the mask
                token) marks positions to generate, and so are missing positions at the end. See docs/infilling.md.
            options: options of the constructor to change in this call, for example `temperature=1`. The plug-ins are
                stored for later calls with the same options, so a file that they name is read once.

        Raises:
            UserError: a prompt or an argument is wrong.
            NotFiniteError: the model returned NaN. The error's `result` has the answers so far.
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
        """Fill the gaps of texts. See docs/infilling.md.

        `Result.texts` has the whole texts, and `Result.gaps` the texts in the gaps.

        Args:
            texts: texts in which `{gap:8}` stands for 8 tokens, for example `"def f(x):\\n{gap:8}\\n    return y"`.
            prompts: the prompt before each text, if any.
            options: as in `generate`.

        Raises:
            UserError: as `generate`, or a text has no gap, or a gap has no length.
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
        """Generate spans of answers again, by `generate` with all other tokens `pinned`.

        Args:
            answers: an earlier result, whose answers count up to their end-of-text tokens, or token ids.
            span: (first, end) in each answer, from 0 and without `end`, or a list of these.
            prompts: the prompt of each answer, if any. A result has its own.
            options: as in `generate`.

        Raises:
            UserError: as `generate`, or a span is outside of an answer, or a result has `prompts` beside it.
        """
        if isinstance(answers, Result):
            if prompts is not None:
                raise UserError("options-conflict", "refine got a result, which has its own prompts. Remove prompts.")
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
        """Answer any number of prompts, `batch_size` at a time. A finished answer is replaced by the next prompt.

        In float64 each answer is exactly that of `generate` for its prompt alone. In shorter dtypes the batch may
        change the last bit of a sum. Ranks that share a sharded model's weights (FSDP2) may have different numbers of
        prompts. Each rank must consume all its answers.

        Args:
            prompts: any iterable. A sequence is read at once, so that the rows of the batch fit its longest prompt. A
                generator is read as rows become free.
            max_new_tokens: length of each answer, one number for all or a list with one per prompt.
            block_length, stop_strings: as in `generate`.
            seed: answer j of prompt i samples with `seed + i * samples + j`, or with that entry of a list.
            samples: answers per prompt.
            forms, prefix, suffix, pinned: as in `generate`.
            order: `"finished"` yields answers as they finish, `"given"` in the order of the prompts.
            max_length: most tokens of a prompt with its answer, which fixes the memory. By default the most in a
                sequence of prompts. For other iterables the rows grow with longer prompts, each time after the current
                answers are finished.
            on_error: a refused prompt raises its error after the current answers (`"raise"`), or yields an answer with
                `error` (`"yield"`).
            batching: `"in_flight"`, or `"static"` for batch after batch, each as long as its slowest answer.
            progress: called after each forward with (forwards, tokens committed, tokens wanted by the prompts that
                were read). This reads the device.
            options: as in `generate`.

        Yields:
            An `Answer` with its `finish_reason`. If the model returns NaN, only the row's answer ends (`not_finite`).

        Raises:
            UserError: an argument is wrong, or a prompt is refused.
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
        """Answer a batch of prompts. Yield the canvas once in `every` steps, and after the last step with the result.

        Each item is copied from the device. The other arguments are as in `generate`.

        Raises:
            UserError: as `generate`, or `every` is below 1, or `particles` would decode several rows for each prompt.
            NotFiniteError: as `generate`.
        """
        check_count("every", every)
        runtime = self._runtime(options, block_length)
        if runtime.plugins.particles.count > 1:
            raise UserError(
                "option-not-applicable",
                f"stream does not work with particles={named(runtime.plugins.particles)}, which decodes several rows."
                " Use generate, or particles=none.",
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
        """Return the exact log-likelihoods of answers under the model and this sampler. See docs/likelihood.md.

        The canvas of a row has as many positions as its answer. Scores do not depend on the batch.

        Args:
            prompts: as in `generate`. One prompt serves all answers.
            answers: texts or token ids, one or several.
            max_new_tokens: answers are padded with end-of-text tokens to this length. None scores them as they are.
            block_length: shortcut for `blocks.length`.
            batch_size: rows that are scored together.
            options: as in `generate`. Likelihoods are those after `temperature`, `top_k`, `top_p` and other guides.

        Raises:
            UserError: a prompt or answer is wrong, or an answer has several paths (code `score-inexact`).
            NotFiniteError: the model returned NaN.
        """
        return score.scores(self._runtime(options, block_length), prompts, answers, max_new_tokens, batch_size)

    def engine(self, plugins: Plugins, samples: int = 1) -> Engine:
        """Return the engine of a generation. One that records CUDA graphs is stored and reused."""
        options = {"entropy": self.entropy, "samples": samples, "compile": self.compile}
        return graphs.engine(self.denoiser, plugins, self.kernels, self.noise, self.cuda_graph, options, self._static)

    @property
    def runtime(self) -> Runtime:
        """The parts of this sampler that a generation needs."""
        return Runtime(self.denoiser, self.plugins, self.tokenizer, self.noise, self.max_steps, self.engine)

    def _runtime(self, options: SamplerOptions, block_length: int | None) -> Runtime:
        """Return the runtime of one call. Samplers and plug-ins of the last `CALLS` different settings are stored."""
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
        """Return a key for the settings of a call, or None if some of them are objects."""
        spec = self.denoiser.spec
        try:
            return json.dumps([options, block_length, str(spec.device), str(spec.dtype)], sort_keys=True)
        except (TypeError, ValueError):
            return None
