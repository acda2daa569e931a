"""Compiled CPU kernels: for decode-sized batches, and for the experts and the attention of prompts."""
