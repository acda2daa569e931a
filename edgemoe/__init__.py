"""edgemoe serves Mixture-of-Experts language models larger than the memory of the box they run on."""

__version__ = "0.1.0"
