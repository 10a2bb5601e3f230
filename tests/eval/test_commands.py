"""The modules of `eval` that are commands say what a user did wrong as `dllm-eval` does: in their own name."""

from importlib import import_module
from pathlib import Path

import pytest

from dllm_sampler import eval as package

FOLDER = Path(package.__file__).parent
NAMED = {"command", "report/command", "tuning"}  # they have shorter names
FILES = [*FOLDER.glob("*.py"), *FOLDER.glob("*/*.py")]
COMMANDS = {str(path.relative_to(FOLDER).with_suffix("")) for path in FILES if '__main__":\n' in path.read_text()}


@pytest.mark.parametrize("name", sorted(COMMANDS - NAMED - {"lm_eval/__main__"}))
def test_a_mistake_is_said_in_the_name_of_the_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = f"dllm_sampler.eval.{name.replace('/', '.')}"
    assert import_module(module).main(["--no-such-option"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"python -m {module.removesuffix('.__main__')}: ") and said.endswith("; try --help\n")
