"""Bad inputs: each command, and each call of Python, ends in one sentence or in a right answer."""

from __future__ import annotations

import base64
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import ClassVar

from dllm_sampler.eval.fuzz import calls, folders, mutations, scene
from dllm_sampler.eval.fuzz.harness import LONGEST, PASSED, Case, Outcome

CONFORMANCE, ENGINE = "python -m dllm_sampler.eval.conformance", "python -m dllm_sampler.integrations"
LINES = 12  # of a refusal, warnings included
SHORT = ["train.new_tokens=8", "train.output=new"]
BOUNDS = (  # what keeps a run short: a smaller case has them still
    "max_new_tokens", "task.count", "tune.trials", "train.steps", "train.new_tokens", "train.held_out",
    "train.data.size", "train.data.batch_tokens",
)  # fmt: skip
MINI = ["task.operation=copy", "task.count=2", "max_new_tokens=8", "device=cpu"]
TRAIN, SFT = [*scene.TRAIN, "train.output=new"], "dllm-train train=sft"
BASE = {  # words that run in a moment
    "dllm-sample": ["copy: Ada", "model=ck", "max_new_tokens=6", "device=cpu"],
    "dllm-eval": [*MINI, "output=new", "oracle=false"],
    "dllm-train": TRAIN,
    SFT: ["train.model=ck", "train.data=sft.jsonl", "train.steps=1", "train.held_out=1", *SHORT],
    "dllm-tune": [*MINI, "tune.trials=1", "output=new"],
    "dllm-report": ["runs", "--csv", "-"],
    CONFORMANCE: ["."],
    ENGINE: ["scheduler=threshold"],
}
WHOLE, REAL, TRUTH, NAME = "whole", "real", "truth", "name"
KEYS: dict[str, list[tuple[str, str, str]]] = {  # settings of each command: key, a right value, what it is
    "dllm-sample": [
        *((key, "2", WHOLE) for key in ("samples", "block_length", "batch_size", "max_steps", "poll_every")),
        *((key, "2", WHOLE) for key in ("top_k", "max_new_tokens", "draft_length", "blocks.length")),
        *((key, "0.5", REAL) for key in ("temperature", "top_p", "scheduler.threshold", "model.cfg_scale")),
        *((key, "false", TRUTH) for key in ("compat", "chat", "draft_scheduled", "stream")),
        *(("scheduler", name, NAME) for name in ("threshold", "wino", "klass", "own", "apd", "freedave")),
        *(("cache", name, NAME) for name in ("none", "dual", "dkv", "block_causal", "elastic")),
        ("stop", "truncate", NAME), ("blocks", "full", NAME), ("guide", "top_k", NAME), ("dtype", "float32", NAME),
        ("batching", "static", NAME), ("backend", "torch", NAME), ("device", "cpu", NAME), ("seed", "3", "seed"),
        ("experiment", "mine", NAME), ("stop_strings", "Ben", "text"), ("prefix", "Ada", "text"),
        ("infill", "Ada {gap:3} Ben", "text"), ("forms", "0", "text"), ("output", "out.jsonl", "text"),
        ("prompts_file", "prompts.jsonl", "text"), ("target", "ck", "text"), ("cuda_graph", "auto", "text"),
        ("compile", "false", "text"), ("stream_delay", "0.1", "text"), ("separator", "1", "text"),
    ],
    "dllm-eval": [
        *((key, "2", WHOLE) for key in ("max_new_tokens", "batch_size", "task.count", "max_steps", "block_length")),
        ("threads", "1", WHOLE),
        ("temperature", "0.5", REAL), ("oracle", "false", TRUTH), ("guided", "false", TRUTH), ("seed", "3", "seed"),
        ("task", "copy", NAME), ("scheduler", "threshold", NAME), ("suite", "compare", NAME), ("cache", "dual", NAME),
        ("report", "r.html", "text"), ("task.operation", "sort", NAME), ("batching", "static", NAME),
    ],
    "dllm-train": [
        *((f"train.{key}", "1", WHOLE) for key in ("steps", "checkpoint_every", "model.num_layers", "data.size")),
        *((f"train.{key}", "0.1", REAL) for key in ("learning_rate", "decay", "clip", "init_std", "data.long")),
        ("train", "mini", NAME), ("train.seed", "1", "seed"), ("train.betas", "[0.9,0.9]", "text"),
        ("train.tracker", "null", "text"), ("train.device", "cpu", NAME), ("train.data.tails", "[1,0]", "text"),
        ("train.data.phases", "{'0': {copy: 1}}", "text"),
    ],
    SFT: [
        *((f"train.{key}", "2", WHOLE) for key in ("steps", "checkpoint_every", "held_out", "new_tokens", "batch")),
        *((f"train.{key}", "2", WHOLE) for key in ("block_length", "max_length", "batch_size", "batch_tokens")),
        *((f"train.{key}", "0.1", REAL) for key in ("random_length", "learning_rate", "weight_decay", "clip")),
        *((f"train.{key}", "false", TRUTH) for key in ("complementary", "gradient_checkpointing", "data.chat")),
        ("train.weight", "none", NAME), ("train.longer", "drop", NAME), ("train.schedule", "cosine", NAME),
        ("train.dtype", "float32", NAME), ("train.precision", "no", NAME), ("train.data.metric", "contains", NAME),
        ("train.seed", "1", "seed"), ("train.padding", "longest", "text"), ("train.model", "ck", "text"),
        *((f"train.data{key}", "sft.jsonl", "text") for key in ("", ".path", ".test")), ("train.tasks", "{}", "text"),
        ("train.data.prompt", "prompt", "text"), ("train.data.split", "train", "text"),
        ("train.lora", "{r: 2, alpha: 2}", "text"), ("train.evaluation", "{scheduler: {name: fixed}}", "text"),
    ],
    ENGINE: [
        *((key, "2", WHOLE) for key in ("block_length", "top_k", "blocks.length")),
        *((key, "0.5", REAL) for key in ("temperature", "top_p", "scheduler.threshold")),
        *(("scheduler", name, NAME) for name in ("wino", "klass", "own", "entropy_bound")),
        ("compat", "false", TRUTH), ("guide", "top_k", NAME), ("experiment", "mine", NAME), ("blocks", "fixed", NAME),
        ("guide", "json_schema", NAME), ("cache", "dual", "text"),
    ],
    "dllm-tune": [
        ("tune.trials", "1", WHOLE), ("tune.loss", "1.0", REAL), ("tune", "fast", NAME), ("tune.seed", "1", "seed"),
        ("tune.measure", "answer_tokens_per_forward", NAME), ("tune.space", "{cache: {none: {}}}", "text"),
    ],
}  # fmt: skip
WRONG = {  # values that no setting of a kind has
    WHOLE: ("abc", "1.5", "[1]", "{a: 1}", "nan", "-1", "-99999999999999999999", "true", "1e3x"),
    REAL: ("abc", "[1]", "{a: 1}", "nan", "true", "-1", "0..5"),
    TRUTH: ("maybe", "2", "[true]", "1.5"),
    NAME: ("nothing_of_that_name", "{a: 1}", "12"),
    "seed": ("abc", "1.5", "[1]", "{a: 1}", "9" * 30),
}
FORM = ["json: name Ada", "max_new_tokens=16", "device=cpu"]
LOADS = ["copy: Ada", "max_new_tokens=4", "device=cpu"]
DRAWN = ["scheduler=entropy_renoise", "blocks.length=null"]  # without masks
FILES: list[tuple[str, list[str], str]] = [  # a command, its words, and the file that is changed
    *(("dllm-sample", BASE["dllm-sample"], f"ck/{name}.json") for name in ("config", "tokenizer", "tokenizer_config")),
    *(("dllm-sample", [*LOADS, f"model={name}"], f"{name}/config.json") for name in (*folders.CONFIGS, folders.BERT)),
    ("dllm-sample", [*LOADS, "model=LLaDA2"], "LLaDA2/model.safetensors"),
    *[("dllm-sample", [*LOADS, *DRAWN, f"model={folders.GEMMA}"], f"{folders.GEMMA}/config.json")] * 3,
    ("dllm-sample", [*LOADS, "model=ck", "target=target"], "target/config.json"),
    ("dllm-sample", [*LOADS, "model=ck", "scheduler=apd", "scheduler.verifier=target"], "target/config.json"),
    ("dllm-sample", [*LOADS, "model=ck", "scheduler=pc", "scheduler.frequency=frequency.json"], "frequency.json"),
    ("dllm-sample", [*BASE["dllm-sample"], "chat=true"], "ck/tokenizer_config.json"),
    ("dllm-sample", BASE["dllm-sample"], "ck/config.json"),
    ("dllm-sample", BASE["dllm-sample"], "ck/model.safetensors"),
    ("dllm-sample", [*BASE["dllm-sample"][1:], "prompts_file=prompts.jsonl"], "prompts.jsonl"),
    ("dllm-sample", [*BASE["dllm-sample"][1:], "prompts_file=prompts.txt"], "prompts.txt"),
    ("dllm-sample", [*FORM, "guide=json_schema", "guide.json_schema.schema=schema.json"], "schema.json"),
    ("dllm-sample", [*FORM, "guide=grammar", "guide.grammar.grammar=own.grammar"], "own.grammar"),
    ("dllm-sample", [*BASE["dllm-sample"], "scheduler=own"], "conf/scheduler/own.yaml"),
    ("dllm-sample", [*BASE["dllm-sample"], "experiment=mine"], "conf/experiment/mine.yaml"),
    ("dllm-sample", ["copy: Ada", "scheduler=learn2pd", "scheduler.filter=filter.safetensors"], "filter.safetensors"),
    ("dllm-eval", ["task=jsonl", "task.file=task.jsonl", "max_new_tokens=4", "output=new"], "task.jsonl"),
    ("dllm-report", ["runs", "--csv", "-"], "runs/one/run.json"),
    ("dllm-report", ["runs", "--csv", "-"], "runs/one/samples.jsonl"),
    ("dllm-eval", [*MINI[1:], "task=own", "output=new"], "conf/task/own.yaml"),
    ("dllm-eval", ["suite=own", "max_new_tokens=8", "output=new"], "conf/suite/own.yaml"),
    ("dllm-tune", [*MINI, "tune=own", "output=new"], "conf/tune/own.yaml"),
    ("dllm-tune", [*MINI, "tune.trials=1", "output=new"], "conf/experiment/tuned.yaml"),
    ("dllm-train", [*scene.TRAIN, "train.steps=2", "train.output=unfinished"], "unfinished/checkpoint.safetensors"),
    ("dllm-train", [*scene.TRAIN, "train.steps=2", "train.output=unfinished"], "unfinished/log.jsonl"),
    ("dllm-train", ["train=own", *BASE[SFT]], "conf/train/own.yaml"),
    ("dllm-train", ["train=sft", *BASE[SFT]], "sft.jsonl"),
    ("dllm-train", ["train=sft", *BASE[SFT]], "ck/config.json"),
    (ENGINE, ["scheduler=own"], "conf/scheduler/own.yaml"),
    (ENGINE, ["experiment=mine"], "conf/experiment/mine.yaml"),
    (CONFORMANCE, ["."], "traces/t.jsonl"),
    (CONFORMANCE, ["."], "ck/config.json"),
]  # fmt: skip


