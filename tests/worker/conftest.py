"""Links residency's compiled functions once."""

from support.linked import residency_is_linked

__all__ = ["residency_is_linked"]
