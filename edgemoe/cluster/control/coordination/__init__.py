"""What boxes must agree on, kept by one box, an embedded Raft or etcd."""
