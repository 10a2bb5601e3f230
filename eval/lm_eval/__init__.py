"""lm-evaluation-harness with our sampler as its model: `python -m dllm_sampler.eval.lm_eval`, its own arguments."""
