"""Answers of a form: against every string there is, and against models that want something else."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dllm_sampler import Sampler, UserError
from dllm_sampler.check.reads import no_host_reads
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.values import Query
from dllm_sampler.engine.readout import read
from dllm_sampler.guides.forms import automaton, choice
from dllm_sampler.guides.forms.tokens import token_bytes
from tests import toys
from tests.contract.cases import settings
from tests.forms import END, LENGTH, MASK, PATTERNS, VOCAB, chosen, laid_out, ruled, strings
from tests.refusals import refused
from tests.sampling import crossed, each, few


@pytest.fixture(autouse=True)
def cached(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLLM_SAMPLER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@few("pattern", PATTERNS)
def test_the_best_string(pattern: str) -> None:
    """Whatever stands already; some masks are not asked about, and count for nothing."""
    generator = torch.Generator().manual_seed(1)
    legal = strings(pattern)
    for witness in legal[:: max(1, len(legal) // 12)]:
        free = [bool(one) for one in torch.rand(LENGTH, generator=generator) < 0.7]
        if not any(free):
            continue
        asked = [at for at in range(LENGTH) if free[at] and (at % 3 or sum(free) == 1)] or [free.index(True)]
        canvas, logits = laid_out([free], [witness]), torch.randn(len(asked), VOCAB, generator=generator).double()
        query = Query.at(canvas, torch.tensor([asked]))
        found = chosen(pattern, logits, canvas, query)[0, 0].tolist()
        fitting = [one for one in legal if all(free[at] or one[at] == witness[at] for at in range(LENGTH))]
        best = max(fitting, key=lambda one: sum(float(logits[i, one[at]]) for i, at in enumerate(asked)))
        assert found == [best[at] for at in asked]


def test_several_hypotheses_and_rows_of_their_own_lengths() -> None:
    """A string for each candidate; a row that ends early asks nothing of what lies behind its end."""
    canvas = laid_out([[True] * LENGTH] * 2, [[0] * LENGTH] * 2)
    canvas = replace(
        canvas, end=torch.tensor([4, 3]), masked=canvas.masked & (torch.arange(5) < torch.tensor([[4], [3]]))
    )
    columns = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]])
    query = Query.at(canvas, columns)
    ids = torch.tensor([[[MASK] * 4, [3, MASK, MASK, MASK]], [[MASK] * 4, [0, MASK, MASK, MASK]]])
    query = replace(query, ids=ids)
    logits = torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(2)).double()
    found = chosen("(ab|c)*", logits, canvas, query)
    scores = logits.view(2, 2, 4, VOCAB)
    for row, size in enumerate((4, 3)):
        for candidate, first in enumerate((None, (3, 0)[row])):
            fitting = [
                one[:size]
                for one in strings("(ab|c)*")
                if (first is None or one[0] == first) and (size == 4 or one[3] == 4)  # an empty token behind it
            ]
            free = range(0 if first is None else 1, size)
            best = max(fitting, key=lambda one: sum(float(scores[row, candidate, at, one[at]]) for at in free))
            assert [int(found[row, candidate, at]) for at in free] == [best[at] for at in free]


@pytest.mark.slow
@pytest.mark.parametrize("asked", [[0, 1, 2, 3], [1, 2]])
def test_draws_have_the_law_of_the_model_given_the_form(asked: list[int]) -> None:
    """Positions that are not asked about are uniform."""
    pattern, rows = "a?b{2}c?", 6000
    logits = torch.randn(len(asked), VOCAB, generator=torch.Generator().manual_seed(3)).double()
    canvas = laid_out([[True] * LENGTH] * rows, [[0] * LENGTH] * rows)
    query = Query.at(canvas, torch.tensor([asked]).expand(rows, -1))
    found = chosen(pattern, logits.repeat(rows, 1), canvas, query, draws=True)[:, 0]
    law: Counter[tuple[int, ...]] = Counter()
    for one in strings(pattern):
        weight = sum(float(logits[i, one[at]]) for i, at in enumerate(asked))
        law[tuple(one[at] for at in asked)] += torch.tensor(weight).exp().item()  # type: ignore[assignment]
    total, counts = sum(law.values()), Counter(map(tuple, found.tolist()))
    assert set(counts) <= set(law)
    likely = [one for one in law if law[one] / total * rows >= 5]
    rest = rows - sum(counts[one] for one in likely)
    expected = [law[one] / total * rows for one in likely]
    seen = [counts[one] for one in likely]
    if rows - sum(expected) > 1:
        seen, expected = [*seen, rest], [*expected, rows - sum(expected)]
    distance = sum((one - other) ** 2 / other for one, other in zip(seen, expected, strict=True))
    freedom = torch.tensor((len(seen) - 1) / 2)
    assert torch.special.gammaincc(freedom, torch.tensor(distance / 2)) > 1e-3  # chi-square


@each("draws", [False, True])
def test_a_step_reads_nothing_and_takes_any_room(draws: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are worked on in stretches where their moves are many."""
    canvas = laid_out([[True] * LENGTH] * 50, [[0] * LENGTH] * 50)
    query = Query.at(canvas, torch.tensor([[0, 2, 3]]).expand(50, -1))
    logits = torch.randn(150, VOCAB, generator=torch.Generator().manual_seed(4)).double()
    at_once = chosen("a?b{2}c?", logits, canvas, query, draws)
    monkeypatch.setattr(choice, "ROOM", 1)
    rule, head_rows = ruled("a?b{2}c?", draws, posterior=True), HeadRows.every(query)
    with no_host_reads():
        found = read(logits.clone(), canvas, head_rows, rule)
    assert torch.equal(found.token, at_once)


