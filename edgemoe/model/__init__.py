"""The decoder of the supported families, and the loading of its dense weights."""
