"""The tasks of `mini`: one-line prompts, one right answer drawn for each, and a checker that accepts all right ones.

If several answers are right (a shuffle, a random insertion, an under-determined latin square), `draw` picks one of them
uniformly. The marginals of one step then disagree with every single answer, which is the point of these tasks.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, permutations, product
from random import Random
from zlib import crc32

_NAMES = """Aaron Abby Ada Adam Alan Alice Amy Anna Asha Ava Ben Beth Bob Brian Cal Cara Carl Chloe Clara Cora Dan Dana
    David Dora Dylan Ed Edith Ella Emma Eric Erin Eva Eve Finn Fiona Flora Frank Fred Gail George Grace Greta Gus Hal
    Hannah Harry Helen Henry Hugo Ian Ida Ines Iris Isaac Ivan Jack James Jane Jill John Julia Kai Karl Kate Kim Kurt
    Laura Leo Lily Lucy Luke Marc Maria Mary Max Mia Nathan Ned Nina Noah Nora Olga Oscar Otto Pam Paul Peter Quinn
    Rachel Ralph Rita Rosa Ruth Sam Sara Simon Sofia Tara Ted Tina Tom Uma Vera Victor Will Yara Zoe"""
NAMES = tuple(_NAMES.split())
CITIES = ("Athens", "Berlin", "Cairo", "Dublin", "Lima", "London", "Madrid", "Oslo", "Paris", "Rome", "Tokyo", "Vienna")
COLORS = ("black", "blue", "brown", "green", "orange", "pink", "purple", "red", "white", "yellow")
BRACKETS = {"(": ")", "[": "]", "{": "}", "<": ">"}
LONGEST = 8  # items in a list


Draw = Callable[[Random], tuple[str, str]]  # generator -> (prompt, answer)


@dataclass(frozen=True)
class Task:
    """One operation: its prompt, a function that draws examples, and a checker of answers.

    Args:
        name: the words before the colon, without an index.
        syntax: an example of a prompt.
        answer: a right answer to that example.
        limits: range of the examples in training, for the model card.
        draw: returns a prompt and an answer of a random generator.
        check: returns True if an answer is right for a prompt.
    """

    name: str
    syntax: str
    answer: str
    limits: str
    draw: Draw
    check: Callable[[str, str], bool]


def held_out(prompt: str) -> bool:
    """Return True for the one prompt in 32 that training never sees and the card is measured on."""
    return crc32(prompt.encode()) % 32 == 0


def draw_example(draw: Draw, rng: Random, *, held: bool) -> tuple[str, str]:
    """Return a prompt of the training split, or of the held-out split, and a right answer."""
    while True:
        prompt, answer = draw(rng)
        if held_out(prompt) == held:
            return prompt, answer


# Lists of names -------------------------------------------------------------------------------------------------------

Edit = Callable[[list[str], int, str], list[str]]  # (items, index, extra name) -> items


def _names(rng: Random, least: int = 1) -> list[str]:
    return rng.choices(NAMES, k=rng.randint(least, LONGEST))


def _split(prompt: str) -> tuple[list[str], str]:
    """Return the items and the extra name ("" if there is none) of a list prompt."""
    items, _, extra = prompt.partition(": ")[2].partition("; ")
    return items.split(", "), extra


def _whole(name: str, answer: str, limits: str, edit: Callable[[list[str]], list[str]] | None) -> Task:
    """Return the task of an operation on the whole list. It has one right answer, or without `edit` every order is."""

    def draw(rng: Random) -> tuple[str, str]:
        items = _names(rng)
        return f"{name}: {', '.join(items)}", ", ".join(rng.sample(items, len(items)) if edit is None else edit(items))

    def check(prompt: str, answer: str) -> bool:
        items = _split(prompt)[0]
        return sorted(answer.split(", ")) == sorted(items) if edit is None else answer == ", ".join(edit(items))

    return Task(name, f"{name}: Ben, Dan, Ada, Cal", answer, limits, draw, check)


def _at_place(verb: str, edit: Edit, *, extra: bool, past_end: bool, random: bool) -> Task:
    """Return the task of an operation at one place of the list. The prompt names the place, or leaves it open."""
    least = 1 if extra else 2  # removing leaves at least one name

    def places(items: list[str]) -> range:
        return range(len(items) + past_end)

    def draw(rng: Random) -> tuple[str, str]:
        items, name = _names(rng, least), rng.choice(NAMES)
        index = rng.choice(places(items))
        head = f"{verb} randomly" if random else f"{verb} at {index}"
        return f"{head}: {', '.join(items)}" + f"; {name}" * extra, ", ".join(edit(items, index, name))

    def check(prompt: str, answer: str) -> bool:
        items, name = _split(prompt)
        chosen = places(items) if random else [int(prompt.partition(":")[0].rpartition(" ")[2])]
        return any(answer == ", ".join(edit(items, index, name)) for index in chosen)

    name = f"{verb} randomly" if random else f"{verb} at"
    syntax = f"{verb} {'randomly' if random else 'at 1'}: Ada, Ben, Cal" + "; Eve" * extra
    limits = f"{least} to 8 names; " + ("any place is right" if random else "the index counts from 0")
    return Task(name, syntax, ", ".join(edit(["Ada", "Ben", "Cal"], 1, "Eve")), limits, draw, check)


def _insert(items: list[str], index: int, name: str) -> list[str]:
    return [*items[:index], name, *items[index:]]


def _remove(items: list[str], index: int, _: str) -> list[str]:
    return items[:index] + items[index + 1 :]


def _replace(items: list[str], index: int, name: str) -> list[str]:
    return [*items[:index], name, *items[index + 1 :]]


# Arithmetic -----------------------------------------------------------------------------------------------------------


def _chain(start: int, steps: list[tuple[str, int]]) -> str:
    """Return the intermediate results of a sum, from left to right: `8 + 5 = 13, 13 - 4 = 9`."""
    totals = list(accumulate((amount if sign == "+" else -amount for sign, amount in steps), initial=start))
    return ", ".join(f"{a} {sign} {b} = {c}" for a, (sign, b), c in zip(totals, steps, totals[1:], strict=False))


def _sum(rng: Random, start: int, amounts: Iterable[int]) -> tuple[str, str]:
    """Return a prompt that adds or takes away each amount, whichever keeps the total between 0 and 99."""
    total, steps = start, []
    for amount in amounts:
        signs = [sign for sign, result in (("+", total + amount), ("-", total - amount)) if 0 <= result <= 99]
        steps.append((rng.choice(signs), amount))
        total += amount if steps[-1][0] == "+" else -amount
    prompt = " ".join([str(start), *(f"{sign} {amount}" for sign, amount in steps)])
    return f"arithmetic: {prompt}", _chain(start, steps)


def _draw_arithmetic(rng: Random) -> tuple[str, str]:
    start = rng.randint(1, 9) if rng.random() < 0.3 else rng.randint(10, 99)
    return _sum(rng, start, (rng.randint(1, 9) for _ in range(rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 4)))))


def _draw_small_sum(rng: Random) -> tuple[str, str]:
    """Return a sum of one step, mostly of 1 or 2. In a uniform draw no digit of a sum tells anything by itself."""
    return _sum(rng, rng.randint(1, 99), rng.choices(range(1, 10), [1 / amount for amount in range(1, 10)]))


def _draw_single_sum(rng: Random) -> tuple[str, str]:
    """Return a sum of one step of any size. No later term repeats its result, as in a chain, where guessing is easy."""
    return _sum(rng, rng.randint(0, 99), [rng.randint(1, 9)])


def _check_arithmetic(prompt: str, answer: str) -> bool:
    start, *rest = prompt.partition(": ")[2].split()
    return answer == _chain(int(start), list(zip(rest[::2], map(int, rest[1::2]), strict=True)))


# Latin squares --------------------------------------------------------------------------------------------------------


@cache
def latin_squares() -> tuple[str, ...]:
    """Return all 576 latin squares of side 4, their rows joined by ", "."""
    rows = ["".join(row) for row in permutations("1234")]
    squares: list[tuple[str, ...]] = [()]
    for _ in range(4):
        grown = [(*square, row) for square, row in product(squares, rows)]
        squares = [
            square for square in grown if all(len(set(column)) == len(square) for column in zip(*square, strict=True))
        ]
    return tuple(", ".join(square) for square in squares)


def _draw_latin(rng: Random, least: int = 4, most: int = 10) -> tuple[str, str]:
    square = rng.choice(latin_squares())
    cells = [place for place, symbol in enumerate(square) if symbol.isdigit()]
    blank = set(rng.sample(cells, 16 - rng.randint(least, most)))
    return "latin: " + "".join("_" if place in blank else symbol for place, symbol in enumerate(square)), square


def filled_share(prompt: str, text: str, *, boxed: bool) -> float:
    """Return the share of rows, columns and, if `boxed`, boxes that contain 1 to 4, or 0 if a given cell differs."""
    puzzle, rows = prompt.partition(": ")[2], text.split(", ")
    same = len(text) == len(puzzle) and all(given in ("_", cell) for given, cell in zip(puzzle, text, strict=True))
    if not same or [len(row) for row in rows] != [4] * 4:
        return 0.0
    found = [*rows, *("".join(column) for column in zip(*rows, strict=True)), *(_boxes(rows) if boxed else ())]
    return sum(sorted(unit) == list("1234") for unit in found) / len(found)


def _check_latin(prompt: str, answer: str) -> bool:
    return filled_share(prompt, answer, boxed=False) == 1


# Sudoku ---------------------------------------------------------------------------------------------------------------


def _boxes(rows: Sequence[str]) -> list[str]:
    """Return the four 2x2 boxes of four rows."""
    return [rows[top][left : left + 2] + rows[top + 1][left : left + 2] for top in (0, 2) for left in (0, 2)]


@cache
def sudokus() -> tuple[str, ...]:
    """Return the 288 sudokus of side 4, their rows joined by ", "."""
    return tuple(square for square in latin_squares() if filled_share(f": {square}", square, boxed=True) == 1)


def _draw_sudoku(rng: Random, least: int, most: int, *, proper: bool) -> tuple[str, str]:
    """Return a sudoku with `least` to `most` given cells, and a solution. A `proper` one has no other solution."""
    while True:
        square = rng.choice(sudokus())
        cells = [place for place, symbol in enumerate(square) if symbol.isdigit()]
        given = set(rng.sample(cells, rng.randint(least, most)))
        if not proper or sum(all(other[at] == square[at] for at in given) for other in sudokus()) == 1:
            blank = set(cells) - given
            return "latin: " + "".join("_" if at in blank else symbol for at, symbol in enumerate(square)), square


def _check_sudoku(prompt: str, answer: str) -> bool:
    return filled_share(prompt, answer, boxed=True) == 1


# Predictable text -----------------------------------------------------------------------------------------------------


def _draw_json(rng: Random) -> tuple[str, str]:
    record: Mapping[str, str | int] = {
        "name": rng.choice(NAMES),
        "age": rng.randint(1, 99),
        "city": rng.choice(CITIES),
        "color": rng.choice(COLORS),
    }
    keys = rng.sample(list(record), rng.randint(1, 3))
    prompt = "json: " + ", ".join(f"{key} {record[key]}" for key in keys)
    return prompt, json.dumps({key: record[key] for key in keys})


def _check_json(prompt: str, answer: str) -> bool:
    pairs = [field.split(" ") for field in prompt.partition(": ")[2].split(", ")]
    return answer == json.dumps({key: int(value) if key == "age" else value for key, value in pairs})


def _draw_brackets(rng: Random) -> tuple[str, str]:
    opened = rng.choices(list(BRACKETS), k=rng.randint(1, 12))
    return "brackets: " + "".join(opened), "".join(BRACKETS[bracket] for bracket in reversed(opened))


def _check_brackets(prompt: str, answer: str) -> bool:
    return answer == "".join(BRACKETS[bracket] for bracket in reversed(prompt.partition(": ")[2]))


_LISTS = (
    _whole("copy", "Ben, Dan, Ada, Cal", "1 to 8 names", list),
    _whole("reverse", "Cal, Ada, Dan, Ben", "1 to 8 names", lambda items: items[::-1]),
    _whole("sort", "Ada, Ben, Cal, Dan", "1 to 8 names; alphabetical", sorted),
    _whole("shuffle", "Dan, Ada, Cal, Ben", "1 to 8 names; any order is right", None),
    *(
        _at_place(verb, edit, extra=extra, past_end=past_end, random=random)
        for random in (False, True)
        for verb, edit, extra, past_end in (
            ("insert", _insert, True, True),
            ("remove", _remove, False, False),
            ("replace", _replace, True, False),
        )
    ),
)

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *_LISTS,
        Task(
            "arithmetic",
            "arithmetic: 47 + 8 - 3",
            "47 + 8 = 55, 55 - 3 = 52",
            "from left to right, 1 to 4 steps of 1 to 9, every total between 0 and 99",
            _draw_arithmetic,
            _check_arithmetic,
        ),
        Task(
            "latin",
            "latin: 1_3_, _3_1, 2___, _41_",
            "1234, 4321, 2143, 3412",
            "four rows of 1 to 4, `_` for an empty cell, 4 to 10 cells given; any completion is right",
            _draw_latin,
            _check_latin,
        ),
        Task(
            "json",
            "json: name Ada, age 31, city Rome",
            '{"name": "Ada", "age": 31, "city": "Rome"}',
            "1 to 3 of the fields name, age (1 to 99), city and color, in any order",
            _draw_json,
            _check_json,
        ),
        Task("brackets", "brackets: ([{<", ">}])", "1 to 12 opening brackets", _draw_brackets, _check_brackets),
    )
}

# Tasks that `mini` was not trained on, in words that it knows: for training that begins with `mini`.
UNSEEN: dict[str, Task] = {
    "sudoku": Task(
        "sudoku",
        "latin: 1___, ___2, _3__, ____",
        "1234, 3412, 2341, 4123",
        "a latin square whose 2x2 boxes hold 1 to 4 too, 3 or 4 cells given; any completion is right",
        partial(_draw_sudoku, least=3, most=4, proper=False),
        _check_sudoku,
    ),
    "proper sudoku": Task(
        "proper sudoku",
        "latin: _43_, 3__4, ___3, 2___",
        "1432, 3214, 4123, 2341",
        "the same, 4 to 6 cells given, which leave one solution",
        partial(_draw_sudoku, least=4, most=6, proper=True),
        _check_sudoku,
    ),
}

# Names in a mixture: tasks, easier draws of a task that help training to start, and harder ones than `mini` has seen.
LESSONS: dict[str, Draw] = {
    **{name: task.draw for name, task in (TASKS | UNSEEN).items()},
    "small sums": _draw_small_sum,
    "single sums": _draw_single_sum,
    "sparse latin": partial(_draw_latin, least=1, most=3),
}
