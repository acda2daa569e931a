"""Exchanges the experts of a layer between devices, so that fewer pairs chosen together lie on one device."""

from __future__ import annotations

import numpy as np

from edgemoe.jit.intrinsics import INT, f32_at, i64_at, record
from edgemoe.jit.object_cache import code
from edgemoe.types.arrays import fields

# * `experts` the number of `stride` that exist
# * `pairs` [stride, stride] float32, each in one of its two places or both
# * `device` [stride] of each expert
# * `together` [stride, devices] float32, scratch memory
# * `most` exchanges; `least` [1] float32, the least gain of one
SPREADING = fields("experts", "stride", "devices", "pairs", "device", "together", "most", "least")


@code(INT, result=INT)
def SPREAD(call: int) -> int:
    """Exchanges experts of a layer between devices while that leaves fewer pairs on one. Returns how often."""
    r = record(call, SPREADING)
    n, stride, devices = r.experts, r.stride, r.devices
    pairs, device, together = f32_at(r.pairs), i64_at(r.device), f32_at(r.together)
    within = np.float32(0)
    for i in range(n):
        for d in range(devices):
            together[i * devices + d] = 0
        for j in range(n):
            if i != j:
                together[i * devices + device[j]] += pairs[i * stride + j] + pairs[j * stride + i]
        within += together[i * devices + device[i]]
    least = f32_at(r.least)[0] * within * np.float32(0.5)
    for exchanged in range(r.most):
        best, a, b = least, -1, -1
        for i in range(n):
            for j in range(i + 1, n):
                x, y = device[i], device[j]
                if x != y:
                    gain = together[i * devices + x] - together[i * devices + y]
                    gain += together[j * devices + y] - together[j * devices + x]
                    gain += np.float32(2) * (pairs[i * stride + j] + pairs[j * stride + i])
                    if gain > best:
                        best, a, b = gain, i, j
        if a < 0:
            return exchanged
        x, y = device[a], device[b]
        for i in range(n):
            if i != a:
                both = pairs[i * stride + a] + pairs[a * stride + i]
                together[i * devices + x] -= both
                together[i * devices + y] += both
            if i != b:
                both = pairs[i * stride + b] + pairs[b * stride + i]
                together[i * devices + y] -= both
                together[i * devices + x] += both
        device[a], device[b] = y, x
    return r.most  # type: ignore[no-any-return]


CODES = (SPREAD,)
