"""What holds of every result, and how a row of a batch differs from the row alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dllm_sampler.result import Answer, Result

if TYPE_CHECKING:
    from dllm_sampler.eval.fuzz.harness import Case
    from dllm_sampler.sampler import Sampler

CLOSE = 1e-9  # of log-probabilities and entropies in float64
SHORT = ("max_steps", "constraint", "not_finite")  # why an answer may be incomplete


def broken(result: Result, case: Case, sampler: Sampler) -> str:
    """The first promise that a result breaks, as `name: figures`; empty: none."""
    spec, trace, samples = sampler.denoiser.spec, result.trace, case["samples"]
    begins = trace.begin.tolist()
    for row in range(len(result.lengths)):
        prompt, length, nfe = case["prompts"][row // samples], int(result.lengths[row]), int(result.nfe[row])
        tokens, steps = result.tokens[row], result.step_map[row]
        if trace.ids[row, begins[row] : trace.origin].tolist() != prompt:
            return f"the prompt changed: row {row}"
        if not 0 <= length <= case["tokens"]:
            return f"a length outside of the canvas: {length}"
        if spec.mask_id is not None and not case["compat"] and (tokens[:length] == spec.mask_id).any():
            return f"a mask is left: row {row}, {tokens[:length].tolist()}"
        if not (tokens >= 0).all() or not (tokens < spec.vocab_size).all():
            return f"a token outside of the vocabulary: row {row}"
        known = _known(case, row // samples)
        for at, token in known.items():
            if int(tokens[at]) != token or int(steps[at]) != -1:
                return f"a given token changed: row {row}, position {at}, {int(tokens[at])} for {token}"
        free = [at for at in range(length) if at not in known]
        if any(not 0 <= int(steps[at]) < nfe for at in free):
            return f"a token of no forward: row {row}, {steps[:length].tolist()} of {nfe} forwards"
        if int(steps.max()) >= nfe:
            return f"a step beyond the last: row {row}, {int(steps.max())} of {nfe}"
        if bool(result.complete[row]) == (result.finish_reason[row] in SHORT):
            return f"complete and its reason disagree: row {row}, {result.finish_reason[row]}"
        if case["max_steps"] is not None and nfe > case["max_steps"]:
            return f"more forwards than max_steps: row {row}, {nfe}"
        written = trace.step_map[row] >= 0
        for name in ("logprob", "entropy"):
            values = getattr(trace, name)
            own = None if values is None else values[row][written]
            # a guide may leave nothing of a token's probability: `end_tokens` in mode defer, a truncation that measures
            low = own is not None and not case["guide"] and (own == -torch.inf).any()
            if own is not None and (low or own.isnan().any() or (own == torch.inf).any()):
                return f"{name} is not finite: row {row}, {own.tolist()}"
        if (trace.logprob[row][written] > 1e-5).any():
            return f"a probability above 1: row {row}"
    return ""


def _known(case: Case, prompt: int) -> dict[int, int]:
    """The given tokens of an answer, by position."""
    found: dict[int, int] = {}
    for kind, values in (case["given"] or {}).items():
        own = values[prompt]
        start = case["tokens"] - len(own) if kind == "suffix" else 0
        found |= {start + at: token for at, token in enumerate(own) if token >= 0}
    return found


def unlike(batch: Result, row: int, alone: Result, exact: bool, computed: bool) -> str:
    """How a row differs from the row alone, as `row, field: figures`; empty: in nothing.

    Args:
        batch: of which row `row` is compared.
        alone: a result of one row.
        exact: also the history and the log-probabilities, which only float64 promises.
        computed: also the positions computed.
    """
    ours, other = batch.trace, alone.trace
    begin = int(ours.begin[row]), int(other.begin[0])
    found: list[tuple[str, Any, Any]] = [("tokens", batch.tokens[row], alone.tokens[0])]
    if exact:
        found += [(name, getattr(batch, name)[row], getattr(alone, name)[0]) for name in ("lengths", "nfe", "complete")]
        found += [("reason", batch.finish_reason[row], alone.finish_reason[0])]
        found += [("steps", batch.step_map[row], alone.step_map[0])]
        found += [("gone", ours.gone[row, begin[0] :], other.gone[0, begin[1] :])]
        found += [("computed", ours.rows[row], other.rows[0])] if computed else []
        for name in ("logprob", "entropy"):
            one, two = getattr(ours, name), getattr(other, name)
            if one is not None:
                found.append((name, one[row, ours.origin :], two[0, other.origin :]))
    return _first(f"row {row}", found)


def unlike_answer(answer: Answer, alone: Result, exact: bool, computed: bool) -> str:
    """The same of an answer in flight."""
    found: list[tuple[str, Any, Any]] = [("tokens", answer.tokens, alone.tokens[0])]
    if exact:
        assert answer.trace is not None
        found += [("lengths", answer.length, int(alone.lengths[0])), ("nfe", answer.nfe, int(alone.nfe[0]))]
        found += [("reason", answer.finish_reason, alone.finish_reason[0])]
        found += [("steps", answer.trace.generated[0], alone.step_map[0])]
        found += [("computed", answer.trace.rows[0], alone.trace.rows[0])] if computed else []
        ours, other = answer.trace, alone.trace
        found += [("logprob", ours.logprob[0, ours.origin :], other.logprob[0, other.origin :])]
    return _first(f"in flight {answer.index}", found)


def _first(where: str, found: list[tuple[str, Any, Any]]) -> str:
    for name, one, two in found:
        if isinstance(one, Tensor) and one.is_floating_point():
            same = one.shape == two.shape and torch.allclose(one, two, atol=CLOSE, rtol=CLOSE, equal_nan=True)
        elif isinstance(one, Tensor):
            same = torch.equal(one, two)
        else:
            same = one == two
        if not same:
            return f"{where}, {name}: {_shown(one)} alone {_shown(two)}"
    return ""


def _shown(value: Any) -> str:
    return str(value.tolist() if isinstance(value, Tensor) else value)[:200]
