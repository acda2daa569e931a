"""What every request has in common: bodies, the key, events, hanging up, metrics."""