@each("pattern", ["(a|b)c*|c", "a|b|c(a|b)*"])
def test_equal_logits(pattern: str) -> None:
    """The lower id wins, as without a form, whatever it leads to."""
    canvas = laid_out([[True] * LENGTH], [[0] * LENGTH])
    logits = torch.tensor([[0.0, 5, 0, 5, 0, 0, 0]] + 3 * [[0.0, 0, 0, 0, 0, 5, 0]]).bfloat16()
    assert chosen(pattern, logits, canvas, Query.window(canvas))[0, 0].tolist() == [1, END, END, END]


DRAWN = {"name": "temperature", "value": 1.0}


@pytest.mark.parametrize(
    ("scheduler", "guide", "posterior"),
    crossed(["threshold", "editing", "wino", "freedave"], {"greedy": None, "drawn": DRAWN}, [False, True], together=0),
)
def test_a_form_that_allows_everything_changes_no_bit(scheduler: str, guide: Any, posterior: bool) -> None:
    guides = [] if guide is None else [guide]
    plain = toys.sampler(scheduler=scheduler, guide=guides).generate(toys.PROMPTS, max_new_tokens=14)
    found = toys.sampler(scheduler=scheduler, guide=[{"name": "regex", "posterior": posterior}, *guides]).generate(
        toys.PROMPTS, max_new_tokens=14
    )
    for name in ("ids", "step_map", "logprob", "nfe", "rows"):
        assert torch.equal(getattr(found.trace, name), getattr(plain.trace, name)), name


NAMES = "(Ada|Ben|Cal|Dan)"


FIRST = {one["name"]: one for one in reversed(settings("scheduler"))}


