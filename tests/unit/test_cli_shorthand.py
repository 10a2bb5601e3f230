"""Fields of guides without the guide's name."""

import pytest

from dllm_sampler import UserError
from dllm_sampler.cli.compose import settings
from dllm_sampler.eval.jobs import jobs


@pytest.mark.parametrize(
    ("words", "long"),
    [
        (["guide=regex", "guide.pattern=[a-c]{2}|x"], ["guide.regex.pattern=[a-c]{2}|x"]),
        (["guide=choices", "guide.choices=[up, no]"], ["guide.choices.choices=[up, no]"]),
        (["guide.grammar=json", "guide=grammar"], ["guide.grammar.grammar=json"]),
        (['guide.schema={"type": "integer"}', "guide=json_schema"], ['guide.json_schema.schema={"type": "integer"}']),
        (
            ["guide=[temperature, regex]", "guide.value=0.5", "guide.posterior=true"],
            ["guide.temperature.value=0.5", "guide.regex.posterior=true"],
        ),
        (["guide=choices", "guide.choices={choices: [a, b]}"], ["guide.choices.choices=[a, b]"]),
    ],
)
def test_a_field_of_the_one_guide_that_has_it(words: list[str], long: list[str]) -> None:
    guide = next(word for word in words if word.startswith("guide="))
    assert settings(words) == settings([guide, *long]) != settings([guide])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["guide=[choices,regex]", "guide.posterior=true"], "say guide.choices.posterior or guide.regex.posterior"),
        (["guide=regex", "guide.patern=a"], "unknown field of guide=regex 'patern', did you mean 'pattern'?"),
        (["guide=[regex,top_k]", "guide.meassured=a"], "unknown field of guide 'meassured', did you mean 'measured'?"),
        (["guide=regex", "guide.regx=a"], "unknown guide 'regx', did you mean 'regex'?"),
        (["guide=[regex,top_k]", "guide.topk.k=3"], "unknown guide 'topk', did you mean 'top_k' or"),
        (["guide=regx", "guide.pattern=[A-C][a-z]+"], "unknown guide 'regx', did you mean 'regex'?"),
        (
            ["guide=regex", "guide.patern=[A-C][a-z]+"],
            r"did you mean 'pattern'\? \(the fields are pattern, posterior\)",
        ),
        (["guide=json_schema", 'guide.shema={"type": "integer"}'], "unknown field .*'shema', did you mean 'schema'"),
        (["guide=regex,choices", "guide.pattern=[A-C][a-z]+"], "guide=regex,choices gives several values"),
        (["guide.pattern=[A-C][a-z]+"], "those that have it are guide=regex"),
        (["scheduler=klass(0.9)"], r"cannot read the override scheduler=klass\(0.9\): quote its value"),
        (["guide=[regex,choices"], r"cannot read the override guide=\[regex,choices: quote each text"),
        (["guide=", "guide.pattern=[A-C][a-z]+"], "unknown guide '': the choices are"),
        (["guide=choices", "guide.choices=[Ada, Ben"], "cannot read the override guide.choices.choices=\\[Ada, Ben: "),
        (["guide=rexeg", "guide.pattern=a"], "unknown guide 'rexeg', did you mean 'regex'"),
        (["guide.pattern=a"], "guide=regex"),
    ],
)
def test_what_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        settings(words)


def test_sweeps() -> None:
    """A value of several for `dllm-eval`; the pattern is one value whatever its signs."""
    found = jobs(["task=copy", "guide=regex", "guide.pattern=[a-c],{2}x", "guide.posterior=true,false"])
    guides = [job.plugins["guide"] for job in found]
    assert [one[0]["posterior"] for one in guides] == [True, False]  # type: ignore[index]
    assert {one[0]["pattern"] for one in guides} == {"[a-c],{2}x"}  # type: ignore[index]
