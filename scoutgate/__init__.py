"""ScoutGate: forecasts which experts a Mixture-of-Experts model will choose, from what was said last.

`model` needs torch only and is all that the engine imports; the rest trains, judges and exports (extra: train).
"""
