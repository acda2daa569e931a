"""Studies of expert caches: other policies, replays of recorded routing, the trained next-use network."""
