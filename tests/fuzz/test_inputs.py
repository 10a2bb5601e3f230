"""Bad words, files and values: each command, and each call of Python, ends with one sentence or a right answer."""

from __future__ import annotations

import functools
import json
import resource
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from dllm_sampler import Sampler
from dllm_sampler.cli.compose import SAMPLE, App, composition
from dllm_sampler.eval.jobs import EVAL
from dllm_sampler.eval.tuning import TUNE
from dllm_sampler.training.cli import TRAIN
from tests import tiny, toys
from tests.fuzz import assert_is_sentence, fuzz, scene, sentences

MEMORY = 12 * 2**30  # bytes of address space
LINES = 12  # of a refusal, warnings included
# Words that are no number, name or short text. Random text has no slash, so that no file is written outside.
ODD = ["", "-1", "1.5", "1e400", "nan", "-inf", "null", "[]", "{}", "[1,2]", "{a:1}", "a,b", "1" * 40, "1_0", "٣", "é"]
ODD += ["\u202e", "\ud800", "\x00", "\n", "'", '"', "\\", "${seed}", "${x", "$(id)", "%s%n", "~", "/dev/null", ".", "/"]
ODD += ["glob(*)", "range(1,3)", "choice(1,2)", "_target_", "a=b", "@", "(" * 300, "[" * 300 + "]" * 300, "x" * 5000]
WORDS = st.sampled_from(ODD) | st.text(st.characters(exclude_characters="/~"), max_size=9)
NUMBERS = st.sampled_from([0, -1, 1, 3, 2**31, 2**63, 10**40, -(2**63)]) | st.floats()
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=5)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))


@contextmanager
def limited() -> Iterator[None]:
    """Limit the memory, and ignore warnings."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, before[1]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def ends(command: str, words: Sequence[str], file: str = "", content: bytes = b"") -> int:
    """Run a command, and check how it ends. Returns its exit status.

    Args:
        file: this one has another content.
    """
    with limited(), scene.copied([*words, file.partition("/")[0]]) as folder:
        if file:
            (folder / file).write_bytes(content)
        status, err = scene.run(command, words)
    assert "Traceback" not in err
    assert status in (0, 2), err
    if status == 2:
        *before, said = err.strip().splitlines()
        assert_is_sentence(said.removeprefix(f"{command}: "))
        assert len(before) < LINES, err
    return status


@pytest.mark.slow
@pytest.mark.parametrize(("command", "words", "file"), scene.READS)
def test_undamaged_files_are_read(command: str, words: list[str], file: str) -> None:
    with scene.copied([*words, file.partition("/")[0]]) as folder:
        content = (folder / file).read_bytes()
    assert ends(command, words, file, content) == 0


# Each command with words that run in a moment, and the app that has its settings.
COMMANDS: dict[str, tuple[App, list[str]]] = {
    "dllm-sample": (SAMPLE, scene.SAMPLE),
    "dllm-eval": (EVAL, scene.EVAL),
    "dllm-train": (TRAIN, [*scene.TRAIN, "train.output_dir=new"]),
    "dllm-train train=sft": (TRAIN, ["train=sft", *scene.TUNING]),
    "dllm-tune": (TUNE, scene.TUNE),
    scene.ENGINE: (SAMPLE, ["scheduler=threshold"]),
}


@functools.cache
def settings(name: str) -> dict[str, Any]:
    """Return all settings of a command and their values, by key."""
    app, words = COMMANDS[name]
    chosen = [word for word in words if word.startswith("train=")]
    return flat(composition(app, chosen).tree)


def flat(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Return the leaves of a tree by dotted key."""
    leaves = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return {key: value for key, value in leaves.items() if "_target_" not in key}


@fuzz(3, 4, name=st.sampled_from([*COMMANDS]), data=st.data())
def test_a_strange_value_of_a_setting(name: str, data: st.DataObject) -> None:
    """A number or a truth value that is neither is never accepted."""
    key, right = data.draw(st.sampled_from(sorted(settings(name).items(), key=str)), label="setting")
    value = data.draw(WORDS | st.sampled_from(["abc", "{a: 1}"]), label="value")
    command, words = name.partition(" train=")[0], [*COMMANDS[name][1], f"{key}={value}"]
    status = ends(command, words)
    assert status == 2 or not isinstance(right, int | float) or value not in ("abc", "{a: 1}")


LETTERS = st.sampled_from("abcdefghijklmnopqrstuvwxyz_")


@fuzz(2, 1, name=st.sampled_from([*COMMANDS]), data=st.data())
def test_an_unknown_setting_is_refused(name: str, data: st.DataObject) -> None:
    known = settings(name)
    key = data.draw(st.sampled_from(sorted(known)), label="key")
    at, letter = data.draw(st.integers(0, len(key) - 1)), data.draw(LETTERS)
    wrong = data.draw(
        st.sampled_from([key[:at] + letter + key[at:], key[:at] + letter + key[at + 1 :], f"{key}.{letter}"])
    )
    groups = {one.partition(".")[0] for one in known}
    if wrong not in known and wrong not in groups:
        assert ends(name.partition(" train=")[0], [*COMMANDS[name][1], f"{wrong}=1"]) == 2, wrong


@fuzz(3, 1, command=st.sampled_from([*scene.MODULES]), word=WORDS | WORDS.map(lambda word: f"--{word}"), data=st.data())
def test_a_strange_word(command: str, word: str, data: st.DataObject) -> None:
    words = ["runs", "--csv", "-"] if command == "dllm-report" else COMMANDS[command][1]
    at = data.draw(st.integers(0, len(words)))
    ends(command, [*words[:at], word, *words[at:]])


