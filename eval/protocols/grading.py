"""Grades as published protocols give them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from dllm_sampler.errors import UserError, short, unknown
from dllm_sampler.eval.protocols import packages
from dllm_sampler.eval.protocols.programs import passes
from dllm_sampler.eval.protocols.prompts import Document, lm_eval_task, target
from dllm_sampler.eval.protocols.sanitize import sanitize
from dllm_sampler.eval.protocols.spec import Cell

SCRIPT = "post_pass@1"  # the metric of a second script
_MBPP_SECONDS = 10.0  # of OpenCompass
# The rules that grade each kind of task, for `Cell.extract`.
_EXTRACT: Mapping[str, Sequence[str]] = {
    "gsm8k": ("lm-eval", "opencompass-last-number", "opencompass-answer-is"),
    "minerva_math": ("minerva", "opencompass-boxed", "opencompass-math-verify"),
    "humaneval": ("raw", "after-prompt", "after-prompt-sanitized", "opencompass-fence", "opencompass-indented"),
    "mbpp": ("raw", "opencompass-begin"),
}


@dataclass(frozen=True)
class Grade:
    """The grades of one answer.

    metrics: values by the harness's names
    extracted: the graded text, by filter if the protocol has filters
    script: the program that a second script of the authors grades, or None
    """

    metrics: Mapping[str, float]
    extracted: Any
    script: str | None = None


def grade(cell: Cell, document: Document, text: str) -> Grade:
    """Return the grades of an answer's text, as `cut_answer` returns it. Programs run in a child process.

    Raises:
        UserError: a package that the protocol needs is not installed, or its grader failed.
    """
    if cell.kind == "gsm8k" and cell.extract == "lm-eval":
        return _by_filters(cell, document, text)
    if cell.extract == "minerva":
        return Grade(_minerva().ask({"solution": document["solution"], "text": text}), {"none": text})
    if cell.extract.startswith("opencompass"):
        found, right = _OPENCOMPASS[cell.extract.removeprefix("opencompass-")](document, text)
        return Grade({"correct": float(right)}, found)
    return _by_tests(cell, document, text)


def _by_filters(cell: Cell, document: Document, text: str) -> Grade:
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    task = lm_eval_task(str(cell.lm_eval))
    metric = next(one for one in task["metric_list"] if one["metric"] == "exact_match")
    options = {
        name: metric[name] for name in ("regexes_to_ignore", "ignore_case", "ignore_punctuation") if name in metric
    }
    extracted = {}
    for one in task["filter_list"]:
        first = dict(one["filter"][0])
        assert first.pop("function") == "regex"
        extracted[one["name"]] = next(iter(RegexFilter(**first).apply([[text]], [dict(document)])))[0]
    gold = target(cell, document)
    metrics = {
        f"exact_match,{name}": float(exact_match_hf_evaluate([found], [gold], **options)["exact_match"])
        for name, found in extracted.items()
    }
    return Grade(metrics, extracted)


def _by_tests(cell: Cell, document: Document, text: str) -> Grade:
    tests = target(cell, document)
    program = take_program(cell.extract, document, text)
    mbpp = cell.kind == "mbpp"
    metrics = {"pass_at_1,none" if mbpp else "pass@1,create_test": float(passes(f"{program}\n{tests}"))}
    script = None
    if cell.script is not None:
        script = take_program(cell.script, document, text)
        metrics[SCRIPT] = float(passes(f"{script}\n{tests}"))
    return Grade(metrics, {"none": program} if mbpp else {"create_test": [program]}, script)


def take_program(rule: str, document: Document, text: str) -> str:
    """Return the program that a rule (`Cell.extract` or `Cell.script`) takes from an answer."""
    if rule == "raw":
        return text
    if rule == "after-prompt":
        return document["prompt"] + text
    fenced = text.split("```python\n", 1)[-1].split("```")[0]
    if rule == "sanitized":
        return sanitize(fenced)
    return sanitize(f"{document['prompt']}\n{fenced}", document["entry_point"])


def needed(cell: Cell) -> None:
    """Check that the packages for grading are installed, and that `Cell.extract` grades this kind of task.

    Raises:
        UserError: a package is not installed (the message has the command that installs it), or the rule does not fit.
    """
    if cell.extract in ("minerva", "opencompass-math-verify"):
        packages.located("math")
        packages.located("lm_eval_0_4_8")
    if cell.opencompass is not None:
        packages.located("opencompass")
    packages.lm_eval_tasks()
    if cell.extract not in _EXTRACT[cell.kind]:
        raise unknown(f"extract of {cell.variant}, {cell.task}", cell.extract, _EXTRACT[cell.kind])


class _Minerva:
    """The process that grades MATH. It starts with the first answer and ends with this process."""

    def __init__(self) -> None:
        utils = Path("minerva_math", "utils.py")
        old = packages.located("lm_eval_0_4_8") / "lm_eval" / "tasks" / utils
        files = [str(old), str(packages.lm_eval_tasks() / utils)]
        path = os.pathsep.join([str(packages.located("math")), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        # A pipe that nobody reads would fill up.
        self.errors = TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.child = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("minerva.py")), *files],
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
        )  # fmt: skip

    def ask(self, row: Mapping[str, str]) -> dict[str, Any]:
        """Return the grades of one row, as `minerva.py` computes them. Raises `UserError` if the process fails."""
        assert self.child.stdin is not None and self.child.stdout is not None
        try:
            self.child.stdin.write(json.dumps(dict(row)) + "\n")
            self.child.stdin.flush()
            line = self.child.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.errors.seek(0)
            reason = (self.errors.read().strip().splitlines() or ["it ended"])[-1]
            fix = f"Remove {packages.folder()} and run `{packages.INSTALL}`."
            raise UserError("function-failed", f"The grader of MATH stopped: {reason}. {fix}")
        found = json.loads(line)
        if "error" in found:
            raise UserError(
                "example-invalid",
                f"The grader of MATH failed ({found['error']}). Correct this solution in the data:"
                f" {short(repr(row.get('solution', row.get('gold'))))}.",
            )
        return found


@cache
def _minerva() -> _Minerva:
    return _Minerva()


def _definitions(file: str, *names: str) -> Mapping[str, Any]:
    return packages.load_definitions(packages.located("opencompass") / "opencompass" / file, names)


def _last_number(document: Document, text: str) -> tuple[str, bool]:
    found = _definitions("datasets/gsm8k.py", "gsm8k_postprocess")["gsm8k_postprocess"](text)
    gold = str(document["answer"]).split("#### ")[1].replace(",", "")
    try:
        return found, found == gold or abs(float(found) - int(gold)) < 1e-6
    except ValueError:
        return found, False


def _answer_is(document: Document, text: str) -> tuple[str, bool]:
    """Apply the rule of LLaDA's OpenCompass for base models: a number after `The answer is`, else the last one."""
    said = re.search(r"the answer is[:\s]*(-?\d+(\.\d+)?)", text, re.IGNORECASE)
    return _last_number(document, text if said is None else said[1])


