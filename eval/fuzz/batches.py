"""Random configurations: a row of a batch, and one in flight, is the row alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from random import Random
from typing import Any, ClassVar

import torch

from dllm_sampler import config
from dllm_sampler.errors import UserError
from dllm_sampler.eval.fuzz import models, rows
from dllm_sampler.eval.fuzz.harness import PASSED, Case, Outcome
from dllm_sampler.eval.testbeds import toys
from dllm_sampler.eval.testbeds.plugins import settings
from dllm_sampler.prompts import Infill
from dllm_sampler.sampler import Sampler
from dllm_sampler.speculative.deer import SpeculativeSampler

PLAIN = {"scheduler": "threshold", "cache": "none", "blocks": "fixed", "stop": "none"}
GROUPS = (*PLAIN,)
TRIES = 15  # draws of what a plug-in might run with
UNIFORM = ("entropy_renoise", "block_refine")  # schedulers of models without masks
LIVE = "a live model"  # stands for an object, which JSON does not have
OPTIONAL = {  # what a smaller case does without
    "temperature": None, "top_k": None, "top_p": None, "guide": [], "compat": False, "max_steps": None,
    "poll_every": 1, "entropy": False, "samples": 1, "given": None, "many": None, "target": None,
}  # fmt: skip


class Batches:
    """Every plug-in with every other, on a model of each family, for ragged prompts."""

    limit: ClassVar[float] = 60.0

    def draw(self, random: Random) -> Case:
        """A configuration and its prompts; for one plug-in by chance others are looked for that it runs with."""
        group = random.choice((*GROUPS, "scheduler"))
        chosen = {group: _plugin(random, group, "")}
        case = _drawn(random) | chosen
        for _ in range(random.choice([0, *[TRIES] * 4])):
            if not _refused(case):
                break
            case = _drawn(random) | chosen
        return case

    def check(self, case: Case) -> Outcome:
        """Run it as a batch, row by row, and in flight."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sampler = built(case)
            return _speculative(case, sampler) if case["target"] else _checked(case, sampler)

    def simpler(self, case: Case) -> Iterator[Case]:
        """Without an option, with default plug-ins, with fewer and shorter prompts."""
        for name, plain in OPTIONAL.items():
            if case[name] != plain:
                yield case | {name: plain}
        for group, name in PLAIN.items():
            if case[group] != {"name": name}:
                yield case | {group: {"name": name}}
        for group in GROUPS:
            for field in case[group]:
                if field != "name":
                    yield case | {group: {key: value for key, value in case[group].items() if key != field}}
        if case["family"] != "llada":
            yield case | {"family": "llada"}
        for row in range(len(case["prompts"])):
            if len(case["prompts"]) > 1:
                yield without(case, row)
        for row, prompt in enumerate(case["prompts"]):
            if len(prompt) > 1:
                yield case | {"prompts": [prompt[:1] if at == row else p for at, p in enumerate(case["prompts"])]}
        if case["tokens"] > 1 and case["given"] is None:
            yield case | {"tokens": case["tokens"] // 2}

    def command(self, case: Case) -> None:
        """Tiny models are on no command line."""


FUZZ = Batches()


def _drawn(random: Random) -> Case:
    """Any configuration, and prompts."""
    family = random.choice(models.FAMILIES)
    count, tokens = random.choice([1, 2, 2, 3, 3, 4]), random.choice([*range(1, 17), 24])
    most = random.choice([4, 9, 9, 9, 30])
    heat = random.choice([None, None, None, 0.5, 1.0, 1.7, 1e-3])
    cut = random.random() < (0.05 if heat is None else 0.5)  # refused where tokens are not drawn
    sentences = [[_token(random) for _ in range(random.randint(1, most))] for _ in range(count)]
    case: Case = {
        "family": family,
        "dtype": random.choices(models.DTYPES, [7, 2, 1, 1])[0],
        **{group: _partner(random, group, family) for group in GROUPS},
        "guide": [_plugin(random, "guide", family) for _ in range(random.choices([0, 1, 2], [6, 3, 1])[0])],
        "temperature": heat,
        "top_k": random.choice([None, 1, 3, 20]) if cut else None,
        "top_p": random.choice([None, 0.2, 0.9]) if cut else None,
        "compat": random.random() < 0.06,
        "max_steps": random.choice([None] * 9 + [1, 3, 8]),
        "poll_every": random.choice([1, 1, 1, 2, 3]),
        "entropy": random.random() < 0.3,
        "prompts": sentences,
        "tokens": tokens,
        "seeds": [random.choice([0, 7, 7, random.randint(-(2**62) + 9, 2**62 - 9)]) for _ in range(count)],
        "samples": random.choice([1, 1, 1, 1, 2, 3]),
        "given": _given(random, count, tokens) if random.random() < 0.25 else None,
        "many": _many(random, count) if random.random() < 0.6 else None,
        "target": None,
    }
    if random.random() < 0.05:
        draft, scheduled = random.choice([0, 1, 3, 8]), random.random() < 0.3
        case |= {"target": {"draft_length": draft, "scheduled": scheduled}, "guide": [], "given": None}
    if family == "gemma" and random.random() < 0.8:
        case |= {"guide": [], "given": None, "target": None}
    return case


def _refused(case: Case) -> bool:
    """Whether a sampler refuses the configuration before it gets a prompt."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            built(case)
    except UserError:
        return True
    except Exception:  # to be found by `check`
        return False
    return False


def _token(random: Random) -> int:
    return random.randrange(toys.VOCAB - 4)


def _partner(random: Random, group: str, family: str) -> dict[str, Any]:
    """A plug-in of a group, often the plain one: some run with few others."""
    return {"name": PLAIN[group]} if random.random() < 0.3 else _plugin(random, group, family)


def _plugin(random: Random, group: str, family: str) -> dict[str, Any]:
    """One of a group, under settings that tests know, or near them."""
    every: list[dict[str, Any]] = settings(group)
    if group == "cache" and family in models.CAUSAL and random.random() < 0.8:
        every = [one for one in every if one["name"] in ("none", "block_causal", "exact")]
    elif group == "cache" and family in ("bert", "gemma") and random.random() < 0.8:
        every = [one for one in every if one["name"] in ("none", "exact")]
    elif group == "blocks" and family in (*models.CAUSAL, "gemma") and random.random() < 0.8:
        every = [{"name": "fixed"}]
    elif group == "scheduler" and family == "gemma" and random.random() < 0.85:
        every = [one for one in every if one["name"] in UNIFORM]
    # by name first: some have seven settings, others one
    name = random.choice(sorted({one["name"] for one in every}))
    chosen: dict[str, Any] = copy.deepcopy(random.choice([one for one in every if one["name"] == name]))
    if "verifier" in chosen:
        chosen["verifier"] = f"{LIVE}, {chosen['verifier'].config.vocab_size}"
    if "inner" in chosen and random.random() < 0.5:
        chosen["inner"] = _plugin(random, group, family)
    fields: dict[str, Any] = config.entry(group, name).settings | chosen
    numbers = sorted(key for key, value in fields.items() if type(value) in (int, float))
    for key in numbers:
        if random.random() < 0.25:
            chosen[key] = _near(random, fields[key])
    return chosen


def _near(random: Random, value: float) -> float:
    """Another number of the same type, seldom an extreme one."""
    if isinstance(value, int):
        return random.choice([max(0, value - 1), value + 1, 1, 2 * value])
    return random.choice([value * random.uniform(0.3, 1.2), random.random(), value, 0.0, 1.0])


def _given(random: Random, count: int, tokens: int) -> dict[str, Any]:
    """Tokens of the answers that are given, in one of the ways to say so."""
    kind = random.choice(["prefix", "suffix", "pinned", "infill"])
    if kind in ("prefix", "suffix"):
        return {kind: [[_token(random) for _ in range(random.randint(1, max(1, tokens // 2)))] for _ in range(count)]}
    share = random.choice([0.2, 0.5, 0.9])
    answers = [[_token(random) if random.random() < share else -1 for _ in range(tokens)] for _ in range(count)]
    return {kind: answers}


def _many(random: Random, count: int) -> dict[str, Any]:
    return {
        "places": random.choice([1, 2, 3, 5]),
        "order": random.choice(["finished", "given"]),
        "batching": random.choice(["in_flight", "in_flight", "static"]),
        "lengths": [random.randint(1, 14) for _ in range(count)] if random.random() < 0.6 else None,
    }


def without(case: Case, row: int) -> Case:
    """The case without one of its prompts."""

    def fewer(values: list[Any] | None) -> list[Any] | None:
        return values and [one for at, one in enumerate(values) if at != row]

    changed = {name: fewer(case[name]) for name in ("prompts", "seeds")}
    if case["given"]:
        changed["given"] = {kind: fewer(values) for kind, values in case["given"].items()}  # type: ignore[assignment]
    if case["many"]:
        changed["many"] = case["many"] | {"lengths": fewer(case["many"]["lengths"])}
    return case | changed


def built(case: Case) -> Sampler:
    """The sampler of a case."""
    plugins = {group: _live(case[group]) for group in GROUPS}
    names = ("temperature", "top_k", "top_p", "compat", "max_steps", "poll_every", "entropy")
    options = {name: case[name] for name in names}
    denoiser = models.denoiser(case["family"], case["dtype"])
    return Sampler(denoiser, tokenizer=toys.tokenizer(), guide=case["guide"] or None, **plugins, **options)


def _live(chosen: dict[str, Any]) -> dict[str, Any]:
    """Settings with the objects that they name."""
    found = dict(chosen)
    if isinstance(found.get("verifier"), str):
        found["verifier"] = toys.verifier(vocab=int(found["verifier"].rpartition(" ")[2]))
    if isinstance(found.get("inner"), dict):
        found["inner"] = _live(found["inner"])
    return found


def asked(case: Case, chosen: list[int]) -> tuple[list[Any], dict[str, Any]]:
    """The prompts of some rows, and what is given of their answers."""
    prompts: list[Any] = [case["prompts"][row] for row in chosen]
    given = {kind: [values[row] for row in chosen] for kind, values in (case["given"] or {}).items()}
    if "infill" in given:
        prompts = [Infill(answer, prompt) for answer, prompt in zip(given.pop("infill"), prompts, strict=True)]
    return prompts, given


def _checked(case: Case, sampler: Sampler) -> Outcome:
    """Batch, rows and flight of masked diffusion."""
    samples, every = case["samples"], list(range(len(case["prompts"])))
    seeds = [seed + sample for seed in case["seeds"] for sample in range(samples)]
    prompts, given = asked(case, every)
    batch = sampler.generate(prompts, max_new_tokens=case["tokens"], seed=seeds, samples=samples, **given)
    if broken := rows.broken(batch, case, sampler):
        return Outcome("wrong", broken, broken.partition(":")[0])
    exact, differs = case["dtype"] == "float64", ""
    for row in range(len(seeds))[:3]:
        prompts, given = asked(case, [row // samples])
        try:
            alone = sampler.generate(prompts, max_new_tokens=case["tokens"], seed=[seeds[row]], **given)
        except UserError as error:
            return Outcome("wrong", f"row {row} alone is refused: {error}", "refused alone")
        differs = differs or rows.unlike(batch, row, alone, exact, samples == 1)
    if case["many"] and not differs:
        differs = _in_flight(case, sampler, seeds, exact)
    if differs and exact:
        return Outcome("wrong", differs, differs.partition(":")[0].partition(",")[2])
    return Outcome("passed", f"{case['dtype']} and not float64, a row depends on its batch") if differs else PASSED


def _in_flight(case: Case, sampler: Sampler, seeds: list[int], exact: bool) -> str:
    """How an answer of `generate_many` differs from its prompt's alone; empty: in nothing."""
    many, samples = case["many"], case["samples"]
    prompts, given = asked(case, list(range(len(case["prompts"]))))
    if case["given"]:
        many = many | {"lengths": None}
    lengths = many["lengths"] or [case["tokens"]] * len(prompts)
    stream = sampler.generate_many(
        prompts, batch_size=max(many["places"], samples), max_new_tokens=lengths, seed=seeds, samples=samples,
        order=many["order"], batching=many["batching"], on_error="yield", **given,
    )  # fmt: skip
    answers = list(stream)
    numbers = [answer.index * samples + answer.sample for answer in answers]
    if sorted(numbers) != list(range(len(seeds))):
        return f"in flight, answers: {numbers} of {len(seeds)}"
    if many["order"] == "given" and numbers != sorted(numbers):
        return f"in flight, order: {numbers}"
    for answer in answers[-3:]:
        own, given = asked(case, [answer.index])
        at = answer.index * samples + answer.sample
        try:
            alone = sampler.generate(own, max_new_tokens=lengths[answer.index], seed=[seeds[at]], **given)
        except UserError as error:
            if answer.error is None:
                return f"in flight, refused alone: {error}"
            continue
        if answer.error is not None:
            return f"in flight, refused: {answer.error}"
        if differs := rows.unlike_answer(answer, alone, exact, samples == 1):
            return differs
    return ""


def _speculative(case: Case, sampler: Sampler) -> Outcome:
    """The same of DEER."""
    deer = SpeculativeSampler(sampler, toys.verifier(), **case["target"])
    batch = deer.generate(case["prompts"], max_new_tokens=case["tokens"], seed=case["seeds"])
    if int(batch.lengths.max()) > case["tokens"] or (batch.nfe < 1).any():
        return Outcome("wrong", f"speculative counts: {batch.lengths.tolist()}, {batch.nfe.tolist()}", "counts")
    for row, (prompt, seed) in enumerate(zip(case["prompts"], case["seeds"], strict=True)):
        alone = deer.generate([prompt], max_new_tokens=case["tokens"], seed=[seed])
        for name in ("tokens", "lengths", "step_map", "nfe", "drafter_nfe", "complete"):
            if not torch.equal(getattr(batch, name)[row], getattr(alone, name)[0]):
                if case["dtype"] != "float64":  # the drafter's; the target is in float64
                    return Outcome("passed", f"{case['dtype']} and not float64, a row depends on its batch")
                return Outcome("wrong", f"speculative row {row}, {name}: not that of the row alone", name)
    return PASSED
