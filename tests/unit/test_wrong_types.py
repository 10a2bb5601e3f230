"""Values of a wrong type are refused in one sentence wherever they are given, none is taken for something else."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM

from dllm_sampler import CounterNoise, Sampler, config
from dllm_sampler.cli.compose import settings
from dllm_sampler.errors import UserError
from dllm_sampler.host.functions import resolve
from dllm_sampler.inputs.prompts import Infill
from dllm_sampler.models import autoregressive
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.loading import load
from dllm_sampler.schedulers.freedave import FreeDave
from dllm_sampler.schedulers.threshold import Threshold
from tests import toys
from tests.refusals import refused
from tests.sampling import each

PROMPT = [1, 2, 3]
WRONG: list[Any] = [
    True, 3, -1, 0, 1.5, float("nan"), float("inf"), "x", "", b"x", [], ["x"], [1.5], [True], {}, {"a": 1}, (),
    object(), 10**30, None, int,
]  # fmt: skip
NUMBERS = (3, 0, 1.5)


def only_accepts(what: Callable[[Any], Any], *right: Any) -> None:
    """Every value is refused but the right ones, of which `True` is no 1."""
    for value in WRONG:
        if any(value is one or (value == one and type(value) is type(one)) for one in right):
            what(value)
            continue
        with pytest.raises(UserError) as caught:
            what(value)
        assert "\n" not in str(caught.value), value


@each(
    ("option", "right"),
    [
        ("noise", (None,)),
        ("tokenizer", (None,)),
        ("compat", (True,)),
        ("entropy", (True,)),
        ("temperature", (*NUMBERS, None)),
        ("top_k", (None,)),
        ("max_steps", (3, 10**30, None)),
        ("stop_token_ids", (3, 0, [], (), None)),
        ("cuda_graph", ()),
        ("backend", ()),
        *((group, ()) for group in ("scheduler", "blocks", "stop", "cache")),
        ("guide", ([], (), None)),
    ],
)
def test_options_of_a_sampler(option: str, right: tuple[Any, ...]) -> None:
    denoiser = toys.denoiser()
    some = {"none": ("stop", "cache"), "": ("scheduler", "blocks")}
    right = (*right, *((None,) if option in some["none"] else ()))
    only_accepts(lambda value: Sampler(denoiser, **cast(Any, {option: value})), *right)


def test_noise_is_an_object_with_all_methods() -> None:
    Sampler(toys.denoiser(), noise=CounterNoise())
    with refused("option-type: noise"):
        Sampler(toys.denoiser(), noise=cast(Any, CounterNoise))
    with refused("option-type: tokenizer"):
        Sampler(toys.denoiser(), tokenizer=cast(Any, 3))
    with refused("option-type: compat"):
        Sampler(toys.denoiser(), compat=cast(Any, 1))


ARGUMENTS: list[tuple[str, tuple[Any, ...]]] = [
    ("max_new_tokens", (3,)),
    ("block_length", (3, 10**30, None)),
    ("seed", (3, -1, 0)),
    ("samples", (3,)),
    ("stop_strings", ("x", [], ["x"], ())),
    ("forms", (None,)),
    ("prefix", ("x", "", [], ["x"], (), None)),
    ("suffix", ("x", "", [], ["x"], (), None)),
    ("pinned", ([], (), None)),
]


@each(("argument", "right"), ARGUMENTS)
def test_arguments_of_generate_and_generate_many(argument: str, right: tuple[Any, ...]) -> None:
    sampler = toys.sampler(temperature=1.0)
    short: Any = {"max_new_tokens": 2}
    only_accepts(lambda value: sampler.generate([PROMPT], **{**short, argument: value}), *right)
    only_accepts(lambda value: list(sampler.generate_many([PROMPT], **{**short, argument: value})), *right)


@each(
    ("argument", "right"),
    [("batch_size", (3,)), ("max_length", (3, 10**30, None)), ("order", ()), ("on_error", ()), ("batching", ())],
)
def test_arguments_of_generate_many(argument: str, right: tuple[Any, ...]) -> None:
    sampler = toys.sampler()
    only_accepts(
        lambda value: list(sampler.generate_many([[1]], max_new_tokens=2, **cast(Any, {argument: value}))), *right
    )


def test_progress_is_called() -> None:
    with refused("function-invalid"):
        toys.sampler().generate(PROMPT, max_new_tokens=2, progress=cast(Any, 3))


@each("prompt", [b"x", bytearray(b"x"), memoryview(b"x"), [True], [1, False], 1.5, {}])
def test_prompts(prompt: Any) -> None:
    sampler = toys.sampler()
    for given in (prompt, [PROMPT, prompt]):
        with refused("prompt-type"):
            sampler.generate(given, max_new_tokens=4)
    for tensor in (torch.ones(3, dtype=torch.bool), torch.ones(3, dtype=torch.complex64)):
        with refused("prompt-type: prompt 1, 1-D"):
            sampler.generate(tensor, max_new_tokens=4)


def test_texts_that_are_no_unicode() -> None:
    sampler, bad = toys.sampler(), "a\udc80"
    for prompt, prefix in ((bad, None), (PROMPT, bad), (Infill(bad + "{gap:2}"), None)):
        with refused("text-invalid"):
            sampler.generate(prompt, prefix=prefix, max_new_tokens=4)


@each("seed", [True, [True], b"x", "3"])
def test_seeds(seed: Any) -> None:
    with refused("option-type: seed"):
        toys.sampler().generate([PROMPT], seed=seed, max_new_tokens=4)


KINDS = {"float": float, "int": int, "bool": bool, "str": str}


@pytest.mark.parametrize("group", config.GROUPS[1:])
def test_fields_of_plug_ins_from_python_and_from_settings(group: str, subtests: pytest.Subtests) -> None:
    """A constructor, `Sampler` or `config.build` refuses all that is not of the field's type."""
    for name in config.names(group):
        given = dict(config.entry(group, name).settings)
        if (target := given.pop("_target_", None)) is None:
            continue
        cls: Any = resolve(target)
        own = {**given, "inner": config.build(group, given["inner"])} if "inner" in given else given
        for field in (one for one in fields(cls) if one.init):
            with subtests.test(f"{name}.{field.name}"):
                hint = str(getattr(field.type, "__name__", field.type))
                kind = KINDS.get(hint.removesuffix(" | None"))
                ways = (partial(dict, given, name=name), partial(cls, **own))
                for turn, value in enumerate(WRONG, len(field.name)):  # by turns
                    try:
                        config.build(group, ways[turn % 2](**{field.name: value}))
                    except UserError:
                        continue
                    whole = kind is float and type(value) is int
                    assert kind is None or value is None or whole or type(value) is kind, (value, hint)


