"""Streams text from the daemon: `edgemoe chat` and `edgemoe generate`."""
