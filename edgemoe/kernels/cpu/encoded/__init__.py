"""Kernels for weights of 4 and 8 bits, which are decoded in registers and multiplied there."""
