"""Draft and verify with one model: a scheduler runs several steps ahead, and one forward checks them all.

`run_ahead` runs the inner scheduler on states that may never come true, `candidates` makes a query of what it drafts,
`scheduler` drafts and verifies, `pace` says how many candidates a forward takes. The published methods are
`schedulers.freedave` and `schedulers.ssd`.
"""