def test_a_wrong_field_of_an_object_is_named() -> None:
    with refused("option-type: scheduler.threshold=true"):
        Sampler(toys.denoiser(), scheduler=wrongly(Threshold(), threshold=True))
    with refused("option-type: scheduler.inner, 'fixed'"):
        FreeDave(inner=cast(Any, "fixed"))


def wrongly(plugin: Any, **values: Any) -> Any:
    """A plug-in whose constructor does not look at its fields."""
    vars(plugin).update(values)
    return plugin


@each(
    ("word", "said"),
    [
        ("entropy=x", "option-unknown: 'entropy'"),
        ("compat=1", "option-type: compat"),
        ("seed=true", "option-type: seed"),
        ("samples=2000000", "option-range: samples"),
        ("batch_size=2000000", "option-range: batch_size"),
        ("hydra.run.dir=", "option-reserved: hydra.run.dir="),
        ("model.trust_remote_code=3", "option-type: trust_remote_code"),
        ("+model.revison=main", "field-unknown: 'revison', 'revision'"),
        ("model.mask_id=true", "option-type: mask_id"),
    ],
)
def test_words(word: str, said: str) -> None:
    with refused(said):
        settings([word])


def test_a_revision_of_a_folder(checkpoint: Path) -> None:
    for what in (
        lambda: settings([f"model={checkpoint}", "model.revision=main"]),
        lambda: Sampler.from_pretrained({"path": str(checkpoint), "revision": "main"}),
        lambda: settings(["model.revision=main"]),
    ):
        with refused("option-not-applicable: revision=main"):
            what()
    assert config.model({"path": "org/name", "revision": "main"})["revision"] == "main"


@each("device", [1.5, [], {}, object(), True, 10**30])
def test_devices(device: Any) -> None:
    with refused("choice-unknown"):
        Sampler.from_pretrained("mini", device=device)


@each("model", [3, None, [], b"mini", object()])
def test_models(model: Any) -> None:
    with refused("model-invalid"):
        Sampler.from_pretrained(model)


def test_settings_of_no_model() -> None:
    with refused("option-missing"):
        Sampler.from_pretrained({})


@each("name", ["eos_token_id", "mask_token_id", "pad_token_id"])
@each("value", [True, "2", 1.5, [True], {}])
def test_token_ids_of_a_checkpoint(name: str, value: Any, checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, name: value}))
    with refused(f"checkpoint-config-invalid: /config.json, {name}"):
        load(tmp_path)


