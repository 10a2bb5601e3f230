"""APD: its invariants, an example by hand, the verifier, its window, and left to right as its baseline."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutput

from dllm_sampler import Query, Result, Sampler
from dllm_sampler.blocks.fixed import FixedBlocks, FullBlock
from dllm_sampler.cache.trailing import TrailingCache
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.engine import readout
from dllm_sampler.models import autoregressive
from dllm_sampler.models.autoregressive import Reading
from dllm_sampler.models.mixture import mixture
from dllm_sampler.schedulers.apd import ParallelDecoding
from dllm_sampler.schedulers.leftright import LeftToRight
from tests import scripted, toys
from tests.refusals import refused
from tests.sampling import each, few

TOKENS = 13
LOOK = {"max_lookahead": None, "verifier": toys.verifier()}


def run(scheduler: Any, rows: Any = None, kind: str = "dream", seed: Any = None, **plugins: Any) -> Result:
    sampler = toys.sampler(kind, **{"scheduler": scheduler, "blocks": FullBlock(), **plugins})
    return sampler.generate(rows or toys.PROMPTS, max_new_tokens=TOKENS, seed=seed or toys.SEEDS)


class Expects(PreTrainedModel):
    """A causal LM whose logits are a function of the tokens and their positions."""

    config_class = PreTrainedConfig

    def __init__(self, says: Callable[[Tensor, Tensor], Tensor], vocab: int = 8):
        super().__init__(PreTrainedConfig())
        self.says, self.embedding = says, torch.nn.Embedding(vocab, 1)

    def get_input_embeddings(self) -> Any:
        return self.embedding

    def forward(self, input_ids: Any, position_ids: Any, past_key_values: Any, **given: Any) -> CausalLMOutput:
        past_key_values.slots.append(())  # the prompt has been read
        return CausalLMOutput(logits=self.says(input_ids, position_ids))


def table(confidences: list[dict[int, float]], vocab: int = 8) -> Tensor:
    """`[n, V]` log-probabilities, the rest of each row spread over the other words (the last one is the mask)."""
    rows = torch.empty(len(confidences), vocab, dtype=torch.float64)
    for row, given in zip(rows, confidences, strict=True):
        row[:] = (1 - sum(given.values())) / (vocab - len(given))
        for token, p in given.items():
            row[token] = p
    return rows.clamp(min=1e-9).log()


def paired(model: Tensor, other: Tensor) -> tuple[scripted.Script, Expects]:
    """Two models that say `[n, V]` of the n positions behind a prompt of one token, whatever stands elsewhere."""
    whole = torch.cat([model[:1], model, model[:1]])
    return (
        scripted.Script(lambda canvas: whole.expand(canvas.ids.shape[0], -1, -1)),
        Expects(lambda ids, position: other[position.clamp(max=len(other) - 1)]),  # row i speaks of i + 1
    )


# By hand


def test_by_hand() -> None:
    """The product of 0.6 / 0.4 with 0.2 / 0.8 prefers the second word at R = 0.5 and the first one at R = 0.8."""
    model = table([{1: 0.9}, {2: 0.9}, {3: 0.6, 4: 0.4}, {5: 0.9}])
    other = table([{2: 0.9}, {2: 0.5}, {3: 0.2, 4: 0.8}, {5: 0.9}])
    denoiser, judge = paired(model, other)
    for weight, steps in ((0.5, [[0, 1], [2, 3]]), (0.8, [[0, 1, 2, 3]]), (0.0, [[0, 1], [2, 3]])):
        rule = ParallelDecoding(verifier=judge, mixture_weight=weight)
        assert scripted.play(denoiser, rule, 4) == steps
        result = Sampler(denoiser, scheduler=rule, blocks=FullBlock(), stop="none").generate([[0]], max_new_tokens=4)
        assert result.tokens[0].tolist() == [1, 2, 3, 5]  # nothing is corrected
    rule = ParallelDecoding(verifier=judge, mixture_weight=0.8, max_lookahead=3)
    assert scripted.play(denoiser, rule, 4) == [[0, 1, 2], [3]]


def test_the_verifier_reads_the_draft() -> None:
    """It expects each word to follow the one before: 1 2 3 | 5 6 0 | 2."""
    denoiser, _ = paired(table([{word: 0.9} for word in (1, 2, 3, 5, 6, 0, 2)]), torch.zeros(1, 8))
    judge = Expects(lambda ids, position: torch.nn.functional.one_hot((ids + 1) % 7, 8).double() * 9)
    rule = ParallelDecoding(verifier=judge, mixture_weight=0.0)
    assert scripted.play(denoiser, rule, 7) == [[0, 1, 2], [3, 4, 5], [6]]


# The six invariants


@few("temperature", [None, 1.0])
def test_full_trust_takes_the_whole_draft(temperature: float | None) -> None:
    whole = run({"name": "apd", **LOOK, "mixture_weight": 1.0}, temperature=temperature)
    assert whole.nfe.tolist() == [1] * len(toys.PROMPTS)
    for horizon in (5, 6):
        some = run({"name": "apd", **LOOK, "mixture_weight": 1.0, "max_lookahead": horizon}, temperature=temperature)
        assert some.nfe.tolist() == [-(-TOKENS // horizon)] * len(toys.PROMPTS)
        assert torch.equal(some.trace.generated, (torch.arange(TOKENS) // horizon).expand(len(toys.PROMPTS), -1))


@each("temperature", [None, 1.0, 3.0])
@each("weight", [0.0, 0.3, 0.9])
def test_a_verifier_of_the_same_mind_takes_everything(weight: float, temperature: float | None) -> None:
    logits = torch.randn(12, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[:, -1] = -30  # the mask
    denoiser, judge = paired(logits, logits)
    rule = ParallelDecoding(verifier=judge, mixture_weight=weight)
    assert scripted.play(denoiser, rule, 12, temperature=temperature) == [list(range(12))]


@few("cache", ["none", "trailing"])
@few("weight", [0.0, 0.7, 0.95])
def test_left_to_right_without_gaps(weight: float, cache: str) -> None:
    result = run({"name": "apd", **LOOK, "mixture_weight": weight, "max_lookahead": 7}, cache=cache, temperature=0.7)
    assert result.complete.all() and (result.nfe <= TOKENS).all()
    for row in range(len(toys.PROMPTS)):
        steps = result.trace.steps(row)
        assert all(1 <= len(step) <= 7 for step in steps)
        assert [position for step in steps for position in step] == list(range(TOKENS))


def test_coupling() -> None:
    """Two words: agreement rises with R to 1, is within the bound of 2 TV, and beats independent draws."""
    size, generator = 4096, torch.Generator().manual_seed(0)
    canvas = toys.canvas(torch.ones(1, size, dtype=torch.bool))
    own = torch.full((1, 1, size, toys.VOCAB), -torch.inf, dtype=torch.float64)
    own[..., 1:3] = torch.randn(1, 1, size, 2, generator=generator, dtype=torch.float64)
    other = torch.full_like(own, -torch.inf)
    other[..., 1:3] = torch.randn(1, 1, size, 2, generator=generator, dtype=torch.float64)
    guides = Sampler(toys.denoiser(), temperature=1.0).plugins.guides
    head_rows, spec = HeadRows.every(Query.window(canvas)), toys.denoiser().spec
    rows = own[0, 0]
    seen = readout.read(rows.clone(), canvas, head_rows, readout.Rule(spec, guides, frozenset({"draw"})))
    assert seen.draw is not None
    assert torch.equal(seen.draw.logits, own)
    agree, before = [], torch.zeros(1, 1, size, dtype=torch.bool)
    for weight in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0):
        mixed = mixture(seen.draw.logits, other, weight)
        same = seen.draw(mixed) == seen.token
        assert (same | ~before).all()  # whoever agreed goes on agreeing
        p, q = own.softmax(-1), mixed.softmax(-1)
        apart = (p - q).abs().sum(-1).mean() / 2
        assert 1 - same.double().mean() <= 2 * apart + 0.01
        agree.append(float(same.double().mean()))
        if weight == 0.0:
            assert agree[0] > float((p * q).sum(-1).mean()) + 0.1
        before = same
    assert agree == sorted(agree) and agree[-1] == 1.0 and agree[0] < 0.9


@pytest.mark.slow
@few("blocks", [FullBlock(), FixedBlocks(6)])
def test_what_is_kept_is_what_reading_again_gives(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a ragged batch whose rows advance at different speeds."""
    original, compared, firsts = Reading.logits, [], []

    def check(self: Reading, canvas: Any, ids: Tensor, first: Tensor, width: int) -> Tensor:
        got = original(self, canvas, ids, first, width)
        for row, end in enumerate(canvas.end.tolist()):
            start, stop = int(first[row]), min(int(first[row]) + width, end)
            if canvas.done[row]:
                continue
            text = ids[row : row + 1, :stop]
            fresh = self.verifier.model(input_ids=text).logits[0, start - 1 : -1]
            torch.testing.assert_close(got[row, : stop - start], fresh, atol=1e-5, rtol=1e-5)
            compared.append(len(fresh))
        firsts.append(first.tolist())
        return got

    monkeypatch.setattr(Reading, "logits", check)
    run({"name": "apd", **LOOK, "mixture_weight": 0.5}, blocks=blocks)
    assert len(compared) > 3 * len(toys.PROMPTS)
    assert any(len(set(row)) > 1 for row in firsts)


