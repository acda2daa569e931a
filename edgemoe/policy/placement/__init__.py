"""Which box keeps which expert, for boxes that serve one model together.

A `PlacementProblem` goes in, a `Placement` comes out, of every policy: `uniform`, `redundance`, `smartmoe`, `eplb`,
`prism`, its letter `published`, `exact` and `rendezvous`. `score` judges them. Modules that import Numba say so; the
front imports none of them.
"""