def _boxed(document: Document, text: str) -> tuple[str, bool]:
    names = ("last_boxed_only_string", "remove_boxed", "extract_boxed_answer", "normalize_final_answer")
    rules = _definitions("datasets/math.py", *names, "math_postprocess_v2", "MATHEvaluator")
    found = rules["math_postprocess_v2"](text)
    evaluator = object.__new__(rules["MATHEvaluator"])
    evaluator.version = "v2"
    return found, bool(evaluator.is_equiv(found, rules["extract_boxed_answer"](document["solution"])))


def _math_verify(document: Document, text: str) -> tuple[str, bool]:
    names = ("last_boxed_only_string", "remove_boxed", "extract_boxed_answer")
    gold = _definitions("datasets/math.py", *names)["extract_boxed_answer"](document["solution"])
    graded = _minerva().ask({"gold": gold, "text": text})
    return graded["extracted"], bool(graded["correct"])


def _completion(rule: str) -> Callable[[Document, str], tuple[str, bool]]:
    def grade_completion(document: Document, text: str) -> tuple[str, bool]:
        body = _definitions("datasets/humaneval.py", rule)[rule](text)
        return body, passes(f"{document['prompt']}{body}\n{document['test']}\ncheck({document['entry_point']})")

    return grade_completion


def _begin(document: Document, text: str) -> tuple[str, bool]:
    """Apply the rule of LLaDA's copy of OpenCompass: a quotation mark at either end is dropped."""
    evaluator = object.__new__(_definitions("datasets/mbpp.py", "MBPPEvaluator")["MBPPEvaluator"])
    program = evaluator._process_answer(text).removeprefix("'").removesuffix("'")
    return program, passes("\n".join([program, *document["test_list"]]), _MBPP_SECONDS)


_OPENCOMPASS = {
    "last-number": _last_number, "answer-is": _answer_is, "boxed": _boxed, "math-verify": _math_verify,
    "fence": _completion("humaneval_postprocess_v2"), "indented": _completion("humaneval_internal_v2_postprocess"),
    "begin": _begin,
}  # fmt: skip