# Rows of a batch, the window, the horizon


def computed(scheduler: Any, cache: Any, kind: str = "llada") -> list[list[int]]:
    """Columns that each forward of a prompt of three and eight tokens computes."""
    spy = toys.Spy(toys.denoiser(kind))
    sampler = Sampler(spy, scheduler=scheduler, cache=cache, blocks=FullBlock(), stop="none")
    sampler.generate(toys.PROMPTS[:1], max_new_tokens=8)
    return [toys.columns(plan)[0] for _, _, plan in spy.calls]


@each(
    ("kind", "window", "lefts"),
    [
        *[("llada", 2, [2, 4, 6]), ("llada", 1, [3, 5, 7]), ("llada", 0, [4, 6, 8]), ("llada", 99, [0, 0, 0])],
        *[("dream", 1, [3, 5, 7]), ("dream", 0, [4, 6, 8]), ("dream", 3, [1, 3, 5])],
    ],
)
def test_the_window_lies_behind_the_mask_that_was_first(kind: str, window: int, lefts: list[int]) -> None:
    columns = computed(LeftToRight(tokens_per_step=2), TrailingCache(window), kind)
    assert columns == [list(range(left, 11)) for left in (0, *lefts)]


@pytest.mark.slow
def test_a_wide_window_is_no_cache() -> None:
    for rule in ({"name": "apd", **LOOK, "max_lookahead": 6}, {"name": "threshold", "threshold": 0.6}, "rcr"):
        one, two = run(rule, cache=TrailingCache(99)), run(rule)
        assert torch.equal(one.trace.ids, two.trace.ids) and torch.equal(one.trace.rows, two.trace.rows)


