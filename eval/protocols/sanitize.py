"""The clean-up of programs that the scripts of Fast-dLLM, d3LLM, Dream and dLLM-cache share."""

import ast
import warnings
from collections.abc import Mapping

LINES = 100  # only these first lines of a text are read


def sanitize(text: str, entry_point: str | None = None) -> str:
    """Return the imports and definitions of the longest part of a text that is Python.

    Functions without `return` are dropped, and so are statements other than imports, definitions and assignments. Of
    two definitions of a name the last one stays, in the place of the first.

    With an `entry_point` only this function and what it refers to is returned.
    """
    plain = text.replace("\t", "    ").replace("\r\n", "\n").replace("\r", "\n").strip() + "\n"
    tree = ast.parse(_longest_program(plain.splitlines()[:LINES]))
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    defined: dict[str, ast.stmt] = {}
    for node in tree.body:
        returns = any(isinstance(one, ast.Return) for one in ast.walk(node))
        if isinstance(node, ast.ClassDef) or (isinstance(node, ast.FunctionDef) and returns):
            defined[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            defined[node.targets[0].id] = node
    kept = set(defined) if entry_point is None else _reachable(entry_point, defined)
    return "\n".join(map(ast.unparse, [*imports, *(node for name, node in defined.items() if name in kept)]))


def _longest_program(lines: list[str]) -> str:
    """Return the part that is Python and has the most lines that are not blank, or the first of several such parts."""
    best, most = "", 0
    filled = [0]
    for line in lines:
        filled.append(filled[-1] + bool(line.strip()))
    for first in range(len(lines)):
        for stop in range(len(lines), first, -1):
            if filled[stop] - filled[first] <= most:
                break
            part = "\n".join(lines[first:stop])
            if _is_python(part):
                # Trailing blank lines would not count, and the first such part is the shortest.
                while not lines[stop - 1].strip():
                    stop -= 1
                best, most = "\n".join(lines[first:stop]), filled[stop] - filled[first]
                break
    return best


def _is_python(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def _reachable(entry_point: str, defined: Mapping[str, ast.stmt]) -> set[str]:
    found: set[str] = set()
    left = [entry_point]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += _references(defined[name]) if name in defined else ()
    return found


def _references(node: ast.AST) -> set[str]:
    """Return the names and attributes in a node. For `a.b` it is only `b`."""
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Name):
            found.add(child.id)
        elif isinstance(child, ast.Attribute):
            found.add(child.attr)
        else:
            found |= _references(child)
    return found
