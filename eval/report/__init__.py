"""One page that says what runs found: `dllm-report`."""
