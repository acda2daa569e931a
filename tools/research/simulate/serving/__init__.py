"""Engines that serve requests, simulated step by step, behind the routing policies that the daemon runs."""
