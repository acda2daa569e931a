"""Runs unbounded work in child processes that answer one question at a time, and shares places fairly."""
