"""Processes that answer one question at a time, so that what may take long, or too much memory, can be ended."""
