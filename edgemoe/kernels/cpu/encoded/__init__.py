"""Kernels for weights of 4 and 8 bits: they multiply what they decode in registers."""
