"""The control plane of a cluster: membership, leadership, the placement plan, and requests offered to the leader."""