@each("name", ["mask_token_id", "pad_token_id"])
def test_tokens_that_are_a_list(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """Texts may end in several tokens, and no other token may be several."""
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, name: [raw[name], 1]}))
    with refused(f"checkpoint-config-invalid: /config.json, {name}"):
        load(tmp_path)


@each("file", ["config.json", "generation_config.json"])
def test_a_mask_that_ends_texts(file: str, checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "mask_token_id": raw["eos_token_id"]}))
    (tmp_path / file).write_text(json.dumps({**raw, "mask_token_id": raw["eos_token_id"]}))
    with refused("mask-token-invalid: /config.json, mask_token_id"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "mask_token_id": None}))
    with refused("mask-token-invalid: model.mask_id"):
        load(tmp_path, mask_id=raw["eos_token_id"])


def test_a_mask_that_ends_texts_in_python() -> None:
    with refused("mask-token-invalid: mask_id, eos_id"):
        Sampler(TransformerDenoiser(toys.transformer(), mask_id=2, eos_id=2))


@each("dtype", [torch.int32, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_no_floating_point_numbers(dtype: torch.dtype, checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(one for one in tensors if tensors[one].dim() == 2)
    save_file({**tensors, name: tensors[name].to(dtype)}, tmp_path / "model.safetensors")
    with refused("checkpoint-unsupported: model.safetensors"):
        load(tmp_path)


@each("kind", ["bert", "deer"])
def test_neither_does_a_model_of_transformers_have_others(kind: str, tmp_path: Path) -> None:
    """Its positions are integers, and no weights."""
    if kind == "bert":
        sizes: Any = {
            "vocab_size": 20,
            "hidden_size": 16,
            "intermediate_size": 16,
            "mask_token_id": 3,
            "eos_token_id": 1,
        }
        model: Any = BertForMaskedLM(BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0))
        read: Callable[[], object] = lambda: load(tmp_path)  # noqa: E731
    else:
        model, spec = toys.verifier(), toys.denoiser().spec
        read = lambda: autoregressive.load(str(tmp_path), spec)  # noqa: E731
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["bert.embeddings.position_ids"] = torch.arange(512)[None]  # as older files have
    file, head = tmp_path / "model.safetensors", {"format": "pt"}
    save_file(tensors, file, head)
    read()
    name = next(one for one in tensors if "layer" in one and tensors[one].dim() == 2)
    for stored in (name, name.partition(".")[2]):  # with and without the prefix of the base model
        save_file({key: one for key, one in tensors.items() if key != name} | {stored: tensors[name].int()}, file, head)
        with refused(f"checkpoint-unsupported: {stored}, I32"):
            read()


@each(
    ("prompt", "given"),
    [
        ("\ud800", {}),
        ([{"role": "user", "content": "\ud800"}], {}),
        ("copy: Ada", {"prefix": "\ud800"}),
        ("copy: Ada", {"suffix": "\ud800"}),
    ],
)
def test_half_a_character(prompt: Any, given: dict[str, Any]) -> None:
    sampler = Sampler.from_pretrained("mini", device="cpu")
    with refused("text-invalid"):
        sampler.generate(prompt, max_new_tokens=4, **given)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            "temprature",
            "unknown option 'temprature'. Did you mean 'temperature'?",
        ),
        (
            "max_new_token",
            "unknown option 'max_new_token'. Did you mean 'max_new_tokens'?",
        ),
        ("temp", "unknown option 'temp'. Did you mean 'temperature'?"),
        ("p", '\'p\' is a setting of a plug-in. Write guide={"name": "NAME", "p": 1}, where NAME is top_p.'),
        (
            "relaxed",
            '\'relaxed\' is a setting of a plug-in. Write scheduler={"name": "NAME", "relaxed": 1}, where'
            " NAME is localleap.",
        ),
        ("option", "unknown option 'option'."),
        ("order", "'order' is an option of generate_many, not of this call. Pass it to generate_many."),
    ],
)
def test_an_option_that_does_not_exist(option: str, said: str) -> None:
    if said.startswith("unknown"):
        said += " The options are in the docstring of Sampler."
    for call in (lambda **given: toys.sampler().generate([1], **given), lambda **given: toys.sampler().using(**given)):
        with pytest.raises(TypeError, match=f"^{re.escape(said)}$"):
            call(**{option: 1})
    if option == "temprature":
        with pytest.raises(TypeError, match=f"^{re.escape(said)}$"):
            Sampler.from_pretrained("mini", **{option: 1})  # type: ignore[arg-type]
