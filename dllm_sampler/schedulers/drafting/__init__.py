"""Draft and verify with one model: a scheduler runs several steps ahead, and one forward checks them all.

`run_ahead` runs the inner scheduler on drafted states, and `candidates` makes them the candidates of a query.
`scheduler` drafts and verifies, and `pace` limits the candidates of a forward. The published methods are
`schedulers.freedave` and `schedulers.ssd`. In `verify` a block-causal model verifies a draft at block size 1, and
`routing` decides which drafts are verified (`schedulers.s2d2`).
"""
