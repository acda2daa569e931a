"""Finds faults of this box and its settings, and names a remedy for each: `edgemoe doctor`."""
