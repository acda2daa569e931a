"""Which experts are needed next, and what is prefetched for that."""
