"""One of the tests of diffusers' pipelines; the others are slow, and importing them takes seconds."""


def test_the_pipeline_decides_as_sampler_does() -> None:
    from tests.integrations.test_diffusers import PROMPTS, check

    check({"name": "threshold"}, PROMPTS[:1], None)
