"""The exact log-likelihood of given answers under a model and a sampler (DUEL, arXiv 2603.01367).

If drawn tokens do not decide where a step commits, an answer has one path through the sampler. `Scoring` follows that
path. It writes the answer's tokens in place of draws, and records the log-probability of each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dllm_sampler.core.checks import check_count
from dllm_sampler.core.naming import named
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.protocols import is_random
from dllm_sampler.core.spec import BatchState, ChangingLength, ModelSpec
from dllm_sampler.core.values import FREE, Canvas, Readout
from dllm_sampler.engine.decide import Generation
from dllm_sampler.engine.in_flight import Request
from dllm_sampler.engine.loop import Engine
from dllm_sampler.engine.plugins import Plugins
from dllm_sampler.errors import NotFiniteError, UserError, counted
from dllm_sampler.generation.runtime import Runtime
from dllm_sampler.inputs import prompts as inputs
from dllm_sampler.inputs.given import Piece, piece_ids
from dllm_sampler.inputs.prompts import Prompt
from dllm_sampler.result import Scores
from dllm_sampler.stops.end_tokens import NoStop


def scores(
    runtime: Runtime,
    prompts: Prompt | Sequence[Prompt],
    answers: Piece | Sequence[Piece],
    max_new_tokens: int | None,
    batch_size: int,
) -> Scores:
    """Check the arguments of `Sampler.score`, and return the scores."""
    check_count("batch_size", batch_size)
    check_count("max_new_tokens", max_new_tokens, optional=True)
    reason = next(reasons_against(runtime), None)
    if reason is not None:
        raise UserError("score-inexact", reason)
    rows = _pairs(runtime, inputs.as_list(prompts), inputs.as_list(answers), max_new_tokens)
    return row_scores(runtime, rows, batch_size)


def row_scores(runtime: Runtime, rows: Sequence[tuple[list[int], list[int]]], batch_size: int) -> Scores:
    """Return the scores of `rows`, pairs of the token ids of a prompt and its answer."""
    runtime, found = replace(runtime, noise=OnlyTokens(runtime.plugins)), []
    for at in range(0, len(rows), batch_size):
        try:
            found.append(_batch(runtime, rows[at : at + batch_size]))
        except NotFiniteError as error:
            raise NotFiniteError(error.step, [at + row for row in error.rows]) from None
    return Scores.joined(found)


def reasons_against(runtime: Runtime) -> Iterator[str]:
    """Yield a message for each setting under which scores would not be exact likelihoods."""
    plugins, traits = runtime.plugins, runtime.plugins.scheduler.traits
    scheduler = f"scheduler={named(plugins.scheduler)}"
    if not isinstance(plugins.stop, NoStop):
        yield f"stop={named(plugins.stop)} drops tokens that were drawn after an answer's end. Use stop=none."
    if runtime.max_steps is not None:
        yield f"max_steps={runtime.max_steps} may end an answer before it is complete. Remove it."
    if plugins.particles.count > 1:
        yield f"particles={named(plugins.particles)} chooses among several rows of a prompt. Remove it."
    if plugins.compat:
        yield "compat=true may draw the mask token, and draws again at that position later. Remove it."
    if runtime.spec.mask_id is None or runtime.spec.encoder:
        yield "this model has no mask token (uniform diffusion), and its noise is drawn. Use a masked-diffusion model."
    for guide in plugins.guides:
        if guide.joint or guide.vetoes:
            does = "chooses the tokens of a step together" if guide.joint else "refuses tokens after they are drawn"
            yield f"guide={named(guide)} {does}. Remove it."
    facts = {
        "draws the positions that it commits": traits.draws_order,
        "remasks or replaces tokens": traits.revises,
        "drafts tokens and verifies them": traits.drafts,
        "changes the length of answers": traits.has(ChangingLength),
        "has a state for the whole batch": traits.has(BatchState),
    }
    for fact in (fact for fact, holds in facts.items() if holds):
        yield f"{scheduler} {fact}, so that scores would not be exact. Use scheduler=fixed with scheduler.score=margin."
    if not is_random(plugins.guides):
        if traits.own_tokens:
            yield (
                f"{scheduler} writes other tokens than those of the step. Use scheduler=fixed with"
                " scheduler.score=margin."
            )
        return  # without a temperature the drawn token is the likeliest one
    if plugins.judge == "best":
        return
    judging = {"scheduler": traits.judges_draws, "blocks": plugins.blocks.judges_draws}
    judging["cache"] = plugins.cache.judges_draws
    for kind, judges in judging.items():
        if judges:
            name = f"{kind}={named(getattr(plugins, kind))}"
            yield f"{name} judges the tokens that a step drew. Set judge=best, or use another {kind}."


def _pairs(
    runtime: Runtime, prompts: list[Any], answers: list[Any], max_new_tokens: int | None
) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of each prompt and of its answer."""
    spec, tokenizer = runtime.spec, runtime.tokenizer
    if not answers or len(prompts) not in (1, len(answers)):
        raise UserError(
            "length-mismatch",
            f"score got {counted(len(prompts), 'prompt')} and {counted(len(answers), 'answer')}. Give one answer for"
            " each prompt, or one prompt for all answers.",
        )
    prompts = prompts * len(answers) if len(prompts) == 1 else prompts
    found: list[tuple[list[int], list[int]]] = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), 1):
        ids = piece_ids(answer, f"answer {number}", tokenizer, spec, masks=True)
        if FREE in ids:
            raise UserError("mask-token-given", f"answer {number} contains a mask token or -1. Replace it by a token.")
        if not ids:
            raise UserError("answer-empty", f"answer {number} is empty. Give it at least one token.")
        if max_new_tokens is not None and len(ids) > max_new_tokens:
            raise UserError(
                "answer-too-long",
                f"answer {number} has {counted(len(ids), 'token')}, more than max_new_tokens={max_new_tokens}. Raise"
                " max_new_tokens.",
            )
        ids += [spec.eos_id] * ((max_new_tokens or 0) - len(ids))
        runtime.plugins.blocks.lookahead(len(ids))
        named = f"prompt {number}", f"answer {number}" if max_new_tokens is None else None
        found.append((inputs.encode_one(prompt, tokenizer, spec, len(ids), *named), ids))
    return found


