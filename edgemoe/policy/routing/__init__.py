"""Routing policies: pure functions of offers and engine views to assignments.

`offers` has the nouns and the `RoutingPolicy` protocol. `RecentDispatches` corrects reports by later assignments.
Push policies place every offer at once; pull policies leave the offers that no engine has room for.
"""
