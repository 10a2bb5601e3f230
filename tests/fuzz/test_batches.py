"""Random configurations: a row of a batch, and an answer in flight, equals the row alone."""

from __future__ import annotations

import functools
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import assume, event
from hypothesis import strategies as st
from torch import Tensor

from dllm_sampler import Denoiser, Result, Sampler, UserError, config
from dllm_sampler.check.settings import settings
from dllm_sampler.generation.speculative import SpeculativeSampler
from dllm_sampler.inputs.prompts import Infill
from dllm_sampler.models.loading import load
from dllm_sampler.result import Answer, Commits
from tests import tiny, toys
from tests.fuzz import assert_is_sentence, fuzz

CAUSAL = ("causal", "fast", "context", "in_blocks", "sdar", "llada2.2-moe")  # they generate in blocks
LOADED = ("sdar", "llada2.2-moe", "llada-moe", "bert", "diffusion-gemma")
FAMILIES = (*toys.TOYS, *CAUSAL, *LOADED[2:])
CLOSE = 1e-9  # of log-probabilities and entropies in float64
CUT_SHORT = ("max_steps", "constraint", "not_finite")


@functools.cache
def model_of(family: str, dtype: str) -> tuple[Denoiser, Any]:
    """Return one of the toys, or a tiny checkpoint of a family, with its tokenizer."""
    if family not in LOADED:
        return toys.denoiser(family, dtype=getattr(torch, dtype)), toys.tokenizer()
    with tempfile.TemporaryDirectory() as name:
        loaded = load(tiny.write(family, Path(name) / family), dtype=dtype)
    return loaded.denoiser, loaded.tokenizer


@dataclass
class Case:
    """A configuration and its prompts."""

    family: str
    dtype: str
    plugins: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    tokens: int = 8
    samples: int = 1
    given: dict[str, list[list[int]]] = field(default_factory=dict)  # tokens of the answers, by how they are given

    def sampler(self) -> Sampler:
        """Build the sampler."""
        model, tokenizer = model_of(self.family, self.dtype)
        return Sampler(model, tokenizer=tokenizer, **self.plugins, **self.options)

    def is_refused(self) -> bool:
        """Return True if the sampler refuses the configuration before it gets a prompt."""
        try:
            self.sampler()
        except UserError:
            return True
        except Exception:
            return False  # the test finds it
        return False

    def asked(self, rows: list[int]) -> dict[str, Any]:
        """Return the arguments that ask for the answers to some of the prompts."""
        prompts: list[Any] = [self.prompts[row] for row in rows]
        given = {kind: [values[row] for row in rows] for kind, values in self.given.items()}
        if "infill" in given:
            prompts = [Infill(answer, prompt) for answer, prompt in zip(given.pop("infill"), prompts, strict=True)]
        return {"prompts": prompts, **given}

    def known(self, row: int) -> dict[int, int]:
        """Return the given tokens of an answer, by position."""
        known = {}
        for kind, values in self.given.items():
            start = self.tokens - len(values[row]) if kind == "suffix" else 0
            known |= {start + at: token for at, token in enumerate(values[row]) if token >= 0}
        return known


@st.composite
def plugin(draw: st.DrawFn, group: str) -> dict[str, Any]:
    """One plug-in of a group, under settings that tests know, or near them."""
    name = draw(st.sampled_from(sorted(config.names(group))))
    chosen = dict(draw(st.sampled_from([one for one in settings(group) if one["name"] == name])))
    fields: dict[str, Any] = config.entry(group, name).settings | chosen
    if isinstance(fields.get("inner"), dict) and draw(st.booleans()):
        chosen["inner"] = draw(plugin(group))
    numbers = sorted(key for key, value in fields.items() if type(value) in (int, float))
    for key in draw(st.lists(st.sampled_from(numbers), max_size=2, unique=True)) if numbers else ():
        value = fields[key]
        near = [max(0, value - 1), value + 1, 1, 2 * value]
        real = st.floats(0, 1) | st.sampled_from([value / 2, 1.2 * value])
        chosen[key] = draw(st.sampled_from(near) if isinstance(value, int) else real)
    return chosen


GREEDY = st.fixed_dictionaries(
    {},
    optional={
        "max_steps": st.sampled_from([8, 3, 1]),
        "entropy": st.just(True),
        "compat": st.just(True),
    },
)
DRAWN = st.fixed_dictionaries(
    {"temperature": st.sampled_from([1.0, 0.5, 1.7, 1e-3])},
    optional={"top_k": st.sampled_from([20, 3, 1]), "top_p": st.sampled_from([0.9, 0.2])},
)
TOKEN, GROUPS = st.integers(0, toys.VOCAB - 5), ("scheduler", "cache", "blocks", "stop", "guide")
SEED = st.sampled_from([0, 7]) | st.integers(9 - 2**62, 2**62 - 9)


