"""Items of different weight into packs with so many slots each, so that the packs weigh alike [EPLB]."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgemoe.types.arrays import IntArray


def pack(weight: npt.NDArray[np.float64], slots: IntArray) -> list[IntArray]:
    """Returns what each pack gets, in the order in which it got it: the heaviest first, to the lightest with a slot.

    How light a pack is counts in proportion to its slots. Where each has one, they get one after the other.
    """
    if (slots == 1).all():
        return list(np.arange(len(weight))[:, None])
    members: list[list[int]] = [[] for _ in slots]
    total, left = np.zeros(len(slots)), slots.copy()
    share = slots / max(1, slots.max())
    for item in np.argsort(-weight, kind="stable"):
        best = int(np.argmin(np.where(left > 0, total / np.maximum(share, 1e-300), np.inf)))
        members[best].append(int(item))
        total[best] += weight[item]
        left[best] -= 1
    return [np.array(each, np.int64) for each in members]


def shares(number: int, room: IntArray) -> IntArray:
    """Returns a number divided in proportion to room [n], at most that each; the largest remainders are rounded up."""
    exact = number * room / max(1, room.sum())
    answer: IntArray = np.floor(exact).astype(np.int64)
    answer[np.argsort(answer - exact, kind="stable")[: number - int(answer.sum())]] += 1
    return answer
