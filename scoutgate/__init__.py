"""ScoutGate: forecasts the experts that a Mixture-of-Experts model will choose, from its last tokens.

The engine has its own `scoutgate_model`; this package trains, judges and exports (extra: train).
"""
