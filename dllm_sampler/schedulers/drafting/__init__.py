"""Draft and verify with one model: a scheduler runs several steps ahead, and one forward checks them all.

`run_ahead` runs the inner scheduler on states that may never come true, `candidates` makes a query of what it drafts,
`scheduler` drafts and verifies, `pace` says how many candidates a forward takes. The published methods are
`schedulers.freedave` and `schedulers.ssd`. `verify` has a block-causal model verify a draft at block size 1, `routing`
says which drafts are worth it (`schedulers.s2d2`).
"""
