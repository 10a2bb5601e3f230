"""The tasks of `mini` and its tokenizer."""

from random import Random

from dllm_sampler.models.mini_tasks import NAMES, TASKS, UNSEEN, Task, draw_example, held_out
from dllm_sampler.models.mini_tokenizer import build_tokenizer, vocabulary
from tests.sampling import each

tokenizer = build_tokenizer(256)
ALL = TASKS | UNSEEN
every_task = each("task", ALL.values())


def examples(task: Task, count: int = 40) -> list[tuple[str, str]]:
    rng = Random(0)
    return [task.draw(rng) for _ in range(count)]


@every_task
def test_a_drawn_answer_passes_and_a_damaged_one_fails(task: Task) -> None:
    for prompt, answer in [*examples(task), (task.syntax, task.answer)]:
        assert task.check(prompt, answer)
        damaged = ["", answer + answer[-1], answer[:-1], answer.replace(answer.split(", ")[0], "Nobody", 1)]
        assert not any(task.check(prompt, wrong) for wrong in damaged)


def test_operations_mean_what_they_say() -> None:
    right = {
        "reverse: Ada, Ben, Cal, Dan": "Dan, Cal, Ben, Ada",
        "insert at 1: Ada, Ben; Eve": "Ada, Eve, Ben",
        "insert at 2: Ada, Ben; Eve": "Ada, Ben, Eve",
        "remove at 0: Ada, Ben": "Ben",
        "replace at 0: Ada, Ben; Eve": "Eve, Ben",
        "arithmetic: 8 + 5 - 4": "8 + 5 = 13, 13 - 4 = 9",
        "json: age 31, name Ada": '{"age": 31, "name": "Ada"}',
        "brackets: ([": "])",
    }
    for prompt, answer in right.items():
        task = next(task for name, task in TASKS.items() if prompt.startswith(name))
        assert task.check(prompt, answer)
        assert not task.check(prompt, "Ada, Ada, Ada")


def test_random_operations_accept_every_place() -> None:
    task = TASKS["insert randomly"]
    for answer in ("Eve, Ada, Ben", "Ada, Eve, Ben", "Ada, Ben, Eve"):
        assert task.check("insert randomly: Ada, Ben; Eve", answer)
    assert not task.check("insert randomly: Ada, Ben; Eve", "Eve, Ben, Ada")
    assert TASKS["shuffle"].check("shuffle: Ada, Ben, Cal", "Cal, Ada, Ben")
    assert not TASKS["shuffle"].check("shuffle: Ada, Ben, Cal", "Ada, Ada, Ben")


def test_a_latin_square_keeps_its_clues() -> None:
    puzzle = "latin: 1_3_, _3_1, 2___, _41_"
    assert TASKS["latin"].check(puzzle, "1234, 4321, 2143, 3412")
    for wrong in ("1234, 4321, 3412, 2143", "1234, 4321, 2143, 3421", "1234, 4321, 2143", "1234, 43, 21, 2143, 12"):
        assert not TASKS["latin"].check(puzzle, wrong)


def test_a_sudoku_has_boxes_and_a_proper_one_has_one_solution() -> None:
    puzzle = "latin: 1___, ____, ____, ____"
    assert UNSEEN["sudoku"].check(puzzle, "1234, 3412, 2341, 4123")
    assert TASKS["latin"].check(puzzle, "1234, 2341, 3412, 4123")
    assert not UNSEEN["sudoku"].check(puzzle, "1234, 2341, 3412, 4123"), "its boxes hold a number twice"
    assert not UNSEEN["sudoku"].check(puzzle, "2134, 3412, 1243, 4321"), "the given cell is another"
    rng = Random(0)
    for _ in range(5):
        puzzle, answer = UNSEEN["proper sudoku"].draw(rng)
        blanks = [place for place, cell in enumerate(puzzle.partition(": ")[2]) if cell == "_"]
        others = (UNSEEN["sudoku"].draw(rng)[1] for _ in range(3000))  # nearly all of the 288
        assert {one for one in others if UNSEEN["sudoku"].check(puzzle, one)} == {answer} and 10 <= len(blanks) <= 12


@every_task
def test_splits_are_disjoint_and_seeded(task: Task) -> None:
    for held in (True, False):
        drawn = [draw_example(task.draw, Random(seed), held=held)[0] for seed in range(8)]
        assert all(held_out(prompt) is held for prompt in drawn)
        assert drawn == [draw_example(task.draw, Random(seed), held=held)[0] for seed in range(8)]


@every_task
def test_text_survives_the_tokenizer(task: Task) -> None:
    for text in (text for pair in examples(task) for text in pair):
        ids = tokenizer(text).input_ids
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@each(
    ("typed", "meant"),
    [
        ("  reverse:Ada ,Ben,\tCal ", "reverse: Ada, Ben, Cal"),
        ("insert at 1 :Ada,Ben ;Eve", "insert at 1: Ada, Ben; Eve"),
        ("arithmetic: 3+4 -5", "arithmetic: 3 + 4 - 5"),
        ("latin: 1 _ 3 4,_ _ _ 1", "latin: 1_34, ___1"),
        ("brackets: ( [ { <", "brackets: ([{<"),
    ],
)
def test_spaces_are_put_in_order(typed: str, meant: str) -> None:
    assert tokenizer(typed).input_ids == tokenizer(meant).input_ids
    assert tokenizer.decode(tokenizer(typed).input_ids, skip_special_tokens=True) == meant


def test_an_unknown_word_is_marked_where_it_stands() -> None:
    text = "reverse:  Ada, Zoë , ada"
    encoded = tokenizer(text, return_offsets_mapping=True)
    pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    assert [text[begin:end] for token, (begin, end) in pairs if token == tokenizer.unk_token_id] == ["Zoë", "ada"]


def test_the_chat_form_of_a_prompt_is_the_prompt() -> None:
    messages = [{"role": "user", "content": "reverse: Ada, Ben"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer(str(text), add_special_tokens=False).input_ids == tokenizer("reverse: Ada, Ben").input_ids


def test_vocabulary_is_small_and_has_no_doubles() -> None:
    tokens = vocabulary()
    assert sorted(tokens.values()) == list(range(len(tokens)))
    assert {"Ada", "Ben", "Cal", "Dan", "Eve"} <= set(NAMES) <= set(tokens)
    assert len(tokens) < 256
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == tokens["[EOS]"]
