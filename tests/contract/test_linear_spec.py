"""Linear self-speculation: a model with a causal context verifies what it drafted, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dllm_sampler import Result, Sampler
from dllm_sampler.blocks.fixed import FixedBlocks
from dllm_sampler.check.promises import check_row
from dllm_sampler.core.values import FREE
from dllm_sampler.inputs.prompts import Infill
from dllm_sampler.models import loading
from dllm_sampler.models.denoiser import TransformerDenoiser
from tests import toys
from tests.contract.test_block_causal import PROMPTS, assert_same
from tests.refusals import refused
from tests.sampling import crossed
from tests.tiny import DATA

TOKENS = 10


def generate(prompts: list[list[int]] = PROMPTS, **plugins: Any) -> Result:
    sampler = toys.sampler("context", **{"scheduler": "linear_spec", **plugins})
    return sampler.generate(prompts, max_new_tokens=TOKENS, seed=list(range(len(prompts))))


def many(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, 14, (count,), generator=generator).tolist()
    return [torch.randint(toys.EOT, (size,), generator=generator).tolist() for size in sizes]


def logits(ids: list[int], sees: torch.Tensor) -> torch.Tensor:
    model = toys.denoiser("context")
    assert isinstance(model, TransformerDenoiser)
    with torch.no_grad():
        found = model.transformer(torch.tensor([ids]), keys=sees[None])[0]
    found[:, toys.MASK] = -torch.inf
    return found


def below(size: int) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


def read(prompt: list[int]) -> list[int]:
    """Plain greedy decoding of the causal model, by the plain network."""
    ids = list(prompt)
    for _ in range(TOKENS):
        ids.append(int(logits(ids, below(len(ids)))[-1].argmax()))
    return ids[len(prompt) :]


def by_hand(prompt: list[int], block: int, threshold: float) -> tuple[list[int], list[int]]:
    """The loop by the plain network: the answer, and the forward that committed each token."""
    ids, known, step_map, step = [*prompt, *[toys.MASK] * TOKENS], len(prompt), [], 0
    start = known
    while known < len(ids):
        stop = min(start + block, len(ids))
        draft, left = list(ids), set(range(known, stop - 1))
        while left:
            sees = below(len(ids))[: stop - 1, : stop - 1]
            sees[start : stop - 1, start : stop - 1] = True
            rows = logits(draft[: stop - 1], sees).softmax(-1)
            rows = {at: rows[at - 1 if at == start else at] for at in left}
            sure = {at: float(row.max()) for at, row in rows.items()}
            for at in [at for at in left if sure[at] >= threshold] or [max(sorted(left), key=sure.__getitem__)]:
                draft[at] = int(rows[at].argmax())
                left.remove(at)
            step += 1
        said = logits(draft, below(len(ids))).argmax(-1).tolist()
        for at in range(known, stop):
            ids[at], known = said[at - 1], at + 1
            step_map.append(step)
            if ids[at] != draft[at]:
                break
        step += 1
        start = known - (block > 1)
    return ids[len(prompt) :], step_map


@pytest.mark.parametrize(
    ("plugins", "shape"),
    crossed([{"cache": "none"}, {}], [(6, 0.0), (5, 0.3), (1, 0.0)]),
)
def test_against_the_network_driven_by_hand(plugins: dict[str, Any], shape: tuple[int, float]) -> None:
    block, threshold = shape
    rule = {"name": "linear_spec", "threshold": threshold}
    result = generate(scheduler=rule, blocks={"name": "fixed", "length": block}, **plugins)
    for row, prompt in enumerate(PROMPTS):
        tokens, step_map = by_hand(prompt, block, threshold)
        assert result.trace.decoded[row].tolist() == tokens
        assert result.trace.generated[row].tolist() == step_map


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_it_is_greedy_autoregressive_decoding(count: int) -> None:
    prompts = many(count)
    alone = [read(prompt) for prompt in prompts]
    for length in (1, 4, TOKENS):
        found = generate(prompts, blocks={"name": "fixed", "length": length})
        assert found.trace.decoded.tolist() == alone
        if length == 1:  # a forward computes one column, the first one the prompt's
            assert (found.nfe == TOKENS).all()
            assert found.trace.rows.tolist() == [len(prompt) + TOKENS - 1 for prompt in prompts]
        elif length == 4:
            assert int(found.nfe.min()) < int(found.nfe.max()), "no draft stands"
    other = generate(prompts, scheduler="threshold", blocks={"name": "fixed", "length": 1})
    assert other.trace.decoded.tolist() == alone and (other.nfe == TOKENS).all()
    assert generate(prompts, scheduler="threshold").tokens.tolist() != alone


def test_a_trained_model_answers_in_fewer_forwards() -> None:
    """In float64; the conformance traces have the published loop's forwards."""
    loaded = loading.load(DATA / "tiny-nemotron-labs-diffusion", device="cpu", dtype="float64")
    prompts = [[at, at + 1] for at in range(101, 141)]
    alone, found = (
        Sampler(loaded.denoiser, scheduler="linear_spec", blocks=FixedBlocks(length), stop="none").generate(
            prompts, max_new_tokens=40
        )
        for length in (1, 9)
    )
    assert torch.equal(found.tokens, alone.tokens) and (alone.nfe == 40).all()
    assert float(found.nfe.double().mean()) < 30


