"""lm-evaluation-harness runs on the shipped model, offline; likelihoods are those of laws that are known."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from dllm_sampler import config
from dllm_sampler.eval.command import main as evaluate
from dllm_sampler.eval.lm_eval.__main__ import main
from dllm_sampler.eval.lm_eval.likelihood import check, log_likelihood, masks
from dllm_sampler.eval.lm_eval.settings import parse
from dllm_sampler.eval.report.data import load
from dllm_sampler.eval.testbeds.chain import MarkovChain
from dllm_sampler.eval.testbeds.denoiser import LawDenoiser
from dllm_sampler.eval.testbeds.laws import LAWS
from tests import toys
from tests.refusals import refused
from tests.sampling import each, few

pytestmark = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")
DATA = Path(__file__).parent / "data/lm_eval"

TASKS = {
    "generate": """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], do_sample: false, max_gen_toks: 32}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "choose": """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: right
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "roll": """
output_type: loglikelihood_rolling
doc_to_target: "{{question}}"
metric_list: [{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""",
}


def lm(arguments: str, *options: Any) -> Any:
    """Return the model of lm-evaluation-harness. The harness takes a second to import."""
    from dllm_sampler.eval.lm_eval.model import SamplerLM

    return SamplerLM.create_from_arg_string(arguments, *options)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run the command line on a local task and read what it wrote."""
    # The harness first reads each of its 14000 task files, which takes longer than all else.
    tasks = import_module("lm_eval.tasks")
    monkeypatch.setattr(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False))
    for name, value in {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    for name, text in TASKS.items():
        file = DATA / ("generate.jsonl" if name == "roll" else f"{name}.jsonl")
        question = '""' if name == "roll" else '"{{question}}"'
        head = f"task: mini_{name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\n"
        (tmp_path / f"{name}.yaml").write_text(f"{head}test_split: test\ndoc_to_text: {question}{text}")

    def go(arguments: str) -> dict[str, Any]:
        out, tasks = tmp_path / "out", ",".join(f"mini_{name}" for name in TASKS)
        given = ["--model", "dllm_sampler", "--model_args", arguments, "--tasks", tasks]
        given += ["--batch_size", "5"]
        assert main([*given, "--include_path", str(tmp_path), "--output_path", str(out)]) == 0
        return json.loads(next(out.rglob("results*.json")).read_text())

    return go


def test_generation_choice_and_perplexity(
    run: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run("pretrained=mini,scheduler=threshold,threshold=0.9,mc_num=8,mc_batch_size=32,check_greedy=false")
    results = found["results"]
    assert results["mini_generate"]["exact_match,none"] == 1.0
    assert results["mini_choose"]["acc,none"] == 1.0
    assert results["mini_roll"]["byte_perplexity,none"] > 1
    rate = found["config"]["tokens_per_forward"]
    assert rate > 2 and found["config"]["device"] == ("cuda:0" if torch.cuda.is_available() else "cpu")
    counts = found["config"]["dllm_sampler"]["tasks"]["mini_generate"]
    assert counts["answers"] == 12 and counts["tokens_per_forward_low"] <= rate <= counts["tokens_per_forward_high"]
    assert counts["canvas_tokens"] == 12 * 32 and counts["answer_tokens"] / counts["forwards"] == rate
    assert results["mini_generate"]["tokens_per_forward,none"] == rate, "a metric of the task"
    assert "tokens_per_forward,none" not in results["mini_choose"], "which generates nothing"
    shown = re.search(r"\|tokens_per_forward *\|↑ *\| *([\d.]+)\|", capsys.readouterr().out)
    assert shown is not None and float(shown[1]) == pytest.approx(rate, abs=1e-3), "in the table"
    # and a run of dllm-eval of the same configuration is the same method
    words = ["scheduler=threshold", "scheduler.threshold=0.9", "task.count=1", "oracle=false", "device=cpu"]
    assert evaluate([*words, f"output={tmp_path / 'runs'}"]) == 0
    both = load([tmp_path])
    assert set(both.tasks) == {"mini", "mini_generate"}
    (method,) = both.methods
    assert method.figures(["mini_generate"])["answer_tokens_per_forward"] == rate
    assert {reason.partition(", ")[0] for _, reason in both.refused} == {"lm-evaluation-harness asked for likelihoods"}


def test_a_mistake_in_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def execute() -> None:
        assert sys.argv[1:3] == ["--model", "dllm_sampler"]
        lm("pretrained=mini,treshold=0.9")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", execute)
    assert main(["--model", "dllm_sampler"]) == 2
    said = "dllm_sampler.eval.lm_eval: unknown model argument 'treshold'. Did you mean 'threshold'"
    assert said in capsys.readouterr().err


@each(
    ("arguments", "said"),
    [
        ("scheduler=threshold", "option-missing: pretrained=mini"),
        ("pretrained=mini,block_length=8,blocks.length=4", "options-conflict: block_length and blocks.length"),
        ("pretrained=mini,treshold=0.9", "choice-unknown: 'threshold'"),
        ("pretrained=mini,scheduler=tresholt", "choice-unknown: 'threshold'"),
        ("pretrained=mini,scheduler.steps=3", "field-unknown: scheduler=threshold, 'steps'"),
        ("pretrained=mini,scheduler=fixed,steps=many", "option-type: scheduler.steps='many'"),
        ("pretrained=mini,mc_num=0", "option-range: mc_num"),
        ("pretrained=mini,batch_size=two", "option-type: batch_size"),
        ("pretrained=mini,batch_size=auto:4", "option-type: batch_size=auto"),
        ("pretrained=mini,top_k=0.5,temperature=1", "option-type: top_k"),
        ("pretrained=/nowhere/at-all", "model-not-found"),
        ("pretrained=", "option-missing: pretrained=mini"),
        ("pretrained=3", "choice-unknown: unknown model '3'"),
        ("pretrained=mini,blocks=full,block_length=8", "field-unknown: blocks=full, 'length'"),
    ],
)
def test_mistakes_are_one_sentence(arguments: str, said: str) -> None:
    with refused(said):
        lm(arguments)


def test_settings_find_their_plugin() -> None:
    found = parse({"pretrained": "mini", "backend": "torch", "cuda_graph": "auto", "compile": False})
    assert found.shortcuts == {"backend": "torch", "cuda_graph": "auto"}
    found = parse({"pretrained": "mini", "scheduler": "factor", "factor": 2, "block_length": 8, "temperature": 1})
    assert found.plugins == {"scheduler": {"name": "factor", "factor": 2.0}, "blocks": {"name": "fixed", "length": 8}}
    assert found.shortcuts == {"temperature": 1.0}
    with refused("option-ambiguous"):
        parse({"pretrained": "mini", "scheduler": "threshold", "blocks": "adablock", "threshold": 0.9})


def request(*args: Any) -> Any:
    return SimpleNamespace(args=args)


@pytest.fixture(scope="module")
def model() -> Any:
    return lm("pretrained=mini,mc_num=16,temperature=1", {"batch_size": 3})


@pytest.mark.slow
def test_answers_do_not_depend_on_batches(model: Any) -> None:
    prompts = ["shuffle: Ada, Ben, Cal, Dan", "shuffle: Eve, Ada", "insert randomly: Ada, Ben; Cal", "copy: Zoe"]
    requests = [
        request(prompt, {"until": [", "] if i == 1 else [], "max_gen_toks": 32}) for i, prompt in enumerate(prompts)
    ]
    alone = lm("pretrained=mini,temperature=1", {"batch_size": 1})
    found = model.generate_until(requests, disable_tqdm=True)
    assert found == alone.generate_until(requests, disable_tqdm=True)
    assert found[1] in ("Eve", "Ada"), "cut at the stop string"


def test_a_task_may_stop_at_a_special_token(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As gsm8k_cot does at `<|im_end|>`, whatever its text is."""
    tokenizer = deepcopy(model.tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["Ben"]})
    monkeypatch.setattr(model.sampler, "tokenizer", tokenizer)
    before = model.get_model_info()["answer_tokens"]
    asked = request("copy: Ada, Ben, Cal", {"until": ["Ben"], "max_gen_toks": 16})
    assert model.generate_until([asked], disable_tqdm=True) == ["Ada, "]
    told = model.get_model_info()["answer_tokens"] - before
    assert told == len(tokenizer("Ada,", add_special_tokens=False)["input_ids"])


@each(
    ("options", "said"),
    [
        ({"max_gen_toks": 0}, "option-range: max_gen_toks=0"),
        ({"max_gen_toks": 10**6}, "context-exceeded: 1000000 tokens"),
        ({"do_sample": True, "temperature": "hot"}, "option-range: temperature='hot'"),
    ],
)
def test_mistakes_in_the_options_of_a_request(options: dict[str, Any], said: str, model: Any) -> None:
    with refused(said):
        model.generate_until([request("copy: Ada", options)], disable_tqdm=True)


def test_greedy_and_likelihood(model: Any) -> None:
    pairs = [("reverse: Ada, Ben, Cal", "Cal, Ben, Ada"), ("reverse: Ada, Ben, Cal", "Ada, Ben, Cal")]
    (right, yes), (wrong, no) = model.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    assert (yes, no) == (True, False)
    assert right > wrong + 5
    assert right > -1


def test_exact_likelihoods_are_those_of_the_sampler() -> None:
    exact = {"likelihood": "exact", "stop": "none", "temperature": 1.0, "scheduler": "leftright", "blocks": "full"}
    harness = import_module("dllm_sampler.eval.lm_eval.model")
    model = harness.SamplerLM(pretrained="mini", device="cpu", check_greedy=False, **exact)
    pairs = [("reverse: Ada, Ben, Cal", text) for text in ("Cal, Ben, Ada", "Ada, Ben, Cal", "")]
    (right, _), (wrong, _), (nothing, _) = model.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    expected = model.sampler.score(pairs[0][0], [pairs[0][1], pairs[1][1]]).log_p.tolist()
    assert [right, wrong] == pytest.approx(expected) and nothing == 0
    assert right > wrong + 5
    with refused("choice-unknown: likelihood"):
        parse({"pretrained": "mini", "likelihood": "near"})


def test_rolling_scores_each_token_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "copy: " + ", ".join(["Ada", "Ben"] * 150)
    ids, size = model._plain(text), model.sampler.denoiser.spec.max_positions
    assert len(ids) > 2 * size
    seen: list[tuple[list[int], list[int]]] = []
    monkeypatch.setattr(model, "_likelihood", lambda prompt, answer: seen.append((prompt, answer)) or -1.0)
    assert model.loglikelihood_rolling([request(text)], disable_tqdm=True) == [-len(seen)]
    assert [token for _, answer in seen for token in answer] == ids
    assert all(len(prompt) + len(answer) <= size for prompt, answer in seen)
    assert seen[0][0] == [model.sampler.denoiser.spec.eos_id]
    assert seen[1][0] == seen[0][1][-1:], "the token before a window is its context"


def test_chat_template_adds_no_second_mark(model: Any) -> None:
    plain = model._encode("copy: Ada", 32)
    text = model.apply_chat_template([{"role": "user", "content": "copy: Ada"}])
    assert model._encode(text, 32) == plain
    model.templated = False


def test_first_mark(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, first = model._encode("copy: Ada", 32), model._first()
    monkeypatch.setattr(model, "settings", replace(model.settings, add_bos=True))
    assert model._encode("copy: Ada", 32) == [first, *plain]
    assert model._pair("copy: Ada", "Ada")[0] == [first, *plain]


def test_masks_have_every_size_equally_often() -> None:
    sizes = masks(7, 70, seed=3).sum(1)
    assert sizes.bincount().tolist() == [0] + [10] * 7


@each("operation", ["shuffle", "insert_random", "latin_square"])
def test_likelihood_of_a_law(operation: str) -> None:
    """Every outcome has the same probability, and an impossible text none."""
    law = LAWS[operation](3)
    outcome = list(range(3)) if operation == "shuffle" else list(law.outcomes[1])  # pyright: ignore
    count = 6 if operation == "shuffle" else len(law.outcomes)  # pyright: ignore
    found = log_likelihood(LawDenoiser(law), [0], outcome, count=4000, batch=500)
    assert found == pytest.approx(-log(count), abs=0.06)
    assert log_likelihood(LawDenoiser(law), [0], [0] * law.length, count=50, batch=50) < -50


def test_likelihood_of_a_chain_comes_closer_with_more_masks() -> None:
    chain = MarkovChain.drawn(4, 6)
    start, ids = chain.sample(1, seed=1)
    truth = float(chain.log_likelihood(ids, start)[0])
    estimates = [
        [log_likelihood(LawDenoiser(chain), [int(start[0])], ids[0].tolist(), n, 500, seed) for seed in range(8)]
        for n in (8, 512)
    ]
    rough, fine = (max(abs(one - truth) for one in some) for some in estimates)
    assert fine < rough / 2
    assert sum(estimates[1]) / 8 == pytest.approx(truth, abs=0.1)


def test_likelihood_does_not_depend_on_the_batch() -> None:
    found = [log_likelihood(toys.denoiser(), [3, 4], [5, 6, 7], 20, batch) for batch in (1, 7, 20)]
    assert found[1:] == pytest.approx(found[:1] * 2)


def test_likelihood_of_one_token_needs_one_mask() -> None:
    """With one token there is one mask, so one forward is exact: the model's own log-probability."""
    model = toys.denoiser()
    total = sum(torch.tensor(log_likelihood(model, [3, 4], [token], 1)).exp() for token in range(toys.VOCAB))
    assert float(total) == pytest.approx(1)


def test_what_has_no_such_likelihood_is_refused() -> None:
    with refused("model-not-scorable"):
        check(toys.denoiser("causal").spec)


FOLDER = files("dllm_sampler.conf") / "lm_eval"
CONFIGS = sorted(file.name[:-5] for file in FOLDER.iterdir())


def config_file(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


@each("name", CONFIGS)
def test_settings_of_papers_are_read(name: str) -> None:
    given = config_file(name)
    found = parse({**given["model_args"], "batch_size": given.get("batch_size", 1)})
    assert given["model"] == "dllm_sampler"
    assert found.pretrained in config.names("model")
    for group, plugin in found.plugins.items():
        config.build(group, plugin)
    import_module("lm_eval.config.evaluate_config").EvaluatorConfig(**given)


def task_folders(name: str) -> set[Path]:
    """Where the harness keeps a task, or the tasks of a group."""
    files = (Path(import_module("lm_eval").__path__[0]) / "tasks").rglob(f"{name.replace('_', '?')}.yaml")
    texts = {file: file.read_text() for file in files}
    (file,) = (file for file in texts if re.search(rf"^(task|group): {name}$", texts[file], re.MULTILINE))
    members = re.findall(r"^ +- (\w+)$", texts[file], re.MULTILINE) if f"group: {name}\n" in texts[file] else []
    return {folder for member in members for folder in task_folders(member)} or {file.parent}


@few("name", sorted({task for name in CONFIGS for task in config_file(name)["tasks"]}))
def test_tasks_of_papers_can_be_loaded_beside_this_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task's own code imports what is not installed with it (MATH), or runs a metric when it is loaded (code)."""
    metric = SimpleNamespace(compute=lambda **given: [{"pass@1": 0.0}])  # the real one comes from the hub
    monkeypatch.setitem(sys.modules, "evaluate", SimpleNamespace(load=lambda name: metric))
    for folder in task_folders(name):
        if (code := folder / "utils.py").exists():
            runpy.run_path(str(code))
    if name in ("humaneval", "mbpp"):
        using = [one for one in CONFIGS if name in config_file(one)["tasks"]]
        texts = [(FOLDER / f"{one}.yaml").read_text() for one in using]
        assert all("HF_ALLOW_CODE_EVAL=1" in text and "--confirm_run_unsafe_code" in text for text in texts)
