"""Encodes and decodes matrices: the reference for every kernel."""
