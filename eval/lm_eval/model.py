"""The model `dllm_sampler` of lm-evaluation-harness."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import model_registry
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from rich.console import Console
from rich.progress import Progress, track

from dllm_sampler.cli import threads
from dllm_sampler.core.checks import check_count, check_number, check_share
from dllm_sampler.engine.graphs import networks
from dllm_sampler.errors import NotFiniteError, UserError
from dllm_sampler.eval.folders import environment
from dllm_sampler.eval.lm_eval import likelihood
from dllm_sampler.eval.lm_eval.counters import KEY, SCHEMA, Counter
from dllm_sampler.eval.lm_eval.settings import Settings, parse
from dllm_sampler.inputs.prompts import chat_text
from dllm_sampler.sampler import Sampler

NAME = "dllm_sampler"
CANVAS = 256  # tokens of an answer where the task gives no limit


class SamplerLM(LM):
    """A model of the harness that answers with a `Sampler`. Likelihoods are Monte Carlo bounds, or exact.

    `given` is `--model_args`, with the harness's own `batch_size` and `device` among them (see `Settings`). The
    harness's `max_batch_size` is ignored.
    """

    def __init__(self, max_batch_size: int | None = None, **given: Any):
        super().__init__()
        if given.get("device") == "cuda:0" and not torch.cuda.is_available():
            del given["device"]  # the harness's default, not a user's choice
        self.settings: Settings = parse(given)
        s = self.settings
        self.sampler = Sampler.from_pretrained(
            {"name": s.pretrained, **s.model}, dtype=s.dtype, device=s.device, **s.plugins, **s.shortcuts
        )
        if self.sampler.tokenizer is None:
            raise UserError(
                "tokenizer-missing", f"pretrained={s.pretrained} has no tokenizer. Add its files to the checkpoint."
            )
        self.tokenizer = self.sampler.tokenizer
        self._device = self.sampler.device
        self.drawing: dict[tuple[tuple[str, float], ...], Sampler] = {}
        self.templated = False
        self.counters: defaultdict[str, Counter] = defaultdict(Counter)  # by task
        plain = {"stop": "none", "cache": "none", "blocks": "full", "scheduler": "fixed"}
        self.one_by_one = Sampler(self.sampler.denoiser, tokenizer=self.tokenizer, **plain)  # pyright: ignore

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> SamplerLM:
        """Build the model. `arg_dict` (`--model_args`) overrides `additional_config`, the harness's own arguments."""
        others = {key: value for key, value in (additional_config or {}).items() if value is not None}
        made = cls(**{**others, **arg_dict})
        size = threads.parameters(networks(made.sampler.denoiser))
        threads.choose(made.settings.threads, size, str(made.sampler.device))
        return made

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> SamplerLM:
        """Build the model with `create_from_arg_obj` from the text of `--model_args`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer in the harness's cache of requests."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the text of the chat template for the harness's results, or "" if none is applied."""
        return self.tokenizer.get_chat_template() if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return messages as a prompt in the chat template. It contains the special tokens, so none are added later."""
        if self.tokenizer.chat_template is None:
            raise UserError(
                "chat-template-missing",
                f"pretrained={self.settings.pretrained} has no chat template. Remove --apply_chat_template.",
            )
        self.templated = True
        return chat_text(chat_history, self.tokenizer, "a sample", add_generation_prompt)

    def get_model_info(self) -> dict[str, Any]:
        """Return fields for `config` of the results: the settings, the environment, and the counts of each task."""
        tasks = {name: counter.summary() for name, counter in self.counters.items()}
        tokens, forwards = (sum(one[name] for one in tasks.values()) for name in ("answer_tokens", "forwards"))
        ours = {"schema": SCHEMA, **self.settings.described(), "environment": environment(str(self._device))}
        return {
            "answer_tokens": tokens,
            "forwards": forwards,
            "tokens_per_forward": tokens / forwards if forwards else None,
            KEY: {**ours, "tasks": tasks},
        }

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the texts of the answers, cut at the stop strings. They do not depend on the batch size."""
        answers: dict[int, str] = {}
        groups: dict[tuple[int, tuple[str, ...]], tuple[Sampler, list[int]]] = {}
        wanted = [self._request(dict(request.args[1])) for request in requests]
        prompts = [self._encode(str(one.args[0]), room) for one, (_, room, _) in zip(requests, wanted, strict=True)]
        for i, (sampler, _, until) in enumerate(wanted):
            groups.setdefault((id(sampler), tuple(until)), (sampler, []))[1].append(i)
        bad = None
        with Progress(console=Console(stderr=True), disable=disable_tqdm) as progress:
            shown = progress.add_task("sampling", total=len(requests))
            for (_, until), (sampler, members) in groups.items():
                rooms = [wanted[i][1] for i in members]
                given = [prompts[i] for i in members]
                options: dict[str, Any] = {"seed": [self.settings.seed + i for i in members], "stop_strings": until}
                options |= {"batch_size": self.settings.batch_size, "batching": self.settings.batching}
                began = perf_counter()
                for answer in sampler.generate_many(given, max_new_tokens=rooms, **options):
                    i, text = members[answer.index], answer.text or ""
                    progress.advance(shown)
                    if answer.finish_reason == "not_finite":
                        bad = bad or NotFiniteError(answer.nfe, [i + 1])
                        continue
                    counter = self.counters[str(getattr(requests[i], "task_name", None))]
                    counter.add(answer.length, answer.nfe, wanted[i][1], perf_counter() - began)
                    began = perf_counter()
                    answers[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
        if bad is not None:
            raise bad
        return [answers[i] for i in range(len(requests))]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood in nats or its bound, and True if greedy decoding gives it."""
        found = []
        for request in track(requests, "likelihoods", console=Console(stderr=True), disable=disable_tqdm):
            prompt, answer = self._pair(*map(str, request.args))
            greedy = self.settings.check_greedy and self._greedy(prompt, answer)
            found.append((self._likelihood(prompt, answer), greedy))
            self.cache_hook.add_partial("loglikelihood", request.args, found[-1])
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood in nats of each text or its bound, summed over windows of the model's context."""
        found = []
        for request in track(requests, "likelihoods", console=Console(stderr=True), disable=disable_tqdm):
            ids = self._plain(str(request.args[0]))
            size = self.sampler.denoiser.spec.max_positions - 1  # a token comes before the first window
            windows = map(make_disjoint_window, get_rolling_token_windows(ids, self._first(), size, 1))
            found.append(sum(self._likelihood(list(prompt), list(answer)) for prompt, answer in windows))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def _request(self, kwargs: dict[str, Any]) -> tuple[Sampler, int, list[str]]:
        """Return the sampler, the length of the canvas and the stop strings for the options of a request."""
        until, heat = kwargs.get("until") or [], kwargs.get("temperature") or 0
        check_count("max_gen_toks", kwargs.get("max_gen_toks"), optional=True)
        check_number("temperature", heat, finite=True)
        until, heat = [one for one in ([until] if isinstance(until, str) else until) if one], float(heat)
        room = self.settings.max_new_tokens or kwargs.get("max_gen_toks") or CANVAS
        if not kwargs.get("do_sample") or not heat or "temperature" in self.settings.shortcuts:
            return self.sampler, room, until
        s = self.settings
        drawn = {"temperature": heat}
        if kwargs.get("top_p") not in (None, 1, 1.0):
            check_share("top_p", kwargs["top_p"], "a probability")
            drawn["top_p"] = float(kwargs["top_p"])
        wanted = tuple(drawn.items())
        if wanted not in self.drawing:  # one for all such requests: recorded steps are its own
            shortcuts = {**s.shortcuts, **drawn}
            self.drawing[wanted] = Sampler(self.sampler.denoiser, tokenizer=self.tokenizer, **s.plugins, **shortcuts)
        return self.drawing[wanted], room, until

    def _likelihood(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        spec, s = self.sampler.denoiser.spec, self.settings
        if s.likelihood == "bound":
            likelihood.check(spec)
        elif not answer:
            return 0.0
        if len(answer) >= spec.max_positions:
            raise UserError(
                "context-exceeded",
                f"A text to score has {len(answer)} tokens, and at most {spec.max_positions - 1} fit into the model's"
                " context. Shorten it.",
            )
        prompt = prompt[-(spec.max_positions - len(answer)) :]
        if s.likelihood == "exact":
            return float(self.sampler.score([list(prompt)], [list(answer)]).log_p)
        batch = s.mc_batch_size or s.batch_size
        return likelihood.log_likelihood(self.sampler.denoiser, prompt, answer, s.mc_num, batch, s.seed)

    def _greedy(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Return True if decoding one token per step, the most confident first, gives the answer."""
        if not answer:
            return True
        room = self.sampler.denoiser.spec.max_positions - len(answer)
        result = self.one_by_one.generate([list(prompt[-room:])], max_new_tokens=len(answer))
        return result.trace.decoded[0].tolist() == list(answer)

    def _encode(self, text: str, room: int) -> list[int]:
        """Return the token ids of a prompt. If it is too long, return the last ones that fit."""
        size = self.sampler.denoiser.spec.max_positions - room
        if size < 1:
            raise UserError(
                "context-exceeded",
                f"An answer of {room} tokens leaves no room for a prompt in the model's context of {size + room}. Set a"
                " smaller max_new_tokens in --model_args.",
            )
        return (self._plain(text) if self.templated else self._special(text))[-size:] or [self._first()]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a context and of its continuation. Spaces between both belong to the latter."""
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        if not context:
            return [self._first()], self._plain(continuation)
        before = self._plain(context) if self.templated else self._special(context)
        if before[-1] in self.tokenizer.all_special_ids:  # nothing is merged over a special token
            return before, self._plain(continuation)
        whole = self._plain(context + continuation) if self.templated else self._special(context + continuation)
        return before, whole[len(before) :]

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # pyright: ignore

    def _special(self, text: str) -> list[int]:
        ids = list(self.tokenizer(text)["input_ids"]) if text else []  # pyright: ignore
        return [self._first(), *ids] if self.settings.add_bos and ids[:1] != [self._first()] else ids

    def _first(self) -> int:
        """Return the token that precedes a text: BOS, or the end-of-text token if there is none."""
        bos = self.tokenizer.bos_token_id
        return int(bos) if isinstance(bos, int) else self.sampler.denoiser.spec.eos_id


def register() -> None:
    """Register the model with the harness, unless it is registered."""
    if NAME not in model_registry:
        model_registry.register(NAME)(SamplerLM)
