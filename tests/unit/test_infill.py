"""`infill`, `refine`, `prefix`, `suffix` and `pinned`: what they say, what methods count, and what is refused."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from dllm_sampler import Edit, Infill, Sampler, Trace, config
from dllm_sampler.core import packing
from dllm_sampler.core.values import FREE
from dllm_sampler.kernels.backend import FallbackWarning
from tests import toys
from tests.refusals import refused
from tests.sampling import crossed, each, few

# `infill`, `refine`, `prefix`, `suffix` and `pinned`: what they say, what they make of it, what they refuse


PROMPT = [5, 11, 3]


@functools.cache
def letters() -> PreTrainedTokenizerFast:
    """A token for each sign; end token and mask where the toys have them."""
    signs = "abcdefghijklmnopqrstuvwxyz0123456789"
    names = [token for token in range(toys.VOCAB) if token not in (toys.EOS, toys.MASK)]
    vocab = dict(zip([*signs, "<unk>"], names, strict=False)) | {"<end>": toys.EOS, "<mask>": toys.MASK}
    made = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = Split(Regex("."), "isolated")
    made.decoder = Fuse()
    special = {"eos_token": "<end>", "pad_token": "<end>", "mask_token": "<mask>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def ids(text: str) -> list[int]:
    return letters()(text, add_special_tokens=False)["input_ids"]  # type: ignore[return-value]


def made(kind: str = "llada", **plugins: Any) -> Sampler:
    return toys.sampler(kind, **{"tokenizer": letters(), **plugins})


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return made()


def test_a_text_with_gaps(sampler: Sampler) -> None:
    """The whole text, what stands in its gaps, and figures of what was generated alone."""
    text = "a{gap:3}b0{gap: 2 }c"
    result = sampler.infill(text, prompts=[PROMPT])
    assert result.texts is not None and result.gaps is not None
    assert result.gaps[0] is not None
    first, second = result.gaps[0]
    assert result.texts[0] == f"a{first}b0{second}c"
    tokens, wanted = result.tokens[0].tolist(), ids("a") + [FREE] * 3 + ids("b0") + [FREE] * 2 + ids("c")
    assert len(tokens) == len(wanted) and all(one in (FREE, token) for one, token in zip(wanted, tokens, strict=True))
    assert toys.EOS not in tokens and result.finish_reason == ["end"]
    assert (result.lengths.tolist(), result.generated.tolist()) == ([len(wanted)], [5])
    assert (result.step_map[0] >= 0).tolist() == [one == FREE for one in wanted]
    torch.testing.assert_close(result.tokens_per_forward, 5 / result.nfe)
    same = sampler.generate([PROMPT], max_new_tokens=len(wanted), pinned=wanted)
    assert torch.equal(same.tokens, result.tokens) and same.nfe == result.nfe


@pytest.mark.slow
def test_texts_of_their_own_lengths() -> None:
    """In a batch, in flight from a list and from a generator, drawn several times, streamed: all the same."""
    texts = ["a{gap:3}", "ab{gap:1}cd{gap:6}x", "{gap:2}y", "0{gap:11}1"]
    known: list[Any] = [None, [4, 4], "ab", None]
    sampler = made(temperature=0.8, blocks={"name": "fixed", "length": 4})
    asks = [Infill(text, prompt) for text, prompt in zip(texts, known, strict=True)]
    batch = sampler.generate(asks, samples=2)
    for row in range(8):
        alone = sampler.generate(asks[row // 2], seed=row)
        size = alone.tokens.shape[1]
        assert torch.equal(batch.tokens[row, :size], alone.tokens[0]) and batch.nfe[row] == alone.nfe[0]
        assert (batch.tokens[row, size:] == sampler.denoiser.spec.pad_id).all()
        assert batch.texts is not None and alone.texts is not None and batch.texts[row] == alone.texts[0]
    assert batch.gaps is not None and batch.texts is not None
    for given_ in (asks, iter(asks)):
        answers = list(sampler.generate_many(given_, batch_size=3, samples=2, max_new_tokens=4, order="given"))
        for row, answer in enumerate(answers):
            assert (answer.text, answer.gaps, answer.nfe) == (batch.texts[row], batch.gaps[row], batch.nfe[row])
        assert len(answers) == 8
    result = list(sampler.stream(asks))[-1].result
    assert result is not None and torch.equal(result.tokens[0], batch.tokens[0])


@pytest.mark.slow
def test_prompts_with_and_without_gaps_in_one_stream(sampler: Sampler) -> None:
    """A prompt that needs other places than those in flight waits for them."""
    asks = [PROMPT, [4, 4], Infill("a{gap:4}b", [8]), Infill("a{gap:30}b", [7]), [12, 6], Infill("{gap:2}a", [9])]
    done = []

    def progress(forwards: int, committed: int, wanted: int) -> None:
        done.append((committed, wanted))

    answers = list(sampler.generate_many(iter(asks), batch_size=2, max_new_tokens=6, order="given", progress=progress))
    for ask, answer in zip(asks, answers, strict=True):
        assert torch.equal(answer.tokens, sampler.generate([ask], max_new_tokens=6).tokens[0])
    assert [answer.gaps is None for answer in answers] == [not isinstance(ask, Infill) for ask in asks]
    assert done[-1] == (3 * 6 + 4 + 30 + 2, 3 * 6 + 4 + 30 + 2)


def test_a_beginning_and_an_end(sampler: Sampler) -> None:
    """As text or tokens, for all prompts or for each; lists are as long as there are prompts."""
    result = sampler.generate([PROMPT, [7]], max_new_tokens=9, prefix="ab0", suffix=["cd", ids("xy")])
    front = ids("ab0")
    assert (result.tokens[:, : len(front)] == torch.tensor(front)).all()
    for row, text in enumerate(("cd", "xy")):
        assert result.tokens[row, -len(ids(text)) :].tolist() == ids(text)
        assert result.texts is not None and result.texts[row].startswith("ab0") and result.texts[row].endswith(text)
    many = list(
        sampler.generate_many(
            iter([PROMPT, [7]]), max_new_tokens=9, prefix="ab0", suffix=["cd", ids("xy")], order="given"
        )
    )
    assert [one.text for one in many] == result.texts
    row = [FREE] * 9
    row[: len(front)], row[-2:] = front, [toys.MASK, 1]
    both = sampler.generate([PROMPT], max_new_tokens=9, pinned=torch.tensor(row), prefix=front[:1])
    assert both.tokens[0, -1] == 1 and both.step_map[0, -2] >= 0, "the mask token leaves a place free"
    plain = sampler.generate([PROMPT], max_new_tokens=4, prefix="")
    assert plain.gaps is None, "nothing is given"
    assert torch.equal(sampler.infill("{gap:4}", prompts=[PROMPT]).tokens, plain.tokens)


def test_the_model_sees_what_stands_behind_a_gap(sampler: Sampler) -> None:
    rows = [sampler.generate([PROMPT], max_new_tokens=8, suffix=[token]).tokens[0, :-1] for token in range(6)]
    assert len({tuple(row.tolist()) for row in rows}) > 3


class Wants(toys.Spy):
    """A model that wants one token everywhere."""

    token: int = toys.EOS

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().head(hidden)
        logits[..., self.token] += 1e4
        return logits


def test_what_is_given_is_not_what_a_method_may_revise() -> None:
    """A model that wants another token there is not asked for it again and again, nor does it count as one to undo."""
    wants = Wants(toys.wrapped(toys.transformer()))
    wants.token = 7
    for scheduler in (
        {"name": "editing", "threshold": 0.0, "edit": 0.5, "extra": 9},
        {"name": "wino", "threshold": 0.5, "back": 0.9, "least": 9, "most": 9},
        {"name": "hierarchical", "low": 0.5, "threshold": 0.5, "remask": 0.9},
    ):
        sampler = Sampler(wants, scheduler=scheduler, stop="none", blocks="full")
        result = sampler.generate([PROMPT], max_new_tokens=8, pinned=[8, FREE, 9, FREE, FREE, 9])
        assert result.tokens.tolist() == [[8, 7, 9, 7, 7, 9, 7, 7]]
        assert result.nfe[0] == (2 if scheduler["name"] == "editing" else 1) and not result.trace.revised.any()


@each("cache", ["none", "dual"])
def test_an_end_token_does_not_stand_before_a_given_one(cache: str) -> None:
    """A model that wants nothing else puts it behind them."""
    wants = Wants(toys.wrapped(toys.transformer()))
    sampler = Sampler(wants, tokenizer=letters(), cache=cache, blocks={"name": "fixed", "length": 6})
    result = sampler.generate([PROMPT], max_new_tokens=12, pinned=[FREE] * 5 + [8, FREE, 9])
    row = result.tokens[0].tolist()
    assert row.index(toys.EOS) == 8 and result.finish_reason == ["end"] and result.lengths[0] == 9
    assert result.gaps is not None and [bool(text) for text in result.gaps[0] or ()] == [True, True, False]


def test_stop_strings_are_looked_for_behind_what_is_given() -> None:
    sampler = made(scheduler={"name": "leftright", "tokens_per_step": 1})
    plain = sampler.generate([PROMPT], max_new_tokens=12, prefix="a0")
    assert plain.texts is not None
    sign = plain.texts[0][4]
    cut = sampler.generate([PROMPT], max_new_tokens=12, prefix="a0", stop_strings=[sign, "a"])
    assert cut.texts is not None and cut.gaps is not None and cut.gaps[0] is not None
    assert cut.texts[0].startswith("a0") and len(cut.texts[0]) > 2 and sign not in cut.texts[0][2:]
    assert cut.texts[0] == "a0" + cut.gaps[0][0] and cut.finish_reason == ["stop_string"] and cut.nfe < plain.nfe
    whole = sampler.generate([PROMPT], max_new_tokens=12, pinned=[FREE] * 11 + [1], stop_strings=[sign, "a"])
    assert whole.finish_reason == ["end"] and not (whole.tokens == toys.MASK).any()


def test_refine(sampler: Sampler) -> None:
    """A result, a list of ids, one span or several: as with all other tokens pinned."""
    result = sampler.generate([PROMPT, [7, 1]], max_new_tokens=10)
    again = sampler.refine(result, [(2, 4), (6, 7)], seed=3)
    pinned = result.tokens.clone()
    pinned[:, [2, 3, 6]] = FREE
    same = sampler.generate([PROMPT, [7, 1]], max_new_tokens=10, pinned=pinned, seed=3)
    assert torch.equal(again.tokens, same.tokens) and torch.equal(again.trace.step_map, same.trace.step_map)
    assert torch.equal(sampler.refine(result.tokens, [(2, 4), (6, 7)], prompts=[PROMPT, [7, 1]]).tokens, same.tokens)
    alone = sampler.refine(result.tokens[0].tolist(), (2, 4))
    assert alone.trace.origin == 0 and alone.lengths[0] == 10
    # Up to the end token: what stands behind it is no part of an answer.
    ended = replace(result, lengths=torch.tensor([6, 10]))
    assert sampler.refine(ended, (2, 4)).lengths.tolist() == [6, 10]


def test_a_trace_keeps_what_was_given(sampler: Sampler) -> None:
    trace: Trace = sampler.infill("a{gap:3}b0{gap:2}c", prompts=[PROMPT]).trace
    for canvas in trace.replay():
        assert canvas[0, 3] == ids("a")[0] and canvas[0, -1] == ids("c")[0]
    assert (trace.state(0)[0] == toys.MASK).sum() == 5


def test_guidance_hides_what_is_given_too() -> None:
    """Without a prompt: the branch that sees nothing given still differs."""
    text = "a{gap:6}b"
    assert not torch.equal(made("cfg").infill(text).tokens, made().infill(text).tokens)


def framing() -> PreTrainedTokenizerFast:
    vocab = {"a": 1, "b": 2, "[CLS]": 30, "[SEP]": 31, "<end>": toys.EOS, "<mask>": toys.MASK}
    made = Tokenizer(WordLevel(vocab, unk_token="<mask>"))
    made.post_processor = TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 30), ("[SEP]", 31)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", mask_token="<mask>")


def test_what_a_tokenizer_puts_around_a_text_goes_around_the_whole() -> None:
    sampler = Sampler(toys.denoiser(), tokenizer=framing(), stop="none")
    assert sampler.infill("{gap:2}a{gap:1}").tokens[0, [0, 3, 5]].tolist() == [30, 1, 31]
    assert sampler.infill("a{gap:1}b", prompts=[PROMPT]).tokens[0, [0, 2]].tolist() == [1, 2]
    assert sampler.infill("a{gap:1}b").trace.origin == 0


@each(
    ("call", "said"),
    [
        (lambda one: one.infill("a{gap}b"), "gap-invalid: answer 1"),
        (lambda one: one.infill("a{gap:0}b"), "gap-invalid: answer 1"),
        (lambda one: one.infill(["a{gap:2}", "a{gap:x}b"]), "gap-invalid: answer 2"),
        (lambda one: one.infill("ab"), "gap-missing: answer 1"),
        (lambda one: one.infill("{gap:4}"), "gap-without-text: answer 1"),
        (lambda one: one.infill("a{gap:64}"), "context-exceeded: answer 1, 65"),
        (lambda one: one.infill("{gap:99999999}", prompts="a"), "context-exceeded: prompt 1, 99999999"),
        (lambda one: one.infill("a{gap:63}", prompts="a"), "context-exceeded: 64"),
        (lambda one: one.infill("a{gap:40}", prompts=[[1] * 30]), "context-exceeded: 64"),
        (lambda one: one.infill("a?{gap:2}"), "text-outside-vocabulary: answer 1, '?'"),
        (lambda one: one.infill(["a{gap:2}"] * 2, prompts=["a"] * 3), "length-mismatch"),
        (lambda one: one.infill([[1, 2]]), "option-type"),
        (lambda one: one.infill(3, prompts="a"), "option-type"),
        (lambda one: one.infill("a{gap:1}", prompts=5), "prompt-type: prompt 1"),
        (lambda one: one.generate(5, max_new_tokens=4), "prompt-type: prompt 1"),
        (lambda one: one.refine("ab", (0, 1)), "option-type: answer 1, 'ab'"),
        (lambda one: one.refine(None, (0, 1)), "option-type: answer 1"),
        (lambda one: one.refine(b"abc", (0, 1)), "option-type: answer 1"),
        (lambda one: one.refine([True, 5, 6], (0, 1)), "option-type: answer 1"),
        (lambda one: one.refine([{5, 6}], (0, 1)), "option-type: answer 1"),
        (lambda one: one.generate("a", max_new_tokens=2, suffix="abcd0"), "given-too-long: =2"),
        (lambda one: one.generate("a", max_new_tokens=3, prefix="0", suffix="cd"), "nothing-to-generate"),
        (lambda one: one.generate("a", max_new_tokens=3, prefix="01", suffix="12"), "given-too-long"),
        (lambda one: one.generate("a", max_new_tokens=3, pinned=[1] * 4), "given-too-long"),
        (lambda one: one.generate("a", max_new_tokens=3, pinned=[1, FREE], prefix=[2]), "given-conflict: token 1"),
        (lambda one: one.generate("a", max_new_tokens=3, pinned=[99]), "token-outside-vocabulary: 99"),
        (lambda one: one.generate("a", max_new_tokens=3, pinned=[-2]), "token-outside-vocabulary: -2"),
        (lambda one: one.generate("a", max_new_tokens=3, prefix=[FREE]), "token-outside-vocabulary: -1"),
        (lambda one: one.generate("a", max_new_tokens=3, prefix=[toys.MASK]), "mask-token-given: 39"),
        (lambda one: one.generate("a", max_new_tokens=3, prefix=1.5), "option-type: prefix"),
        (lambda one: one.generate("a", max_new_tokens=3, pinned="ab"), "option-type: -1"),
        (lambda one: one.generate("a", max_new_tokens=3, pinned=[0.5]), "option-type: pinned"),
        (lambda one: one.generate(["a", "b"], max_new_tokens=3, prefix=["a"] * 3), "length-mismatch"),
        (lambda one: list(one.generate_many(iter("ab"), prefix=["a"] * 3, max_new_tokens=4)), "length-mismatch"),
        (lambda one: one.generate(Infill("a{gap:2}"), prefix="a"), "options-conflict: prompt 1"),
        (lambda one: one.generate("a", max_new_tokens=4, prefix=[toys.EOS]), "given-conflict: prompt 1"),
        (lambda one: one.refine([1, 2, 3], (1, 9)), "span-invalid"),
        (lambda one: one.refine([1, 2, 3], (2, 2)), "span-invalid"),
        (lambda one: one.refine([1, 2, 3], (-1, 2)), "span-invalid: -1"),
        (lambda one: one.refine([1, 2, 3], []), "span-invalid"),
        (lambda one: one.refine([1, 2, 3], (0.0, 1)), "span-invalid: span (0.0, 1) does not fit answer 1"),
        (lambda one: one.refine([], (0, 1)), "answer-empty: refine has no answers"),
        (lambda one: one.refine([1, 2, 3], (0, 1), prompts=["a", "b"]), "length-mismatch"),
    ],
)  # fmt: skip
def test_what_is_refused(sampler: Sampler, call: Any, said: str) -> None:
    with refused(said) as caught:
        call(sampler)
    assert "\n" not in str(caught.value)


def test_what_a_gap_would_not_see() -> None:
    """Block-causal models, a verifier that reads from left to right, a logit shift, an encoder."""
    causal = made("causal", blocks={"name": "fixed", "length": 4})
    assert causal.generate([PROMPT], max_new_tokens=9, prefix=[1] * 4).complete.all()
    assert causal.generate([PROMPT], max_new_tokens=9, pinned=[1, 2, FREE, 3]).complete.all(), "in one block"
    for pinned in ([FREE, 1], [FREE] * 8 + [1]):
        with refused("given-unsupported"):
            causal.generate([PROMPT], max_new_tokens=9, pinned=pinned)
    apd = made(scheduler={"name": "apd", "verifier": toys.verifier(), "mixture_weight": 0.5})
    assert apd.generate([PROMPT], max_new_tokens=9, prefix=[1]).complete.all()
    with refused("given-unsupported: prompt 1"):
        apd.generate([PROMPT], max_new_tokens=9, suffix=[1])
    dream = made("dream")
    assert dream.infill("a{gap:3}b").complete.all()
    with refused("given-unsupported: prompt 1"):
        dream.infill("{gap:3}b")
    encoder = made()
    plugins = encoder.plugins
    context = replace(plugins.context, spec=replace(plugins.context.spec, encoder=True))
    encoder.plugins = replace(plugins, context=context)
    with refused("given-unsupported"):
        encoder.generate([PROMPT], max_new_tokens=9, prefix=[1])


def test_the_verifier_reads_what_an_answer_begins_with() -> None:
    """A beginning of the answer, or the end of the prompt: the same for both models."""
    scheduler = {"name": "apd", "verifier": toys.verifier(), "mixture_weight": 0.3}
    sampler = made(scheduler=scheduler, blocks="full")
    for size in (1, 4, 7):
        front = list(range(1, size + 1))
        prefixed = sampler.generate([PROMPT], max_new_tokens=8 + size, prefix=front)
        plain = sampler.generate([PROMPT + front], max_new_tokens=8)
        assert torch.equal(prefixed.tokens[0, size:], plain.tokens[0]) and prefixed.nfe == plain.nfe


CACHES = [name for name in config.names("cache") if name not in ("block_causal", "sub_block", "dkv_greedy")]


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "kind"), crossed(CACHES, ["llada", "dream"], together=0))
def test_an_answer_that_stands_alone_begins_at_the_first_column(cache: str, kind: str) -> None:
    """Also where a model predicts a token from the one before it. Rows join and leave: each is what it is alone."""
    sampler = made(
        kind, cache=cache, scheduler={"name": "threshold", "threshold": 2.0}, blocks={"name": "fixed", "length": 8}
    )
    asks = [
        Infill([1, FREE, FREE, 4, 4, 4, 4, 4]),
        Infill([1] + [FREE] * 15),
        Infill([9, 3] + [FREE] * 6),
        Infill([2, 2, 8, FREE, FREE, 5, FREE, FREE]),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)  # `dllm` answers batch by batch
        answers = list(sampler.generate_many(asks, batch_size=2, max_new_tokens=8, order="given"))
    for ask, answer in zip(asks, answers, strict=True):
        assert answer.trace is not None
        alone = sampler.generate(ask, seed=answer.trace.seeds.tolist())
        assert torch.equal(answer.tokens, alone.tokens[0])
        torch.testing.assert_close(answer.trace.logprob, alone.trace.logprob, atol=1e-6, rtol=1e-6)


# Methods and schedules count what is free of an answer, not what is given of it


def test_steps_and_blocks_count_what_is_free() -> None:
    """A fixed schedule keeps to its steps; blocks that are given cost no forward."""
    for length in (3, 4, 8):
        sampler = made(scheduler={"name": "fixed", "steps": 4}, blocks={"name": "fixed", "length": length})
        pinned = [1] * 20 + [FREE] * 4 + [2] * 3 + [FREE] * 4 + [3] * 9
        assert sampler.generate([PROMPT], max_new_tokens=40, pinned=pinned).nfe[0] == 4
    for name, most in (("rcr", 4), ("remdm", 5), ("origin", 4)):
        sampler = made(scheduler={"name": name, "steps": None}, blocks={"name": "fixed", "length": 16})
        assert sampler.generate([PROMPT], max_new_tokens=16, suffix=[1] * 12).nfe[0] <= most
    refine = made(scheduler={"name": "block_refine", "steps": 4, "threshold": 1.0}, blocks="full")
    steps = refine.generate([PROMPT], max_new_tokens=16, suffix=[1] * 12).step_map[0, :4]
    assert steps.sort().values.tolist() == [0, 1, 2, 3]


def test_a_method_counts_what_is_free() -> None:
    """Ascending steps, Prophet's bounds, horizons: what is given is neither left to do nor done."""
    suffix, blocks = [1] * 12, {"name": "full"}
    assert made(scheduler="ascending", blocks=blocks).generate([PROMPT], max_new_tokens=16, suffix=suffix).nfe[0] == 2
    never = {"name": "prophet", "early": float("inf"), "mid": 0.0, "late": 0.0}
    late = made(scheduler={"name": "fixed"}, stop=never, blocks=blocks)
    assert late.generate([PROMPT], max_new_tokens=16, suffix=suffix).nfe[0] == 3, "a third of what is free"
    for scheduler, shown in (
        ({"name": "leftright", "tokens_per_step": 1, "max_lookahead": 2}, [2] * 10 + [1]),
        ({"name": "slowfast", "threshold": 0.9, "glimpse": 0.6, "slow": 1}, [11, 9, 5, 2, 1, 2, 1]),
    ):
        spy = toys.Spy(toys.denoiser())
        hides = Sampler(spy, scheduler=scheduler, blocks="full", stop="none")
        hides.generate([PROMPT], max_new_tokens=12, suffix=[3])
        limits = [int(query.limit) for _, query, _ in spy.calls if query.limit is not None]
        assert {*limits} == {len(PROMPT) + 12}, "given tokens are not hidden"
        seen = [int((canvas.masked & packing.computable(canvas, query, None)).sum()) for canvas, query, _ in spy.calls]
        assert seen == shown, "masks are, those before a given token too"


