"""Describes models: one table of supported families, one frozen record per model. Imports no torch."""
