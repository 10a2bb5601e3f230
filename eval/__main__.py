"""`python -m dllm_sampler.eval` is `dllm-eval`, for `accelerate launch -m dllm_sampler.eval`."""

import sys

from dllm_sampler.eval.command import main

sys.exit(main())
