"""Guides on the form of an answer in SGLang: its requests tell how long an answer may be and what stands in it."""

from __future__ import annotations

import gc
import logging
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dllm_sampler import UserError
from dllm_sampler.integrations import sglang
from dllm_sampler.integrations.settings import CPU, Sampling
from tests import toys
from tests.contract.cases import Settings
from tests.integrations.sglang_stubs import Req, Request, Server, algorithm
from tests.integrations.test_block import LENGTH, PATTERN, PROMPTS, causal
from tests.refusals import refused
from tests.sampling import sampled, sampled_rows

REGEX = {"name": "regex", "pattern": PATTERN}
HOT: dict[str, Any] = {"temperature": 1.0, "top_k": 2**30}
GREEDY: dict[str, Any] = {}


def server(settings: Settings, fdfo: bool = True, **options: Any) -> Server:
    return Server(algorithm(sglang.NAME, settings, fdfo), causal(), tokenizer=toys.tokenizer(), **options)


def requests(**options: Any) -> list[Request]:
    return [Request(prompt, tokens, rid=str(row), **options) for row, (prompt, tokens) in enumerate(PROMPTS)]


def text(tokens: list[int]) -> str:
    return str(toys.tokenizer().decode(tokens))


def alone(settings: Settings, one: Request, **options: Any) -> list[int]:
    """The tokens of `Sampler`."""
    sampler = toys.sampler("causal", **settings, **options)
    found = sampler.generate([one.prompt], max_new_tokens=one.tokens, seed=[sglang._seed(one.rid)])
    assert found.valid is not None and found.valid.all()
    return found.trace.decoded[0, -one.tokens :].tolist()


@pytest.mark.parametrize(
    ("scheduler", "posterior", "options", "fdfo"),
    sampled_rows(
        [
            ({"name": "threshold", "threshold": 0.6}, False, GREEDY, True),
            ({"name": "threshold", "threshold": 0.6}, True, HOT, True),
            ("random_order", False, HOT, False),
        ],
        lambda row: [None],
    ),
)
def test_forms_of_served_answers_equal_those_of_sampler(
    registered: str, scheduler: Any, posterior: bool, options: dict[str, Any], fdfo: bool
) -> None:
    """Answers of several lengths and several blocks, in one batch; in the first mode they arrive apart."""
    settings = {"scheduler": scheduler, "guide": {**REGEX, "posterior": posterior}}
    for one in server(settings, fdfo).serve(requests(**options), [0, 2, 3, 0] if fdfo else None):
        assert one.answer == alone(settings, one, temperature=1.0 if options else None)


@pytest.mark.parametrize("options", sampled([GREEDY, HOT]))
def test_a_request_that_loses_its_place_goes_on_with_its_answer(registered: str, options: dict[str, Any]) -> None:
    """SGLang keeps the whole blocks of a request that it retracts, and computes them again."""
    settings = {"scheduler": {"name": "fixed", "steps": 3}, "guide": REGEX}
    engine, found = server(settings), requests(**options)
    for round_ in range(40):
        engine.batch = [one for one in found if not one.over]
        if engine.batch:
            engine.round()
        if round_ in (1, 6, 9):
            engine.retract(found[0])
    assert all(one.over for one in found)
    well = server(settings).serve(requests(**options))
    assert [one.answer for one in found] == [one.answer for one in well]


def test_a_request_that_is_given_up_leaves_nothing_behind(registered: str) -> None:
    settings = {"scheduler": {"name": "fixed", "steps": 3}, "guide": REGEX}
    engine, found = server(settings), requests(**HOT)
    engine.batch = found[:2]
    for _ in range(5):
        engine.round()
    known = engine.algorithm
    assert set(known.requests) == {"0", "1"} and known.made
    found[0] = Request(*PROMPTS[0], rid="0", **HOT)  # aborted, and asked for again
    engine.serve(found[:1])
    assert found[0].answer == server(settings).serve(requests(**HOT)[:1])[0].answer
    del found, engine.batch[:]
    gc.collect()
    assert not known.requests and not known.made


def test_an_answer_too_short_for_its_form_is_the_beginning_of_one(registered: str) -> None:
    """As SGLang's own grammars do: it asks for few tokens itself, to see whether a server is well."""
    settings = {"scheduler": "threshold", "guide": {"name": "regex", "pattern": "[d-f]{5}-[0-9]{4}"}}
    for tokens, pattern in ((1, "[d-f]{4}"), (7, "[d-f]{5}-[0-9]{4}")):  # to the end of the block
        (one,) = server(settings).serve([Request([5, 11], tokens)])
        assert re.fullmatch(pattern, text(one.ids[2:]))
    # A prompt with several samples is computed first by a request for no token, whose block is thrown away.
    rule = algorithm(sglang.NAME, settings, True)
    assert rule.validate_request(Req(Request([5, 11], 0), toys.tokenizer())) is None


