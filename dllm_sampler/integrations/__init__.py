"""Schedulers of this package in other inference engines: SGLang and diffusers."""

COMMAND = "python -m dllm_sampler.integrations"
