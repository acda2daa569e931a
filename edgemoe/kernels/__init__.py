"""Compiled CPU kernels for decode-sized batches."""