def test_tokens_that_end_an_answer_do_so_where_its_form_ends(registered: str) -> None:
    settings = {"scheduler": "threshold", "guide": {"name": "regex", "pattern": "[d-f]{5}"}}
    (plain,) = server(settings).serve([Request([5, 11], 16)])
    other = plain.answer[0]  # a letter of the form, which ends answers now
    engine = server(settings, ends=(toys.EOS, other))
    (one,) = engine.serve([Request([5, 11], 16)])
    assert engine.algorithm.serving.model.ends == (toys.EOS, other)
    answer = one.answer[: next(at for at, token in enumerate(one.answer) if token in (toys.EOS, other))]
    assert re.fullmatch("[d-f]{5}", text(answer)) and other not in answer


def test_a_schema_and_choices_are_forms_too(registered: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    for guide, pattern in (
        ({"name": "choices", "choices": ["abc", "fed"]}, "abc|fed"),
        ({"name": "json_schema", "schema": schema}, r'\{ ?"a" ?: ?(true|false) ?\}'),
    ):
        found = server({"scheduler": "klass", "guide": guide}).serve([Request([5, 11], 16, rid="x")])
        tokens = found[0].answer
        tokens = tokens[: tokens.index(toys.EOS)] if toys.EOS in tokens else tokens
        assert re.fullmatch(pattern, text(tokens))


@pytest.mark.filterwarnings("ignore:scheduler=eoser counts over an answer")
def test_a_scheduler_may_know_the_end_token(registered: str) -> None:
    engine = server({"scheduler": "eoser"})
    assert all(one.over for one in engine.serve(requests()))
    eoser = engine.algorithm.serving._rule(
        Sampling(), engine.algorithm.serving.model, toys.VOCAB, CPU, torch.float64
    ).plugins.scheduler
    assert eoser.end_ids == (toys.EOS,)
    assert "scheduler=eoser needs" in engine.algorithm.validate_request(Req(Request([5], 9), None, ()))


class NoEnd:
    """A tokenizer without an end token."""


def test_requests_without_a_tokenizer_are_refused(registered: str) -> None:
    one = algorithm(sglang.NAME, {"scheduler": "threshold", "guide": REGEX}, True)
    assert "guide=" in one.validate_request(Req(Request([5], 9)))
    assert "needs an end-of-text token" in one.validate_request(Req(Request([5], 9), NoEnd(), ()))
    assert one.validate_request(Req(Request([5], 9), toys.tokenizer())) is None


def test_a_request_that_was_not_shown_ends(registered: str, logged: list[logging.LogRecord]) -> None:
    engine = server({"scheduler": "threshold", "guide": REGEX})
    one = Request([5, 11], LENGTH)
    one.kept = Req(one)
    engine.serve([one])
    assert one.failed and "request 0 ends here: SGLang has not validated the request" in logged[0].getMessage()


WRONG = {
    "{name: regex, pattern: '['}": "'['",
    "{name: choices, choices: [[a], [b]]}": "guide=choices has a list of forms",
    "{name: grammar, grammar: json}": "guide=grammar judges whole answers",
    "[{name: regex, pattern: a}, {name: choices, choices: [a]}]": "both restrict the form of the answer",
}


@pytest.mark.parametrize("guide", WRONG)
def test_wrong_forms_are_refused_before_the_model_is_loaded(registered: str, guide: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        configure(tmp_path, guide)
    assert WRONG[guide] in str(error.value) and "\n" not in str(error.value)


def test_a_form_wants_a_tokenizer(registered: str, tmp_path: Path) -> None:
    configure(tmp_path, "{name: regex, pattern: a}")
    with refused("tokenizer-missing: guide=regex"):
        configure(tmp_path, "{name: regex, pattern: a}", skip_tokenizer_init=True)


def configure(folder: Path, guide: str, **more: Any) -> None:
    (folder / "x.yaml").write_text(f"{{scheduler: threshold, guide: {guide}}}")
    cls = import_module("sglang.srt.dllm.algorithm").algo_name_to_cls[sglang.NAME]
    cls.configure_server_args(SimpleNamespace(dllm_algorithm_config=str(folder / "x.yaml"), **more))
