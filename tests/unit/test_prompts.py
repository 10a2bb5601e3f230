"""Prompts in every shape, and one clear sentence for each that is wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dllm_sampler import ModelSpec
from dllm_sampler.inputs import prompts
from dllm_sampler.inputs.texts import decode
from dllm_sampler.models.denoiser import TransformerDenoiser
from tests import toys
from tests.refusals import refused
from tests.sampling import each

WORDS = ["<pad>", "<eos>", "<mask>", "<unk>", "user", "copy", "reverse", ":", ",", "Ada", "Ben"]  # of the fixture


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture
def spec() -> ModelSpec:
    return toys.denoiser().spec  # context 64, vocabulary 40, mask 39


ADA = [WORDS.index(word) for word in ("copy", ":", "Ada", ",", "Ben")]


@each(
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


@each(
    ("given", "message"),
    [
        ([], "prompt-missing"),
        ("", "prompt-empty: prompt 1"),
        ("  \n", "prompt-empty: prompt 1"),
        (["Ada", ""], "prompt-empty: prompt 2"),
        ([[5], []], "prompt-empty: prompt 2"),
        (torch.tensor([], dtype=torch.long), "prompt-empty: prompt 1"),
        ([5, 40], "token-outside-vocabulary: prompt 1, 40"),
        ([-1, 5], "token-outside-vocabulary: prompt 1, -1, 0 to 39"),
        ([[5], [6, 39]], "mask-token-given: prompt 2, 39, position 1"),
        ([5] * 61, "context-exceeded: prompt 1, 61, max_new_tokens"),
        (torch.ones(3), "prompt-type: prompt 1, 1-D, torch.float32"),
        (torch.ones(2, 2, 2).long(), "prompt-type: prompt 1, 1-D, 3-D"),
        (torch.tensor(5), "prompt-type: prompt 1, 1-D, 0-D"),
        (7, "prompt-type: prompt 1"),
        (None, "prompt-type: prompt 1"),
        ({"role": "user", "content": "Ada"}, "prompt-type: prompt 1"),
        (["Ada", 3.5], "prompt-type: prompt 2"),
        ([5, "Ada"], "prompt-type: prompt 1, entry 2, str"),
        ([[torch.tensor(5), torch.tensor(6)]], "prompt-type: prompt 1, entry 1, Tensor"),
        ([{"role": 3, "content": "Ada"}], "messages-invalid: prompt 1, the role of message 1 is 3"),
        ([5] * 64, "context-exceeded: prompt 1 has 64 tokens, Shorten the prompt"),
        ([{"role": "user"}], "messages-invalid: prompt 1, 'role', 'content'"),
        ("copy: Zoe", "text-outside-vocabulary: prompt 1, 'Zoe'"),
    ],
)
def test_wrong_prompts(given: Any, message: str, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> None:
    with refused(message):
        prompts.encode(given, tokenizer, spec, 4)


def test_a_mask_token_written_out(tokenizer: PreTrainedTokenizerBase, checkpoint: Path) -> None:
    spec = TransformerDenoiser(toys.transformer(), mask_id=2, eos_id=1).spec
    with refused("mask-token-given"):
        prompts.encode("Ada <mask>", tokenizer, spec, 4)


@each(
    ("value", "message"),
    [
        (0, "option-range: max_new_tokens"),
        (-3, "option-range: max_new_tokens, -3"),
        (2.0, "option-range: max_new_tokens"),
        (True, "option-range: max_new_tokens"),
        ("8", "option-range: max_new_tokens, '8'"),
        (None, "option-range: max_new_tokens"),
        (64, "context-exceeded: max_new_tokens=64"),
        (63, "context-exceeded: prompt 1, max_new_tokens, 63"),
    ],
)
def test_wrong_lengths(value: Any, message: str, spec: ModelSpec) -> None:
    with refused(message):
        prompts.encode([5, 6], None, spec, value)


def test_a_full_context_is_no_mistake(spec: ModelSpec) -> None:
    assert prompts.encode([5], None, spec, 63) == [[5]]


@each("given", ["Ada", [{"role": "user", "content": "Ada"}]])
def test_text_without_a_tokenizer(given: Any, spec: ModelSpec) -> None:
    with refused("tokenizer-missing: prompt 1"):
        prompts.encode(given, None, spec, 4)


def test_chat_without_a_template(checkpoint: Path, spec: ModelSpec) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = None
    with refused("chat-template-missing: prompt 1"):
        prompts.encode([{"role": "user", "content": "Ada"}], tokenizer, spec, 4)


def test_decode(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [ADA, [9, 1, 10], []]
    assert decode(rows, tokenizer, ()) == ["copy : Ada , Ben", "Ada Ben", ""]
    assert decode(rows, tokenizer, (" ,", "Ben")) == ["copy : Ada", "Ada ", ""]
