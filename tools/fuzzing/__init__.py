"""Hostile but well-formed input for every door of a daemon, made from the types that the door reads."""
