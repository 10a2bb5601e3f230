"""The table of recommended settings in docs/choose.md, from `conf/experiment/recommended.yaml`.

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
HEAD = ("model", "for", "settings", "published accuracy, %", "published speed", "evidence")


def rows() -> Iterator[tuple[str, ...]]:
    """A line for each entry. Models with the same entries share their lines."""
    models = config.entry("experiment", "recommended").settings["models"]
    shared: dict[str, list[str]] = {}
    for model, entries in models.items():
        shared.setdefault(repr(entries), []).append(model)
    for names in shared.values():
        for number, one in enumerate(models[names[0]]):
            named = ", ".join(f"`{name}`" for name in names) if number == 0 else ""
            words = f"`{' '.join(one['words'])}`"
            yield named, one["use"], words, one["accuracy"], one["speed"], f"{one['evidence']} ({one['source']})"


def main() -> None:
    """Write the table into the page."""
    files.write(PAGE, markdown.fill(markdown.read(PAGE, SECTION), SECTION, markdown.table(HEAD, rows())))


if __name__ == "__main__":
    main()
