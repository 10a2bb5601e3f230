"""Prompts in every shape, and one clear sentence for each that is wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dllm_sampler import ModelSpec, UserError
from dllm_sampler.inputs import prompts
from dllm_sampler.inputs.texts import decode
from dllm_sampler.models.denoiser import TransformerDenoiser
from tests import toys

WORDS = ["<pad>", "<eos>", "<mask>", "<unk>", "user", "copy", "reverse", ":", ",", "Ada", "Ben"]  # of the fixture


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture
def spec() -> ModelSpec:
    return toys.denoiser().spec  # context 64, vocabulary 40, mask 39


ADA = [WORDS.index(word) for word in ("copy", ":", "Ada", ",", "Ben")]


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ("copy: Ada, Ben", [ADA]),
        (["copy: Ada, Ben", "Ada"], [ADA, [9]]),
        ([5, 6, 7], [[5, 6, 7]]),
        ((5, 6, 7), [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (torch.tensor([5, 6]), [[5, 6]]),
        (torch.tensor([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        ([torch.tensor([5]), [6, 7], "Ada"], [[5], [6, 7], [9]]),
        ([{"role": "user", "content": "Ada"}], [[4, 7, 9]]),
        ([[{"role": "user", "content": "Ada"}], [{"role": "user", "content": "Ben"}]], [[4, 7, 9], [4, 7, 10]]),
    ],
)
def test_every_shape(given: Any, rows: list[list[int]], tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> None:
    assert prompts.encode(given, tokenizer, spec, 4) == rows


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "there is no prompt: give at least one"),
        ("", "prompt 1 is empty: give it at least one token"),
        ("  \n", "prompt 1 is empty: give it at least one token"),
        (["Ada", ""], "prompt 2 is empty: give it at least one token"),
        ([[5], []], "prompt 2 is empty: give it at least one token"),
        (torch.tensor([], dtype=torch.long), "prompt 1 is empty: give it at least one token"),
        ([5, 40], "prompt 1 has the token id 40, outside the vocabulary of 40"),
        ([-1, 5], "prompt 1 has the token id -1, outside the vocabulary of 40"),
        ([[5], [6, 39]], "prompt 2 contains the mask token (id 39) at position 1: a prompt must not have masks"),
        (
            [5] * 61,
            "prompt 1 has 61 tokens and max_new_tokens is 4, together more than the model's context of 64 positions",
        ),
        (torch.ones(3), "prompt 1 must be a 1-D tensor of token ids, not 1-D torch.float32"),
        (torch.ones(2, 2, 2).long(), "prompt 1 must be a 1-D tensor of token ids, not 3-D torch.int64"),
        (torch.tensor(5), "prompt 1 must be a 1-D tensor of token ids, not 0-D torch.int64"),
        (7, "prompt 1 must be a string, token ids or chat messages, not int"),
        (None, "prompt 1 must be a string, token ids or chat messages, not NoneType"),
        ({"role": "user", "content": "Ada"}, "prompt 1 must be a string, token ids or chat messages, not dict"),
        (["Ada", 3.5], "prompt 2 must be a string, token ids or chat messages, not float"),
        ([5, "Ada"], "prompt 1 must be a string, token ids, or chat messages with 'role' and 'content'"),
        ([{"role": "user"}], "prompt 1 must be a string, token ids, or chat messages with 'role' and 'content'"),
        ("copy: Zoe", "prompt 1 has 'Zoe', which is not in this model's vocabulary"),
    ],
)
def test_wrong_prompts(given: Any, message: str, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> None:
    with pytest.raises(UserError) as error:
        prompts.encode(given, tokenizer, spec, 4)
    assert str(error.value) == message


def test_a_mask_token_written_out(tokenizer: PreTrainedTokenizerBase, checkpoint: Path) -> None:
    spec = TransformerDenoiser(toys.transformer(), mask_id=2, eos_id=1).spec
    with pytest.raises(UserError, match="contains the mask token"):
        prompts.encode("Ada <mask>", tokenizer, spec, 4)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "max_new_tokens must be a whole number of at least 1, not 0"),
        (-3, "max_new_tokens must be a whole number of at least 1, not -3"),
        (2.0, "max_new_tokens must be a whole number of at least 1, not 2.0"),
        (True, "max_new_tokens must be a whole number of at least 1, not True"),
        ("8", "max_new_tokens must be a whole number of at least 1, not '8'"),
        (None, "max_new_tokens must be a whole number of at least 1, not None"),
        (64, "max_new_tokens=64 leaves no room for a prompt: the model's context is 64 positions"),
        (63, "prompt 1 has 2 tokens and max_new_tokens is 63, together more than the model's context of 64 positions"),
    ],
)
def test_wrong_lengths(value: Any, message: str, spec: ModelSpec) -> None:
    with pytest.raises(UserError) as error:
        prompts.encode([5, 6], None, spec, value)
    assert str(error.value) == message


def test_a_full_context_is_no_mistake(spec: ModelSpec) -> None:
    assert prompts.encode([5], None, spec, 63) == [[5]]


@pytest.mark.parametrize("given", ["Ada", [{"role": "user", "content": "Ada"}]])
def test_text_without_a_tokenizer(given: Any, spec: ModelSpec) -> None:
    with pytest.raises(UserError, match=r"^prompt 1 is text, but this checkpoint has no tokenizer: give token ids"):
        prompts.encode(given, None, spec, 4)


def test_chat_without_a_template(checkpoint: Path, spec: ModelSpec) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = None
    with pytest.raises(
        UserError, match=r"^prompt 1 has chat messages, .* no chat template\. Give plain text instead\.$"
    ):
        prompts.encode([{"role": "user", "content": "Ada"}], tokenizer, spec, 4)


def test_decode(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [ADA, [9, 1, 10], []]
    assert decode(rows, tokenizer, ()) == ["copy : Ada , Ben", "Ada Ben", ""]
    assert decode(rows, tokenizer, (" ,", "Ben")) == ["copy : Ada", "Ada ", ""]
