"""Draft and verify with one model: a scheduler runs several steps ahead, and one forward checks them all.

`scheduler` drafts and verifies, `candidates` makes drafts the candidates of a query, and `pace` limits the candidates
of a forward. The published methods are `schedulers.freedave` and `schedulers.ssd`. `routing` decides which drafts are
verified (`schedulers.s2d2`). `forks` are the candidates of `schedulers.lopa`.
"""
