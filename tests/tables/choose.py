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
    """Yield a line for each entry, after the names of its models. Models with the same entries share their lines."""
    models = config.entry("experiment", "recommended").settings["models"]
    shared: dict[str, list[str]] = {}
    for model, entries in models.items():
        shared.setdefault(repr(entries), []).append(model)
    for names in shared.values():
        yield "\n### " + ", ".join(f"`{name}`" for name in names) + "\n"
        for one in models[names[0]]:
            said = {
                "Accuracy": one["accuracy"],
                "Speed": one["speed"],
                "Evidence": f"{one['evidence']} ({one['source']})",
            }
            kept = " ".join(f"{name}: {text}." for name, text in said.items() if text != NONE)
            yield f"- {one['use']}: `{' '.join(one['words'])}`. {kept}"


def main() -> None:
    """Write the entries into the page."""
    files.write(PAGE, markdown.fill(markdown.read(PAGE, SECTION), SECTION, "\n".join([*lines(), ""])))


if __name__ == "__main__":
    main()
