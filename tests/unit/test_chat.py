"""Chat templates: programs that came with a checkpoint, of which every fault is one sentence."""

import os
import resource
import select
import signal
import subprocess
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dllm_sampler import chat
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.errors import UserError
from dllm_sampler.prompts import encode
from tests import toys

MESSAGES = [{"role": "user", "content": "copy : Ada"}]
DOUBLED = "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROWN = (
    "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}"
)
COMPARED = GROWN + "{% endfor %}{{ n.a == n.b }}"  # one operation, of 2**60 steps
MULTIPLIED = "{% set n = namespace(x=7) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}"
TREE = "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(99) }}"


@pytest.fixture
def tokenizer(checkpoint: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture
def spec() -> ModelSpec:
    return toys.denoiser().spec


def test_the_same_ids_as_by_transformers(tokenizer: PreTrainedTokenizerBase) -> None:
    wanted: Any = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)
    assert encode([MESSAGES], tokenizer, toys.denoiser().spec, 4) == [list(wanted["input_ids"])]
    assert chat.text(MESSAGES, tokenizer, "it", False) == tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, continue_final_message=True
    )


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 1/0 }}", "prompt 1 does not fit this model's chat template: ZeroDivisionError: division by zero"),
        ("{{ 1 + 'a' }}", "prompt 1 does not fit this model's chat template: TypeError: unsupported operand"),
        ("{{ foo() }}", "prompt 1 does not fit this model's chat template: 'foo' is undefined"),
        ("{% for %}", "prompt 1 does not fit this model's chat template: Expected an expression"),
        ("{{ raise_exception('no system') }}", "prompt 1 does not fit this model's chat template: no system"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "chat template: RecursionError: maximum recursion depth"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "chat template: OverflowError: Range too big."),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__' of 'list' object is unsafe"),
        ("{{ 10 ** 1000000000 }}", "the chat template of this model takes more than 0.2 s for prompt 1"),
        (LOOP, "the chat template of this model takes more than 0.2 s for prompt 1"),
        pytest.param(
            TREE, "the chat template of this model takes more than 0.2 s for prompt 1", marks=pytest.mark.slow
        ),
        pytest.param(
            COMPARED, "the chat template of this model takes more than 0.2 s for prompt 1", marks=pytest.mark.slow
        ),
        pytest.param(
            MULTIPLIED, "the chat template of this model takes more than 0.2 s for prompt 1", marks=pytest.mark.slow
        ),
        ("{{ 'a' * 10000000000 }}", "the chat template of this model takes more than 256 MB for prompt 1"),
        pytest.param(
            DOUBLED, "the chat template of this model takes more than 256 MB for prompt 1", marks=pytest.mark.slow
        ),
        ("{{ 'a' * 4000001 }}", "the chat template of this model makes more than the 4000000 characters of prompt 1"),
    ],
)
def test_every_fault_is_one_sentence(
    template: str, said: str, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "SECONDS", 0.2 if "0.2 s" in said else 10.0)
    monkeypatch.setattr(chat, "MEMORY", 256 << 20)
    tokenizer.chat_template, before, begun = template, resource.getrlimit(resource.RLIMIT_AS), time.monotonic()
    with pytest.raises(UserError) as caught:
        encode([MESSAGES], tokenizer, spec, 4)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert time.monotonic() - begun < 5
    assert resource.getrlimit(resource.RLIMIT_AS) == before, "the limit is the template's"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that are started from now on; none is there."""
    chat._end()
    found, start = list[subprocess.Popen[bytes]](), subprocess.Popen

    def counted(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        found.append(start(*args, **options))
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", counted)
    return found


def test_one_process_for_many_prompts(
    tokenizer: PreTrainedTokenizerBase, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there for all templates, for a while, and not after Ctrl-C."""
    monkeypatch.setattr(chat, "IDLE", 0.5)
    tokenizer.chat_template = "{{ messages[0].content }}{{ eos_token }}"
    texts = ["Ada", "\ud800 \n\r\u2028", "x" * 3_000_000]
    for text in texts:
        assert chat.text([{"role": "user", "content": text}], tokenizer, "it") == text + str(tokenizer.eos_token)
    tokenizer.chat_template = "{{ messages[0].content }}!"
    with ThreadPoolExecutor(4) as pool:  # from any thread, one after another
        found = pool.map(lambda n: chat.text([{"role": "user", "content": str(n)}], tokenizer, "it"), range(20))
        assert list(found) == [f"{n}!" for n in range(20)]
    assert len(started) == 1 and started[0].stdout is not None
    select.select([started[0].stdout], [], [])  # it goes by itself, and has not quite gone when it is asked again
    assert chat.text(MESSAGES, tokenizer, "it") == "copy : Ada!" and len(started) == 2
    tokenizer.chat_template = LOOP

    def interrupt() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        chat.text(MESSAGES, tokenizer, "it")
    assert [one.poll() is None for one in started] == [False, False]


