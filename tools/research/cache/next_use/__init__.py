"""Training of the next-use network."""
