"""Chat templates: programs that came with a checkpoint, of which every fault is one sentence."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

import dllm_sampler
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.inputs.prompts import chat_text, encode
from tests import toys
from tests.refusals import refused
from tests.sampling import each

MESSAGES = [{"role": "user", "content": "copy : Ada"}]


@pytest.fixture
def tokenizer(checkpoint: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture
def spec() -> ModelSpec:
    return toys.denoiser().spec


def test_the_same_ids_as_by_transformers(tokenizer: PreTrainedTokenizerBase) -> None:
    wanted: Any = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)
    assert encode([MESSAGES], tokenizer, toys.denoiser().spec, 4) == [list(wanted["input_ids"])]
    assert chat_text(MESSAGES, tokenizer, "it", False) == tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, continue_final_message=True
    )


@each(
    ("template", "said"),
    [
        ("{{ 1/0 }}", "chat-template-failed: prompt 1"),
        ("{{ 1 + 'a' }}", "chat-template-failed: prompt 1"),
        ("{{ foo() }}", "chat-template-failed: prompt 1, 'foo'"),
        ("{% for %}", "chat-template-failed: prompt 1"),
        ("{{ raise_exception('no system') }}", "chat-template-failed: prompt 1"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "chat-template-failed"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "chat-template-failed"),
        ("{{ messages.__class__.__mro__ }}", "chat-template-failed: '__class__', 'list'"),
    ],
)
def test_every_fault_is_one_sentence(
    template: str, said: str, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec
) -> None:
    tokenizer.chat_template = template
    with refused(said) as caught:
        encode([MESSAGES], tokenizer, spec, 4)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_renders_by_itself(tokenizer: PreTrainedTokenizerBase) -> None:
    class Own(type(tokenizer)):
        def apply_chat_template(self, conversation: Any, *_: Any, **options: Any) -> str:
            return f"{conversation[0]['content']} {sorted(options)}"

    tokenizer.__class__ = Own
    said = chat_text(MESSAGES, tokenizer, "it")
    assert said == "copy : Ada ['add_generation_prompt', 'continue_final_message', 'tokenize']"


def test_words_that_are_not_in_the_vocabulary(spec: ModelSpec) -> None:
    """As of a plain text: a model would answer to something else."""
    tokenizer = AutoTokenizer.from_pretrained(Path(dllm_sampler.__file__).parent / "models" / "mini")
    with refused("text-outside-vocabulary: prompt 1, 'Zzz'"):
        encode([[{"role": "user", "content": "copy: Ada, Zzz"}]], tokenizer, spec, 4)


def test_an_unknown_token_that_is_the_end_token_too(spec: ModelSpec) -> None:
    """As GPT-2 and Qwen2 have it: the template may write it, and unknown words are still refused."""
    words = Tokenizer(WordLevel({"<end>": 0, "a": 1}, unk_token="<end>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<end>")
    tokenizer.chat_template = "{{ messages[0].content }} {{ eos_token }}"
    assert encode([[{"role": "user", "content": "a a"}]], tokenizer, spec, 4) == [[1, 1, 0]]
    with refused("text-outside-vocabulary: prompt 1, 'b'"):
        encode([[{"role": "user", "content": "a b"}]], tokenizer, spec, 4)


@each(
    ("messages", "said"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "messages-invalid: message 1"),
        ([*MESSAGES, {"role": "assistant", "content": None}], "messages-invalid: prompt 1, message 2"),
        ([{"role": "user"}], "messages-invalid: 'role', 'content'"),
        (["copy", *MESSAGES], "messages-invalid: 'role', 'content'"),
    ],
)
def test_no_messages(messages: Any, said: str, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> None:
    with refused(said):
        encode([messages], tokenizer, spec, 4)
