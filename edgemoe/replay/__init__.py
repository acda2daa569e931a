"""`edgemoe replay`: routing traces through the cache policies that also run live."""
