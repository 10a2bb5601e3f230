"""Imports: none runs in a circle, and pages and typos do not wait for torch, which takes seconds."""

import json
import subprocess
import sys
from pathlib import Path

CODE = """
import importlib, json, sys
said = []
for module, line in json.loads(sys.argv[1]):
    main = importlib.import_module(module).main
    try:
        status = main(line)
    except SystemExit as end:
        status = end.code
    heavy = {name.partition(".")[0] for name in sys.modules} & {"torch", "transformers"}
    said.append([module, line, status, sorted(heavy)])
print(json.dumps(said))
"""
PAGES = [["--help"], ["--version"]]
TYPOS = {
    "dllm_sampler.cli.main": [
        ["copy: Ada", "scheduler=treshold"],
        ["copy: Ada", "scheduler.treshold=0.5"],
        ["copy: Ada", "tempreature=1"],
        ["copy: Ada", "seed=abc"],
        ["copy: Ada", "dtype=fp16"],
        ["copy: Ada", "stream=yes"],
        ["copy: Ada", "output=out.csv"],
        ["copy: Ada", "output=" + "a" * 5000],
        ["copy: Ada", "model=~nobody-at-all/x"],
        ["copy: Ada", "model.revision=main"],
        ["copy: Ada", "model.mask_id=true"],
        ["copy: Ada", "hydra.run.dir="],
        ["copy: Ada", "samples=99999999"],
        ["prompts_file=gone.txt"],
        ["--inof"],
    ],
    "dllm_sampler.eval.command": [["cache=duel"], ["task.operatio=sort"], ["batch_size=many"]],
    "dllm_sampler.eval.tuning": [
        ["tune.trails=3"],
        ["workers=2"],
        ["tune.name=a", "task=minni"],
        ["tune.name=a", "batch_siz=2"],
    ],
    "dllm_sampler.training.cli": [["train=min"], ["train=mini", "train.step=3"]],
    "dllm_sampler.integrations.__main__": [
        ["scheduler=klas"],
        ["temperture=1"],
        ["cache=dual"],
        ["seed=3"],
        ["klass"],
        ["temperature=hot"],
        ["experiment=gone"],
    ],
    "dllm_sampler.eval.report.command": [["gone"], ["--replay=x"]],
}


def test_pages_and_typos_do_not_import_torch(tmp_path: Path) -> None:
    """In one process for all of them: what none imports is not there at the end either."""
    pages = [(module, page) for module in TYPOS for page in (PAGES[:1] if module.endswith("report.command") else PAGES)]
    typos = [(module, line) for module in TYPOS for line in TYPOS[module]]
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(pages + typos)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == [[*one, 0, []] for one in pages] + [[*one, 2, []] for one in typos]
    assert done.stderr.count("\n") == len(typos), "one sentence each"
