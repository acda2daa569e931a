"""Where waiting requests run: offers and what is known of engines in, assignments out.

`offers` has the nouns and what a `RoutingPolicy` is, `dispatches` corrects reports by what was dispatched since.
Policies that push place every offer at once; those that pull leave what no engine has room for.
"""
