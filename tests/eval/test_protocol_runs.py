"""Runs of published protocols from end to end: a tiny random checkpoint, and documents of this project."""

from __future__ import annotations

import json
import os
import sys
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dllm_sampler.errors import UserError
from dllm_sampler.eval.jobs import job, jobs, lines
from dllm_sampler.eval.launch import run_all
from dllm_sampler.eval.protocols import data, packages, spec
from dllm_sampler.eval.protocols.task import TOKENS
from dllm_sampler.eval.report.data import load
from dllm_sampler.eval.runner import Share
from dllm_sampler.models.families import llada_config, to_checkpoint
from dllm_sampler.models.transformer import Transformer, TransformerConfig
from tests.eval.test_protocols import lines as recorded
from tests.refusals import refused

TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
BOUND = [(name, *cell) for name in spec.names() for cell in spec.load(name).cells]
QUICK = [("fast-dllm", "fast-dllm-llada/instruct", "gsm8k"), ("d3llm", "d3llm-llada/all", "mbpp")]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A two-layer LLaDA over bytes, with random weights."""
    folder = tmp_path_factory.mktemp("bytes")
    special = ["<|startoftext|>", "<|endoftext|>", "<|begin|>", "<|end|>", "<|mask|>"]
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special]
    config = TransformerConfig(
        vocab_size=len(letters), hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=2,
        head_dim=8, max_positions=8192,
    )  # fmt: skip
    model = Transformer(config)
    model.init_weights(std=0.3, embedding_std=1.0, generator=torch.Generator().manual_seed(0))
    save_file(to_checkpoint(model), folder / "model.safetensors", metadata={"format": "pt"})
    eos, mask = letters.index("<|endoftext|>"), letters.index("<|mask|>")
    config_json = llada_config(config, mask_token_id=mask, eos_token_id=eos, pad_token_id=eos)
    (folder / "config.json").write_text(json.dumps(config_json))
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=special[0], eos_token=special[1], pad_token=special[1], mask_token=special[4],
        additional_special_tokens=special[2:4], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def documents(tmp_path_factory) -> Path:
    """A folder for each kind of task, with `test.jsonl` and `train.jsonl`."""
    folder = tmp_path_factory.mktemp("documents")
    rows = recorded("prompts/recorded.jsonl")
    for kind in ("gsm8k", "minerva_math", "humaneval", "mbpp"):
        (folder / kind).mkdir()
        found = {row["doc_id"]: row["doc"] for row in rows if row["task"] == kind}
        (folder / kind / "test.jsonl").write_text("".join(json.dumps(found[number]) + "\n" for number in sorted(found)))
    train = json.loads((Path(__file__).parent / "data/published/prompts/gsm8k_train.json").read_text())
    (folder / "gsm8k" / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in train))
    return folder


def words(cell: tuple[str, ...], checkpoint: Path, documents: Path, output: Path) -> list[str]:
    name, variant, task = cell
    kind = spec.load(name).cells[variant, task].kind
    fixed = [f"suite=protocol/{name}", f"task={task}", f"task.variant={variant}", f"model={checkpoint}"]
    own = [
        f"task.data={documents / kind}",
        "task.run_code=true",
        f"output={output}",
        "max_new_tokens=8",
        "oracle=false",
    ]
    return [*fixed, *own, "blocks.length=4", "blocks=fixed"]


def run(found, share: Share = Share()) -> dict[str, str]:  # noqa: B008
    return run_all(found, share, "cpu", lambda job: None, lambda done: None)


@pytest.mark.parametrize(
    "cell", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in BOUND], ids="-".join
)
def test_a_protocol_runs_from_end_to_end(cell, checkpoint, documents, tmp_path):
    try:
        found = jobs(words(cell, checkpoint, documents, tmp_path))
    except UserError as error:
        if error.code != "package-missing":
            raise
        pytest.skip(str(error))
    assert run(found) == {}
    comparison = load([one.folder for one in found])
    (records,) = [run.records for method in comparison.methods for run in method.runs.values()]
    stated = spec.load(cell[0]).cells[cell[1:]]
    assert [stated.published in record.scores for record in records] == [True, True]
    counted = [record.scores.get(TOKENS) for record in records]
    assert counted == [None, None] if stated.skip else all(value is not None for value in counted)
    assert list(comparison.tasks) == [f"{cell[0]}/{cell[2]}"]


def test_prompts_do_not_depend_on_the_number_of_processes(checkpoint, documents, tmp_path):
    each = []
    for world in (1, 2):
        found = jobs([*words(QUICK[0], checkpoint, documents, tmp_path / str(world)), "batch_size=1"])
        for rank in range(world):
            run(found, Share(rank, world))
        folder = load([one.folder for one in found]).methods[0].runs.values()
        each.append([[record.prompt, record.tokens, record.scores] for run in folder for record in run.records])
    assert each[0] == each[1]
    assert len(each[0]) == 2
    assert each[0][0][0] != each[0][1][0]


def test_words_of_the_command_line_come_first() -> None:
    (plain,) = lines(["suite=protocol/fast-dllm", "task=gsm8k", "model=llada-8b", "method=prefix"])
    assert plain[:5] == [
        "model=llada-8b", "task=protocol", "task.protocol=fast-dllm", "task.task=gsm8k",
        "task.variant=fast-dllm-llada/instruct",
    ]  # fmt: skip
    assert {"cache=prefix", "scheduler=threshold", "scheduler.threshold=0.9", "max_new_tokens=256"} <= set(plain)
    assert "oracle=false" in plain
    (other,) = lines(["suite=protocol/fast-dllm", "task=gsm8k", "method=prefix", "scheduler=klass", "max_new_tokens=8"])
    assert {"cache=prefix", "scheduler=klass", "max_new_tokens=8"} <= set(other)
    assert not {"scheduler=threshold", "scheduler.threshold=0.9", "max_new_tokens=256"} & set(other)
    (blocks,) = lines(["suite=protocol/llada-opencompass", "task=gsm8k", "method=blocks"])
    assert not any(word.startswith("guide.") for word in blocks)


def test_a_method_may_have_words_for_single_tasks() -> None:
    entropy = []
    for task in ("gsm8k", "long-gsm8k", "mbpp"):
        (line,) = lines(["suite=protocol/d3llm", "model=d3llm-llada", f"task={task}", "method=d3llm"])
        entropy.append([word for word in line if word.startswith("scheduler.entropy")])
    assert entropy == [["scheduler.entropy=0.5"], ["scheduler.entropy=0.4"], ["scheduler.entropy=0.4"]]


def test_several_models_tasks_and_methods() -> None:
    found = lines(["suite=protocol/fast-dllm", "model=llada-8b,llada-1.5", "task=gsm8k,mbpp", "method=prefix,dual"])
    variants = [next(word for word in line if word.startswith("task.variant")) for line in found]
    assert len(found) == 8
    assert variants.count("task.variant=fast-dllm-llada/no-chat") == 4


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        (["task=gsm9k"], "choice-unknown: gsm9k, gsm8k"),
        (["task=gsm8k", "method=fast"], "choice-unknown: fast"),
        (["task=gsm8k", "task.variant=x"], "choice-unknown: x, fast-dllm-dream/base"),
        (["task=mbpp"], "option-missing: task.run_code=true"),
        (["task=gsm8k", "task.data=nowhere"], "file-missing: nowhere"),
    ],
)
def test_mistakes(more, refusal) -> None:
    with refused(refusal):
        jobs(["suite=protocol/fast-dllm", *more])


def test_a_file_without_the_fields_is_refused(tmp_path) -> None:
    (tmp_path / "test.json").write_text('[{"q": "How many?"}]')
    (tmp_path / "train.json").write_text("[]")
    with refused("example-invalid: document 1, question"):
        _ = job(["task=protocol", "task.protocol=fast-dllm", "task.task=gsm8k", f"task.data={tmp_path}"]).identity


@pytest.mark.parametrize(
    ("file", "text", "error"),
    [
        ("test.parquet", "no parquet", "file-unreadable: test.parquet, Replace the file"),
        ("test.json", "{]", "file-unreadable: test.json, .jsonl"),
        ("test.json", '{"question": "a"}', "file-invalid: test.json, [{...}, ...]"),
        ("test.jsonl", '{"question": "a", "answer": "1"}\n[1]\n', "file-invalid: test.jsonl line 2"),
        ("test.jsonl", '{"question": "a", "answer": "1"}\n{"a" 1}\n', "json-invalid: test.jsonl line 2, column 6"),
        ("test.jsonl", '{"question": "a", "answer": 1}\n', "example-invalid: document 1 of split test, answer"),
    ],
)
def test_documents_that_cannot_be_read(tmp_path: Path, file: str, text: str, error: str) -> None:
    (tmp_path / file).write_text(text)
    with refused(error):
        data.load(
            "gsm8k", spec.load("fast-dllm").cells["fast-dllm-llada/instruct", "gsm8k"].data, "test", str(tmp_path)
        )


def test_a_downloaded_folder_has_the_subset_of_the_protocol(tmp_path: Path) -> None:
    for subset in ("main", "socratic"):
        (tmp_path / subset).mkdir()
        row = {"question": subset, "answer": "#### 1"}
        (tmp_path / subset / "test-0.jsonl").write_text(json.dumps(row) + "\n")
    gsm8k = spec.load("fast-dllm").cells["fast-dllm-llada/instruct", "gsm8k"].data
    assert [one["question"] for one in data.load("gsm8k", gsm8k, "test", str(tmp_path))] == ["main"]
    with refused("file-missing: split train, train.jsonl"):  # a file of questions is no source of examples
        data.load("gsm8k", gsm8k, "train", str(tmp_path / "main" / "test-0.jsonl"))


def test_data_that_is_not_here_is_named_with_a_command(monkeypatch) -> None:
    def offline(*given, **options):
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=offline))
    with refused("hub-unreachable: hf download --repo-type dataset openai/gsm8k, task.data="):
        _ = job(["task=protocol", "task.protocol=fast-dllm", "task.task=gsm8k"]).identity


def test_a_protocol_of_the_users_own(tmp_path, monkeypatch) -> None:
    packaged = Path(str(files("dllm_sampler.conf"))) / "suite" / "protocol" / "llada-lm-eval.yaml"
    (tmp_path / "conf" / "suite" / "protocol").mkdir(parents=True)
    text = packaged.read_text().replace("length: 1024", "length: 64").replace("llada-lm-eval/base", "mine/all")
    (tmp_path / "conf" / "suite" / "protocol" / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    (line,) = lines(["suite=protocol/mine", "task=gsm8k", "model=mini"])
    assert {"task.protocol=mine", "task.variant=mine/all", "max_new_tokens=64"} <= set(line)


@pytest.mark.parametrize(
    ("old", "new", "refusal"),
    [
        ("tasks:", "tasks: 3 #", "option-type: suite=protocol/mine: tasks=3"),
        ("variants:", "variants: {} #", "config-invalid: suite=protocol/mine, no variants"),
        ("lm_eval: gsm8k/gsm8k.yaml", "lm_eval: gone.yaml", "file-unreadable: gone.yaml"),
        ("shots: 5, extract: lm-eval", "shots: 5, extract: raw", "choice-unknown: extract, 'raw', gsm8k"),
    ],
)
def test_mistakes_in_a_protocol_of_the_users_own(old, new, refusal, tmp_path, monkeypatch) -> None:
    packaged = Path(str(files("dllm_sampler.conf"))) / "suite" / "protocol" / "llada-lm-eval.yaml"
    (tmp_path / "conf" / "suite" / "protocol").mkdir(parents=True)
    head, found, rest = packaged.read_text().partition(old)
    assert found
    if new.endswith("#"):  # in place of the whole block
        rest = "\n" + "\n".join(
            line for line in rest.splitlines()[1:] if line[:1] not in (" ", "#") or not line.strip()
        )
    (tmp_path / "conf" / "suite" / "protocol" / "mine.yaml").write_text(head + new + rest)
    monkeypatch.chdir(tmp_path)
    spec.load.cache_clear()
    with refused(refusal):
        jobs(["suite=protocol/mine", "task=gsm8k", "model=mini"])


def test_the_folder_of_packages_can_be_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(os.environ, packages.FOLDER, str(tmp_path))
    assert packages.folder() == tmp_path
