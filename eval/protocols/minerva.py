"""Grades of MATH in a process of its own: sympy's parser needs antlr 4.11 there, and Hydra needs 4.9.

`python minerva.py OLD NEW` reads lines of JSON with `gold` or `solution`, and `text`. It writes a line for each.
OLD and NEW are the files `minerva_math/utils.py` of lm-evaluation-harness 0.4.8 and of the installed one.
"""

import importlib.util
import json
import sys
from collections.abc import Mapping
from typing import Any


def _load(name: str, file: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def grade_minerva(old: Any, new: Any, row: Mapping[str, str]) -> dict[str, Any]:
    """Return both metrics of minerva_math by the rules of lm-eval 0.4.8, and by those of the installed version."""
    found: dict[str, Any] = {}
    for name, rules in (("none", old), ("today", new)):
        answer = rules.normalize_final_answer(rules.remove_boxed(rules.last_boxed_only_string(row["solution"])))
        grades = rules.process_results({"answer": answer, "solution": row["solution"]}, [row["text"]])
        found |= {f"{metric},{name}": int(value) for metric, value in grades.items()}
    return found


def grade_opencompass(row: Mapping[str, str]) -> dict[str, Any]:
    """Return the grade and the extracted answer of OpenCompass's evaluator by math-verify."""
    from latex2sympy2_extended import NormalizationConfig  # pyright: ignore[reportMissingImports]
    from math_verify import (  # pyright: ignore[reportMissingImports]
        ExprExtractionConfig,
        LatexExtractionConfig,
        parse,
        verify,
    )

    either: Any = [LatexExtractionConfig(), ExprExtractionConfig()]
    gold = parse(f"${row['gold']}$", extraction_mode="first_match", extraction_config=either)
    if not gold:
        return {"correct": 0, "extracted": "[]"}
    cleaning = NormalizationConfig(
        nits=False, malformed_operators=False, basic_latex=True, equations=True, boxed="all", units=True
    )
    latex = LatexExtractionConfig(
        normalization_config=cleaning, boxed_match_priority=0, try_extract_without_anchor=False
    )
    given = parse(row["text"], extraction_mode="first_match", extraction_config=[latex])
    return {"correct": int(bool(verify(given, gold))), "extracted": str(given)}


def main(old_file: str, new_file: str) -> None:
    """Grade the lines of standard input, one after the other, until it ends."""
    old, new = _load("minerva_old", old_file), _load("minerva_new", new_file)
    for line in sys.stdin:
        row = json.loads(line)
        try:
            found = grade_opencompass(row) if "gold" in row else grade_minerva(old, new, row)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
