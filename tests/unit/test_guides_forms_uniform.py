"""Forms of answers on models without a mask token: against every string there is, and on tiny checkpoints."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dllm_sampler import Canvas, Sampler
from dllm_sampler.check.promises import check_row
from dllm_sampler.check.reads import watched_steps
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.values import Query, Readout
from dllm_sampler.engine.readout import Rule, read
from dllm_sampler.guides import Regex, Temperature
from dllm_sampler.guides.forms import automaton
from dllm_sampler.guides.forms.edges import joined
from tests import toys
from tests.conformance.builder import Checkpoints
from tests.forms import END, LENGTH, TOKENS, VOCAB, laid_out, strings
from tests.refusals import refused
from tests.sampling import each, few
from tests.unit.test_schedulers_uniform import Uniform

EVERY = range(VOCAB)  # no token is a mask
BLOCK = (1, 4)  # the first position is of a finished block


def rule(pattern: str, redraws: bool, draws: bool = False, posterior: bool = False) -> Rule:
    guide = Regex(pattern, posterior=posterior)
    made = automaton.build_all([pattern], TOKENS, VOCAB, (END,), None)[0]
    vars(guide).update(edges=joined((made,)), redraws=redraws)
    spec = replace(toys.denoiser().spec, vocab_size=VOCAB, mask_id=None, eos_id=END)
    return Rule(spec, (*[Temperature(1.0)] * draws, guide), frozenset())


def opened(accepted: Sequence[bool], tokens: Sequence[int], rows: int = 1) -> Canvas:
    """Canvases whose block has `accepted` positions, and random tokens elsewhere in the block."""
    free = [BLOCK[0] <= at < BLOCK[1] and not accepted[at] for at in range(LENGTH)]
    canvas = laid_out([free] * rows, [list(tokens)] * rows)
    start, stop = (torch.full_like(canvas.start, at) for at in BLOCK)
    return replace(canvas, start=start, stop=stop, ids=canvas.ids.where(~canvas.masked, 2))


def seen(canvas: Canvas, logits: Tensor, how: Rule) -> Readout:
    """Statistics of a query about the whole block, from the same logits `[Q, V]` for every row."""
    query = Query.at(canvas, torch.arange(*BLOCK).expand(len(canvas.ids), -1))
    return read(logits.repeat(len(canvas.ids), 1), canvas, HeadRows.every(query), how)


def possible(pattern: str, witness: Sequence[int], accepted: Sequence[bool], redraws: bool) -> list[tuple[int, ...]]:
    """All strings of the form that a step may choose."""
    stays = [not BLOCK[0] <= at < BLOCK[1] or (accepted[at] and not redraws) for at in range(LENGTH)]
    return [one for one in strings(pattern, EVERY) if all(one[at] == witness[at] for at in range(LENGTH) if stays[at])]


@each("redraws", [True, False])
@each("pattern", ["(ab|c)*", "a?b{2}c?", "abab|cc"])
def test_the_best_string(pattern: str, redraws: bool) -> None:
    """A scheduler that draws the block again in each step is bound by finished blocks alone."""
    generator, legal = torch.Generator().manual_seed(3), strings(pattern, EVERY)
    for witness in legal[:: max(1, len(legal) // 10)]:
        accepted = (torch.rand(LENGTH, generator=generator) < 0.5).tolist()
        logits = torch.randn(BLOCK[1] - BLOCK[0], VOCAB, generator=generator).double()
        found = seen(opened(accepted, witness), logits, rule(pattern, redraws)).token[0, 0].tolist()
        fitting = possible(pattern, witness, accepted, redraws)
        place = range(*BLOCK)
        if not redraws:  # a committed position keeps its token: its logits do not count
            place = [at for at in place if not accepted[at]]
        best = max(fitting, key=lambda one: sum(float(logits[at - BLOCK[0], one[at]]) for at in place))
        chosen = [found[at - BLOCK[0]] for at in place]
        assert chosen == [best[at] for at in place]


@few("redraws", [True, False])
def test_the_law_of_a_draw_is_exact(redraws: bool) -> None:
    """Frequencies of whole strings in 8,000 draws, and the posterior, against every string there is."""
    pattern, witness, accepted, rows = "(ab|c){1,2}", (0, 1, 4, 4), [False, True, False, False], 8_000
    assert witness in strings(pattern, EVERY)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5)).double()
    law: dict[tuple[int, ...], float] = {}
    for one in possible(pattern, witness, accepted, redraws):
        places = [at for at in range(*BLOCK) if redraws or not accepted[at]]
        logs = torch.stack([logits[at - BLOCK[0]].log_softmax(0)[one[at]] for at in places])
        law[one[BLOCK[0] :]] = law.get(one[BLOCK[0] :], 0.0) + float(logs.sum().exp())
    whole = sum(law.values())
    canvas = opened(accepted, witness, rows)
    drawn = Counter(map(tuple, seen(canvas, logits, rule(pattern, redraws, draws=True)).token[:, 0].tolist()))
    assert drawn.keys() <= law.keys() and len(law) > 5
    distance = sum(abs(drawn[one] / rows - law[one] / whole) for one in law) / 2
    assert distance < 2 * (len(law) / (2 * torch.pi * rows)) ** 0.5  # twice what chance alone makes, at most

    how = rule(pattern, redraws, posterior=True)._replace(needs=frozenset({"logits"}))
    found = seen(opened(accepted, witness), logits, how).logits
    assert found is not None
    for at in range(*BLOCK):
        if not redraws and accepted[at]:
            continue
        wanted = torch.zeros(VOCAB).double()
        for one, weight in law.items():
            wanted[one[at - BLOCK[0]]] += weight / whole
        torch.testing.assert_close(found[0, 0, at - BLOCK[0]].softmax(0), wanted, rtol=0, atol=1e-9)


# Tiny DiffusionGemma, whose 288 tokens are called after bytes here

NAME = "tiny-diffusion-gemma"
PROMPTS = [[284, 103, 22, 280, 12], [284, 101, 22, 32, 271, 44, 28, 49, 280, 46, 33], [284]]
RENOISE = {"name": "entropy_renoise", "max_denoising_steps": 6, "entropy_bound": 2.0, "confidence_threshold": 1.0}
SCHEDULERS: list[dict[str, Any]] = [RENOISE, {"name": "block_refine", "steps": 5}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GUIDES: list[dict[str, Any]] = [
    {"name": "regex", "pattern": "[a-c]{3,20}(xy|yx)?"},
    {"name": "choices", "choices": ["Ada", "Bennington the first of his name"]},
    {"name": "json_schema", "schema": SCHEMA},
    {"name": "json_schema", "schema": SCHEMA, "posterior": True},
    {"name": "grammar", "grammar": "json", "depth": 2},
]


@cache
def checkpoint() -> Any:
    return Checkpoints(Path(__file__).parents[1] / "conformance/data").load(NAME)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    signs, special = bytes_to_unicode(), [f"<{token}>" for token in range(256, 288)]
    made = Tokenizer(BPE({signs[byte]: byte for byte in range(256)}, []))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<285>")


def sampler(scheduler: Any, **plugins: Any) -> Sampler:
    return Sampler(checkpoint(), tokenizer=tokenizer(), scheduler=scheduler, **{"stop": "none", **plugins})


@few("temperature", [None, 0.0, 1.0])
@each("scheduler", SCHEDULERS)
@few("guide", GUIDES)
def test_every_answer_has_its_form(guide: dict[str, Any], scheduler: dict[str, Any], temperature: float | None) -> None:
    """Over two blocks of 16."""
    found = sampler(scheduler, guide=guide, temperature=temperature).generate(PROMPTS, max_new_tokens=32, seed=3)
    assert found.valid is not None and found.valid.all() and found.complete.all()


@few("posterior", [True, False])
@few("temperature", [1.0, None])
@few("scheduler", SCHEDULERS)
def test_a_row_in_a_batch_and_in_flight_is_the_row_alone(
    scheduler: dict[str, Any], temperature: float | None, posterior: bool
) -> None:
    """On a toy in float64, with no read of the device in a step."""
    guide = {"name": "regex", "pattern": "[a-d]{2,9}(fg|gf)?", "posterior": posterior}
    model = Uniform(toys.denoiser(), [])
    plugins: dict[str, Any] = {"blocks": {"name": "fixed", "length": 6}, "stop": "none", "guide": guide}
    made = Sampler(model, tokenizer=toys.tokenizer(), scheduler=scheduler, temperature=temperature, **plugins)
    with watched_steps() as steps:
        made.generate(toys.PROMPTS[:2], max_new_tokens=15, max_steps=4)
    batch = made.generate(toys.PROMPTS, max_new_tokens=15, seed=toys.SEEDS)
    assert len(steps) == 4 and batch.valid is not None and batch.valid.all()
    check_row(batch, 3, made.generate([toys.PROMPTS[3]], max_new_tokens=15, seed=toys.SEEDS[3]))
    answers = list(made.generate_many(toys.PROMPTS[:3], batch_size=2, max_new_tokens=15, seed=toys.SEEDS[:3]))
    assert [answer.tokens.tolist() for answer in answers] == [
        batch.tokens[row, : len(answer.tokens)].tolist() for row, answer in enumerate(answers)
    ]


def test_what_is_refused() -> None:
    with refused("mask-token-missing: guide=grammar, guide.grammar.depth"):
        sampler(RENOISE, guide={"name": "grammar", "grammar": "json"})
    with refused("plugins-incompatible: scheduler=entropy_renoise, guide=grammar"):
        toys.sampler("llada", scheduler="entropy_renoise", guide={"name": "grammar", "grammar": "json"})