def _batch(runtime: Runtime, rows: Sequence[tuple[list[int], list[int]]]) -> Scores:
    """Return the scores of one batch of prompts and answers."""
    plugins = runtime.plugins
    canvas = runtime.canvas([Request(prompt, len(answer)) for prompt, answer in rows], 1, cuts=False)
    whole = [prompt + answer for prompt, answer in rows]
    answers = torch.tensor([row + [0] * (canvas.length + 1 - len(row)) for row in whole], device=canvas.ids.device)
    engine = Scoring(runtime.denoiser, plugins, runtime.engine().kernels, answers)
    *_, state = engine.run(canvas, runtime.bound(canvas.layout.longest))
    if bool(state.canvas.masked.any()):
        raise UserError(
            "score-inexact",
            f"scheduler={named(plugins.scheduler)} left masks in the answer. Use scheduler=fixed with"
            " scheduler.score=margin.",
        )
    answer, recorder = canvas.answer(), state.recorder
    return Scores(
        tokens=answers.gather(1, answer).cpu(),
        log_q=engine.log_q.gather(1, answer).cpu(),
        step_map=recorder.step_map.gather(1, answer).cpu(),
        nfe=recorder.nfe.cpu(),
        computed=recorder.computed.cpu(),
        lengths=canvas.layout.new_tokens.cpu(),
        prompt_lengths=canvas.layout.first.cpu(),
    )


class Scoring(Engine):
    """An engine for one batch, which writes given answers in place of draws.

    Args:
        answers: `[B, L+1]` tokens of the prompt and the answer of each row.
    """

    def __init__(self, denoiser: Any, plugins: Plugins, kernels: Any, answers: Tensor):
        super().__init__(denoiser, plugins, kernels)
        self.needs = self.needs | {"draw"}
        self.answers = answers
        self.log_q = torch.zeros(answers.shape, dtype=torch.float64, device=answers.device)  # [B, L+1]
        self.predicted = self.log_q  # [B, L+1] log-probabilities of the answer's tokens in the last forward

    def read(self, hidden: Tensor, canvas: Canvas, head_rows: HeadRows, spec: ModelSpec) -> Readout:
        """Return the readout with the answer's tokens as those to write, and record their log-probabilities."""
        seen = super().read(hidden, canvas, head_rows, spec)
        assert seen.draw is not None
        positions = head_rows.query.positions
        tokens = self.answers.gather(1, positions)[:, None]  # [B, 1, Q]
        log_q = seen.draw.log_law(seen.draw.logits, tokens)
        self.predicted = torch.zeros_like(self.log_q).scatter(1, positions, log_q[:, 0])
        return replace(seen, written=tokens, written_confidence=log_q.exp())

    def step(self, state: Generation) -> None:
        """Make one step, and record the log-probability of each token that it commits."""
        before = state.canvas.masked
        super().step(state)
        self.log_q = torch.where(before & ~state.canvas.masked, self.predicted, self.log_q)


@dataclass(frozen=True)
class OnlyTokens:
    """Noise for scoring: zeros for tokens, since these are given, and an error for every other draw.

    Args:
        plugins: the plug-ins that may draw, for the error.
    """

    plugins: Plugins

    def tokens(self, canvas: Canvas, head_rows: HeadRows, vocab: int) -> Tensor:
        """See `Noise.tokens`."""
        return torch.zeros(1, vocab, device=canvas.ids.device)

    def order(self, *_: Any) -> Tensor:
        """Refuse all other draws, since they would give an answer many paths."""
        names = " or ".join(f"{kind}={named(getattr(self.plugins, kind))}" for kind in ("scheduler", "cache"))
        raise UserError(
            "score-inexact", f"{names} draws random numbers besides tokens. Use another scheduler or cache."
        )

    uniform = ids = order
