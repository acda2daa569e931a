"""What the leader decides for requests: which engine takes one that waits."""
