"""JSON and YAML that somebody may have written by hand, damaged, or made to hang their reader."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

LONGEST_YAML = 200_000  # characters of a file
MOST_NODES = 10_000  # keys, values and lists of a YAML file, those that its aliases repeat included
LARGEST = 1_000_000  # nodes and characters of settings whose interpolations are resolved
_WORD = re.compile(r"[^\s${}:,'\"]+")  # of an interpolation: it may name another setting
_NESTED = re.compile(r"\$\{[^{}]*\$\{")


def load_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, not UTF-8, or has more brackets inside each other than Python can follow.
    """
    try:
        return json.loads(text)
    except RecursionError:  # which is no ValueError: a caller that expects a damaged file would miss it
        raise ValueError("lists and objects are nested too deeply") from None


def yaml_text(file: Path) -> str:
    """Return the text of a user's YAML file that is small enough to be built.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8, or too large, also by its aliases.
        yaml.YAMLError: it is not YAML.
    """
    with file.open(encoding="utf-8") as lines:
        text = lines.read(LONGEST_YAML + 1)
    if len(text) > LONGEST_YAML:
        raise ValueError(f"it has more than {LONGEST_YAML} characters")
    _check_aliases(text)
    return text


def _check_aliases(text: str) -> None:
    """Refuse YAML whose aliases repeat too much. Its nodes are shared until it is built, and can be counted."""
    counts: dict[int, int] = {}
    open_nodes: set[int] = set()

    def count(node: yaml.Node) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if id(node) in open_nodes:
            raise ValueError("an alias in it contains itself")
        if id(node) not in counts:
            open_nodes.add(id(node))
            parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
            counts[id(node)] = 1 + sum(map(count, parts))
            open_nodes.remove(id(node))
        if counts[id(node)] > MOST_NODES:
            raise ValueError(f"it has more than {MOST_NODES} values once its aliases are written out")
        return counts[id(node)]

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None:
        count(root)


def check_interpolations(tree: Any) -> None:
    """Refuse settings whose interpolations (`${name}`) would make too much of them.

    Args:
        tree: the settings before they are resolved, in dicts and lists.

    Raises:
        ValueError: more than `LARGEST`, or an interpolation inside another one, whose size cannot be known.
    """
    sizes: dict[tuple[str, ...], int] = {}

    def size(path: tuple[str, ...], node: Any) -> int:
        if path in sizes:
            return sizes[path]
        sizes[path] = 0  # a reference to itself, which OmegaConf refuses
        if isinstance(node, dict | list):
            pairs = node.items() if isinstance(node, dict) else enumerate(node)
            found = 1 + sum(size((*path, str(key)), value) for key, value in pairs)
        elif isinstance(node, str):
            found = len(node) + (_references(path, node) if "${" in node else 0)
        else:
            found = 1
        if found > LARGEST:
            raise ValueError(f"interpolations make more than {LARGEST} values and characters of it")
        sizes[path] = found
        return found

    def _references(path: tuple[str, ...], text: str) -> int:
        if _NESTED.search(text):
            raise ValueError("an interpolation contains another one: write its name out")
        total = 0
        for word in _WORD.findall(text):
            name = word.lstrip(".")
            dots = len(word) - len(name)
            target = (*path[: len(path) - dots if dots else 0], *(one for one in re.split(r"[.\[\]]+", name) if one))
            node = tree
            for key in target:
                if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                    node = node[int(key)]
                else:
                    node = node.get(key) if isinstance(node, dict) else None
            total += size(target, node) if node is not None else 0
        return total

    size((), tree)
