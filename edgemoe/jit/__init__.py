"""Compiles functions of numbers and addresses to machine code, keeps it on disk, and runs it on several threads."""
