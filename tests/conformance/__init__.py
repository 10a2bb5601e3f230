"""Replays of recorded runs of published decoders, and eager loops written from their description.

`python -m tests.conformance DIR` replays traces and compares them token for token. `lines` reads trace files. `systems`
is the table of what can be replayed. `replay` makes the runs and reports, and `compare` is the match rule. The quirks
of published code are plug-ins in `dllm_sampler.published`.
"""
