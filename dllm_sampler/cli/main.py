"""The entry point of `dllm-sample`."""

import sys
import warnings
from collections.abc import Sequence

from rich.console import Console

from dllm_sampler.cli import help as pages
from dllm_sampler.cli.inputs import request
from dllm_sampler.cli.terminal import ending, show
from dllm_sampler.cli.user_files import with_config_dir
from dllm_sampler.cli.words import split
from dllm_sampler.errors import FallbackWarning, NoEffectWarning, UntrainedWarning
from dllm_sampler.host.version import __version__


def main(words: Sequence[str] | None = None) -> int:
    """Run `dllm-sample` and return its exit status.

    Args:
        words: the command line without the program's name. By default `sys.argv[1:]`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stderr is for one summary or one sentence
        for told in (FallbackWarning, NoEffectWarning, UntrainedWarning):
            warnings.simplefilter("always", told)
        warnings.showwarning = lambda message, *_: show(f"dllm-sample: {message}", sys.stderr)
        return ending("dllm-sample", lambda: with_config_dir(sys.argv[1:] if words is None else words, _run))


def _run(words: Sequence[str]) -> int:
    arguments = split(words)
    if arguments.action == "version":
        print(f"dllm-sample {__version__}")
        return 0
    if arguments.action != "run":
        pages.show(arguments, Console())
        return 0
    asked = request(arguments)
    # These import torch and transformers, which takes seconds.
    if asked.session is not None:
        from dllm_sampler.cli import interactive

        return interactive.session(asked.session)
    from dllm_sampler.cli import run

    return run.run(asked)
