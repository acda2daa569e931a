"""How much of a bounded room one may hold beside others: a multiple of what is left (Choudhury and Hahne 1998).

So there always is some for the next one: of SHARE times what is free, SHARE / (SHARE + 1) of all for one alone.
"""

from __future__ import annotations

OF_PRINCIPAL = 4  # times what is free: 4/5 of all for one alone, 4/9 for each of two
OF_USER = 16  # times what is free to its principal


def fits(wanted: int, held: int, free: int, share: int = OF_PRINCIPAL) -> bool:
    """Returns whether one who holds `held` may take `wanted` more, at once or one after the other."""
    return wanted <= free and held + wanted <= share * (free - wanted + 1)


def most_of(room: int, share: int = OF_PRINCIPAL) -> int:
    """Returns how much of an empty room one may hold."""
    return share * (room + 1) // (share + 1)


def left_of(held: int, free: int, share: int = OF_PRINCIPAL) -> int:
    """Returns how much more one who holds `held` may take."""
    return max(0, min(free, (share * (free + 1) - held) // (share + 1)))
