"""The choice of the next tokens."""
