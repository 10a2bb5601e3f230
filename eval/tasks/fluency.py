"""Fluency of a text: LanguageTool if it is installed, and a check without it, `fluency_proxy`."""

import re
from functools import cache
from importlib import import_module
from typing import Any

from dllm_sampler.errors import UserError, first_line, invalid

PAIRS = {"(": ")", "[": "]", "{": "}"}
LEFTOVER = re.compile(r"<\|[^|>]*\|>|</?s>|\[(?:MASK|EOS|PAD|UNK|SEP|CLS)\]|�")
SOUNDS_LIKE_YOU = re.compile(r"(?:uni[^nm]|use|usu|eu|one\b|once\b|ufo|uk\b)", re.IGNORECASE)
EITHER = re.compile(r"herb|histori", re.IGNORECASE)  # as one says the h
SILENT_H = re.compile(r"(?:hour|honest|honou?r|heir)", re.IGNORECASE)


def fluency_proxy(text: str) -> float:
    """Return 1 if a text has no damage of the kinds that parallel decoding does, else 0. Grammar is not checked.

    Damage: an empty text, a word twice in a row, `a` in place of `an` and the other way round, brackets or quotes that
    do not match, no capital at the start, no mark at the end, special tokens, or three words in a row three times.
    """
    text = text.strip()
    words = re.findall(r"[^\W_]+(?:['’][^\W_]+)*", text)
    if not words or LEFTOVER.search(text):
        return 0.0
    lower = [word.lower() for word in words]
    doubled = re.search(r"\b([^\W\d_]+)\s+\1\b", text, re.IGNORECASE)
    if doubled and doubled[1].lower() not in ("had", "that"):
        return 0.0
    if any(not _article_fits(*pair) for pair in re.findall(r"\b([Aa]n?)\s+([^\W\d_]+)", text)):
        return 0.0
    triples = list(zip(lower, lower[1:], lower[2:], strict=False))
    if any(triples.count(triple) > 2 for triple in set(triples)) or not _balanced(text):
        return 0.0
    start = re.sub(r"^[\W_]+", "", text)[:1]
    return float((start.isupper() or start.isdigit()) and text.rstrip("\"'”’)]")[-1:] in (".", "!", "?"))


def _article_fits(article: str, word: str) -> bool:
    if word.isupper() or len(word) == 1:
        return True  # letters are spelt, and how depends on the letter
    if EITHER.match(word):
        return True
    vowel = word[0].lower() in "aeiou"
    vowel = (vowel and not SOUNDS_LIKE_YOU.match(word)) or bool(SILENT_H.match(word))
    return vowel == (article.lower() == "an")


def _balanced(text: str) -> bool:
    """Return True if brackets are nested and double quotes even."""
    stack: list[str] = []
    for mark in text:
        if mark in PAIRS:
            stack.append(PAIRS[mark])
        elif mark in PAIRS.values() and (not stack or stack.pop() != mark):
            return False
    return not stack and text.count('"') % 2 == 0 and text.count("“") == text.count("”")


def grammar_measures(text: str, grammar: str | None) -> tuple[float, dict[str, float]]:
    """Return the measure that the score uses, and all measures by name.

    They contain `fluency_proxy`. Unless `grammar` is None they also contain `grammar`, which the score then uses: 1 for
    a text in which LanguageTool finds no mistake, 0 for any other or an empty one.
    """
    proxy = fluency_proxy(text)
    if grammar is None:
        return proxy, {"fluency_proxy": proxy}
    try:
        found = float(bool(text.strip()) and not tool(grammar).check(text.strip()))
    except Exception as error:  # whatever a server or its client raises
        raise _stopped(grammar, error) from error
    return found, {"grammar": found, "fluency_proxy": proxy}


@cache
def tool(grammar: str) -> Any:
    """Return LanguageTool, or raise `UserError` if it cannot be used in the way that `grammar` names."""
    if grammar != "languagetool" and not grammar.startswith(("http://", "https://")):
        way = "Set null, languagetool, or a URL such as http://localhost:8081"
        raise invalid("task.grammar", grammar, way, "choice-unknown")
    try:
        module: Any = import_module("language_tool_python")
    except ImportError:
        raise UserError(
            "package-missing",
            f"task.grammar={grammar} needs a package that is not installed. Run pip install language_tool_python, or"
            " set task.grammar=null.",
        ) from None
    server = {} if grammar == "languagetool" else {"remote_server": grammar}
    try:
        return module.LanguageTool("en-US", **server)
    except Exception as error:  # no Java, no download, no server: each has a kind of its own
        raise _stopped(grammar, error) from error


def _stopped(grammar: str, error: Exception) -> UserError:
    fix = "Check the URL" if grammar != "languagetool" else "Install Java 17, and have a network the first time"
    text = f"LanguageTool does not work for task.grammar={grammar} ({first_line(error)}). {fix}, or set"
    return UserError("package-missing", f"{text} task.grammar=null.")
