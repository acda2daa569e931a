"""Where experts are: slabs of slots, who is evicted, residency."""
