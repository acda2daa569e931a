"""The agreement between boxes on leader, epoch and plan: kept by one box, an embedded Raft, or etcd."""
