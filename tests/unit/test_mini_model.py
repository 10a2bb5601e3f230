"""The shipped checkpoint: it answers, its trade-offs are visible, and its card is complete."""

from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest

from dllm_sampler.eval.tasks.mini import held_out_prompts
from dllm_sampler.models.mini_tasks import NAMES, TASKS
from dllm_sampler.models.mini_tokenizer import build_tokenizer, vocabulary
from dllm_sampler.sampler import Sampler
from tests.refusals import refused
from tests.sampling import sampled
from tests.tables.markdown import fill
from tests.tables.mini_card import DECODERS, operations, score, words

FOLDER = Path(str(files("dllm_sampler") / "models/mini"))
EASY = ["copy", "reverse", "sort", "insert at", "remove at", "replace at", "json", "brackets"]
HARD = ["arithmetic", "latin"]


@cache
def sampler(decoder: str) -> Sampler:
    return Sampler.from_pretrained("mini", scheduler=DECODERS[decoder], device="cpu")


def right(decoder: str, task: str, count: int = 10, canvas: int = 32) -> float:
    return score(sampler(decoder), TASKS[task], held_out_prompts(TASKS[task], count), canvas)[0] / 100


@pytest.mark.parametrize("task", sampled(EASY + HARD))
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
