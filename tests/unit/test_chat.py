"""Chat templates: programs that came with a checkpoint, of which every fault is one sentence."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

import dllm_sampler
from dllm_sampler import Sampler, config
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.inputs.prompts import chat_text, encode
from dllm_sampler.inputs.texts import stop_strings
from dllm_sampler.models import loading
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
        (["copy", *MESSAGES], "prompt-type: entry 1, str"),
    ],
)
def test_no_messages(messages: Any, said: str, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> None:
    with refused(said):
        encode([messages], tokenizer, spec, 4)


DATA = Path(__file__).parent.parent / "conformance" / "data"
BERT_CHAT = {**config.entry("model", "modernbert-base-chat").settings, "path": str(DATA / "tiny-modernbert-chat")}


def test_what_a_preset_adds_to_the_files_of_a_checkpoint() -> None:
    """ModernBERT names [SEP] as its end, and has no template; BERT-Chat ends with padding, after a text."""
    model = Sampler.from_pretrained({**BERT_CHAT, "eos_id": 195}, device="cpu", stop="block")
    assert model.spec.eos_ids == (195,) and model.spec.pad_id == 195
    assert Sampler.from_pretrained(BERT_CHAT["path"], device="cpu").spec.eos_ids == (199,)
    chat = [
        {"role": "user", "content": " Hi\n"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "?"},
    ]
    assert model.tokenizer is not None
    assert chat_text(chat, model.tokenizer, "it") == (
        "[Question]\nHi\n[/Question]\n\n[Answer]\nHo\n[/Answer]\n\n[Question]\n?\n[/Question]\n\n[Answer]\n"
    )
    assert stop_strings(("x", "[/Answer]"), model.tokenizer) == ("x", "[/Answer]")
    plain = model.generate([[5, 9, 30]], max_new_tokens=8)
    piece = model.tokenizer.decode(plain.tokens[0, 2:3])
    model.tokenizer.init_kwargs["stop_strings"] = [piece]
    cut = model.generate([[5, 9, 30]], max_new_tokens=8)
    assert cut.lengths[0] <= 2 < plain.lengths[0], "a call without stop strings ends at the model's"


def test_names_that_a_template_sees() -> None:
    settings = {**BERT_CHAT, "eos_id": None, "chat_template": "{{ messages[0].content }}{{ ' aloud' if thinks }}"}
    for thinks, text in ((True, "copy : Ada aloud"), (False, "copy : Ada")):
        given = {**settings, "chat_options": {"thinks": thinks}}
        loaded = loading.load(**{name: value for name, value in given.items() if name != "cfg_scale"}, device="cpu")
        assert loaded.tokenizer is not None
        assert chat_text(MESSAGES, loaded.tokenizer, "it") == text


def test_texts_need_a_tokenizer(checkpoint: Path) -> None:
    for name, value in (("stop_strings", [""]), ("chat_template", "")):
        with refused(f"option-type: model.{name}"):
            loading.load(checkpoint, device="cpu", **{name: value})  # pyright: ignore[reportArgumentType]
    for name, value in (("stop_strings", ["a"]), ("chat_template", "a"), ("chat_options", {"a": 1})):
        with refused(f"tokenizer-missing: model.{name}"):
            loading.load(DATA / "tiny-llada", device="cpu", **{name: value})  # pyright: ignore[reportArgumentType]
    with refused("option-not-applicable: model.eos_id"):
        loading.load(DATA / "tiny-diffusion-gemma", device="cpu", eos_id=1)
