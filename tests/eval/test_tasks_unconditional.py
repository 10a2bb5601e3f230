"""Texts without a question: entropy and generative perplexity, against sums worked out plainly."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from dllm_sampler import config
from dllm_sampler.eval.command import main as evaluate
from dllm_sampler.eval.tasks.base import Answer
from dllm_sampler.eval.tasks.unconditional import entropy, pieces
from tests.refusals import refused

WORDS = ("<unk>", "<s>", "a", "b", "c", ",", "Ada", "Ben")


def task(**fields: Any) -> Any:
    return config.build("task", {"name": "unconditional", **fields})


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal language model of words, and a tokenizer that adds a mark to texts if it is not told otherwise."""
    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(0)
    made = Qwen2Config(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=6, initializer_range=0.5, pad_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(made).save_pretrained(folder)
    rules = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    rules.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=rules, unk_token="<unk>", bos_token="<s>").save_pretrained(folder)
    return folder


def answer(text: str) -> Answer:
    return Answer(text, [WORDS.index(word) for word in text.split()])


@torch.no_grad()
def plain(judge: Path, parts: list[list[int]]) -> float:
    """Each token by a forward of what comes before it."""
    model = Qwen2ForCausalLM.from_pretrained(judge).double().eval()
    losses = [
        -float(model(input_ids=torch.tensor([part[:at]])).logits[0, -1].log_softmax(-1)[part[at]])
        for part in parts
        for at in range(1, len(part))
    ]
    return math.exp(sum(losses) / len(losses))


def test_generative_perplexity_is_over_all_tokens(judge: Path) -> None:
    texts = ["a b c a", "b", "", "a a a a a a a b"]
    of_four = task(judge=str(judge), context=4)
    found = of_four.together(of_four.samples()[:4], [answer(text) for text in texts])
    parts = [[2, 3, 4, 2], [3], [2, 2, 2, 2], [2, 2, 2, 3]]
    assert found == {"generative_perplexity": pytest.approx(plain(judge, parts), rel=1e-5)}
    longest = task(judge=str(judge), context=1024).together([], [answer(texts[3])])
    parts = [[2] * 6, [2, 3]]  # as many as the judge has positions
    assert longest["generative_perplexity"] == pytest.approx(plain(judge, parts), rel=1e-5)
    assert task(judge=str(judge)).together([], [answer("b")]) == {}, "no token follows another one"
    assert task().together([], [answer("a b")]) == {}, "no judge"


def test_entropy_by_hand() -> None:
    assert entropy([5, 5, 5, 5]) == 0
    assert entropy([1, 2, 3, 4]) == pytest.approx(math.log(4))
    assert entropy([1, 1, 2, 3]) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))
    assert task().grade(task().samples()[0], answer("a b")) == {"score": 1.0, "entropy": pytest.approx(math.log(2))}
    assert task().grade(task().samples()[0], Answer("", []))["score"] == 0
    assert [list(one) for one in pieces(range(5), 2)] == [[0, 1], [2, 3], [4]]


def test_what_a_text_begins_with() -> None:
    class Marked:
        bos_token_id = 7

    of: Any = task(count=2)
    first, second = of.samples()
    assert of.prompt(first, Marked()) == [7] and first.prompt == second.prompt
    assert task(begin="Once").prompt(first, Marked()) == "Once"
    with refused("option-missing: task.begin"):
        of.prompt(first, None)


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"length": 0}, "option-range: task.length, 0"),
        ({"context": 1}, "option-range: task.context, 1"),
        ({"judge": "nowhere"}, "model-not-found: task.judge=nowhere"),
    ],
)
def test_mistakes(fields: dict[str, Any], refusal: str) -> None:
    with refused(refusal):
        task(**fields)


def test_fields_are_the_yaml() -> None:
    settings = config.entry("task", "unconditional").settings
    assert {key: value for key, value in settings.items() if key != "_target_"} == vars(task())


def test_a_run_with_a_judge(judge: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["task=unconditional", "task.begin='sort: Ben, Ada'", "task.count=2", "task.length=16", "temperature=1"]
    assert evaluate([*words, f"task.judge={judge}", f"output={tmp_path}", "device=cpu", "oracle=false"]) == 0
    assert "generative perplexity" in capsys.readouterr().out
    (file,) = tmp_path.glob("*/run.json")
    assert json.loads(file.read_text())["measures"]["generative_perplexity"] > 1
