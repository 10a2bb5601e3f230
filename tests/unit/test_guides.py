"""Temperature, top-k, top-p and end tokens: what they keep, in which order, and what they refuse."""

import math
from collections.abc import Callable
from typing import Any

import torch

from dllm_sampler.guides import EndTokens, Temperature, TopK, TopP
from tests import toys
from tests.refusals import refused
from tests.sampling import each

NOBODY: Any = None  # these guides look at the logits only


def kept(guide, p: list[float]) -> list[int]:
    logits = torch.tensor(p, dtype=torch.float64).log()[None, None, None]
    before = logits.clone()
    out = guide(logits, NOBODY, NOBODY)
    assert torch.equal(logits, before), "a guide never writes in place"
    finite = out[0, 0, 0] > -math.inf
    assert torch.equal(out[0, 0, 0][finite], logits[0, 0, 0][finite])
    return finite.nonzero()[:, 0].tolist()


def test_top_p_keeps_the_token_that_crosses():
    p = [0.1, 0.4, 0.2, 0.3]
    assert kept(TopP(0.3), p) == [1]
    assert kept(TopP(0.45), p) == [1, 3]
    assert kept(TopP(0.75), p) == [1, 2, 3]
    assert kept(TopP(0.95), p) == [0, 1, 2, 3]
    assert kept(TopP(1.0), [0.5, 0.5, 1e-30]) == [0, 1, 2]
    assert kept(TopP(0.01), [0.25] * 4) == [0], "equal tokens: the lower id first"
    assert kept(TopP(0.9), [0.0, 1.0, 0.0]) == [1]


def test_top_p_of_one_keeps_a_real_vocabulary():
    """In float32 the sum passes 1 long before the last token."""
    logits = torch.randn(1, 1, 2, 100_000, generator=torch.Generator().manual_seed(0)) * 4
    assert torch.equal(TopP(1)(logits, NOBODY, NOBODY), logits)


def test_top_k():
    p = [0.1, 0.4, 0.2, 0.3]
    assert kept(TopK(2), p) == [1, 3]
    assert kept(TopK(9), p) == [0, 1, 2, 3]
    assert kept(TopK(2), [0.2, 0.3, 0.2, 0.1, 0.2]) == [0, 1, 2, 4], "ties with the k-th stay"


def test_temperature():
    logits = torch.tensor([[[[2.0, 1.0]]]])
    assert Temperature(0.5)(logits, NOBODY, NOBODY).flatten().tolist() == [4.0, 2.0]
    assert Temperature(0.0)(logits, NOBODY, NOBODY) is logits
    assert Temperature(0.5).draws and not Temperature(0.0).draws
    assert not Temperature(0.5).measures and Temperature(0.5, measured=True).measures


def test_end_tokens():
    spec = toys.denoiser().spec
    even = [1 / toys.VOCAB] * toys.VOCAB
    assert set(range(toys.VOCAB)) - set(kept(EndTokens("ban").bind(toys.context(spec)), even)) == {toys.EOS}
    assert set(range(toys.VOCAB)) - set(kept(EndTokens("defer").bind(toys.context(spec)), even)) == {toys.EOS, toys.EOT}
    assert set(range(toys.VOCAB)) - set(kept(EndTokens("ban", (3, 5)).bind(toys.context(spec)), even)) == {3, 5}
    assert EndTokens("ban").chooses and EndTokens("ban").measures
    assert EndTokens("defer").measures and not EndTokens("defer").chooses


def test_guides_apply_in_the_order_given():
    """A nucleus of 0.6 holds one token before tempering and more behind it: the order shows in the answers."""
    hot, narrow = {"name": "temperature", "value": 3.0}, {"name": "top_p", "p": 0.6}
    answers = [
        toys.sampler(guide=guides).generate(toys.PROMPTS, max_new_tokens=8).tokens
        for guides in ([hot, narrow], [narrow, hot])
    ]
    assert not torch.equal(*answers)
    shortcut = toys.sampler(temperature=3.0, top_p=0.6).generate(toys.PROMPTS, max_new_tokens=8).tokens
    assert torch.equal(shortcut, answers[0])
    greedy = toys.sampler(temperature=3.0, top_k=1).generate(toys.PROMPTS, max_new_tokens=8).tokens
    assert torch.equal(greedy, toys.sampler().generate(toys.PROMPTS, max_new_tokens=8).tokens)


@each(
    ("kind", "value", "message"),
    [
        (Temperature, -1, "option-range: -1"),
        (Temperature, math.nan, "option-range: temperature"),
        (Temperature, math.inf, "option-range: temperature"),
        (Temperature, "hot", "option-range: 'hot'"),
        (Temperature, True, "option-range: temperature"),
        (TopK, 0, "option-range: top_k"),
        (TopK, 2.0, "option-range: top_k"),
        (TopP, 0, "option-range: top_p"),
        (TopP, 1.1, "option-range: top_p"),
        (TopP, math.nan, "option-range: top_p"),
        (lambda ids: EndTokens(ids=ids), (), "option-range: guide.end_tokens.ids=[]"),
        (
            lambda ids: toys.sampler(guide=EndTokens(ids=ids)).generate([5], max_new_tokens=4),
            (999,),
            "token-outside-vocabulary: 999",
        ),
        (EndTokens, "never", "choice-unknown: guide.end_tokens.mode, 'never'"),
    ],
)
def test_bad_settings(kind: Callable[[Any], object], value: Any, message: str) -> None:
    with refused(message):
        kind(value)
