"""The leader's part in routing: which engine takes an offered request."""
