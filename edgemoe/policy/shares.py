"""Limits one holder's share of a bounded room to a multiple of the free room (Choudhury and Hahne 1998).

So room always remains for the next holder: one alone has at most SHARE / (SHARE + 1) of it all.
"""

from __future__ import annotations

OF_PRINCIPAL = 4  # times the free room: 4/5 of all for one alone, 4/9 for each of two
OF_USER = 16  # times the room that is free to its principal


def fits(wanted: int, held: int, free: int, share: int = OF_PRINCIPAL) -> bool:
    """Whether a holder of `held` may take `wanted` more, at once or in parts."""
    return wanted <= free and held + wanted <= share * (free - wanted + 1)


def most_of(room: int, share: int = OF_PRINCIPAL) -> int:
    """Returns the largest share of an empty room that one holder may have."""
    return share * (room + 1) // (share + 1)


def left_of(held: int, free: int) -> int:
    """Returns how much more a principal that holds `held` may take."""
    return max(0, min(free, (OF_PRINCIPAL * (free + 1) - held) // (OF_PRINCIPAL + 1)))
