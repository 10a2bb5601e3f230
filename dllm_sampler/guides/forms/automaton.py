"""Finite automata over tokens, built from a regular expression once and stored on disk."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dllm_sampler.errors import NotWrittenError, UserError, short
from dllm_sampler.guides.forms import library
from dllm_sampler.guides.forms.faults import fault
from dllm_sampler.host import files

STATES, BYTES = 10_000, 100_000  # most states of an automaton, bytes of an expression
ENTRIES = 4_000_000  # most states times classes
KEPT = 64  # automata and expressions in memory
TOGETHER = 50  # expressions that one call of the library builds
# Ends every text while the automaton is built. Without it the library drops moves from an accepted text to one that is
# not accepted yet, since it sees matches one byte late. No answer contains this code point.
MARK = "\U0010ffff"
FORMAT = 4  # of the files
TENSORS = ("moves", "accepts", "classes")
ByteAutomaton = tuple[int, list[int], dict[int, dict[int, int]]]  # first state, accepting ones, moves by byte


@dataclass(frozen=True, eq=False)
class Automaton:
    """A minimal deterministic automaton over tokens. Tokens of one class have the same moves.

    An end-of-text token leads from an accepting state to one after which anything may follow. Special tokens add
    nothing to a text and move no state. The last state is dead: no text that leads there can be completed.
    """

    moves: Tensor  # [S+1, C] int64: the state after a token of each class
    accepts: Tensor  # [S+1] bool
    classes: Tensor  # [V] int64: the class of each token
    start: int
    shortest: int  # fewest tokens of an accepted text, or -1 if there is none

    def accepted(self, tokens: Sequence[int]) -> bool:
        """Return True if a text of these tokens is accepted."""
        state = self.start
        for token in tokens:
            state = int(self.moves[state, self.classes[token]])
        return bool(self.accepts[state])


def build_all(
    patterns: Sequence[str],
    tokens: Sequence[bytes],
    vocab: int,
    end_ids: tuple[int, ...],
    mask_id: int | None,
    names: Sequence[str] | None = None,
) -> tuple[Automaton, ...]:
    """Build the automata of regular expressions, or load those that were built before.

    Args:
        tokens: the bytes of each token.
        vocab: V of the model.
        end_ids: tokens that end an answer.
        mask_id: token that is never chosen. None if every token may be.
        names: names of the patterns in errors. By default the patterns in quotes.

    Raises:
        UserError: a pattern is not an expression, has no text, or is too large to build.
    """
    made, known = dict[str, ByteAutomaton](), tuple(tokens)

    def make(pattern: str, name: str) -> ByteAutomaton:
        return made[pattern] if pattern in made else byte_automaton(pattern, name)

    recipes: dict[str, Recipe] = {}
    for pattern, name in zip(patterns, names or map(quoted, patterns), strict=True):
        size = len(pattern.encode(errors="replace"))
        if size > BYTES:
            raise UserError(
                "form-too-large",
                f"{name} has {size} bytes as a regular expression, more than {BYTES}. Shorten it.",
            )
        if pattern.encode(errors="ignore") != pattern.encode(errors="replace"):
            raise UserError("form-invalid", f"{name} has a lone surrogate, which no text contains. Remove it.")
        about = f"{library.installed()} {pattern}"
        recipes[pattern] = Recipe(name, about, partial(make, pattern, name), known, vocab, end_ids, mask_id)
    new = [pattern for pattern, one in recipes.items() if not one.path.exists()]
    for first in range(0, len(new) if len(new) > 1 else 0, TOGETHER):
        part = new[first : first + TOGETHER]
        try:
            made |= zip(part, _byte_automata(part), strict=True)
        except UserError:
            break  # built one by one below, so that the message names the expression
    return tuple(lifted(recipes[pattern]) for pattern in patterns)


@dataclass(frozen=True)
class Recipe:
    """The source of an automaton over tokens.

    Args:
        name: name in errors.
        about: source of the automaton. Equal texts mean the same automaton.
        make: builds the automaton over bytes.
        tokens, vocab, end_ids, mask_id: as in `build_all`.
    """

    name: str = field(compare=False)
    about: str
    make: Callable[[], ByteAutomaton] = field(compare=False)
    tokens: tuple[bytes, ...]
    vocab: int
    end_ids: tuple[int, ...]
    mask_id: int | None

    @property
    def path(self) -> Path:
        """The file that stores the automaton."""
        known = json.dumps([FORMAT, self.about, self.vocab, self.end_ids, self.mask_id]).encode()
        digest = hashlib.sha256(known + _joined(self.tokens)).hexdigest()
        home = os.environ.get("DLLM_SAMPLER_CACHE")
        home = home or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "dllm_sampler")
        return Path(home).expanduser() / "forms" / f"{digest}.safetensors"


@lru_cache(maxsize=2)
def _joined(tokens: tuple[bytes, ...]) -> bytes:
    return b"".join(len(one).to_bytes(4) + one for one in tokens)


@lru_cache(maxsize=KEPT)
def lifted(recipe: Recipe) -> Automaton:
    """Return the automaton over tokens of an automaton over bytes, from disk if it was built before.

    Raises:
        UserError: the automaton is too large, or the one over bytes cannot be built.
    """
    path = recipe.path
    try:
        stored = load(path.read_bytes())  # not `load_file`, whose tensors change with the file
        start, shortest = stored["numbers"].tolist()
        return Automaton(stored["moves"], stored["accepts"], stored["classes"], start, shortest)
    except (OSError, SafetensorError, KeyError):
        pass
    found = _over_tokens(recipe, *recipe.make())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        numbers = torch.tensor([found.start, found.shortest])
        files.write(path, save({**{name: getattr(found, name) for name in TENSORS}, "numbers": numbers}))
    except (OSError, NotWrittenError):
        pass  # it is built again next time
    return found


def byte_automaton(pattern: str, name: str | None = None) -> ByteAutomaton:
    """Build the automaton of an expression over bytes: first state, accepting states, and moves by byte.

    Args:
        name: name of the pattern in errors. By default the pattern in quotes.

    Raises:
        UserError: the pattern is not a regular expression, matches no text, or is too large.
    """
    (found,) = _byte_automata([pattern], name or quoted(pattern), partial(fault, pattern))
    return found


def _byte_automata(
    patterns: Sequence[str], name: str = "", why: Callable[[], tuple[str, str]] | None = None
) -> list[ByteAutomaton]:
    """Build the automata of several expressions by one call of `library.run`, which has the other arguments."""
    given = []
    for pattern in patterns:
        bare = pattern.removeprefix("^")
        slashes = len(bare[:-1]) - len(bare[:-1].rstrip("\\"))
        bare = bare[:-1] if bare.endswith("$") and slashes % 2 == 0 else bare
        given.append([bare, f"(?:{bare}){MARK}"])
    found = []
    for start, finals, pairs in json.loads(library.run({"patterns": given, "states": STATES}, name, why)):
        moves = {state: {int(byte): to for byte, to in there.items() if byte != "256"} for state, there in pairs}
        found.append((start, [state for state in moves if _ends(moves, state, finals)], moves))
    return found


@lru_cache(maxsize=KEPT)
def expression(schema: str, whitespace: str, depth: int, name: str) -> str:
    """Return the regular expression of a JSON schema, which errors call `name`.

    Raises:
        UserError: the schema has no expression, or none within the limits.
    """
    given = {"schema": schema, "whitespace": f"(?:{whitespace})", "depth": depth}
    return json.loads(library.run(given, name))


def _ends(moves: dict[int, dict[int, int]], state: int | None, finals: list[int]) -> bool:
    """Return True if the mark leads from a state to a final one."""
    for byte in MARK.encode():
        state = moves.get(state, {}).get(byte) if state is not None else None
    return state in finals


def quoted(pattern: str) -> str:
    """Return a pattern in quotes for a message: as it was typed, shortened and on one line."""
    return "'" + "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in short(pattern, 60)) + "'"


def _over_tokens(recipe: Recipe, start: int, finals: list[int], moves: dict[int, dict[int, int]]) -> Automaton:
    names = {state: number for number, state in enumerate(dict.fromkeys([start, *moves, *finals]))}
    size = len(names)
    end, dead = size, size + 1
    step = torch.full((size + 2, 257), dead)  # 256: no byte
    step[:, 256] = torch.arange(size + 2)
    step[end] = end
    for state, there in moves.items():
        known = [(byte, names[to]) for byte, to in there.items() if to in names]
        if known:
            byte, to = torch.tensor(known).T
            step[names[state], byte] = to
    accepts = torch.zeros(size + 2, dtype=torch.bool)
    accepts[[names[state] for state in finals if state in names] + [end]] = True
    kinds, classes = _kinds(step, recipe)
    kinds[:, classes[recipe.end_ids[0]]] = torch.where(accepts, end, dead)
    used, classes = classes.unique(return_inverse=True)
    kinds = kinds[:, used]  # no token has another kind
    moved, accepts, first = _minimal(kinds, accepts, names[start])
    columns, again = moved.T.unique(dim=0, return_inverse=True)
    if len(moved) * len(columns) > ENTRIES:
        raise UserError(
            "form-too-large",
            f"{recipe.name} has {len(moved)} states times {len(columns)} kinds of tokens, more than {ENTRIES}."
            " Simplify it.",
        )
    return Automaton(columns.T.contiguous(), accepts, again[classes], first, _shortest(columns.T, accepts, first))


def _shortest(moves: Tensor, accepts: Tensor, start: int) -> int:
    """Return the fewest moves to an accepting state, or -1 if none leads there."""
    reached = torch.zeros(len(moves), dtype=torch.bool)
    reached[start] = True
    for count in range(len(moves) + 1):
        if bool((reached & accepts).any()):
            return count
        reached = reached.index_fill(0, moves[reached].unique(), True)
    return -1


def _kinds(step: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Return `[S, C]` the next state by kind of token, and `[V]` the kind of each token.

    End-of-text tokens and the mask have kinds of their own. The end-of-text tokens' column is the last one, and empty.
    """
    dead = len(step) - 1
    texts = sorted({*recipe.tokens, b""})
    number = {text: at for at, text in enumerate(texts)}
    table: list[Tensor] = []
    seen: dict[bytes, int] = {}
    of_text = []
    # Sorted texts share beginnings. A stack has the states after each beginning.
    stack: list[tuple[bytes, Tensor]] = [(b"", torch.arange(len(step)))]
    for text in texts:
        while not text.startswith(stack[-1][0]):
            stack.pop()
        while len(stack[-1][0]) < len(text):
            before, states = stack[-1]
            stack.append((text[: len(before) + 1], step[states, text[len(before)]]))
        column = stack[-1][1]
        name = column.numpy().tobytes()
        if name not in seen:
            seen[name] = len(table)
            table.append(column)
        of_text.append(seen[name])
    classes = torch.full((recipe.vocab,), of_text[number[b""]])  # ids without a token add nothing, either
    for token, text in enumerate(recipe.tokens[: recipe.vocab]):
        classes[token] = of_text[number[text]]
    if recipe.mask_id is not None:
        classes[recipe.mask_id] = len(table)
    for end in recipe.end_ids:
        classes[end] = len(table) + 1
    never = torch.full((len(step),), dead)
    return torch.stack([*table, never, never], 1), classes


def _minimal(moves: Tensor, accepts: Tensor, start: int) -> tuple[Tensor, Tensor, int]:
    """Return the automaton with the fewest states. The last one is dead."""
    alive = accepts.clone()
    while True:
        more = alive | alive[moves].any(1)
        if bool((more == alive).all()):
            break
        alive = more
    group = (accepts.long() + alive.long()).unique(return_inverse=True)[1]
    while True:
        found = torch.cat([group[:, None], group[moves]], 1).unique(dim=0, return_inverse=True)[1]
        if int(found.max()) == int(group.max()):
            break
        group = found
    # The dead state's group becomes the last one.
    count, dead = int(group.max()) + 1, int(group[-1])
    place = torch.arange(count)
    place[dead], place[count - 1] = count - 1, dead
    group = place[group]
    first = torch.zeros(count, dtype=torch.long).scatter_(0, group, torch.arange(len(group)))
    return group[moves[first]], accepts[first], int(group[start])
