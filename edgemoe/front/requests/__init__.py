"""Requests of this front: who waits for them, and where they are to run."""
