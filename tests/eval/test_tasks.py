"""Tasks: the same samples everywhere, right answers accepted, wrong ones told apart."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise, permutations
from math import inf, log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dllm_sampler import config
from dllm_sampler.eval.tasks import fluency, listing, overlap, writing
from dllm_sampler.eval.tasks.base import Answer, Sample, Task
from dllm_sampler.models.mini_tasks import sudokus
from tests.refusals import refused
from tests.sampling import each

OTHERS = ("jsonl", "protocol", "unconditional")  # they need data, or repeat one prompt
NAMES = [name for name in config.names("task") if name not in OTHERS]
LINES = ("copy", "reverse", "sort", "shuffle", "replace_index", "replace_random", "insert_index", "insert_random",
         "remove_index", "remove_random")  # fmt: skip


def task(name: str, **fields: Any) -> Any:
    return config.build("task", {"name": name, **fields})


def graded(of: Task, sample: Sample, text: str, length: int = 5) -> Mapping[str, float]:
    return of.grade(sample, Answer(text, [0] * length))


# rouge and whole sudokus take long.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ("summarise", "sudoku") else ()) for name in NAMES]
)
def test_samples(name: str) -> None:
    """Reproducible, independent of how many there are, other ones for another seed; facts survive JSON."""
    few, more, other = (task(name, count=count, seed=seed).samples() for count, seed in ((5, 0), (12, 0), (12, 1)))
    assert list(few) == list(more[:5])
    assert [sample.index for sample in more] == list(range(12))
    assert name == "ideal" or list(more) != list(other)
    assert [json.loads(json.dumps(sample.facts)) for sample in more] == [dict(sample.facts) for sample in more]
    found = task(name)
    assert found.dependency in ("low", "high")
    if found.denoiser() is None:
        assert found.name == name
        assert len({str(sample.prompt) for sample in more}) > 8
    score = found.grade(few[0], Answer("", []))
    assert score[found.score] == 0.0
    assert all(isinstance(value, float) for value in score.values())


@each("name", NAMES)
def test_fields_are_the_yaml(name: str) -> None:
    settings = {key for key in config.entry("task", name).settings if key != "_target_"}
    assert settings == {field.name for field in fields(task(name))}


@each("name", LINES)
@each("items", [(3, 4, 5, 6), (15,)])
def test_waiting_line_accepts_right_answers(name: str, items: tuple[int, ...]) -> None:
    line = task(name, count=5, items=list(items))
    assert line.max_new_tokens == (32 if max(items) == 6 else 128)
    for sample in line.samples():
        queue, word, index = (sample.facts[key] for key in ("queue", "word", "index"))
        assert len(queue) == items[sample.index % len(items)]
        right = listing.written(line.edit(queue, word, index))
        found = graded(line, sample, right)
        assert (found["score"], found["score_strict"]) == (1, 1)
        assert not any(value for key, value in found.items() if key.startswith("error"))
        sloppy = graded(line, sample, "Here: " + right.replace('"', "").replace(", ", ","))
        assert (sloppy["score"], sloppy["score_strict"], sloppy["error_format"]) == (1, 0, 1)
        example = sample.prompt[1]["content"]
        assert listing.strict(example) is not None
        assert graded(line, sample, example)["score"] == 0


@pytest.mark.slow
def test_how_many_answers_are_right() -> None:
    """Every edit of the input is tried: as many are accepted as C(Y|X) is stated for."""

    def count(name: str, candidates: Any) -> int:
        line = task(name, items=[4])
        sample = line.samples()[0]
        queue, word = sample.facts["queue"], sample.facts["word"]
        tried = {tuple(queue[i] if i < 4 else word for i in one) for one in candidates}
        return sum(bool(graded(line, sample, listing.written(one))["score"]) for one in tried)

    four = list(permutations(range(5), 4))
    assert count("shuffle", four) == 23
    assert count("replace_random", four) == 4
    assert count("copy", four) == 1
    assert count("insert_random", list(permutations(range(5), 5))) == 5
    assert count("remove_random", list(permutations(range(5), 3))) == 4
    assert count("remove_index", list(permutations(range(5), 3))) == 1


def line_of(name: str, queue: list[str], word: str = "", index: int = 0, **fields: Any) -> tuple[Any, Sample]:
    return task(name, **fields), Sample(0, "", {"queue": queue, "word": word, "index": index})


def test_rules_by_hand() -> None:
    queue = ["Ada York", "Ben Abbott", "Cal Moss"]
    line, sample = line_of("sort", queue)
    by_last, by_first = '["Ben Abbott", "Cal Moss", "Ada York"]', '["Ada York", "Ben Abbott", "Cal Moss"]'
    assert (graded(line, sample, by_last)["score"], graded(line, sample, by_first)["score"]) == (1, 0)
    line, sample = line_of("sort", queue, compat=True)
    assert (graded(line, sample, by_last)["score"], graded(line, sample, by_first)["score"]) == (0, 1)
    line, sample = line_of("replace_random", queue, "Eve Hale")
    assert graded(line, sample, '["Ada York", "Eve Hale", "Cal Moss"]')["score"] == 1
    assert graded(line, sample, '["Eve Hale", "Eve Hale", "Cal Moss"]')["score"] == 0
    assert graded(line, sample, '["Ada York", "Ben Abbott", "Cal Moss", "Eve Hale"]')["score"] == 0
    line, sample = line_of("insert_index", queue, "Eve Hale", 3)
    assert graded(line, sample, '["Ada York", "Ben Abbott", "Cal Moss", "Eve Hale"]')["score"] == 1
    line, sample = line_of("insert_random", queue, "Eve Hale")
    assert graded(line, sample, '["Eve Hale", "Ada York", "Ben Abbott", "Cal Moss", "Eve Hale"]')["score"] == 0


def test_mistakes_by_hand() -> None:
    line, sample = line_of("copy", ["Ada York", "Ben Abbott", "Cal Moss"])

    def found(text: str, length: int = 5) -> set[str]:
        return {key for key, value in graded(line, sample, text, length).items() if key.startswith("error") and value}

    assert found('["Ada York", "Ada York", "Cal Moss"]') == {"error_duplicate", "error_missing"}
    assert found('["Ada Abbott", "Ben Abbott", "Cal Moss"]') == {"error_mixed_name", "error_missing"}
    assert found('["Zoe Hale", "Ben Abbott", "Cal Moss"]') == {"error_unknown", "error_missing"}
    assert found('["Cal Moss", "Ben Abbott", "Ada York"]') == {"error_operation"}
    assert found('["Ada York", "Ben', 32) >= {"error_truncated", "error_missing"}
    assert "error_early_end" in found('["Ada York", "Ben Abbott"')
    assert found('["Ada York", "Ben Abbott", "Cal Moss"', 32) == {"error_format"}, "all there, only cut"


@each(
    ("text", "loose", "strict"),
    [
        ('["A B", "C D"]', ["A B", "C D"], ["A B", "C D"]),
        ('["A B","C D"]', ["A B", "C D"], None),
        ("A B, C D", ["A B", "C D"], None),
        ('[1] then ["A B"] and more', ["A B"], ["A B"]),
        ('["A B", , "C D", ]', ["A B", "C D"], None),
        ('["A "B"", "C"]', ['A "B', "C"], None),
        ("[]", [], None),
        ("['A']", ["'A'"], None),
    ],
)
def test_parsers(text: str, loose: list[str], strict: list[str] | None) -> None:
    assert listing.loose(text) == loose
    assert listing.strict(text) == strict


def test_template() -> None:
    sample = task("insert_index", template="{queue} {word} {index}").samples()[0]
    assert sample.prompt[2]["content"].endswith(f"{sample.facts['word']} {sample.facts['index']}")
    with refused("option-syntax"):
        task("copy", template="{people}")
    with refused("option-syntax"):
        task("copy", template="{queue.people}")
    with refused("option-syntax"):
        task("copy", template="Say it again.")


def test_a_latin_square_has_room() -> None:
    for side in range(2, 10):
        square = task("latin_square", side=side)
        assert square.max_new_tokens >= 2 * side**2, "cells, what stands between them, and an end token"
    assert task("latin_square").max_new_tokens == 64


def test_latin_square() -> None:
    square, sample = task("latin_square"), Sample(0, "", {"symbols": list("ABCD")})
    right = "A,B,C,D\nB,A,D,C\nC,D,A,B\nD,C,B,A"
    assert graded(square, sample, right)["score_strict"] == 1
    spaced = graded(square, sample, "Sure:\n" + right.replace(",", ", "))
    assert (spaced["score"], spaced["score_strict"]) == (1, 0)
    wide = right.replace("A,B,C,D", "A,B,C,D,A")
    assert graded(square, sample, wide)["score"] == 0
    assert graded(task("latin_square", compat=True), sample, wide)["score"] == 1
    columns = graded(square, sample, "\n".join(["A,B,C,D"] * 4))
    assert (columns["score"], columns["error_columns"]) == (0, 1)
    assert graded(square, sample, "A,B,C,D\nB,A", 64)["error_truncated"] == 1


def test_latin_example_is_right() -> None:
    for sample in task("latin_square", count=10).samples():
        example = sample.prompt[1]["content"]
        symbols = sorted(example.splitlines()[0].split(","))
        assert graded(task("latin_square"), Sample(0, "", {"symbols": symbols}), example)["score_strict"] == 1


@each("holes", [4, 8])
def test_sudoku_has_one_solution(holes: int) -> None:
    assert len(sudokus()) == 288
    grids = [grid.replace(", ", "\n") for grid in sudokus()]
    sudoku = task("sudoku", count=10, holes=holes)
    for sample in sudoku.samples():
        puzzle, solution = sample.facts["puzzle"], sample.facts["solution"]
        assert puzzle.count("0") == holes
        fits = [grid for grid in grids if all(a in ("0", b) for a, b in zip(puzzle, grid, strict=True))]
        assert fits == [solution]
        assert graded(sudoku, sample, solution)["score_strict"] == 1
        assert graded(sudoku, sample, "Here: " + solution.replace("\n", " "))["score"] == 0
        spaced = "\n".join(" ".join(row) for row in solution.splitlines())
        assert graded(sudoku, sample, "Here:\n" + spaced)["score"] == 1
        other = next(grid for grid in grids if grid != solution)
        assert graded(sudoku, sample, other)["error_given"] == 1


def test_words() -> None:
    words, sample = task("words_hard"), Sample(0, "", {"words": ["pine", "goal"]})
    assert graded(words, sample, "The goal stood below a pine.")["score"] == 1
    assert graded(words, sample, "The goal stood below.")["words_included"] == 0.5
    assert graded(words, sample, "The goal stood stood below a pine.")["score"] == 0
    assert len(task("words_medium", size=7).samples()[0].facts["words"]) == 7


@each(
    ("text", "good"),
    [
        ("An honest man bought a unicorn.", 1),
        ("An herb is a herb.", 1),
        ("It was an hour, she said (in a whisper).", 1),
        ("He said: “Go!”", 1),
        ("", 0),
        ("the cat sat.", 0),
        ("The cat sat", 0),
        ("The the cat sat.", 0),
        ("A apple fell.", 0),
        ("An dog barked.", 0),
        ("The cat (sat.", 0),
        ('He said "go.', 0),
        ("The cat sat.<|endoftext|>", 0),
        ("To be or to be or to be or to be.", 0),
    ],
)
def test_fluency_proxy(text: str, good: int) -> None:
    assert fluency.fluency_proxy(text) == good


def test_overlap() -> None:
    text = "The quick brown fox jumps over the lazy dog."
    assert overlap.bleu(text, text) == pytest.approx(1)
    assert overlap.bleu("A slow cat.", text) == 0
    # 5 of 5, 4 of 4, 3 of 3, 2 of 2 n-grams, and a brevity penalty of exp(1 - 10/5)
    assert overlap.bleu("The quick brown fox jumps", text) == pytest.approx(0.36788, abs=1e-4)
    found = overlap.rouge("the cats sat", "the cat sat down")
    assert found["rouge_1"] == found["rouge_l"] == pytest.approx(2 * 1 * 0.75 / 1.75)


def test_paraphrase_and_summary() -> None:
    paraphrase = task("paraphrase")
    sample = paraphrase.samples()[0]
    assert graded(paraphrase, sample, sample.facts["text"])["score"] == pytest.approx(0)
    assert all(word in sample.facts["text"] for word in sample.facts["kept"])
    summarise = task("summarise")
    for sample in summarise.samples()[:20]:
        assert "{" not in sample.prompt[0]["content"] + sample.facts["summary"]
        assert graded(summarise, sample, sample.facts["summary"])["rouge_l"] == 1
        assert fluency.fluency_proxy(sample.facts["summary"])


def test_texts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "One."}\n{"text": "Two."}\n')
    assert [sample.facts["text"] for sample in task("paraphrase", file=str(path)).samples()] == ["One.", "Two."]
    with refused('example-invalid: line 1, "dialogue"'):
        task("summarise", file=str(path)).samples()
    path.write_text('{"dialogue": "A.", "summary": "S."}\n\n{"dialogue": "B."}\n')
    with refused('example-invalid: line 3, "summary"'):
        task("summarise", file=str(path)).samples()
    with refused("file-unreadable: none"):
        task("paraphrase", file=str(tmp_path / "none")).samples()
    path.write_text("{")
    with refused("json-invalid"):
        task("paraphrase", file=str(path)).samples()


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "language_tool_python", None)
    with refused("package-missing: task.grammar, language_tool_python"):
        task("words_easy", grammar="languagetool")
    with refused("choice-unknown: task.grammar"):
        task("words_easy", grammar="spacy")
    monkeypatch.setitem(sys.modules, "bert_score", None)
    monkeypatch.setattr(writing, "find_spec", lambda name: None)
    with refused("package-missing: task.bert_score"):
        task("paraphrase", bert_score=True)


def test_grammar_counts_where_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tool:
        def __init__(self, language: str, remote_server: str | None = None):
            if remote_server != "http://localhost:1":
                raise OSError("no connection")

        def check(self, text: str) -> list[str]:
            return ["a match"] if "bad" in text else []

    monkeypatch.setitem(sys.modules, "language_tool_python", SimpleNamespace(LanguageTool=Tool))
    fluency.tool.cache_clear()
    words, sample = task("words_easy", grammar="http://localhost:1"), Sample(0, "", {"words": ["pine"]})
    good, bad = (graded(words, sample, text) for text in ("the pine", "The bad pine."))
    assert (good["score"], good["grammar"], good["fluency_proxy"]) == (1, 1, 0)
    assert (bad["score"], bad["grammar"], bad["fluency_proxy"]) == (0, 0, 1)
    with refused("package-missing: task.grammar=http://localhost:2, no connection, Check the URL"):
        task("words_easy", grammar="http://localhost:2")
    with refused("package-missing: task.grammar=languagetool, no connection, Install Java 17"):
        task("words_easy", grammar="languagetool")
    monkeypatch.setattr(Tool, "check", lambda self, text: 1 / 0)
    with refused("package-missing: task.grammar=http://localhost:1, division by zero, task.grammar=null"):
        graded(words, sample, "the pine")
    fluency.tool.cache_clear()


def test_ideal_and_markov() -> None:
    ideal = task("ideal", operation="shuffle", items=3)
    sample = ideal.samples()[0]
    assert ideal.max_new_tokens == 3
    assert [ideal.grade(sample, Answer("", ids))["score"] for ids in ([2, 0, 1], [0, 0, 1], [0, 1])] == [1, 0, 0]
    chain = task("markov", length=4, states=3)
    sample = chain.samples()[0]
    found = chain.grade(sample, Answer("", [0, 1, 2, 0]))
    rows = chain.law.rows
    path = [sample.facts["start"], 0, 1, 2, 0]
    expected = sum(log(rows[a][b]) for a, b in pairwise(path)) / 4
    assert found["log_likelihood"] == pytest.approx(expected)
    assert 0 < found["score"] <= 1
    assert chain.grade(sample, Answer("", [0, 1]))["error_truncated"] == 1
    answers = [Answer("", [0, 1, 2, 0])] * 5
    assert chain.together([sample] * 5, answers)["transition_tv"] > 0
    assert chain.together([sample], [Answer("", [0])]) == {}


@each(
    ("name", "given", "said"),
    [
        ("copy", {"items": [1]}, "option-range: task.items=[1]"),
        ("copy", {"items": 3}, "option-type: task.items=3, a list as [a,b]"),
        ("copy", {"template": ""}, "option-syntax: task.template='', {queue}"),
        ("copy", {"template": "{queue} {word}"}, "option-syntax: Use {queue}, and write"),
        ("copy", {"template": '{queue} {"a": 1}'}, 'option-syntax: {"a": 1}, {{ and }}'),
        ("copy", {"template": "{queue} {"}, "option-syntax: {queue}"),
        ("insert_index", {"template": "{queue} {word}"}, "option-syntax: {queue}, {word}, {index}"),
        ("copy", {"count": 0}, "option-range: task.count"),
        ("latin_square", {"side": 1}, "option-range: task.side"),
        ("sudoku", {"holes": 14}, "option-range: 10"),
        ("words_easy", {"size": 0}, "option-range: task.size"),
        ("mini", {"operation": "coyp"}, "choice-unknown: 'copy'"),
        ("ideal", {"operation": "shufle"}, "choice-unknown: 'shuffle'"),
        ("ideal", {"operation": "latin_square"}, "option-range: task.items=5, 4"),
        ("markov", {"states": 1}, "option-range: task.states=1"),
        ("markov", {"concentration": inf}, "option-range: task.concentration=inf"),
    ],
)
def test_mistakes_are_refused(name: str, given: dict[str, Any], said: str) -> None:
    with refused(said):
        task(name, **given)
