"""The command `dllm-sample`."""
