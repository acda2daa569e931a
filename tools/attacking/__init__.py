"""Attacks on a running daemon by clients with and without a key, while a victim's stream is measured.

`with_key` holds bodies, `without_key` a small function an attack.
"""
