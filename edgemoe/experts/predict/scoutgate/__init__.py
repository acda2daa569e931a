"""ScoutGate in the engine: its network, its export and the forecaster that uses them."""
