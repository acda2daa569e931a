"""From what boxes report to a placement: solved in a process of its own, beside the loop that renews the lease."""
