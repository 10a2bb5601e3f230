"""The recommended settings in docs/choose.md, from `conf/experiment/recommended.yaml`.

python -m tests.tables.choose
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dllm_sampler import config
from dllm_sampler.host import files
from tests.tables import markdown

PAGE = Path(__file__).parents[2] / "docs" / "choose.md"
SECTION = "recommended"
NONE = "none published"


def lines() -> Iterator[str]:
    """Yield a line for each entry, after the names of its models.

    Models with the same entries share their lines. Words that all entries of a model have come before them.
    """
    models = config.entry("experiment", "recommended").settings["models"]
    shared: dict[str, list[str]] = {}
    for model, entries in models.items():
        if model == "mini":  # measured here, not published
            continue
        shared.setdefault(repr(entries), []).append(model)
    for names in shared.values():
        entries = models[names[0]]
        first, *rest = (one["words"] for one in entries)
        common = [word for word in first if rest and all(word in words for words in rest)]
        yield "\n### " + ", ".join(f"`{name}`" for name in names) + "\n"
        if common:
            yield f"With `{' '.join(common)}`:\n"
        for one in entries:
            told = [one["accuracy"], f"speed {one['speed']}" if one["speed"] != NONE else NONE]
            told.append(f"{one['evidence']} ({one['source']})")
            kept = " ".join(f"{text[0].upper()}{text[1:]}." for text in told if text != NONE)
            yield f"- {one['use']}: `{' '.join(word for word in one['words'] if word not in common)}`. {kept}"


def main() -> None:
    """Write the entries into the page."""
    files.write(PAGE, markdown.fill(markdown.read(PAGE, SECTION), SECTION, "\n".join([*lines(), ""])))


if __name__ == "__main__":
    main()
