"""Nouns that several rooms share, by subject, and the protocols between rooms. Imports nothing of ours."""
