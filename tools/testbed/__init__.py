"""Several boxes on one machine: namespaces, links with a rate, limits, faults, daemons."""
