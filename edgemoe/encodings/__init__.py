"""Encodes matrices, and decodes them: what every kernel must agree with."""
