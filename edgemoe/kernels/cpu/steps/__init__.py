"""Kernels that run whole layers, and whole steps, of single new tokens."""