@st.composite
def configurations(draw: st.DrawFn) -> Case:
    """Any plug-ins that run together, each with its settings, and options of the sampler."""
    family = draw(st.sampled_from(FAMILIES))
    uniform = {"scheduler": {"name": "entropy_renoise"}} if family == "diffusion-gemma" else {}
    case = Case(family, draw(st.sampled_from(["float64"] * 7 + ["float32", "bfloat16"])), uniform)
    for group in draw(st.permutations(GROUPS)):
        chosen = draw(st.lists(plugin(group), max_size=2) if group == "guide" else plugin(group))
        before, case.plugins = case.plugins, case.plugins | {group: chosen}
        if case.is_refused():
            case.plugins = before
    for strategy in (GREEDY, DRAWN):
        before, case.options = case.options, case.options | draw(st.just({}) | strategy)
        if case.is_refused():
            case.options = before
    return case


@st.composite
def cases(draw: st.DrawFn, given: bool = True) -> Case:
    """A configuration, ragged prompts, and tokens of their answers that are given."""
    case = draw(configurations())
    case.prompts = draw(st.lists(st.lists(TOKEN, min_size=1, max_size=30), min_size=1, max_size=4))
    case.seeds = draw(st.lists(SEED, min_size=len(case.prompts), max_size=len(case.prompts)))
    case.tokens = draw(st.integers(1, 24))
    if given:
        case.samples = draw(st.sampled_from([1, 1, 2, 3]))
        kind = draw(st.sampled_from([None, None, None, "prefix", "suffix", "pinned", "infill"]))
        piece = st.lists(TOKEN, min_size=1, max_size=max(1, case.tokens // 2))
        answer = st.lists(st.just(-1) | TOKEN, min_size=case.tokens, max_size=case.tokens)
        count = len(case.prompts)
        values = st.lists(piece if kind in ("prefix", "suffix") else answer, min_size=count, max_size=count)
        case.given = {kind: draw(values)} if kind else {}
    return case


@fuzz(3, 3, case=cases(), data=st.data())
def test_a_row_of_a_batch_and_an_answer_in_flight_equal_the_row_alone(case: Case, data: st.DataObject) -> None:
    """In float64: tokens, step map, forwards, positions computed, and log-probabilities."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            sampler = case.sampler()
            batch = whole_batch(sampler, case)
        except UserError as error:
            event("refused")
            return assert_is_sentence(str(error))
        assert_keeps_promises(batch, case, sampler)
        rows = range(len(batch.lengths))
        for row in (data.draw(st.sampled_from(rows), label="row"), rows[-1]):
            assert_equal(of_batch(batch, row), alone(sampler, case, row, case.tokens), case)
        lengths = [case.tokens] * len(case.prompts)
        if not case.given:
            lengths = data.draw(st.lists(st.integers(1, 14), min_size=len(lengths), max_size=len(lengths)))
        answers = list(
            sampler.generate_many(
                **case.asked(list(range(len(case.prompts)))),
                seed=seeds(case),
                samples=case.samples,
                max_new_tokens=lengths,
                batch_size=max(case.samples, data.draw(st.integers(1, 5), label="batch_size")),
                batching=data.draw(st.sampled_from(["in_flight", "static"])),
                order=(order := data.draw(st.sampled_from(["finished", "given"]))),
                on_error="yield",
            )
        )
        numbers = [answer.index * case.samples + answer.sample for answer in answers]
        assert sorted(numbers) == list(rows) and (order == "finished" or numbers == sorted(numbers))
        for answer in answers[-2:]:  # they had the lane of another one before
            try:
                own = alone(sampler, case, answer.index * case.samples + answer.sample, lengths[answer.index])
            except UserError:
                own = None
            assert (own is None) == (answer.error is not None), answer
            if own is not None:
                assert_equal(of_answer(answer), own, case)


def seeds(case: Case) -> list[int]:
    """Return the seed of each answer."""
    return [seed + sample for seed in case.seeds for sample in range(case.samples)]


def whole_batch(sampler: Sampler, case: Case) -> Result:
    """Generate all answers as one batch. A row changes only in a forward that it takes part in."""
    asked = {**case.asked(list(range(len(case.prompts)))), "max_new_tokens": case.tokens, "seed": seeds(case)}
    if case.samples > 1:
        return sampler.generate(samples=case.samples, **asked)
    before: Commits | None = None
    for commits in sampler.stream(**asked):
        if before is not None:
            idle = commits.nfe == before.nfe
            assert torch.equal(commits.tokens[idle], before.tokens[idle]), f"step {commits.step}"
            assert torch.equal(commits.step_map[idle], before.step_map[idle]), f"step {commits.step}"
        before = commits
    assert before is not None and before.result is not None
    return before.result


def alone(sampler: Sampler, case: Case, row: int, tokens: int) -> dict[str, Any]:
    """Return what is compared of a row that is generated alone."""
    asked = case.asked([row // case.samples])
    return of_batch(sampler.generate(max_new_tokens=tokens, seed=[seeds(case)[row]], **asked), 0)


def of_batch(result: Result, row: int) -> dict[str, Any]:
    """Return what is compared of a row of a batch."""
    trace, begin = result.trace, int(result.trace.begin[row])
    return {
        "tokens": result.tokens[row],
        "length": int(result.lengths[row]),
        "nfe": int(result.nfe[row]),
        "reason": result.finish_reason[row],
        "step_map": result.step_map[row],
        "computed": int(trace.rows[row]),
        "gone": trace.gone[row, begin:],
        "logprob": trace.logprob[row, trace.origin :],
        "entropy": None if trace.entropy is None else trace.entropy[row, trace.origin :],
    }


def of_answer(answer: Answer) -> dict[str, Any]:
    """Return what is compared of an answer in flight."""
    assert answer.trace is not None
    one = Result.stack([answer])
    return of_batch(one, 0) | {"tokens": answer.tokens, "length": answer.length}


def assert_equal(ours: dict[str, Any], alone: dict[str, Any], case: Case) -> None:
    """Compare all of it, exactly. Only float64 promises that."""
    if case.dtype != "float64":
        return
    for name, one in ours.items():
        other = alone[name]
        if name == "computed" and case.samples > 1:
            continue  # the prompt may have been computed once for all samples
        if isinstance(one, Tensor) and one.is_floating_point():
            assert torch.allclose(one, other, atol=CLOSE, rtol=CLOSE, equal_nan=True), (name, one, other)
        else:
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other, (name, one, other)


def assert_keeps_promises(result: Result, case: Case, sampler: Sampler) -> None:
    """Check what holds of every result."""
    spec, trace = sampler.denoiser.spec, result.trace
    assert ((result.tokens >= 0) & (result.tokens < spec.vocab_size)).all()
    assert (trace.logprob[trace.step_map >= 0] <= 1e-5).all(), "a probability above 1"
    for row, (length, nfe) in enumerate(zip(result.lengths.tolist(), result.nfe.tolist(), strict=True)):
        tokens, steps = result.tokens[row], result.step_map[row].tolist()
        known = case.known(row // case.samples)
        assert trace.ids[row, int(trace.begin[row]) : trace.origin].tolist() == case.prompts[row // case.samples]
        assert 0 <= length <= case.tokens
        assert case.options.get("compat") or spec.mask_id is None or not (tokens[:length] == spec.mask_id).any()
        ids = trace.ids[row, trace.origin :].tolist()  # also after the end, where the result has padding
        assert all((ids[at], steps[at]) == (token, -1) for at, token in known.items()), "a given token changed"
        assert all(0 <= steps[at] < nfe for at in range(length) if at not in known), "a token of no forward"
        assert max(steps) < nfe <= case.options.get("max_steps", nfe)
        assert bool(result.complete[row]) != (result.finish_reason[row] in CUT_SHORT)
        written = trace.step_map[row] >= 0
        for values in (
            trace.logprob[row],
            torch.zeros_like(trace.logprob[row]) if trace.entropy is None else trace.entropy[row],
        ):
            assert not values[written].isnan().any() and not (values[written] == torch.inf).any()
            # a guide may leave nothing of a token's probability
            assert case.plugins.get("guide") or values[written].isfinite().all()


@fuzz(2, case=cases(given=False), draft_length=st.integers(0, 8), scheduled=st.booleans())
def test_a_row_of_a_speculative_batch_equals_the_row_alone(case: Case, draft_length: int, scheduled: bool) -> None:
    case.plugins.pop("guide", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            deer = SpeculativeSampler(case.sampler(), toys.verifier(), draft_length=draft_length, scheduled=scheduled)
            batch = deer.generate(case.prompts, max_new_tokens=case.tokens, seed=case.seeds)
        except UserError as error:
            return assert_is_sentence(str(error))
        assert int(batch.lengths.max()) <= case.tokens and (batch.nfe >= 1).all()
        for row, (prompt, seed) in enumerate(zip(case.prompts, case.seeds, strict=True)):
            one = deer.generate([prompt], max_new_tokens=case.tokens, seed=[seed])
            assume(case.dtype == "float64")
            for name in ("tokens", "lengths", "step_map", "nfe", "drafter_nfe", "complete"):
                assert torch.equal(getattr(batch, name)[row], getattr(one, name)[0]), name
