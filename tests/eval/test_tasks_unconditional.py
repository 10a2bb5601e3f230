"""Texts without a question: entropy, generative perplexity and MAUVE, against sums worked out plainly."""

import json
import math
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2Model

from dllm_sampler import config
from dllm_sampler.eval.command import main as evaluate
from dllm_sampler.eval.tasks.base import Answer
from dllm_sampler.eval.tasks.unconditional import entropy, pieces
from tests.refusals import refused

WORDS = ("<unk>", "<s>", "a", "b", "c", ",", "Ada", "Ben")


def task(**fields: Any) -> Any:
    return config.build("task", {"name": "unconditional", **fields})


def tokenizer(folder: Path) -> None:
    """Write a tokenizer of words into a folder."""
    rules = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    rules.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=rules, unk_token="<unk>", bos_token="<s>").save_pretrained(folder)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal language model of words, and its tokenizer."""
    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(0)
    made = Qwen2Config(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=6, initializer_range=0.5, pad_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(made).save_pretrained(folder)
    tokenizer(folder)
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


def references(folder: Path, texts: list[Any]) -> str:
    file = folder / "true.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(file)


TEXTS, TRUE = ["a b c a", "", "a a a a a a a b"], ["a c b", "b c", "c", "a"]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for the package, and the calls of it."""
    calls: list[Any] = []
    module: Any = ModuleType("mauve")
    module.__spec__ = ModuleSpec("mauve", None)
    module.compute_mauve = lambda *sides, **options: calls.append((sides, options)) or SimpleNamespace(mauve=0.25)
    monkeypatch.setitem(sys.modules, "mauve", module)
    return calls


def test_mauve_is_of_the_last_hidden_state(judge: Path, tmp_path: Path, package: list[Any]) -> None:
    of = task(judge=str(judge), count=3, context=4, references=references(tmp_path, TRUE))
    assert of.together(of.samples(), [answer(text) for text in TEXTS])["mauve"] == 0.25
    (((ours, theirs), options),) = package
    assert options["max_text_length"] == 4
    model = Qwen2Model.from_pretrained(judge).eval()
    for found, ids in ((ours, [[2, 3, 4, 2], [2, 2, 2, 2]]), (theirs, [[2, 4, 3], [3, 4], [4]])):
        with torch.no_grad():
            wanted = [model(input_ids=torch.tensor([one])).last_hidden_state[0, -1].numpy() for one in ids]
        assert found.shape == (len(ids), 16)
        assert found == pytest.approx(np.array(wanted), abs=1e-6)


@pytest.mark.usefixtures("package")
def test_mistakes_of_references(judge: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = references(tmp_path, TRUE)
    with refused("option-missing: task.references, task.judge"):
        task(references=file)
    with refused("file-invalid: 4 texts for 5 samples, task.count=4"):
        task(references=file, judge=str(judge), count=5)
    with refused('example-invalid: line 2 has no text under "text"'):
        task(references=references(tmp_path, ["a", None]), judge=str(judge), count=2)
    with refused("file-unreadable: task.references="):
        task(references=file + "x", judge=str(judge))
    Path(file).write_text("a text\n")
    with refused("json-invalid: line 1"):
        task(references=file, judge=str(judge))
    references(tmp_path, TRUE)
    monkeypatch.setitem(sys.modules, "mauve", None)
    with refused("package-missing: task.references, mauve-text"):
        task(references=file, judge=str(judge), count=4)


def test_mauve_is_that_of_the_package(tmp_path: Path) -> None:
    """The package makes its own features of the same checkpoint."""
    mauve = pytest.importorskip("mauve")
    folder = tmp_path / "gpt2-tiny"  # the package goes by the name
    torch.manual_seed(0)
    sizes: Any = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "initializer_range": 0.5}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), bos_token_id=1, eos_token_id=1, **sizes)).save_pretrained(folder)
    tokenizer(folder)
    rng = Random(0)
    ours, theirs = ([" ".join(rng.choices(WORDS[2:], k=rng.randint(1, 12))) for _ in range(60)] for _ in range(2))
    of = task(judge=str(folder), count=60, references=references(tmp_path, theirs))
    found = of.together(of.samples(), [answer(text) for text in ours])["mauve"]
    wanted = mauve.compute_mauve(p_text=ours, q_text=theirs, featurize_model_name=str(folder), max_text_length=8)
    assert found == pytest.approx(float(wanted.mauve), abs=1e-6) and 0 < found < 1


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
        ({"judge": "nowhere"}, "model-not-found: task.judge='nowhere'"),
        ({"judge": "tests"}, "checkpoint-incomplete: task.judge=tests"),
        ({"judge": "tests/conformance/data/tiny-llada"}, "architecture-unknown: task.judge=tests/conformance, 'llada'"),
        ({"context": 5}, "option-missing: task.context=5, task.judge"),
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
