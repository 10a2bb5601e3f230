"""The contract of plug-ins, checked on small networks: `python -m dllm_sampler.check scheduler=NAME`.

`promises` has what every plug-in must keep, `reads` finds reads of the device, and `settings` and `toys` have what they
are tried on. The tests of this package run the same code.
"""
