"""The contract of plug-ins, checked on small networks: `python -m dllm_sampler.check scheduler=NAME`.

`promises` has the promises of every plug-in, and `reads` finds reads of the device. `settings` and `toys` have the
settings and the networks for the checks. The tests of this package run the same code.
"""