@st.composite
def changed(draw: st.DrawFn, tree: Any) -> Any:
    """JSON with one value replaced, renamed, dropped or nested."""
    if not isinstance(tree, dict | list) or not tree or draw(st.integers(0, 9)) == 0:
        return draw(JSON | st.sampled_from([[tree], {"value": tree}, f"{tree}"]))
    keys = sorted(tree) if isinstance(tree, dict) else range(len(tree))
    key, how = draw(st.sampled_from(keys)), draw(st.sampled_from(["change", "change", "change", "drop", "rename"]))
    fresh = tree.copy()
    value = fresh.pop(key)
    if how == "drop":
        return fresh
    if isinstance(fresh, list):
        fresh.insert(key, draw(changed(value)))
    else:
        fresh[f"{key}x" if how == "rename" else key] = value if how == "rename" else draw(changed(value))
    return fresh


@st.composite
def damaged(draw: st.DrawFn, name: str, content: bytes) -> bytes:
    """A file after a bad copy, or an edit."""
    at, how = draw(st.integers(0, len(content))), draw(st.integers(0, 9))
    if how < 3:
        text = draw(WORDS).encode("utf-8", "replace")
        cut, twice, more = content[:at], content + content, [b"", b"\xff", b"\0" * 16, text]
        whole = [b"", b"\xef\xbb\xbf" + content, b"[" * 100_000, b"null", b"[]", b"<html><body>404</body></html>"]
        edited = [cut + piece + content[at + skip :] for piece in more for skip in (0, 1, 20)]
        return draw(st.sampled_from([cut, twice, *edited, *whole]))
    if name.endswith(".safetensors"):
        size = struct.unpack("<Q", content[:8])[0]
        header = json.dumps(draw(changed(json.loads(content[8 : 8 + size])))).encode()
        length = draw(st.sampled_from([len(header)] * 3 + [0, len(header) + 1, 2**40, 2**63]))
        return struct.pack("<Q", length) + header + content[8 + size :]
    if name.endswith(".json"):
        return json.dumps(draw(changed(json.loads(content)))).encode()
    lines = content.decode().splitlines()
    row = draw(st.integers(0, len(lines) - 1))
    if name.endswith(".jsonl"):
        lines[row] = json.dumps(draw(changed(json.loads(lines[row]))))
    else:
        key, colon, _ = lines[row].partition(": ")
        lines[row] = f"{key}{colon}{draw(WORDS | JSON.map(repr))}"
    return "\n".join([*lines, ""]).encode("utf-8", "replace")


@fuzz(1, 5, reads=st.sampled_from(scene.READS), data=st.data())
def test_a_damaged_file(reads: tuple[str, list[str], str], data: st.DataObject) -> None:
    command, words, name = reads
    with scene.copied([*words, name.partition("/")[0]]) as folder:
        content = (folder / name).read_bytes()
    ends(command, words, name, data.draw(damaged(name, content), label="content"))


SIZES = ("hidden_size", "d_model", "num_hidden_layers", "n_layers", "num_attention_heads", "n_heads")


@fuzz(1, 1, family=st.sampled_from(tiny.EVERY), data=st.data())
def test_a_checkpoint_of_another_size_is_refused(family: str, data: st.DataObject) -> None:
    file = f"tiny-{family}/config.json"
    words = ["ab", f"model=tiny-{family}", *scene.SAMPLE[2:]]
    with scene.copied(words) as folder:
        raw = json.loads((folder / file).read_text())
    vocab = "embedding_size" if "embedding_size" in raw else "vocab_size"
    key = data.draw(st.sampled_from([key for key in (*SIZES, vocab) if key in raw]))
    raw[key] = data.draw(st.sampled_from([0, -1, raw[key] + 1, 7 * raw[key], str(raw[key])]))
    assert ends("dllm-sample", words, file, json.dumps(raw).encode()) == 2


ANYTHING = JSON | st.sampled_from([b"x", object(), 1j, {1}, range(0), torch.ones(2, 2), torch.tensor(3), [[1]] * 9])
OPTIONS = ("scheduler", "cache", "blocks", "stop", "guide", "temperature", "top_k", "top_p", "max_steps")
OPTIONS += ("backend", "compile", "cuda_graph", "compat", "judge", "entropy", "noise", "tokenizer")
CALL = ("prompts", "max_new_tokens", "block_length", "samples", "seed", "stop_strings", "prefix", "suffix", "pinned")
CALL += ("forms", "progress", "temperature")
MANY = ("batch_size", "order", "on_error", "batching", "max_length")


@fuzz(8, 10, method=st.sampled_from(["generate", "generate_many"]), data=st.data())
def test_a_strange_argument(method: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from((*OPTIONS, *CALL, *(MANY if method == "generate_many" else ()))), label="name")
    value = data.draw(ANYTHING, label="value")
    call: dict[str, Any] = {"prompts": [[5, 11], [7]], "max_new_tokens": 6}
    options: dict[str, Any] = {"tokenizer": toys.tokenizer()}
    (options if name in OPTIONS else call)[name] = value
    with limited(), sentences():
        answers = getattr(Sampler(toys.denoiser(), **options), method)(**call)
        list(answers if method == "generate_many" else ())
