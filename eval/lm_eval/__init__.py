"""A model for lm-evaluation-harness that answers with a sampler: `python -m dllm_sampler.eval.lm_eval`."""
