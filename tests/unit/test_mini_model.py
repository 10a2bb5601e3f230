"""The shipped model: its answers, its tasks, its tokenizer, its filter and its card."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from random import Random
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors import safe_open

from dllm_sampler.config import entry
from dllm_sampler.core.spec import TrainedBlocks
from dllm_sampler.eval.tasks.mini import held_out_prompts
from dllm_sampler.models.mini_tasks import NAMES, TASKS, UNSEEN, Task, draw_example, held_out
from dllm_sampler.models.mini_tokenizer import build_tokenizer, vocabulary
from dllm_sampler.sampler import Sampler
from tests.refusals import refused
from tests.sampling import each, few
from tests.tables.comparison import rows
from tests.tables.markdown import fill, table
from tests.tables.mini_card import DECODERS, operations, score, words

# The shipped checkpoint: it answers, its trade-offs are visible, and its card is complete


FOLDER = Path(str(files("dllm_sampler") / "models/mini"))
EASY = ["copy", "reverse", "sort", "insert at", "remove at", "replace at", "json", "brackets"]
HARD = ["arithmetic", "latin"]


@cache
def sampler(decoder: str) -> Sampler:
    return Sampler.from_pretrained("mini", scheduler=DECODERS[decoder], device="cpu")


def right(decoder: str, task: str, count: int = 10, canvas: int = 32) -> float:
    return score(sampler(decoder), TASKS[task], held_out_prompts(TASKS[task], count), canvas)[0] / 100


@few("task", EASY + HARD)
def test_it_answers_prompts_it_never_saw(task: str) -> None:
    assert right("one per step", task) >= (0.95 if task in EASY else 0.8)


@pytest.mark.slow
def test_it_answers_on_longer_and_odd_canvases() -> None:
    assert right("one per step", "reverse", 2, 128) >= 0.9
    assert right("one per step", "sort", 5, 45) >= 0.9


def test_parallel_decoding_costs_nothing_where_answers_are_certain() -> None:
    assert right("all at once", "copy") >= 0.95
    assert right("all at once", "reverse") >= 0.95


@pytest.mark.slow
def test_parallel_decoding_breaks_what_depends_on_itself() -> None:
    for task in ("shuffle", "arithmetic"):
        assert right("all at once", task) <= right("one per step", task) - 0.2


def test_the_first_prompt_of_the_readme() -> None:
    result = Sampler.from_pretrained("mini", device="cpu").generate(
        ["reverse: Ada, Ben, Cal, Dan", "insert at 1: Ada, Ben; Eve"], max_new_tokens=32
    )
    assert result.texts == ["Dan, Cal, Ben, Ada", "Ada, Eve, Ben"]
    assert result.tokens_per_forward.min() > 1


def test_an_unknown_word_is_named() -> None:
    with refused("text-outside-vocabulary"):
        sampler("one per step").generate("reverse: Ada, Zaphod", max_new_tokens=8)


def test_the_folder_is_small_and_holds_this_tokenizer() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size < 16 * 2**20
    tokenizer = sampler("one per step").tokenizer
    assert tokenizer is not None
    assert tokenizer.get_vocab() == vocabulary()
    texts = [task.syntax for task in TASKS.values()]
    assert tokenizer(texts).input_ids == build_tokenizer(256)(texts).input_ids
    assert tokenizer.init_kwargs["operations"] == list(TASKS)


def test_the_card_is_up_to_date() -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert fill(fill(card, "operations", operations()), "vocabulary", words()) == card
    for task in TASKS.values():
        assert f"`{task.syntax}`" in card
        assert f"| {task.name} | " in card.partition("<!-- results -->")[2]
    assert all(name in card for name in NAMES)


def test_a_first_prompt_in_plain_text_leads_on() -> None:
    with refused("text-outside-vocabulary: prompt 2, 'Hello'") as error:
        sampler("one per step").generate(["copy: Ada", "Hello, how are you?"])
    said = str(error.value)
    assert all(name in said for name in TASKS) and 'as in "sort: Dan, Ada"' in said and "model=llada-8b" in said
    card = Path(said.partition("(examples: ")[2].partition(")")[0])
    assert card.read_text(encoding="utf-8").count("| `") >= len(TASKS), "its examples"


# The tasks of `mini` and its tokenizer


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


# The Learn2PD filter that `mini` ships: it is found, it is what the trainer makes, and it does something


MINI = Path(str(files("dllm_sampler") / "models/mini"))
SHIPPED: dict[str, Any] = json.loads((MINI / "filter.json").read_text(encoding="utf-8"))


def test_the_shipped_filter_is_what_the_command_makes() -> None:
    """Its settings are the defaults, and its file says for which model and blocks."""
    defaults = {key: value for key, value in entry("train", "filter").settings.items() if key[0] != "_"}
    assert defaults["data"]["path"] is None, "its prompts are tasks of mini"
    shared = SHIPPED["settings"].keys() & defaults.keys()
    assert len(shared) > 8 and all(SHIPPED["settings"][name] == defaults[name] for name in shared)
    assert (MINI / "filter.safetensors").stat().st_size < 16 * 2**10
    with safe_open(MINI / "filter.safetensors", "pt") as file:
        said = json.loads(file.metadata()["filter"])
    config = json.loads((MINI / "config.json").read_text())
    assert said == {
        "schema": 1, "block_length": 32, "vocab_size": config["vocab_size"], "num_layers": config["n_layers"],
    }  # fmt: skip


def test_mini_takes_its_filter_by_default() -> None:
    """It accepts several tokens per step, which its own threshold of 1 forbids."""
    prompts = ["reverse: Ada, Ben, Cal, Dan", "arithmetic: 47 + 8 - 3", "shuffle: Ada, Ben, Cal"]
    runs = {
        threshold: Sampler.from_pretrained(
            "mini", scheduler={"name": "learn2pd", "threshold": threshold}, device="cpu"
        ).generate(prompts, max_new_tokens=32)
        for threshold in (SHIPPED["settings"]["threshold"], 1.0)
    }
    fast, slow = runs.values()
    assert (fast.tokens_per_forward > 1).all()
    assert (slow.nfe == 32).all()
    assert fast.texts is not None
    assert fast.texts[:2] == ["Dan, Cal, Ben, Ada", "47 + 8 = 55, 55 - 3 = 52"]
    named = {"name": "learn2pd", "filter": str(MINI / "filter.safetensors")}
    again = Sampler.from_pretrained("mini", scheduler=named, device="cpu").generate(prompts, max_new_tokens=32)
    default = Sampler.from_pretrained("mini", scheduler="learn2pd", device="cpu", cache="dual")
    assert torch.equal(again.tokens, fast.tokens)
    assert default.plugins.scheduler.traits.find(TrainedBlocks) == TrainedBlocks(32)


def test_a_filter_travels_with_its_folder_and_with_no_other_model(checkpoint: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    copytree(MINI, copied)
    Sampler.from_pretrained(str(copied), scheduler="learn2pd", device="cpu")
    (copied / "filter.safetensors").unlink()
    with refused("option-missing: scheduler.filter, train=filter, train.model="):
        Sampler.from_pretrained(str(copied), scheduler="learn2pd", device="cpu")
    mine = {"name": "learn2pd", "filter": str(MINI / "filter.safetensors")}
    with refused("filter-incompatible: 177, 18"):
        Sampler.from_pretrained(str(checkpoint), scheduler=mine, device="cpu")
    with refused("plugins-incompatible: blocks.length=32"):
        Sampler.from_pretrained("mini", scheduler="learn2pd", blocks={"name": "fixed", "length": 8}, device="cpu")


def test_the_card_has_the_figures() -> None:
    """Between its markers stands what `filter.json` says."""
    card = (MINI / "README.md").read_text(encoding="utf-8")
    assert fill(card, "filter", table(*rows(SHIPPED["decoding"]))) == card
    test = SHIPPED["test"]
    assert f"precision {test['precision']:.4f}, recall {test['recall']:.4f}" in " ".join(card.split())
