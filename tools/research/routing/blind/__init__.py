"""Daemons whose leader routes without a part of what it knows, for comparison with those that know it."""
