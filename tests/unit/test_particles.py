"""Several rows of a prompt: laws by enumeration, copies that carry everything, costs, refusals."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dllm_sampler import NotFiniteError, Result, Sampler, UserError
from dllm_sampler.check.settings import settings
from dllm_sampler.cli.main import main
from dllm_sampler.core.noise import row_seeds
from dllm_sampler.core.protocols import Carry, Meeting, Particles, Resampled
from dllm_sampler.core.values import Canvas
from dllm_sampler.engine.decide import Generation
from dllm_sampler.engine.groups import Groups
from dllm_sampler.engine.in_flight import Request
from dllm_sampler.eval.command import main as evaluate
from dllm_sampler.eval.jobs import job
from dllm_sampler.generation.batch import Reader, watcher
from dllm_sampler.particles.smc import SelfRewarding
from dllm_sampler.particles.steering import Past, Steering
from dllm_sampler.schedulers.threshold import Threshold
from tests import toys
from tests.duel import Bed, Spins, Waves
from tests.refusals import refused
from tests.sampling import each, few, sampled

DATA = Path(__file__).parent / "data"
LAWS = json.loads((DATA / "srsmc.json").read_text())
RECORDS = [json.loads(line) for line in (DATA / "feynman-kac.jsonl").read_text().splitlines()]
SMC: dict[str, Any] = {"name": "smc", "count": 3, "ess": 0.9}  # most meetings copy rows
TOKENS = 10


class TwoWaves(Waves):
    symbols = 2


class FourSpins(Spins):
    length = 4


def ones(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(token == 1 for token in ids)) for ids in completion_ids]


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [0.0] * len(completion_ids)


# Laws that were enumerated.


@dataclass(frozen=True)
class Example:
    """An example of `srsmc.json`."""

    number: int
    bed: Bed
    shown: Sequence[tuple[int, ...]]  # the answers whose probabilities the file has
    options: dict[str, Any]

    @property
    def law(self) -> dict[str, Any]:
        return next(law for name, law in LAWS.items() if name.startswith(f"{self.number}:"))

    def groups(self, particles: dict[str, Any], count: int, groups: int) -> Result:
        """Answer the same prompt many times. Seeds of neighbours have nothing in common."""
        sampler = self.bed.sampler(particles={**particles, "count": count}, **self.options)
        prompts, seeds = [[self.bed.symbols + 1]] * groups, [7919 * number for number in range(groups)]
        return sampler.generate(prompts, max_new_tokens=self.bed.length, seed=seeds)


SPINS = Example(1, FourSpins(), [(0, 1, 1, 1), (1, 0, 0, 0), (1, 1, 1, 1)], {"blocks": {"name": "fixed", "length": 1}})
RULE = {"name": "threshold", "threshold": 0.6}
PAIRS = {"blocks": {"name": "fixed", "length": 2}, "scheduler": RULE, "temperature": 0.8}
WAVES = Example(2, TwoWaves(), [(0, 0, 0, 0), (1, 0, 1, 0), (0, 1, 1, 1)], PAIRS)
STEERED = replace(SPINS, number=3)


CASES = [(SPINS, 3), (WAVES, 2), (SPINS, 4), (SPINS, 2), (WAVES, 3)]


def picks(result: Result) -> Tensor:
    """Return `[G, N]` the weights of rows at their end."""
    assert result.rows is not None
    last = [rows.meetings[-1] for rows in result.rows]
    return torch.tensor(
        [[0.0] * len(one.log_weights) if one.ancestors else one.log_weights for one in last], dtype=torch.float64
    ).softmax(1)


def near(found: Tensor, wanted: float) -> None:
    """Check the mean of independent numbers `found [G]` against its expectation."""
    mean, deviation = found.double().mean(), found.double().std() / len(found) ** 0.5
    assert abs(mean - wanted) < 4.5 * deviation + 2.0 / len(found), (float(mean), wanted, float(deviation))


def equals(tokens: Tensor, answer: Sequence[int]) -> Tensor:
    return (tokens == torch.tensor(answer)).all(-1)


@few(("example", "count"), CASES, 2)
def test_answers_follow_the_enumerated_law_of_smc(example: Example, count: int) -> None:
    groups = 1000
    result, law = example.groups({"name": "smc"}, count, groups), example.law["N"][f"sr-smc N={count}"]
    assert result.rows is not None
    rows = result.rows[0].batch.tokens.view(groups, count, -1)
    for number, answer in enumerate(example.shown):
        near(equals(result.tokens, answer), law["winner"][number])
        near((picks(result) * equals(rows, answer)).sum(1), law["weighted pick"][number])
    for block in range(4):
        copied = [len(one.meetings) > block and one.meetings[block].ancestors is not None for one in result.rows]
        near(torch.tensor(copied), law.get(f"P(resampled at block {block})", 0.0))


STEERINGS = [(2, None), (3, 0.5), (2, 0.5), (3, None), (4, None)]  # always, and by the effective number


@few("case", STEERINGS)
def test_answers_follow_the_enumerated_law_of_steering(case: tuple[int, float | None]) -> None:
    count, ess = case
    groups, name = 1000, f"N={count} resample={'always' if ess is None else 'ess'}"
    steering = {"name": "steering", "reward": ones, "strength": 1.0, "ess": ess}
    result, law = STEERED.groups(steering, count, groups), STEERED.law["N"][name]
    assert result.rows is not None
    rows = result.rows[0].batch.tokens.view(groups, count, -1)
    near((picks(result) * (rows == 1).sum(2)).sum(1), law["E r pick"])
    for number, answer in enumerate(STEERED.shown):
        near((picks(result) * equals(rows, answer)).sum(1), law["weighted pick"][number])
        near(equals(result.tokens, answer), law["best"][number])


# Those without steps between the first and the last are best of N, and a single meeting at the end.
STEERED_RECORDS = [one["id"] for one in RECORDS if one["params"]["potential_type"] not in ("bon", "is")]


@dataclass(frozen=True)
class Recorded(Steering):
    """Feynman-Kac steering to the letter of its code, on a table of rewards for each place.

    Its largest reward begins at 0, its last meeting weighs that one or the sum, and a meeting that copies nothing
    forgets its weights.
    """

    table: Sequence[Sequence[float]] = ()
    seen: list[int] = field(default_factory=list)
    generator: torch.Generator = field(default_factory=torch.Generator)

    def value(self, meeting: Meeting) -> Tensor:
        return torch.tensor(self.table[len(self.seen)], dtype=torch.float64)

    def meet(self, meeting: Meeting, carry: Carry) -> Resampled:
        reward, past = self.value(meeting), carry
        level = {"max": past.level.clamp(min=0).maximum(reward), "add": past.level + reward}
        known = level.get(self.potential, reward)
        # The weight of the last meeting is the reward's own, and here that of `known`.
        shift = self.strength * (known - reward) * bool(meeting.final[0]) if self.potential in level else 0.0
        past = Past(
            past.level.clamp(min=0) if self.potential == "max" else past.level, past.product - shift, 0 * reward
        )
        found = super().meet(meeting, past)
        self.seen.append(1)
        return found._replace(carry=found.carry._replace(product=found.carry.product + shift))

    def draw(self, meeting: Meeting, weights: Tensor, again: Tensor) -> Tensor:
        if not bool(again.any()):
            return torch.zeros_like(weights, dtype=torch.int64)
        return torch.multinomial(weights[0].float(), self.count, replacement=True, generator=self.generator)[None]


@pytest.mark.parametrize("name", sampled(STEERED_RECORDS))
def test_recorded_meetings_of_feynman_kac_are_repeated(name: str) -> None:
    record = next(one for one in RECORDS if one["id"] == name)
    given, steps = record["params"], [one for one in record["steps"] if one["resampled"]]
    count = given["num_particles"]
    canvas = toys.canvas(torch.ones(count, TOKENS, dtype=torch.bool))
    rule = Recorded(
        count=count, reward=even, strength=given["lmbda"], potential=given["potential_type"],
        ess=0.5 if given["adaptive_resampling"] else None, table=[one["rewards"] for one in steps],
        generator=torch.Generator().manual_seed(record["rng"]["seed"]),
    )  # fmt: skip
    carry, no, one = rule.init(canvas), torch.zeros(1, count), torch.ones(1, dtype=torch.bool)
    for number, step in enumerate(steps):
        final = one & (number == len(steps) - 1)
        found = rule.meet(Meeting(canvas, no.double(), no.bool(), one, final, None), carry)
        at = torch.where(found.ancestors[0] < 0, torch.arange(count), found.ancestors[0])
        assert at.tolist() == step["ancestors"], number
        carry = Past(*(part[at] for part in found.carry))
        if given["potential_type"] != "rt":
            torch.testing.assert_close(carry.level.tolist(), step["population_rs"], atol=2e-3, rtol=0.0)


# What groups promise, on small random networks.

DRAWS = {"temperature": 1.0, "scheduler": {"name": "threshold", "threshold": 0.4}}


def made(kind: str = "llada", prompts: Sequence[list[int]] = toys.PROMPTS, **options: Any) -> Result:
    seeds = [100 * number for number in range(len(prompts))]
    return toys.sampler(kind, **{**DRAWS, **options}).generate(prompts, max_new_tokens=TOKENS, seed=seeds)


def test_one_row_is_the_sampler_without_particles() -> None:
    plain, one = made(), made(particles={"name": "smc", "count": 1})
    assert one.rows is None and torch.equal(plain.tokens, one.tokens) and torch.equal(plain.nfe, one.nfe)


def test_two_rows_of_smc_are_the_better_of_two() -> None:
    pair, best = made(particles={"name": "smc", "count": 2}), made(particles={"name": "best_of_n", "count": 2})
    assert pair.rows is not None and best.rows is not None
    assert torch.equal(pair.tokens, best.tokens)
    assert torch.equal(pair.rows[0].batch.tokens, best.rows[0].batch.tokens)
    assert all(meeting.ancestors is None and meeting.effective >= 1 for rows in pair.rows for meeting in rows.meetings)
    assert {rows.winner for rows in pair.rows} == {0, 1}


def test_the_first_row_is_the_answer_without_particles_if_all_rewards_are_equal() -> None:
    steered = made(particles={"name": "steering", "reward": even, "ess": 0.5})
    assert torch.equal(steered.tokens, made().tokens)


def test_a_constant_reward_keeps_the_law_of_every_row_though_it_is_copied() -> None:
    example, groups = SPINS, 1000
    steered = example.groups({"name": "steering", "reward": even}, 2, groups)
    assert steered.rows is not None
    for place in range(2):
        rows = steered.rows[0].batch.tokens.view(groups, 2, -1)[:, place]
        for number, answer in enumerate(example.shown):
            near(equals(rows, answer), example.law["base"][number])


def test_the_costs_of_a_prompt_are_those_of_all_its_rows() -> None:
    for particles in (SMC, {"name": "best_of_n", "count": 3}):
        result = made(particles=particles)
        assert result.rows is not None
        assert [int(rows.result.nfe.sum()) for rows in result.rows] == result.nfe.tolist()
        assert all(nfe > 0 for rows in result.rows for nfe in rows.record()["nfe"])
        assert (result.trace.nfe < result.nfe).all(), "a trace has the forwards of the answer's own history"
        assert ((result.trace.nfe - 1)[:, None] >= result.trace.generated).all()


def test_forwards_and_positions_are_counted_where_they_are_made() -> None:
    """Whatever rows are copied, each place counts its own."""
    counted: list[Tensor] = []

    class Counting:
        spec = toys.denoiser().spec

        def __call__(self, canvas: Canvas, query: Any, plan: Any) -> Any:
            hidden, spent = toys.denoiser()(canvas, query, plan)
            counted.append(torch.stack([spent.nfe, spent.computed]))
            return hidden, spent

        def head(self, hidden: Tensor) -> Tensor:
            return toys.denoiser().head(hidden)

    sampler = Sampler(
        Counting(), blocks={"name": "fixed", "length": 4}, stop="none", cache="dual", particles=SMC, **DRAWS
    )
    result = sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS)
    assert result.rows is not None
    assert any(meeting.ancestors for rows in result.rows for meeting in rows.meetings)
    nfe, computed = torch.stack(counted).sum(0)
    assert torch.equal(result.rows[0].batch.nfe, nfe)
    assert torch.equal(result.trace.rows, computed.view(-1, 3).sum(1))


# Copies.


@dataclass(frozen=True)
class CopiesOf(Particles):
    """Makes all rows copies of one row when they first meet."""

    meets: ClassVar[bool] = True
    count: int = 3
    every: int | None = 2
    row: int = 2

    def init(self, canvas: Canvas) -> Carry:
        return torch.zeros_like(canvas.start)

    def meet(self, meeting: Meeting, carry: Carry) -> Resampled:
        first = carry.view(-1, self.count)[:, :1] == 0
        ancestors = torch.where(first, self.row, -1).expand_as(meeting.log_p)
        return Resampled(meeting.log_p, ancestors, carry + 1)


def keys_of_the_row(self: Groups, state: Generation, firsts: Tensor) -> None:
    """In place of other seeds: those of the row that was copied."""
    layout = state.canvas.layout
    seeds = layout.seeds.view(-1, 3)[:, 2:].expand(-1, 3)
    state.canvas = state.canvas.with_layout(seeds=seeds.flatten())


SERVED = [("causal", one) for one in settings("cache") if one["name"] == "block_causal"]
CACHES = [("dream", one) for one in settings("cache") if one["name"] not in ("block_causal", "dkv_greedy", "d2f")]
CARRIED = ["klass", "slowfast", "ccd", "fixed", "credit", "wino", "rcr", "daedal", "rho_eos", "localleap", "freedave"]
RULES = [("gqa", one) for one in settings("scheduler") if one["name"] in CARRIED]


COMMON = {"block_causal", "d2", "dkv", "dllm", "dual", "elastic", "klass", "slowfast", "ccd", "credit", "daedal"}
COMMON |= {"freedave"}  # the others run with the slow tests


def names(case: tuple[str, dict[str, Any]]) -> set[str]:
    return {case[1]["name"]} & COMMON


@pytest.mark.parametrize("case", sampled([*SERVED, *CACHES], names))
def test_copies_have_all_that_a_cache_keeps(case: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    check_copies(monkeypatch, case[0], cache=case[1], scheduler="fixed")


@pytest.mark.parametrize("case", sampled(RULES, names))
def test_copies_have_all_that_a_rule_keeps(case: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    check_copies(monkeypatch, case[0], scheduler=case[1])


def check_copies(monkeypatch: pytest.MonkeyPatch, kind: str, **options: Any) -> None:
    """Copies that draw alike go on as the row would have without a meeting."""
    monkeypatch.setattr(Groups, "_rekey", keys_of_the_row)
    try:
        apart = made(kind, toys.PROMPTS[:3], particles={"name": "best_of_n", "count": 3}, **options)
    except UserError as refusal:
        pytest.skip(str(refusal))
    copied = made(kind, toys.PROMPTS[:3], particles=CopiesOf(), **options)
    assert apart.rows is not None and copied.rows is not None
    assert all(any(meeting.ancestors for meeting in rows.meetings) for rows in copied.rows)
    for before, after in zip(apart.rows, copied.rows, strict=True):
        wanted, found = before.result, after.result
        for row in range(3):
            assert torch.equal(wanted.tokens[2], found.tokens[row])
            assert torch.equal(wanted.trace.generated[2], found.trace.generated[row])
            torch.testing.assert_close(wanted.trace.logprob[2], found.trace.logprob[row])
            assert int(wanted.trace.nfe[2]) == int(found.trace.nfe[row])


def test_copies_draw_differently_from_then_on() -> None:
    copied = made(particles=CopiesOf(), scheduler="fixed", prompts=toys.PROMPTS[:3])
    assert copied.rows is not None
    for rows in copied.rows:
        assert len({tuple(row) for row in rows.result.tokens.tolist()}) == 3


def test_every_place_has_new_seeds_also_one_that_is_copied_to_itself() -> None:
    seeds = torch.tensor([5, -7])
    begin, again = row_seeds(seeds, 0, 4), row_seeds(seeds, 1, 4)
    assert len({*begin.flatten().tolist(), *again.flatten().tolist(), *seeds.tolist()}) == 18


def test_the_order_of_rows_changes_no_law() -> None:
    """Ancestors of rows in another order are the same rows, with the same frequencies."""
    rule, groups = SelfRewarding(count=3, ess=None), 4000
    canvas = toys.canvas(torch.ones(3 * groups, 2, dtype=torch.bool))
    canvas = canvas.with_layout(seeds=torch.arange(3 * groups) * 7919)
    all_here = torch.ones(groups, dtype=torch.bool)
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    for order in ([0, 1, 2], [2, 0, 1]):
        log_w = weights[order].log().expand(groups, -1)
        meeting = Meeting(canvas, log_w, torch.zeros(groups, 3, dtype=torch.bool), all_here, all_here, None)
        rows = torch.tensor(order)[rule.ancestors(meeting, log_w)]
        for place in range(3):
            for row in range(3):
                near(rows[:, place] == row, float(weights[row]))
        near((rows[:, 0] == 0) & (rows[:, 1] == 0), 0.25)


# Batches and lanes.


@few("particles", [SMC, {"name": "steering", "reward": toys.reward, "count": 3}, {"name": "best_of_n", "count": 3}])
@few("cache", ["elastic", "prefix", "none", "d2"], 2)
def test_a_group_of_a_batch_or_of_lanes_is_the_group_alone(particles: dict[str, Any], cache: str) -> None:
    prompts = [toys.PROMPTS[row] for row in (0, 1, 2, 3, 1, 4)]
    sampler = toys.sampler(particles=particles, cache=cache, **DRAWS)
    several = {"seed": list(range(6)), "max_new_tokens": TOKENS}
    batch = sampler.generate(prompts, **several)
    flown = Result.stack(sampler.generate_many(prompts, batch_size=7, **several))
    assert batch.rows is not None and flown.rows is not None
    for row in (1, 4):
        alone = sampler.generate([prompts[row]], seed=row, max_new_tokens=TOKENS)
        assert alone.rows is not None
        for found in (batch, flown):
            assert torch.equal(found.tokens[row], alone.tokens[0])
            assert torch.equal(found.step_map[row], alone.step_map[0])
            assert (int(found.nfe[row]), int(found.trace.rows[row])) == (int(alone.nfe), int(alone.trace.rows))
            assert found.rows is not None
            ours, theirs = found.rows[row].record(), alone.rows[0].record()
            torch.testing.assert_close(ours.pop("ratings"), theirs.pop("ratings"))
            assert ours == theirs
            assert torch.equal(found.rows[row].result.tokens, alone.rows[0].result.tokens)


@each("options", [{"stop": "prefix"}, {"blocks": "multi_block", "cache": "none"}])
def test_rows_wait_under_other_options(options: dict[str, Any]) -> None:
    sampler = toys.sampler(**{"particles": SMC, **DRAWS, **options})
    batch = sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS, seed=toys.SEEDS)
    flown = Result.stack(
        sampler.generate_many(toys.PROMPTS, batch_size=6, max_new_tokens=TOKENS, seed=toys.SEEDS, samples=1)
    )
    assert torch.equal(batch.tokens, flown.tokens) and torch.equal(batch.nfe, flown.nfe)
    assert batch.complete.all() and batch.rows is not None
    assert any(meeting.ancestors for rows in batch.rows for meeting in rows.meetings)


def test_samples_are_groups_of_their_own() -> None:
    sampler = toys.sampler("causal", particles=SMC, cache="exact", **DRAWS)
    result = sampler.generate(toys.PROMPTS[:2], max_new_tokens=TOKENS, samples=2, seed=[1, 2, 3, 4])
    flown = Result.stack(
        sampler.generate_many(toys.PROMPTS[:2], batch_size=6, max_new_tokens=TOKENS, samples=2, seed=[1, 2, 3, 4])
    )
    single = sampler.generate(toys.PROMPTS[1], max_new_tokens=TOKENS, seed=4)
    assert len(result.tokens) == 4 and torch.equal(result.tokens, flown.tokens)
    assert torch.equal(result.tokens[3], single.tokens[0])


def test_meetings_within_a_block_value_what_the_step_drew() -> None:
    seen: list[list[int]] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.extend(completion_ids)
        return toys.reward(completion_ids)

    steering = {"name": "steering", "reward": reward, "every": 1, "count": 2}
    result = made(particles=steering, blocks="full", scheduler="fixed", prompts=toys.PROMPTS[2:3])
    assert result.rows is not None and len(result.rows[0].meetings) == TOKENS
    assert all(len(ids) == TOKENS for ids in seen), "the masks of the block have tokens"
    seen.clear()
    several = made(particles={**steering, "fills": 3}, blocks="full", scheduler="fixed", prompts=toys.PROMPTS[2:3])
    assert several.rows is not None and len(seen) == 3 * 2 * TOKENS + 2
    assert len({tuple(ids) for ids in seen[:6]}) == 6
    seen.clear()
    made(particles={**steering, "every": None}, scheduler="fixed", prompts=toys.PROMPTS[2:3])
    assert {len(ids) for ids in seen} == {6, TOKENS}, "later blocks are left out"


# Choice.


def test_best_of_n_by_its_three_measures() -> None:
    exact: dict[str, Any] = {"judge": "best", "scheduler": "fixed"}
    for particles in ({"by": "confidence"}, {"by": "likelihood"}, {"by": "reward", "reward": toys.reward}):
        result = made(particles={"name": "best_of_n", **particles}, **exact)
        assert result.rows is not None
        for rows in result.rows:
            found = rows.result
            wanted = found.trace.logprob.sum(1).tolist()
            if particles["by"] == "likelihood":
                scorer = toys.sampler(**{**DRAWS, **exact})
                scored = scorer.score(found.token_rows()[0], found.trace.decoded.tolist())
                wanted = scored.log_p.tolist()
                assert (found.nfe == 2 * found.trace.nfe).all(), "scores are forwards"
            if particles["by"] == "reward":
                ids = [row[:length] for row, length in zip(found.tokens.tolist(), found.lengths.tolist(), strict=True)]
                wanted = toys.reward([row[: row.index(toys.EOS)] if toys.EOS in row else row for row in ids])
            torch.testing.assert_close(rows.ratings, wanted)
            assert rows.winner == max(range(4), key=lambda row: (wanted[row], -row))


def test_rows_at_their_end_are_answers_before_others() -> None:
    result = made(particles={"name": "best_of_n", "count": 3}, max_steps=6)
    assert result.rows is not None
    for row, rows in enumerate(result.rows):
        assert bool(result.complete[row]) == bool(rows.result.complete.any())
    late = made(particles=SMC, max_steps=2)
    assert set(late.finish_reason) == {"max_steps"} and not late.complete.any()


def test_a_row_that_is_not_finite_ends_its_group() -> None:
    class Poisoned:
        spec = toys.denoiser().spec

        def head(self, hidden: Tensor) -> Tensor:
            return toys.denoiser().head(hidden)

        def __call__(self, canvas: Canvas, query: Any, plan: Any) -> Any:
            hidden, spent = toys.denoiser()(canvas, query, plan)
            bad = (canvas.layout.seeds == row_seeds(torch.tensor([0]), 0, 3)[0, 1]) & (canvas.step == 1)
            return hidden.masked_fill(bad[plan.head_rows.row][:, None], torch.nan), spent

    sampler = Sampler(
        Poisoned(), blocks={"name": "fixed", "length": 6}, stop="none", cache="none", particles=SMC, **DRAWS
    )
    fine = toys.sampler(particles=SMC, cache="none", **DRAWS)
    seeds = {"seed": [0, 50], "max_new_tokens": TOKENS}
    with pytest.raises(NotFiniteError):
        sampler.generate(toys.PROMPTS[:2], **seeds)
    for batching in ("in_flight", "static"):
        first, second = sorted(
            sampler.generate_many(toys.PROMPTS[:2], batch_size=6, batching=batching, **seeds), key=lambda one: one.index
        )
        assert (first.finish_reason, second.complete) == ("not_finite", True)
        assert torch.equal(second.tokens, fine.generate(toys.PROMPTS[:2], **seeds).tokens[1])


# The command and the page.

PAGE = (Path(__file__).parents[2] / "docs" / "particles.md").read_text(encoding="utf-8")


def test_the_command_of_the_page_records_its_rows(tmp_path: Path) -> None:
    command = re.search(r"```bash\ndllm-sample (.+)\n```", PAGE)
    assert command is not None
    words, file = shlex.split(command[1].replace("/dev/stdout", str(tmp_path / "one.jsonl"))), tmp_path / "one.jsonl"
    assert main(words) == 0
    record = json.loads(file.read_text())
    rows, said = record["particles"], re.search(r"takes (\d+) forwards, and (\d+) without", PAGE)
    assert said is not None
    assert record["nfe"] == sum(rows["nfe"]) == int(said[1])
    assert rows["ratings"][rows["winner"]] == max(rows["ratings"]) and len(rows["ancestors"]) == 5
    assert main([word for word in words if not word.startswith("particles")]) == 0
    alone = json.loads(file.read_text())
    assert "particles" not in alone and alone["nfe"] == int(said[2])


def test_the_code_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"```python\n(.+?)```", PAGE, re.DOTALL)
    assert code is not None
    exec(code[1], {})
    answer, forwards, effective = capsys.readouterr().out.splitlines()
    assert answer.count(", ") >= 3 and "forwards" in forwards and len(json.loads(effective)) == 5


def test_stream_is_refused_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["particles=smc", "temperature=1", "stream=true", "sort: Dan, Ada"]) == 2
    assert "stream=true" in capsys.readouterr().err


def test_runs_of_an_evaluation_without_particles_keep_their_names() -> None:
    plain = job(["task=mini", "task.operation=sort"])
    assert "particles" not in plain.identity
    smc = job(["task=mini", "task.operation=sort", "particles=smc", "temperature=1"])
    assert smc.identity["particles"]["count"] == 4 and smc.name != plain.name


def test_an_evaluation_counts_the_forwards_of_all_rows(tmp_path: Path) -> None:
    words = ["task=mini", "task.operation=sort", "task.count=3", "max_new_tokens=8", "temperature=1", "block_length=4"]
    assert evaluate([*words, "particles=none,best_of_n", "oracle=false", f"output={tmp_path}"]) == 0
    found = {}
    for folder in tmp_path.iterdir():
        records = [json.loads(line) for part in folder.glob("*.jsonl") for line in part.read_text().splitlines()]
        about = json.loads((folder / "run.json").read_text())
        found[about["choices"]["particles"]] = sum(record["nfe"] for record in records)
    assert found["best_of_n"] > 2 * found["none"] > 0


# Refusals.

LIKELY = {"name": "best_of_n", "by": "likelihood"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"particles": "smc", "temperature": 0}, "candidates-identical: particles=smc"),
    ({"particles": "steering"}, "option-missing: particles.reward"),
    ({"particles": {"name": "best_of_n", "by": "reward"}}, "option-missing: particles.reward"),
    ({"particles": {"name": "best_of_n", "reward": even}}, "option-not-applicable: particles.reward"),
    ({"particles": {"name": "steering", "reward": even, "fills": 2}}, "option-not-applicable: particles.fills"),
    ({"particles": {"name": "steering", "reward": "nowhere:at_all"}}, "function-missing: particles.reward"),
    ({"particles": {"name": "smc", "count": 0}}, "option-range: particles.count"),
    ({"particles": {"name": "smc", "count": 10**9}}, "option-range: particles.count"),
    ({"particles": {"name": "smc", "ess": 2.0}}, "option-range: particles.ess"),
    (
        {"particles": {"name": "steering", "reward": even, "potential": "min"}},
        "choice-unknown: particles.potential=",
    ),
    ({"particles": "smc", "blocks": "sliding", "cache": "none"}, "particles-incompatible: blocks=sliding"),
    ({"particles": "smd"}, "choice-unknown: smd, smc"),
    ({"particles": LIKELY}, "score-inexact: particles=best_of_n, scheduler=threshold"),
    ({"particles": LIKELY, "judge": "best", "stop": "prefix"}, "score-inexact: stop=prefix"),
    ({"particles": LIKELY, "judge": "best", "stop_strings": "ab"}, "score-inexact: stop_strings"),
    ({"particles": LIKELY, "judge": "best", "prefix": [3]}, "score-inexact: given"),
    (
        {"particles": "smc", "scheduler": {"name": "apd", "verifier": toys.verifier()}, "kind": "dream"},
        "particles-incompatible: particles=smc, scheduler=apd",
    ),
]


@pytest.mark.parametrize(("options", "refusal"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_is_refused(options: dict[str, Any], refusal: str) -> None:
    given = {**DRAWS, **options}
    call = {name: given.pop(name) for name in ("stop_strings", "prefix") if name in given}
    with refused(refusal):
        toys.sampler(given.pop("kind", "llada"), **given).generate(toys.PROMPTS, max_new_tokens=TOKENS, **call)


def test_calls_that_know_one_row_refuse_several() -> None:
    sampler = toys.sampler(particles="smc", **DRAWS)
    with refused("option-not-applicable: particles=smc"):
        sampler.stream(toys.PROMPTS)
    with refused("score-inexact: particles=smc"):
        sampler.score(toys.PROMPTS[:1], [[1, 2]])
    with refused("option-range: batch_size=3, particles.count=4"):
        list(sampler.generate_many(toys.PROMPTS, batch_size=3, max_new_tokens=TOKENS))


def test_a_reward_that_fails_names_its_prompt() -> None:
    def fails(completion_ids: list[list[int]], prompt_ids: list[list[int]], **_: Any) -> list[float]:
        if toys.PROMPTS[1] in prompt_ids:
            raise ValueError("no")
        return [0.0] * len(completion_ids)

    for particles in ({"name": "best_of_n", "by": "reward"}, {"name": "steering"}):
        sampler = toys.sampler(particles={**particles, "reward": fails}, **DRAWS)
        with refused("function-failed: prompt 2"):
            sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS)
        with refused("function-failed: prompt 2"):
            list(sampler.generate_many(toys.PROMPTS, max_new_tokens=TOKENS))


def test_a_state_that_is_not_one_row_for_each_row_is_refused() -> None:
    @dataclass(frozen=True)
    class Keeps(Threshold):
        def init(self, canvas: Canvas) -> Carry:
            return object()

    sampler = toys.sampler(particles=SMC, temperature=1.0, scheduler=Keeps(0.4))
    with refused("particles-incompatible: particles=smc, carry"):
        sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS)


def test_samplers_without_particles_have_nothing_of_them() -> None:
    sampler = toys.sampler(**DRAWS)
    engine, reader = sampler.engine(sampler.plugins), Reader(sampler.runtime, ())
    canvas = sampler.runtime.canvas([Request(toys.PROMPTS[0], TOKENS)], 1, cuts=False)
    assert engine.begin(canvas).group is None
    assert watcher(reader, engine, []) is None
    assert sampler.generate(toys.PROMPTS, max_new_tokens=TOKENS).rows is None