def test_the_cache_is_exact_and_keeps_what_was_verified() -> None:
    plain, cached = (generate(cache=cache) for cache in ("none", "exact"))
    assert_same(plain, cached)
    # Five columns in each forward, the prompt's in the first one, and its last one again in the second.
    most = [len(prompt) + 5 * int(nfe) + 1 for prompt, nfe in zip(PROMPTS, cached.nfe, strict=True)]
    assert all(rows <= limit for rows, limit in zip(cached.trace.rows.tolist(), most, strict=True))


def test_a_row_of_a_batch_is_the_row_alone() -> None:
    options: dict[str, Any] = {"temperature": 0.8, "scheduler": {"name": "linear_spec", "threshold": 0.3}}
    batch = generate(**options)
    assert batch.tokens.tolist() != generate().tokens.tolist()
    for row in (1, len(PROMPTS) - 1):
        sampler = toys.sampler("context", **options)
        check_row(batch, row, sampler.generate([PROMPTS[row]], max_new_tokens=TOKENS, seed=row))
    many = {"max_new_tokens": TOKENS, "seed": 0, "order": "given"}
    flown = toys.sampler("context", **options).generate_many(PROMPTS, batch_size=2, **many)
    assert [answer.tokens.tolist() for answer in flown] == batch.tokens.tolist()
    several = list(toys.sampler("context", **options).generate_many(PROMPTS[:2], batch_size=4, samples=2, **many))
    assert several[0].tokens.tolist() == batch.tokens[0].tolist(), "a prompt that is computed once for two answers"


@pytest.mark.slow
def test_drawn_answers_have_the_law_of_the_causal_model() -> None:
    """The first two tokens, enumerated."""
    prompt, count = [3, 1], 3000
    sampler = toys.sampler("context", scheduler="linear_spec", temperature=0.7)
    found = sampler.generate([prompt] * count, max_new_tokens=3, seed=list(range(count))).trace.decoded[:, :2]
    first = (logits(prompt, below(2))[-1] / 0.7).softmax(-1)
    both = torch.stack([(logits([*prompt, token], below(3))[-1] / 0.7).softmax(-1) for token in range(toys.VOCAB)])
    law = (first[:, None] * both).flatten()
    seen = torch.bincount(found[:, 0] * toys.VOCAB + found[:, 1], minlength=len(law)) / count
    assert float((seen - law).abs().sum()) / 2 < 1.3 * float((law * (1 - law) / count).sqrt().sum()) / 2


def test_a_given_beginning() -> None:
    sampler = toys.sampler("context", scheduler="linear_spec")
    alone = read([1, 2, 3])
    found = sampler.generate([Infill([1, 2, 3, *alone[:2], *[FREE] * (TOKENS - 2)])])
    assert found.trace.decoded[0].tolist()[-TOKENS:] == alone


@pytest.mark.parametrize(
    ("kind", "plugins", "reason"),
    [
        ("llada", {}, "scheduler-incompatible: scheduler=linear_spec"),
        ("causal", {}, "scheduler-incompatible: scheduler=linear_spec, scheduler=s2d2"),
        ("context", {"blocks": "adablock"}, "scheduler-incompatible: blocks=adablock, blocks=fixed"),
        ("context", {"stop": "truncate"}, "plugins-incompatible: scheduler=linear_spec, stop=truncate"),
        ("context", {"scheduler": {"name": "freedave", "inner": "linear_spec"}}, "scheduler-incompatible: linear_spec"),
    ],
)
def test_what_is_refused(kind: str, plugins: dict[str, Any], reason: str) -> None:
    with refused(reason):
        toys.sampler(kind, **{"scheduler": "linear_spec", **plugins})
