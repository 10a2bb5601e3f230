"""lm-evaluation-harness's command line, unchanged, with the model `dllm_sampler` (docs/tasks.md).

`python -m dllm_sampler.eval.lm_eval --model dllm_sampler --model_args pretrained=mini --tasks ... --include_path ...`
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from dllm_sampler.cli.terminal import command
from dllm_sampler.errors import UserError, installing


@command("python -m dllm_sampler.eval.lm_eval")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the harness and return the exit status, which is 2 if `--model_args` are wrong."""
    given, before = list(sys.argv[1:] if arguments is None else arguments), sys.argv
    try:
        if find_spec("lm_eval") is None:
            raise UserError("package-missing", f"This command needs lm-evaluation-harness. Run {installing('eval')}.")
        harness_module: Any = import_module("lm_eval")
        from lm_eval.__main__ import cli_evaluate

        from dllm_sampler.eval.lm_eval.counters import counted
        from dllm_sampler.eval.lm_eval.model import register

        register()
        sys.argv = ["lm-eval", *given]
        evaluate = harness_module.simple_evaluate
        # The harness looks it up when it starts: so the table and the file have what our model counted.
        harness_module.simple_evaluate = lambda *args, **kwargs: counted(evaluate(*args, **kwargs))
        try:
            cli_evaluate()
        finally:
            harness_module.simple_evaluate = evaluate
    finally:
        sys.argv = before
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
