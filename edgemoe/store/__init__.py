"""Packed stores: files and manifest, reading and verifying, packing a checkpoint, and the catalog of local stores."""
