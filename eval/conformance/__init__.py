"""Conformance: published decoders' recorded runs, made again by our plug-ins and compared token for token.

`python -m dllm_sampler.eval.conformance DIR` is the command line. `lines` reads trace files, `systems` is the table of
what can be replayed, `replay` makes the runs and reports, `compare` is the match rule, `published` holds the quirks
of published code as plug-ins.
"""
