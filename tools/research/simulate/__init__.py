"""Clusters of many boxes, simulated event by event on the placement policies that the daemon runs."""
