"""Measures against figures worked out by hand or published."""

import json
import math

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from dllm_sampler.eval import curves, statistics
from dllm_sampler.eval.checked import parse
from dllm_sampler.eval.measures import summary
from dllm_sampler.eval.records import encoded_again
from dllm_sampler.eval.runner import History
from dllm_sampler.inputs.texts import decode
from tests import toys
from tests.eval.made import record
from tests.sampling import few


def test_each_definition_of_tokens_per_forward() -> None:
    one = record(answer=4, nfe=2, rows=20, seconds=0.5, batch=2, text_tokens=5)
    two = record(1, answer=2, ended=False, nfe=4, rows=10, canvas=6, seconds=0.5, batch=2, text_tokens=1)
    found = summary([one, two], "exact_match")
    assert found["answer_tokens_per_forward"] == pytest.approx((4 + 2) / (2 + 4))
    assert found["canvas_tokens_per_forward"] == pytest.approx((6 + 6) / (2 + 4))
    assert found["diffusion_gemma_tokens_per_forward"] == pytest.approx((4 / 2 + 2 / 4) / 2)
    assert found["dinfer_tokens_per_forward"] == pytest.approx((3 + 2) / (2 + 4))
    assert found["dinfer_mean_tokens_per_forward"] == pytest.approx((3 / 2 + 2 / 4) / 2)
    assert found["d3llm_tokens_per_forward"] == pytest.approx((5 + 1) / (2 + 4))
    assert found["answer_tokens_per_full_forward"] == pytest.approx(6 / (20 / 10 + 10 / 10))
    assert found["tokens_per_second"] == pytest.approx(6 / 0.5), "the batch's seconds count once"
    assert found["recompute_share"] == pytest.approx(30 / (2 * 10 + 4 * 10))
    assert found["nfe"] == 3 and found["full_forwards"] == pytest.approx(1.5)
    assert found["rows"] == 15 and found["seconds"] == 0.25
    assert found["answer_tokens"] == 3 and found["tokens_after_end"] == pytest.approx((1 + 3) / 2)


def test_tokens_of_texts_need_every_text() -> None:
    empty = record(1, text="", text_tokens=0, answer=1, nfe=1)
    assert summary([record(nfe=2), empty], "exact_match")["d3llm_tokens_per_forward"] == 3 / 3
    assert summary([empty], "exact_match")["d3llm_tokens_per_forward"] == 0
    assert summary([record(), record(1, text_tokens=None)], "exact_match")["d3llm_tokens_per_forward"] is None


def test_a_text_is_not_always_encoded_as_it_was_written() -> None:
    model = BPE({"a": 0, "b": 1, " ": 2, "ab": 3, "[EOS]": 4, "[BOS]": 5}, [("a", "b")])
    rules = Tokenizer(model)
    rules.decoder = Fuse()
    rules.post_processor = TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 5)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="[EOS]", bos_token="[BOS]")
    (text,) = decode([[0, 1, 3]], tokenizer, ())
    assert text == "abab" and tokenizer.encode(text) == [5, 3, 3]
    assert encoded_again(text, tokenizer) == 2, "three tokens on the canvas; what begins a text is no token of it"
    assert encoded_again("", tokenizer) == 0
    assert encoded_again(None, None) is None


def test_forwards_without_a_commit_by_hand() -> None:
    """Forward 0 wrote what stands, 1 what 2 took back, 3 nothing, 4 wrote again."""
    one = record(nfe=5, step_map=[0, 0, 4, -1, -1, -1], revisions=[[1, 2, "x"], [2, 2, None]])
    assert one.idle == 2
    assert summary([one, record(1)], "exact_match")["forwards_without_commit"] == 1


@few("scheduler", ["fixed", "dynamic", "wino", "rcr", "remdm", "editing"])
def test_forwards_without_a_commit_of_those_that_take_back(scheduler: str) -> None:
    """As counted while they go on: a token that is noise again, or another one, was committed nevertheless."""
    history = History()
    views = list(toys.sampler(scheduler=scheduler).stream(toys.PROMPTS, max_new_tokens=17, seed=0))
    for view in views:
        history.note(view.step, view.step_map, view.tokens)
    wrote = torch.stack([(view.step_map == view.step - 1).any(1) for view in views]).sum(0)
    last = views[-1]
    rows = zip(last.nfe.tolist(), last.step_map.tolist(), history.revisions, strict=True)
    found = [record(nfe=nfe, step_map=steps, revisions=revisions).idle for nfe, steps, revisions in rows]
    assert found == (last.nfe - wrote).tolist()


@pytest.mark.slow
def test_forwards_without_a_commit_are_those_that_only_store() -> None:
    """The published store passes of a block-causal model, and its prefill: what riding along saves."""
    ride, apart = (
        toys.sampler("causal", scheduler="dynamic", cache={"name": "block_causal", "store_pass": how}).generate(
            toys.PROMPTS, max_new_tokens=17
        )
        for how in ("ride", "separate")
    )
    idle = [
        [record(nfe=nfe, step_map=steps).idle for nfe, steps in zip(*one, strict=True)]
        for one in ((found.nfe.tolist(), found.step_map.tolist()) for found in (ride, apart))
    ]
    assert not any(idle[0]) and all(idle[1])
    assert idle[1] == (apart.nfe - ride.nfe).tolist()


