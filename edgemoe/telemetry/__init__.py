"""Probes, metrics and the routing recorder."""
