"""A model of the hub becomes a store: shards are fetched one by one, verified, packed and deleted."""
