"""Options are declared once, in `dllm_sampler.options`; what repeats their names and defaults says the same."""

from dataclasses import fields
from inspect import signature

from dllm_sampler import Sampler, config
from dllm_sampler.cli.options import Options as Sampling
from dllm_sampler.eval.jobs import Options as Evaluating
from dllm_sampler.eval.lm_eval.settings import Settings
from dllm_sampler.options import OF_SAMPLER, GenerateOptions, Options, SamplerOptions, check_options
from tests.refusals import refused
from tests.sampling import each

NOT_TYPED = {"max_new_tokens": 128}  # commands without a length take the task's


def test_the_signatures_of_sampler_have_the_declared_names_and_defaults() -> None:
    declared = {one.name: one.default for one in fields(Options)}
    init = {name: one.default for name, one in signature(Sampler).parameters.items()}
    assert {name for name in init if name not in ("denoiser", "tokenizer")} == set(SamplerOptions.__annotations__)
    assert {name: init[name] for name in OF_SAMPLER} == {name: declared[name] for name in OF_SAMPLER}
    for call in (Sampler.generate, Sampler.generate_many, Sampler.stream):
        for name, one in signature(call).parameters.items():
            if name in declared:
                assert one.default == NOT_TYPED.get(name, declared[name]), name
    assert set(GenerateOptions.__annotations__) - set(SamplerOptions.__annotations__) <= {
        *signature(Sampler.generate).parameters
    }


def test_the_default_plugins_are_those_of_the_commands() -> None:
    chosen = {name: one.default for name, one in signature(Sampler).parameters.items() if name in config.GROUPS}
    for root in ("sample", "eval"):
        assert {name: config.defaults(root)[name] for name in chosen} == {**chosen, "guide": "none"}


@each("command", [Sampling, Evaluating, Settings])
def test_every_option_of_a_command_is_explained(command: type) -> None:
    shared = {one.name for one in fields(Options)}
    assert shared <= {one.name for one in fields(command)}
    if command is not Settings:  # the harness has no help page
        assert all(one.metadata["about"] for one in fields(command))


@each(
    ("given", "message"),
    [
        ({"max_steps": 0}, "option-range: max_steps"),
        ({"compat": 1}, "option-type: compat"),
        ({"entropy": None}, "option-type: entropy"),
        ({"cuda_graph": 1}, "choice-unknown: cuda_graph"),
        ({"compile": "auto"}, "choice-unknown: 'auto'"),
        ({"backend": "cuda"}, "choice-unknown: 'cuda'"),
        ({"temperature": 2**31}, "option-range: 2147483647"),
    ],
)
def test_a_value_out_of_range_is_refused(given: SamplerOptions, message: str) -> None:
    with refused(message):
        check_options(given)
    with refused(message):
        Sampler.from_pretrained("mini", **given)
