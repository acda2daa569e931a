"""Handles every request alike: bodies, keys, origins, answers, clients that hang up, counts."""