class Inputs:
    """Words, files and arguments with mistakes in them."""

    limit: ClassVar[float] = 60.0

    def draw(self, random: Random) -> Case:
        """A command with a mistake, or a call."""
        how = random.random()
        if how < 0.2:
            return calls.draw(random)
        if how < 0.6:
            return _file(random)
        return _words(random)

    def check(self, case: Case) -> Outcome:
        """Run it where nothing else is."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if case["command"] == "call":
                return calls.check(case)
            with scene.copied() as folder:
                if case["file"] is not None:
                    changed(case, folder)
                return self._judged(case)

    def _judged(self, case: Case) -> Outcome:
        """What the command's end means."""
        command, words = case["command"], case["words"]
        ended = (scene.started if case["process"] else scene.called)(command, words)
        if "Traceback (most recent call last)" in ended.err:
            last = ended.err.strip().splitlines()[-1][:300]
            return Outcome("traceback", last, last.partition(":")[0])
        if ended.status == 0 or (command == CONFORMANCE and ended.status == 1):
            if case["must"]:
                return Outcome("wrong", f"exit 0 in spite of {case['must']}", f"accepted {case['must']}")
            return PASSED
        lines = ended.err.strip().splitlines()
        if ended.status != 2:
            return Outcome("wrong", f"exit {ended.status}: {lines[-1:]}", f"exit {ended.status}")
        if not lines or len(lines) > LINES or len(ended.err) > LONGEST:
            about = f"{len(lines)} lines of {len(ended.err)} signs: {ended.err[:200]!r}"
            return Outcome("wrong", f"the refusal is no sentence, {about}", "refusal")
        return Outcome("refused", lines[-1])

    def simpler(self, case: Case) -> Iterator[Case]:
        """Without one of the words; those that keep the run short stay, and what names the file with the mistake."""
        if case["command"] == "call":
            return
        if case["process"]:
            yield case | {"process": False}
        mistaken = 1 if case["must"] and case["file"] is None else 0  # the last word: without it all is right
        for at in range(len(case["words"]) - mistaken):
            key, _, value = case["words"][at].partition("=")
            named = case["must"] and case["file"] and value and case["file"]["name"].startswith(value)
            if key not in BOUNDS and not named:
                yield case | {"words": case["words"][:at] + case["words"][at + 1 :]}

    def command(self, case: Case) -> str | None:
        """The command line, where no file is needed and a shell can say it."""
        if case["command"] == "call" or case["file"] is not None or any("\x00" in word for word in case["words"]):
            return None
        return f"{case['command']} {shlex.join(case['words'])}"


