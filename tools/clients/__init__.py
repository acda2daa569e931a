"""Runs real clients of the API, unchanged, against a daemon with the demo model: `python -m tools.clients`."""
