"""Fields of guides without the guide's name."""

from dllm_sampler.cli.compose import settings
from dllm_sampler.eval.jobs import jobs
from tests.refusals import refused
from tests.sampling import each


@each(
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


@each(
    ("words", "said"),
    [
        (
            ["guide=[choices,regex]", "guide.posterior=true"],
            "option-ambiguous: guide.choices.posterior, guide.regex.posterior",
        ),
        (["guide=regex", "guide.patern=a"], "field-unknown: guide=regex, 'patern', 'pattern'"),
        (["guide=[regex,top_k]", "guide.meassured=a"], "field-unknown: 'meassured', 'measured'"),
        (["guide=regex", "guide.regx=a"], "choice-unknown: 'regx', 'regex'"),
        (["guide=[regex,top_k]", "guide.topk.k=3"], "choice-unknown: 'topk', 'top_k'"),
        (["guide=regx", "guide.pattern=[A-C][a-z]+"], "choice-unknown: 'regx', 'regex'"),
        (["guide=regex", "guide.patern=[A-C][a-z]+"], "field-unknown: 'pattern'"),
        (["guide=json_schema", 'guide.shema={"type": "integer"}'], "field-unknown: 'shema', 'schema'"),
        (["guide=regex,choices", "guide.pattern=[A-C][a-z]+"], "option-repeated: guide=regex"),
        (["guide.pattern=[A-C][a-z]+"], "field-unknown: guide=regex"),
        (["scheduler=klass(0.9)"], "option-syntax: scheduler=klass"),
        (["guide=[regex,choices"], "option-syntax: guide=[regex"),
        (["guide=", "guide.pattern=[A-C][a-z]+"], "choice-unknown: end_tokens"),
        (["guide=choices", "guide.choices=[Ada, Ben"], "option-syntax: guide.choices.choices=[Ada"),
        (["guide=rexeg", "guide.pattern=a"], "choice-unknown: 'rexeg', 'regex'"),
        (["guide.pattern=a"], "field-unknown: guide=regex"),
    ],
)
def test_what_is_refused(words: list[str], said: str) -> None:
    with refused(said):
        settings(words)


def test_sweeps() -> None:
    """A value of several for `dllm-eval`; the pattern is one value whatever its signs."""
    found = jobs(["task=copy", "guide=regex", "guide.pattern=[a-c],{2}x", "guide.posterior=true,false"])
    guides = [job.plugins["guide"] for job in found]
    assert [one[0]["posterior"] for one in guides] == [True, False]  # type: ignore[index]
    assert {one[0]["pattern"] for one in guides} == {"[a-c],{2}x"}  # type: ignore[index]