def test_a_mask_behind_the_horizon_waits() -> None:
    """The second mask is not within two columns of the first, and a given token behind it makes no difference."""
    scheduler = {"name": "leftright", "tokens_per_step": 2, "max_lookahead": 2}
    pinned = [FREE, 1, 1, FREE, 1]
    result = made(scheduler=scheduler, blocks="full").generate([PROMPT], max_new_tokens=5, pinned=pinned)
    assert result.step_map[0].tolist() == [0, -1, -1, 1, -1]


def test_nothing_cuts_what_is_given_off() -> None:
    canvas = toys.canvas(torch.tensor([[True, True, False, True]]))
    canvas = toys.changed(canvas, frozen=~canvas.masked, given=torch.tensor([3]))
    at = torch.tensor([[0]])
    edit = Edit(at, at > 0, end=torch.tensor([1]))
    assert canvas.apply(at, edit).end == 3


def test_shares_of_what_is_free() -> None:
    canvas = toys.canvas(torch.tensor([[False, True, True, False, True, False]]))
    canvas = toys.changed(canvas, frozen=~canvas.masked, given=torch.tensor([6]), start=torch.tensor([1]))
    assert canvas.inside(torch.arange(6)[None]).tolist() == [[False, True, True, False, True, False]]
    assert canvas.free_before(torch.tensor([4])) == 2 and canvas.free_in_block() == 3 and canvas.progress() == 0
    assert canvas.next_free(torch.tensor([3])) == 4 and canvas.next_free(torch.tensor([5])) == 6


