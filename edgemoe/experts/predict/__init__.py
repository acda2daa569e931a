"""Predicts the experts that are needed next, and plans prefetches."""
