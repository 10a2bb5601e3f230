"""Block-causal models: blocks on an absolute grid, and a cache that changes nothing but the rows computed."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sampler import Result, Sampler, UserError, config
from dllm_sampler.check.promises import check_row
from dllm_sampler.core.visibility import block_causal
from dllm_sampler.models.denoiser import TransformerDenoiser
from tests import toys
from tests.contract import cases
from tests.refusals import check_refusal, refused
from tests.sampling import sampled

TOKENS, BLOCK = 10, 6
# shorter than a block, on its border, past it; ending one before and one after a border
PROMPTS = [[5, 11, 3], [7, 1, 30, 22, 9, 14], [16], [4, 4, 28, 13, 33, 2, 8, 1, 19, 20, 3, 6, 25], [12, 6, 2, 9, 30]]
GREEDY = {"name": "dynamic", "threshold": 0.6}


def sampler(**plugins: Any) -> Sampler:
    return toys.sampler("causal", **{"scheduler": GREEDY, **plugins})


def generate(cache: Any, tokens: int = TOKENS, prompts: list[list[int]] = PROMPTS, **plugins: Any) -> Result:
    seeds = list(range(len(prompts)))
    return sampler(cache=cache, **plugins).generate(prompts, max_new_tokens=tokens, seed=seeds)


def assert_same(one: Result, other: Result) -> None:
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.trace.generated, other.trace.generated)
    assert torch.equal(one.nfe, other.nfe)
    torch.testing.assert_close(one.trace.logprob, other.trace.logprob, atol=1e-6, rtol=1e-6)


def by_hand(prompt: list[int], tokens: int, threshold: float) -> tuple[list[int], list[int]]:
    """The rule of SDAR at one token a step, with the plain network and its mask written out."""
    model = toys.denoiser("causal")
    assert isinstance(model, TransformerDenoiser)
    ids, step_map, step = [*prompt, *[toys.MASK] * tokens], [-1] * tokens, 0
    block_of = torch.tensor([i // BLOCK for i in range(len(ids))])
    sees = block_of[None, :] <= block_of[:, None]
    while -1 in step_map:
        with torch.no_grad():
            logits = model.transformer(torch.tensor([ids]), keys=sees[None])[0]
        logits[:, toys.MASK] = -torch.inf
        sure, token = logits.softmax(-1).max(-1)
        active = (len(prompt) + step_map.index(-1)) // BLOCK
        left = [i for i in range(len(prompt), len(ids)) if i // BLOCK == active and step_map[i - len(prompt)] < 0]
        chosen = [i for i in left if sure[i] > threshold] or [max(left, key=lambda i: float(sure[i]))]
        for i in chosen:
            ids[i], step_map[i - len(prompt)] = int(token[i]), step
        step += 1
    return ids[len(prompt) :], step_map


@pytest.mark.parametrize("cache", ["none", "block_causal"])
def test_against_the_network_driven_by_hand(cache: str) -> None:
    result = generate(cache)
    counts = set()
    for row, prompt in enumerate(PROMPTS):
        tokens, step_map = by_hand(prompt, TOKENS, 0.6)
        assert result.trace.decoded[row].tolist() == tokens
        assert result.trace.generated[row].tolist() == step_map
        counts |= {step_map.count(step) for step in step_map}
    assert len(counts) > 1, "the threshold did nothing"


def test_the_mask_is_what_the_notes_of_every_family_say() -> None:
    at = torch.arange(5)[None]
    seen = block_causal(at, at, 2)[0].int().tolist()
    assert seen == [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


LOOK_BEHIND = {"prophet", "end_of_text"}  # stops that look at masks behind the block, which a cache does not predict


def legal(scheduler: cases.Settings, stop: str) -> bool:
    return cases.legal(kind="causal", scheduler=scheduler, cache="block_causal", stop=stop)


PAIRS = [pair for pair in product(cases.settings("scheduler"), config.names("stop")) if pair[1] not in LOOK_BEHIND]


@pytest.mark.parametrize(
    "pair",
    sampled(
        PAIRS, lambda pair: (*cases.kinds(pair[0]), pair[1]), name=lambda pair: f"{cases.label(pair[0])}-{pair[1]}"
    ),
)
def test_the_cache_is_exact(pair: tuple[cases.Settings, str]) -> None:
    scheduler, stop = pair
    if not cases.legal(kind="causal", scheduler=scheduler, cache="block_causal"):
        with pytest.raises(UserError) as error:
            sampler(scheduler=scheduler, cache="block_causal")
        assert error.value.code.endswith("-incompatible")
        return
    if not legal(scheduler, stop):
        return  # drafting with a stop that cuts, say: test_product has the sentences
    temperature = 0.8 if cases.settings("scheduler").index(scheduler) % 2 else None
    plain, cached = (
        generate(cache, scheduler=scheduler, stop=stop, temperature=temperature) for cache in ("none", "block_causal")
    )
    assert_same(plain, cached)
    # Where a scheduler hides what lies behind, a row's only forward has nothing to leave out.
    assert ((cached.trace.rows < plain.trace.rows) | (plain.nfe == 1)).all()


@pytest.mark.parametrize("scheduler", cases.one_of_each_kind())
def test_passes_that_only_store_change_no_token(scheduler: dict[str, Any]) -> None:
    separate = {"name": "block_causal", "store_pass": "separate"}
    if not cases.legal(kind="causal", scheduler=scheduler, cache=separate):
        return
    if scheduler["name"] == "entropy_renoise":
        return  # its temperature falls by the forward
    ride, apart = generate("block_causal", scheduler=scheduler), generate(separate, scheduler=scheduler)
    assert torch.equal(ride.tokens, apart.tokens)
    for row, prompt in enumerate(PROMPTS):
        blocks = -(-(len(prompt) + TOKENS) // BLOCK) - len(prompt) // BLOCK
        extra = blocks + (len(prompt) >= BLOCK)
        assert int(apart.nfe[row]) == int(ride.nfe[row]) + extra
        assert [s for s in apart.trace.steps(row) if s] == [s for s in ride.trace.steps(row) if s]


@pytest.mark.slow
@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    cache=st.sampled_from([one for one in cases.settings("cache") if one["name"] in ("none", "block_causal")]),
    scheduler=st.sampled_from(cases.settings("scheduler")),
    stop=st.sampled_from(["none", "prefix", "block", "truncate"]),
    length=st.integers(1, 9),
    tokens=st.integers(1, 14),
    prompts=st.lists(st.lists(st.integers(0, toys.EOT), min_size=1, max_size=13), min_size=2, max_size=4),
)
def test_a_row_in_a_batch_is_the_row_alone(cache, scheduler, stop, length, tokens, prompts) -> None:
    plugins = {"scheduler": scheduler, "stop": stop, "blocks": {"name": "fixed", "length": length}}
    if not cases.legal(kind="causal", cache=cache, **plugins):
        return
    made = sampler(cache=cache, temperature=0.7, **plugins)
    seeds = [3 * row for row in range(len(prompts))]
    batch = made.generate(prompts, max_new_tokens=tokens, seed=seeds)
    for row, prompt in enumerate(prompts):
        check_row(batch, row, made.generate([prompt], max_new_tokens=tokens, seed=[seeds[row]]))


def test_rows_computed() -> None:
    """The first forward computes the prompt and the first block, the first one of each block the finished one too."""
    spy, total = toys.Spy(toys.denoiser("causal")), 0
    made = Sampler(spy, scheduler="fixed", blocks={"name": "fixed", "length": BLOCK}, stop="none", cache="block_causal")
    made.generate(PROMPTS, max_new_tokens=TOKENS)
    for row, prompt in enumerate(PROMPTS):
        wanted, clean, end = [], 0, len(prompt) + TOKENS
        for column in range(len(prompt), end):  # one position a step
            low, stop = column // BLOCK * BLOCK, min((column // BLOCK + 1) * BLOCK, end)
            wanted.append(stop - min(clean, low))
            clean = low
        assert [step[row] for step in spy.computed] == wanted
        assert [len(toys.columns(plan)[row]) for _, _, plan in spy.calls] == wanted
        total += sum(wanted)
    assert sum(len(plan.pack.row) for _, _, plan in spy.calls if plan.pack is not None) == total


def test_what_stands_behind_the_block_does_not_matter() -> None:
    short, long = (generate("block_causal", tokens=tokens, prompts=[PROMPTS[3]]) for tokens in (11, 35))
    # The prompt has 13 tokens: both canvases end on the grid.
    assert torch.equal(short.tokens[0], long.tokens[0, :11])


def test_the_shadows_of_a_block_causal_model_see_no_further() -> None:
    wino = {"name": "wino", "threshold": 0.3, "back": 0.9, "least": 2}
    short, long = (generate("none", tokens=tokens, prompts=[PROMPTS[3]], scheduler=wino) for tokens in (11, 35))
    assert torch.equal(short.tokens[0], long.tokens[0, :11])
    assert int(short.nfe) > int(generate("none", 11, [PROMPTS[3]], scheduler=wino | {"back": 0.0}).nfe)


@pytest.mark.parametrize("change", [{"edit": 0.3}, {"remask": "low_prob", "remask_limit": 2}])
def test_editing_stays_inside_the_block(change: dict[str, Any]) -> None:
    """The keys of a block that is left early, by `extra`, are those of its final tokens too."""
    editing = {"name": "editing", "threshold": 0.5, "extra": 3}
    plain, cached = (generate(cache, scheduler=editing | change) for cache in ("none", "block_causal"))
    assert_same(plain, cached)
    frozen = generate("block_causal", scheduler=editing | {"edit": 1.0})
    assert not torch.equal(frozen.tokens, cached.tokens), "nothing was edited"


@pytest.mark.parametrize("length", [None, 8])
def test_the_models_own_block_length(length: int | None) -> None:
    model = toys.denoiser("causal")
    assert isinstance(model, TransformerDenoiser)
    own = Sampler(replace(model, block_length=4), blocks={"name": "fixed", "length": length})
    assert own.plugins.blocks.grid == (length or 4)
    assert Sampler(model).plugins.blocks.grid == 32
    assert Sampler(toys.denoiser()).plugins.blocks.grid is None


@pytest.mark.parametrize(
    "cache", [name for name in config.names("cache") if name not in ("none", "exact", "block_causal", "sub_block")]
)
def test_other_caches_are_refused(cache: str) -> None:
    with refused("cache-incompatible"):
        sampler(cache=cache)


@pytest.mark.parametrize("blocks", [name for name in config.names("blocks") if name != "fixed"])
def test_other_blocks_are_refused(blocks: str) -> None:
    with pytest.raises(UserError) as error:
        sampler(blocks=blocks)
    assert error.value.code in ("blocks-incompatible", "plugins-incompatible")
    check_refusal(error.value, f"{error.value.code}: blocks={blocks}, blocks=fixed")


def test_the_cache_is_refused_where_it_would_not_be_exact() -> None:
    with refused("cache-incompatible: cache=block_causal, cache=dual"):
        toys.sampler("llada", cache="block_causal")
    with refused("choice-unknown: cache.store_pass=, ride, separate"):
        sampler(cache={"name": "block_causal", "store_pass": "no"})