def test_a_copy_of_a_process_has_one_of_its_own(
    tokenizer: PreTrainedTokenizerBase, started: list[subprocess.Popen[bytes]]
) -> None:
    assert chat.text(MESSAGES, tokenizer, "it") and chat._renderer is not None
    with chat._ONE, warnings.catch_warnings():  # another thread asks just now
        warnings.simplefilter("ignore")  # of threads and copies
        process = os.fork()
        if not process:
            os._exit(0 if chat._renderer is None and chat._ONE.acquire(timeout=1) else 1)
    assert os.waitpid(process, 0)[1] == 0
    assert chat.text(MESSAGES, tokenizer, "it") and len(started) == 1


def test_it_does_not_start(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reason is one command away."""
    chat._end()
    (tmp_path / "transformers.py").write_text("raise RuntimeError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match="a process of their own, which does not start here: `") as caught:
        chat.text(MESSAGES, tokenizer, "it")
    command = str(caught.value).split("`")[1]
    assert "RuntimeError: broken" in subprocess.run(command.split(), capture_output=True, text=True).stderr


def test_a_tokenizer_that_renders_by_itself(
    tokenizer: PreTrainedTokenizerBase, started: list[subprocess.Popen[bytes]]
) -> None:
    class Own(type(tokenizer)):
        def apply_chat_template(self, conversation: Any, *_: Any, **options: Any) -> str:
            return f"{conversation[0]['content']} {sorted(options)}"

    tokenizer.__class__ = Own
    said = chat.text(MESSAGES, tokenizer, "it")
    assert said == "copy : Ada ['add_generation_prompt', 'continue_final_message', 'tokenize']" and not started


def test_a_field_that_json_has_not(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match="it does not fit this model's chat template: TypeError: Object of type object"):
        chat.text([{"role": "user", "content": "a", "x": object()}], tokenizer, "it")  # type: ignore[dict-item]


def test_words_that_are_not_in_the_vocabulary(spec: ModelSpec) -> None:
    """As of a plain text: a model would answer to something else."""
    tokenizer = AutoTokenizer.from_pretrained(Path(chat.__file__).parent / "models" / "mini")
    with pytest.raises(UserError, match="prompt 1 has 'Zzz', which is not in this model's vocabulary"):
        encode([[{"role": "user", "content": "copy: Ada, Zzz"}]], tokenizer, spec, 4)


def test_an_unknown_token_that_is_the_end_token_too(spec: ModelSpec) -> None:
    """As GPT-2 and Qwen2 have it: the template may write it, and unknown words are still refused."""
    words = Tokenizer(WordLevel({"<end>": 0, "a": 1}, unk_token="<end>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<end>")
    tokenizer.chat_template = "{{ messages[0].content }} {{ eos_token }}"
    assert encode([[{"role": "user", "content": "a a"}]], tokenizer, spec, 4) == [[1, 1, 0]]
    with pytest.raises(UserError, match="prompt 1 has 'b', which is not in this model's vocabulary"):
        encode([[{"role": "user", "content": "a b"}]], tokenizer, spec, 4)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], r"the content of message 1 should be a text"),
        ([*MESSAGES, {"role": "assistant", "content": None}], "prompt 1: the content of message 2 .* not None"),
        ([{"role": "user"}], "or chat messages with 'role' and 'content'"),
        (["copy", *MESSAGES], "or chat messages with 'role' and 'content'"),
    ],
)
def test_no_messages(messages: Any, said: str, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> None:
    with pytest.raises(UserError, match=said):
        encode([messages], tokenizer, spec, 4)