FUZZ = Inputs()


def _case(random: Random, command: str, words: list[str], file: dict[str, str] | None, must: str = "") -> Case:
    sayable = all("\x00" not in word and len(word) < 10_000 for word in words)
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        sayable = False
    process = sayable and random.random() < 0.02
    return {"command": command, "words": words, "file": file, "must": must, "process": process}


def words(kind: str) -> tuple[str, list[str]]:
    """The command of a key of `BASE`, and its words without a mistake."""
    command, _, chosen = kind.partition(" train=")
    return command, [f"train={chosen}", *BASE[kind]] if chosen else list(BASE[kind])


def _words(random: Random) -> Case:
    """A command line with one or two strange words; `must` says which mistake may not be accepted."""
    name = random.choices([*BASE], [8, 3, 3, 2, 1, 2, 1, 2])[0]
    (command, said), must = words(name), ""
    if name not in KEYS:
        strange = random.choice([*mutations.WORDS, "--title", "--replays=-1", "--nothing", "--json=x/y", "--output=x"])
        said.insert(random.randint(0, len(said)), strange)
        return _case(random, command, said, None)
    key, right, kind = random.choice(KEYS[name])
    how = random.choice(["typo", "name", "kind", "kind", "any", "any", "text"])
    if how == "typo":
        wrong, known = mutations.typo(random, key), {one for one, _, _ in KEYS[name]}
        if all(map(str.isidentifier, wrong.split("."))) and wrong not in known and len(wrong) > 2:
            must = "an unknown key"
        word = f"{wrong}={right}"
    elif how == "name" and kind == NAME:
        word = f"{key}={mutations.typo(random, right)}"
    elif how == "kind" and kind in WRONG:
        word, must = f"{key}={random.choice(WRONG[kind])}", "a value of another kind"
    elif how == "text":
        word = mutations.text(random, f"{key}={right}")
    else:
        word = f"{key}={random.choice(mutations.WORDS)}"
    said = [one for one in said if not one.startswith(f"{key}=")]
    return _case(random, command, [*said, word], None, "" if key in OWNED else must)


