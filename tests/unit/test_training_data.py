"""A user's data: how it is read, and the one sentence that each mistake in it gets before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dllm_sampler import config
from dllm_sampler.core.spec import ModelSpec
from dllm_sampler.models import loading
from dllm_sampler.training import cli
from dllm_sampler.training.data import Data, Encoder, Example, columns_of, drawn, examples
from tests import tiny
from tests.refusals import refused

LINES = [{"prompt": f"{n} + 1 = ?", "answer": f"{n + 1}", "level": n % 3} for n in range(10)]


def write(file: Path, lines: list[Any]) -> str:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def load(path: str, held_out: int | None = 2, answers: bool = True, **more: Any) -> tuple[list[Example], list[Example]]:
    return Data(**config.check("train.data", Data, {"path": path, **more})).load(0, held_out, answers, 64)


def test_what_is_held_out_is_never_learned(tmp_path: Path) -> None:
    train, held = load(write(tmp_path / "d.jsonl", [*LINES, LINES[3]]), held_out=3)
    apart = {str(one.prompt) for one in held}, {str(one.prompt) for one in train}
    assert len(held) == 3 and not apart[0] & apart[1], "a prompt that is there twice is on one side"
    assert apart[0] | apart[1] == {line["prompt"] for line in LINES}
    assert load(str(tmp_path / "d.jsonl"), held_out=3) == (train, held), "a function of the seed"
    assert columns_of(train[:2])["level"] == [one.fields["level"] for one in train[:2]]


@pytest.mark.parametrize(("size", "held"), [(2, 1), (9, 1), (40, 4), (900, 64)])
def test_without_a_number_a_tenth_is_held_out(size: int, held: int, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": str(n), "answer": "b"} for n in range(size)])
    assert [*map(len, load(path, held_out=None))] == [size - held, held]
    assert [*map(len, load(path, held_out=None, test=path))] == [size, min(size, 64)]


def test_the_forms_that_trl_reads() -> None:
    """Texts, token ids, and conversations; in the columns of TRL or ours."""
    user, assistant = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}
    rows = [
        {"prompt": "Hi", "completion": "Yes"},
        {"prompt": "Hi", "answer": "Yes"},
        {"prompt": [user], "completion": [assistant]},
        {"messages": [user, assistant]},
        {"prompt": [3, 4], "completion": [5, 6]},
    ]
    found = examples(rows, True, "train_dataset")
    assert [(one.prompt, one.answer) for one in found] == [
        ("Hi", "Yes"), ("Hi", "Yes"), ([user], "Yes"), ([user], "Yes"), ([3, 4], [5, 6]),
    ]  # fmt: skip
    with refused("example-invalid: row 1 of train_dataset"):
        examples([rows[0], {"prompt": "Hi"}], True, "train_dataset")
    with refused("nothing-to-learn: train_dataset"):
        examples([], True, "train_dataset")
    assert examples([{"prompt": "Hi"}], False, "train_dataset")[0].answer is None


def test_tasks_of_mini() -> None:
    train, held = drawn({"copy": 1, "sort": 0}, 0, 20), drawn({"copy": 1}, 0, 20, held=True)
    assert {one.task for one in train} == {"copy"}
    assert not {str(one.prompt) for one in train} & {str(one.prompt) for one in held}
    for tasks, said in (
        ({"cpy": 1}, "choice-unknown: 'cpy'"),
        ({"copy": 0}, "option-missing"),
        ({"copy": -1}, "option-range"),
    ):
        with refused(said):
            drawn(tasks, 0, 1)


def test_held_out_files_tables_and_data_sets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    train, test = write(tmp_path / "train.jsonl", LINES), write(tmp_path / "test.jsonl", LINES[:3])
    assert [*map(len, load(train, 5, test=test))] == [10, 3]
    table = datasets.Dataset.from_list([{"q": line["prompt"], "a": line["answer"]} for line in LINES])
    table.to_csv(tmp_path / "d.csv")
    assert [*map(len, load(str(tmp_path / "d.csv"), prompt="q", answer="a", metric="contains"))] == [8, 2]
    both = datasets.DatasetDict({"train": table, "small": table.select(range(4))})
    both.save_to_disk(tmp_path / "set")
    found = load(str(tmp_path / "set"), prompt="q", answer="a", test="small", metric="contains")
    assert [*map(len, found)] == [10, 2]
    with refused("file-unreadable: no split tiny, only"):
        load(str(tmp_path / "set"), split="tiny")
    for path in (train, str(tmp_path / "d.csv")):  # else held-out answers would be those learned from
        for given in ({"split": "tiny"}, {"test": "tiny"}):
            with refused("option-not-applicable: train.data.split"):
                load(path, 1, prompt="q" if path.endswith("csv") else "prompt", answer="a", answers=False, **given)
    with refused("option-not-applicable: train.data.subset"):
        load(train, 1, subset="tiny")
    table.save_to_disk(tmp_path / "single")
    with refused("file-unreadable: no split tiny, only train"):
        load(str(tmp_path / "single"), split="tiny")
    with refused("option-not-applicable: train.data.subset=a"):
        load(str(tmp_path / "single"), subset="a")
    (tmp_path / "head.csv").write_text("prompt,answer\n")
    with refused("nothing-to-learn: head.csv has no examples"):
        load(str(tmp_path / "head.csv"))


def test_messages_and_chat_templates(tmp_path: Path) -> None:
    folder = tiny.write("sdar", tmp_path / "m")
    loaded = loading.load(folder, device="cpu")
    assert loaded.tokenizer is not None
    encode = Encoder(loaded.tokenizer, loaded.denoiser.spec)
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "?"},
    ]
    path = write(tmp_path / "d.jsonl", [{"messages": [*chat, {"role": "assistant", "content": "No"}]}] * 2)
    path = write(tmp_path / "d.jsonl", [json.loads(Path(path).read_text().splitlines()[0]), LINES[0]])
    train, held = load(path, 1, chat=True)
    found = {one.where.rpartition(" ")[2]: one for one in (*train, *held)}
    assert found["1"].answer == "No" and found["1"].prompt == chat
    texts = {key: [loaded.tokenizer.decode([*ids]) for ids in encode(one)] for key, one in found.items()}
    assert texts == {"1": ["u:Hi;a:Yes;u:?;a:", "No;<end>"], "2": ["u:0 + 1 = ?;a:", "1;<end>"]}
    loaded.tokenizer.chat_template = "{% if add_generation_prompt %}x{% endif %}{{ messages[-1].content }}"
    with refused("chat-template-failed: line 1"):
        Encoder(loaded.tokenizer, loaded.denoiser.spec)(found["1"])


@pytest.mark.parametrize(
    ("lines", "settings", "said"),
    [
        ([{"question": "a", "answer": "b"}], {}, "example-invalid: line 1"),
        ([*LINES, {"prompt": "a", "answr": "b"}], {}, "example-invalid: line 11"),
        ([*LINES, {"prompt": "a", "answer": 7.5}], {}, "example-invalid: line 11"),
        ([*LINES, {"prompt": "", "answer": "b"}], {}, "example-invalid: line 11"),
        ([*LINES, {"prompt": 5, "answer": "b"}], {}, "prompt-type: line 11"),
        ([*LINES, "text"], {}, "example-invalid: line 11"),
        ([*LINES, {"messages": [{"role": "user", "content": "a"}]}], {}, "example-invalid: line 11"),
        ([*LINES, {"messages": [{"role": "assistant", "content": "a"}]}], {}, "example-invalid: line 11"),
        ([], {}, "nothing-to-learn"),
        (LINES[:2], {}, "nothing-to-learn: train.held_out=2"),
        (LINES, {"metric": "exact"}, "choice-unknown: train.data.metric, 'exact', 'exact_match'"),
        (LINES, {"metric": "no.such:f"}, "function-missing: train.data.metric, no.such:f"),
        (LINES, {"colum": "x"}, "field-unknown: train.data, 'colum'"),
        (LINES, {"chat": "yes"}, "option-type: train.data"),
        (LINES, {"test": "gone.jsonl"}, "file-unreadable: train.data, gone.jsonl"),
    ],
)
def test_mistakes_in_the_data(lines: list[Any], settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with refused(said) as error:
        load(write(tmp_path / "d.jsonl", lines), **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("prompt", "answer", "said"),
    [
        ("€", "b", "text-outside-vocabulary: '€'"),
        ("a", "€", "text-outside-vocabulary: '€'"),
        ([1, 286], "b", "mask-token-given: 286"),
        ([1, 999], "b", "token-outside-vocabulary: 999"),
        ("a", [1, 999], "example-invalid: 999"),
        ("  ", "b", "prompt-empty: the prompt of it"),
    ],
)
def test_mistakes_that_tokens_show(prompt: Any, answer: str, said: str, encoder: Encoder) -> None:
    with refused(said):
        encoder(Example("it", prompt, answer))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    loaded = loading.load(tiny.write("dream", tmp_path_factory.mktemp("m") / "m"), device="cpu")
    assert loaded.tokenizer is not None
    return Encoder(loaded.tokenizer, loaded.denoiser.spec)


def test_tokens_of_an_example(encoder: Encoder) -> None:
    spec: ModelSpec = encoder.spec
    prompt, answer = encoder(Example("it", "ab", "cd"))
    assert len(prompt) == 2 and len(answer) == 3 and answer[-1] == spec.eos_id
    assert encoder(Example("ids", [5, 6], "cd<end>"))[1][-3:] != [spec.eos_id] * 3, "one end token is enough"
    assert encoder(Example("ids", [5, 6], [7, 8])) == ([5, 6], [7, 8]), "token ids are taken as they are"
    with refused("context-exceeded: 512"):
        encoder.prompt(Example("z", "a", "abc"), 512)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Examples are missing. Set train.data=FILE.jsonl"),
        (["data={DATA}", "output_dir=conf.txt/run"], "conf.txt/run cannot be written (Not a directory)"),
        (["data=gone.jsonl"], "train.data=gone.jsonl (No such file or directory)"),
        (["data=conf.txt"], "train.data=conf.txt has another ending than .jsonl, .json,"),
        (["data={DATA}", "longer=drop", "max_length=3"], "longer=drop leaves no examples"),
        (["data={DATA}", "max_length=5"], "tokens of prompt and answer, too many for train.max_length=5"),
        (["data={DATA}", "padding=long"], "padding='long' is invalid. Set longest, block or none, or a whole number"),
        (["data={DATA}", "padding=0"], "or a number greater than or equal to 1"),
        (["data={DATA}", "held_out=-1"], "train.held_out=-1 is invalid. Set a number greater than or equal to 1"),
        (["data={DATA}", "dtype=bfloat16"], "dtype=bfloat16 rounds"),
        (["tasks=copy"], "train.tasks='copy' is invalid. Write train.tasks={copy: 1}"),
        (["data={DATA}", "model={path: MODEL, quantize: int8}"], "has quantize, which is for sampling only"),
        (["tasks={cpy: 1}"], "unknown task 'cpy'"),
        (["tasks={copy: 1}"], "need mini's tokenizer"),
        (["data={DATA}", "evaluation={scheduler: treshold}"], "Did you mean 'threshold'"),
        (["data={DATA}", "evaluation={seed: 1}"], "evaluation has no field 'seed'"),
        (["data={DATA}", "learning_rate=fast"], "learning_rate='fast' is invalid. Set a number"),
        (["data={DATA}", "report_too=none"], "Did you mean 'report_to'"),
        (["data={DATA}", "optim=adamwx"], "adamwx"),
        (["data={DATA}", "deepspeed=x.json"], "train=sft needs a package that is not installed"),
        (["data={DATA}", "lora={alpha: 2}"], "train.lora has no field 'alpha'"),
        (["data={DATA}", "lora={r: '2'}"], "train.lora.r='2' is invalid"),
        (["data={DATA}", "average=1.0"], "average=1.0 is invalid. Set a number less than 1"),
    ],
)
def test_mistakes_are_one_sentence_before_the_first_step(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, data = str(tiny.write("dream", tmp_path / "m")), write(tmp_path / "d.jsonl", LINES)
    few = [f"model={model}", "use_cpu=true", "output_dir=run", "new_tokens=8", "held_out=2", "max_steps=1"]
    (tmp_path / "conf.txt").write_text("{}")
    given = [word.replace("{DATA}", data).replace("MODEL", model) for word in words]
    assert cli.main(["train=sft", *(f"train.{word}" for word in [*few, *given])]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert said in told[-1] and told[-1].startswith("dllm-train: ")
    assert not (tmp_path / "run").exists()
