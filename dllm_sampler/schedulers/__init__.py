"""Unmasking schedulers: one method, one file, one paper.

The docstring of each class begins with its rule as pseudo-code. Names in it are options of the scheduler, are defined
there, or mean the same everywhere:

    model(canvas)               a forward. The names on its left are its results for each queried position
    p, token                    the predicted distribution, and the token drawn from it (or the best one)
    confidence                  the probability of that token. The surest mask has the highest one
    score                       the statistic that the option score names
    masks                       positions of the active block that are not committed
    inner(canvas, prediction)   a step of the scheduler that this one is around
"""