def test_share_of_the_oracle_needs_every_sample() -> None:
    found = summary([record(nfe=4, oracle_nfe=1), record(1, nfe=2, oracle_nfe=2)], "exact_match")
    assert found["oracle_share"] == pytest.approx(3 / 6)
    assert found["oracle_tokens_per_forward"] == pytest.approx(8 / 3)
    assert summary([record(), record(1, oracle_nfe=None)], "exact_match")["oracle_share"] is None


def test_revisions_count_commits_that_did_not_stay() -> None:
    taken_back = [[0, 1, "x"], [1, 1, None], [0, 2, "y"]]
    assert summary([record(revisions=taken_back)], "exact_match")["revisions"] == 2


def test_order_with_and_without_padding() -> None:
    left_to_right = record(step_map=[0, 1, 2, 3, -1, 0], answer=4)
    found = summary([left_to_right], "exact_match")
    assert found["kendall"] == 1 and found["spearman"] == 1
    # positions 0 1 2 3 5, steps 0 1 2 3 0: of 10 pairs 6 agree, 3 do not, 1 is a tie
    assert found["kendall_padded"] == pytest.approx(3 / math.sqrt(10 * 9))
    assert found["spearman_padded"] == pytest.approx(_pearson([1, 2, 3, 4, 5], [1.5, 3, 4, 5, 1.5]))
    assert summary([record(step_map=[0] * 6)], "exact_match")["kendall"] is None


def _pearson(one: list[float], two: list[float]) -> float:
    a, b = sum(one) / len(one), sum(two) / len(two)
    above = sum((x - a) * (y - b) for x, y in zip(one, two, strict=True))
    return above / math.sqrt(sum((x - a) ** 2 for x in one) * sum((y - b) ** 2 for y in two))


def test_wilson() -> None:
    assert statistics.wilson(50, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    low, high = statistics.wilson(10, 10)
    assert (low, high) == pytest.approx((0.72247, 1.0), abs=1e-5)


def test_difference() -> None:
    """Newcombe's published example (1998, method 10): 56 of 70 against 48 of 80."""
    one, other = ((right / count, *statistics.wilson(right, count)) for right, count in ((56, 70), (48, 80)))
    assert statistics.difference(one, other) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_equal_scores_are_not_certain() -> None:
    assert statistics.interval([0.5] * 4) == statistics.wilson(2, 4)
    low, high = statistics.interval([0.5] * 4)
    assert low < 0.2 and high > 0.8


def test_bootstrap_of_a_ratio() -> None:
    above, below = [1.0, 3.0] * 50, [1.0, 1.0] * 50
    low, high = statistics.bootstrap(above, below)
    error = 1.96 * math.sqrt(1 / 100)
    assert low == pytest.approx(2 - error, abs=0.05) and high == pytest.approx(2 + error, abs=0.05)
    assert statistics.bootstrap(above, below) == (low, high), "seeded"
    assert statistics.interval([0.25, 0.75]) != statistics.wilson(1, 2)


def test_pbx_as_published() -> None:
    """LLaDA 1.5 under thresholds 1.0 to 0.5: the project's site states 4.09, 4.82 and 5.42."""
    points = [(1.33, 0.864), (3.42, 0.838), (4.53, 0.775), (5.62, 0.683), (6.55, 0.579), (8.27, 0.472)]
    found = [curves.pbx(points, least, interpolate=True) for least in (0.8, 0.75, 0.7)]
    assert found == pytest.approx([4.09, 4.82, 5.42], abs=0.01)
    assert curves.pbx(points, 0.8, interpolate=False) == 3.42
    assert curves.pbx(points, 0.9, interpolate=True) == 0
    assert curves.pbx([(2, sum([0.7] * 20) / 20)], 0.7, interpolate=False) == 2, "0.7 but for rounding"
    assert curves.pbx(points, 0.4, interpolate=True) == 8.27, "nothing beyond the last point"


def test_aup() -> None:
    assert curves.aup([(1.0, 0.8)], 0.8) == pytest.approx(80), "one point at rate 1: its accuracy"
    weight = math.exp(-3 * (1 - 76 / 80))
    by_hand = 1 * 80 + 0.5 * (3 - 1) * (76 * weight + 80)
    assert curves.aup([(3.0, 0.76), (1.0, 0.8), (5.0, 0.7)], 0.8) == pytest.approx(by_hand), "5.0 is dropped"
    assert curves.aup([(1.0, 0.8), (2.0, 0.75)], 0.8) > 80, "exactly 5 points lower is kept"
    assert curves.aup([(1.0, 0.0)], 0.0) == 0


def test_parallelizability_and_adaptive_oracle() -> None:
    assert curves.parallelizability({1: 1.0, 2: 0.5, 4: 0.25}) == pytest.approx(3 / 1.75)
    assert curves.parallelizability({1: 0.0}) == 0
    # sample 0 is right at both settings, sample 1 at the slow one alone
    assert curves.adaptive_oracle([[(8, 1.0), (8, 1.0)], [(2, 1.0), (2, 0.0)]]) == (5, 1.0)


def test_front() -> None:
    points = {"a": (1.0, 0.9), "b": (2.0, 0.9), "c": (3.0, 0.5), "d": (3.0, 0.4), "e": (2.0, 0.9)}
    assert curves.front(points) == {"b", "c", "e"}


def test_a_record_survives_json() -> None:
    one = record(revisions=[(0, 1, None)])
    assert parse(json.dumps(one.line()).encode(), None) == one
    assert set(one.line()["times"]) == {"seconds", "batch", "peak_memory"}
    with pytest.raises(ValueError, match="schema"):
        parse(json.dumps({**one.line(), "schema": 1}).encode(), None)
