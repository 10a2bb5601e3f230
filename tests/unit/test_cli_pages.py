"""`--help` and `--info`: every choice with its fields, and the user's own choices of `./conf`."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from dllm_sampler import config
from dllm_sampler.cache.base import BaseCache
from dllm_sampler.cache.suffix import SuffixCache
from dllm_sampler.cli import explain
from dllm_sampler.cli.compose import settings
from dllm_sampler.cli.explain import LIMITS
from dllm_sampler.cli.main import main
from dllm_sampler.cli.terminal import written
from dllm_sampler.cli.user_files import FLAG, entry
from dllm_sampler.core.protocols import Blocks, Cache, Guide, Stop
from dllm_sampler.core.spec import RareTrait, Traits
from dllm_sampler.eval.command import main as evaluate
from dllm_sampler.eval.tuning import main as tune
from dllm_sampler.host.functions import resolve_callable
from dllm_sampler.training.cli import Command
from dllm_sampler.training.cli import main as train
from tests.refusals import refused
from tests.sampling import each, few

OWN = {
    "scheduler": "# Threshold 0.5.\n_target_: dllm_sampler.schedulers.threshold.Threshold\nthreshold: 0.5\n",
    "model": "# A folder of mine.\npath: my folder\n",
    "cache": "_target_: dllm_sampler.cache.dual.DualCache\n",
    "guide": "# @package guide.mine\n# Warm.\n_target_: dllm_sampler.guides.Temperature\nvalue: 0.5\n",
    "blocks": "# Blocks of 8.\n_target_: dllm_sampler.blocks.fixed.FixedBlocks\nlength: 8\n",
    "stop": "# At the first end token.\n_target_: dllm_sampler.stops.end_tokens.PrefixStop\n",
    "experiment": "# @package _global_\n# Found by dllm-tune.\ndefaults:\n  - override /scheduler: mine\nseed: 3\n",
}


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def own(tmp_path: Path, group: str, text: str, name: str = "mine") -> None:
    (tmp_path / "conf" / group).mkdir(parents=True, exist_ok=True)
    (tmp_path / "conf" / group / f"{name}.yaml").write_text(text)


def page(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def flat(text: str) -> str:
    return " ".join(text.split())


@few("group", OWN, 2)
def test_own_choices_are_listed_explained_and_chosen(
    group: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own(tmp_path, "scheduler", OWN["scheduler"])
    own(tmp_path, group, OWN[group])
    assert f"mine is yours: conf/{group}/mine.yaml" in page(capsys, "--help")
    about = config.described("mine", OWN[group]).about
    for words in (["--info"], ["--info", group], ["--help", f"{group}=mine"]):
        assert f"{about} [yours: conf/{group}/mine.yaml]".strip() in flat(page(capsys, *words))
    chosen = settings([f"{group}=mine"])
    if group == "model":
        assert chosen.model["path"] == "my folder"
    elif group == "experiment":
        assert chosen.options.seed == 3 and chosen.plugins["scheduler"]["threshold"] == 0.5  # type: ignore[index]
    else:
        built = config.build(group, chosen.plugins[group])
        kind: Any = resolve_callable("it", _target(OWN[group]))
        assert isinstance(built[0] if group == "guide" else built, kind)


def _target(text: str) -> str:
    return next(line.partition(": ")[2] for line in text.splitlines() if line.startswith("_target_"))


def test_a_named_folder_is_listed_beside_conf_and_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own(tmp_path, "scheduler", OWN["scheduler"])
    own(tmp_path, "cache", OWN["cache"])
    own(tmp_path / "more", "scheduler", OWN["scheduler"].replace("0.5", "0.25"))
    for words in ([FLAG, "more/conf"], [f"{FLAG}=more/conf"]):
        said = flat(page(capsys, "--info", *words))
        assert "Threshold 0.25. [yours: more/conf/scheduler/mine.yaml]" in said and "conf/cache/mine.yaml]" in said
    assert main([FLAG, "more/conf", "scheduler=mine", "scheduler.treshold=1", "copy: Ada"]) == 2
    assert "scheduler=mine has no field 'treshold'" in capsys.readouterr().err
    assert "Threshold 0.5." in page(capsys, "--info", "scheduler"), "it holds for one command"
    for words in ([FLAG, "gone"], [FLAG], [f"{FLAG}="]):
        assert main(words) == 2 and f"Write {FLAG} FOLDER." in capsys.readouterr().err


def test_an_own_scheduler_inside_another_one_has_its_settings(tmp_path: Path) -> None:
    own(tmp_path, "scheduler", OWN["scheduler"])
    for inner in ("mine", "{name:mine,threshold:0.5}"):
        built = config.build(
            "scheduler", settings(["scheduler=freedave", f"scheduler.inner={inner}"]).plugins["scheduler"]
        )
        assert built.inner.threshold == 0.5


def test_an_own_file_may_begin_with_another_one(tmp_path: Path) -> None:
    own(tmp_path, "scheduler", "defaults: [threshold]\nthreshold: 0.125\n", "bold")
    own(tmp_path, "experiment", "defaults:\n  - fast-dllm\n  - override /scheduler: bold\nseed: ${max_new_tokens}\n")
    chosen = settings(["experiment=mine", "max_new_tokens=9"])
    assert chosen.plugins["scheduler"]["threshold"] == 0.9, "of the experiment"  # type: ignore[index]
    assert chosen.plugins["cache"]["name"] == "dual" and chosen.options.seed == 9  # type: ignore[index]
    assert settings(["scheduler=bold"]).plugins["scheduler"]["threshold"] == 0.125  # type: ignore[index]
    own(tmp_path, "scheduler", "defaults: [bold]\n", "bold")
    with refused("config-invalid: scheduler=bold"):
        settings(["scheduler=bold"])


def test_in_a_checkout_no_choice_is_the_users_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert "yours" not in page(capsys, "--help") + page(capsys, "--info")


def test_a_broken_file_breaks_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own(tmp_path, "cache", "[1,\n", "bad")
    for words in (["--help"], ["--info"], ["--info", "cache"]):
        assert "conf/cache/bad.yaml" in page(capsys, *words)
    assert main(["--help", "cache=bad"]) == 2
    assert "conf/cache/bad.yaml cannot be read" in capsys.readouterr().err
    with refused("field-unknown: cache=periodic_dual"):
        settings(["cache.every=3"])


@each("group", ["guide", "experiment"])
def test_an_own_file_that_is_no_utf8_is_named(group: str, tmp_path: Path) -> None:
    own(tmp_path, group, "", "latin")
    (tmp_path / "conf" / group / "latin.yaml").write_bytes(b"# \xe9\n")
    with refused(f"file-unreadable: conf/{group}/latin.yaml"):
        settings([f"{group}=latin"])


def test_a_checkpoint_may_be_called_checkpoint(tmp_path: Path) -> None:
    with refused("choice-unknown: 'checkpoint'"):
        settings(["model=checkpoint"])
    (tmp_path / "checkpoint").mkdir()
    assert settings(["model=checkpoint"]).model["path"] == "checkpoint"


def test_help_is_short_and_fits(capsys: pytest.CaptureFixture[str]) -> None:
    whole = page(capsys, "--help")
    assert page(capsys, "copy: Ada", "temperature=1", "scheduler.threshold=0.5", "-h") == whole
    assert len(whole.splitlines()) <= 130  # a third of them are names of models and plug-ins
    for words in (["--info"], ["--help", *(f"{group}={config.names(group)[-1]}" for group in config.GROUPS)]):
        whole += page(capsys, *words)
    assert max(map(len, whole.splitlines())) <= 80
    assert "step compiles only the latter" in flat(whole)  # the second line of a comment


def test_one_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    klass = flat(page(capsys, "--help", "scheduler=klass"))
    assert "scheduler.history=2 number of last divergences that must be below the bound." in klass
    assert "scheduler.steps=null forwards for the whole generation. By default one per token." in klass  # of FixedSteps
    assert "[all, surest, steadiest]" in klass
    assert "Paper: https://arxiv.org/abs/2511.05664" in klass
    freedave = flat(page(capsys, "--info", "scheduler=freedave"))
    assert "scheduler.inner=fixed the scheduler to speed up" in freedave  # of its base
    assert "no stop that changes the canvas" in freedave
    assert "Run python -m dllm_sampler.check scheduler=freedave" in freedave
    assert "guide.top_p.p=0.95 probability mass that stays" in flat(page(capsys, "--help", "guide=[top_k,top_p]"))
    assert "guide.top_p.measured=false read confidence from" in flat(page(capsys, "--help", "guide=top_p"))
    assert "scheduler.threshold=0.9 blocks.length=32" in flat(page(capsys, "--help", "experiment=fast-dllm"))
    assert "model.quantize=null int8 stores" in flat(page(capsys, "--help", "model=mini"))
    assert flat(page(capsys, "--help", "seed")).startswith("seed=0 prompt i of a run")


@each(
    ("words", "message"),
    [
        (["--info", "shceduler"], "unknown group, option or plug-in 'shceduler'. Did you mean 'scheduler'"),
        (["--help", "sheduler"], "unknown group, option or plug-in 'sheduler'. Did you mean 'scheduler'"),
        (["--help", "treshold"], "unknown group, option or plug-in 'treshold'. Did you mean 'threshold'"),
        (["--help", "nope=x"], "unknown group, option or plug-in 'nope'"),
        (["--help", "schedular.steps=3"], "unknown group, option or plug-in 'schedular.steps'. Did you mean 'schedul"),
        (["--help", "scheduler=klas"], "unknown scheduler 'klas'. Did you mean 'klass'"),
    ],
)
def test_a_page_that_there_is_not(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err


@each("group", [*config.GROUPS[1:], "task"])
def test_every_field_is_explained(group: str) -> None:
    for name in config.names(group):
        given = config.entry(group, name).settings
        if "_target_" in given:
            cls = resolve_callable(name, given["_target_"])
            shown = list(explain._fields(group, cls, given))
            assert len(shown) == sum(one.init for one in fields(cls))  # type: ignore[arg-type]
            assert all(meaning.strip("[] ") for _, meaning in shown), f"{cls.__name__} has a field without Args"


def test_a_scheduler_s_page_opens_with_its_rule(capsys: pytest.CaptureFixture[str]) -> None:
    rule = name = ""
    for name in config.names("scheduler"):
        cls = resolve_callable(name, config.entry("scheduler", name).settings["_target_"])
        sentence, rule, *_ = explain._prose(cls)
        lines = rule.splitlines()
        assert sentence.endswith(".") and len(sentence.split()) <= 25, name
        assert 3 <= len(lines) <= 10, f"{name}: three to ten lines of pseudo-code come second in its docstring"
        assert all(line.startswith(explain.CODE) and len(line) <= 80 for line in lines), name
    assert main(["--help", f"scheduler={name}"]) == 0
    assert f"\n\n{rule}\n\n" in capsys.readouterr().out  # its lines are not joined


def test_a_cache_s_page_opens_with_what_it_computes() -> None:
    for name in {*config.names("cache")} - {"none", "exact"}:
        cls: Any = resolve_callable(name, config.entry("cache", name).settings["_target_"])
        if not issubclass(cls, SuffixCache):  # one around another
            lines = list(explain._prose(cls))[1].splitlines()
            assert [line.split()[0] for line in lines] == ["computes", "reuses", "refreshes"], name
            assert all(line.startswith(explain.CODE) and len(line) <= 80 for line in lines), name


def test_pages_of_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(["--help", "task=mini", "cache=dual"]) == 0
    out = flat(capsys.readouterr().out)
    assert "task.count=100 number of samples." in out and "python -m dllm_sampler.check cache=dual" in out
    assert tune(["--help"]) == 0
    assert "tune.loss=1.0 largest loss of score against one token per step, in percentage points" in flat(
        capsys.readouterr().out
    )
    assert evaluate(["--help", "task=minni"]) == train(["--help", "train=minni"]) == 2
    assert capsys.readouterr().err.count("Did you mean 'mini'") == 2


@each("name", config.names("train"))
def test_a_trainer_s_page_says_what_each_field_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["--help", f"train={name}"]) == 0
    page, given = flat(capsys.readouterr().out), dict(config.entry("train", name).settings)
    target: Any = resolve_callable(name, given.pop("_target_"))
    meanings = explain.meanings(type("Fields", (Command, target.config), {}))
    of_transformers = TrainingArguments.__dataclass_fields__.keys()
    assert given.keys() - of_transformers <= meanings.keys(), f"{name} has a field without a line in its docstring"
    assert all(f"train.{field}" in page and meanings.get(field, "") in page for field in given)


def test_every_trait_has_words() -> None:
    assert explain.facts(Traits).keys() == {one.name for one in fields(Traits)} - {"rare"}
    assert all(inspect.getdoc(one) != inspect.getdoc(RareTrait) for one in RareTrait.__subclasses__())
    for kind in (Cache, BaseCache, Stop, Guide, Blocks):
        names = {name for name, hint in inspect.get_annotations(kind).items() if "ClassVar" in str(hint)}
        assert explain.facts(kind).keys() == names, kind
    for kind in (Traits, Cache, BaseCache, Stop, Guide, Blocks):
        for name, sentences in explain.facts(kind).items():
            default = getattr(kind, name)
            others = (
                {"window"} if name == "asks" else {"answer", "model"} if name == "scope" else {written(not default)}
            )
            assert others <= sentences.keys(), f"{kind.__name__}.{name} has no sentence for another value"


@each(
    "choice",
    [
        ("cache=none", "It stores no keys and values."),
        ("cache=none", "It computes every mask that is seen."),
        ("cache=prefix", "It serves answers whose length changes."),
        ("stop=fill", "It writes without a prediction."),
        ("scheduler=linear_spec", "Its rule needs more of the model than the logits of one block"),
        ("scheduler=leftright", "It does not use confidence: no scheduler=eoser around it."),
    ],
)
def test_what_a_page_says_is_true_of_the_choice(choice: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    words, said = choice
    assert main(["--help", words]) == 0
    shown = flat(capsys.readouterr().out)
    assert said in shown
    assert "It stores keys and values for later forwards." not in shown


def test_a_yaml_of_ones_own_that_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "conf/scheduler").mkdir(parents=True)
    (tmp_path / "conf/scheduler/own.yaml").write_text("@ Mine\nthreshold: 0.7\n")
    monkeypatch.chdir(tmp_path)
    assert main(["copy: Ada", "scheduler=own"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "own.yaml" in said


def test_aliases_and_interpolations_of_a_usual_size_are_taken(tmp_path: Path) -> None:
    text = "a: &a [1, 2]\nb: *a\nc: ${a}\nd: ${oc.env:NOTHING_OF_THE_KIND,7}\ne: ${.d}-${b[1]}\n"
    own(tmp_path, "scheduler", text)
    assert entry("scheduler", "mine").settings == {"a": [1, 2], "b": [1, 2], "c": [1, 2], "d": "7", "e": "7-2"}


def test_a_page_that_there_is_not_is_no_general_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command, name in ((evaluate, "dllm-eval"), (train, "dllm-train"), (tune, "dllm-tune")):
        assert command(["--help", "sheduler"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"{name}: --help sheduler: this command has no such page. ")


def test_a_mistyped_model_folder_lists_no_names(capsys: pytest.CaptureFixture[str]) -> None:
    trained = ["train=sft", "train.tasks={copy: 1}", "train.model=my-ladda"]
    for command, words in ((main, ["copy: Ada", "model=my-ladda"]), (train, trained)):
        assert command(words) == 2
        said = capsys.readouterr().err
        assert "unknown model 'my-ladda'" in said and "org/name" in said and len(said) < 200


@pytest.mark.parametrize("word", ["cache=dual", "scheduler=threshold", "cache", "scheduler"])
def test_limits_are_on_the_page_of_a_plug_in(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", word]) == 0
    assert LIMITS[word.partition("=")[0]] in " ".join(capsys.readouterr().out.split())
    assert main(["--help"]) == 0
    assert "(--help scheduler)" in (whole := capsys.readouterr().out) and "(--help cache)" in whole


@pytest.mark.parametrize(("command", "names"), [(evaluate, [*LIMITS]), (train, ["log-probability"])])
def test_limits_of_other_commands(
    command: Callable[[list[str]], int], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["--help"]) == 0
    page = capsys.readouterr().out
    assert [name for name in names if LIMITS[name] not in page] == []
