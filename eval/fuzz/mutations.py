"""Small changes by chance to words, texts, JSON and bytes."""

from __future__ import annotations

import json
import struct
from random import Random
from typing import Any

# What is no number, no known name and no short text. The last ones are long.
WORDS = (
    "", " ", "0", "-1", "-0", "1.5", "1e400", "nan", "-inf", "true", "null", "None", "[]", "{}", "[1,2]", "{a:1}",
    "a,b", "1" * 40, "0x10", "1_0", "٣", "½", "é", "e\u0301", "\u202e", "\ufeff", "\ud800", "🙂", "\x00", "\n", "\t",
    "'", '"', "\\", "${seed}", "${oc.env:HOME}", "${x", "$(id)", "%s%n", "../../etc/passwd", "~", "~nobody/x",
    "/dev/null", "/", ".", "glob(*)", "range(1,3)", "choice(1,2)", "_target_", "a=b", "@", "<script>", "(" * 300,
    "[" * 300 + "]" * 300, "x" * 5000,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**40, -(2**63), 0.5, -0.0, 1e308, float("inf"), float("nan"), "",
    "x", "1", "é🙂", "\x00", "a" * 5000, [], [1], [[]], [None], {}, {"a": 1}, {"": None}, [0] * 300,
)  # fmt: skip


def typo(random: Random, word: str) -> str:
    """The word with a letter too many, too few, swapped or other."""
    at = random.randrange(len(word))
    letter = random.choice("abcdefghijklmnopqrstuvwxyz_")
    return random.choice(
        [
            word[:at] + word[at + 1 :],
            word[:at] + word[at] + word[at:],
            word[:at] + letter + word[at + 1 :],
            word[:at] + letter + word[at:],
            word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :],
        ]
    )


def text(random: Random, given: str) -> str:
    """A text with a piece taken out, doubled, or something else put in."""
    begin = random.randint(0, len(given))
    end = min(len(given), begin + random.choice([0, 1, 1, 3, 20]))
    piece = random.choice(["", given[begin:end] * 2, random.choice(WORDS), random.choice('{}[]()",:\\|*+?\n')])
    changed = given[:begin] + piece + given[end:]
    return changed.encode("utf-8", "replace").decode() if random.random() < 0.9 else changed


def value(random: Random, given: Any) -> Any:
    """JSON with one place changed, renamed, dropped or nested."""
    places = list(_places(given))
    path = random.choice(places) if places else ()
    how = random.choice(["other", "other", "other", "drop", "rename", "near", "nest"])
    return _changed(random, given, path, how)


def _places(node: Any, path: tuple[Any, ...] = ()) -> Any:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        yield (*path, key)
        yield from _places(child, (*path, key))


def _changed(random: Random, node: Any, path: tuple[Any, ...], how: str) -> Any:
    if not path:
        return _other(random, node, how)
    key, *rest = path
    if isinstance(node, list):
        if not rest and how in ("drop", "rename"):
            return node[:key] + node[key + 1 :]
        return [_changed(random, one, tuple(rest), how) if at == key else one for at, one in enumerate(node)]
    if not rest and how == "drop":
        return {name: one for name, one in node.items() if name != key}
    if not rest and how == "rename":
        return {(typo(random, name) if name == key and name else name): one for name, one in node.items()}
    return {name: _changed(random, one, tuple(rest), how) if name == key else one for name, one in node.items()}


def _other(random: Random, node: Any, how: str) -> Any:
    if how == "near" and isinstance(node, int | float) and not isinstance(node, bool):
        return random.choice([node + 1, node - 1, 2 * node, -node, float(node), str(node)])
    if how == "nest":
        return random.choice([[node], {"value": node}, [node] * 3])
    return random.choice(VALUES)


def file(random: Random, content: bytes, name: str) -> bytes:
    """A file as it comes out of a bad copy, or of an editor."""
    if random.random() < 0.3 or len(content) < 8:
        return _broken(random, content)
    if name.endswith(".safetensors"):
        return _tensors(random, content)
    if name.endswith(".json"):
        return _json(value(random, json.loads(content)))
    if name.endswith(".jsonl"):
        lines = content.decode().splitlines()
        at = random.randrange(len(lines))
        lines[at] = _json(value(random, json.loads(lines[at]))).decode("utf-8", "surrogatepass")
        return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
    return text(random, content.decode()).encode("utf-8", "replace")


def _json(node: Any) -> bytes:
    return json.dumps(node, ensure_ascii=True).encode()


def _broken(random: Random, content: bytes) -> bytes:
    at = random.randint(0, len(content))
    return random.choice(
        [
            b"",
            content[:at],
            content[:at] + bytes([random.randrange(256)]) + content[at + 1 :],
            content[:at] + b"\x00" * 16 + content[at:],
            b"\xef\xbb\xbf" + content,
            content.replace(b"\n", b"\r\n"),
            content + content,
            content + b"\xff\xfe\n",
            b"[" * 100_000,
            b"null",
            b"[]",
            b"<html><body>404</body></html>",
        ]
    )


def _tensors(random: Random, content: bytes) -> bytes:
    """A safetensors file with another header, or a header of another length."""
    size = struct.unpack("<Q", content[:8])[0]
    header, data = content[8 : 8 + size], content[8 + size :]
    how = random.randrange(3)
    if how == 0:
        return struct.pack("<Q", random.choice([0, max(0, size - 1), size + 1, 2**40, 2**63])) + content[8:]
    if how == 1:
        header = _json(value(random, json.loads(header)))
    else:
        data = data[: random.randint(0, len(data))]
    return struct.pack("<Q", len(header)) + header + data


def wrong_size(random: Random, content: bytes, keys: tuple[str, ...]) -> tuple[bytes, str]:
    """A config with another size, or a safetensors file with a tensor of another name; and what may not be accepted."""
    if keys:
        node = json.loads(content)
        key = random.choice([one for one in keys if one in node])
        return _json(
            node | {key: random.choice([0, -1, 7 * node[key], node[key] + 1, str(node[key])])}
        ), f"another {key}"
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    name = random.choice([one for one in header if one != "__metadata__"])
    renamed = _json({(f"{key}x" if key == name else key): one for key, one in header.items()})
    return struct.pack("<Q", len(renamed)) + renamed + content[8 + size :], "a tensor of another name"
