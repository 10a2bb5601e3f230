"""Several forms in one batch: each row is what it is with its own form alone."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_sampler.check.reads import no_host_reads
from dllm_sampler.cli.main import main
from dllm_sampler.core.packing import HeadRows
from dllm_sampler.core.values import Query
from dllm_sampler.engine.readout import read
from dllm_sampler.generation.speculative import SpeculativeSampler
from dllm_sampler.guides import Choices, JsonSchema, Regex
from tests import toys
from tests.forms import LENGTH, MASK, VOCAB, laid_out, ruled, strings
from tests.refusals import refused
from tests.sampling import crossed, each, sampled
from tests.taped import on_tape

LISTED = ("(ab|c)*", "a?b{2}c?", "abab|cc")
PATTERNS = ["(abc|cd-){2}", "x(-x)*", "(?s).*"]
FORMS = [1, 0, 2, 1, 0]  # of `toys.PROMPTS`


@each("draws", [False, True])
def test_a_step_of_several_forms(draws: bool) -> None:
    """Automata of different sizes, two candidates of each row; a mask is asked about in the first two places only."""
    forms = [1, 0, 2, 1]
    canvas = laid_out([[True] * LENGTH] * 4, [[0] * LENGTH] * 4)
    query = Query.at(canvas, torch.tensor([[0, 1]]).expand(4, -1))
    head_rows = HeadRows.every(replace(query, ids=query.ids.repeat(1, 2, 1)))
    logits = 2 * torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(7)).double()
    several, rule = toys.changed(canvas, form=torch.tensor(forms)), ruled(LISTED, draws, posterior=True)
    with no_host_reads():
        found = read(logits.clone(), several, head_rows, rule)
    for row, form in enumerate(forms):
        own = read(logits.clone(), canvas, head_rows, ruled(LISTED[form], draws, posterior=True))
        assert torch.equal(found.token[row], own.token[row])
        torch.testing.assert_close(found.confidence[row], own.confidence[row])
        begins = {one[:2] for one in strings(LISTED[form])}
        assert all(tuple(tokens) in begins for tokens in found.token[row].tolist())


def test_the_mask_is_in_no_form() -> None:
    """Also where moves of no token fill up the lists of a smaller form, and the model wants a mask."""
    canvas = toys.changed(laid_out([[True] * LENGTH] * 2, [[0] * LENGTH] * 2), form=torch.tensor([0, 1]))
    rule = ruled(("c{4}", "(?s).*"), posterior=True)._replace(compat=True, needs=frozenset({"logits"}))
    logits = torch.zeros(2 * LENGTH, VOCAB).double()
    logits[:, MASK] = 9
    found = read(logits, canvas, HeadRows.every(Query.window(canvas)), rule)
    assert found.logits is not None and bool((found.logits[..., MASK] == -torch.inf).all())
    assert found.token[0].tolist() == [[3, 3, 3, 3]] and bool((found.confidence[0] == 1).all())


@pytest.mark.parametrize(
    ("scheduler", "temperature"), crossed(["threshold", "wino", "freedave"], [None, 1.0], together=0)
)
def test_rows_are_as_with_their_form_alone(scheduler: str, temperature: float | None) -> None:
    options: dict[str, Any] = {"scheduler": scheduler, "temperature": temperature}
    it = toys.sampler(guide=Regex(tuple(PATTERNS), posterior=True), **options)
    found = it.generate(toys.PROMPTS, max_new_tokens=14, forms=FORMS)
    assert found.texts is not None
    for row, (prompt, form) in enumerate(zip(toys.PROMPTS, FORMS, strict=True)):
        own = toys.sampler(guide=Regex(PATTERNS[form], posterior=True), **options)
        alone = own.generate(prompt, max_new_tokens=14, seed=row)
        assert re.fullmatch(PATTERNS[form], found.texts[row]) and alone.texts == [found.texts[row]]
        assert torch.equal(found.tokens[row], alone.tokens[0]) and found.nfe[row] == alone.nfe[0]
        assert torch.equal(found.trace.step_map[row, -14:], alone.trace.step_map[0, -14:])


@pytest.mark.slow
@pytest.mark.parametrize("batching", sampled(["in_flight", "static"]))
def test_rows_that_come_and_go(batching: Any) -> None:
    """Answers have forms, lengths and seeds of their own; two of each, and fewer places than answers."""
    it, lengths = toys.sampler(guide=Regex(tuple(PATTERNS)), temperature=1.0), [6, 8, 14, 5, 7]
    answers = it.generate_many(
        toys.PROMPTS, batch_size=3, max_new_tokens=lengths, forms=FORMS, samples=2, order="given", batching=batching
    )
    for answer in answers:
        at = answer.index
        seed = 2 * at + answer.sample
        alone = it.generate(toys.PROMPTS[at], max_new_tokens=lengths[at], forms=FORMS[at], seed=seed)
        assert torch.equal(answer.tokens, alone.tokens[0, : lengths[at]]) and answer.text is not None
        assert re.fullmatch(PATTERNS[FORMS[at]], answer.text)


@pytest.mark.slow
def test_a_stream_and_a_recording() -> None:
    it = toys.sampler(guide=Regex(tuple(PATTERNS), posterior=True))
    found = it.generate(toys.PROMPTS, max_new_tokens=14, forms=FORMS, samples=2)
    *_, last = it.stream(toys.PROMPTS, max_new_tokens=14, forms=FORMS)
    assert last.result is not None and found.texts is not None and last.result.texts == found.texts[::2]
    engine = on_tape(it)
    for forms in (FORMS, FORMS[::-1]):  # the second replays what the first recorded
        taped = it.generate(toys.PROMPTS, max_new_tokens=14, forms=forms)
        plain = toys.sampler(guide=Regex(tuple(PATTERNS), posterior=True))
        assert taped.texts == plain.generate(toys.PROMPTS, max_new_tokens=14, forms=forms).texts
    assert engine.replays > 0


def test_lists_of_each_kind() -> None:
    answers = toys.sampler(guide={"name": "choices", "choices": [["abc", "cd"], ["x"]]}).generate(
        toys.PROMPTS[:2], max_new_tokens=4, forms=[1, 0]
    )
    assert answers.texts is not None and answers.texts[0] == "x" and answers.texts[1] in ("abc", "cd")
    schemas = JsonSchema(({"type": "boolean"}, '{"enum": [1, 2]}'))
    assert len(schemas.expressions()) == schemas.forms == 2 and JsonSchema({"type": "null"}).forms == 0


@each(
    ("pattern", "forms", "said"),
    [
        (["a", "b"], None, "form-number: forms="),
        (["a"], None, "form-number: forms=0"),
        ("a", 0, "option-not-applicable"),
        (["a", "b"], [0, 2], "form-number: forms[1]=2"),
        (["a", "b"], -1, "form-number: -1"),
        (["a", "b"], [0, 1, 1], "length-mismatch"),
        (["a", "b"], "a", "option-type: 'a'"),
        (["a", "abcabc-xy"], [0, 1], "form-impossible: max_new_tokens"),
    ],
)
def test_wrong_numbers(pattern: Any, forms: Any, said: str) -> None:
    it = toys.sampler(guide={"name": "regex", "pattern": pattern})
    with refused(said):
        it.generate([[1], [2]], max_new_tokens=4, forms=forms)
    for call in (it.stream, it.generate_many):
        with refused(said):
            list(call([[1], [2]], max_new_tokens=4, forms=forms))


def test_a_form_too_long_is_refused_alone() -> None:
    it = toys.sampler(guide=Regex(("abc", "abcabc-xy")))
    found = it.generate_many(iter([[1], [2], [3]]), max_new_tokens=4, forms=[0, 1, 0], on_error="yield", order="given")
    assert [answer.finish_reason == "refused" for answer in found] == [False, True, False]


@each(
    ("make", "said"),
    [
        (lambda: Regex(("a", "")), "option-type: guide.regex.pattern"),
        (lambda: Regex(()), "option-type: guide.regex.pattern"),
        (lambda: Choices((("a",), ())), "form-invalid: guide.choices.choices"),
        (lambda: Choices((("a",), "b")), "option-type: guide.choices.choices"),
        (lambda: JsonSchema(({"type": "null"}, "")), "option-type: guide.json_schema.schema"),
        (lambda: toys.sampler(guide=Regex(("abc", "Zoe"))), "form-impossible"),
        (lambda: SpeculativeSampler(toys.sampler(guide="regex"), None), "options-conflict: guide=regex"),
        (
            lambda: SpeculativeSampler(toys.sampler(guide={"name": "grammar", "grammar": "json"}), None),
            "options-conflict: guide=grammar",
        ),
    ],
)
def test_wrong_settings(make: Any, said: str) -> None:
    with refused(said):
        make()


def test_prompts_with_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["guide=choices", "guide.choices.choices=[[Ada, Ben],[Cal]]", "max_new_tokens=4", "device=cpu"]
    lines = [{"prompt": "copy: Max", "form": 1}, {"prompt": "copy: Leo", "form": 0}]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main([*words, "prompts_file=a.jsonl"]) == 0
    first, second = capsys.readouterr().out.split()
    assert first == "Cal" and second in ("Ada", "Ben")
    assert main([*words, "copy: Max", "forms=1"]) == 0 and capsys.readouterr().out == "Cal\n"
    for given, said in (
        (["copy: Max"], "Set forms="),
        (
            ["copy: Max", "prompts_file=a.jsonl"],
            'prompt 1 names no form, but other prompts do. Give "form" for all prompts',
        ),
        (["forms=1", "prompts_file=a.jsonl"], "forms=1 and prompts_file=a.jsonl both name forms"),
        (["copy: Max", "forms=[0,1]"], "forms=[0, 1] has 2 numbers, and there is 1 prompt"),
    ):
        assert main([*words, *given]) == 2 and said in capsys.readouterr().err


@pytest.mark.slow
def test_a_field_form_that_means_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["prompts_file=a.jsonl", "max_new_tokens=4", "device=cpu"]
    lists = ["guide=choices", "guide.choices.choices=[[Ada, Ben],[Cal]]"]
    wrong = 'a.jsonl line 2: "form" is'
    for form, guide, said in (
        ('"poem"', [], None),  # another program's field: no guide is on the form
        ("7", ["guide=top_k", "temperature=1"], None),
        ('"poem"', lists, f'{wrong} "poem"'),
        ("2", lists, f"{wrong} 2"),
        ("true", lists, f"{wrong} true"),
        ("1", ["guide=choices", "guide.choices.choices=[Cal]"], f"{wrong} 1"),
        ("0", ["guide=choices", "guide.choices.choices=[Cal]"], None),
    ):
        first = '{"prompt": "copy: Ada", "form": 0}'
        Path("a.jsonl").write_text(f'{first}\n{{"prompt": "copy: Max", "form": {form}}}\n')
        assert main([*words, *guide]) == (2 if said else 0)
        out, err = capsys.readouterr()
        assert said in err if said else len(out.splitlines()) == 2


def test_an_answer_that_a_stop_string_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """It is not of the form, and that is the stop string's doing, not the guide's."""
    names = "(Ada|Ben|Cal|Dan)"
    words = ["copy: Ada, Ben, Cal, Dan", 'stop_strings=[", Cal"]', "block_length=2", "device=cpu"]
    assert main([*words, "guide=regex", f"guide.regex.pattern={names}(, {names}){{3}}"]) == 0
    out, err = capsys.readouterr()
    assert out == "Ada, Ben\n"
    assert err.splitlines()[0] == "the answer: cut at a stop string before it had the guide's form"
    assert main(words) == 0
    assert len(capsys.readouterr().err.splitlines()) == 1, "the user wanted it cut: there is nothing to say"
