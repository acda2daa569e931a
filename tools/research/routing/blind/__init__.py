"""Daemons whose leader routes without a part of its knowledge, for comparison with the complete rule."""
