"""Packed stores: files and manifest, reading and verifying, packing a checkpoint, the catalog of what is here."""
