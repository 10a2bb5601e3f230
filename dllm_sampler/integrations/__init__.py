"""Schedulers inside other engines: what decides over a block of tokens here, decides over it there."""

COMMAND = "python -m dllm_sampler.integrations"
