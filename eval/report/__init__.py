"""Reports of the results of runs: `dllm-report`."""
