"""Hostile but well-formed input for every interface ("door") of a daemon, made from the types that it reads.

A door is a module of this package with `WHATS`, the names of its parts, and `fuzz(what, count, seed)`.
That returns counts for the report; "ok" among them says whether all went well.
"""