def test_left_to_right_by_hand() -> None:
    model = scripted.constant([0.2, 0.9, 0.4, 0.8, 0.3])
    assert scripted.play(model, LeftToRight(tokens_per_step=2), 5) == [[0, 1], [2, 3], [4]]
    assert scripted.play(model, LeftToRight(tokens_per_step=9, max_lookahead=3), 5) == [[0, 1, 2], [3, 4]]
    assert scripted.play(model, LeftToRight(tokens_per_step=2), 5, FixedBlocks(3)) == [[0, 1], [2], [3, 4]]


# The verifier


def test_from_a_folder(tmp_path: Path) -> None:
    toys.verifier().save_pretrained(tmp_path)
    rule = {"name": "apd", "mixture_weight": 0.9, "max_lookahead": 8}
    loaded = run({**rule, "verifier": str(tmp_path)}, stop="none", tokenizer=None)
    assert torch.equal(loaded.trace.ids, run({**rule, "verifier": toys.verifier()}, stop="none").trace.ids)
    judge = autoregressive.load(str(tmp_path), toys.denoiser().spec)
    assert judge.model.dtype == torch.float64


def test_absurd_sizes_of_a_verifier_are_refused_before_it_is_built(tmp_path: Path) -> None:
    toys.verifier().save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 10**9}))
    with refused("checkpoint-config-invalid: num_hidden_layers, 1000000000"):
        autoregressive.load(str(tmp_path), toys.denoiser().spec)
    (tmp_path / "config.json").unlink()
    with refused("checkpoint-incomplete: config.json"):
        autoregressive.load(str(tmp_path), toys.denoiser().spec)


