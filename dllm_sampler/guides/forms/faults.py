"""The reason that a pattern cannot be a form, and its place. The library that builds automata reports neither."""

import re
import warnings

# Signs that a pattern may not have. Escapes and sets of characters are skipped.
SIGNS = re.compile(
    r"(?P<look>\(\?<?[=!])|(?P<back>\\[1-9]|\\k[<{']|\(\?P[=>])|(?P<atomic>\(\?>)|(?P<comment>\(\?\#)"
    r"|(?P<word>\\[bB<>])|(?P<anchor>\\[AzZ]|[\^$])"
    r"|\\[pPxuU]\{[^}]*\}?|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d+(?:,\d*)?\}|(?P<brace>\{)",
    re.DOTALL,
)
WAYS = {
    "look": ("look-around, which an automaton cannot follow", "Write the pattern without it."),
    "back": ("a reference to another part, which an automaton cannot follow", "Write the texts out, as in aa|bb."),
    "atomic": ("an atomic group, which an automaton does not need", "Use (?:...)."),
    "comment": ("a comment", "Remove it."),
    "word": ("a word boundary, which is not supported", "Write the characters at that place."),
    "anchor": ("an anchor inside, and a pattern always matches the whole answer", "Remove it."),
    "brace": ("a brace that is not a count as in {2,3}", r"Write \{ for the brace itself."),
}


def fault(pattern: str) -> tuple[str, str]:
    """Return the reason that a pattern has no automaton, with its place, and what to do.

    Places count characters from 1. Brackets and counts are judged by Python's own syntax, where it agrees with Rust's.
    """
    for found in SIGNS.finditer(pattern):
        outer = (found[0] == "^" and found.start() == 0) or (found[0] == "$" and found.end() == len(pattern))
        if found.lastgroup is not None and not outer:
            reason, way = WAYS[found.lastgroup]
            return f"'{found[0]}' at character {found.start() + 1} is {reason}", way
    plain = re.sub(r"\\[pPxuU]\{[^}]*\}", lambda one: "x" * len(one[0]), pattern)  # Python has others
    try:
        with warnings.catch_warnings(action="ignore"):
            re.compile(plain)
    except re.error as error:
        if error.pos is not None and not error.msg.startswith(("unknown extension", "bad inline flags")):
            return f"'{error.msg}' at character {error.pos + 1}", "Correct it."
    except (RecursionError, OverflowError):
        pass
    return "outlines-core cannot read it", "Use the Unicode syntax of Rust's regex crate, at most 250 brackets deep."
