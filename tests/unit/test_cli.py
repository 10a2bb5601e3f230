"""`dllm-sample` from the words of a command line to its exit status, on a tiny random checkpoint."""

import io
import json
from pathlib import Path

import pytest

from dllm_sampler import __version__
from dllm_sampler.cli import help as pages
from dllm_sampler.cli.compose import settings
from dllm_sampler.cli.main import main
from dllm_sampler.cli.options import Options
from tests.refusals import refused
from tests.sampling import each

pytestmark = pytest.mark.usefixtures("at_a_terminal")


def test_answers_and_figures(words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*words, "reverse: Ada, Ben", "stop=none", "copy: Ada"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    short, figures = err.splitlines()
    assert short == "samples 1, 2: cut at max_new_tokens"
    assert figures.startswith("2 samples, ")
    assert list(tmp_path.iterdir()) == [], "nothing is littered"


def test_an_answer_on_a_canvas_that_the_scheduler_has_made(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one column, or none if an end token is predicted there."""
    settings = ["scheduler=rho_eos", "scheduler.initial=1", "scheduler.low=0", "scheduler.high=0", "stop=none"]
    assert main([*words, "copy: Ada", *settings]) == 0
    short, figures = capsys.readouterr().err.splitlines()
    assert short == "the answer: cut at the end of the canvas, whose length the scheduler chose"
    assert figures.startswith("1 sample, ")


def test_kernels_and_graphs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot run is replaced and said, or refused."""
    pytest.importorskip("triton")
    assert main([*words, "copy: Ada", "backend=triton", "cuda_graph=auto"]) == 0
    warning, short, figures = capsys.readouterr().err.splitlines()
    assert short == "the answer: cut at max_new_tokens"
    assert warning.startswith("dllm-sample: Triton kernels cannot run here (")
    assert figures.startswith("1 sample, ")
    assert main([*words, "copy: Ada", "cuda_graph=true"]) == 2
    assert capsys.readouterr().err == (
        "dllm-sample: cuda_graph=true is not supported here (the model is on cpu, not on a GPU). Remove it.\n"
    )
    assert main([*words, "copy: Ada", "backend=cuda"]) == 2
    assert capsys.readouterr().err == "dllm-sample: backend='cuda' is invalid. Set auto, triton or torch.\n"


def test_output_file(words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = ["copy: Ada", "reverse: Ada, Ben", "copy: Cal, Dan"]
    sampling = ["stop=none", "temperature=1", "batch_size=2"]
    assert main([*words, *prompts, *sampling, "output=out (1), a.jsonl"]) == 0
    out = capsys.readouterr().out.splitlines()
    records = [json.loads(line) for line in (tmp_path / "out (1), a.jsonl").read_text().splitlines()]
    assert [record["prompt"] for record in records] == prompts
    assert [record["text"] for record in records] == out
    for index, record in enumerate(records):
        assert record["schema"] == 1
        assert record["index"] == index
        assert record["complete"]
        assert len(record["tokens"]) == len(record["step_map"]) <= 6
        assert record["tokens_per_forward"] == pytest.approx(len(record["tokens"]) / record["nfe"])
        assert record["time"] > 0
        assert max(record["step_map"]) < record["nfe"]

    again = [*words, *prompts, *sampling[:2], "batch_size=3", "output=b.jsonl"]
    assert main(again) == 0
    other = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert [r["tokens"] for r in other] == [r["tokens"] for r in records], "the batch changes no answer"


def test_prompts_from_files_and_pipes(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("copy: Ada\n\nreverse: é, Ben\n")
    (tmp_path / "b.jsonl").write_text(
        '"copy: Ada"\n{"prompt": "copy: Ben"}\n\n{"prompt": [5, 7, 9]}\n'
        '{"messages": [{"role": "user", "content": "copy: Ada"}]}\n'
    )
    for given, samples in (
        (["prompts_file=a.txt"], 2),
        (["prompts_file=b.jsonl"], 4),
        (["copy: Dan", "prompts_file=a.txt"], 3),
    ):
        assert main([*words, *given]) == 0
        assert len(capsys.readouterr().out.splitlines()) == samples
    for given in ([], ["prompts_file=-"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("copy: Ada\ncopy: Ben\n"))
        assert main([*words, *given]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 2
    monkeypatch.setattr("sys.stdin", io.StringIO("not read"))
    assert main([*words, "chat=true", "copy: Ada"]) == 0, "a prompt on the command line leaves the pipe alone"


def test_stream_without_a_terminal(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "copy: Ada", "stream=true", "scheduler=fixed", "stop=none"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1
    steps = [line for line in err.splitlines() if line.startswith("step ")]
    assert len(steps) == 6
    assert steps[0].count("░░") == 5
    assert "░" not in steps[-1]


WRONG = [
    (["treshold=1"], "unknown option 'treshold'. Did you mean 'scheduler.threshold=1'?"),
    (["threshold=0.9"], "unknown option 'threshold'. Did you mean 'scheduler.threshold=0.9'?"),
    (["temp=1"], "unknown option 'temp'. Did you mean 'temperature'?"),
    (["prompt=Ada"], "unknown option 'prompt': a prompt has no name."),
    (["prompts=Ada"], "or write prompts_file=FILE"),
    (["guide=[regex,regex]", "guide.pattern=a"], "guide=[regex,regex] names regex twice"),
    (["guide=[top_k,temperature,'top_k']"], "guide=[top_k,temperature,top_k] names top_k twice"),
    (["scheduler.treshold=1"], "scheduler=threshold has no field 'treshold'. Did you mean 'threshold'?"),
    (["scheduler=treshold"], "unknown scheduler 'treshold'. Did you mean 'threshold'?"),
    (["schedular=fixed"], "unknown option 'schedular'. Did you mean 'scheduler'?"),
    (["scheduler=null"], "scheduler=null chooses nothing. Write scheduler=NAME"),
    (["guide=[top_p,topk]"], "unknown guide 'topk'. Did you mean 'top_k' or 'top_p'?"),
    (["guide=choices", "guide.choices={a: b}"], "guide=choices has no field 'a'. The fields are choices"),
    (["cache=duel"], "unknown cache 'duel'. Did you mean 'dual'?"),
    (["experiment=fast"], "unknown experiment 'fast'. Did you mean 'fast-dllm'?"),
    (["model=minni"], "unknown model 'minni'. Did you mean 'mini'?"),
    (["model=./gone"], "'./gone'"),
    (["+foo=1"], "unknown option 'foo'"),
    (["scheduler.threshold=abc"], "scheduler.threshold='abc' is invalid. Set a number"),
    (["scheduler.threshold=-1"], "scheduler.threshold=-1"),
    (["scheduler.threshold=nan"], "scheduler.threshold=nan"),
    (["scheduler.threshold=0.7,0.9"], "has several values"),
    (["Ada=Ben, Cal"], "unknown option 'Ada'. See dllm-sample --help, and put -- before a prompt that contains =."),
    (["seed=Ben, Cal"], "or put -- before a prompt."),
    (["temperature=0.7,0.9"], "temperature=0.7,0.9 has several values. Give one, or run each by dllm-eval."),
    (["stop_strings=a,b"], "Give one, or stop_strings=[a,b] if it takes a list"),
    (["stop_strings=3"], "stop_strings=3 is invalid. Set a list as [a,b], or a text. In a shell, write stop_strings="),
    (["stop_strings=[1]"], "stop_strings=[1] is invalid. Set a list of texts, or a text"),
    (["stream=yes"], "stream='yes' is invalid. Set true or false"),
    (["steps=4"], "'steps': scheduler=threshold has no such field. Write scheduler=NAME scheduler.steps=4, where"),
    (["scheduler=fixed", "steps=4"], "unknown option 'steps'. Did you mean 'scheduler.steps=4'?"),
    (["guide.k=4"], "guide.k=4 sets a field that no chosen guide has. Write guide=top_k guide.top_k.k=4."),
    (["guide.x=4"], "guide.x=4 sets a field of a guide, and none is chosen. Add guide=NAME."),
    (["+guide.top_k.k=4"], "+guide.top_k.k=4 sets a guide that is not chosen. Write guide=top_k."),
    (["~guide.k"], "~guide.k removes a field that does not exist"),
    (["guide=top_k", "guide.k=4,5"], "Give one, or guide.top_k.k=[4,5] if it takes a list, or run each by dllm-eval."),
    (["scheduler=freedave", "scheduler.inner.steps=x"], "Set scheduler.inner=VALUE, or"),
    (["scheduler=freedave", "scheduler.inner={name: fixed, steps: x}"], "scheduler.inner.steps='x' is invalid"),
    (["scheduler=freedave", "scheduler.inner={name: fixed, steps: 0}"], "scheduler.inner.steps=0 is invalid"),
    (["model.revision.x=3"], "model.revision.x=3 sets a field, but model.revision=null is a single value"),
    (["model=mini", "model.eos_id=3"], "sets a field that model=mini does not set yet. Write +model.eos_id=3."),
    (["model=mini,llada-8b"], "model=mini,llada-8b has several values"),
    (["experiment=[recommended]"], "experiment=recommended works alone"),
    (["experiment=recommended", "experiment=dsb"], "works alone. Remove it, or experiment=dsb."),
    (["seed.=3"], "'seed.' is not a name. Write NAME=VALUE"),
    (["scheduler={name: fixed}"], "is a mapping, but scheduler takes one name. Write scheduler=NAME"),
    (["cache.every=4"], "The field exists in cache=periodic_dual, periodic_prefix"),
    (["k=4"], "Write guide=top_k guide.top_k.k=4"),
    (["guide.top_k.k=4"], "guide.top_k.k=4 sets a guide that is not chosen. Write guide=top_k"),
    (["-m", "scheduler=fixed,threshold"], "Use dllm-eval"),
    (["--stream"], "--stream is not a flag. Write stream=true."),
    (["--max-new-tokens=9"], "Write max_new_tokens=9"),
    (["output=-"], "output=- would write a file named -. Use output=/dev/stdout."),
    (["output=out.csv"], "output=out.csv: .csv is not JSON lines"),
    (["scheduler.threshold=[0.1"], "Cannot read the override scheduler.threshold=[0.1"),
    (["scheduler@x=fixed"], "scheduler@x=fixed has an @"),
    (["me@home=3"], "or put -- before it if it is a prompt"),
    (["~scheduler"], "No scheduler is chosen. Add scheduler=NAME"),
    (["++scheduler.foo=1"], "scheduler=threshold has no field 'foo'"),
    (["seed=${nope}"], "Interpolation key 'nope' not found"),
    (["seed=abc"], "seed='abc' is invalid. Set a whole number"),
    (["seed=99999999999999999999"], "seed=99999999999999999999 is invalid. Give at most 18 digits."),
    (["model.cfg_scale=abc"], "model.cfg_scale='abc' is invalid. Set a number"),
    (["scheduler._target_=no.such.Thing"], "scheduler=threshold: _target_ no.such.Thing"),
    (["scheduler._target_=null"], "scheduler=threshold: _target_"),
    (["guide=[[1]]"], "dllm-sample: "),
    (["++guide.top_p=3"], "++guide.top_p=3 sets a guide that is not chosen"),
    (["max_new_tokens=0"], "max_new_tokens=0 is invalid. Set a whole number of at least 1."),
    (["max_new_tokens=1e3"], "max_new_tokens=1000.0 is invalid. Set a whole number."),
    (["max_new_tokens=999"], "max_new_tokens=999"),
    (["max_new_tokens=62"], "for a context of 64"),
    (["batch_size=0"], "batch_size=0 is invalid. Set a whole number from 1 to"),
    (["temperature=-1"], "temperature=-1"),
    (["temperature=warm"], "temperature='warm' is invalid. Set a number"),
    (["block_length=4", "blocks=full"], "block_length=4 needs blocks=fixed"),
    (["device=cuda:99"], "device=cuda:99"),
    (["device=toaster"], "'toaster'"),
    (["dtype=float3"], "unknown dtype 'float3'. Did you mean"),
    (["dtype=fp16"], "unknown dtype 'fp16'. The choices are auto, "),
    (["stream_delay=-1"], "stream_delay=-1 is invalid. Set a number of seconds between 0 and 60"),
    (["output=no/such/folder.jsonl"], "output=no/such/folder.jsonl cannot be written (No such file"),
    (["prompts_file=gone.txt"], "prompts_file=gone.txt cannot be read (No such file"),
    (["prompts_file=-"], "prompts_file=-"),
    (["--inof"], "unknown flag '--inof'. Did you mean '--info'?"),
    ([""], "prompt 2 is empty"),
    (["  "], "prompt 2 is only white space"),
    (["copy: \udcff"], "prompt 2"),
    (["copy: <mask>"], "has the mask token"),
    (["copy: Zoe"], "has 'Zoe'"),
]


@each(("wrong", "message"), WRONG)
def test_wrong_input(words: list[str], wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "copy: Ada", *wrong]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dllm-sample: ")
    assert message in err
    assert err.count("\n") == 1, "one sentence"


@each(
    ("line", "message"),
    [
        ("{", "b.jsonl line 2 is not JSON"),
        ("{}", 'b.jsonl line 2 does not have exactly one of "prompt" and "messages"'),
        ("3", "b.jsonl line 2 does not have exactly one"),
        ('{"prompt": "a", "messages": []}', "line 2"),
        ("[1, 2]", "line 2"),
        ('{"prompt": 3}', 'line 2: "prompt" is neither text nor token ids'),
        ('{"messages": []}', 'line 2: "messages" is not a list'),
        ('{"messages": [{"role": "user"}]}', "line 2: a message lacks the text"),
        ('{"prompt": [1, true]}', 'line 2: "prompt" is neither text'),
    ],
)
def test_a_malformed_line(
    words: list[str], line: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "b.jsonl").write_text('{"prompt": "copy: Ada"}\n' + line + "\n")
    assert main([*words, "prompts_file=b.jsonl"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_no_prompt_and_no_text(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(words) == 2
    assert "prompt is missing" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(words) == 2
    assert "prompt is missing" in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("copy: Ada")
    assert main([*words, "prompts_file=a.txt", "output=./a.txt"]) == 2
    assert "output=./a.txt would overwrite prompts_file" in capsys.readouterr().err
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    assert main([*words, "prompts_file=a.txt"]) == 2
    assert "a.txt is not UTF-8 at byte" in capsys.readouterr().err


def test_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dllm-sample {__version__}\n"
    assert main(["-h"]) == 0
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 80
    for option in Options.__dataclass_fields__:
        assert f"{option}=" in page
    assert main(["--info"]) == 0
    page = capsys.readouterr().out
    for name in ("mini", "threshold", "dual", "truncate", "end_tokens", "full", "2505.22618"):
        assert name in page


def test_options_are_the_yaml() -> None:
    """The dataclass and --help say the same."""
    assert [name for name, _, _ in pages.options()] == list(Options.__dataclass_fields__)
    assert settings([]).options == Options()


def test_guides_keep_their_order() -> None:
    def guides(*overrides: str) -> list[tuple[str, object]]:
        found = settings(overrides).plugins["guide"]
        assert isinstance(found, list)
        return [(guide["name"], guide.get("value", guide.get("k", guide.get("p")))) for guide in found]

    assert guides() == []
    assert guides("guide=[top_p,temperature]") == [("top_p", 0.95), ("temperature", 1.0)]
    assert guides("guide=[temperature,top_p]", "guide.top_p.p=0.3") == [("temperature", 1.0), ("top_p", 0.3)]


@each("word", ["--temperature=0.7", "-threshold=1", "--stream"])
def test_options_with_dashes_are_no_prompts(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["copy: Ada", word]) == 2
    out, err = capsys.readouterr()
    assert out == "" and ("is not a flag. Write" in err or "name=value" in err)


def test_yaml_files_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "conf" / "scheduler").mkdir(parents=True)
    (tmp_path / "conf" / "scheduler" / "bold.yaml").write_text(
        "_target_: dllm_sampler.schedulers.threshold.Threshold\nthreshold: 0.5\n"
    )
    assert settings(["scheduler=bold"]).plugins["scheduler"] == {
        "name": "bold",
        "_target_": "dllm_sampler.schedulers.threshold.Threshold",
        "threshold": 0.5,
    }
    with refused("choice-unknown: 'bold'"):
        settings(["scheduler=bald"])


@each("name", ["p.txt", "p.jsonl", "-"])
def test_a_byte_order_mark_is_no_part_of_a_prompt(
    name: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = "\ufeffcopy: Ada\n" if name != "p.jsonl" else '\ufeff{"prompt": "copy: Ada"}\n'
    (tmp_path / "p.txt").write_text(text, encoding="utf-8")
    (tmp_path / "p.jsonl").write_text(text, encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main([*words, f"prompts_file={name}", "output=o.jsonl"]) == 0, capsys.readouterr().err
    assert json.loads((tmp_path / "o.jsonl").read_text(encoding="utf-8"))["prompt"] == "copy: Ada"


def test_an_experiment_that_sets_what_another_choice_does_not_have(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    both = [*words, "copy: Ada", "blocks=full", "experiment=fast-dllm"]
    assert main(both) == 2
    assert capsys.readouterr().err == (
        "dllm-sample: experiment=fast-dllm sets blocks.length, a field that blocks=full does not have. Choose another"
        " blocks or experiment.\n"
    )