@few("scheduler", sorted(FIRST, key=lambda name: name != "wino"))
def test_valid_against_the_models_will(scheduler: str) -> None:
    """The prompt has none of the names that the form demands."""
    settings: dict[str, Any] = {
        "apd": {"verifier": toys.verifier(vocab=177)},
        "learn2pd": {"length": 32},
        "svdd": {"inner": {"name": "fixed", "score": "random", "steps": 6}, "reward": "tests.toys:reward"},
    }.get(scheduler, {})
    blocks = {"name": "fixed", "length": settings.pop("length", 8)}
    pattern = f"{NAMES}(, {NAMES}){{3}}"
    options: dict[str, Any] = {"guide": {"name": "regex", "pattern": pattern}, "blocks": blocks, "device": "cpu"}
    try:
        sampler = Sampler.from_pretrained("mini", scheduler={"name": scheduler, **settings}, **options)
    except UserError as error:
        own = ("apd", "credit", "daedal", "discrete_ddim", "entropy_renoise", "lopa", "rho_eos")  # tokens or lengths
        if scheduler.startswith(("s2d2", "linear_spec")) and "causal" in str(error):
            return
        if scheduler in own and error.code in ("plugins-incompatible", "guide-incompatible"):
            return
        raise
    found = sampler.generate(["shuffle: Eve, Tom, Zoe, Amy", "copy: Max", "sort: Kim, Leo"], max_new_tokens=16)
    assert found.texts is not None and bool(found.complete.all())
    assert all(re.fullmatch(pattern, text) for text in found.texts), found.texts


def test_json() -> None:
    schema = {
        "type": "object",
        "properties": {
            "Ada": {"type": "integer"},
            "Ben": {"enum": ["red", "blue"]},
            "Cal": {"type": "object", "properties": {"Dan": {"type": "boolean"}}},
            "Eve": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
        },
        "required": ["Ada", "Ben"],
        "additionalProperties": False,
    }
    sampler = Sampler.from_pretrained(
        "mini", device="cpu", guide={"name": "json_schema", "schema": schema}, scheduler={"name": "fixed", "steps": 4}
    )
    found = sampler.generate(["copy: Max", "json: Leo, red"], max_new_tokens=32, block_length=32)
    assert found.texts is not None
    for text in found.texts:
        value = json.loads(text)
        assert isinstance(value["Ada"], int) and value["Ben"] in ("red", "blue")
        assert set(value) <= set(schema["properties"])  # type: ignore[arg-type]


def byte_level(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes, pieces of letters among them, and some words."""
    signs = bytes_to_unicode()
    pieces = ["".join(signs[byte] for byte in word.encode()) for word in words]
    vocab = {piece: at for at, piece in enumerate(dict.fromkeys([*signs.values(), *pieces]))}
    made = Tokenizer(BPE(vocab=vocab, merges=[]))
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", mask_token="<mask>")


def test_tokens_that_are_pieces_of_a_letter() -> None:
    tokenizer = byte_level(["é", "日本", " a"])
    tokens = token_bytes(tokenizer)
    assert {"é".encode(), "日本".encode(), b" a", b"\xc3", b"\xa9"} <= set(tokens)
    mask, end = int(str(tokenizer.mask_token_id)), int(str(tokenizer.eos_token_id))
    assert tokens[mask] == tokens[end] == b""
    found = automaton.build_all(["[éà]{2}"], tokens, len(tokens), (end,), mask)[0]
    at = tokens.index
    assert found.accepted([at("é".encode()), at(b"\xc3"), at(b"\xa0")])
    assert not found.accepted([at("é".encode()), at(b"\xc3")]) and not found.accepted([at(b"\xa9"), at(b"\xc3")])
    assert found.shortest == 2


def test_ids_with_gaps() -> None:
    made = Tokenizer(WordLevel({"a": 0, "b": 1, "ab": 7, "c": 9, "<end>": 2, "<mask>": 3}, unk_token="a"))
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", mask_token="<mask>")
    assert token_bytes(tokenizer) == [b"a", b"b", b"", b"", b"", b"", b"", b"ab", b"", b"c"]


def test_tokenizers_that_join_otherwise_are_refused() -> None:
    made = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with refused("tokenizer-unsupported"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=made))
    made.decoder = decoders.Metaspace()
    with refused("tokenizer-unsupported"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=made))
