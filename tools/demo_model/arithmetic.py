"""Lines of arithmetic in words and numbers, for the demo model's corpus."""

from __future__ import annotations

import random


def line(rng: random.Random) -> str:
    top = rng.choice((10, 20, 100, 100, 1000))
    a, b = rng.randrange(top), rng.randrange(top)
    match rng.randrange(6):
        case 0 | 1:
            return f"{a} + {b} = {a + b}"
        case 2:
            return f"{max(a, b)} - {min(a, b)} = {abs(a - b)}"
        case 3:
            a, b = rng.randrange(13), rng.randrange(13)
            return f"{a} * {b} = {a * b}"
        case 4:
            a, b = rng.randrange(1, 13), rng.randrange(1, 13)
            return f"{a * b} / {a} = {b}"
        case _:
            sign = "<" if a < b else ">" if a > b else "="
            return f"{a} {sign} {b}"


def sequence(rng: random.Random) -> str:
    start, step = rng.randrange(50), rng.randrange(1, 12)
    return ", ".join(str(start + step * i) for i in range(rng.randrange(6, 14)))


def document(rng: random.Random) -> str:
    """Returns about 20 lines of sums, or of sequences."""
    make = sequence if rng.random() < 0.2 else line
    return "\n".join(make(rng) for _ in range(rng.randrange(12, 28)))