SIZES = ("d_model", "n_layers", "mlp_hidden_size", "embedding_size", "n_heads")
OTHERS = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_experts")
SURE = {  # files of which some changes may never be accepted, and the fields
    **{f"{name}/config.json": OTHERS for name in (*folders.CONFIGS, folders.BERT)},
    **{f"{name}/config.json": SIZES for name in ("ck", "LLaDA")},
    **{f"{name}/model.safetensors": () for name in ("ck", "LLaDA2")},
}
OWNED = ("stream", "train", "tune")  # another value of these may make other words right


def _file(random: Random) -> Case:
    """A command that reads a changed file."""
    command, words, name = random.choice(FILES)
    content = (scene.scene() / name).read_bytes()
    if command == "dllm-sample" and name in SURE and random.random() < 0.4:
        content, must = mutations.wrong_size(random, content, SURE[name])
        return _case(random, command, list(words), _saved(name, content), must)
    for _ in range(random.choice([1, 1, 2])):
        try:
            content = mutations.file(random, content, name)
        except (ValueError, IndexError, RecursionError, OverflowError):  # a file that was broken before
            break
    return _case(random, command, list(words), _saved(name, content))


def _saved(name: str, content: bytes) -> dict[str, str]:
    return {"name": name, "content": base64.b64encode(content).decode()}


def changed(case: Case, folder: Path) -> None:
    """Put the case's file into the scene."""
    (folder / case["file"]["name"]).write_bytes(base64.b64decode(case["file"]["content"]))
