"""The bodies and answers of each endpoint."""
