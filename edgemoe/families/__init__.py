"""What a model is: one table of supported families, one frozen record per model. Imports no torch."""
