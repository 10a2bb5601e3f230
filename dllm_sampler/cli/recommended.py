"""`experiment=recommended`: the published settings for the chosen model, with their evidence."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from dllm_sampler import config
from dllm_sampler.cli.terminal import row
from dllm_sampler.errors import UserError

NAME = "recommended"
WORD = f"experiment={NAME}"


def entries(model: str) -> Sequence[Mapping[str, Any]]:
    """Return the recommendations for a model of `conf/model`, the best first. Returns none for other models."""
    return config.entry("experiment", NAME).settings["models"].get(model, ())


def expand(words: Sequence[str], default: str) -> list[str]:
    """Return words with the recommended ones in place of `experiment=recommended`. Typed words override these.

    Args:
        words: words of a command line.
        default: name of the model if no word chooses one.

    Raises:
        UserError: nothing is recommended for the model, or another experiment is chosen, too.
    """
    if WORD not in words:
        return list(words)
    typed = [word for word in words if word != WORD]
    if other := next((word for word in typed if word.lstrip("+~").startswith("experiment=")), None):
        raise UserError("options-conflict", f"{WORD} works alone. Remove it, or {other}.")
    given = {word.partition("=")[0].lstrip("+~"): word.partition("=")[2] for word in typed}
    model, known = given.get("model", default), config.entry("experiment", NAME).settings["models"]
    same = (name for name in known if config.entry("model", name).settings["path"] == model)
    if not (found := entries(next(same, model))):
        raise UserError(
            "choice-unknown",
            f"{WORD} has no entry for model={model}. Use scheduler=threshold instead. For a checkpoint trained from one"
            f" of {', '.join(known)}, write model=NAME model.path=FOLDER.",
        )
    keys = [(word, word.partition("=")[0]) for word in found[0]["words"]]
    return [word for word, key in keys if key not in given and key.partition(".")[0] not in given] + typed


def show(console: Console, model: str) -> None:
    """Print the recommendations for a model, with their evidence."""
    for number, one in enumerate(entries(model)):
        use = one["use"] if number else f"{one['use']} ({WORD})"
        row(console, "", f"{use}: {' '.join(one['words'])}", "italic", column=6)
        figures = ". ".join(dict.fromkeys((one["accuracy"], one["speed"])))
        row(console, "", f"{figures}. Evidence: {one['evidence']} ({one['source']}).", column=6)
