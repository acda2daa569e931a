"""Placements: from the boxes' reports to a solved plan, in processes beside the loop that renews the lease."""
