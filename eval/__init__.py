"""Tasks, measures and reports of samplers. Imported as `dllm_sampler.eval`."""

from importlib import import_module
from os import PathLike
from typing import Any


def load(*folders: str | PathLike[str]) -> Any:
    """Return the results of runs of `dllm-eval`, one row per configuration and task.

    Args:
        folders: run directories, or folders with run directories at any depth; `outputs/eval` if none is given.

    Returns:
        A `pandas.DataFrame` if pandas is installed, else a list with a dict for each row. `docs/evaluation.md` lists
        the columns.

    Raises:
        UserError: a folder does not exist, a file in it is invalid, or no run has samples.
    """
    from dllm_sampler.eval.report.data import read
    from dllm_sampler.eval.report.rows import rows
    from dllm_sampler.host.paths import expanded

    found = rows(read([expanded("folder", folder) for folder in folders or ("outputs/eval",)]))
    try:
        pandas = import_module("pandas")
    except ImportError:
        return found
    return pandas.DataFrame(found)