def words(order: list[str], folder: Path | None = None) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({w: i for i, w in enumerate(order)}, "a")))
    fast.add_special_tokens({"mask_token": "<mask>"} if folder is None else {"eos_token": "<end>"})
    if folder is not None:
        fast.save_pretrained(folder)
    return fast


def test_tokenizers_are_compared(tmp_path: Path) -> None:
    toys.verifier().save_pretrained(tmp_path)
    scheduler = {"name": "apd", "verifier": str(tmp_path)}
    with refused("tokenizer-missing"):
        Sampler(toys.denoiser(), scheduler=scheduler, tokenizer=words(["a", "b", "c"]))
    words(["a", "b", "c"], tmp_path)
    Sampler(toys.denoiser(), scheduler=scheduler, tokenizer=words(["a", "b", "c"]))  # added tokens may differ
    with refused("tokenizer-differs: token 1, 'b'"):
        Sampler(toys.denoiser(), scheduler=scheduler, tokenizer=words(["a", "c", "b"]))


def refusals() -> Iterator[tuple[dict[str, Any], str]]:
    judge = toys.verifier()
    yield {}, "option-missing: scheduler.verifier"
    yield {"verifier": 3}, "option-type: scheduler.verifier"
    yield {"verifier": "/no/such/folder"}, "model-not-found: scheduler.verifier='/no/such/folder'"
    yield {"verifier": judge, "mixture_weight": 1.5}, "option-range: mixture_weight"
    yield {"verifier": judge, "max_lookahead": 0}, "option-range: max_lookahead"
    yield {"verifier": toys.verifier(vocab=600)}, "vocabulary-differs: 600, 40"
    yield {"verifier": toys.verifier(vocab=20)}, "vocabulary-differs: 20"


@each(("given", "sentence"), list(refusals()))
def test_refusals(given: dict[str, Any], sentence: str) -> None:
    with refused(sentence):
        toys.sampler(scheduler={"name": "apd", **given})


def test_refusals_of_company() -> None:
    rule = ParallelDecoding(verifier=toys.verifier())
    for cache in ("dual", "dllm", "vicinity", "sparse"):
        with refused("cache-incompatible: max_lookahead, cache=trailing"):
            toys.sampler(scheduler=rule, cache=cache)
    with refused("cache-incompatible: scheduler=apd"):
        toys.sampler(scheduler=rule, cache="elastic")
    assert run(replace(rule, max_lookahead=None), cache="dual", blocks=FixedBlocks(6)).complete.all()
    with refused("option-range: cache.window, -1"):
        TrailingCache(-1)
    with refused("option-range: scheduler.tokens_per_step"):
        LeftToRight(tokens_per_step=0)


def test_a_verifier_must_see_the_whole_text() -> None:
    with refused("context-exceeded: prompt 2: scheduler.verifier can read 62 tokens"):
        toys.sampler(scheduler=ParallelDecoding(verifier=short(62))).generate([[1, 2], [1, 2, 3]], max_new_tokens=60)
    sliding = ParallelDecoding(verifier=short(256, window=8))
    toys.sampler(scheduler=sliding).generate([[1, 2]], max_new_tokens=6)
    with refused("verifier-unsupported"):
        toys.sampler(scheduler=sliding).generate([[1, 2, 3]], max_new_tokens=6)


def short(positions: int, window: int | None = None) -> MistralForCausalLM:
    config = MistralConfig(
        vocab_size=toys.VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=positions, sliding_window=window,
    )  # fmt: skip
    return MistralForCausalLM(config)