@few("passes", ["ride", "separate"])
@few("size", [1, 5, 6, 9])
def test_a_beginning_is_like_the_end_of_the_prompt(passes: str, size: int) -> None:
    """For a block-causal model: the same forwards, those that only store among them."""
    cache, front = {"name": "block_causal", "store_pass": passes}, list(range(1, size + 1))
    sampler = made("causal", cache=cache, blocks={"name": "fixed", "length": 4}, scheduler={"name": "fixed"})
    prefixed = sampler.generate([PROMPT], max_new_tokens=9 + size, prefix=front)
    plain = sampler.generate([PROMPT + front], max_new_tokens=9)
    assert torch.equal(prefixed.tokens[0, size:], plain.tokens[0]) and prefixed.nfe == plain.nfe
    assert torch.equal(prefixed.step_map[0, size:], plain.step_map[0])


@pytest.mark.slow
def test_drafting_over_the_end_of_a_block() -> None:
    """The next block begins behind what is given, and is drafted to its end: tokens are the inner scheduler's."""
    inner, blocks = {"name": "fixed", "steps": None}, {"name": "fixed", "length": 4}
    drafted = {"name": "freedave", "inner": inner, "eager": True, "draft": 6}
    saved = 0
    for seed in range(2):
        pinned = [FREE] * 4 + [seed, 1] + [FREE] * 5 + [2] + [FREE] * 4
        plain = made(scheduler=inner, blocks=blocks).generate([[seed, 5]], max_new_tokens=16, pinned=pinned)
        fast = made(scheduler=drafted, blocks=blocks).generate([[seed, 5]], max_new_tokens=16, pinned=pinned)
        assert torch.equal(fast.tokens, plain.tokens)
        saved += int(plain.nfe - fast.nfe)
    assert saved > 0
